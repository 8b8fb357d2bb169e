//! Reading a log: over all its segments, and on where more has been written.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::log::{SegmentFile, segments};
use super::record::AuditRecord;
use super::segment::{Corruption, HEADER_MAX_BYTES};
use super::segment_reader::{ReadError, ReadStep, SegmentReader};

/// How long a batch may look broken while it is being written.
const WRITE_TIME: Duration = Duration::from_millis(1);

/// Reads a log from a record on, over all segments, and goes on where more has been written.
pub struct LogReader {
    dirs: Vec<PathBuf>,
    current: Option<(SegmentFile, SegmentReader)>,
    next: u64,
    log: Option<u128>,
    /// The place of the current segment that cannot be read.
    broken: Option<BrokenPlace>,
    /// How much has been read, bytes.
    pub bytes: u64,
}

struct BrokenPlace {
    at_bytes: u64,
    /// In words.
    why: String,
    /// A record has said so, and no batch that can be read has followed.
    is_said: bool,
}

impl LogReader {
    /// Reads the log in these directories from this record on.
    pub fn new(dirs: Vec<PathBuf>, from: u64) -> LogReader {
        LogReader { dirs, current: None, next: from, log: None, broken: None, bytes: 0 }
    }

    /// The number of the next record.
    pub fn next_index(&self) -> u64 {
        self.next
    }

    /// The log that is read, once something was.
    pub fn log(&self) -> Option<u128> {
        self.log
    }

    /// Hands on the records of the next batch. Records that are gone, or cannot be read, become a
    /// record that says so. False: there is no more now. Errors: the files cannot be read.
    pub fn advance(&mut self, each: &mut dyn FnMut(AuditRecord)) -> io::Result<bool> {
        let Some((segment, mut reader)) = self.current.take() else {
            return self.enter(each);
        };
        let before = reader.at_bytes();
        let step = match reader.step() {
            Ok(ReadStep::Batch(batch)) => {
                self.say_passed(batch.first_index, each);
                let next = self.next;
                reader
                    .records(&batch, |record| {
                        if record.index >= next {
                            each(record);
                        }
                    })
                    .map(|()| ReadStep::Batch(batch))
            }
            step => step,
        };
        match step {
            Ok(ReadStep::Batch(_)) => {
                self.next = self.next.max(reader.next_index);
                self.bytes += reader.at_bytes() - before;
                self.current = Some((segment, reader));
                Ok(true)
            }
            Ok(step @ (ReadStep::End | ReadStep::Torn)) => {
                let go_on = self.behind(&segment)?.is_some();
                // More may have been written to this one before the next one was made.
                let is_read = matches!(segment.len_now(), Some(len) if len <= before);
                match go_on && (is_read || !segment.path.exists()) {
                    true => self.enter_behind(&segment, &reader, each),
                    false if go_on && step == ReadStep::Torn => {
                        let why = Corruption("it ends within a batch");
                        self.pass_broken(segment, reader, why, each)
                    }
                    false => {
                        self.current = Some((segment, reader));
                        Ok(go_on && !is_read)
                    }
                }
            }
            Err(ReadError::Io(error)) => Err(error),
            Err(ReadError::Corruption(_, why)) => self.pass_broken(segment, reader, why, each),
        }
    }

    /// The segment behind this one.
    fn behind(&self, segment: &SegmentFile) -> io::Result<Option<SegmentFile>> {
        let all = segments(&self.dirs)?;
        Ok(all.into_iter().find(|one| one.first_index > segment.first_index))
    }

    /// Says that the records before this one are missing, where a broken place was passed.
    fn say_passed(&mut self, first_index: u64, each: &mut dyn FnMut(AuditRecord)) {
        let Some(place) = self.broken.take() else { return };
        if first_index > self.next {
            self.say(first_index - self.next, &place.why, each);
            self.next = first_index;
        }
    }

    /// Goes on behind a broken place: in the segment, or else with the next one. In the last segment it says what is
    /// missing, and waits for a batch that can be read.
    fn pass_broken(
        &mut self,
        segment: SegmentFile,
        mut reader: SegmentReader,
        why: Corruption,
        each: &mut dyn FnMut(AuditRecord),
    ) -> io::Result<bool> {
        let at_bytes = reader.at_bytes();
        if self.broken.as_ref().is_none_or(|place| place.at_bytes != at_bytes) {
            let why = format!("{} is broken at byte {at_bytes}: {why}", segment.path.display());
            self.broken = Some(BrokenPlace { at_bytes, why, is_said: false });
            self.current = Some((segment, reader));
            std::thread::sleep(WRITE_TIME);
            return Ok(true);
        }
        // Nothing is written to this one once there is another one. So that is looked for first.
        let behind = self.behind(&segment)?;
        if reader.go_on_behind()? {
            self.bytes += reader.at_bytes() - at_bytes;
            self.current = Some((segment, reader));
            return Ok(true);
        }
        let (chain, known, _) = reader.known_end();
        let Some(behind) = behind else {
            let missing = known.max(reader.claimed_index()).saturating_sub(self.next);
            let place = self.broken.as_mut().filter(|place| !place.is_said || known > self.next);
            if let Some(place) = place {
                place.is_said = true;
                let why = place.why.clone();
                self.say(missing, &why, each);
                self.next = self.next.max(known);
            }
            self.current = Some((segment, reader));
            return Ok(false);
        };
        let missing_to = if behind.is_behind(&chain) { known } else { behind.first_index };
        self.say_passed(missing_to, each);
        self.next = self.next.max(behind.first_index);
        self.open(behind)
    }

    /// Goes on with the segment that has the next record.
    fn enter(&mut self, each: &mut dyn FnMut(AuditRecord)) -> io::Result<bool> {
        let all = segments(&self.dirs)?;
        let at = all.iter().rposition(|one| one.first_index <= self.next);
        let Some(segment) = all.get(at.unwrap_or(0)).cloned() else { return Ok(false) };
        if segment.first_index > self.next {
            let missing = segment.first_index - self.next;
            self.say(missing, "they have been removed from the log", each);
            self.next = segment.first_index;
        }
        self.open(segment)
    }

    fn enter_behind(
        &mut self,
        segment: &SegmentFile,
        reader: &SegmentReader,
        each: &mut dyn FnMut(AuditRecord),
    ) -> io::Result<bool> {
        let Some(next) = self.behind(segment)? else { return Ok(false) };
        let known = reader.next_index.max(self.next);
        if next.first_index > known && !next.is_behind(&reader.chain) {
            self.say(next.first_index - known, "a segment is missing", each);
        }
        self.next = self.next.max(next.first_index);
        self.open(next)
    }

    fn open(&mut self, segment: SegmentFile) -> io::Result<bool> {
        self.broken = None;
        let reader = match SegmentReader::open(&segment.path) {
            Ok(reader) => {
                self.log = Some(reader.header.log);
                reader
            }
            Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(true);
            } // moved
            Err(ReadError::Io(error)) => return Err(error),
            Err(ReadError::Corruption(..)) => {
                let is_begun = segment.len_now().is_some_and(|len| len >= HEADER_MAX_BYTES);
                if !is_begun && self.behind(&segment)?.is_none() {
                    return Ok(false); // it is being made
                }
                let log = self.log.unwrap_or_default();
                SegmentReader::open_broken(&segment.path, log, segment.first_index)?
            }
        };
        self.bytes += reader.at_bytes();
        self.current = Some((segment, reader));
        Ok(true)
    }

    fn say(&self, missing: u64, why: &str, each: &mut dyn FnMut(AuditRecord)) {
        let now_us = dray_rt::wall_clock().as_micros() as u64;
        each(AuditRecord { index: self.next, ..AuditRecord::gap(now_us, missing, why) });
    }
}
