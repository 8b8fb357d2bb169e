//! What was changed and is not known to be on media: kept, so that it can be sent again
//! when the server's machine has lost power, or noted, so that its loss can be told.
//!
//! A change is here from its answer until the server says that it is on media: for a file
//! that is synced, in the answer to that; for everything, when anybody had everything synced.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::{Attr, Buf, Context, Errno, Error, FileId, Identity, Op, Result, SetAttr, TimeSet};

use crate::client::channel::Made;
use crate::client::losses::{Losses, UnsyncedStatus};
use crate::wire::Change;

/// Files with changes at most; of further ones only that there are some is known.
const FILES_MAX: usize = 65_536;
/// Names changed at most; as above.
const NAMES_MAX: usize = 65_536;
/// Files whose stamp of the last sync is remembered; beyond it everything is synced.
const FLOORS_MAX: usize = 65_536;
/// What a kept change costs beside its data, bytes.
const CHANGE_BYTES: u64 = 160;

/// All changes of one mount that may not be on media.
pub(crate) struct Unsynced {
    limit_bytes: u64,
    /// Something was lost, or may be: spares a look at the rest at each sync and close.
    alert: AtomicBool,
    /// As `kept_bytes` below, to decide without the mutex whether a copy is worth while.
    kept_about_bytes: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Lives of the server's machine so far.
    epoch: u64,
    recovering: bool,
    files: BTreeMap<FileId, OfFile>,
    names: BTreeMap<(FileId, Vec<u8>), Named>,
    kept_bytes: u64,
    /// Of changes that there was no room to note: the last.
    beyond: Option<Moment>,
    /// A process before us may have changed anything.
    inherited: Inherited,
    stamps: StampsSeen,
    losses: Losses,
    tender: Tender,
    waiting: Vec<Waker>,
}

/// When a change was made, in the order of the server and of its machine's lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Moment {
    stamp: u64,
    epoch: u64,
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
    floor: u64,
    floors: BTreeMap<FileId, u64>,
}

/// What a task that asks for syncs has to know.
#[derive(Default)]
struct Tender {
    there: bool,
    hurry: bool,
    waker: Option<Waker>,
}

#[derive(Default)]
struct OfFile {
    changes: VecDeque<Arc<Kept>>,
    /// The last change that could not be kept, and bytes of all such.
    unkept: Option<Moment>,
    unkept_bytes: u64,
    /// A name of it has been removed or given to another file.
    removed: bool,
    /// Open files through which it was changed.
    writers: u32,
    /// Number of the loss that these are to be told of; 0: none.
    lost: u64,
}

/// A change that can be made again.
pub(crate) struct Kept {
    pub(crate) stamp: u64,
    epoch: u64,
    pub(crate) change: Change,
    pub(crate) data: Buf,
    pub(crate) who: Arc<Identity>,
    /// The last recovery in which it was sent.
    sent: AtomicU64,
}

/// What was made of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expect {
    /// It is this file's.
    Is(FileId),
    /// It is somebody's.
    There,
    Gone,
    /// Looking cannot tell.
    Unknown,
}

struct Named {
    at: Moment,
    expect: Expect,
}

/// A change of a file that has been answered.
pub(crate) struct Changed<'a> {
    pub(crate) file: FileId,
    pub(crate) made: Made,
    /// None: it cannot be made again.
    pub(crate) change: Option<Change>,
    pub(crate) data: &'a [u8],
    pub(crate) who: &'a Arc<Identity>,
}

/// What an open file has to do with losses.
#[derive(Default)]
pub(crate) struct Writer {
    wrote: AtomicBool,
    /// The last loss that it was told of.
    told: AtomicU64,
}

impl Unsynced {
    /// Keeps up to `limit_bytes`. `inherited`: a process before us served this mount.
    pub(crate) fn new(limit_bytes: u64, inherited: bool) -> Unsynced {
        let inherited = if inherited { Inherited::Unknown } else { Inherited::Nothing };
        let state = State { inherited, ..State::default() };
        Unsynced {
            limit_bytes,
            alert: AtomicBool::new(false),
            kept_about_bytes: AtomicU64::new(0),
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_alert(&self, state: &State) {
        let lost = state.files.values().any(|file| file.lost > 0);
        let alert = lost || state.recovering || state.inherited == Inherited::Lost;
        self.alert.store(alert, Ordering::SeqCst);
    }

    /// Notes a change of a file, through `writer` if it was made through an open file. True
    /// if somebody has to be found who asks for syncs.
    pub(crate) fn changed(&self, new: Changed<'_>, writer: Option<&Writer>) -> bool {
        let Changed { file: id, made, change, data, who } = new;
        let at = Moment { stamp: made.stamp, epoch: made.epoch };
        let cost_bytes = data.len() as u64 + CHANGE_BYTES;
        let limit_bytes = self.limit_bytes.saturating_sub(cost_bytes);
        let fits = limit_bytes > 0 && self.kept_about_bytes.load(Ordering::Relaxed) <= limit_bytes;
        // Copied before anybody is kept waiting.
        let kept = change.filter(|_| fits && made.stamp > 0).map(|change| {
            let (data, who, sent) = (Buf::from(data), who.clone(), AtomicU64::new(0));
            Kept { stamp: at.stamp, epoch: at.epoch, change, data, who, sent }
        });
        let mut state = self.lock();
        let state = &mut *state;
        state.stamps.newest = state.stamps.newest.max(made.stamp);
        let room = state.files.len() < FILES_MAX || state.files.contains_key(&id);
        if !room && writer.is_none_or(|writer| !writer.wrote.load(Ordering::Relaxed)) {
            state.beyond = Some(at);
            return state.tender.call(true);
        }
        let file = state.files.entry(id).or_default();
        if let Some(writer) = writer
            && !writer.wrote.swap(true, Ordering::Relaxed)
        {
            file.writers += 1;
            writer.told.store(file.lost, Ordering::Relaxed);
        }
        match kept.filter(|_| state.kept_bytes <= limit_bytes) {
            Some(kept) => {
                let behind = file.changes.iter().rev().take_while(|one| one.stamp > at.stamp);
                let place = file.changes.len() - behind.count();
                file.changes.insert(place, Arc::new(kept));
                state.kept_bytes += cost_bytes;
                self.kept_about_bytes.store(state.kept_bytes, Ordering::Relaxed);
            }
            None => {
                file.unkept = Some(at);
                file.unkept_bytes += data.len() as u64;
            }
        }
        let late = made.epoch < state.epoch && !state.recovering;
        if late {
            // Answered by a machine that has since lost power, and too late to be sent again.
            state.lose(id, "it was answered just before the loss of power", true);
            self.note_alert(state);
        }
        // Where nothing is kept, a sync makes no room.
        state.tender.call(self.limit_bytes > 0 && state.kept_bytes > self.limit_bytes / 2)
    }

    /// Notes a change of a name, as with [`Unsynced::changed`].
    pub(crate) fn named(&self, dir: FileId, name: &[u8], made: Made, expect: Expect) -> bool {
        let at = Moment { stamp: made.stamp, epoch: made.epoch };
        let mut state = self.lock();
        state.stamps.newest = state.stamps.newest.max(made.stamp);
        let key = (dir, name.to_vec());
        if let Some(Expect::Is(id)) = state.names.get(&key).map(|named| named.expect)
            && expect != Expect::Is(id)
            && let Some(file) = state.files.get_mut(&id)
        {
            file.removed = true;
        }
        if state.names.len() >= NAMES_MAX && !state.names.contains_key(&key) {
            state.beyond = Some(at);
            return state.tender.call(true);
        }
        state.names.insert(key, Named { at, expect });
        let many = state.names.len() > NAMES_MAX / 2;
        state.tender.call(many)
    }

    /// What is expected of a name that was changed lately.
    pub(crate) fn expected(&self, dir: FileId, name: &[u8]) -> Option<Expect> {
        self.lock().names.get(&(dir, name.to_vec())).map(|named| named.expect)
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
            self.kept_about_bytes.store(state.kept_bytes, Ordering::Relaxed);
            if file.is_done() {
                state.files.remove(&id);
            }
        }
        state.names.retain(|(dir, _), named| *dir != id || named.at.stamp > made.stamp);
        if made.stamp == 0 {
            return false;
        }
        state.stamps.newest = state.stamps.newest.max(made.stamp);
        state.stamps.floors.insert(id, made.stamp);
        let many = state.stamps.floors.len() >= FLOORS_MAX;
        many && state.tender.call(true)
    }

    /// Everything up to `stamp` is on media. `asked`: we had asked for it.
    pub(crate) fn stable(&self, stamp: u64, asked: bool) {
        let mut state = self.lock();
        let state = &mut *state;
        let mut freed_bytes = 0;
        state.files.retain(|_, file| {
            freed_bytes += file.forget(stamp);
            !file.is_done()
        });
        state.kept_bytes -= freed_bytes;
        self.kept_about_bytes.store(state.kept_bytes, Ordering::Relaxed);
        state.names.retain(|_, named| named.at.stamp > stamp);
        state.beyond = state.beyond.filter(|at| at.stamp > stamp);
        state.stamps.floor = state.stamps.floor.max(stamp);
        state.stamps.floors.retain(|_, floor| *floor > stamp);
        if asked && state.inherited == Inherited::Unknown {
            state.inherited = Inherited::Nothing;
        }
    }

    /// The error of a loss that no sync of this open file has told of. Closes of a descriptor
    /// tell each time: a child process that closes what it inherited must not hear of it in
    /// its parent's place.
    pub(crate) fn owed(&self, id: FileId, writer: &Writer, op: Op) -> Result<()> {
        if !self.alert.load(Ordering::SeqCst) || !writer.wrote.load(Ordering::Relaxed) {
            return Ok(());
        }
        let lost = self.lock().files.get(&id).map_or(0, |file| file.lost);
        let told = match op {
            Op::Sync => writer.told.fetch_max(lost, Ordering::Relaxed),
            _ => writer.told.load(Ordering::Relaxed),
        };
        if lost <= told {
            return Ok(());
        }
        let error = Error::new(Errno::EIO).during(op);
        Err(error.because("what was written and not synced was lost with the server's machine"))
    }

    /// Whether the close of a descriptor of `id` has something to tell, or may have.
    pub(crate) fn owes(&self, id: FileId) -> bool {
        if !self.alert.load(Ordering::SeqCst) {
            return false;
        }
        let state = self.lock();
        let of_file = state.files.get(&id).is_some_and(|file| file.lost > 0 || state.recovering);
        of_file || state.inherited == Inherited::Lost
    }

    /// Waits until it is known what is lost. Errors: `EINTR` when cancelled.
    pub(crate) async fn decided(&self, cx: &Context) -> Result<()> {
        if !self.alert.load(Ordering::SeqCst) {
            return Ok(());
        }
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if !state.recovering {
                return Poll::Ready(Ok(()));
            }
            state.waiting.push(task.waker().clone());
            drop(state);
            match &cx.cancel {
                Some(cancel) if cancel.poll_set(task) => Poll::Ready(Err(cx.cancelled())),
                _ => Poll::Pending,
            }
        })
        .await
    }

    /// The life of the server's machine.
    pub(crate) fn epoch(&self) -> u64 {
        self.lock().epoch
    }

    /// The server's machine has lost power.
    pub(crate) fn power_lost(&self) {
        let mut state = self.lock();
        state.epoch += 1;
        state.recovering = true;
        state.losses.power_lost();
        if state.inherited == Inherited::Unknown {
            state.inherited = Inherited::Lost;
            let what = "what the process before this one wrote and did not sync";
            state.losses.report(None, what, "it was not handed on", 0);
        }
        self.note_alert(&state);
    }

    /// A recovery begins, another one if the last was cut short.
    pub(crate) fn recovery_begins(&self) {
        let mut state = self.lock();
        state.recovering = true;
        state.losses.attempt += 1;
        self.note_alert(&state);
    }

    /// The last stamp seen, the one up to which everything is on media, and those of files
    /// of which more is.
    pub(crate) fn stamps_seen(&self) -> (u64, u64, Vec<(FileId, u64)>) {
        let state = self.lock();
        let StampsSeen { newest, floor, floors } = &state.stamps;
        (*newest, *floor, floors.iter().map(|(file, stamp)| (*file, *stamp)).collect())
    }

    /// Files with changes that are older than the loss of power and have not been sent.
    pub(crate) fn files_to_send(&self) -> Vec<FileId> {
        let state = self.lock();
        let waits = |file: &OfFile| file.changes.iter().any(|one| state.to_send(one));
        state.files.iter().filter(|(_, file)| waits(file)).map(|(id, _)| *id).collect()
    }

    /// The first such change of a file.
    pub(crate) fn next_to_send(&self, id: FileId) -> Option<Arc<Kept>> {
        let state = self.lock();
        let changes = &state.files.get(&id)?.changes;
        changes.iter().find(|one| state.to_send(one)).cloned()
    }

    /// It has been sent again, and made.
    pub(crate) fn sent(&self, kept: &Kept) {
        let mut state = self.lock();
        kept.sent.store(state.losses.attempt, Ordering::Relaxed);
        state.losses.sent(kept.data.len() as u64);
    }

    /// Names that were changed before the loss of power.
    pub(crate) fn names_to_check(&self) -> Vec<(FileId, Vec<u8>, Expect)> {
        let state = self.lock();
        let old = state.names.iter().filter(|(_, named)| named.at.epoch < state.epoch);
        old.map(|((dir, name), named)| (*dir, name.clone(), named.expect)).collect()
    }

    /// A name is not as it was made.
    pub(crate) fn name_lost(&self, dir: FileId, name: &[u8], why: &str) {
        let mut state = self.lock();
        state.names.remove(&(dir, name.to_vec()));
        let what = format!("the change of the name {}", name.escape_ascii());
        state.losses.report(Some(dir), &what, why, 0);
    }

    /// What of a file could not be made again is lost.
    pub(crate) fn file_lost(&self, id: FileId, why: &str) {
        let mut state = self.lock();
        state.lose(id, why, true);
        self.note_alert(&state);
    }

    /// A file is not there any more; that is a loss unless it had been removed.
    pub(crate) fn file_gone(&self, id: FileId) {
        let mut state = self.lock();
        let state = &mut *state;
        if let Some(file) = state.files.get_mut(&id)
            && file.removed
            && file.writers == 0
        {
            state.kept_bytes -= file.forget(u64::MAX);
            state.files.remove(&id);
            return;
        }
        state.lose(id, "the file is not there any more", true);
        self.note_alert(state);
    }

    /// Everything from before the loss of power that was not sent again is lost: it could
    /// not be kept, or the server takes no more. `why` is for those that were kept.
    pub(crate) fn recovery_ends(&self, why: Option<&str>) {
        let mut state = self.lock();
        let (epoch, names) = (state.epoch, state.names.len());
        let old = |at: &Moment| at.epoch < epoch;
        let lost: Vec<_> = state
            .files
            .iter()
            .filter_map(|(id, file)| match why {
                Some(why) if file.changes.iter().any(|one| one.epoch < epoch) => Some((*id, why)),
                _ if file.unkept.as_ref().is_some_and(old) => Some((*id, "it was not kept")),
                _ => None,
            })
            .collect();
        lost.into_iter().for_each(|(id, text)| state.lose(id, text, why.is_some()));
        if state.beyond.as_ref().is_some_and(old) {
            state.beyond = None;
            state.losses.report(None, "changes of further files", "they were not noted", 0);
        }
        if let Some(why) = why {
            state.names.retain(|_, named| named.at.epoch >= epoch);
            if state.names.len() < names {
                let what = format!("{} changes of names", names - state.names.len());
                state.losses.report(None, &what, why, 0);
            }
        }
        state.recovering = false;
        self.note_alert(&state);
        let waiting = std::mem::take(&mut state.waiting);
        state.tender.call(true);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// For the status.
    pub(crate) fn status(&self) -> UnsyncedStatus {
        let state = self.lock();
        UnsyncedStatus {
            limit_bytes: self.limit_bytes,
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

    /// Whether somebody has to be found who asks for syncs, at once.
    pub(crate) fn call_tender(&self) -> bool {
        self.lock().tender.call(true)
    }

    /// Waits until a sync is urgent.
    pub(crate) async fn urgent(&self) {
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if std::mem::take(&mut state.tender.hurry) {
                return Poll::Ready(());
            }
            state.tender.waker = Some(task.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Whether the task that asks for syncs can end: everything is on media.
    pub(crate) fn tender_ends(&self) -> bool {
        let mut state = self.lock();
        let ends = state.is_clean();
        if ends {
            state.tender = Tender::default();
        }
        ends
    }

    /// The task that asks for syncs has gone without ending its work.
    pub(crate) fn tender_gone(&self) {
        self.lock().tender = Tender::default();
    }
}

/// The changes that a call of setattr made, so that they can be made again later: `now` is
/// the time that it was then.
pub(crate) fn changes_of(set: SetAttr, attr: &Attr) -> impl Iterator<Item = Change> {
    let at = |time: TimeSet, then| match time {
        TimeSet::Now => TimeSet::At(then),
        time => time,
    };
    let rest = SetAttr {
        size: None,
        kill_set_id: false,
        atime: set.atime.map(|time| at(time, attr.atime)),
        mtime: set.mtime.map(|time| at(time, attr.mtime)),
        ..set
    };
    let size = set.size.map(|size| Change::Size { size });
    let rest = (rest != SetAttr::default()).then_some(Change::Attr(rest));
    size.into_iter().chain(rest)
}

impl State {
    fn to_send(&self, kept: &Kept) -> bool {
        kept.epoch < self.epoch && kept.sent.load(Ordering::Relaxed) < self.losses.attempt
    }

    fn is_clean(&self) -> bool {
        let files = self.files.values().all(OfFile::is_clean);
        let all = files && self.names.is_empty() && self.beyond.is_none();
        all && self.inherited != Inherited::Unknown && self.stamps.floors.len() < FLOORS_MAX
    }

    /// What of `id` is from before the loss of power is lost: what was not kept, and, if
    /// `kept_too`, what was.
    fn lose(&mut self, id: FileId, why: &str, kept_too: bool) {
        let epoch = self.epoch;
        let Some(file) = self.files.get_mut(&id) else { return };
        let mut lost_bytes = std::mem::take(&mut file.unkept_bytes);
        file.unkept = None;
        let mut freed_bytes = 0;
        file.changes.retain(|kept| {
            let old = kept_too && kept.epoch < epoch;
            if old {
                lost_bytes += kept.data.len() as u64;
                freed_bytes += kept.data.len() as u64 + CHANGE_BYTES;
            }
            !old
        });
        self.kept_bytes -= freed_bytes;
        let writers = file.writers;
        let number = self.losses.report(Some(id), "changes of a file", why, lost_bytes);
        if writers > 0 {
            file.lost = number;
        } else if file.is_done() {
            self.files.remove(&id);
        }
    }
}

impl OfFile {
    /// Forgets what is on media; answers how many bytes that frees.
    fn forget(&mut self, upto: u64) -> u64 {
        let mut freed_bytes = 0;
        while self.changes.front().is_some_and(|kept| kept.stamp <= upto) {
            let kept = self.changes.pop_front();
            freed_bytes += kept.map_or(0, |kept| kept.data.len() as u64 + CHANGE_BYTES);
        }
        if self.unkept.is_some_and(|at| at.stamp <= upto) {
            (self.unkept, self.unkept_bytes) = (None, 0);
        }
        freed_bytes
    }

    fn is_clean(&self) -> bool {
        self.changes.is_empty() && self.unkept.is_none()
    }

    fn is_done(&self) -> bool {
        self.is_clean() && self.writers == 0 && self.lost == 0
    }
}

impl Tender {
    /// True if there is none.
    fn call(&mut self, hurry: bool) -> bool {
        if hurry {
            self.hurry = true;
            self.waker.take().into_iter().for_each(Waker::wake);
        }
        !std::mem::replace(&mut self.there, true)
    }
}
