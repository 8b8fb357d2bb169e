//! Figures from a run: bars and lines as SVG, made by hand, and the tables of the README and of docs/PERFORMANCE.md.

mod bars;
mod lines;
mod parallel;

use std::fs;
use std::path::Path;

use crate::args::BenchArgs;
use crate::measure::read_all;
use crate::plot::bars::{ChartBar, Group, chart};
use crate::report::{GOALS, Goal, GoalVerdict, Measures, PEER_ROWS, parts_table, table, value};
use crate::{CommandResult, context};

/// Between these lines of the README its summary and its table are written.
const README: (&str, &str) = ("<!-- bench: begin -->", "<!-- bench: end -->");
/// Between these lines of docs/PERFORMANCE.md the targets are written.
const TARGETS_PAGE: (&str, &str) = ("<!-- performance: begin -->", "<!-- performance: end -->");
/// The same for the targets and rates of projections over several servers.
const PARALLEL_PAGE: (&str, &str) = ("<!-- parallel: begin -->", "<!-- parallel: end -->");

/// `plot --serial FILE --peers FILE --parallel FILE --figures DIR --readme FILE --performance FILE`. A file
/// of a benchmark that never ran is left out.
pub fn run(args: &BenchArgs) -> CommandResult {
    let figures = Path::new(args.need("figures")?);
    fs::create_dir_all(figures).map_err(context("figures"))?;
    let page = Path::new(args.need("performance")?);
    let mut block = String::new();
    if let Some(measures) = measures(args.need("serial")?)? {
        save(&figures.join("serial.svg"), &serial_chart(&measures))?;
        block.push_str(&summary(&measures));
        let parts = parts_table(&measures, &TRANSPORTS);
        let tables = format!("{}\n{parts}", targets_table(&measures));
        write_block(page, TARGETS_PAGE, &tables)?;
    }
    if let Some(measures) = measures(args.need("peers")?)? {
        save(&figures.join("peers.svg"), &peers_chart(&measures))?;
        block.push_str(&format!("\n{}", peers_table(&measures)));
    }
    if let Some(measures) = measures(args.need("parallel")?)? {
        for (name, chart) in parallel::charts(&measures) {
            save(&figures.join(name), &chart)?;
        }
        write_block(page, PARALLEL_PAGE, &crate::report::parallel_tables(&measures))?;
    }
    if block.is_empty() {
        return Err("there is no run to show: script/bench serial first".to_owned());
    }
    write_block(Path::new(args.need("readme")?), README, &block)
}

fn measures(path: &str) -> CommandResult<Option<Measures>> {
    match Path::new(path).exists() {
        true => read_all(path).map(|all| Some(Measures::new(all))),
        false => Ok(None),
    }
}

fn save(path: &Path, text: &str) -> CommandResult {
    fs::write(path, text).map_err(context(&path.display().to_string()))
}

/// Replaces what is between the markers. Errors: the page cannot be read or written, or has
/// no such markers.
fn write_block(page: &Path, markers: (&str, &str), block: &str) -> CommandResult {
    let name = page.display().to_string();
    let text = fs::read_to_string(page).map_err(context(&name))?;
    let text = with_block(&text, markers, block);
    save(page, &text.ok_or(format!("{name} has no `{}` to write behind", markers.0))?)
}

fn with_block(text: &str, markers: (&str, &str), block: &str) -> Option<String> {
    let (before, rest) = text.split_once(markers.0)?;
    let (_, after) = rest.split_once(markers.1)?;
    Some(format!("{before}{}\n{block}{}{after}", markers.0, markers.1))
}

const TRANSPORTS: [&str; 2] = ["classic", "uring"];

fn serial_chart(measures: &Measures) -> String {
    let rows = [
        ("read, one stream", "stream_read.mib_per_s"),
        ("write, one stream", "stream_write.mib_per_s"),
        ("read, four streams", "stream_read_j4.mib_per_s"),
        ("write, four streams", "stream_write_j4.mib_per_s"),
    ];
    let groups: Vec<Group> = rows
        .iter()
        .map(|(title, metric)| Group {
            title: (*title).to_owned(),
            bars: ["native", "tcp", "uring", "classic"]
                .iter()
                .filter_map(|arm| {
                    Some(ChartBar { arm: (*arm).to_owned(), value: measures.median(arm, metric)? })
                })
                .collect(),
        })
        .collect();
    chart("1 MiB requests, O_DIRECT, one machine of two cores", "MiB/s", &groups)
}

fn peers_chart(measures: &Measures) -> String {
    let arms = measures.arms();
    let groups: Vec<Group> = PEER_ROWS
        .iter()
        .filter(|row| !row.less_is_better)
        .map(|row| {
            let native = measures.median("native", row.raw).unwrap_or(1.0);
            let mounted = arms.iter().filter(|arm| **arm != "native");
            let bars = mounted.filter_map(|arm| {
                let value = measures.median(arm, row.raw)? / native;
                Some(ChartBar { arm: (*arm).to_owned(), value: value * 100.0 })
            });
            let title = row.title.split(',').next().unwrap_or(row.title);
            Group { title: row_title(title, row.name), bars: bars.collect() }
        })
        .collect();
    chart("against peers, all storing on the same tmpfs", "% of native tmpfs", &groups)
}

fn row_title(title: &str, name: &str) -> String {
    match name {
        "rand4k_t4" => "random 4 KiB read ×4".to_owned(),
        _ => title.to_owned(),
    }
}

/// How many of the targets were reached, in a sentence.
fn summary(measures: &Measures) -> String {
    let verdicts = |arm: &str| -> Vec<GoalVerdict> {
        let of = |(metric, _, target): &(&str, &str, Goal)| {
            Some(target.judge(of_transport(measures, arm, metric)?))
        };
        GOALS.iter().filter_map(of).collect()
    };
    let [classic, uring] = TRANSPORTS.map(verdicts);
    let met = |all: &[GoalVerdict]| all.iter().filter(|one| **one == GoalVerdict::Pass).count();
    format!(
        "Of {} targets this run met {} on the classic transport and {} over a ring (io_uring).\n",
        classic.len().max(uring.len()),
        met(&classic),
        met(&uring),
    )
}

/// What was measured of `arm`; of the server, what does not depend on the transport. What a run before this
/// program did not derive is derived from its medians.
fn of_transport(measures: &Measures, arm: &str, metric: &str) -> Option<f64> {
    let measured = measures.median(arm, metric).or_else(|| measures.median("server", metric));
    measured.or_else(|| value(measures, arm, metric))
}

/// The targets, what was measured, and whether they were reached.
fn targets_table(measures: &Measures) -> String {
    let mut rows = vec![vec!["metric".to_owned(), "unit".to_owned(), "target".to_owned()]];
    rows[0].extend(TRANSPORTS.iter().map(|arm| (*arm).to_owned()));
    for (metric, unit, target) in GOALS {
        let mut row = vec![metric.to_owned(), unit.to_owned(), target.text()];
        row.extend(TRANSPORTS.iter().map(|arm| match of_transport(measures, arm, metric) {
            Some(value) if target.judge(value) == GoalVerdict::Miss => {
                format!("{} (missed)", table::figure(value))
            }
            value => table::figure_or_dash(value),
        }));
        rows.push(row);
    }
    table::markdown(&rows)
}

fn peers_table(measures: &Measures) -> String {
    let arms = measures.arms();
    // The derived lines come first and name dray: native is put in front for reading.
    let mut columns: Vec<&str> = vec!["native"];
    columns.extend(arms.iter().filter(|arm| **arm != "native"));
    let mut rows = vec![vec!["median".to_owned()]];
    rows[0].extend(columns.iter().map(|arm| (*arm).to_owned()));
    for row in &PEER_ROWS {
        let mut cells = vec![row.title.to_owned()];
        let value = |arm: &&str| measures.median(arm, row.raw).map(|value| value * row.scale);
        cells.extend(columns.iter().map(|arm| table::figure_or_dash(value(arm))));
        rows.push(cells);
    }
    table::markdown(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Measure;

    #[test]
    fn only_what_is_between_the_markers_changes() {
        let text = format!("a\n{}\nold\n{}\nb\n", README.0, README.1);
        let new = with_block(&text, README, "new\n").unwrap();
        assert_eq!(new, format!("a\n{}\nnew\n{}\nb\n", README.0, README.1));
        assert_eq!(with_block(&new, README, "new\n").unwrap(), new);
        assert_eq!(with_block(&text, TARGETS_PAGE, "new"), None);
    }

    #[test]
    fn a_missed_target_is_shown_as_missed() {
        let line = |metric: &str, value| Measure {
            bench: "serial".into(),
            arm: "uring".into(),
            metric: metric.into(),
            value,
            unit: "x".into(),
            round: 0,
        };
        let measures = Measures::new(vec![
            line("rand4k_cpu_vs_sum", 1.4),
            line("create_cpu_vs_sum", 1.3),
            line("rand4k.per_s", 20_000.0),
            line("rand4k_j4.per_s", 60_000.0),
        ]);
        let text = summary(&measures);
        assert!(text.contains("Of 3 targets this run met 0 on the classic"), "{text}");
        assert!(text.contains("and 2 over a ring"), "{text}");
        let table = targets_table(&measures);
        let row = |name| table.lines().find(|row: &&str| row.contains(name)).unwrap();
        assert!(row("rand4k_cpu_vs_sum").contains("(missed)"), "{table}");
        assert!(row("create_cpu_vs_sum").contains("1.30") && !row("create_cpu").contains("missed"));
        assert!(row("rand4k_t4_vs_one").contains("3.00"), "{table}");
    }
}
