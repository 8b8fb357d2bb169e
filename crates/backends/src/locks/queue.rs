//! Those who wait for locks of one file.

use std::collections::VecDeque;
use std::task::Waker;

use dray_core::Lock;

use super::Owner;

/// A request that waits.
pub(super) struct Waiter {
    pub(super) number: u64,
    pub(super) owner: Owner,
    pub(super) lock: Lock,
    pub(super) waker: Option<Waker>,
}

/// Requests in the order of their arrival.
#[derive(Default)]
pub(super) struct Queue {
    pub(super) waiters: VecDeque<Waiter>,
}

impl Queue {
    /// Takes out the waiter with this number.
    pub(super) fn withdraw(&mut self, number: u64) -> Option<Waiter> {
        let at = self.waiters.iter().position(|waiter| waiter.number == number)?;
        self.waiters.remove(at)
    }

    /// Whether somebody else waits for what does not go together with `lock`.
    pub(super) fn conflicts(&self, owner: Owner, lock: &Lock) -> bool {
        self.waiters.iter().any(|waiter| waiter.stands_before(owner, lock))
    }

    /// The first waiter that nothing bars any more: no lock held, which `barred` says, and no
    /// earlier waiter that wants some of the same. For the latter an owner that `has_locks` does
    /// not wait: they may be what that one waits for.
    pub(super) fn next_grantable(
        &self,
        barred: impl Fn(&Waiter) -> bool,
        has_locks: impl Fn(Owner) -> bool,
    ) -> Option<u64> {
        let free = |(at, waiter): &(usize, &Waiter)| {
            let earlier = || self.waiters.iter().take(*at);
            let passes = || {
                has_locks(waiter.owner)
                    || !earlier().any(|one| one.stands_before(waiter.owner, &waiter.lock))
            };
            !barred(waiter) && passes()
        };
        self.waiters.iter().enumerate().find(free).map(|(_, waiter)| waiter.number)
    }
}

impl Waiter {
    fn stands_before(&self, owner: Owner, lock: &Lock) -> bool {
        self.owner != owner && self.lock.conflicts(lock)
    }
}
