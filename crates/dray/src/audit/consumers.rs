//! Consumers of a log: added, removed, shown, moved on.

use dray_layers::audit::{CONSUMERS_MAX, Consumer, SegmentReader, Step};
use serde_json::json;

use crate::args::{ClearArgs, ConsumerArgs, LogArgs, RegisterArgs};
use crate::audit::place::LogPlace;
use crate::audit::{filter_of, time};
use crate::error::{ErrorContext, Failure};
use crate::output;

/// The end of a log: what it is, and the number of its next record.
pub struct LogEnd {
    pub log: Option<u128>,
    pub first_index: u64,
    pub next_index: u64,
}

/// Where the log ends now, as far as it is written.
pub fn end_of(place: &LogPlace) -> Result<LogEnd, Failure> {
    let all = place.segments()?;
    let first_index = all.first().map_or(1, |segment| segment.first_index);
    for segment in all.iter().rev() {
        let Ok(mut reader) = SegmentReader::open(&segment.path) else { continue };
        while let Ok(Step::Batch(_)) = reader.step() {}
        let (log, next_index) = (Some(reader.header.log), reader.next_index);
        return Ok(LogEnd { log, first_index, next_index });
    }
    Ok(LogEnd { log: None, first_index, next_index: first_index })
}

fn now_us() -> u64 {
    dray_rt::wall_clock().as_micros() as u64
}

pub fn log_text(log: u128) -> String {
    format!("{log:032x}")
}

pub fn register(args: &RegisterArgs) -> Result<(), Failure> {
    let (log, name) = (&args.consumer.log, &args.consumer.name);
    Consumer::check_name(name).map_err(Failure::usage)?;
    let filter = filter_of(&args.filter)?;
    let wrong = || Failure::usage("a length of time is a number of seconds, or such as 12h or 7d");
    let idle_max_s = match &args.idle_max {
        Some(text) => {
            Some(time::parse_length(text).filter(|length| *length > 0).ok_or_else(wrong)?)
        }
        None => None,
    };
    let place = LogPlace::find(log)?;
    let consumers = place.consumers();
    let all = consumers.all().doing(|| place.cannot_read())?;
    let known = all.iter().find(|one| one.name == *name);
    if known.is_none() && all.len() >= CONSUMERS_MAX {
        return Err(Failure::new(format!("the audit has {CONSUMERS_MAX} consumers already")));
    }
    let end = end_of(&place)?;
    let bookmark = match known {
        Some(known) => known.bookmark,
        None if args.oldest => end.first_index,
        None => end.next_index,
    };
    let consumer = Consumer {
        name: name.clone(),
        log: known.map_or_else(|| end.log.map_or(String::new(), log_text), |one| one.log.clone()),
        bookmark,
        kinds: args.filter.kinds.clone(),
        uid: filter.uid,
        job: filter.job,
        path: args.filter.path.clone(),
        moved_us: now_us(),
        idle_max_s,
    };
    consumers.save(&consumer).doing(|| format!("cannot keep the consumer `{name}`"))?;
    output::print_line(format_args!("{name} gets records from {bookmark} on"))
}

pub fn deregister(args: &ConsumerArgs) -> Result<(), Failure> {
    let place = LogPlace::find(&args.log)?;
    place.consumer(&args.name)?;
    let removed = place.consumers().remove(&args.name);
    removed.map(|_| ()).doing(|| format!("cannot remove the consumer `{}`", args.name))
}

pub fn list(args: &LogArgs) -> Result<(), Failure> {
    let place = LogPlace::find(args)?;
    let end = end_of(&place)?;
    for one in place.consumers().all().doing(|| place.cannot_read())? {
        let lag = end.next_index.saturating_sub(one.bookmark);
        if args.json {
            output::print_json(&json!({
                "name": one.name, "bookmark": one.bookmark, "lag": lag, "kinds": one.kinds,
                "uid": one.uid, "job": one.job, "path": one.path,
                "moved": time::shown(one.moved_us), "idle_max_s": one.idle_max_s,
                "idle": one.is_idle(now_us()),
            }))?;
            continue;
        }
        let idle = if one.is_idle(now_us()) { ", idle too long: it keeps no records" } else { "" };
        output::print_line(format_args!(
            "{}: next record {}, {lag} behind, moved {}{idle}",
            one.name,
            one.bookmark,
            time::shown(one.moved_us)
        ))?;
    }
    Ok(())
}

pub fn clear(args: &ClearArgs) -> Result<(), Failure> {
    let place = LogPlace::find(&args.consumer.log)?;
    let mut consumer = place.consumer(&args.consumer.name)?;
    let end = end_of(&place)?;
    check_log(&consumer, end.log)?;
    let to = args.to.map_or(end.next_index, |last| last.saturating_add(1));
    if to > end.next_index {
        let last = end.next_index - 1;
        return Err(Failure::usage(format!(
            "the last record is {last}: none behind it can be done with"
        )));
    }
    consumer.bookmark = consumer.bookmark.max(to);
    save(&place, consumer, end.log)
}

/// Whether a bookmark is one of this log. Errors: it is one of another log.
pub fn check_log(consumer: &Consumer, log: Option<u128>) -> Result<(), Failure> {
    match log.map(log_text) {
        Some(log) if !consumer.log.is_empty() && consumer.log != log => Err(Failure::new(format!(
            "the bookmark of `{0}` belongs to another log ({1}; this one is {log}): deregister `{0}` and \
             register it anew",
            consumer.name, consumer.log
        ))),
        _ => Ok(()),
    }
}

/// Keeps a bookmark that has moved.
pub fn save(place: &LogPlace, mut consumer: Consumer, log: Option<u128>) -> Result<(), Failure> {
    consumer.moved_us = now_us();
    if consumer.log.is_empty() {
        consumer.log = log.map_or(String::new(), log_text);
    }
    place
        .consumers()
        .save(&consumer)
        .doing(|| format!("cannot keep the bookmark of `{}`", consumer.name))
}
