//! The locks of one file: those held and those waited for.

use std::collections::{BTreeSet, HashMap};
use std::task::Waker;

use dray_core::{ClientAddress, FileId, HolderId, Lock, LockFamily, Shares};

use super::Owner;
use super::held::HeldLocks;
use super::owners::{Owners, Wait};
use super::queue::{Bar, Queue};

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Granted,
    /// Its holder was given up.
    Dropped,
}

/// All about the locks of one file.
///
/// Each waiter watches one lock held or one earlier waiter that bars it. Whatever changes puts those
/// who watched it among the doubtful, and [`settle`](FileLocks::settle) looks at these alone: whoever
/// is not doubtful is barred.
pub(super) struct FileLocks {
    file: FileId,
    pub(super) held: HeldLocks,
    pub(super) queue: Queue,
    /// How waits ended that nobody has looked at since.
    ended: HashMap<u64, Ended>,
    doubtful: BTreeSet<u64>,
    /// It is no longer the one that is found for its file.
    pub(super) removed: bool,
}

/// What a change of one file's locks means to others, who are told without its mutex.
pub(super) struct Changes<'a> {
    pub(super) owners: &'a Owners,
    /// Locks held and waited for are counted here.
    pub(super) shares: &'a Shares,
    /// Those who have got what they waited for.
    pub(super) wakers: Vec<Waker>,
    /// Waits at other files that are doubtful.
    pub(super) elsewhere: BTreeSet<Wait>,
}

impl Changes<'_> {
    /// A holder holds and waits for so many locks less.
    fn fewer(&self, holder: HolderId, count: usize) {
        self.shares.change(holder.0, ClientAddress::default(), -(count as isize));
    }
}

impl FileLocks {
    pub(super) fn new(file: FileId) -> FileLocks {
        FileLocks {
            file,
            held: HeldLocks::default(),
            queue: Queue::default(),
            ended: HashMap::new(),
            doubtful: BTreeSet::new(),
            removed: false,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.len() == 0 && self.queue.len() == 0 && self.ended.is_empty()
    }

    /// What bars a request of number `before`: a lock held, or, unless its owner has locks, which
    /// others may be waiting for, an earlier request. One of these rather than a lock: of a thousand
    /// that wait for one lock those in front then look again when it is given back, not all.
    pub(super) fn bar(
        &self,
        owner: Owner,
        lock: &Lock,
        before: u64,
        has_locks: bool,
    ) -> Option<Bar> {
        let earlier = || self.queue.bar(owner, lock, before).map(Bar::Waiter);
        let waiter = if has_locks { None } else { earlier() };
        waiter.or_else(|| self.held.bar(owner, lock).map(Bar::Held))
    }

    /// As [`HeldLocks::set`], for a client that comes from `address`.
    pub(super) fn set(
        &mut self,
        changes: &mut Changes,
        owner: Owner,
        lock: Lock,
        address: ClientAddress,
    ) {
        let (had, before) = (self.held.has(owner), self.held.len());
        self.held.set(owner, lock);
        let more = self.held.len() as isize - before as isize;
        changes.shares.change(owner.holder.0, address, more);
        self.note(changes, owner, had);
    }

    /// As [`HeldLocks::release`].
    pub(super) fn release(&mut self, changes: &mut Changes, family: LockFamily, owner: Owner) {
        let (had, before) = (self.held.has(owner), self.held.len());
        self.held.release(family, owner);
        changes.fewer(owner.holder, before - self.held.len());
        self.note(changes, owner, had);
    }

    /// Gives back all locks of `holder` and ends its waits; how many locks were held.
    pub(super) fn release_holder(&mut self, changes: &mut Changes, holder: HolderId) -> usize {
        let (released, owners) = self.held.release_holder(holder);
        changes.fewer(holder, released);
        owners.into_iter().for_each(|owner| self.note(changes, owner, true));
        for number in self.queue.of_holder(holder) {
            self.end(changes, number, Ended::Dropped);
        }
        released
    }

    /// Notes whether `owner`, who had locks here or not, has some.
    fn note(&mut self, changes: &mut Changes, owner: Owner, had: bool) {
        let has = self.held.has(owner);
        if has && !had {
            for (file, number) in changes.owners.holds(owner, self.file) {
                match file == self.file {
                    true => _ = self.doubtful.insert(number),
                    false => _ = changes.elsewhere.insert((file, number)),
                }
            }
        } else if had && !has {
            changes.owners.holds_none(owner, self.file);
        }
    }

    /// Puts a request behind all others; its number.
    pub(super) fn wait(
        &mut self,
        changes: &mut Changes,
        owner: Owner,
        lock: Lock,
        address: ClientAddress,
    ) -> u64 {
        let number = self.queue.add(owner, lock, address);
        changes.shares.change(owner.holder.0, address, 1);
        changes.owners.waits(owner, (self.file, number));
        self.doubtful.insert(number);
        number
    }

    /// Something has changed for a waiter.
    pub(super) fn doubt(&mut self, number: u64) {
        self.doubtful.insert(number);
    }

    /// How a wait has ended, once; else who has to be woken when it does.
    pub(super) fn look_at(&mut self, number: u64, waker: &Waker) -> Option<Ended> {
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
    pub(super) fn withdraw(&mut self, changes: &mut Changes, number: u64) -> Option<Ended> {
        self.leave(changes, number);
        self.ended.remove(&number)
    }

    /// Takes a waiter out of the queue and of what is known of its owner.
    fn leave(&mut self, changes: &mut Changes, number: u64) -> Option<super::queue::Waiter> {
        let waiter = self.queue.remove(number)?;
        changes.fewer(waiter.owner.holder, 1);
        changes.owners.waits_no_more(waiter.owner, (self.file, number));
        self.doubtful.remove(&number);
        self.doubtful.extend(self.queue.watching(Bar::Waiter(number)));
        Some(waiter)
    }

    fn end(&mut self, changes: &mut Changes, number: u64, ended: Ended) {
        if let Some(waiter) = self.leave(changes, number) {
            self.ended.insert(number, ended);
            changes.wakers.extend(waiter.waker);
        }
    }

    /// Looks at all doubtful waiters in the order of their arrival, and gives them what nothing bars.
    pub(super) fn settle(&mut self, changes: &mut Changes) {
        loop {
            for gone in self.held.take_gone() {
                self.doubtful.extend(self.queue.watching(Bar::Held(gone)));
            }
            let Some(number) = self.doubtful.pop_first() else { return };
            self.examine(changes, number);
        }
    }

    fn examine(&mut self, changes: &mut Changes, number: u64) {
        let Some(waiter) = self.queue.get(number) else { return };
        let (owner, lock, wait) = (waiter.owner, waiter.lock, (self.file, number));
        let address = waiter.address;
        let has_locks = changes.owners.has_any(owner);
        let mut bar = self.bar(owner, &lock, number, has_locks);
        if let Some(Bar::Waiter(_)) = bar
            && !changes.owners.stands_behind(owner, wait)
        {
            bar = self.bar(owner, &lock, number, true); // it has got a lock in this instant
        }
        let Some(bar) = bar else {
            self.end(changes, number, Ended::Granted);
            self.set(changes, owner, lock, address);
            return;
        };
        let former = self.queue.watch(number, bar);
        if let (Some(Bar::Waiter(_)), Bar::Held(_)) = (former, bar) {
            changes.owners.stands_behind_none(owner, wait);
        }
    }

    /// Who has locks in the way of a waiter: `max` of them, some perhaps more than once.
    pub(super) fn holders_against(&self, number: u64, max: usize) -> Vec<Owner> {
        let Some(waiter) = self.queue.get(number) else { return Vec::new() };
        self.held.holders_against(waiter.owner, &waiter.lock).take(max).collect()
    }
}
