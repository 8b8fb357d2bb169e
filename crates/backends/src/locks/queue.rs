//! Those who wait for locks of one file.

use std::collections::VecDeque;
use std::task::Waker;

use dray_core::{Lock, Origin};

use super::Owner;

/// A request that waits.
pub(super) struct Waiter {
    pub(super) number: u64,
    pub(super) owner: Owner,
    pub(super) lock: Lock,
    /// Where its client comes from.
    pub(super) origin: Origin,
    pub(super) waker: Option<Waker>,
}

/// Requests in the order of their arrival.
#[derive(Default)]
pub(super) struct Queue {
    pub(super) waiters: VecDeque<Waiter>,
}

impl Queue {
    fn place(&self, number: u64) -> Option<usize> {
        self.waiters.binary_search_by_key(&number, |waiter| waiter.number).ok()
    }

    /// The waiter with this number.
    pub(super) fn waiter_mut(&mut self, number: u64) -> Option<&mut Waiter> {
        let at = self.place(number)?;
        self.waiters.get_mut(at)
    }

    /// Takes out the waiter with this number.
    pub(super) fn withdraw(&mut self, number: u64) -> Option<Waiter> {
        let at = self.place(number)?;
        self.waiters.remove(at)
    }

    /// Whether somebody else waits for what does not go together with `lock`.
    pub(super) fn conflicts(&self, owner: Owner, lock: &Lock) -> bool {
        self.waiters.iter().any(|waiter| waiter.stands_before(owner, lock))
    }

    /// The first waiter that nothing bars any more: no lock held, which `holder` says whose it is,
    /// and no earlier waiter that wants some of the same. For the latter an owner that `has_locks`
    /// does not wait: they may be what that one waits for.
    ///
    /// Of thousands that wait most want the same: who bars one of them bars the next.
    pub(super) fn next_grantable(
        &self,
        holder: impl Fn(&Waiter) -> Option<Owner>,
        has_locks: impl Fn(Owner) -> bool,
    ) -> Option<u64> {
        let mut barred: Option<(&Waiter, Owner)> = None;
        for (at, waiter) in self.waiters.iter().enumerate() {
            if barred.is_some_and(|(other, by)| by != waiter.owner && other.wants_as(waiter)) {
                continue;
            }
            if let Some(by) = holder(waiter) {
                barred = Some((waiter, by));
                continue;
            }
            let mut earlier = self.waiters.iter().take(at);
            let stands_behind = |one: &Waiter| one.stands_before(waiter.owner, &waiter.lock);
            if has_locks(waiter.owner) || !earlier.any(stands_behind) {
                return Some(waiter.number);
            }
        }
        None
    }
}

impl Waiter {
    fn stands_before(&self, owner: Owner, lock: &Lock) -> bool {
        self.owner != owner && self.lock.conflicts(lock)
    }

    /// Whether both want the same, each for its owner.
    fn wants_as(&self, other: &Waiter) -> bool {
        let wish = |lock: &Lock| (lock.family, lock.kind, lock.range);
        wish(&self.lock) == wish(&other.lock)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    use dray_core::{LockFamily, LockKind, LockOwner, LockRange, NodeId, Pid};

    fn owner(node: u64) -> Owner {
        Owner { node: NodeId(node), owner: LockOwner(1) }
    }

    /// Of a thousand clients that took one lock in turn each had all the others looked up among the
    /// locks that are held: each of their operations cost as much as a thousand.
    #[test]
    fn who_holds_what_many_want_is_looked_up_once() {
        let range = LockRange { start: 0, end: 9 };
        let (family, kind) = (LockFamily::Posix, LockKind::Exclusive);
        let lock = Lock { family, kind, range, owner: LockOwner(1), pid: Pid(1) };
        let origin = Origin::default();
        let waiter = |node| Waiter { number: node, owner: owner(node), lock, origin, waker: None };
        let (looks, held_by) = (Cell::new(0), Cell::new(owner(0)));
        let mut queue = Queue { waiters: (1..=1000).map(waiter).collect() };
        let holder = |waiter: &Waiter| {
            looks.set(looks.get() + 1);
            Some(held_by.get()).filter(|by| *by != waiter.owner)
        };
        let next = |queue: &Queue| queue.next_grantable(holder, |_| false);
        assert_eq!((next(&queue), looks.take()), (None, 1));
        // Whoever has it himself is looked at by himself.
        held_by.set(owner(500));
        assert_eq!((next(&queue), looks.take()), (None, 2));
        queue.withdraw(1);
        held_by.set(owner(2));
        assert_eq!((next(&queue), looks.take()), (Some(2), 1));
        assert!(queue.waiter_mut(1).is_none() && queue.waiter_mut(2).is_some());
    }
}
