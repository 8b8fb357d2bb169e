//! A log on this machine: its files. Commands read it so, and a server for readers on other machines.

use std::collections::VecDeque;
use std::time::Duration;

use dray_layers::audit::{
    AuditFilter, AuditRecord, CONSUMERS_MAX, Consumer, LogReader, SegmentReader,
};

use super::access::{
    AccessError, LogAccess, LogPart, LogSummary, check_log, log_text, no_consumer,
};
use super::place::LogPlace;
use crate::error::{ErrorContext, Failure};

/// Records that are handed out at once, at most.
const PART_RECORDS_MAX: usize = 2048;
/// The same in bytes, about, as they are encoded at worst.
const PART_BYTES: usize = 384 << 10;
/// So much of a log is read for one answer, though it has nothing that is wanted, bytes.
const SCAN_BYTES: u64 = 8 << 20;
/// How often is looked for more records.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// The log in a state directory.
pub struct LocalLog {
    place: LogPlace,
    reading: Option<Reading>,
}

/// How far it was read, and what for.
struct Reading {
    reader: LogReader,
    filter: AuditFilter,
    /// Records that were read and not handed out.
    pending: VecDeque<AuditRecord>,
    /// The next record that is handed out.
    next_index: u64,
    /// The time of the last record that was read, whether it was wanted or not.
    seen_us: u64,
}

impl LocalLog {
    pub fn new(place: LogPlace) -> LocalLog {
        LocalLog { place, reading: None }
    }

    fn consumer(&self, name: &str) -> Result<Consumer, Failure> {
        let found = self.place.consumers().find(name).doing(|| self.place.cannot_read())?;
        found.ok_or_else(|| no_consumer(name, &self.place.export))
    }

    fn save(&self, consumer: &Consumer) -> Result<(), Failure> {
        let saved = self.place.consumers().save(consumer);
        saved.doing(|| format!("cannot keep the consumer `{}`", consumer.name))
    }

    /// Goes on where it was, if it is asked for that.
    fn reading(&mut self, from: u64, filter: &AuditFilter) -> &mut Reading {
        let dirs = &self.place.dirs;
        let known = self.reading.take();
        let known = known.filter(|known| known.next_index == from && known.filter == *filter);
        self.reading.insert(known.unwrap_or_else(|| Reading {
            reader: LogReader::new(dirs.clone(), from),
            filter: filter.clone(),
            pending: VecDeque::new(),
            next_index: from,
            seen_us: 0,
        }))
    }
}

/// Which log it is, and the number of its next record, as far as it is written.
fn end_of(place: &LogPlace, first_index: u64) -> Result<(Option<u128>, u64), Failure> {
    for segment in place.segments()?.iter().rev() {
        let Ok(mut reader) = SegmentReader::open(&segment.path) else { continue };
        let next_index = reader.end_index().doing(|| place.cannot_read())?;
        return Ok((Some(reader.header.log), next_index));
    }
    Ok((None, first_index))
}

fn now_us() -> u64 {
    dray_rt::wall_clock().as_micros() as u64
}

/// How many bytes a record takes in an encoding that knows nothing of those before, about.
fn size_of_record(record: &AuditRecord) -> usize {
    let paths = [&record.path, &record.to_path].into_iter().flatten().map(|text| 2 * text.len());
    let names = [&record.name, &record.to_name, &record.xattr];
    let names = names.into_iter().flatten().map(|text| text.len());
    512 + paths.sum::<usize>() + names.sum::<usize>()
}

impl Reading {
    /// Reads on until there is enough for an answer. False: there is no more now.
    fn fill(&mut self) -> std::io::Result<bool> {
        let begun_bytes = self.reader.bytes;
        let Reading { reader, filter, pending, seen_us, .. } = self;
        loop {
            if pending.len() >= PART_RECORDS_MAX || reader.bytes - begun_bytes > SCAN_BYTES {
                return Ok(true);
            }
            let more = reader.advance(&mut |record| {
                *seen_us = (*seen_us).max(record.time_us);
                if filter.wants(&record) {
                    pending.push_back(record);
                }
            });
            match more {
                Ok(true) => {}
                // What was read before has its turn first. The error is there again then.
                Err(_) if !pending.is_empty() => return Ok(true),
                Ok(false) | Err(_) => return more,
            }
        }
    }

    fn take(&mut self, more: bool) -> LogPart {
        let (mut records, mut bytes) = (Vec::new(), 0);
        while records.len() < PART_RECORDS_MAX && bytes < PART_BYTES {
            let Some(record) = self.pending.pop_front() else { break };
            bytes += size_of_record(&record);
            records.push(record);
        }
        let first = self.pending.front();
        self.next_index = first.map_or(self.reader.next_index(), |record| record.index);
        let handed_us = records.last().map_or(0, |record| record.time_us);
        LogPart {
            next_index: self.next_index,
            log: self.reader.log(),
            more: more || first.is_some(),
            complete_us: if first.is_some() { handed_us } else { self.seen_us },
            read_bytes: self.reader.bytes,
            records,
        }
    }
}

impl LogAccess for LocalLog {
    fn summary(&mut self) -> Result<LogSummary, AccessError> {
        let all = self.place.segments()?;
        let first_index = all.first().map_or(1, |segment| segment.first_index);
        let (log, next_index) = end_of(&self.place, first_index)?;
        let consumers = self.place.consumers().all().doing(|| self.place.cannot_read())?;
        Ok(LogSummary {
            place: self.place.dir.display().to_string(),
            log,
            segments: all.len() as u64,
            bytes: all.iter().map(|segment| segment.bytes).sum(),
            first_index,
            next_index,
            consumers,
        })
    }

    fn read(
        &mut self,
        from: u64,
        filter: &AuditFilter,
        wait: Duration,
    ) -> Result<LogPart, AccessError> {
        let begun = dray_rt::now();
        let cannot_read = self.place.cannot_read();
        loop {
            let reading = self.reading(from, filter);
            let more = reading.fill();
            let more = more.map_err(|error| Failure::new(format!("{cannot_read}: {error}")))?;
            let part = reading.take(more);
            if part.more || part.next_index > from || begun.elapsed() >= wait {
                return Ok(part);
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn register(&mut self, consumer: &Consumer, oldest: bool) -> Result<u64, AccessError> {
        Consumer::check_name(&consumer.name).map_err(Failure::usage)?;
        consumer.filter().map_err(Failure::usage)?;
        let summary = self.summary()?;
        let known = summary.consumers.iter().find(|one| one.name == consumer.name);
        if known.is_none() && summary.consumers.len() >= CONSUMERS_MAX {
            let why = format!("the audit has {CONSUMERS_MAX} consumers already");
            return Err(Failure::new(why).into());
        }
        if let Some(known) = known {
            check_log(known, summary.log)?;
        }
        let bookmark = match known {
            Some(known) => known.bookmark,
            None if oldest => summary.first_index,
            None => summary.next_index,
        };
        let log = match known {
            Some(known) => known.log.clone(),
            None => summary.log.map_or(String::new(), log_text),
        };
        self.save(&Consumer { log, bookmark, moved_us: now_us(), ..consumer.clone() })?;
        Ok(bookmark)
    }

    fn deregister(&mut self, name: &str) -> Result<(), AccessError> {
        // Unread: its file may make no sense.
        let removed = self.place.consumers().remove(name);
        match removed.doing(|| format!("cannot remove the consumer `{name}`"))? {
            true => Ok(()),
            false => Err(no_consumer(name, &self.place.export).into()),
        }
    }

    fn advance(
        &mut self,
        name: &str,
        log: Option<u128>,
        to: Option<u64>,
    ) -> Result<u64, AccessError> {
        let mut consumer = self.consumer(name)?;
        // What this has read is written: the end of the log need not be looked for.
        let read_to = self.reading.as_ref().map_or(0, |reading| reading.next_index);
        let (log, to) = match (log, to) {
            (Some(_), Some(to)) if to <= read_to => (log, to),
            (_, Some(_) | None) => {
                let LogSummary { log: found, next_index, .. } = self.summary()?;
                if to.is_some_and(|to| to > next_index) {
                    return Err(Failure::usage(format!(
                        "the last record is {}: `--to` may not be larger",
                        next_index - 1
                    ))
                    .into());
                }
                (log.or(found), to.unwrap_or(next_index))
            }
        };
        check_log(&consumer, log)?;
        consumer.bookmark = consumer.bookmark.max(to);
        consumer.moved_us = now_us();
        if consumer.log.is_empty() {
            consumer.log = log.map_or(String::new(), log_text);
        }
        self.save(&consumer)?;
        Ok(consumer.bookmark)
    }
}
