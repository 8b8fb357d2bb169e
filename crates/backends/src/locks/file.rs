//! The locks of one file: granted locks and waiting requests.

use std::collections::{BTreeSet, HashMap};
use std::task::Waker;

use dray_core::{ClientAddress, FileId, HolderId, Lock, LockFamily, Shares};

use super::Owner;
use super::held::GrantedLocks;
use super::owners::{OwnerIndex, WaitId};
use super::queue::{Blocker, WaitQueue};

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitOutcome {
    Granted,
    /// The holder that waits was given up.
    Dropped,
}

/// All locks and requests of one file.
///
/// Each waiter watches one granted lock or one earlier waiter that blocks it. When that changes,
/// its watchers become doubtful. [`settle`](FileLocks::settle) examines only doubtful waiters: all
/// others are blocked.
pub(super) struct FileLocks {
    file: FileId,
    pub(super) held: GrantedLocks,
    pub(super) queue: WaitQueue,
    /// Outcomes of waits that their requests have not read yet.
    ended: HashMap<u64, WaitOutcome>,
    doubtful: BTreeSet<u64>,
    /// This entry has been taken out of the table of files.
    pub(super) removed: bool,
}

/// Effects of a change on other requests. They are applied without the mutex of the file.
pub(super) struct LockEffects<'a> {
    pub(super) owners: &'a OwnerIndex,
    /// Locks held and waited for are counted here.
    pub(super) shares: &'a Shares,
    /// The requests that were granted.
    pub(super) wakers: Vec<Waker>,
    /// Waits at other files that are doubtful.
    pub(super) elsewhere: BTreeSet<WaitId>,
}

impl LockEffects<'_> {
    /// A holder holds and waits for so many locks less.
    fn fewer(&self, holder: HolderId, count: usize) {
        self.shares.change(holder.0, ClientAddress::default(), -(count as isize));
    }
}

impl FileLocks {
    pub(super) fn new(file: FileId) -> FileLocks {
        FileLocks {
            file,
            held: GrantedLocks::default(),
            queue: WaitQueue::default(),
            ended: HashMap::new(),
            doubtful: BTreeSet::new(),
            removed: false,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.len() == 0 && self.queue.len() == 0 && self.ended.is_empty()
    }

    /// What bars a request of number `before`: a lock held, or, unless its owner has locks, which
    /// others may be waiting for, an earlier request. One of these rather than a lock. Of a
    /// thousand that wait for one lock those in front then look again when it is given back, not
    /// all.
    pub(super) fn bar(
        &self,
        owner: Owner,
        lock: &Lock,
        before: u64,
        has_locks: bool,
    ) -> Option<Blocker> {
        let earlier = || self.queue.bar(owner, lock, before).map(Blocker::Waiter);
        let waiter = if has_locks { None } else { earlier() };
        waiter.or_else(|| self.held.bar(owner, lock).map(Blocker::Held))
    }

    /// As [`GrantedLocks::set`], for a client that comes from `address`.
    pub(super) fn set(
        &mut self,
        effects: &mut LockEffects,
        owner: Owner,
        lock: Lock,
        address: ClientAddress,
    ) {
        let (had, before) = (self.held.has(owner), self.held.len());
        self.held.set(owner, lock);
        let more = self.held.len() as isize - before as isize;
        effects.shares.change(owner.holder.0, address, more);
        self.note(effects, owner, had);
    }

    /// As [`GrantedLocks::release`].
    pub(super) fn release(&mut self, effects: &mut LockEffects, family: LockFamily, owner: Owner) {
        let (had, before) = (self.held.has(owner), self.held.len());
        self.held.release(family, owner);
        effects.fewer(owner.holder, before - self.held.len());
        self.note(effects, owner, had);
    }

    /// Gives back all locks of `holder` and ends its waits; how many locks were held.
    pub(super) fn release_holder(&mut self, effects: &mut LockEffects, holder: HolderId) -> usize {
        let (released, owners) = self.held.release_holder(holder);
        effects.fewer(holder, released);
        owners.into_iter().for_each(|owner| self.note(effects, owner, true));
        for number in self.queue.of_holder(holder) {
            self.end(effects, number, WaitOutcome::Dropped);
        }
        released
    }

    /// Records whether `owner` has locks here, after a change. `had`: it had some before.
    fn note(&mut self, effects: &mut LockEffects, owner: Owner, had: bool) {
        let has = self.held.has(owner);
        if has && !had {
            for (file, number) in effects.owners.holds(owner, self.file) {
                match file == self.file {
                    true => _ = self.doubtful.insert(number),
                    false => _ = effects.elsewhere.insert((file, number)),
                }
            }
        } else if had && !has {
            effects.owners.holds_none(owner, self.file);
        }
    }

    /// Puts a request behind all others; its number.
    pub(super) fn wait(
        &mut self,
        effects: &mut LockEffects,
        owner: Owner,
        lock: Lock,
        address: ClientAddress,
    ) -> u64 {
        let number = self.queue.add(owner, lock, address);
        effects.shares.change(owner.holder.0, address, 1);
        effects.owners.waits(owner, (self.file, number));
        self.doubtful.insert(number);
        number
    }

    /// Something has changed for a waiter.
    pub(super) fn doubt(&mut self, number: u64) {
        self.doubtful.insert(number);
    }

    /// The outcome of a wait, once. While there is none, `waker` is kept for it.
    pub(super) fn look_at(&mut self, number: u64, waker: &Waker) -> Option<WaitOutcome> {
        if let Some(ended) = self.ended.remove(&number) {
            return Some(ended);
        }
        match &mut self.queue.get_mut(number)?.waker {
            Some(old) => old.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        None
    }

    /// Takes a waiter out. How its wait had ended before, if it had.
    pub(super) fn withdraw(
        &mut self,
        effects: &mut LockEffects,
        number: u64,
    ) -> Option<WaitOutcome> {
        self.leave(effects, number);
        self.ended.remove(&number)
    }

    /// Takes a waiter out of the queue and of what is known of its owner.
    fn leave(&mut self, effects: &mut LockEffects, number: u64) -> Option<super::queue::Waiter> {
        let waiter = self.queue.remove(number)?;
        effects.fewer(waiter.owner.holder, 1);
        effects.owners.waits_no_more(waiter.owner, (self.file, number));
        self.doubtful.remove(&number);
        self.doubtful.extend(self.queue.watching(Blocker::Waiter(number)));
        Some(waiter)
    }

    fn end(&mut self, effects: &mut LockEffects, number: u64, ended: WaitOutcome) {
        if let Some(waiter) = self.leave(effects, number) {
            self.ended.insert(number, ended);
            effects.wakers.extend(waiter.waker);
        }
    }

    /// Looks at all doubtful waiters in the order of their arrival, and gives them what nothing bars.
    pub(super) fn settle(&mut self, effects: &mut LockEffects) {
        loop {
            for gone in self.held.take_gone() {
                self.doubtful.extend(self.queue.watching(Blocker::Held(gone)));
            }
            let Some(number) = self.doubtful.pop_first() else { return };
            self.examine(effects, number);
        }
    }

    fn examine(&mut self, effects: &mut LockEffects, number: u64) {
        let Some(waiter) = self.queue.get(number) else { return };
        let (owner, lock, wait) = (waiter.owner, waiter.lock, (self.file, number));
        let address = waiter.address;
        let has_locks = effects.owners.has_any(owner);
        let mut bar = self.bar(owner, &lock, number, has_locks);
        if let Some(Blocker::Waiter(_)) = bar
            && !effects.owners.stands_behind(owner, wait)
        {
            bar = self.bar(owner, &lock, number, true); // it has got a lock in this instant
        }
        let Some(bar) = bar else {
            self.end(effects, number, WaitOutcome::Granted);
            self.set(effects, owner, lock, address);
            return;
        };
        let former = self.queue.watch(number, bar);
        if let (Some(Blocker::Waiter(_)), Blocker::Held(_)) = (former, bar) {
            effects.owners.stands_behind_none(owner, wait);
        }
    }

    /// The owners with locks in the way of a waiter: `max` of them. Some may occur more than once.
    pub(super) fn holders_against(&self, number: u64, max: usize) -> Vec<Owner> {
        let Some(waiter) = self.queue.get(number) else { return Vec::new() };
        self.held.holders_against(waiter.owner, &waiter.lock).take(max).collect()
    }
}
