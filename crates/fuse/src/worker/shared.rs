//! What all workers of a mount share.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{FileId, LockOwner};

use crate::front::removed::Removed;
use crate::front::undoing::FailedWrites;
use crate::mount::session::Session;
use crate::options::Options;
use crate::state::State;
use crate::state::capabilities::Capabilities;
use crate::state::changes::Changes;
use crate::state::handles::Handles;
use crate::state::nodes::Nodes;
use crate::state::sent_back::SentBack;
use crate::worker::flight::Flights;
use crate::worker::identity::Identities;
use crate::worker::jobs::Jobs;
use crate::worker::outdated::Outdated;
use crate::worker::versions::Versions;

pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) session: Session,
    pub(crate) device: Arc<OwnedFd>,
    pub(crate) nodes: Nodes,
    pub(crate) handles: Handles,
    pub(crate) identities: Identities,
    pub(crate) flights: Flights,
    pub(crate) jobs: Jobs,
    pub(crate) outdated: Arc<Outdated>,
    pub(crate) lock_owners: LockOwners,
    pub(crate) versions: Versions,
    pub(crate) capabilities: Capabilities,
    pub(crate) changes: Changes,
    /// What the kernel may undo.
    pub(crate) failed_writes: FailedWrites,
    pub(crate) removed: Removed,
    pub(crate) sent_back: SentBack,
    /// Somebody looks after callers.
    pub(crate) looks_after: AtomicBool,
}

impl Shared {
    pub(crate) fn new(
        options: Options,
        session: Session,
        device: Arc<OwnedFd>,
        state: &State,
        adopted: bool,
        root: FileId,
        workers: usize,
    ) -> Shared {
        let nodes = Nodes::new(state.clone(), root);
        if options.believes_names() {
            nodes.believed_for(options.entry_validity());
        }
        let lock_owners = match adopted {
            true => LockOwners::of_predecessor(&nodes, options.host.lock_owners()),
            false => LockOwners::default(),
        };
        Shared {
            identities: Identities::new(!options.kernel_checks_permissions()),
            options,
            session,
            device,
            nodes,
            handles: Handles::new(state.clone()),
            flights: Flights::new(workers),
            jobs: Jobs::default(),
            outdated: Arc::default(),
            lock_owners,
            versions: Versions::default(),
            capabilities: Capabilities::default(),
            changes: Changes::default(),
            failed_writes: FailedWrites::new(adopted),
            removed: Removed::default(),
            sent_back: SentBack::new(state.clone(), adopted),
            looks_after: AtomicBool::new(false),
        }
    }
}

/// Which processes took fcntl locks on which files: only their closes must be told to
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
    asked: BTreeMap<(u64, LockOwner), Asked>,
    last: Asked,
}

/// When an owner asked for a lock, in the order of all that is noted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked(u64);

/// Owners remembered. Beyond it every close of a file that ever had locks is told.
const OWNERS_MAX: usize = 1 << 16;

impl LockOwners {
    /// Those whom a predecessor served; `left`: whose locks it had, if that is known. Whoever
    /// was getting one when it died asks again.
    pub(crate) fn of_predecessor(
        nodes: &Nodes,
        left: Option<Vec<(FileId, LockOwner)>>,
    ) -> LockOwners {
        let missing = AtomicBool::new(left.is_none());
        let left = left.unwrap_or_default().into_iter();
        let asked = left
            .filter_map(|(file, owner)| Some(((nodes.find(file)?, owner), Asked::default())))
            .collect();
        LockOwners { missing, owners: Mutex::new(Owners { asked, last: Asked::default() }) }
    }

    fn lock(&self) -> MutexGuard<'_, Owners> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `owner` asks for a lock on `node`, or has just been given one: a close that was under way
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

    /// Whether `owner` may hold a lock on `node`; with that which it asked for last, as far as is
    /// known.
    pub(crate) fn may_hold(&self, nodes: &Nodes, node: u64, owner: LockOwner) -> Option<Asked> {
        let known = self.lock().asked.get(&(node, owner)).copied();
        let missing = || self.missing.load(Ordering::SeqCst) && nodes.was_locked(node);
        known.or_else(|| missing().then(Asked::default))
    }

    /// `owner` gave up its locks on `node` after it had `asked`; not what it asked for since.
    pub(crate) fn gave_up(&self, node: u64, owner: LockOwner, asked: Asked) {
        let mut owners = self.lock();
        if owners.asked.get(&(node, owner)) == Some(&asked) {
            owners.asked.remove(&(node, owner));
        }
    }

    /// The kernel has forgotten `node`: nobody has it open. Owners that no flush is sent
    /// for (open-file-description locks) go with it.
    pub(crate) fn forget(&self, node: u64) {
        let mut owners = self.lock();
        let of_node = (node, LockOwner(0))..=(node, LockOwner(u64::MAX));
        let gone: Vec<_> = owners.asked.range(of_node).map(|(owner, _)| *owner).collect();
        gone.iter().for_each(|owner| _ = owners.asked.remove(owner));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_of_locks_are_bounded_and_none_is_missed() {
        let root = FileId { ino: 2, generation: 0 };
        let nodes = Nodes::new(State::create().unwrap(), root);
        let file = FileId { ino: 3, generation: 0 };
        let node = nodes.remember(file, None).unwrap().node;
        let owners = LockOwners::default();
        assert_eq!(owners.may_hold(&nodes, node, LockOwner(7)), None);
        owners.add(&nodes, node, LockOwner(7));
        assert!(owners.may_hold(&nodes, node, LockOwner(7)).is_some());
        assert_eq!(owners.may_hold(&nodes, node, LockOwner(8)), None);
        for owner in 0..OWNERS_MAX as u64 + 10 {
            owners.add(&nodes, node, LockOwner(1000 + owner));
            assert!(owners.lock().asked.len() <= OWNERS_MAX);
        }
        assert!(
            owners.may_hold(&nodes, node, LockOwner(7)).is_some(),
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
        let (node, owner) = (nodes.remember(file, None).unwrap().node, LockOwner(7));
        for answered_first in ["lock", "close"] {
            let owners = LockOwners::default();
            owners.add(&nodes, node, owner);
            let asked = owners.may_hold(&nodes, node, owner).unwrap();
            if answered_first == "lock" {
                owners.add(&nodes, node, owner);
                owners.gave_up(node, owner, asked);
            } else {
                owners.gave_up(node, owner, asked);
                owners.add(&nodes, node, owner);
            }
            let asked = owners.may_hold(&nodes, node, owner).expect(answered_first);
            owners.gave_up(node, owner, asked);
            assert_eq!(owners.may_hold(&nodes, node, owner), None);
        }
    }

    #[test]
    fn a_successor_knows_whose_closes_the_server_must_hear_of() {
        let nodes = Nodes::new(State::create().unwrap(), FileId { ino: 2, generation: 0 });
        let file = FileId { ino: 3, generation: 0 };
        let node = nodes.remember(file, None).unwrap().node;
        nodes.mark_locked(node);
        let gone = (FileId { ino: 4, generation: 0 }, LockOwner(7));
        let left = vec![(file, LockOwner(7)), gone];
        let owners = LockOwners::of_predecessor(&nodes, Some(left));
        assert!(owners.may_hold(&nodes, node, LockOwner(7)).is_some());
        assert_eq!(owners.may_hold(&nodes, node, LockOwner(8)), None);
        let owners = LockOwners::of_predecessor(&nodes, None);
        assert!(owners.may_hold(&nodes, node, LockOwner(8)).is_some(), "nobody knows");
    }
}
