//! The log of dirty data on the local disk: what programs have written under write leases and the server does not have
//! yet (ADR 0058).
//!
//! A log is a directory of segments, and belongs to one session. Records are appended. A segment is removed when all
//! writes in it and before it are at the server. Errors of the disk end the use of the log for a while, and nothing
//! else. What it has is in memory, too, as long as the process lives.

mod any_log;
mod disk;
mod left;
mod record;
mod scan;
mod segments;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::NodeId;
use dray_rt::{Instant, Pool, now};

pub use self::any_log::{read_any_log, read_written_log};
pub use self::disk::{LocalLogDisk, LogDisk, LogFile, LogLock};
pub(crate) use self::disk::{LogDir, sync_above};
pub use self::left::{
    DirtyLogSummary, dirty_log_summaries, dirty_log_summaries_on, left_dirty_bytes,
};
pub(crate) use self::left::{LeftLog, left_logs};
pub use self::record::DirtyLogIdentity;
pub(crate) use self::record::{
    LogRecord, RECORD_MAX_BYTES, SendingRecord, SentRecord, WriteRecord,
};
pub(crate) use self::scan::{FoundFile, FoundLog, FoundWrite, scan};
use self::segments::{LogOwner, Segments};

/// A segment that is longer is followed by another one, bytes.
const SEGMENT_MAX_BYTES: u64 = 16 << 20;
/// So long the disk is left alone after an error.
const PAUSE: Duration = Duration::from_secs(10);
/// Threads that wait for the disk, and calls that wait for one.
const THREADS_MAX: usize = 2;
const QUEUE_MAX: usize = 1024;

/// How a session keeps writes on a local disk.
#[derive(Clone, Debug)]
pub struct WriteBackOptions {
    /// The directory of all logs of the machine. Each session has one below it.
    pub dir: PathBuf,
    /// The disk that it is on.
    pub disk: Arc<dyn LogDisk>,
    /// Dirty data at most, bytes.
    pub bytes_max: u64,
    /// The longest time until they are sent.
    pub age_max: Duration,
    /// A process that starts another one when this one dies. None: nobody does.
    pub supervisor: Option<u32>,
}

/// The log of a session.
pub(crate) struct DirtyLog {
    dir: LogDir,
    bytes_max: u64,
    supervisor: Option<u32>,
    pool: Pool,
    state: Mutex<State>,
    errors: AtomicU64,
}

struct State {
    segments: Segments,
    paused_until: Option<Instant>,
}

/// Where the writes of a batch are in the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LoggedRange {
    /// The number of the last one.
    pub(crate) last: u64,
    /// Bytes of records in each segment, by its number.
    segments: Vec<(u64, u64)>,
}

impl LoggedRange {
    /// A write more, which is behind all others.
    pub(crate) fn add(&mut self, number: u64, (segment, bytes): (u64, u64)) {
        self.last = number;
        match self.segments.last_mut() {
            Some((of, sum)) if *of == segment => *sum += bytes,
            _ => self.segments.push((segment, bytes)),
        }
    }

    /// Both of them, of which `later` is behind.
    pub(crate) fn and(mut self, later: LoggedRange) -> LoggedRange {
        self.segments.extend(later.segments);
        LoggedRange { last: self.last.max(later.last), ..self }
    }
}

impl WriteBackOptions {
    /// The directory of all logs.
    pub(crate) fn logs(&self) -> LogDir {
        LogDir { disk: self.disk.clone(), path: self.dir.clone() }
    }

    /// The directory of the log of a client.
    fn log_of(&self, node: NodeId) -> LogDir {
        self.logs().below(Path::new(&format!("{:016x}", node.0)))
    }
}

/// Checksums in a segment begin with that.
fn seed_of(number: u64) -> u64 {
    0x6472_6179_6c6f_6731 ^ number
}

impl DirtyLog {
    /// The log of a client. Nothing is made on the disk before the first write.
    pub(crate) fn new(options: &WriteBackOptions, node: NodeId) -> DirtyLog {
        let state = State { segments: Segments::default(), paused_until: None };
        DirtyLog {
            dir: options.log_of(node),
            bytes_max: options.bytes_max,
            supervisor: options.supervisor,
            pool: Pool::new("dray-dirty", THREADS_MAX, QUEUE_MAX),
            state: Mutex::new(state),
            errors: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a process before this one has left, which this one goes on with. Nothing if the disk does not answer:
    /// the log says so.
    pub(crate) fn inherit(&self) -> FoundLog {
        let found = self.dir.is_there().then(|| {
            let found = scan(&self.dir)?;
            self.lock().segments.inherit(&self.dir, &found)?;
            io::Result::Ok(found)
        });
        match found {
            Some(Ok(found)) => {
                if found.torn_bytes > 0 {
                    let dir = self.dir.path.display();
                    log::warn!("{dir}: {} bytes of the log are no whole records", found.torn_bytes);
                }
                found
            }
            Some(Err(error)) => {
                self.failed(&error);
                let dir = self.dir.path.display();
                log::error!("{dir}: what was kept there cannot be read, and stays there: {error}");
                FoundLog::default()
            }
            None => FoundLog::default(),
        }
    }

    /// Notes a write. Answers its number, and where it is. None: the disk takes nothing now, or the log is as long as
    /// it may be.
    pub(crate) fn note(
        &self,
        identity: &DirtyLogIdentity,
        write: WriteRecord,
        data: &[u8],
    ) -> Option<(u64, (u64, u64))> {
        let mut state = self.lock();
        if is_paused(&mut state) || state.segments.bytes() > 2 * self.bytes_max + SEGMENT_MAX_BYTES
        {
            return None;
        }
        let owner = LogOwner { identity, supervisor: self.supervisor };
        let noted = state.segments.note(&self.dir, &owner, write, data);
        noted.map_err(|error| self.failed_locked(&mut state, &error)).ok().flatten()
    }

    /// Notes that a batch is being sent. If that fails, the batch may be sent twice after a death of the process, and
    /// is kept aside then.
    pub(crate) fn sending(&self, sending: SendingRecord) {
        let mut state = self.lock();
        if let Err(error) = state.segments.append(&LogRecord::Sending(sending)) {
            self.failed_locked(&mut state, &error);
        }
    }

    /// What a batch had is at the server, or beside.
    pub(crate) fn sent(&self, sent: SentRecord, range: &LoggedRange) {
        let mut state = self.lock();
        if let Err(error) = state.segments.append(&LogRecord::Sent(sent)) {
            self.failed_locked(&mut state, &error);
        }
        state.segments.release(&self.dir, range);
    }

    /// Brings all that is noted to media. Errors: those of the disk.
    pub(crate) async fn sync(&self) -> io::Result<()> {
        let unsynced = self.lock().segments.unsynced(&self.dir)?;
        let files = unsynced.files();
        let synced = self.pool.run(move || files.sync()).await;
        let synced = synced.unwrap_or_else(|_| Err(io::Error::other("no thread can be started")));
        match synced {
            Ok(()) => {
                self.lock().segments.synced(&unsynced);
                Ok(())
            }
            Err(error) => {
                let mut state = self.lock();
                state.segments.spoiled(&unsynced);
                self.failed_locked(&mut state, &error);
                Err(error)
            }
        }
    }

    /// Whether the server has everything that it notes.
    pub(crate) fn is_clean(&self) -> bool {
        self.lock().segments.is_clean()
    }

    /// Nothing is dirty any more, and nobody comes behind this process.
    pub(crate) fn remove(&self) {
        let mut state = self.lock();
        state.segments = Segments::default();
        match self.dir.disk.remove_dir(&self.dir.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                log::warn!("{}: {error}", self.dir.path.display());
            }
            _ => {}
        }
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir.path
    }

    /// How often the disk has failed.
    pub(crate) fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    fn failed(&self, error: &io::Error) {
        self.failed_locked(&mut self.lock(), error);
    }

    /// Something is wrong with the disk. Writes go to the server for a while.
    fn failed_locked(&self, state: &mut State, error: &io::Error) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        if !is_paused(state) {
            let (dir, seconds) = (self.dir.path.display(), PAUSE.as_secs());
            log::warn!("{dir}: {error}; writes go to the server for {seconds} s");
        }
        state.paused_until = Some(now() + PAUSE);
        state.segments.begin_anew();
    }
}

fn is_paused(state: &mut State) -> bool {
    state.paused_until.take_if(|until| *until <= now());
    state.paused_until.is_some()
}
