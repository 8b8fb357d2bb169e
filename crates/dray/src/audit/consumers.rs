//! Consumers of a log: added, removed, shown, moved on.

use dray_layers::audit::Consumer;
use serde_json::{Value, json};

use super::access::LogSummary;
use super::sources::{LogSource, for_each};
use crate::args::{ClearArgs, ConsumerArgs, LogArgs, RegisterArgs};
use crate::audit::{filter_of, time};
use crate::error::Failure;
use crate::output;

fn now_us() -> u64 {
    dray_rt::wall_clock().as_micros() as u64
}

/// `io1:7440: `, where it is about a server.
pub fn prefix(source: &LogSource) -> String {
    source.server().map_or(String::new(), |server| format!("{server}: "))
}

/// With the server, where it is about one.
pub fn with_server(source: &LogSource, mut object: Value) -> Value {
    if let Some(server) = source.server() {
        object["server"] = json!(server);
    }
    object
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
    let consumer = Consumer {
        name: name.clone(),
        kinds: args.filter.kinds.clone(),
        uid: filter.uid,
        job: filter.job,
        path: args.filter.path.clone(),
        idle_max_s,
        ..Consumer::default()
    };
    for_each(log, |source, log| {
        let bookmark = log.register(&consumer, args.oldest)?;
        let prefix = prefix(source);
        output::print_line(format_args!("{prefix}{name} gets records from {bookmark} on"))
    })
}

pub fn deregister(args: &ConsumerArgs) -> Result<(), Failure> {
    for_each(&args.log, |_, log| Ok(log.deregister(&args.name)?))
}

pub fn list(args: &LogArgs) -> Result<(), Failure> {
    for_each(args, |source, log| list_of(args.json, source, &log.summary()?))
}

fn list_of(is_json: bool, source: &LogSource, summary: &LogSummary) -> Result<(), Failure> {
    for one in &summary.consumers {
        let lag = summary.next_index.saturating_sub(one.bookmark);
        let moved = (one.moved_us != 0).then(|| time::shown(one.moved_us)); // a sink's may never have
        if is_json {
            let object = json!({
                "name": one.name, "bookmark": one.bookmark, "lag": lag, "kinds": one.kinds,
                "uid": one.uid, "job": one.job, "path": one.path,
                "moved": moved, "idle_max_s": one.idle_max_s,
                "idle": one.is_idle(now_us()),
            });
            output::print_json(&with_server(source, object))?;
            continue;
        }
        let idle = if one.is_idle(now_us()) { ", idle too long: it keeps no records" } else { "" };
        let moved = moved.map_or("never moved".to_owned(), |time| format!("moved {time}"));
        output::print_line(format_args!(
            "{}{}: next record {}, {lag} behind, {moved}{idle}",
            prefix(source),
            one.name,
            one.bookmark
        ))?;
    }
    Ok(())
}

pub fn clear(args: &ClearArgs) -> Result<(), Failure> {
    let (log, name) = (&args.consumer.log, &args.consumer.name);
    if args.to.is_some() {
        LogSource::only(log, "--to")?;
    }
    let to = args.to.map(|last| last.saturating_add(1));
    for_each(log, |_, log| Ok(log.advance(name, None, to).map(|_| ())?))
}
