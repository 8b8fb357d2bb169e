//! What was changed and is not known to be on media: kept, so that it can be sent again
//! when the server's machine has lost power, or noted, so that its loss can be told.
//!
//! A change is here from its answer until the server says that it is on media: for a file
//! that is synced, in the answer to that; for everything, when anybody had everything synced.

mod doubt;
mod lost;
mod names;
mod of_file;
mod segment;
mod store;
pub(crate) mod tend;
mod tender;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use dray_core::{FileId, Identity};
use dray_rt::Instant;

use crate::client::channel::Made;
use crate::client::recovery::losses::{Losses, UnsyncedStatus};
use crate::wire::{Change, Ticket};
use names::Names;
use of_file::{CHANGE_BYTES, OfFile};
use store::{Copied, Store};
use tender::Tender;

pub(crate) use names::Expect;
pub(crate) use of_file::{Kept, changes_of};
pub(crate) use tender::{Pace, SYNC_AFTER, Wake};

/// Files with changes at most; of further ones only that there are some is known.
const FILES_MAX: usize = 65_536;
/// Files whose stamp of the last sync is remembered; beyond it everything is synced.
const FLOORS_MAX: usize = 65_536;
/// A sync is urgent when one part in so many of the room is used: while it lasts as much
/// again and more can be kept.
const URGENT_PART: u64 = 4;

/// All changes of one mount that may not be on media.
pub(crate) struct Unsynced {
    limit_bytes: u64,
    /// Something was lost, or may be: spares a look at the rest at each sync and close.
    alert: AtomicBool,
    store: Store,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Lives of the server's machine so far.
    epoch: u64,
    recovering: bool,
    /// A sync of everything failed, and not each file has been looked at since.
    doubtful: bool,
    files: BTreeMap<FileId, OfFile>,
    names: Names,
    kept_bytes: u64,
    /// Of changes that there was no room to note: the last.
    beyond: Option<Moment>,
    /// A process before us may have changed anything.
    inherited: Inherited,
    stamps: StampsSeen,
    losses: Losses,
    tender: Tender,
    /// When the server said last, unasked, that everything up to some change is on media.
    heard: Option<Instant>,
    waiting: Vec<Waker>,
}

/// When a change was made, in the order of the server and of its machine's lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Moment {
    stamp: u64,
    epoch: u64,
}

impl From<Made> for Moment {
    fn from(made: Made) -> Moment {
        Moment { stamp: made.stamp, epoch: made.epoch }
    }
}

#[derive(Default, PartialEq, Eq, Clone, Copy)]
enum Inherited {
    #[default]
    Nothing,
    /// Its changes may not be on media.
    Unknown,
    Lost,
}

/// What is known to be on media, for the server that has forgotten.
#[derive(Default)]
struct StampsSeen {
    newest: u64,
    floor: (u64, Option<Ticket>),
    floors: BTreeMap<FileId, (u64, Option<Ticket>)>,
}

/// The same, to be said: stamps and the tickets that say so.
pub(crate) struct Seen {
    pub(crate) newest: u64,
    pub(crate) floor: (u64, Option<Ticket>),
    pub(crate) floors: Vec<(FileId, u64, Option<Ticket>)>,
}

/// A change of a file that has been answered.
pub(crate) struct Changed<'a> {
    pub(crate) file: FileId,
    pub(crate) made: Made,
    /// None: it cannot be made again.
    pub(crate) change: Option<Change>,
    pub(crate) data: &'a [u8],
    pub(crate) who: &'a Arc<Identity>,
    /// It was synced as it was made. It is kept all the same: what others have kept of before would be
    /// made again over it.
    pub(crate) on_media: bool,
}

/// What an open file has to do with losses.
#[derive(Default)]
pub(crate) struct Writer {
    wrote: AtomicBool,
    /// The last loss that it was told of.
    told: AtomicU64,
}

/// What is done with a change.
enum Fate {
    Keep(Change, Option<Copied>),
    /// It cannot be made again.
    Note,
    /// There is no room for it.
    Overflow,
}

impl Unsynced {
    /// Keeps up to `limit_bytes`. `inherited`: a process before us served this mount.
    pub(crate) fn new(limit_bytes: u64, inherited: bool) -> Unsynced {
        let inherited = if inherited { Inherited::Unknown } else { Inherited::Nothing };
        let state = State { inherited, ..State::default() };
        Unsynced {
            limit_bytes,
            alert: AtomicBool::new(false),
            store: Store::new(limit_bytes),
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a change of a file, through `writer` if it was made through an open file. True
    /// if somebody has to be found who asks for syncs.
    pub(crate) fn changed(&self, new: Changed<'_>, writer: Option<&Writer>) -> bool {
        let (id, at, bytes) = (new.file, Moment::from(new.made), new.data.len() as u64);
        if new.on_media && self.limit_bytes == 0 {
            return false;
        }
        let fate = self.fate(&new);
        let mut state = self.lock();
        let state = &mut *state;
        state.stamps.newest = state.stamps.newest.max(at.stamp);
        let room = state.files.len() < FILES_MAX || state.files.contains_key(&id);
        if !room && writer.is_none_or(|writer| !writer.wrote.load(Ordering::Relaxed)) {
            if new.on_media {
                return false;
            }
            state.beyond = Some(at);
            return state.tender.call(false, true);
        }
        let file = state.files.entry(id).or_default();
        file.has_ticket(new.made.ticket);
        if let Some(writer) = writer
            && !writer.wrote.swap(true, Ordering::Relaxed)
        {
            file.writers += 1;
            writer.told.store(file.lost, Ordering::Relaxed);
        }
        match fate {
            Fate::Keep(change, copied) => {
                for (change, data) in pieces(change, copied) {
                    let who = new.who.clone();
                    let (Moment { stamp, epoch }, on_media) = (at, new.on_media);
                    state.kept_bytes +=
                        file.keep(Kept { stamp, epoch, change, data, who, on_media, sent: 0 });
                }
            }
            // Of what is on media nothing is lost, unless something older would be made again over it.
            Fate::Note | Fate::Overflow if new.on_media => {
                state.kept_bytes -= file.forget_on_media();
                if file.kept_bytes > 0 {
                    file.note(at, bytes, true);
                }
            }
            Fate::Note => file.note(at, bytes, false),
            Fate::Overflow => file.note(at, bytes, true),
        }
        let late = at.epoch < state.epoch && !state.recovering;
        if late {
            // Answered by a machine that has since lost power, and too late to be sent again.
            state.lose(id, "it was answered just before the loss of power", true);
            self.note_alert(state);
        }
        // Where nothing is kept, a sync makes no room.
        let urgent = self.limit_bytes > 0 && state.kept_bytes > self.limit_bytes / URGENT_PART;
        state.tender.call(urgent, false)
    }

    /// What is to be done with a change. Its data are copied here, where nobody is kept waiting.
    fn fate(&self, new: &Changed<'_>) -> Fate {
        let Some(change) = new.change.filter(|_| new.made.stamp > 0) else { return Fate::Note };
        // It may end up in two pieces.
        let cost_bytes = new.data.len() as u64 + 2 * CHANGE_BYTES;
        if !self.admits(new.file, cost_bytes) {
            return Fate::Overflow;
        }
        if new.data.is_empty() {
            return Fate::Keep(change, None);
        }
        match self.store.copy(new.data) {
            Some(copied) => Fate::Keep(change, Some(copied)),
            None => Fate::Overflow,
        }
    }

    /// Whether there is room for another change of a file: each may take as much as it leaves
    /// to the others (dynamic thresholds with alpha 1, as in `dray_fabric::BufferPool`), so
    /// that a stream does not push out everybody else. Of a file that has overflowed nothing
    /// more is kept until a sync: its loss would be told anyway.
    fn admits(&self, id: FileId, cost_bytes: u64) -> bool {
        if self.limit_bytes == 0 {
            return false;
        }
        let state = self.lock();
        let free_bytes = self.limit_bytes.saturating_sub(state.kept_bytes);
        let (kept_bytes, overflowed) = match state.files.get(&id) {
            Some(file) => (file.kept_bytes, file.overflowed),
            None => (0, false),
        };
        !overflowed && kept_bytes + cost_bytes <= free_bytes
    }

    /// Notes a change of a name, as with [`Unsynced::changed`].
    pub(crate) fn named(&self, dir: FileId, name: &[u8], made: Made, expect: Expect) -> bool {
        let at = Moment::from(made);
        let mut state = self.lock();
        state.stamps.newest = state.stamps.newest.max(at.stamp);
        let (before, room) = state.names.note((dir, name), at, expect);
        if let Some(Expect::Is(id)) = before
            && expect != Expect::Is(id)
            && let Some(file) = state.files.get_mut(&id)
        {
            file.removed = true;
        }
        if !room {
            state.beyond = Some(at);
        }
        let many = !room || state.names.crowded();
        state.tender.call(false, many)
    }

    /// What is expected of a name that was changed lately.
    pub(crate) fn expected(&self, dir: FileId, name: &[u8]) -> Option<Expect> {
        self.lock().names.expected(dir, name)
    }

    /// A file that is open and was written by a process before us.
    pub(crate) fn adopted(&self, id: FileId, writer: &Writer) {
        let mut state = self.lock();
        let lost = state.inherited == Inherited::Lost;
        let number = state.losses.number();
        let file = state.files.entry(id).or_default();
        file.writers += 1;
        writer.wrote.store(true, Ordering::Relaxed);
        if lost {
            file.lost = number;
            self.note_alert(&state);
        }
    }

    /// An open file is closed.
    pub(crate) fn closed(&self, id: FileId, writer: &Writer) {
        if !writer.wrote.swap(false, Ordering::Relaxed) {
            return;
        }
        let mut state = self.lock();
        if let Some(file) = state.files.get_mut(&id) {
            file.writers = file.writers.saturating_sub(1);
            if file.writers == 0 {
                file.lost = 0;
            }
            if file.is_done() {
                state.files.remove(&id);
            }
        }
        if self.alert.load(Ordering::Relaxed) {
            self.note_alert(&state);
        }
    }

    /// `id` was synced, and everything up to the stamp of `made` with it. True as with
    /// [`Unsynced::changed`].
    pub(crate) fn synced(&self, id: FileId, made: Made) -> bool {
        let mut state = self.lock();
        let state = &mut *state;
        if let Some(file) = state.files.get_mut(&id) {
            state.kept_bytes -= file.forget(made.stamp);
            if file.is_done() {
                state.files.remove(&id);
            }
        }
        state.names.synced(id, made.stamp);
        if made.stamp == 0 {
            return false;
        }
        state.stamps.newest = state.stamps.newest.max(made.stamp);
        state.stamps.floors.insert(id, (made.stamp, made.ticket));
        let many = state.stamps.floors.len() >= FLOORS_MAX;
        self.relax(state);
        many && state.tender.call(false, true)
    }

    /// Everything up to `stamp` is on media, says the server, with `ticket`. `asked`: we had
    /// asked for it. Not believed before it is known what a failed sync has left out: the server's
    /// kernel tells of that once, and the next sync succeeds.
    pub(crate) fn stable(&self, stamp: u64, ticket: Option<Ticket>, asked: bool) {
        let mut state = self.lock();
        let state = &mut *state;
        if state.doubtful {
            return;
        }
        let mut freed_bytes = 0;
        state.files.retain(|_, file| {
            freed_bytes += file.forget(stamp);
            !file.is_done()
        });
        state.kept_bytes -= freed_bytes;
        state.names.stable(stamp);
        state.beyond = state.beyond.filter(|at| at.stamp > stamp);
        if stamp > state.stamps.floor.0 {
            state.stamps.floor = (stamp, ticket);
        }
        state.stamps.floors.retain(|_, (floor, _)| *floor > stamp);
        match (asked, state.inherited) {
            (true, Inherited::Unknown) => state.inherited = Inherited::Nothing,
            (false, Inherited::Nothing | Inherited::Lost) => state.heard = Some(dray_rt::now()),
            _ => {}
        }
        self.relax(state);
    }

    /// Something is on media: what was urgent may be no more, or all may be done.
    fn relax(&self, state: &mut State) {
        state.tender.data &= state.kept_bytes > self.limit_bytes / URGENT_PART;
        if state.tender.for_clean && state.kept_bytes == 0 && state.names.len() == 0 {
            state.tender.wake(); // it looks at the rest
        }
    }

    /// For the status.
    pub(crate) fn status(&self) -> UnsyncedStatus {
        let memory_bytes = self.store.memory_bytes();
        let state = self.lock();
        UnsyncedStatus {
            limit_bytes: self.limit_bytes,
            memory_bytes,
            kept_bytes: state.kept_bytes,
            unkept_bytes: state.files.values().map(|file| file.unkept_bytes).sum(),
            files: state.files.values().filter(|file| !file.is_clean()).count() as u64,
            names: state.names.len() as u64,
            recovering: state.recovering,
            ..state.losses.status()
        }
    }

    /// Whether everything is on media, as far as is known.
    pub(crate) fn is_clean(&self) -> bool {
        self.lock().is_clean()
    }

    /// Whether everything that is not on media is kept.
    pub(crate) fn is_all_kept(&self) -> bool {
        self.lock().files.values().all(|file| !file.overflowed)
    }

    /// Whether somebody has to be found who asks for syncs, at once.
    pub(crate) fn call_tender(&self) -> bool {
        self.lock().tender.call(false, true)
    }

    /// Waits until a sync is urgent, with `data` also because of data, or, with `clean`, until
    /// everything is on media.
    pub(crate) async fn wake(&self, data: bool, clean: bool) -> Wake {
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if state.tender.notes || (data && state.tender.data) {
                return Poll::Ready(Wake::Urgent);
            }
            if clean && state.is_clean() {
                return Poll::Ready(Wake::Clean);
            }
            state.tender.waker = Some(task.waker().clone());
            state.tender.for_clean = clean;
            Poll::Pending
        })
        .await
    }

    /// How long the changes that are not on media are known to be no older than `age`: others
    /// have had everything synced meanwhile.
    pub(crate) fn is_young_for(&self, age: Duration) -> Duration {
        let heard = self.lock().heard;
        heard.map_or(Duration::ZERO, |heard| age.saturating_sub(heard.elapsed()))
    }

    /// A sync is about to be asked for.
    pub(crate) fn sync_begins(&self) {
        let mut state = self.lock();
        (state.tender.data, state.tender.notes) = (false, false);
    }

    /// Whether the task that asks for syncs can end: everything is on media.
    pub(crate) fn tender_ends(&self) -> bool {
        let mut state = self.lock();
        if !state.is_clean() {
            return false;
        }
        state.tender = Tender::default();
        drop(state);
        self.store.trim();
        trim_heap();
        true
    }

    /// The task that asks for syncs has gone without ending its work.
    pub(crate) fn tender_gone(&self) {
        self.lock().tender = Tender::default();
    }

    /// Gives memory that is not needed now back to the system.
    pub(crate) fn trim(&self) {
        self.store.trim();
    }
}

/// Gives free memory of the heap back to the system: what was noted of many names, and what
/// the calls for them took, lies between what stays, and free(3) gives back only what lies at the end.
fn trim_heap() {
    #[cfg(target_env = "gnu")]
    if !dray_rt::in_simulation() {
        // SAFETY: no pointers.
        unsafe { libc::malloc_trim(0) };
    }
}

/// A write whose data did not fit into one segment is kept as two.
fn pieces(
    change: Change,
    copied: Option<Copied>,
) -> impl Iterator<Item = (Change, Option<dray_core::Buf>)> {
    let (first, rest) = match copied {
        Some((first, rest)) => (Some(first), rest),
        None => (None, None),
    };
    let behind_bytes = first.as_deref().map_or(0, <[u8]>::len) as u64;
    let behind = rest.map(|rest| match change {
        Change::Write { at } => (Change::Write { at: at + behind_bytes }, Some(rest)),
        other => (other, Some(rest)),
    });
    std::iter::once((change, first)).chain(behind)
}

impl State {
    fn is_clean(&self) -> bool {
        let files = self.files.values().all(OfFile::is_clean);
        let all = files && self.names.len() == 0 && self.beyond.is_none();
        all && self.inherited != Inherited::Unknown && self.stamps.floors.len() < FLOORS_MAX
    }
}

#[cfg(test)]
mod tests;
