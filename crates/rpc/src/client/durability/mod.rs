//! Durability: what a client keeps so that a loss of power at the server loses nothing.
//!
//! A server answers a change before the change is on media. Until it is, the change is here. If the
//! server's machine loses power meanwhile, the client sends the change again. A change that cannot
//! be sent again is reported as a loss, at the next sync or close of each file concerned.
//!
//! # Interface
//!
//! [`UnsyncedLog`] is the layer; each session has one. The rest of the client tells it events and
//! asks it for decisions. It makes no calls and starts no task.
//!
//! | event or question | methods of [`UnsyncedLog`] |
//! |---|---|
//! | a change was answered | `change_answered`, `name_answered` |
//! | something is on media | `sync_answered`, `durable_up_to` |
//! | an open file ends | `writer_closed` |
//! | what is to be reported | `loss_to_report`, `may_report_loss`, `losses_known` |
//! | the server lost its state | `server_lost_power` |
//! | what is to be replayed | `replay_begins`, `files_to_replay`, `next_to_replay`, `replay_ends` |
//! | when a sync is due | `schedule_syncs_by`, `sync_reason` |
//! | a sync failed | `sync_of_all_failed`, `files_to_sync`, `file_sync_failed` |
//!
//! # Promises
//!
//! - A change that is kept is replayed after a loss of power, in the order of its file's stamps,
//!   or its loss is reported.
//! - A change that is not kept is noted, and its loss is reported.
//! - A loss is reported through each open file that wrote the file. It is reported once at a sync,
//!   and at each close of a descriptor until then.
//! - A change is forgotten only when the server says that it is on media.
//!
//! # Bounds
//!
//! Kept data and changes take [`UnsyncedLog::new`]'s limit at most, and one segment more of memory.
//! There are notes of 65,536 files, 65,536 names and 65,536 synced files at most. Beyond that the
//! layer knows only that there are more changes, and asks for a sync.
//!
//! A write costs one copy of its data, and no allocation while the containers have room.
//!
//! # What it must not know
//!
//! No sockets, channels or sessions, and no encoding. From `wire` it takes two values,
//! [`Change`] and [`Ticket`], and passes them on as they are. Memory for data comes from a
//! [`SegmentSource`] and from nowhere else.

mod changes;
mod copies;
mod failed_sync;
mod file_changes;
mod losses;
mod name_changes;
mod replay;
mod reports;
mod segments;
mod sync_requests;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Waker;

use dray_core::{FileId, Identity};
use dray_rt::Instant;

pub(crate) use crate::wire::{Change, Ticket};
use copies::CopyStore;
use file_changes::FileChanges;
use losses::Losses;
use name_changes::NameChanges;
use sync_requests::SyncRequests;

pub(crate) use changes::SyncedFor;
pub(crate) use file_changes::{KeptChange, changes_of};
pub use losses::{LossEvent, UnsyncedStatus};
pub(crate) use name_changes::ExpectedName;
pub(crate) use segments::{LimitedSegments, MappedSegments, SegmentLimit, SegmentSource};
pub(crate) use sync_requests::{SYNC_AFTER, SyncPacing, SyncReason};

/// Files with changes at most. Of further files the log knows only that there are some.
const FILES_MAX: usize = 65_536;
/// Files whose stamp of the last sync is remembered. When there are more, everything is synced.
const SYNCED_FILES_MAX: usize = 65_536;
/// A sync is urgent when one part in so many of the room is used. Then as much again, and more, is
/// free for changes while the sync lasts.
const URGENT_PART: u64 = 4;
/// A sync is urgent at one part in so many of that, where other sessions leave little memory.
const SCARCE_PART: u64 = 8;

/// All changes of one mount that may not be on media.
pub(crate) struct UnsyncedLog {
    limit_bytes: u64,
    /// Something was lost, or may be. While it is false, syncs and closes need no look at the rest.
    alert: AtomicBool,
    /// How often the server's machine has lost power. It changes under the lock.
    power_epoch: AtomicU64,
    copies: CopyStore,
    state: Mutex<State>,
    /// Starts the sync scheduler.
    starter: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

#[derive(Default)]
struct State {
    /// [`UnsyncedLog::power_epoch`].
    power_epoch: u64,
    replaying: bool,
    /// A sync of everything failed, and not each file has been synced by itself since.
    sync_failed: bool,
    files: BTreeMap<FileId, FileChanges>,
    names: NameChanges,
    kept_bytes: u64,
    /// The last of the changes that there was no room to note.
    unnoted: Option<ChangeStamp>,
    inherited: InheritedChanges,
    durable: DurableStamps,
    losses: Losses,
    requests: SyncRequests,
    /// When the server said last, unasked, that everything up to some stamp is on media.
    synced_by_others: Option<Instant>,
    /// Wakers of calls that wait for the end of a replay.
    waiting: Vec<Waker>,
}

/// When a change was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangeStamp {
    /// The place of the change in the server's order; 0 from a server that gives none.
    pub(crate) number: u64,
    /// [`UnsyncedLog::power_epoch`] of the connection that brought the answer.
    pub(crate) power_epoch: u64,
}

impl ChangeStamp {
    /// Whether the machine has lost power since, where `power_epoch` is what it is now.
    fn is_before(&self, power_epoch: u64) -> bool {
        self.power_epoch < power_epoch
    }
}

/// The facts that an answer gives of the change or sync that it confirms.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Confirmation {
    pub(crate) stamp: ChangeStamp,
    /// A ticket that a later epoch of the server believes. Of a file, it says that the file may be
    /// opened. Of a sync, it says what is on media.
    pub(crate) ticket: Option<Ticket>,
}

/// Whether a process before this one served the mount, and what became of its changes.
#[derive(Default, PartialEq, Eq, Clone, Copy)]
enum InheritedChanges {
    #[default]
    None,
    /// The changes may not be on media.
    Unknown,
    Lost,
}

/// Every change up to this one is on media.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DurableStamp {
    /// [`ChangeStamp::number`] of that change.
    pub(crate) number: u64,
    /// The server's ticket that says so.
    pub(crate) ticket: Option<Ticket>,
}

/// The changes that are known to be on media, for a server that has forgotten it.
#[derive(Clone, Default)]
pub(crate) struct DurableStamps {
    /// The last stamp of any answer.
    pub(crate) newest: u64,
    /// The stamp up to which all files are on media.
    pub(crate) all: DurableStamp,
    /// The stamps of single files of which more is on media.
    pub(crate) files: BTreeMap<FileId, DurableStamp>,
}

/// A change of a file that has been answered.
pub(crate) struct FileChange<'a> {
    pub(crate) file: FileId,
    pub(crate) confirmation: Confirmation,
    /// The change itself; none: it cannot be repeated.
    pub(crate) change: Option<Change>,
    pub(crate) data: &'a [u8],
    pub(crate) who: &'a Arc<Identity>,
    /// The change was synced as it was made. It is kept all the same: a replay would repeat older
    /// changes of other clients over it.
    pub(crate) is_durable: bool,
}

/// A change of a name that has been answered.
pub(crate) struct NameChange<'a> {
    pub(crate) dir: FileId,
    pub(crate) name: &'a [u8],
    pub(crate) stamp: ChangeStamp,
    pub(crate) expected: ExpectedName,
}

/// The log's part of an open file: through which losses of the file are reported.
pub(crate) struct LoggedWriter {
    file: FileId,
    /// The file was changed through it.
    wrote: AtomicBool,
    /// Number of the last loss that was reported through it.
    reported: AtomicU64,
}

impl LoggedWriter {
    pub(crate) fn new(file: FileId) -> LoggedWriter {
        LoggedWriter { file, wrote: AtomicBool::new(false), reported: AtomicU64::new(0) }
    }
}

impl UnsyncedLog {
    /// Keeps up to `limit_bytes`, in memory of `source`. `inherited`: a process before this one
    /// served the mount.
    pub(crate) fn new(
        limit_bytes: u64,
        source: Box<dyn SegmentSource>,
        inherited: bool,
    ) -> UnsyncedLog {
        let inherited = if inherited { InheritedChanges::Unknown } else { InheritedChanges::None };
        UnsyncedLog {
            limit_bytes,
            alert: AtomicBool::new(false),
            power_epoch: AtomicU64::new(0),
            copies: CopyStore::new(limit_bytes, source),
            state: Mutex::new(State { inherited, ..State::default() }),
            starter: OnceLock::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For the status.
    pub(crate) fn status(&self) -> UnsyncedStatus {
        let memory_bytes = self.copies.memory_bytes();
        let state = self.lock();
        UnsyncedStatus {
            limit_bytes: self.limit_bytes,
            memory_bytes,
            kept_bytes: state.kept_bytes,
            unkept_bytes: state.files.values().map(|file| file.unkept_bytes).sum(),
            files: state.files.values().filter(|file| !file.is_clean()).count() as u64,
            names: state.names.len() as u64,
            recovering: state.replaying,
            ..state.losses.status()
        }
    }

    /// Whether everything is on media, as far as is known.
    pub(crate) fn is_clean(&self) -> bool {
        self.lock().is_clean()
    }

    /// How often the server's machine has lost power: of changes that are answered now.
    pub(crate) fn power_epoch(&self) -> u64 {
        self.power_epoch.load(Ordering::SeqCst)
    }
}

impl State {
    fn is_clean(&self) -> bool {
        let files = self.files.values().all(FileChanges::is_clean);
        let all = files && self.names.len() == 0 && self.unnoted.is_none();
        let known = self.inherited != InheritedChanges::Unknown;
        all && known && self.durable.files.len() < SYNCED_FILES_MAX
    }

    /// A stamp was seen in an answer.
    fn see(&mut self, stamp: ChangeStamp) {
        self.durable.newest = self.durable.newest.max(stamp.number);
    }
}

#[cfg(test)]
mod tests;
