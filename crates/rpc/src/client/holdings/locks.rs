//! The locks that this mount holds. They are reclaimed from a server that lost its state. An open
//! file with a lock that could not be reclaimed is marked.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::{
    Context, Errno, Error, FileId, Lock, LockFamily, LockKind, LockOwner, LockRange, OpenHow,
    Result,
};

use crate::client::holdings::lock_leases::OwnLockLeases;
use crate::client::holdings::ranges::{LockRanges, without};
use crate::client::link::SessionState;
use crate::client::memory::SessionMemory;

/// A lock and the open file through which it was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldLock {
    pub(crate) handle: u64,
    pub(crate) id: FileId,
    pub(crate) how: OpenHow,
    pub(crate) lock: Lock,
}

/// Locks that a mount has at most, as many as an export. A server joins some that are kept apart
/// here, and would let it have any number.
const HELD_MAX: usize = 1 << 20;

/// All locks of a mount.
pub(crate) struct HeldLocks {
    state: Mutex<State>,
    /// Some open file has lost a lock or may have; spares looking which at each call.
    any_lost: AtomicBool,
}

pub(super) struct State {
    pub(super) locks: LockRanges,
    pub(super) leases: OwnLockLeases,
    /// The server and session that know of them, or will be notified.
    session_state: SessionState,
    lost: BTreeSet<u64>,
    /// Open files with locks that are being reclaimed: no call may use such a file before the
    /// result is known.
    suspended: BTreeSet<u64>,
    /// Open files, with their ids, through which locks of vanished owners are being released.
    pub(super) undoing: Vec<(u64, FileId)>,
    /// Reclaims under way: if a server dies during one, the next begins before it ends.
    reclaims: u32,
    pub(super) waiting: Vec<Waker>,
}

impl State {
    pub(super) fn wake_all(&mut self) {
        self.waiting.drain(..).for_each(Waker::wake);
    }
}

impl HeldLocks {
    /// With the locks noted in `memory`, if a process before us did.
    pub(crate) fn new(memory: Arc<SessionMemory>) -> HeldLocks {
        let state = State {
            leases: OwnLockLeases::new(memory.clone()),
            locks: LockRanges::new(memory),
            session_state: SessionState::default(),
            lost: BTreeSet::new(),
            suspended: BTreeSet::new(),
            undoing: Vec::new(),
            reclaims: 0,
            waiting: Vec::new(),
        };
        HeldLocks { state: Mutex::new(state), any_lost: AtomicBool::new(false) }
    }

    /// The owners of fcntl locks, and their files, as a process before us noted them. None if there
    /// may have been more than the note had room for.
    pub(crate) fn owners(&self) -> Option<Vec<(FileId, LockOwner)>> {
        let state = self.lock();
        let posix = |held: &HeldLock| held.lock.family == LockFamily::Posix;
        let owners = state.locks.iter().filter(posix).map(|held| (held.id, held.lock.owner));
        state.locks.has_place().then(|| owners.collect())
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The server of `session_state` granted this. False if another has taken its place meanwhile.
    /// The other has been, or will be, notified that there is no such lock, and has to be asked.
    #[must_use]
    /// Whether none is held.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().locks.iter().next().is_none()
    }

    pub(crate) fn granted(&self, new: HeldLock, session_state: SessionState) -> bool {
        let mut state = self.lock();
        if state.session_state != session_state {
            return false;
        }
        state.locks.take(new);
        state.locks.complain();
        true
    }

    /// `ENOLCK` if the mount has so many locks that it cannot know of another one.
    pub(crate) fn admit(&self, lock: &Lock) -> Result<()> {
        if lock.kind == LockKind::Unlock || self.lock().locks.len() < HELD_MAX {
            return Ok(());
        }
        Err(Error::new(Errno::ENOLCK).because("the mount's limit of locks"))
    }

    /// A call is about to be made that gives up what is held here. It gives up all of it, or with a
    /// shared lock the right to be alone.
    pub(crate) fn given_up(&self, id: FileId, lock: Lock) {
        if lock.kind == LockKind::Exclusive {
            return;
        }
        let mut state = self.lock();
        for held in state.locks.overlapping(id, &lock) {
            let start = held.lock.range.start.max(lock.range.start);
            let end = held.lock.range.end.min(lock.range.end);
            let rest = Lock { kind: lock.kind, range: LockRange { start, end }, ..held.lock };
            state.locks.take(HeldLock { lock: rest, ..held });
        }
    }

    /// A caller that asked for locks or gave them up has left, and nobody knows which of these
    /// calls the server received. No lock of this file is asked for, through any open file of it,
    /// until that is undone: owners' names are used again.
    pub(crate) fn undo(&self, handle: u64, id: FileId) {
        self.lock().undoing.push((handle, id));
    }

    /// What one call of [`Self::undo`] noted has been undone.
    pub(crate) fn undone(&self, handle: u64, id: FileId) {
        let mut state = self.lock();
        if let Some(at) = state.undoing.iter().position(|other| *other == (handle, id)) {
            state.undoing.swap_remove(at);
        }
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Waits until nothing of a file is to be undone. `EINTR` when the caller gives up.
    pub(crate) async fn clear(&self, cx: &Context, id: FileId) -> Result<()> {
        self.wait_for_undoing(cx, |(_, other)| *other == id).await
    }

    /// Waits until nothing is to be undone through an open file.
    pub(crate) async fn cleared(&self, handle: u64) {
        let nobody_gives_up = Context::system();
        let _ = self.wait_for_undoing(&nobody_gives_up, |(other, _)| *other == handle).await;
    }

    async fn wait_for_undoing(
        &self,
        cx: &Context,
        concerns: impl Fn(&(u64, FileId)) -> bool,
    ) -> Result<()> {
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if !state.undoing.iter().any(&concerns) {
                return Poll::Ready(Ok(()));
            }
            state.waiting.push(task.waker().clone());
            drop(state);
            cx.poll_cancelled(task).map(Err)
        })
        .await
    }

    /// The locks that the owner of `lock` holds in its range. Nobody knows what is granted beyond
    /// them.
    pub(crate) fn known(&self, id: FileId, lock: Lock) -> Vec<Lock> {
        let mut gaps = vec![lock.range];
        let mut known = Vec::new();
        for HeldLock { lock: held, .. } in self.lock().locks.overlapping(id, &lock) {
            let start = held.range.start.max(lock.range.start);
            let end = held.range.end.min(lock.range.end);
            known.push(Lock { range: LockRange { start, end }, ..held });
            // In the order of their ranges: it cuts the last gap.
            let last = gaps.pop();
            gaps.extend(last.into_iter().flat_map(|gap| without(gap, held.range)).flatten());
        }
        let unlock = |range| Lock { kind: LockKind::Unlock, range, ..lock };
        known.extend(gaps.into_iter().map(unlock));
        known
    }

    /// `owner` closed a descriptor of `id`: its fcntl locks there are gone.
    pub(crate) fn flushed(&self, id: FileId, owner: LockOwner) {
        self.lock().locks.remove_of(id, LockFamily::Posix, owner);
    }

    /// An open file was closed: the locks taken through it are gone, and whatever it had lost
    /// matters no more. Of fcntl locks most have gone with a flush, but those of an open file
    /// description (F_OFD_SETLK) end here.
    pub(crate) fn closed(&self, handle: u64) {
        let mut state = self.lock();
        state.locks.remove_through(handle);
        state.lost.remove(&handle);
        state.suspended.remove(&handle);
        self.note(&state);
    }

    fn note(&self, state: &State) {
        let any = !state.lost.is_empty() || !state.suspended.is_empty();
        self.any_lost.store(any, Ordering::Relaxed);
    }

    /// The server that locks are held at.
    pub(crate) fn begin(&self, session_state: SessionState) {
        self.lock().session_state = session_state;
    }

    /// Everything held, now that the server has forgotten it, and another is asked: calls through
    /// these open files wait until [`HeldLocks::settled`].
    pub(crate) fn suspend_all(&self, session_state: SessionState) -> Vec<HeldLock> {
        let mut state = self.lock();
        state.session_state = session_state;
        state.end_lock_leases();
        state.wake_all();
        let handles: BTreeSet<u64> = state.locks.iter().map(|held| held.handle).collect();
        state.suspended.extend(handles);
        state.reclaims += 1;
        self.note(&state);
        state.locks.iter().collect()
    }

    /// Whether locks were taken through an open file, or are in doubt. Closing the file gives them
    /// back, and other clients should wait no longer for them than for the close.
    pub(crate) fn concerns(&self, handle: u64) -> bool {
        let state = self.lock();
        state.locks.any_through(handle)
            || state.has_lock_lease_through(handle)
            || state.lost.contains(&handle)
            || state.suspended.contains(&handle)
            || state.undoing.iter().any(|(other, _)| *other == handle)
    }

    /// Whether a lock is still wanted.
    pub(crate) fn holds(&self, lock: &HeldLock) -> bool {
        self.lock().locks.contains(lock)
    }

    /// A reclaim has ended; after the last one it is known which locks are held again.
    pub(crate) fn settled(&self) {
        let mut state = self.lock();
        state.reclaims = state.reclaims.saturating_sub(1);
        if state.reclaims > 0 {
            return;
        }
        state.suspended.clear();
        self.note(&state);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// A lock could not be had again.
    pub(crate) fn lost(&self, gone: &HeldLock) {
        let mut state = self.lock();
        state.locks.remove(gone);
        state.lost.insert(gone.handle);
        self.note(&state);
    }

    /// `EIO` for an open file that lost a lock: what its process believes to own may be
    /// another client's by now. The error ends with the close of the file.
    /// While it is not known, it waits; `EINTR` when the caller gives up.
    pub(crate) async fn check(&self, cx: &Context, handle: u64) -> Result<()> {
        if !self.any_lost.load(Ordering::Relaxed) {
            return Ok(());
        }
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if state.suspended.contains(&handle) {
                state.waiting.push(task.waker().clone());
                drop(state);
                return cx.poll_cancelled(task).map(Err);
            }
            Poll::Ready(Ok(()))
        })
        .await?;
        if self.any_lost.load(Ordering::Relaxed) && self.lock().lost.contains(&handle) {
            let error = Error::new(Errno::EIO);
            return Err(error.because("a lock on this open file was lost with the server's state"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_core::Pid;
    use std::pin::pin;
    use std::task::Context as TaskContext;

    fn held(handle: u64, kind: LockKind, start: u64, end: u64) -> HeldLock {
        let lock = Lock {
            family: LockFamily::Posix,
            kind,
            range: LockRange { start, end },
            owner: LockOwner::own(1),
            pid: Pid(1),
        };
        HeldLock { handle, id: FileId { ino: 1, generation: 1 }, how: OpenHow::READ_WRITE, lock }
    }

    #[test]
    fn unlocking_the_middle_leaves_both_ends() {
        let all = HeldLocks::new(Arc::new(SessionMemory::heap()));
        assert!(all.granted(held(1, LockKind::Exclusive, 0, 99), SessionState::default()));
        assert!(all.granted(held(1, LockKind::Unlock, 40, 59), SessionState::default()));
        let ranges: Vec<_> = all
            .suspend_all(SessionState::default())
            .iter()
            .map(|held| (held.lock.range.start, held.lock.range.end))
            .collect();
        assert_eq!(ranges, [(0, 39), (60, 99)]);
        all.flushed(FileId { ino: 1, generation: 1 }, LockOwner::own(2));
        assert_eq!(all.suspend_all(SessionState::default()).len(), 2);
        all.flushed(FileId { ino: 1, generation: 1 }, LockOwner::own(1));
        assert!(all.suspend_all(SessionState::default()).is_empty());
    }

    /// A lock that was asked for in vain is undone to what its owner had there, not to what
    /// others have.
    #[test]
    fn what_is_known_of_a_range_is_what_its_owner_holds() {
        let all = HeldLocks::new(Arc::new(SessionMemory::heap()));
        let other = |lock: HeldLock, owner, family| HeldLock {
            lock: Lock { owner: LockOwner::own(owner), family, ..lock.lock },
            ..lock
        };
        let own = held(1, LockKind::Shared, 10, 19);
        for lock in [
            own,
            other(held(1, LockKind::Shared, 0, 99), 2, LockFamily::Posix),
            other(held(1, LockKind::Shared, 0, 99), 1, LockFamily::Flock),
        ] {
            assert!(all.granted(lock, SessionState::default()));
        }
        let asked = held(1, LockKind::Exclusive, 15, 29).lock;
        let known = all.known(own.id, asked);
        let parts: Vec<_> =
            known.iter().map(|lock| (lock.kind, lock.range.start, lock.range.end)).collect();
        assert_eq!(parts, [(LockKind::Shared, 15, 19), (LockKind::Unlock, 20, 29)]);
        assert!(known.iter().all(|lock| lock.owner == own.lock.owner));
        let elsewhere = all.known(FileId { ino: 2, generation: 1 }, asked);
        assert_eq!(elsewhere, [Lock { kind: LockKind::Unlock, ..asked }]);
    }

    // proves: P61
    #[test]
    fn what_a_server_granted_that_has_gone_is_not_held() {
        let all = HeldLocks::new(Arc::new(SessionMemory::heap()));
        let next = SessionState { session: 1, instance: 2 };
        assert!(all.suspend_all(next).is_empty());
        assert!(!all.granted(held(1, LockKind::Exclusive, 0, 99), SessionState::default()));
        assert_eq!(all.lock().locks.len(), 0);
        assert!(all.granted(held(1, LockKind::Exclusive, 0, 99), next));
    }

    // proves: P95
    #[test]
    fn a_successor_knows_the_locks() {
        let memory = Arc::new(SessionMemory::heap());
        let all = HeldLocks::new(memory.clone());
        assert!(all.granted(held(1, LockKind::Exclusive, 0, 99), SessionState::default()));
        assert!(all.granted(held(2, LockKind::Shared, 40, 59), SessionState::default()));
        let flock = Lock { family: LockFamily::Flock, ..held(3, LockKind::Shared, 0, 9).lock };
        assert!(all.granted(
            HeldLock { lock: flock, ..held(3, LockKind::Shared, 0, 9) },
            SessionState::default()
        ));
        assert!(all.granted(held(1, LockKind::Unlock, 90, u64::MAX), SessionState::default()));
        let sorted = |all: &HeldLocks| {
            let mut locks: Vec<_> = all.lock().locks.iter().collect();
            locks.sort_by_key(|held| (held.handle, held.lock.range.start));
            locks
        };
        assert_eq!(sorted(&all).len(), 4);
        assert_eq!(sorted(&HeldLocks::new(memory.clone())), sorted(&all));
        all.closed(3);
        assert_eq!(sorted(&all).len(), 3);
        all.flushed(FileId { ino: 1, generation: 1 }, LockOwner::own(1));
        assert_eq!(HeldLocks::new(memory).lock().locks.len(), 0);
    }

    // proves: P60
    #[test]
    fn a_lost_lock_is_reported_until_the_file_is_closed() {
        let all = HeldLocks::new(Arc::new(SessionMemory::heap()));
        let lock = held(7, LockKind::Exclusive, 0, u64::MAX);
        assert!(all.granted(lock, SessionState::default()));
        let check = |handle| {
            let cx = Context::system();
            let mut check = pin!(all.check(&cx, handle));
            check.as_mut().poll(&mut TaskContext::from_waker(Waker::noop()))
        };
        assert!(matches!(check(7), Poll::Ready(Ok(()))));
        assert_eq!(all.suspend_all(SessionState::default()), [lock]);
        assert!(check(7).is_pending() && check(8).is_ready());
        all.lost(&lock);
        all.settled();
        assert!(matches!(check(7), Poll::Ready(Err(error)) if error.errno() == Errno::EIO));
        all.closed(7);
        assert!(matches!(check(7), Poll::Ready(Ok(()))));
    }
}
