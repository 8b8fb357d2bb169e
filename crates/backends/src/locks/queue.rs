//! The requests that wait for locks of one file.

use std::collections::{BTreeMap, BTreeSet};
use std::task::Waker;

use dray_core::{ClientAddress, HolderId, Lock};

use super::Owner;
use super::ranges::{ConflictQuery, NumberedLock, Ranges};

/// What blocks a waiter. Each waiter watches one lock or one waiter that blocks it, and is examined
/// again when that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Blocker {
    /// The lock held under this number.
    Held(u64),
    /// The earlier waiter of this number.
    Waiter(u64),
}

/// A request that waits.
pub(super) struct Waiter {
    pub(super) owner: Owner,
    pub(super) lock: Lock,
    /// Where its client comes from.
    pub(super) address: ClientAddress,
    pub(super) waker: Option<Waker>,
    watches: Option<Blocker>,
}

/// Requests by number, which is the order of their arrival.
#[derive(Default)]
pub(super) struct WaitQueue {
    waiters: BTreeMap<u64, Waiter>,
    places: Ranges,
    /// Pairs of a blocker and a waiter that watches it.
    watchers: BTreeSet<(Blocker, u64)>,
    next_number: u64,
}

impl WaitQueue {
    pub(super) fn len(&self) -> usize {
        self.waiters.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Waiter> {
        self.waiters.values()
    }

    /// Puts a request behind all others; its number.
    pub(super) fn add(&mut self, owner: Owner, lock: Lock, address: ClientAddress) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        self.waiters.insert(number, Waiter { owner, lock, address, waker: None, watches: None });
        self.places.insert(NumberedLock { number, owner, lock });
        number
    }

    pub(super) fn get(&self, number: u64) -> Option<&Waiter> {
        self.waiters.get(&number)
    }

    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut Waiter> {
        self.waiters.get_mut(&number)
    }

    /// Takes out the waiter with this number.
    pub(super) fn remove(&mut self, number: u64) -> Option<Waiter> {
        let waiter = self.waiters.remove(&number)?;
        let (owner, lock) = (waiter.owner, waiter.lock);
        self.places.remove(&NumberedLock { number, owner, lock });
        if let Some(bar) = waiter.watches {
            self.watchers.remove(&(bar, number));
        }
        Some(waiter)
    }

    /// The number of another owner's request that conflicts with `lock` and arrived before number
    /// `before`.
    pub(super) fn bar(&self, owner: Owner, lock: &Lock, before: u64) -> Option<u64> {
        let query = ConflictQuery { before, ..ConflictQuery::any(owner, lock) };
        self.places.any_against((lock.family, lock.kind), &query)
    }

    /// From now on the waiter watches `bar`; what it watched so far.
    pub(super) fn watch(&mut self, number: u64, bar: Blocker) -> Option<Blocker> {
        let waiter = self.waiters.get_mut(&number)?;
        let former = waiter.watches.replace(bar);
        if let Some(former) = former {
            self.watchers.remove(&(former, number));
        }
        self.watchers.insert((bar, number));
        former
    }

    /// The waiters that watch `bar`.
    pub(super) fn watching(&self, bar: Blocker) -> impl Iterator<Item = u64> + '_ {
        self.watchers.range((bar, 0)..=(bar, u64::MAX)).map(|(_, number)| *number)
    }

    /// The numbers of a holder's waiters.
    pub(super) fn of_holder(&self, holder: HolderId) -> Vec<u64> {
        let theirs = self.waiters.iter().filter(|(_, waiter)| waiter.owner.holder == holder);
        theirs.map(|(number, _)| *number).collect()
    }

    #[cfg(test)]
    pub(super) fn looks(&self) -> usize {
        self.places.looks.get()
    }
}
