//! All locks of an export.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Poll, Waker};

use dray_core::{
    ClientAddress, Context, Errno, Error, FileId, HolderId, Lock, LockFamily, LockKind, Result,
    Shares, Shortage,
};

use super::Owner;
use super::circle::Circles;
use super::file::{Changes, Ended, FileLocks};
use super::files::Files;
use super::flocks::FlockUsers;
use super::owners::Owners;

/// A table of locks. Each file has a mutex of its own: whoever waits for it, or does much under it,
/// is in the way of none who locks another file.
pub struct LockTable {
    files: Files,
    owners: Owners,
    circles: Circles,
    /// Locks held and waited for, of which no holder can have all.
    shares: Shares,
    held: AtomicUsize,
    pub(super) flock_users: FlockUsers,
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

impl LockTable {
    /// An empty table for at most `locks_max` locks held and waited for, and as many more as calls
    /// run at once.
    pub fn new(locks_max: usize) -> LockTable {
        LockTable {
            files: Files::default(),
            owners: Owners::default(),
            circles: Circles::default(),
            shares: Shares::new(locks_max),
            held: AtomicUsize::new(0),
            flock_users: FlockUsers::default(),
        }
    }

    /// Changes the locks of a file, grants what can be granted after it, and wakes those outside of
    /// the mutex.
    fn change<R>(&self, file: FileId, work: impl FnOnce(&mut FileLocks, &mut Changes) -> R) -> R {
        let (wakers, elsewhere) = (Vec::new(), BTreeSet::new());
        let (owners, shares) = (&self.owners, &self.shares);
        let mut changes = Changes { owners, shares, wakers, elsewhere };
        let answer = self.change_one(file, &mut changes, work);
        while let Some((file, number)) = changes.elsewhere.pop_first() {
            self.change_one(file, &mut changes, |locks, changes| {
                let rest = changes.elsewhere.split_off(&(file, u64::MAX));
                let there = std::mem::replace(&mut changes.elsewhere, rest);
                there.iter().for_each(|(_, number)| locks.doubt(*number));
                locks.doubt(number);
            });
        }
        changes.wakers.into_iter().for_each(Waker::wake);
        answer
    }

    fn change_one<R>(
        &self,
        file: FileId,
        changes: &mut Changes,
        work: impl FnOnce(&mut FileLocks, &mut Changes) -> R,
    ) -> R {
        self.files.with(file, |locks| {
            let before = locks.held.len();
            let answer = work(locks, changes);
            locks.settle(changes);
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
    /// [`OpenFile::lock`](dray_core::OpenFile::lock) has it. Errors: `EAGAIN` if somebody is
    /// in the way and `wait` is false; `EINTR` once the context is cancelled; `EDEADLK` if
    /// waiting for an fcntl lock would never end; `ENOLCK` where the holder has its share of what the
    /// table has room for, also for giving back what leaves two locks where there was one.
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
        let number = self.change(file, |locks, changes| {
            self.take_or_wait(cx, (locks, changes), owner, lock, wait)
        })?;
        // Nobody waits for who has no lock.
        if let Some(number) = number
            && lock.family == LockFamily::Posix
            && self.owners.has_any(owner)
        {
            let withdraw = || self.change(file, |locks, changes| locks.withdraw(changes, number));
            let table = (&self.files, &self.owners);
            return match self.circles.break_at(table, owner, (file, number), withdraw) {
                None => Ok(Some(number)),
                Some(Some(Ended::Granted)) => Ok(None), // in the meantime
                Some(Some(Ended::Dropped)) => Err(interrupted()),
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
        (locks, changes): (&mut FileLocks, &mut Changes),
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
            locks.set(changes, owner, lock, cx.address);
            return Ok(None);
        }
        let mut gave_back = false;
        if lock.family == LockFamily::Flock {
            // A change of kind gives the old lock back first, as flock(2) does: two that
            // hold it shared and both want it alone would wait for each other for ever.
            let held = locks.held.flock_of(owner);
            if held == Some(lock.kind) {
                return Ok(None);
            }
            gave_back = held.is_some();
            if gave_back {
                let unlock = Lock { kind: LockKind::Unlock, ..lock };
                locks.set(changes, owner, unlock, cx.address);
            }
        }
        // Who has just had one comes before those who wait, as on Linux: it would be its owner
        // that waits for them, and they would be given what is his to give back.
        let passes = passes || gave_back;
        if locks.bar(owner, &lock, u64::MAX, passes).is_none() {
            locks.set(changes, owner, lock, cx.address);
            return Ok(None);
        }
        if !wait {
            return Err(Error::new(Errno::EAGAIN));
        }
        Ok(Some(locks.wait(changes, owner, lock, cx.address)))
    }

    fn poll_ended(&self, file: FileId, number: u64, waker: &Waker) -> Option<Ended> {
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
            self.change(file, |locks, changes| locks.release(changes, family, owner));
        }
    }

    /// Gives back all locks of a holder that has gone, and ends its waits. Answers how many
    /// locks were held.
    pub fn release_holder(&self, holder: HolderId) -> usize {
        let files = self.owners.files_of(holder).into_iter();
        let released = files
            .map(|file| self.change(file, |locks, changes| locks.release_holder(changes, holder)));
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
    pub fn list(&self, max: usize) -> Vec<Locked> {
        let mut all = Vec::new();
        self.files.look_at_each(|file, locks| {
            let locked = |owner, lock, waiting| Locked { file, owner, lock, waiting };
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
            Some(Ended::Granted) => Ok(()),
            _ => Err(interrupted()),
        }
    }

    fn withdraw(&mut self) -> Option<Ended> {
        self.done = true;
        self.table.change(self.file, |locks, changes| locks.withdraw(changes, self.number))
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.done && self.withdraw() == Some(Ended::Granted) {
            // Granted between the last look and the cancellation: nobody will know.
            let back = Lock { kind: LockKind::Unlock, ..self.lock };
            let address = ClientAddress::default(); // it is counted already
            self.table.change(self.file, |locks, changes| {
                locks.set(changes, self.owner, back, address);
            });
        }
    }
}

fn no_room(shortage: Shortage) -> Error {
    Error::new(Errno::ENOLCK).because(match shortage {
        Shortage::None => "the export has as many locks as it may",
        Shortage::Share => "this client has its share of the locks that the export may have",
        Shortage::AddressShare => {
            "the clients of this address have their share of the locks that the export may have"
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
