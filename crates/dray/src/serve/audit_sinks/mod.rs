//! Sinks of audits: each is a consumer of the logs of its exports, which passes the records on.
//!
//! A sink has a thread for each log. Its bookmark moves when the other end has taken the records, so each
//! record is passed on at least once. A sink that is away holds no application up: its records stay in the
//! log. What happens when that has no room is the policy of the log.

mod config;
mod file;
mod http;
mod kafka;
mod otlp;
mod syslog;
#[cfg(test)]
mod tests;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dray_layers::audit::{AuditRecord, Consumer, Consumers, LogReader};
use dray_rt::Instant;

pub use config::{SINK_KEYS, SinkPlan, SinkTable};

use crate::audit::place::LogPlace;
use crate::error::{ErrorContext, Failure};
use crate::serve::export_state::ExportState;

/// How often a sink looks for more records.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// How often a bookmark is kept.
const KEEP_EVERY: Duration = Duration::from_millis(500);
/// How long the other end is left alone after it has failed, at first and at most.
const PAUSE_MIN: Duration = Duration::from_millis(500);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Records that are passed on at once, about.
const BATCH_RECORDS: usize = 512;
/// How long the other end may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// The other end.
trait Sink: Send {
    /// Passes records on. What has been taken when it answers is not asked for again. Errors: the
    /// other end is away or refuses; all of them are passed on again.
    fn send(&mut self, records: &[AuditRecord]) -> io::Result<()>;
}

/// Starts the sinks of the exports that have an audit. Errors: a thread cannot be started.
pub fn start(
    sinks: &[SinkPlan],
    exports: &[Arc<ExportState>],
    audited: impl Fn(&str) -> bool,
    state: &Path,
) -> Result<(), Failure> {
    for plan in sinks {
        let wanted = exports.iter().filter(|one| plan.wants(&one.name) && audited(&one.name));
        for export in wanted {
            let place = LogPlace::in_state(state, &export.name);
            let task = SinkTask { plan: plan.clone(), place, trouble: None };
            std::thread::Builder::new()
                .name("dray-sink".into())
                .spawn(move || task.run())
                .doing(|| format!("cannot start a thread of the audit sink `{}`", plan.name))?;
        }
    }
    for export in exports.iter().filter(|one| audited(&one.name)) {
        warn_of_former(sinks, &LogPlace::in_state(state, &export.name));
    }
    Ok(())
}

/// Names the consumers of sinks that the configuration does not have any more: they hold records for ever.
fn warn_of_former(sinks: &[SinkPlan], place: &LogPlace) {
    let export = &place.export;
    let Ok(known) = place.consumers().all() else { return }; // the log of the audit says so
    for name in former_sinks(sinks, export, &known) {
        log::warn!(
            "audit of export `{export}`: consumer `{name}` has no sink in the configuration, and the log keeps what it \
             has not seen: remove it with `dray audit deregister {export} {name}`"
        );
    }
}

fn former_sinks<'a>(sinks: &[SinkPlan], export: &str, known: &'a [Consumer]) -> Vec<&'a str> {
    let is_wanted = |name: &str| sinks.iter().any(|plan| plan.name == name && plan.wants(export));
    let sinks_of = known.iter().filter_map(|one| Some((one, one.name.strip_prefix("sink-")?)));
    let former = sinks_of.filter(|(_, name)| !is_wanted(name));
    former.map(|(one, _)| one.name.as_str()).collect()
}

fn now_us() -> u64 {
    dray_rt::wall_clock().as_micros() as u64
}

/// One sink of one log.
struct SinkTask {
    plan: SinkPlan,
    place: LogPlace,
    /// Why it did not get on at last, as the log and the file of the consumer have it.
    trouble: Option<String>,
}

impl SinkTask {
    /// Until the process ends.
    fn run(mut self) {
        let mut pause = PAUSE_MIN;
        loop {
            let begun = dray_rt::now();
            let Err(error) = self.pass_on();
            if begun.elapsed() > PAUSE_MAX {
                pause = PAUSE_MIN;
            }
            self.note_trouble(&error.to_string());
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    fn consumer_name(&self) -> String {
        format!("sink-{}", self.plan.name)
    }

    /// Says why the sink does not get on: in the log, and in the file of the consumer, where `dray audit stat`
    /// finds it.
    fn note_trouble(&mut self, why: &str) {
        if self.trouble.as_deref() == Some(why) {
            return;
        }
        if self.trouble.replace(why.to_owned()).is_none() {
            let (name, export) = (&self.plan.name, &self.place.export);
            log::error!(
                "audit sink `{name}` of export `{export}`: {why}; it is tried again, and the log keeps the \
                 records"
            );
        }
        let consumers = self.place.consumers();
        let Ok(Some(known)) = consumers.find(&self.consumer_name()) else { return };
        let is_new = known.trouble.is_empty();
        let trouble_us = if is_new { now_us() } else { known.trouble_us };
        let noted = consumers.save(&Consumer { trouble: why.to_owned(), trouble_us, ..known });
        if let Err(error) = noted {
            log::debug!("the state of audit sink `{}` cannot be noted: {error}", self.plan.name);
        }
    }

    /// The other end takes records.
    fn note_success(&mut self, consumer: &mut Consumer, consumers: &Consumers) -> io::Result<()> {
        if self.trouble.take().is_some() {
            let (name, export) = (&self.plan.name, &self.place.export);
            log::warn!("audit sink `{name}` of export `{export}` gets records again");
        }
        if consumer.trouble.is_empty() {
            return Ok(());
        }
        consumer.trouble.clear();
        consumers.save(consumer)
    }

    fn consumer(&self, consumers: &Consumers) -> io::Result<Consumer> {
        let name = self.consumer_name();
        let known =
            consumers.find(&name)?.unwrap_or(Consumer { bookmark: 1, name, ..Consumer::default() });
        let consumer = Consumer { kinds: self.plan.kinds.clone(), ..known };
        consumers.save(&consumer)?;
        Ok(consumer)
    }

    /// Passes records on until that fails.
    fn pass_on(&mut self) -> io::Result<std::convert::Infallible> {
        let consumers = self.place.consumers();
        let mut consumer = self.consumer(&consumers)?;
        let filter = consumer.filter().map_err(io::Error::other)?;
        let mut sink = self.plan.connect(&self.place.export)?;
        let mut reader = LogReader::new(self.place.dirs.clone(), consumer.bookmark);
        let mut kept: Option<Instant> = None;
        loop {
            let (mut records, mut more) = (Vec::new(), true);
            while more && records.len() < BATCH_RECORDS {
                let found = reader.advance(&mut |record| {
                    if filter.wants(&record) {
                        records.push(record);
                    }
                });
                match found {
                    Ok(has_more) => more = has_more,
                    // What was read before has its turn first. The error is there again then.
                    Err(_) if !records.is_empty() => break,
                    Err(error) => return Err(io::Error::other(error.to_string())),
                }
            }
            if !records.is_empty() {
                sink.send(&records)?;
            }
            if !records.is_empty() || !more {
                self.note_success(&mut consumer, &consumers)?;
            }
            let is_due = kept.is_none_or(|last| last.elapsed() >= KEEP_EVERY);
            if reader.next_index() > consumer.bookmark && (is_due || !more) {
                consumer.bookmark = reader.next_index();
                consumer.moved_us = now_us();
                consumers.save(&consumer)?;
                kept = Some(dray_rt::now());
            }
            if !more {
                std::thread::sleep(LOOK_AGAIN);
            }
        }
    }
}
