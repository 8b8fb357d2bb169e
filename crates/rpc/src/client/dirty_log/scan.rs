//! Reads the log of a process or machine that has died.

use std::collections::{HashMap, HashSet};
use std::io;

use dray_core::FileId;

use super::disk::LogDir;
use super::record::{DirtyLogIdentity, LogRecord, SendingRecord, WriteRecord, get};
use super::{SEGMENT_MAX_BYTES, seed_of};
use crate::wire::WriteBase;

/// Writes of one file that were kept, in their order.
#[derive(Debug)]
pub(crate) struct FoundFile {
    pub(crate) id: FileId,
    /// The state upon which the first of them was made, if a record says it.
    pub(crate) base: WriteBase,
    /// The request that was sending the writes up to the number.
    pub(crate) under_way: Option<SendingRecord>,
    pub(crate) writes: Vec<FoundWrite>,
}

#[derive(Debug)]
pub(crate) struct FoundWrite {
    pub(crate) record: WriteRecord,
    pub(crate) data: Vec<u8>,
    /// The number of its segment.
    pub(crate) segment: u64,
}

impl FoundFile {
    pub(crate) fn bytes(&self) -> u64 {
        self.writes.iter().map(|write| write.data.len() as u64).sum()
    }
}

/// What is in a log.
#[derive(Debug, Default)]
pub(crate) struct FoundLog {
    /// None: there is no whole segment.
    pub(crate) identity: Option<DirtyLogIdentity>,
    /// Files with writes that are not sent, by the first of them.
    pub(crate) files: Vec<FoundFile>,
    /// The requests of all writes that are noted.
    pub(crate) requests: HashSet<u64>,
    /// The numbers of its segments, and where the whole records of each end, bytes.
    pub(crate) segments: Vec<(u64, u64)>,
    /// The number of the next write.
    pub(crate) next: u64,
    /// Bytes behind the last whole record of a segment.
    pub(crate) torn_bytes: u64,
}

/// Reads all segments in `dir`. Errors: those of the disk.
pub(crate) fn scan(dir: &LogDir) -> io::Result<FoundLog> {
    let mut reading = Reading::default();
    for number in segment_numbers(dir)? {
        // A segment is longer by one record at most.
        let bytes = dir.disk.read(&dir.segment(number), 2 * SEGMENT_MAX_BYTES)?;
        reading.segment(number, &bytes);
    }
    Ok(reading.found())
}

/// The numbers of the segments in a directory, in their order. None of a directory that is not there.
pub(super) fn segment_numbers(dir: &LogDir) -> io::Result<Vec<u64>> {
    let mut numbers = Vec::new();
    for path in dir.names()? {
        let is_segment = path.extension().is_some_and(|ending| ending == "log");
        let stem = path.file_stem().and_then(|stem| stem.to_str()).filter(|_| is_segment);
        numbers.extend(stem.and_then(|stem| u64::from_str_radix(stem, 16).ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

#[derive(Default)]
pub(super) struct Reading {
    found: FoundLog,
    /// Where each file is in the list.
    places: HashMap<FileId, usize>,
    /// What is at the server of each file.
    sent: HashMap<FileId, SentWrites>,
}

/// The writes of a file that are at the server.
#[derive(Clone, Copy)]
struct SentWrites {
    /// The number of the last one.
    last: u64,
    /// The state behind it.
    base: WriteBase,
    /// The number of the next write when that was noted.
    next: u64,
}

impl Reading {
    pub(super) fn segment(&mut self, number: u64, bytes: &[u8]) {
        let (seed, mut at) = (seed_of(number), 0);
        let mut is_first = true;
        while let Some((record, data)) = get(seed, &bytes[at..]) {
            let is_head = matches!(record, LogRecord::Head(..));
            if is_head != is_first {
                break;
            }
            is_first = false;
            if !self.record(number, record, &bytes[at + data.start..at + data.end]) {
                break; // of another export: somebody has put it here
            }
            at += data.end;
        }
        self.found.segments.push((number, at as u64));
        self.found.torn_bytes += (bytes.len() - at) as u64;
    }

    fn record(&mut self, segment: u64, record: LogRecord, data: &[u8]) -> bool {
        match record {
            LogRecord::Head(identity, first) => {
                self.found.next = self.found.next.max(first);
                let known = self.found.identity.get_or_insert_with(|| identity.clone());
                return *known == identity;
            }
            LogRecord::Write(record) => {
                self.found.next = self.found.next.max(record.number.saturating_add(1));
                if record.request != 0 {
                    self.found.requests.insert(record.request);
                }
                let file = self.file(record.id, record.base);
                file.writes.push(FoundWrite { record, data: data.to_vec(), segment });
            }
            LogRecord::Sending(sending) => {
                if let Some(place) = self.places.get(&sending.id) {
                    self.found.files[*place].under_way = Some(sending);
                }
            }
            LogRecord::Sent(sent) => {
                let new = SentWrites { last: sent.last, base: sent.base, next: self.found.next };
                let known = self.sent.entry(sent.id).or_insert(new);
                if known.last <= sent.last {
                    *known = new;
                }
            }
        }
        true
    }

    fn file(&mut self, id: FileId, base: WriteBase) -> &mut FoundFile {
        let files = &mut self.found.files;
        let place = *self.places.entry(id).or_insert_with(|| {
            files.push(FoundFile { id, base, under_way: None, writes: Vec::new() });
            files.len() - 1
        });
        &mut self.found.files[place]
    }

    /// What is at the server is taken out.
    pub(super) fn found(mut self) -> FoundLog {
        for file in &mut self.found.files {
            let Some(sent) = self.sent.get(&file.id) else { continue };
            file.writes.retain(|write| write.record.number > sent.last);
            file.under_way.take_if(|sending| sending.last <= sent.last);
            // A write that was noted before knew no more than the state before.
            if let Some(first) = file.writes.first() {
                let knew = first.record.number >= sent.next;
                file.base = if knew { first.record.base } else { sent.base };
            }
        }
        self.found.files.retain(|file| !file.writes.is_empty());
        self.found
    }
}
