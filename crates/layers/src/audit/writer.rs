//! The thread that moves records from the ring into segments.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use dray_rt::Instant;

use super::kind::AuditKind;
use super::log::LogEnd;
use super::paths::{FindPath, Paths, Placed};
use super::raw;
use super::record::AuditRecord;
use super::retention::{Retention, Room};
use super::segment::{Hash, SegmentHeader, SegmentWriter};
use super::shared::Shared;
use super::{AuditOptions, FullPolicy};

/// Bytes of the ring that become one batch or a few.
const DRAIN_BYTES: usize = 128 << 10;
/// A batch has hardly more than so many bytes of records.
const BATCH_BYTES: usize = 64 << 10;
/// Records are collected for so long, for larger batches.
const COLLECT_TIME: Duration = Duration::from_millis(10);
/// Without a record for so long it rests until one comes.
const REST_AFTER: Duration = Duration::from_millis(500);
/// How often what was written is brought to media. A loss of power takes hardly more than that.
pub const SYNC_TIME: Duration = Duration::from_millis(100);
/// How often it tries again to write, or looks for room.
const AGAIN: Duration = Duration::from_millis(100);
/// How often it looks at segments and consumers.
const LOOK_TIME: Duration = Duration::from_secs(1);

pub(super) struct Writer {
    options: AuditOptions,
    shared: Arc<Shared>,
    paths: Paths,
    log: u128,
    next_index: u64,
    chain: Hash,
    ring_end: u64,
    current: Option<SegmentWriter>,
    retention: Retention,
    unsynced_since: Option<Instant>,
    looked: Option<Instant>,
    user: raw::LastUser,
    /// Records that are gone and that no gap record counts yet.
    uncounted: u64,
    failing: bool,
    /// Why no room could be made, which has been logged.
    stuck: Option<String>,
    dropped: u64,
    written: (u64, u64),
}

/// A record of the ring on its way.
struct Pending {
    record: AuditRecord,
    placed: Placed,
    ring_end: u64,
}

impl Writer {
    pub(super) fn new(
        options: AuditOptions,
        shared: Arc<Shared>,
        find_path: FindPath,
        end: LogEnd,
    ) -> Writer {
        let retention = Retention::new(&options);
        Writer {
            paths: Paths::new(find_path),
            options,
            shared,
            log: end.log,
            next_index: end.next_index,
            chain: end.chain,
            ring_end: end.ring_end,
            current: None,
            retention,
            unsynced_since: None,
            looked: None,
            user: raw::LastUser::default(),
            uncounted: 0,
            failing: false,
            stuck: None,
            dropped: 0,
            written: (0, 0),
        }
    }

    /// Until it is to end. `lost`: how many records the end of the log has lost, and how.
    pub(super) fn run(mut self, lost: Option<(u64, String)>) {
        let now_us = wall_clock_us();
        let mut first = vec![AuditRecord::new(AuditKind::Start, now_us)];
        if let Some((records, why)) = lost {
            let export = &self.options.export;
            log::error!("audit of export `{export}`: {why}; {records} records are lost");
            first.push(AuditRecord::gap(now_us, records, &why));
        }
        let first = first.into_iter().map(|record| self.own(record)).collect();
        self.write_at_last(first);
        let mut busy = dray_rt::now();
        loop {
            let ending = self.shared.is_ending();
            self.look();
            if self.drain() {
                busy = dray_rt::now();
            }
            self.sync(ending);
            self.report();
            if ending && (self.failing || self.shared.ring.used_bytes() == 0) {
                break;
            }
            let resting = busy.elapsed() > REST_AFTER && self.unsynced_since.is_none();
            let blocked = self.shared.blocked.load(Ordering::Relaxed) || self.failing;
            let longest = match (resting, blocked) {
                (_, true) => AGAIN,
                (true, false) => Duration::from_secs(60),
                (false, false) => COLLECT_TIME,
            };
            if self.shared.ring.used_bytes() < DRAIN_BYTES || blocked {
                self.shared.sleep(resting && !blocked, longest);
            }
        }
        self.sync(true);
        self.shared.ended();
    }

    /// A record of the server's own.
    fn own(&self, record: AuditRecord) -> Pending {
        Pending { record, placed: Placed::default(), ring_end: self.ring_end }
    }

    /// Moves some records. False: there was none.
    fn drain(&mut self) -> bool {
        let shared = self.shared.clone();
        let from = shared.ring.begin_at();
        let (mut all, mut expected, mut lost) = (Vec::new(), self.ring_end, 0);
        let to = shared.ring.read(from, DRAIN_BYTES, |taken| {
            if taken.number < expected {
                return; // a server that was killed has written it
            }
            lost += match expected {
                0 => 0,
                _ => taken.number - expected,
            };
            expected = taken.number + 1;
            match raw::decode(&taken.bytes, &mut self.user) {
                Ok(mut record) => {
                    let placed = self.paths.place(&mut record);
                    all.push(Pending { record, placed, ring_end: expected });
                }
                Err(_) => lost += 1,
            }
        });
        if to == from {
            return false;
        }
        self.lose(lost + shared.lost.swap(0, Ordering::Relaxed));
        if self.write_at_last(all) {
            shared.ring.release(to);
        }
        true
    }

    /// So many records will not be in the log.
    fn lose(&mut self, records: u64) {
        self.uncounted += records;
        self.dropped += records;
    }

    /// Writes records, or what the policy says instead. False: they are still to be written.
    fn write_at_last(&mut self, mut all: Vec<Pending>) -> bool {
        loop {
            if self.uncounted > 0 {
                let why = "there was no room for them";
                let gap = AuditRecord::gap(wall_clock_us(), self.uncounted, why);
                let gap = self.own(gap);
                all.insert(0, gap);
                self.uncounted = 0;
            }
            match self.write(&mut all) {
                Ok(()) => {
                    self.recovered();
                    return true;
                }
                Err(error) => self.failed(&error),
            }
            match self.options.full {
                FullPolicy::Drop => {
                    // What a gap has counted is dropped already.
                    let gaps = all.iter().filter_map(|one| one.record.gap.as_ref());
                    self.uncounted += gaps.map(|gap| gap.records).sum::<u64>();
                    self.lose(all.iter().filter(|one| one.record.gap.is_none()).count() as u64);
                    self.ring_end = all.last().map_or(self.ring_end, |last| last.ring_end);
                    return true;
                }
                FullPolicy::Block | FullPolicy::Spill if self.shared.is_ending() => return false,
                FullPolicy::Block | FullPolicy::Spill => {
                    self.shared.sleep(false, AGAIN);
                    self.look();
                    self.report();
                }
            }
        }
    }

    /// Writes records; what has been written is no longer in `all`.
    fn write(&mut self, all: &mut Vec<Pending>) -> io::Result<()> {
        while !all.is_empty() {
            let mut segment = match self.current.take() {
                Some(segment) => segment,
                None => self.new_segment()?,
            };
            let (mut bytes, mut count) = (Vec::with_capacity(BATCH_BYTES), 0);
            let mut ring_end = self.ring_end;
            let codec = segment.next_codec();
            for one in all.iter() {
                let paths = (one.placed.parent.as_ref(), one.placed.to_parent.as_ref());
                codec.put(&one.record, paths, &mut bytes);
                (count, ring_end) = (count + 1, ring_end.max(one.ring_end));
                if bytes.len() >= BATCH_BYTES {
                    break;
                }
            }
            // On an error the segment ends here: its tables know what it does not have.
            let before = segment.bytes;
            segment.append((count, self.next_index, ring_end), &bytes)?;
            all.drain(..count as usize);
            self.next_index += u64::from(count);
            (self.chain, self.ring_end) = (segment.chain, ring_end);
            self.written.0 += u64::from(count);
            self.written.1 += segment.bytes - before;
            self.unsynced_since.get_or_insert_with(dray_rt::now);
            if segment.bytes < self.options.segment_bytes {
                self.current = Some(segment);
            } else {
                segment.sync()?;
                self.looked = None; // there may be too many now
            }
        }
        Ok(())
    }

    fn new_segment(&self) -> io::Result<SegmentWriter> {
        let header = SegmentHeader {
            log: self.log,
            first_index: self.next_index,
            made_us: wall_clock_us(),
            before: self.chain,
            export: self.options.export.clone(),
        };
        let made = SegmentWriter::create(&self.options.dir, &header);
        match (&self.options.full, &self.options.spill, made) {
            (FullPolicy::Spill, Some(spill), Err(_)) => SegmentWriter::create(spill, &header),
            (_, _, made) => made,
        }
    }

    fn failed(&mut self, error: &io::Error) {
        if self.options.full != FullPolicy::Drop {
            self.shared.blocked.store(true, Ordering::Relaxed);
        }
        let mut status = self.shared.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.trouble = error.to_string();
        drop(status);
        if !std::mem::replace(&mut self.failing, true) {
            let (export, dir) = (&self.options.export, self.options.dir.display());
            let what = self.options.full.in_words();
            log::error!("audit of export `{export}`: cannot write to {dir}: {error}; {what}");
        }
    }

    fn recovered(&mut self) {
        if std::mem::replace(&mut self.failing, false) {
            self.looked = None;
            let mut status = self.shared.status.lock().unwrap_or_else(PoisonError::into_inner);
            status.trouble.clear();
            drop(status);
            log::warn!("audit of export `{}` is written again", self.options.export);
        }
    }

    /// Makes room, if it is time to look.
    fn look(&mut self) {
        let blocked = self.shared.blocked.load(Ordering::Relaxed);
        let interval = if blocked || self.failing { AGAIN } else { LOOK_TIME };
        if self.looked.is_some_and(|looked| looked.elapsed() < interval) {
            return;
        }
        self.looked = Some(dray_rt::now());
        let current = self.current.as_ref().map(|segment| segment.path().to_owned());
        let room = match self.retention.make_room(current.as_deref(), self.next_index) {
            Ok(room) => room,
            Err(error) => {
                let why = error.to_string();
                if self.stuck.as_ref() != Some(&why) {
                    log::error!(
                        "audit of export `{}`: cannot make room: {why}",
                        self.options.export
                    );
                }
                self.stuck = Some(why);
                return;
            }
        };
        self.stuck = None;
        let is_full = matches!(room, Room::None);
        if is_full && !blocked {
            let export = &self.options.export;
            log::error!(
                "audit of export `{export}`: the log has its largest size, and {} has not seen the \
                 oldest records; new changes wait (`dray audit list {export}`)",
                self.retention.slowest()
            );
        }
        let waits = self.failing && self.options.full != FullPolicy::Drop;
        self.shared.blocked.store(is_full || waits, Ordering::Relaxed);
    }

    fn sync(&mut self, now: bool) {
        let Some(since) = self.unsynced_since else { return };
        if !now && since.elapsed() < SYNC_TIME {
            return;
        }
        self.unsynced_since = None;
        let synced = self.current.as_ref().map_or(Ok(()), SegmentWriter::sync);
        if let Err(error) = synced {
            self.current = None; // nobody knows what it has: the next segment begins anew
            self.failed(&error);
        }
    }

    fn report(&self) {
        let mut status = self.shared.status.lock().unwrap_or_else(PoisonError::into_inner);
        (status.records, status.bytes) = self.written;
        status.next_index = self.next_index;
        status.dropped = self.dropped;
        (status.segments, status.log_bytes) = self.retention.found;
        (status.consumers, status.lag) = self.retention.consumers(self.next_index);
    }
}

/// Directories that a log with these options has segments in.
pub(super) fn dirs_of(options: &AuditOptions) -> Vec<PathBuf> {
    let spill = options.spill.iter().cloned();
    std::iter::once(options.dir.clone()).chain(spill).collect()
}

fn wall_clock_us() -> u64 {
    dray_rt::wall_clock().as_micros() as u64
}
