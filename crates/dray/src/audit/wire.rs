//! What the wire has of audits, and what the log has.

use dray_layers::audit::{AuditFilter, Consumer, KindSet, UnknownKind};
use dray_rpc::wire::{AuditConsumer, AuditPart, AuditSummary, AuditWanted};

use super::access::{LogPart, LogSummary};

/// What `kinds` is where no kind is chosen, and denied accesses are wanted alone.
const NO_KIND: &str = "denied";

fn kinds_of(text: &str) -> Vec<String> {
    text.split('+').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

pub fn wanted_of(filter: &AuditFilter) -> AuditWanted {
    let AuditFilter { kinds, uid, job, path, from_us, to_us, denied } = filter.clone();
    let kinds = match kinds.map(|kinds| kinds.names().join("+")) {
        None => String::new(),
        Some(names) if names.is_empty() => NO_KIND.to_owned(),
        Some(names) => names,
    };
    AuditWanted { kinds, uid, job, path, from_us, to_us, denied }
}

/// Errors: a kind that this version does not know.
pub fn filter_of(wanted: &AuditWanted) -> Result<AuditFilter, UnknownKind> {
    let AuditWanted { kinds, uid, job, path, from_us, to_us, denied } = wanted.clone();
    let kinds = match kinds.is_empty() {
        true => None,
        false => Some(kinds.parse::<KindSet>()?),
    };
    Ok(AuditFilter { kinds, uid, job, path, from_us, to_us, denied })
}

pub fn wire_consumer(consumer: &Consumer) -> AuditConsumer {
    let Consumer {
        name,
        log,
        bookmark,
        kinds,
        uid,
        job,
        path,
        moved_us,
        idle_max_s,
        trouble,
        trouble_us,
    } = consumer.clone();
    let kinds = kinds.join("+");
    AuditConsumer {
        name,
        log,
        bookmark,
        kinds,
        uid,
        job,
        path,
        moved_us,
        idle_max_s,
        trouble,
        trouble_us,
    }
}

pub fn consumer_of_wire(consumer: AuditConsumer) -> Consumer {
    let kinds = kinds_of(&consumer.kinds);
    let AuditConsumer {
        name,
        log,
        bookmark,
        kinds: _,
        uid,
        job,
        path,
        moved_us,
        idle_max_s,
        trouble,
        trouble_us,
    } = consumer;
    Consumer {
        name,
        log,
        bookmark,
        kinds,
        uid,
        job,
        path,
        moved_us,
        idle_max_s,
        trouble,
        trouble_us,
    }
}

/// Without the place, which is nobody else's affair.
pub fn wire_summary(summary: LogSummary) -> AuditSummary {
    let LogSummary { place: _, log, segments, bytes, first_index, next_index, consumers } = summary;
    let consumers = consumers.iter().map(wire_consumer).collect();
    AuditSummary { log, segments, bytes, first_index, next_index, consumers }
}

/// `place`: as people name the server.
pub fn summary_of_wire(summary: AuditSummary, place: &str) -> LogSummary {
    let AuditSummary { log, segments, bytes, first_index, next_index, consumers } = summary;
    let consumers = consumers.into_iter().map(consumer_of_wire).collect();
    let place = place.to_owned();
    LogSummary { place, log, segments, bytes, first_index, next_index, consumers }
}

/// Without the records.
pub fn wire_part(part: &LogPart) -> AuditPart {
    let LogPart { records: _, next_index, log, more, complete_us, read_bytes } = part;
    AuditPart {
        next_index: *next_index,
        log: *log,
        more: *more,
        complete_us: *complete_us,
        read_bytes: *read_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_and_consumers_arrive_as_they_were() {
        let some = AuditFilter {
            kinds: Some("create,unlink".parse().unwrap()),
            uid: Some(7),
            path: Some(b"/a".to_vec()),
            to_us: Some(5),
            ..AuditFilter::default()
        };
        let none = AuditFilter { kinds: Some(KindSet::NONE), ..AuditFilter::default() };
        for filter in [AuditFilter::default(), some, none] {
            assert_eq!(filter_of(&wanted_of(&filter)), Ok(filter));
        }
        let wanted = AuditWanted { kinds: "opne".into(), ..wanted_of(&AuditFilter::default()) };
        assert!(filter_of(&wanted).is_err());
        let consumer = Consumer {
            name: "siem".into(),
            kinds: vec!["create".into(), "change".into()],
            bookmark: 9,
            idle_max_s: Some(3),
            trouble: "away".into(),
            trouble_us: 7,
            ..Consumer::default()
        };
        assert_eq!(consumer_of_wire(wire_consumer(&consumer)), consumer);
    }
}
