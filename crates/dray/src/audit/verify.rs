//! Checks a log, and shows what there is of it.

use dray_layers::audit::{Consumer, HASH_BYTES, Hash, verify};
use serde_json::{Value, json};

use super::access::{LogSummary, log_text};
use super::consumers::with_server;
use super::place::LogPlace;
use super::search::ReadProgress;
use super::sources::{LogSource, for_each};
use crate::args::{LogArgs, VerifyArgs};
use crate::audit::time;
use crate::error::{ErrorContext, Failure};
use crate::output;

pub fn run(args: &VerifyArgs) -> Result<(), Failure> {
    let anchor = args.anchor.as_deref().map(parse_anchor).transpose()?;
    if args.export.contains("://") || args.auth.is_some() {
        return Err(Failure::usage(
            "a log is verified on its server's machine, with the name of the export: it is the files \
             there that somebody may have been at",
        ));
    }
    let place = LogPlace::find(&args.export, args.state.as_deref())?;
    let whole = place.segments()?.iter().map(|one| one.bytes).sum();
    let mut progress = ReadProgress::new();
    let begun = dray_rt::now();
    let found = verify(&place.dirs, anchor, |bytes| progress.show(bytes, whole));
    progress.clear();
    let found = found.doing(|| place.cannot_read())?;
    let seconds = begun.elapsed().as_secs_f64();
    let hash: String = found.hash.iter().map(|byte| format!("{byte:02x}")).collect();
    let anchor = format!("{}:{hash}", found.next_index);
    if args.json {
        output::print_json(&json!({
            "segments": found.segments, "records": found.records, "bytes": found.bytes,
            "first_index": found.first_index, "next_index": found.next_index, "anchor": anchor,
            "ends_torn": found.ends_torn, "lost": found.lost, "problems": found.problems, "seconds": seconds,
        }))?;
    } else {
        output::print_line(format_args!(
            "{} records from {} on in {} segments, {} bytes; anchor {anchor}",
            found.records, found.first_index, found.segments, found.bytes
        ))?;
        if found.first_index > 1 {
            output::print_line("older records have been removed")?;
        }
        if found.lost > 0 {
            let lost = found.lost;
            output::print_line(format_args!(
                "{lost} records were lost at its end: gap records say when"
            ))?;
        }
        for problem in &found.problems {
            output::print_line(format_args!("wrong: {problem}"))?;
        }
    }
    match found.problems.len() {
        0 => Ok(()),
        count => {
            Err(Failure::new(format!("{count} problem(s): the audit has been damaged or changed")))
        }
    }
}

fn parse_anchor(text: &str) -> Result<(u64, Hash), Failure> {
    let wrong = || Failure::usage("an anchor is INDEX:HASH, as `dray audit verify` shows it");
    let (index, hex) = text.split_once(':').ok_or_else(wrong)?;
    let mut hash = [0; HASH_BYTES];
    if hex.len() != 2 * HASH_BYTES || !hex.is_ascii() {
        return Err(wrong());
    }
    for (byte, digits) in hash.iter_mut().zip(hex.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).map_err(|_| wrong())?;
        *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong())?;
    }
    Ok((index.parse().map_err(|_| wrong())?, hash))
}

pub fn stat(args: &LogArgs) -> Result<(), Failure> {
    for_each(args, |source, log| stat_of(args.json, source, &log.summary()?))
}

fn stat_of(is_json: bool, source: &LogSource, summary: &LogSummary) -> Result<(), Failure> {
    let LogSummary { place, log, segments, bytes, first_index, next_index, consumers } = summary;
    let lag = consumers.iter().map(|one| next_index.saturating_sub(one.bookmark)).max();
    let lag = lag.unwrap_or(0);
    if is_json {
        let mut object = json!({
            "export": source.export(), "log": log.map(log_text), "segments": segments,
            "bytes": bytes, "first_index": first_index, "next_index": next_index,
            "consumers": consumers.len(), "lag": lag,
        });
        let troubled = consumers.iter().filter(|one| !one.trouble.is_empty());
        let troubles: Vec<_> = troubled.map(|one| trouble_json(one, *next_index)).collect();
        if !troubles.is_empty() {
            object["troubles"] = json!(troubles);
        }
        let mut object = with_server(source, object);
        if source.server().is_none() {
            object["dir"] = json!(place);
        }
        return output::print_json(&object);
    }
    output::print_line(format_args!(
        "{place}: records {first_index} to {} in {segments} segments, {bytes} bytes; {} consumers, the \
         slowest {lag} behind",
        next_index.saturating_sub(1),
        consumers.len()
    ))?;
    for one in consumers.iter().filter(|one| !one.trouble.is_empty()) {
        let (lag, since) = (next_index.saturating_sub(one.bookmark), time::shown(one.trouble_us));
        output::print_line(format_args!(
            "{}: since {since}: {}; it is tried again, and the log keeps its {lag} records",
            one.name,
            output::plain(&one.trouble)
        ))?;
    }
    Ok(())
}

fn trouble_json(consumer: &Consumer, next_index: u64) -> Value {
    json!({
        "name": consumer.name, "why": consumer.trouble, "since": time::shown(consumer.trouble_us),
        "lag": next_index.saturating_sub(consumer.bookmark),
    })
}
