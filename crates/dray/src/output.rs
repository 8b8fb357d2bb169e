//! Printing. A reader that has closed its end of the pipe is no reason to panic.

use std::fmt::Display;
use std::io::Write;

use crate::error::{ErrorContext, Failure};

/// Prints to stdout. Errors: the disk is full, or nobody reads any more, which ends the command
/// without a word. A reader such as head(1) has what it wanted.
pub fn print(text: impl Display) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    match write!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(Failure::unheard()),
        result => result.doing(|| "cannot print".to_owned()),
    }
}

/// As [`print()`], a line, of which nothing is obeyed ([`plain`]).
pub fn print_line(text: impl Display) -> Result<(), Failure> {
    print(format_args!("{}\n", plain(&text.to_string())))
}

/// As [`print()`], a line of JSON. What a terminal would obey of it is escaped, as JSON has it: it
/// means the same to a program that parses it.
pub fn print_json(value: &serde_json::Value) -> Result<(), Failure> {
    print(json_line(value))
}

/// The line that [`print_json`] prints.
pub fn json_line(value: &serde_json::Value) -> String {
    let text = value.to_string();
    let mut line = String::with_capacity(text.len() + 1);
    for letter in text.chars() {
        match is_obeyed(letter) {
            true => letter
                .encode_utf16(&mut [0; 2])
                .iter()
                .for_each(|unit| line.push_str(&format!("\\u{unit:04x}"))),
            false => line.push(letter),
        }
    }
    line.push('\n');
    line
}

/// Says on stderr what went wrong; if nobody hears it, there is nobody to tell.
pub fn complain(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "dray: {}", plain_lines(&text.to_string()));
}

/// As [`plain`], for text of several lines.
fn plain_lines(text: &str) -> String {
    text.split('\n').map(plain).collect::<Vec<_>>().join("\n")
}

/// Whether a terminal does something else with a letter than to show it. That holds for controls,
/// separators of lines, and what changes the direction of the letters around it. The source is
/// Unicode Standard Annex 9, table 1 (also the deprecated U+206A to U+206F).
pub fn is_obeyed(letter: char) -> bool {
    let steers = matches!(
        letter,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{206f}'
    );
    letter.is_control() || steers
}

/// Text as it can be shown: what a terminal or a log would obey is spelled out. Names of
/// files and what other hosts say may hold anything.
pub fn plain(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        match is_obeyed(letter) {
            true => shown.extend(letter.escape_default()),
            false => shown.push(letter),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages name places that other users have chosen, such as those of their mounts.
    #[test]
    fn nothing_that_is_complained_of_is_obeyed() {
        assert_eq!(plain_lines("no\u{1b}[2J\n  ^ here\r"), "no\\u{1b}[2J\n  ^ here\\r");
    }

    #[test]
    fn nothing_shown_is_obeyed() {
        for steering in "\u{61c}\u{200e}\u{200f}\u{202a}\u{202e}\u{2066}\u{2069}\u{2028}".chars() {
            let shown = plain(&format!("a{steering}b"));
            assert_eq!(shown, format!("a\\u{{{:x}}}b", u32::from(steering)));
        }
        assert_eq!(plain("a\u{1b}[2J\nb \u{e4}\u{9b}"), "a\\u{1b}[2J\\nb \u{e4}\\u{9b}");
    }
}
