//! What all workers of a mount share.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{Attr, FileId, IdMap, LockOwner, Timestamp};

use crate::front::removed::Removed;
use crate::front::undoing::FailedWrites;
use crate::mount::session::Session;
use crate::options::Options;
use crate::state::State;
use crate::state::capabilities::Capabilities;
use crate::state::changes::Changes;
use crate::state::handles::Handles;
use crate::state::nodes::Nodes;
use crate::worker::flight::Flights;
use crate::worker::identity::Identities;
use crate::worker::jobs::Jobs;
use crate::worker::outdated::Outdated;

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

/// Which version of a file the kernel's page cache holds, under close-to-open.
///
/// The kernel drops the pages of a former version when whoever opened the file has got the
/// answer that says so. Others who open it before that must not be told to keep them: it is
/// said to them, too, until a request through one of these open files shows that it is done.
#[derive(Default)]
pub(crate) struct Versions {
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    files: IdMap<u64, Version>,
    /// The last number given to a version.
    numbers: u64,
}

struct Version {
    mtime: Timestamp,
    ctime: Timestamp,
    size: u64,
    number: u64,
    /// The kernel has no pages of a version before this one.
    dropped: bool,
}

/// Names the version for which the kernel is told to drop the pages of others; never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dropping(pub(crate) u64);

/// Versions remembered; beyond it all are forgotten, which costs cached pages only.
const VERSIONS_MAX: usize = 1 << 20;

impl Versions {
    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what `node` is like at an open. None if the kernel has no other pages of it; else
    /// it is to drop what it has, and [`Versions::dropped`] to be told.
    pub(crate) fn at_open(&self, node: u64, attr: &Attr) -> Option<Dropping> {
        let mut seen = self.lock();
        if let Some(known) = seen.files.get(&node)
            && (known.mtime, known.ctime, known.size) == (attr.mtime, attr.ctime, attr.size)
        {
            return (!known.dropped).then_some(Dropping(known.number));
        }
        if seen.files.len() >= VERSIONS_MAX {
            seen.files.clear();
        }
        seen.numbers += 1;
        let Attr { mtime, ctime, size, .. } = *attr;
        let version = Version { mtime, ctime, size, number: seen.numbers, dropped: false };
        seen.files.insert(node, version);
        Some(Dropping(seen.numbers))
    }

    /// A request has come through a file whose opening was answered so: the kernel has done it.
    pub(crate) fn dropped(&self, node: u64, Dropping(number): Dropping) {
        if let Some(version) = self.lock().files.get_mut(&node)
            && version.number == number
        {
            version.dropped = true;
        }
    }

    /// The kernel has forgotten `node`.
    pub(crate) fn forget(&self, node: u64) {
        self.lock().files.remove(&node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two opened a file that had changed. The second was told to keep pages that the first had
    /// been told to drop, and had not dropped so far.
    #[test]
    fn pages_are_kept_once_those_of_former_versions_have_gone() {
        let (versions, attr) = (Versions::default(), Attr::default());
        let first = versions.at_open(7, &attr).unwrap();
        assert_eq!(versions.at_open(7, &attr), Some(first), "nothing shows that it is done");
        versions.dropped(7, first);
        assert_eq!(versions.at_open(7, &attr), None);
        let changed = Attr { size: 1, ..attr };
        let second = versions.at_open(7, &changed).unwrap();
        versions.dropped(7, first);
        assert_eq!(versions.at_open(7, &changed), Some(second));
        versions.dropped(8, second);
        versions.dropped(7, second);
        assert_eq!(versions.at_open(7, &changed), None);
        versions.forget(7);
        assert_ne!(versions.at_open(7, &changed), Some(second));
    }

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
