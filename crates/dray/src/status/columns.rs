//! Tables for a terminal: as wide as their fields, unless the terminal is narrower.

use std::os::fd::AsRawFd;

use super::status_table::line;
use crate::output::is_obeyed;

/// Fewest letters that are left of a field that is cut.
const CUT_MIN: usize = 12;
/// Stands for what is missing.
const MARK: char = '\u{2026}';
/// Between two columns, and before the first.
const GAP: &str = "  ";

/// A column of which something may be left out, by its head.
#[derive(Clone, Copy, Debug)]
pub enum ShortenedColumn<'a> {
    /// The beginnings of its fields, as of paths.
    Beginning(&'a str),
    /// The ends, as of names of hosts.
    End(&'a str),
}

/// What may be done to a table that is wider than the terminal.
#[derive(Clone, Copy, Debug, Default)]
pub struct ColumnLimits<'a> {
    /// Columns that are left out, in this order, as far as it takes.
    pub spare: &'a [&'a str],
    /// What is cut if that is not enough.
    pub cut: Option<ShortenedColumn<'a>>,
}

/// Letters in a line of the terminal that stdout is; none if it is none.
pub fn terminal() -> Option<usize> {
    // SAFETY: an all-zero winsize is a valid one; it outlives the call, which writes to it.
    let size = unsafe {
        let mut size: libc::winsize = std::mem::zeroed();
        let fd = std::io::stdout().as_raw_fd();
        (libc::ioctl(fd, libc::TIOCGWINSZ, &mut size) == 0).then_some(size)
    };
    size.map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// Columns as wide as their widest field, for a line of `room` letters. Nothing if there are no rows.
pub fn table(
    out: &mut String,
    room: Option<usize>,
    heads: &[&str],
    rows: impl Iterator<Item = Vec<String>>,
    give: ColumnLimits<'_>,
) {
    let mut lines = vec![heads.iter().map(|head| (*head).to_owned()).collect::<Vec<String>>()];
    lines.extend(rows.map(|row| row.iter().map(|field| printable(field)).collect()));
    if lines.len() == 1 {
        return;
    }
    let room = room.unwrap_or(usize::MAX);
    let mut left_out = Vec::new();
    for spare in give.spare {
        if total(&lines) <= room {
            break;
        }
        if let Some(index) = lines[0].iter().position(|head| head == spare) {
            lines.iter_mut().for_each(|row| drop(row.remove(index)));
            left_out.push(*spare);
        }
    }
    let over = total(&lines).saturating_sub(room);
    if let Some(cut) = give.cut.filter(|_| over > 0) {
        cut.make(&mut lines, over);
    }
    let widths: Vec<usize> = (0..lines[0].len()).map(|index| width(&lines, index)).collect();
    for row in &lines {
        let fields = row.iter().zip(&widths).map(|(field, width)| {
            field.clone() + &" ".repeat(width.saturating_sub(field.chars().count()))
        });
        line(out, &format!("{GAP}{}", fields.collect::<Vec<String>>().join(GAP)));
    }
    if !left_out.is_empty() {
        let names = left_out.join(", ");
        line(out, &format!("{GAP}left out: {names} (--json, or `dray status | less -S`)"));
    }
}

impl ShortenedColumn<'_> {
    /// Takes `over` letters away, as far as there is something to be taken.
    fn make(self, lines: &mut [Vec<String>], over: usize) {
        let (ShortenedColumn::Beginning(wanted) | ShortenedColumn::End(wanted)) = self;
        let Some(index) = lines[0].iter().position(|head| head == wanted) else { return };
        let most = width(lines, index).saturating_sub(over).max(CUT_MIN);
        for row in lines {
            let Some(field) = row.get_mut(index) else { continue };
            let letters = field.chars().count();
            if letters > most {
                *field = match self {
                    ShortenedColumn::Beginning(_) => {
                        format!(
                            "{MARK}{}",
                            field.chars().skip(letters + 1 - most).collect::<String>()
                        )
                    }
                    ShortenedColumn::End(_) => {
                        format!("{}{MARK}", field.chars().take(most - 1).collect::<String>())
                    }
                };
            }
        }
    }
}

fn width(lines: &[Vec<String>], index: usize) -> usize {
    lines
        .iter()
        .map(|row| row.get(index).map_or(0, |field| field.chars().count()))
        .max()
        .unwrap_or(0)
}

fn total(lines: &[Vec<String>]) -> usize {
    (0..lines[0].len()).map(|index| GAP.len() + width(lines, index)).sum()
}

/// Names of files and clients may contain anything; a terminal should not obey it.
fn printable(field: &str) -> String {
    field.chars().map(|c| if is_obeyed(c) { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(room: Option<usize>) -> String {
        let row = ["node1", "127.0.0.1:40000", "/a/very/long/path/to/some/file"];
        let mut out = String::new();
        let rows = [row.map(str::to_owned).to_vec()].into_iter();
        let give = ColumnLimits { spare: &["FROM"], cut: Some(ShortenedColumn::Beginning("PATH")) };
        table(&mut out, room, &["HOST", "FROM", "PATH"], rows, give);
        out
    }

    #[test]
    fn a_table_is_whole_where_there_is_room() {
        for room in [None, Some(80), Some(56)] {
            let text = drawn(room);
            assert!(
                text.contains("  node1  127.0.0.1:40000  /a/very/long/path/to/some/file\n"),
                "{text}"
            );
            assert_eq!(text.lines().count(), 2);
        }
    }

    #[test]
    fn a_narrow_terminal_gets_what_matters_and_the_names_of_the_rest() {
        let text = drawn(Some(55));
        assert!(
            text.contains("  node1  /a/very/long/path/to/some/file\n  left out: FROM"),
            "{text}"
        );
        let text = drawn(Some(30));
        assert!(text.contains("  node1  \u{2026}ng/path/to/some/file\n"), "{text}");
        assert!(text.lines().take(2).all(|line| line.chars().count() <= 30), "{text}");
        assert!(drawn(Some(1)).contains("  node1  \u{2026}o/some/file\n"));
        let mut lines = [vec!["H".to_owned()], vec!["node1.cluster.example".to_owned()]];
        ShortenedColumn::End("H").make(&mut lines, 5);
        assert_eq!(lines[1], ["node1.cluster.e\u{2026}"]);
    }

    #[test]
    fn no_rows_are_no_table() {
        let mut out = String::new();
        table(&mut out, Some(1), &["A"], std::iter::empty(), ColumnLimits::default());
        assert_eq!(out, "");
    }
}
