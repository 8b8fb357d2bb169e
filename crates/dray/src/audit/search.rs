//! Prints the records of a whole log that fit.

use std::io::IsTerminal;
use std::time::Duration;

use super::feed::{Begin, FeedPlan};
use super::follow::print_all;
use super::sources::LogSource;
use crate::args::SearchArgs;
use crate::audit::{filter_of, time};
use crate::error::Failure;

/// How often the progress is shown.
const SHOW_EVERY: Duration = Duration::from_millis(500);

pub fn run(args: &SearchArgs) -> Result<(), Failure> {
    let mut filter = filter_of(&args.filter)?;
    let now_us = dray_rt::wall_clock().as_micros() as u64;
    let moment = |text: &Option<String>| match text {
        Some(text) => time::parse(text, now_us).map(Some),
        None => Ok(None),
    };
    (filter.from_us, filter.to_us) = (moment(&args.since)?, moment(&args.until)?);
    filter.denied |= args.denied;
    let sources = LogSource::all(&args.log)?;
    // What is written meanwhile is not waited for.
    let plan = FeedPlan { name: None, filter, from: None, begin: Begin::Oldest, once: true };
    print_all(&sources, &plan, args.log.json, &mut ReadProgress::new())
}

/// How much of a log has been read, on a terminal.
pub struct ReadProgress {
    shown: dray_rt::Instant,
    is_on: bool,
    is_there: bool,
}

impl ReadProgress {
    pub fn new() -> ReadProgress {
        ReadProgress { is_on: std::io::stderr().is_terminal(), ..ReadProgress::none() }
    }

    /// One that shows nothing.
    pub fn none() -> ReadProgress {
        ReadProgress { shown: dray_rt::now(), is_on: false, is_there: false }
    }

    /// So many bytes of so many have been read.
    pub fn show(&mut self, done: u64, whole: u64) {
        if !self.is_on || self.shown.elapsed() < SHOW_EVERY {
            return;
        }
        self.shown = dray_rt::now();
        self.is_there = true;
        let whole = whole.max(1);
        eprint!("\r{} % of {} MiB", done.min(whole) * 100 / whole, whole >> 20);
    }

    pub fn clear(&mut self) {
        if std::mem::take(&mut self.is_there) {
            eprint!("\r\x1b[K");
        }
    }
}
