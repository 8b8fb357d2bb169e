//! Leases on the fcntl locks of files (ADR 0064). Under one the session grants locks by itself, and its table of held locks
//! is the truth. Otherwise the server's table is, and the session's follows it.
//!
//! A lease is asked for only while no other call about locks of the file is under way. So nothing else
//! changes them at the server. While the lease is asked for, other locks of that file wait. While it
//! is given back, all calls about locks of the file wait.

use std::sync::Arc;
use std::task::Poll;

use dray_core::{
    Context, Errno, Error, FileId, IdMap, LockFamily, LockKind, LockOwner, Op, Result,
};
use dray_rt::{Instant, now};

use super::locks::{HeldLock, HeldLocks, State};
use crate::client::memory::SessionMemory;

/// Files on whose locks a session decides at once.
const LEASES_MAX: usize = 64;
/// Locks of one file that the server does not know.
const LOCKS_OF_FILE_MAX: usize = 64;
/// For so long the lease is not asked for where programs of this client have waited for each other.
const REST: std::time::Duration = std::time::Duration::from_secs(1);

/// The leases of a session, and its calls about locks.
pub(super) struct OwnLockLeases {
    memory: Arc<SessionMemory>,
    /// The server gives them.
    given: bool,
    leases: IdMap<FileId, Lease>,
    next_number: u64,
    /// Calls about fcntl locks under way, by file.
    under_way: IdMap<FileId, u32>,
    /// The last file that was given back because programs of this client waited for each other, and when.
    contended: Option<(FileId, Instant)>,
}

struct Lease {
    /// Tells it from others of the file that come later.
    number: u64,
    /// The open file through which it was had.
    handle: u64,
    /// Where it is noted for a later process.
    place: usize,
    phase: Phase,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The answer is not here yet. `recalled`: it is not to be believed.
    Asked {
        recalled: bool,
    },
    Held,
    GivenBack,
}

/// How a lock is decided on.
pub(crate) enum LockDecision {
    /// Here.
    Decided(Result<()>),
    /// By the server, which a call asks.
    AsksServer(LockCallUnderWay),
    /// By the server, once it has the lease back.
    GiveBack,
}

/// A call about fcntl locks of a file, until it is dropped.
pub(crate) struct LockCallUnderWay {
    held: Arc<HeldLocks>,
    id: FileId,
    /// The call asks for the lease.
    asks: bool,
    counts: bool,
}

/// What there is to be given back with a lease.
pub(crate) struct GivenBackLocks {
    number: u64,
    /// An open file of the session.
    pub(crate) handle: u64,
    pub(crate) locks: Vec<HeldLock>,
}

impl OwnLockLeases {
    /// `noted`: places of files that a process before us may have had the lease of.
    pub(super) fn new(memory: Arc<SessionMemory>) -> OwnLockLeases {
        let lease = |(number, (place, handle, id))| {
            (id, Lease { number, handle, place, phase: Phase::GivenBack })
        };
        let leases: IdMap<_, _> = (0..).zip(memory.lock_leases()).map(lease).collect();
        OwnLockLeases {
            memory,
            given: false,
            next_number: leases.len() as u64,
            leases,
            under_way: IdMap::default(),
            contended: None,
        }
    }

    fn phase(&self, id: FileId) -> Option<Phase> {
        self.leases.get(&id).map(|lease| lease.phase)
    }

    fn rests(&self, id: FileId) -> bool {
        self.contended.is_some_and(|(other, since)| other == id && now() < since + REST)
    }
}

impl State {
    /// All leases have ended, with the server or the session.
    pub(super) fn end_lock_leases(&mut self) {
        for (_, lease) in std::mem::take(&mut self.leases.leases) {
            self.locks.free_place(lease.place);
        }
    }

    fn end_lock_lease(&mut self, id: FileId) {
        if let Some(lease) = self.leases.leases.remove(&id) {
            self.locks.free_place(lease.place);
        }
    }

    /// The lease that was asked for is not given, unless it is held by now.
    fn end_asked(&mut self, id: FileId) {
        if matches!(self.leases.phase(id), Some(Phase::Asked { .. })) {
            self.end_lock_lease(id);
        }
        self.wake_all();
    }

    /// If the lease is being asked for, the answer does not give it.
    fn do_not_believe(&mut self, id: FileId) {
        if let Some(Lease { phase: Phase::Asked { recalled }, .. }) =
            self.leases.leases.get_mut(&id)
        {
            *recalled = true;
        }
    }

    /// Whether the lease was had through an open file.
    pub(super) fn has_lock_lease_through(&self, handle: u64) -> bool {
        self.leases.leases.values().any(|lease| lease.handle == handle)
    }

    fn gives_back(&self, id: FileId, back: &GivenBackLocks) -> bool {
        let lease = self.leases.leases.get(&id).filter(|lease| lease.number == back.number);
        lease.is_some_and(|lease| lease.phase == Phase::GivenBack)
    }

    fn is_undoing(&self, id: FileId) -> bool {
        self.undoing.iter().any(|(_, other)| *other == id)
    }

    /// Decides on a lock under a lease. None: the server has to.
    fn decide(&mut self, new: &HeldLock, wait: bool, believed: bool) -> Option<Result<()>> {
        let of_file = self.locks.fcntl_of(new.id);
        // To unlock a middle part makes one more, too.
        if of_file.len() >= LOCKS_OF_FILE_MAX || !self.locks.has_place() {
            return None;
        }
        if new.lock.kind == LockKind::Unlock {
            self.locks.take(*new);
            return Some(Ok(()));
        }
        let may = match new.lock.kind {
            LockKind::Exclusive => new.how.writes(),
            LockKind::Shared | LockKind::Unlock => new.how.reads(),
        };
        if !believed || !may {
            return None;
        }
        let bars = |held: &&HeldLock| {
            let excludes = LockKind::Exclusive;
            let is_strict = held.lock.kind == excludes || new.lock.kind == excludes;
            let is_other = held.lock.owner != new.lock.owner;
            is_strict && is_other && held.lock.range.overlaps(new.lock.range)
        };
        if of_file.iter().find(bars).is_none() {
            self.locks.take(*new);
            return Some(Ok(()));
        }
        if !wait {
            return Some(Err(Error::new(Errno::EAGAIN).during(Op::Lock)));
        }
        self.leases.contended = Some((new.id, now()));
        None
    }

    /// Begins a call that the server answers. It asks for the lease if it may and nothing stands in the way.
    fn begin_call(&mut self, new: &HeldLock, may_ask: bool) -> bool {
        let under_way = self.leases.under_way.entry(new.id).or_default();
        *under_way += 1;
        let alone = *under_way == 1 && !self.leases.rests(new.id);
        if !may_ask || !alone || !self.leases.given || self.leases.leases.len() >= LEASES_MAX {
            return false;
        }
        let Some(place) = self.locks.take_place() else { return false };
        self.leases.memory.put_lock_lease(place, new.handle, new.id);
        let phase = Phase::Asked { recalled: false };
        let number = self.leases.next_number;
        self.leases.next_number += 1;
        self.leases.leases.insert(new.id, Lease { number, handle: new.handle, place, phase });
        true
    }
}

impl HeldLocks {
    /// Whether the server gives leases on locks.
    pub(crate) fn lock_leases_are_given(&self, given: bool) {
        self.lock().leases.given = given;
    }

    /// Decides on a lock, or says who has to. `believed`: the session is in contact. Errors: `EINTR` when the caller gives up.
    pub(crate) async fn decide(
        self: &Arc<Self>,
        cx: &Context,
        new: &HeldLock,
        (wait, believed): (bool, bool),
    ) -> Result<LockDecision> {
        let flock = new.lock.family == LockFamily::Flock;
        let asks = !flock && new.lock.kind != LockKind::Unlock;
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if flock {
                return Poll::Ready(Ok(LockDecision::AsksServer(self.call(new.id, false, false))));
            }
            match state.leases.phase(new.id) {
                None if !state.is_undoing(new.id) => {
                    let asks = state.begin_call(new, asks);
                    Poll::Ready(Ok(LockDecision::AsksServer(self.call(new.id, asks, true))))
                }
                // The question may wait long. What it gets is not believed then.
                Some(Phase::Asked { .. }) if !asks && !state.is_undoing(new.id) => {
                    state.do_not_believe(new.id);
                    state.begin_call(new, false);
                    Poll::Ready(Ok(LockDecision::AsksServer(self.call(new.id, false, true))))
                }
                Some(Phase::Held) => Poll::Ready(Ok(match state.decide(new, wait, believed) {
                    Some(decided) => LockDecision::Decided(decided),
                    None => LockDecision::GiveBack,
                })),
                None | Some(Phase::Asked { .. } | Phase::GivenBack) => {
                    state.waiting.push(task.waker().clone());
                    drop(state);
                    cx.poll_cancelled(task).map(Err)
                }
            }
        })
        .await
    }

    /// The same of the close of a file by `owner`, who loses its fcntl locks. None: they are given up, and nobody else has to know.
    pub(crate) async fn decide_on_close(
        self: &Arc<Self>,
        cx: &Context,
        (id, owner): (FileId, LockOwner),
    ) -> Result<Option<LockCallUnderWay>> {
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            match state.leases.phase(id) {
                None | Some(Phase::Asked { .. }) => {
                    state.do_not_believe(id);
                    *state.leases.under_way.entry(id).or_default() += 1;
                    Poll::Ready(Ok(Some(self.call(id, false, true))))
                }
                Some(Phase::Held) => {
                    state.locks.remove_of(id, LockFamily::Posix, owner);
                    Poll::Ready(Ok(None))
                }
                Some(Phase::GivenBack) => {
                    state.waiting.push(task.waker().clone());
                    drop(state);
                    cx.poll_cancelled(task).map(Err)
                }
            }
        })
        .await
    }

    fn call(self: &Arc<Self>, id: FileId, asks: bool, counts: bool) -> LockCallUnderWay {
        LockCallUnderWay { held: self.clone(), id, asks, counts }
    }

    /// Whether no fcntl lock stands in the way of this one. None: that has to be asked.
    pub(crate) fn is_free(&self, lock: &HeldLock, believed: bool) -> Option<()> {
        let state = self.lock();
        if !believed || state.leases.phase(lock.id) != Some(Phase::Held) {
            return None;
        }
        let others = state.locks.fcntl_of(lock.id);
        let overlaps = |held: &HeldLock| held.lock.range.overlaps(lock.lock.range);
        let any = others.iter().any(|held| held.lock.owner != lock.lock.owner && overlaps(held));
        (!any && lock.lock.family == LockFamily::Posix).then_some(())
    }

    /// The file whose lease was had through an open file.
    pub(crate) fn lock_lease_through(&self, handle: u64) -> Option<FileId> {
        let state = self.lock();
        let mut leases = state.leases.leases.iter();
        leases.find_map(|(id, lease)| (lease.handle == handle).then_some(*id))
    }

    /// A lease is given back. What is returned has to be reported to the server, and then [`Self::lock_lease_ended`] said. None:
    /// there is none to give back, or others are at it.
    pub(crate) fn give_back_lock_lease(&self, id: FileId) -> Option<GivenBackLocks> {
        let mut state = self.lock();
        let locks = state.locks.fcntl_of(id);
        let lease = state.leases.leases.get_mut(&id)?;
        match &mut lease.phase {
            Phase::Held => {}
            Phase::Asked { recalled } => {
                *recalled = true;
                return None;
            }
            Phase::GivenBack => return None,
        }
        lease.phase = Phase::GivenBack;
        Some(GivenBackLocks { number: lease.number, handle: lease.handle, locks })
    }

    /// Leases that a process before us may have had.
    pub(crate) fn inherited_lock_leases(&self) -> Vec<(FileId, GivenBackLocks)> {
        let state = self.lock();
        let of = |(id, lease): (&FileId, &Lease)| {
            let locks = state.locks.fcntl_of(*id);
            (*id, GivenBackLocks { number: lease.number, handle: lease.handle, locks })
        };
        state.leases.leases.iter().map(of).collect()
    }

    /// Whether this is still to be given back: the server and the session are the same.
    pub(crate) fn gives_back_lock_lease(&self, id: FileId, back: &GivenBackLocks) -> bool {
        self.lock().gives_back(id, back)
    }

    /// The server has it back.
    pub(crate) fn lock_lease_ended(&self, id: FileId, back: &GivenBackLocks) {
        let mut state = self.lock();
        if state.gives_back(id, back) {
            state.end_lock_lease(id);
        }
        state.wake_all();
    }

    /// Waits until the server has a lease back that is being given back. Errors: `EINTR` when the caller gives up.
    pub(crate) async fn lock_lease_back(&self, cx: &Context, id: FileId) -> Result<()> {
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if state.leases.phase(id) != Some(Phase::GivenBack) {
                return Poll::Ready(Ok(()));
            }
            state.waiting.push(task.waker().clone());
            drop(state);
            cx.poll_cancelled(task).map(Err)
        })
        .await
    }
}

impl LockCallUnderWay {
    /// Whether the call asks for the lease.
    pub(crate) fn asks(&self) -> bool {
        self.asks
    }

    /// The lease is not given: somebody else has the lock, for which the caller waits now.
    pub(crate) fn asks_no_more(&mut self) {
        let mut state = self.held.lock();
        if std::mem::replace(&mut self.asks, false) {
            state.leases.contended = Some((self.id, now()));
            state.end_asked(self.id);
        }
    }

    /// The answer gave the lease, and what it granted is held.
    pub(crate) fn leased(&self) {
        let mut state = self.held.lock();
        if let Some(lease) = state.leases.leases.get_mut(&self.id)
            && self.asks
            && lease.phase == (Phase::Asked { recalled: false })
        {
            lease.phase = Phase::Held;
        }
    }
}

impl Drop for LockCallUnderWay {
    fn drop(&mut self) {
        if !self.counts {
            return;
        }
        let mut state = self.held.lock();
        if let Some(count) = state.leases.under_way.get_mut(&self.id) {
            *count -= 1;
            if *count == 0 {
                state.leases.under_way.remove(&self.id);
            }
        }
        if self.asks {
            state.end_asked(self.id);
        }
    }
}
