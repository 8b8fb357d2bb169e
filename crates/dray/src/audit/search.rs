//! Prints the records of a whole log that fit.

use std::io::IsTerminal;
use std::time::Duration;

use dray_layers::audit::LogReader;

use crate::args::SearchArgs;
use crate::audit::place::LogPlace;
use crate::audit::render::Format;
use crate::audit::{filter_of, time};
use crate::error::Failure;
use crate::output;

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
    let place = LogPlace::find(&args.log)?;
    let all = place.segments()?;
    let whole: u64 = all.iter().map(|segment| segment.bytes).sum();
    let first = all.first().map_or(1, |segment| segment.first_index);
    let format = if args.log.json { Format::Json } else { Format::Text };
    let mut reader = LogReader::new(place.dirs.clone(), first);
    let mut progress = Progress::new(whole);
    loop {
        let mut lines = String::new();
        let more = reader
            .advance(&mut |record| {
                if filter.wants(&record) {
                    format.line(&record, None, &mut lines);
                }
            })
            .map_err(|error| Failure::new(format!("{}: {error}", place.cannot_read())))?;
        if !lines.is_empty() {
            progress.clear();
            output::print(&lines)?;
        }
        // What is written meanwhile is not waited for.
        if !more {
            progress.clear();
            return Ok(());
        }
        progress.show(reader.bytes);
    }
}

/// How much of a log has been read, on a terminal.
pub struct Progress {
    whole: u64,
    shown: Option<dray_rt::Instant>,
    is_on: bool,
    is_there: bool,
}

impl Progress {
    pub fn new(whole: u64) -> Progress {
        let is_on = std::io::stderr().is_terminal();
        Progress { whole: whole.max(1), shown: Some(dray_rt::now()), is_on, is_there: false }
    }

    pub fn show(&mut self, done: u64) {
        if !self.is_on || self.shown.is_some_and(|shown| shown.elapsed() < SHOW_EVERY) {
            return;
        }
        self.shown = Some(dray_rt::now());
        self.is_there = true;
        eprint!("\r{} % of {} MiB", done.min(self.whole) * 100 / self.whole, self.whole >> 20);
    }

    pub fn clear(&mut self) {
        if std::mem::take(&mut self.is_there) {
            eprint!("\r\x1b[K");
        }
    }
}
