//! The locks of one file.

use std::collections::VecDeque;
use std::task::Waker;

use dray_core::{Lock, LockKind, LockRange};

use super::Owner;

/// A lock that somebody has.
#[derive(Clone, Copy)]
pub(super) struct Held {
    pub(super) owner: Owner,
    pub(super) lock: Lock,
}

impl Held {
    pub(super) fn bars(&self, owner: Owner, lock: &Lock) -> bool {
        self.owner != owner && self.lock.conflicts(lock)
    }
}

/// A request that waits.
pub(super) struct Waiter {
    pub(super) number: u64,
    pub(super) owner: Owner,
    pub(super) lock: Lock,
    pub(super) waker: Option<Waker>,
}

#[derive(Default)]
pub(super) struct FileLocks {
    pub(super) held: Vec<Held>,
    pub(super) waiters: VecDeque<Waiter>,
}

impl FileLocks {
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty() && self.waiters.is_empty()
    }

    /// The first lock that another owner has in the way of this one.
    pub(super) fn barrier(&self, owner: Owner, lock: &Lock) -> Option<&Held> {
        self.held.iter().find(|held| held.bars(owner, lock))
    }

    /// Of the locks in the way the one that begins first, which is what F_GETLK tells.
    pub(super) fn first_barrier(&self, owner: Owner, lock: &Lock) -> Option<&Held> {
        let in_the_way = self.held.iter().filter(|held| held.bars(owner, lock));
        in_the_way.min_by_key(|held| held.lock.range.start)
    }

    /// Gives `owner` the lock, in place of what it had in this range, and joins it with
    /// what it has beside it. With `Unlock` it gives the range back.
    pub(super) fn set(&mut self, owner: Owner, lock: Lock) {
        let mut taken = Vec::new();
        // The others stay where they are, however many there are.
        self.held.retain(|held| {
            let ours = held.owner == owner && held.lock.family == lock.family;
            let concerned = ours && touches(held.lock.range, lock.range);
            taken.extend(concerned.then_some(*held));
            !concerned
        });
        let mut wanted = lock;
        for held in taken {
            if held.lock.kind == lock.kind {
                wanted.range = LockRange {
                    start: held.lock.range.start.min(wanted.range.start),
                    end: held.lock.range.end.max(wanted.range.end),
                };
            } else {
                cut(&mut self.held, held, lock.range);
            }
        }
        if lock.kind != LockKind::Unlock {
            self.held.push(Held { owner, lock: wanted });
        }
    }

    /// Takes out the waiter with this number.
    pub(super) fn withdraw(&mut self, number: u64) -> Option<Waiter> {
        let at = self.waiters.iter().position(|waiter| waiter.number == number)?;
        self.waiters.remove(at)
    }

    /// The first waiter that nothing bars any more: no lock held, and no earlier waiter that
    /// wants some of the same. For the latter an owner that `has_locks` does not wait: they may
    /// be what that one waits for.
    pub(super) fn next_grantable(&self, has_locks: impl Fn(Owner) -> bool) -> Option<u64> {
        let free = |(at, waiter): &(usize, &Waiter)| {
            let passes = || {
                has_locks(waiter.owner)
                    || !self.waiters.iter().take(*at).any(|earlier| {
                        earlier.owner != waiter.owner && earlier.lock.conflicts(&waiter.lock)
                    })
            };
            self.barrier(waiter.owner, &waiter.lock).is_none() && passes()
        };
        self.waiters.iter().enumerate().find(free).map(|(_, waiter)| waiter.number)
    }
}

/// Whether they overlap or lie side by side.
fn touches(one: LockRange, two: LockRange) -> bool {
    one.start <= two.end.saturating_add(1) && two.start <= one.end.saturating_add(1)
}

/// Keeps what of `held` lies outside of `range`.
fn cut(kept: &mut Vec<Held>, held: Held, range: LockRange) {
    let old = held.lock.range;
    if !old.overlaps(range) {
        kept.push(held);
        return;
    }
    let mut keep = |start, end| {
        let lock = Lock { range: LockRange { start, end }, ..held.lock };
        kept.push(Held { lock, ..held });
    };
    if old.start < range.start {
        keep(old.start, range.start - 1);
    }
    if old.end > range.end {
        keep(range.end + 1, old.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_core::{LockFamily, LockOwner, NodeId, Pid};

    const OWNER: Owner = Owner { node: NodeId(1), owner: LockOwner(1) };

    fn lock(kind: LockKind, start: u64, end: u64) -> Lock {
        Lock {
            family: LockFamily::Posix,
            kind,
            range: LockRange { start, end },
            owner: OWNER.owner,
            pid: Pid(1),
        }
    }

    fn ranges(locks: &FileLocks) -> Vec<(LockKind, u64, u64)> {
        let mut ranges: Vec<_> = locks
            .held
            .iter()
            .map(|held| (held.lock.kind, held.lock.range.start, held.lock.range.end))
            .collect();
        ranges.sort_by_key(|(_, start, _)| *start);
        ranges
    }

    #[test]
    fn ranges_are_split_joined_and_changed() {
        use LockKind::{Exclusive, Shared, Unlock};
        let mut locks = FileLocks::default();
        locks.set(OWNER, lock(Exclusive, 0, 99));
        locks.set(OWNER, lock(Unlock, 40, 59));
        assert_eq!(ranges(&locks), [(Exclusive, 0, 39), (Exclusive, 60, 99)]);
        locks.set(OWNER, lock(Shared, 30, 69));
        assert_eq!(ranges(&locks), [(Exclusive, 0, 29), (Shared, 30, 69), (Exclusive, 70, 99)]);
        locks.set(OWNER, lock(Exclusive, 30, 69));
        assert_eq!(ranges(&locks), [(Exclusive, 0, 99)]);
        locks.set(OWNER, lock(Exclusive, 100, u64::MAX));
        assert_eq!(ranges(&locks), [(Exclusive, 0, u64::MAX)]);
        locks.set(OWNER, lock(Unlock, 0, u64::MAX));
        assert!(locks.is_empty());
    }

    /// Against the plainest model: an array of what each byte is locked with.
    #[test]
    fn any_sequence_leaves_what_the_model_has() {
        use LockKind::{Exclusive, Shared, Unlock};
        let mut locks = FileLocks::default();
        let mut model = [Unlock; 24];
        let mut random = 12345u64;
        for _ in 0..5000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let pick = |shift: u32, below: u64| (random >> shift) % below;
            let (one, two) = (pick(20, 24), pick(30, 24));
            let kind = [Shared, Exclusive, Unlock][pick(40, 3) as usize];
            let (start, end) = (one.min(two), one.max(two));
            locks.set(OWNER, lock(kind, start, end));
            model[start as usize..=end as usize].fill(kind);
            let mut bytes = [Unlock; 24];
            for (kind, start, end) in ranges(&locks) {
                bytes[start as usize..=end as usize].fill(kind);
            }
            assert_eq!(bytes, model);
            let runs = model.chunk_by(|one, two| one == two).filter(|run| run[0] != Unlock);
            assert_eq!(locks.held.len(), runs.count(), "neighbours of one kind are one lock");
        }
    }
}
