//! The segments of a log, as the process that writes it has them.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::sync::Arc;

use super::disk::{LogDir, LogFile, LogLock};
use super::record::{self, DirtyLogIdentity, LogRecord, WriteRecord};
use super::scan::FoundLog;
use super::{LoggedRange, SEGMENT_MAX_BYTES, seed_of};

/// More says nobody who starts processes.
const SUPERVISOR_MAX_BYTES: u64 = 4 << 10;

/// The session of a log, and who starts its processes.
pub(super) struct LogOwner<'a> {
    pub(super) identity: &'a DirtyLogIdentity,
    pub(super) supervisor: Option<u32>,
}

/// All segments, the oldest first. The last one may be written.
#[derive(Default)]
pub(super) struct Segments {
    segments: VecDeque<Segment>,
    /// The last one is written on.
    is_open: bool,
    /// The number of the next write, and of the next segment.
    next_write: u64,
    next_segment: u64,
    /// Held as long as the process lives: nobody else writes what is here to its files.
    lock: Option<LogLock>,
    dir_is_synced: bool,
    /// The name of the directory is on media, and those of all above it.
    above_is_synced: bool,
    buffer: Vec<u8>,
}

struct Segment {
    number: u64,
    file: Arc<dyn LogFile>,
    len_bytes: u64,
    synced_bytes: u64,
    /// Bytes of the records of writes that are not sent.
    live_bytes: u64,
    /// A sync has failed, so nobody knows what of it is on media (fsync(2) reports an error once).
    is_spoiled: bool,
}

/// What is to be brought to media.
pub(super) struct UnsyncedSegments {
    segments: Vec<(u64, u64, Arc<dyn LogFile>)>,
    dir: Option<LogDir>,
    above: Option<LogDir>,
}

/// The files of that.
pub(super) struct UnsyncedFiles {
    files: Vec<Arc<dyn LogFile>>,
    dir: Option<LogDir>,
    above: Option<LogDir>,
}

impl UnsyncedSegments {
    pub(super) fn files(&self) -> UnsyncedFiles {
        let files = self.segments.iter().map(|(_, _, file)| file.clone()).collect();
        UnsyncedFiles { files, dir: self.dir.clone(), above: self.above.clone() }
    }
}

impl UnsyncedFiles {
    pub(super) fn sync(&self) -> io::Result<()> {
        self.files.iter().try_for_each(|file| file.sync_data())?;
        self.dir.as_ref().map_or(Ok(()), LogDir::sync)?;
        self.above.as_ref().map_or(Ok(()), LogDir::sync_above)
    }
}

impl Segments {
    /// Goes on behind what a process before this one has left.
    pub(super) fn inherit(&mut self, dir: &LogDir, found: &FoundLog) -> io::Result<()> {
        let held = dir.lock()?;
        self.lock = Some(held.ok_or_else(|| io::Error::other("another process has it"))?);
        for (number, len_bytes) in &found.segments {
            let file = dir.disk.open(&dir.segment(*number))?;
            self.segments.push_back(Segment {
                number: *number,
                file,
                len_bytes: *len_bytes,
                synced_bytes: 0,
                live_bytes: 0,
                is_spoiled: false,
            });
            self.next_segment = self.next_segment.max(number + 1);
        }
        self.next_write = found.next;
        for write in found.files.iter().flat_map(|file| &file.writes) {
            if let Some(segment) = self.segment(write.segment) {
                segment.live_bytes += write.data.len() as u64;
            }
        }
        Ok(())
    }

    fn segment(&mut self, number: u64) -> Option<&mut Segment> {
        self.segments.iter_mut().find(|segment| segment.number == number)
    }

    /// Bytes of all segments.
    pub(super) fn bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.len_bytes).sum()
    }

    /// Whether everything that is noted is sent.
    pub(super) fn is_clean(&self) -> bool {
        self.segments.iter().all(|segment| segment.live_bytes == 0)
    }

    /// The next record goes to another segment.
    pub(super) fn begin_anew(&mut self) {
        self.is_open = false;
    }

    /// Appends a write. None: it is longer than a record may be.
    pub(super) fn note(
        &mut self,
        dir: &LogDir,
        owner: &LogOwner<'_>,
        write: WriteRecord,
        data: &[u8],
    ) -> io::Result<Option<(u64, (u64, u64))>> {
        let is_full = self.segments.back().is_none_or(|last| last.len_bytes >= SEGMENT_MAX_BYTES);
        if !self.is_open || is_full {
            self.begin_segment(dir, owner)?;
        }
        let number = self.next_write;
        if !self.put(&LogRecord::Write(WriteRecord { number, ..write }), data)? {
            return Ok(None);
        }
        self.next_write += 1;
        let last = self.segments.back_mut().expect("it was begun");
        last.live_bytes += data.len() as u64;
        Ok(Some((number, (last.number, data.len() as u64))))
    }

    /// Appends a record without data. Before the first write there is nothing that it could be about.
    pub(super) fn append(&mut self, record: &LogRecord) -> io::Result<()> {
        if self.segments.is_empty() {
            return Ok(());
        }
        self.put(record, &[]).map(drop)
    }

    fn begin_segment(&mut self, dir: &LogDir, owner: &LogOwner<'_>) -> io::Result<()> {
        if self.lock.is_none() {
            dir.disk.make_dir(&dir.path)?;
            let held = dir.lock()?;
            self.lock = Some(held.ok_or_else(|| io::Error::other("another process has it"))?);
            let supervisor = owner.supervisor.map(process_name).unwrap_or_default();
            dir.disk.write(&dir.supervisor(), supervisor.as_bytes())?;
        }
        let number = self.next_segment;
        self.next_segment += 1;
        let file = dir.disk.create(&dir.segment(number))?;
        self.segments.push_back(Segment {
            number,
            file,
            len_bytes: 0,
            synced_bytes: 0,
            live_bytes: 0,
            is_spoiled: false,
        });
        // Without its head nothing goes to it, and neither to the one before, which may not go on.
        (self.is_open, self.dir_is_synced) = (false, false);
        let begun = self.put(&LogRecord::Head(owner.identity.clone(), self.next_write), &[]);
        self.is_open = begun.is_ok();
        if begun.is_err() {
            // Nothing that is behind it could be read.
            self.segments.pop_back();
            let _ = dir.disk.remove_file(&dir.segment(number)); // as far as it was made
        }
        begun.map(drop)
    }

    /// Appends to the last segment. What was written of a record that failed is no record.
    fn put(&mut self, record: &LogRecord, data: &[u8]) -> io::Result<bool> {
        let last = self.segments.back_mut().expect("it was begun");
        self.buffer.clear();
        if !record::put(seed_of(last.number), record, data, &mut self.buffer) {
            return Ok(false);
        }
        last.file.write_at(&self.buffer, last.len_bytes)?;
        last.len_bytes += self.buffer.len() as u64;
        Ok(true)
    }

    /// What a batch had is at the server. Segments that nobody needs any more are removed, the oldest first. What a
    /// record says about an earlier segment holds for as long as that is there.
    pub(super) fn release(&mut self, dir: &LogDir, range: &LoggedRange) {
        for (number, bytes) in &range.segments {
            if let Some(segment) = self.segment(*number) {
                segment.live_bytes = segment.live_bytes.saturating_sub(*bytes);
            }
        }
        while self.segments.len() > 1 && self.segments[0].live_bytes == 0 {
            let gone = self.segments.pop_front().expect("there is one");
            let path = dir.segment(gone.number);
            if let Err(error) = dir.disk.remove_file(&path) {
                log::warn!("{}: {error}", path.display());
            }
        }
    }

    /// Errors: a sync before has failed, and what it was about is not at the server yet.
    pub(super) fn unsynced(&self, dir: &LogDir) -> io::Result<UnsyncedSegments> {
        if self.segments.iter().any(|one| one.is_spoiled && one.live_bytes > 0) {
            return Err(io::Error::other("a sync before has failed"));
        }
        let dirty = self.segments.iter().filter(|one| one.synced_bytes < one.len_bytes);
        let segments = dirty.map(|one| (one.number, one.len_bytes, one.file.clone())).collect();
        let unless = |is_synced: bool| (!is_synced).then(|| dir.clone());
        let (dir, above) = (unless(self.dir_is_synced), unless(self.above_is_synced));
        Ok(UnsyncedSegments { segments, dir, above })
    }

    pub(super) fn spoiled(&mut self, what: &UnsyncedSegments) {
        for (number, ..) in &what.segments {
            if let Some(segment) = self.segment(*number) {
                segment.is_spoiled = true;
            }
        }
    }

    pub(super) fn synced(&mut self, what: &UnsyncedSegments) {
        for (number, len_bytes, _) in &what.segments {
            if let Some(segment) = self.segment(*number) {
                segment.synced_bytes = segment.synced_bytes.max(*len_bytes);
            }
        }
        // A segment that was begun meanwhile is not in the directory yet.
        let newest = self.segments.back().is_none_or(|last| last.synced_bytes > 0);
        self.dir_is_synced |= what.dir.is_some() && newest;
        self.above_is_synced |= what.above.is_some();
    }
}

/// A process, as it is known while its number is in use, and after the machine was started again.
pub(super) fn process_name(pid: u32) -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    format!("{pid} {} {}", start_of(pid).unwrap_or_default(), boot.trim())
}

/// When a process that runs was started, in ticks since the start of the machine (proc_pid_stat(5), field 22).
fn start_of(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut behind_name = stat[stat.rfind(')')? + 1..].split_whitespace();
    // One that nobody has waited for has ended all the same.
    let has_ended = behind_name.next().is_none_or(|state| matches!(state, "Z" | "X"));
    behind_name.nth(18).filter(|_| !has_ended).map(str::to_owned)
}

/// Whether the process that is to start another one for this log is still there.
pub(super) fn is_supervised(dir: &LogDir) -> bool {
    let noted = dir.disk.read(&dir.supervisor(), SUPERVISOR_MAX_BYTES).unwrap_or_default();
    let noted = String::from_utf8_lossy(&noted).into_owned();
    let pid = noted.split(' ').next().and_then(|pid| pid.parse::<u32>().ok());
    pid.is_some_and(|pid| start_of(pid).is_some() && process_name(pid) == noted)
}
