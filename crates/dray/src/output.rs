//! Printing: whoever reads may have gone, which is no reason to panic.

use std::fmt::Display;
use std::io::Write;

use crate::error::{Doing, Failure};

/// Prints to stdout. Errors: nobody reads any more, or the disk is full.
pub fn print(text: impl Display) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    let result = write!(stdout, "{text}").and_then(|()| stdout.flush());
    result.doing(|| "cannot print".to_owned())
}

/// As [`print`], with the end of a line.
pub fn print_line(text: impl Display) -> Result<(), Failure> {
    print(format_args!("{text}\n"))
}

/// Says on stderr what went wrong; if nobody hears it, there is nobody to tell.
pub fn complain(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "dray: {text}");
}
