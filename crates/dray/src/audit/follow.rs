//! Prints records as they come.

use std::time::Duration;

use dray_layers::audit::{AuditFilter, LogReader};
use dray_rt::Instant;

use crate::args::FollowArgs;
use crate::audit::consumers::{check_log, end_of, save};
use crate::audit::filter_of;
use crate::audit::place::LogPlace;
use crate::audit::render::Format;
use crate::error::Failure;
use crate::output;

/// How often it looks for more records.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// How often the bookmark is kept.
const KEEP_EVERY: Duration = Duration::from_millis(500);

pub fn run(args: &FollowArgs) -> Result<(), Failure> {
    let place = LogPlace::find(&args.log)?;
    let end = end_of(&place)?;
    let mut consumer = match &args.name {
        Some(name) => Some(place.consumer(name)?),
        None => None,
    };
    let filter: AuditFilter = match &consumer {
        Some(consumer) => {
            check_log(consumer, end.log)?;
            consumer.filter().map_err(Failure::new)?
        }
        None => filter_of(&args.filter)?,
    };
    let from = match (args.from, &consumer) {
        (Some(from), _) => from,
        (None, Some(consumer)) => consumer.bookmark,
        (None, None) if args.once => end.first_index,
        (None, None) => end.next_index,
    };
    let format = if args.log.json { Format::Json } else { Format::Text };
    let mut reader = LogReader::new(place.dirs.clone(), from);
    let mut kept: (u64, Option<Instant>) = (from, None);
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
            output::print(&lines)?;
        }
        // Only what has been printed is done with.
        let is_due = kept.1.is_none_or(|last| last.elapsed() >= KEEP_EVERY) || args.once && !more;
        if let Some(consumer) = &mut consumer
            && reader.next_index() > kept.0
            && is_due
        {
            consumer.bookmark = reader.next_index();
            save(&place, consumer.clone(), reader.log().or(end.log))?;
            kept = (consumer.bookmark, Some(dray_rt::now()));
        }
        match (more, args.once) {
            (true, _) => {}
            (false, true) => return Ok(()),
            (false, false) => std::thread::sleep(LOOK_AGAIN),
        }
    }
}
