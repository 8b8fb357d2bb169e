//! The owners whose locks end with a close: processes with fcntl locks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::{FileId, LockOwner};

use crate::state::nodes::Nodes;

/// Which processes took fcntl locks on which files: only their closes must be reported to
/// the server.
#[derive(Default)]
pub(crate) struct LockOwners {
    /// Owners are missing that held locks: there were too many to remember, here or for a
    /// predecessor.
    missing: AtomicBool,
    owners: Mutex<Owners>,
}

#[derive(Default)]
struct Owners {
    /// When each asked for a lock last, or got one.
    asked: BTreeMap<(u64, LockOwner), LockRequestNumber>,
    last: LockRequestNumber,
    /// The owners that wait for a lock at this moment.
    asking: BTreeMap<(u64, LockOwner), Closes>,
}

/// Of a file by an owner who waits for locks on it.
#[derive(Default)]
struct Closes {
    /// Locks that he waits for.
    locks: usize,
    count: u64,
}

/// As long as an owner waits for a lock.
pub(crate) struct LockWaiter<'a> {
    owners: &'a LockOwners,
    who: (u64, LockOwner),
    /// Closes before it was asked for; none if nobody knows how many there were.
    closes: Option<u64>,
}

impl LockWaiter<'_> {
    /// Whether the owner has closed the file meanwhile, by one of his descriptors of it.
    pub(crate) fn may_be_closed(&self) -> bool {
        let owners = self.owners.lock();
        let now = owners.asking.get(&self.who).map(|closes| closes.count);
        self.closes.is_none() || self.closes != now
    }
}

impl Drop for LockWaiter<'_> {
    fn drop(&mut self) {
        let mut owners = self.owners.lock();
        let Some(closes) = owners.asking.get_mut(&self.who) else { return };
        closes.locks -= 1;
        if closes.locks == 0 {
            owners.asking.remove(&self.who);
        }
    }
}

/// When an owner asked for a lock, in the order of all that is noted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LockRequestNumber(u64);

/// Owners remembered. Beyond it every close of a file that ever had locks is reported.
const OWNERS_MAX: usize = 1 << 16;

impl LockOwners {
    /// The owners that a predecessor served; `left`: whose locks it had, if that is known. An owner
    /// that was getting a lock when the predecessor died asks again.
    pub(crate) fn of_predecessor(
        nodes: &Nodes,
        left: Option<Vec<(FileId, LockOwner)>>,
    ) -> LockOwners {
        let missing = AtomicBool::new(left.is_none());
        let left = left.unwrap_or_default().into_iter();
        let asked = left
            .filter_map(|(file, owner)| {
                Some(((nodes.find(file)?, owner), LockRequestNumber::default()))
            })
            .collect();
        LockOwners { missing, owners: Mutex::new(Owners { asked, ..Owners::default() }) }
    }

    fn lock(&self) -> MutexGuard<'_, Owners> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `owner` asks for a lock on `node`, or has just been given one. A close that was under way
    /// meanwhile may have come before it at the server, and be answered after it.
    pub(crate) fn add(&self, nodes: &Nodes, node: u64, owner: LockOwner) {
        nodes.mark_locked(node);
        let mut owners = self.lock();
        if owners.asked.len() >= OWNERS_MAX {
            self.missing.store(true, Ordering::SeqCst);
            owners.asked.clear();
        }
        owners.last.0 += 1;
        let now = owners.last;
        owners.asked.insert((node, owner), now);
    }

    /// `owner` waits for a lock on `node` until the answer is dropped. `anew`: perhaps since before this
    /// daemon began.
    pub(crate) fn asks(&self, node: u64, owner: LockOwner, anew: bool) -> LockWaiter<'_> {
        let who = (node, owner);
        let mut owners = self.lock();
        let closes = owners.asking.entry(who).or_default();
        closes.locks += 1;
        LockWaiter { owners: self, who, closes: (!anew).then_some(closes.count) }
    }

    /// `owner` closes one of its descriptors of `node`. Whether it may hold a lock on that; with that
    /// which it asked for last, as far as is known.
    pub(crate) fn closes(
        &self,
        nodes: &Nodes,
        node: u64,
        owner: LockOwner,
    ) -> Option<LockRequestNumber> {
        let mut owners = self.lock();
        if let Some(closes) = owners.asking.get_mut(&(node, owner)) {
            closes.count += 1;
        }
        let known = owners.asked.get(&(node, owner)).copied();
        drop(owners);
        let missing = || self.missing.load(Ordering::SeqCst) && nodes.was_locked(node);
        known.or_else(|| missing().then(LockRequestNumber::default))
    }

    /// `owner` gave up its locks on `node` after it had `asked`; not what it asked for since.
    pub(crate) fn gave_up(&self, node: u64, owner: LockOwner, asked: LockRequestNumber) {
        let mut owners = self.lock();
        if owners.asked.get(&(node, owner)) == Some(&asked) {
            owners.asked.remove(&(node, owner));
        }
    }

    /// The kernel has forgotten `node`: nobody has it open. Owners that no flush is sent
    /// for (open-file-description locks) go with it.
    pub(crate) fn forget(&self, node: u64) {
        let mut owners = self.lock();
        let of_node = (node, LockOwner::MIN)..=(node, LockOwner::MAX);
        let gone: Vec<_> = owners.asked.range(of_node).map(|(owner, _)| *owner).collect();
        gone.iter().for_each(|owner| _ = owners.asked.remove(owner));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::State;

    #[test]
    fn owners_of_locks_are_bounded_and_none_is_missed() {
        let root = FileId { ino: 2, generation: 0 };
        let nodes = Nodes::new(State::create().unwrap(), root);
        let file = FileId { ino: 3, generation: 0 };
        let node = nodes.remember(file, None).unwrap().node;
        let owners = LockOwners::default();
        assert_eq!(owners.closes(&nodes, node, LockOwner::own(7)), None);
        owners.add(&nodes, node, LockOwner::own(7));
        assert!(owners.closes(&nodes, node, LockOwner::own(7)).is_some());
        assert_eq!(owners.closes(&nodes, node, LockOwner::own(8)), None);
        for owner in 0..OWNERS_MAX as u64 + 10 {
            owners.add(&nodes, node, LockOwner::own(1000 + owner));
            assert!(owners.lock().asked.len() <= OWNERS_MAX);
        }
        assert!(
            owners.closes(&nodes, node, LockOwner::own(7)).is_some(),
            "forgotten, so it may hold one"
        );
        owners.forget(node);
        assert!(owners.lock().asked.is_empty());
    }

    /// The lock was asked for before the close looked, and granted behind it.
    #[test]
    fn a_lock_that_is_granted_while_a_close_is_answered_is_not_forgotten() {
        let nodes = Nodes::new(State::create().unwrap(), FileId { ino: 2, generation: 0 });
        let file = FileId { ino: 3, generation: 0 };
        let (node, owner) = (nodes.remember(file, None).unwrap().node, LockOwner::own(7));
        for answered_first in ["lock", "close"] {
            let owners = LockOwners::default();
            owners.add(&nodes, node, owner);
            let asked = owners.closes(&nodes, node, owner).unwrap();
            if answered_first == "lock" {
                owners.add(&nodes, node, owner);
                owners.gave_up(node, owner, asked);
            } else {
                owners.gave_up(node, owner, asked);
                owners.add(&nodes, node, owner);
            }
            let asked = owners.closes(&nodes, node, owner).expect(answered_first);
            owners.gave_up(node, owner, asked);
            assert_eq!(owners.closes(&nodes, node, owner), None);
        }
    }

    #[test]
    fn who_waits_for_a_lock_hears_of_his_closes_meanwhile() {
        let (owners, owner) = (LockOwners::default(), LockOwner::own(7));
        let nodes = Nodes::new(State::create().unwrap(), FileId { ino: 2, generation: 0 });
        let close = |node, owner| assert_eq!(owners.closes(&nodes, node, owner), None);
        close(3, owner);
        let first = owners.asks(3, owner, false);
        close(3, LockOwner::own(8));
        close(4, owner);
        assert!(!first.may_be_closed());
        close(3, owner);
        let second = owners.asks(3, owner, false);
        assert!(first.may_be_closed() && !second.may_be_closed());
        assert!(owners.asks(3, owner, true).may_be_closed(), "nobody knows");
        drop((first, second));
        assert!(owners.lock().asking.is_empty());
    }

    // proves: P68
    #[test]
    fn a_successor_knows_whose_closes_the_server_must_hear_of() {
        let nodes = Nodes::new(State::create().unwrap(), FileId { ino: 2, generation: 0 });
        let file = FileId { ino: 3, generation: 0 };
        let node = nodes.remember(file, None).unwrap().node;
        nodes.mark_locked(node);
        let gone = (FileId { ino: 4, generation: 0 }, LockOwner::own(7));
        let left = vec![(file, LockOwner::own(7)), gone];
        let owners = LockOwners::of_predecessor(&nodes, Some(left));
        assert!(owners.closes(&nodes, node, LockOwner::own(7)).is_some());
        assert_eq!(owners.closes(&nodes, node, LockOwner::own(8)), None);
        let owners = LockOwners::of_predecessor(&nodes, None);
        assert!(owners.closes(&nodes, node, LockOwner::own(8)).is_some(), "nobody knows");
    }
}
