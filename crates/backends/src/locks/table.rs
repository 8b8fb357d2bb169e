//! All locks of an export.

use std::collections::{HashMap, HashSet};
use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::{
    Context, Errno, Error, FileId, Lock, LockFamily, LockKind, NodeId, Origin, Result, Shares,
    Shortage,
};

use super::Owner;
use super::held::HeldLocks;
use super::queue::{Queue, Waiter};

/// Steps that the search for a dead-lock takes before it gives up and lets the caller wait.
const SEARCH_STEPS_MAX: usize = 4096;

/// A table of locks.
pub struct LockTable {
    state: Mutex<State>,
    /// Locks held and waited for, so that most closes need no mutex.
    count: AtomicUsize,
    /// Locks held and waited for, of which no node can have all.
    shares: Shares,
}

/// A lock held or waited for, for status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Locked {
    /// The file.
    pub file: FileId,
    /// Who holds it, or waits.
    pub owner: Owner,
    /// What it is.
    pub lock: Lock,
    /// It is waited for, not held.
    pub waiting: bool,
}

#[derive(Default)]
struct State {
    held: HeldLocks,
    /// Who waits at which file; none that nobody waits at.
    queues: HashMap<FileId, Queue>,
    /// Files at which an owner waits for fcntl locks.
    waits: HashMap<Owner, Vec<FileId>>,
    /// How waits ended that nobody has looked at since.
    ended: HashMap<u64, Ended>,
    waiting: usize,
    next_number: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    Granted,
    /// Its node was given up.
    Dropped,
}

impl LockTable {
    /// An empty table for at most `locks_max` locks held and waited for.
    pub fn new(locks_max: usize) -> LockTable {
        let shares = Shares::new(locks_max);
        LockTable { state: Mutex::default(), count: AtomicUsize::new(0), shares }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a change: grants what can be granted at `file`, and wakes those outside of the
    /// mutex.
    fn settle(&self, mut state: MutexGuard<'_, State>, file: FileId) {
        let wakers = self.grant(&mut state, file);
        self.count(&state);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    fn count(&self, state: &State) {
        self.count.store(state.held.len() + state.waiting, Ordering::Relaxed);
    }

    /// As [`HeldLocks::set`], and counts what `owner`'s node has then.
    fn set(&self, state: &mut State, (file, owner): (FileId, Owner), lock: Lock, origin: Origin) {
        let before = state.held.len();
        state.held.set(file, owner, lock);
        let more = state.held.len() as isize - before as isize;
        self.shares.change(owner.node.0, origin, more);
    }

    fn withdraw(&self, state: &mut State, file: FileId, number: u64) -> Option<Waiter> {
        let waiter = state.withdraw(file, number)?;
        self.shares.change(waiter.owner.node.0, Origin::default(), -1);
        Some(waiter)
    }

    /// Gives waiters at `file` what has become free; whom to wake.
    fn grant(&self, state: &mut State, file: FileId) -> Vec<Waker> {
        let mut wakers = Vec::new();
        while let Some(number) = state.next_grantable(file) {
            let Some(waiter) = state.withdraw(file, number) else { break };
            let Waiter { owner, lock, origin, .. } = waiter;
            self.set(state, (file, owner), lock, origin);
            self.shares.change(owner.node.0, origin, -1); // it has it, and waits no more
            state.ended.insert(number, Ended::Granted);
            wakers.extend(waiter.waker);
        }
        wakers
    }

    /// Takes, changes or gives back a lock of `cx`'s node, as
    /// [`OpenFile::lock`](dray_core::OpenFile::lock) has it. Errors: `EAGAIN` if somebody is
    /// in the way and `wait` is false; `EINTR` once the context is cancelled; `EDEADLK` if
    /// waiting for an fcntl lock would never end; `ENOLCK` where the node has its share of what the
    /// table has room for, also for giving back what leaves two locks where there was one.
    pub async fn lock(&self, cx: &Context, file: FileId, lock: Lock, wait: bool) -> Result<()> {
        let owner = Owner { node: cx.node, owner: lock.owner };
        if lock.range.start > lock.range.end {
            return Err(Errno::EINVAL.into());
        }
        let number = match self.try_lock(cx, (file, owner), lock, wait)? {
            None => return Ok(()),
            Some(number) => number,
        };
        let mut waiting = Waiting { table: self, file, owner, lock, number, done: false };
        poll_fn(|task| {
            let ended = waiting.table.poll_ended(file, number, task.waker());
            match ended {
                Some(Ended::Granted) => {
                    waiting.done = true;
                    return Poll::Ready(Ok(()));
                }
                Some(Ended::Dropped) => {
                    waiting.done = true;
                    return Poll::Ready(Err(interrupted()));
                }
                None => {}
            }
            match &cx.cancel {
                Some(cancel) if cancel.poll_set(task) => Poll::Ready(waiting.give_up()),
                _ => Poll::Pending,
            }
        })
        .await
    }

    /// None: done. A number: it waits under this number.
    fn try_lock(
        &self,
        cx: &Context,
        (file, owner): (FileId, Owner),
        lock: Lock,
        wait: bool,
    ) -> Result<Option<u64>> {
        let mut state = self.state();
        let unlock = lock.kind == LockKind::Unlock;
        if let Err(shortage) = self.shares.room(cx.taker()) {
            let waits = || wait && !unlock && state.bars(file, owner, &lock, wait);
            if state.held.growth(file, owner, &lock) > 0 || waits() {
                return Err(no_room(shortage));
            }
        }
        if unlock {
            self.set(&mut state, (file, owner), lock, cx.origin);
            self.settle(state, file);
            return Ok(None);
        }
        let mut gave_back = false;
        if lock.family == LockFamily::Flock {
            // A change of kind gives the old lock back first, as flock(2) does: two that
            // hold it shared and both want it alone would wait for each other for ever.
            let held = state.held.flock_of(owner, file);
            if held == Some(lock.kind) {
                return Ok(None);
            }
            gave_back = held.is_some();
            if gave_back {
                let unlock = Lock { kind: LockKind::Unlock, ..lock };
                self.set(&mut state, (file, owner), unlock, cx.origin);
            }
        }
        // Who has just had one comes before those who wait, as on Linux: it would be its owner
        // that waits for them, and they would be given what is his to give back.
        if !state.bars(file, owner, &lock, wait && !gave_back) {
            self.set(&mut state, (file, owner), lock, cx.origin);
            self.settle(state, file);
            return Ok(None);
        }
        if !wait {
            self.settle(state, file);
            return Err(Error::new(Errno::EAGAIN));
        }
        if lock.family == LockFamily::Posix && state.would_deadlock(file, owner, &lock) {
            return Err(Error::new(Errno::EDEADLK));
        }
        let number = state.wait(file, owner, lock, cx.origin);
        self.shares.change(owner.node.0, cx.origin, 1);
        match gave_back {
            true => self.settle(state, file),
            false => self.count(&state), // one that waits, too, gives nobody a lock
        }
        Ok(Some(number))
    }

    fn poll_ended(&self, file: FileId, number: u64, waker: &Waker) -> Option<Ended> {
        let mut state = self.state();
        if let Some(ended) = state.ended.remove(&number) {
            return Some(ended);
        }
        let waiter = state.queues.get_mut(&file)?.waiter_mut(number)?;
        match &mut waiter.waker {
            Some(old) => old.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        None
    }

    /// The first lock that stands in the way of `lock` of an owner of `node`.
    pub fn test(&self, node: NodeId, file: FileId, lock: Lock) -> Option<Lock> {
        let owner = Owner { node, owner: lock.owner };
        self.state().held.first_against(file, owner, &lock)
    }

    /// Gives back all locks of a kind that `owner` has on `file`.
    pub fn release(&self, file: FileId, family: LockFamily, owner: Owner) {
        if self.count.load(Ordering::Relaxed) == 0 {
            return; // the usual close
        }
        let mut state = self.state();
        let before = state.held.len();
        state.held.release(file, family, owner);
        let fewer = before as isize - state.held.len() as isize;
        self.shares.change(owner.node.0, Origin::default(), -fewer);
        self.settle(state, file);
    }

    /// Gives back all locks of a node that has gone, and ends its waits. Answers how many
    /// locks were held.
    pub fn release_node(&self, node: NodeId) -> usize {
        let (released, files) = {
            let mut state = self.state();
            let mut files = state.held.release_node(node);
            let released = files.len();
            self.shares.change(node.0, Origin::default(), -(released as isize));
            files.extend(state.queues.keys());
            (released, files.into_iter().collect::<HashSet<_>>())
        };
        for file in files {
            let mut state = self.state();
            let wakers = self.drop_waiters(&mut state, file, node);
            self.settle(state, file);
            wakers.into_iter().for_each(Waker::wake);
        }
        released
    }

    fn drop_waiters(&self, state: &mut State, file: FileId, node: NodeId) -> Vec<Waker> {
        let Some(queue) = state.queues.get(&file) else { return Vec::new() };
        let theirs = queue.waiters.iter().filter(|waiter| waiter.owner.node == node);
        let numbers: Vec<u64> = theirs.map(|waiter| waiter.number).collect();
        let mut wakers = Vec::new();
        for number in numbers {
            if let Some(waiter) = self.withdraw(state, file, number) {
                state.ended.insert(number, Ended::Dropped);
                wakers.extend(waiter.waker);
            }
        }
        wakers
    }

    /// Locks held.
    pub fn len(&self) -> usize {
        self.state().held.len()
    }

    /// Whether none is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Up to `max` locks held and waited for, in no order.
    pub fn list(&self, max: usize) -> Vec<Locked> {
        let state = self.state();
        let held = |(file, owner, lock)| Locked { file, owner, lock, waiting: false };
        let held = state.held.iter().map(held);
        let waiting = state.queues.iter().flat_map(|(file, queue)| {
            queue.waiters.iter().map(|waiter| Locked {
                file: *file,
                owner: waiter.owner,
                lock: waiter.lock,
                waiting: true,
            })
        });
        held.chain(waiting).take(max).collect()
    }
}

/// A wait that has not been answered: withdrawn when it is dropped.
struct Waiting<'a> {
    table: &'a LockTable,
    file: FileId,
    owner: Owner,
    lock: Lock,
    number: u64,
    done: bool,
}

impl Waiting<'_> {
    /// Withdraws it, unless it was granted since the last look: then the lock is had, as with
    /// fcntl(2) and a signal that comes too late. To give it back would give back, too, what the
    /// owner had in its range before. Errors: `EINTR`.
    fn give_up(&mut self) -> Result<()> {
        self.done = true;
        let mut state = self.table.state();
        if state.ended.remove(&self.number) == Some(Ended::Granted) {
            return Ok(());
        }
        self.table.withdraw(&mut state, self.file, self.number);
        self.table.settle(state, self.file);
        Err(interrupted())
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let mut state = self.table.state();
        if state.ended.remove(&self.number) == Some(Ended::Granted) {
            // Granted between the last look and the cancellation: nobody will know.
            let unlock = Lock { kind: LockKind::Unlock, ..self.lock };
            self.table.set(&mut state, (self.file, self.owner), unlock, Origin::default());
        }
        self.table.withdraw(&mut state, self.file, self.number);
        self.table.settle(state, self.file);
    }
}

fn no_room(shortage: Shortage) -> Error {
    Error::new(Errno::ENOLCK).because(match shortage {
        Shortage::None => "the export has as many locks as it may",
        Shortage::Share => "this client has its share of the locks that the export may have",
        Shortage::OriginShare => {
            "the clients of this address have their share of the locks that the export may have"
        }
    })
}

fn interrupted() -> Error {
    Error::retry(Errno::EINTR).because("the wait for a lock was given up")
}

impl State {
    /// Whether the request must wait. One that may wait stands behind those that wait
    /// already, unless its owner holds locks, which they may be waiting for.
    fn bars(&self, file: FileId, owner: Owner, lock: &Lock, wait: bool) -> bool {
        let queue = || self.queues.get(&file).filter(|_| wait && !self.held.has_any(owner));
        self.held.bars(file, owner, lock)
            || queue().is_some_and(|queue| queue.conflicts(owner, lock))
    }

    fn wait(&mut self, file: FileId, owner: Owner, lock: Lock, origin: Origin) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        let waiter = Waiter { number, owner, lock, origin, waker: None };
        self.queues.entry(file).or_default().waiters.push_back(waiter);
        self.waiting += 1;
        if lock.family == LockFamily::Posix {
            self.waits.entry(owner).or_default().push(file);
        }
        number
    }

    /// Takes a waiter out of the queue and of the graph of waits.
    fn withdraw(&mut self, file: FileId, number: u64) -> Option<Waiter> {
        let queue = self.queues.get_mut(&file)?;
        let waiter = queue.withdraw(number)?;
        if queue.waiters.is_empty() {
            self.queues.remove(&file);
        }
        self.waiting -= 1;
        if waiter.lock.family == LockFamily::Posix
            && let Some(files) = self.waits.get_mut(&waiter.owner)
        {
            if let Some(at) = files.iter().position(|other| *other == file) {
                files.swap_remove(at);
            }
            if files.is_empty() {
                self.waits.remove(&waiter.owner);
            }
        }
        Some(waiter)
    }

    fn next_grantable(&self, file: FileId) -> Option<u64> {
        let holder =
            |waiter: &Waiter| self.held.holders_against(file, waiter.owner, &waiter.lock).next();
        self.queues.get(&file)?.next_grantable(holder, |owner| self.held.has_any(owner))
    }

    /// Whether somebody in the way waits, over any number of others, for `owner`.
    fn would_deadlock(&self, file: FileId, owner: Owner, lock: &Lock) -> bool {
        let mut seen = HashSet::new();
        let mut next: Vec<Owner> = self.held.holders_against(file, owner, lock).collect();
        while let Some(other) = next.pop() {
            if other == owner {
                return true;
            }
            if !seen.insert(other) {
                continue;
            }
            if seen.len() > SEARCH_STEPS_MAX {
                return false;
            }
            for file in self.waits.get(&other).into_iter().flatten() {
                let Some(queue) = self.queues.get(file) else { continue };
                for waiter in queue.waiters.iter().filter(|waiter| waiter.owner == other) {
                    next.extend(self.held.holders_against(*file, other, &waiter.lock));
                }
            }
        }
        false
    }
}

#[cfg(test)]
mod tests;
