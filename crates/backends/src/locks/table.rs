//! The lock table of an export.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Poll, Waker};

use dray_core::{
    ClientAddress, Context, Errno, Error, FileId, HolderId, Lock, LockFamily, LockKind, Result,
    Shares, Shortage,
};

use super::Owner;
use super::deadlock::DeadlockGraph;
use super::file::{FileLocks, LockEffects, WaitOutcome};
use super::files::LockedFiles;
use super::flocks::FlockUsers;
use super::owners::OwnerIndex;

/// A lock table. Each file has a mutex of its own, so work on one file does not delay locks of
/// others.
pub struct LockTable {
    files: LockedFiles,
    owners: OwnerIndex,
    deadlocks: DeadlockGraph,
    /// Locks held and waited for, of which no holder can have all.
    shares: Shares,
    held: AtomicUsize,
    pub(super) flock_users: FlockUsers,
}

/// A lock held or waited for, for status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockStatus {
    /// The file.
    pub file: FileId,
    /// The owner that holds it or waits for it.
    pub owner: Owner,
    /// What it is.
    pub lock: Lock,
    /// The lock is waited for, not held.
    pub waiting: bool,
}

impl LockTable {
    /// An empty table for at most `locks_max` locks held and waited for, and as many more as calls
    /// run at once.
    pub fn new(locks_max: usize) -> LockTable {
        LockTable {
            files: LockedFiles::default(),
            owners: OwnerIndex::default(),
            deadlocks: DeadlockGraph::default(),
            shares: Shares::new(locks_max),
            held: AtomicUsize::new(0),
            flock_users: FlockUsers::default(),
        }
    }

    /// Changes the locks of a file, grants what can be granted after it, and wakes those outside of
    /// the mutex.
    fn change<R>(
        &self,
        file: FileId,
        work: impl FnOnce(&mut FileLocks, &mut LockEffects) -> R,
    ) -> R {
        let (wakers, elsewhere) = (Vec::new(), BTreeSet::new());
        let (owners, shares) = (&self.owners, &self.shares);
        let mut effects = LockEffects { owners, shares, wakers, elsewhere };
        let answer = self.change_one(file, &mut effects, work);
        while let Some((file, number)) = effects.elsewhere.pop_first() {
            self.change_one(file, &mut effects, |locks, effects| {
                let rest = effects.elsewhere.split_off(&(file, u64::MAX));
                let there = std::mem::replace(&mut effects.elsewhere, rest);
                there.iter().for_each(|(_, number)| locks.doubt(*number));
                locks.doubt(number);
            });
        }
        effects.wakers.into_iter().for_each(Waker::wake);
        answer
    }

    fn change_one<R>(
        &self,
        file: FileId,
        effects: &mut LockEffects,
        work: impl FnOnce(&mut FileLocks, &mut LockEffects) -> R,
    ) -> R {
        self.files.with(file, |locks| {
            let before = locks.held.len();
            let answer = work(locks, effects);
            locks.settle(effects);
            let now = locks.held.len();
            if now > before {
                self.held.fetch_add(now - before, Ordering::Relaxed);
            } else if now < before {
                self.held.fetch_sub(before - now, Ordering::Relaxed);
            }
            answer
        })
    }

    /// Takes, changes or gives back a lock of `cx`'s holder, as
    /// [`OpenFile::lock`](dray_core::OpenFile::lock) specifies.
    ///
    /// Errors: `EAGAIN` if another lock conflicts and `wait` is false. `EINTR` once the context is
    /// cancelled. `EDEADLK` if the wait for an fcntl lock would never end. `ENOLCK` if the node has
    /// its share of the table. Giving back the middle of a lock can fail so, too, because it leaves
    /// two locks.
    pub async fn lock(&self, cx: &Context, file: FileId, lock: Lock, wait: bool) -> Result<()> {
        let owner = Owner::of(cx, lock.owner);
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
                Some(WaitOutcome::Granted) => {
                    waiting.done = true;
                    return Poll::Ready(Ok(()));
                }
                Some(WaitOutcome::Dropped) => {
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
        let number = self.change(file, |locks, effects| {
            self.take_or_wait(cx, (locks, effects), owner, lock, wait)
        })?;
        // An owner without locks blocks no other owner.
        if let Some(number) = number
            && lock.family == LockFamily::Posix
            && self.owners.has_any(owner)
        {
            let withdraw = || self.change(file, |locks, effects| locks.withdraw(effects, number));
            let table = (&self.files, &self.owners);
            return match self.deadlocks.break_at(table, owner, (file, number), withdraw) {
                None => Ok(Some(number)),
                Some(Some(WaitOutcome::Granted)) => Ok(None), // in the meantime
                Some(Some(WaitOutcome::Dropped)) => Err(interrupted()),
                Some(None) => Err(Error::new(Errno::EDEADLK)),
            };
        }
        Ok(number)
    }

    /// As [`LockTable::try_lock`], for a holder that comes from nowhere.
    #[cfg(test)]
    fn ask(&self, file: FileId, owner: Owner, lock: Lock, wait: bool) -> Result<Option<u64>> {
        let cx = Context { holder: owner.holder, ..Context::system() };
        self.try_lock(&cx, (file, owner), lock, wait)
    }

    fn take_or_wait(
        &self,
        cx: &Context,
        (locks, effects): (&mut FileLocks, &mut LockEffects),
        owner: Owner,
        lock: Lock,
        wait: bool,
    ) -> Result<Option<u64>> {
        let unlock = lock.kind == LockKind::Unlock;
        let passes = !wait || self.owners.has_any(owner);
        if let Err(shortage) = self.shares.room(cx.taker()) {
            let bars = || locks.bar(owner, &lock, u64::MAX, passes).is_some();
            if locks.held.growth(owner, &lock) > 0 || wait && !unlock && bars() {
                return Err(no_room(shortage));
            }
        }
        if unlock {
            locks.set(effects, owner, lock, cx.address);
            return Ok(None);
        }
        let mut gave_back = false;
        if lock.family == LockFamily::Flock {
            // A change of kind gives the old lock back first, as flock(2) does. Two that hold it
            // shared and both want it alone would wait for each other for ever.
            let held = locks.held.flock_of(owner);
            if held == Some(lock.kind) {
                return Ok(None);
            }
            gave_back = held.is_some();
            if gave_back {
                let unlock = Lock { kind: LockKind::Unlock, ..lock };
                locks.set(effects, owner, unlock, cx.address);
            }
        }
        // An owner that has just given back a lock passes the waiting requests, as on Linux.
        // Otherwise it would wait for them, and they would be given locks that the owner still has
        // to give back.
        let passes = passes || gave_back;
        if locks.bar(owner, &lock, u64::MAX, passes).is_none() {
            locks.set(effects, owner, lock, cx.address);
            return Ok(None);
        }
        if !wait {
            return Err(Error::new(Errno::EAGAIN));
        }
        Ok(Some(locks.wait(effects, owner, lock, cx.address)))
    }

    fn poll_ended(&self, file: FileId, number: u64, waker: &Waker) -> Option<WaitOutcome> {
        self.files.with(file, |locks| locks.look_at(number, waker))
    }

    /// The first lock of another owner that stands in the way of `lock`.
    pub fn test(&self, cx: &Context, file: FileId, lock: Lock) -> Option<Lock> {
        let owner = Owner::of(cx, lock.owner);
        self.files.look(file, |locks| locks.held.first_against(owner, &lock)).flatten()
    }

    /// Gives back all locks of a kind that `owner` has on `file`.
    pub fn release(&self, file: FileId, family: LockFamily, owner: Owner) {
        if self.shares.used() == 0 {
            return; // the usual close
        }
        if self.files.look(file, |locks| locks.held.has(owner)) == Some(true) {
            self.change(file, |locks, effects| locks.release(effects, family, owner));
        }
    }

    /// Gives back all locks of a holder whose session ended, and ends its waits. Answers how many
    /// locks were held.
    pub fn release_holder(&self, holder: HolderId) -> usize {
        let files = self.owners.files_of(holder).into_iter();
        let released = files
            .map(|file| self.change(file, |locks, effects| locks.release_holder(effects, holder)));
        released.sum()
    }

    /// Locks held.
    pub fn len(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Whether none is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Up to `max` locks held and waited for, in no order.
    pub fn list(&self, max: usize) -> Vec<LockStatus> {
        let mut all = Vec::new();
        self.files.look_at_each(|file, locks| {
            let locked = |owner, lock, waiting| LockStatus { file, owner, lock, waiting };
            let held = locks.held.iter().map(|(owner, lock)| locked(owner, lock, false));
            let waiting = locks.queue.iter().map(|waiter| locked(waiter.owner, waiter.lock, true));
            all.extend(held.chain(waiting).take(max - all.len()));
            all.len() < max
        });
        all
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
        match self.withdraw() {
            Some(WaitOutcome::Granted) => Ok(()),
            _ => Err(interrupted()),
        }
    }

    fn withdraw(&mut self) -> Option<WaitOutcome> {
        self.done = true;
        self.table.change(self.file, |locks, effects| locks.withdraw(effects, self.number))
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.done && self.withdraw() == Some(WaitOutcome::Granted) {
            // Granted between the last look and the cancellation: the request will not learn of it.
            let back = Lock { kind: LockKind::Unlock, ..self.lock };
            let address = ClientAddress::default(); // it is counted already
            self.table.change(self.file, |locks, effects| {
                locks.set(effects, self.owner, back, address);
            });
        }
    }
}

fn no_room(shortage: Shortage) -> Error {
    Error::new(Errno::ENOLCK).because(match shortage {
        Shortage::None => "the export has reached its limit of locks",
        Shortage::Share => "this client has reached its share of the export's locks",
        Shortage::AddressShare => {
            "the clients of this address have reached their share of the export's locks"
        }
    })
}

fn interrupted() -> Error {
    Error::retry(Errno::EINTR).because("the wait for a lock was given up")
}

#[cfg(test)]
mod many;
#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
