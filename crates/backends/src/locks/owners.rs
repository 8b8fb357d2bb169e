//! An index of owners over all files of an export: where each owner holds locks, and where it waits.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::{FileId, HolderId, LockOwner};

use super::{Owner, SHARDS};

/// A wait: its file, and its number there.
pub(super) type WaitId = (FileId, u64);

const FILE_FIRST: FileId = FileId { ino: 0, generation: 0 };
const FILE_LAST: FileId = FileId { ino: u64::MAX, generation: u64::MAX };

/// The owners of an export. Its mutexes are the innermost of the lock table: nothing else is taken
/// under them. Its sets are bounded as the locks are.
#[derive(Default)]
pub(super) struct OwnerIndex {
    /// By holder.
    shards: [Mutex<Shard>; SHARDS],
}

#[derive(Default)]
struct Shard {
    held: BTreeSet<(Owner, FileId)>,
    waits: BTreeSet<(Owner, FileId, u64)>,
    /// The waits that only an earlier wait blocks, as far as is known.
    behind: BTreeSet<(Owner, FileId, u64)>,
}

fn files_of(owner: Owner) -> RangeInclusive<(Owner, FileId)> {
    (owner, FILE_FIRST)..=(owner, FILE_LAST)
}

fn waits_of(first: Owner, last: Owner) -> RangeInclusive<(Owner, FileId, u64)> {
    (first, FILE_FIRST, 0)..=(last, FILE_LAST, u64::MAX)
}

impl Shard {
    fn has_any(&self, owner: Owner) -> bool {
        self.held.range(files_of(owner)).next().is_some()
    }
}

impl OwnerIndex {
    fn shard(&self, holder: HolderId) -> MutexGuard<'_, Shard> {
        let shard = &self.shards[holder.0 as usize % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether `owner` has any lock on any file.
    pub(super) fn has_any(&self, owner: Owner) -> bool {
        self.shard(owner.holder).has_any(owner)
    }

    /// `owner` has its first lock on `file`. If it is the owner's first lock anywhere, its requests
    /// no longer wait behind earlier ones. The answer has the waits that must be examined for that
    /// reason.
    pub(super) fn holds(&self, owner: Owner, file: FileId) -> Vec<WaitId> {
        let mut shard = self.shard(owner.holder);
        let first = !shard.has_any(owner);
        shard.held.insert((owner, file));
        let behind = shard.behind.range(waits_of(owner, owner)).filter(|_| first);
        behind.map(|(_, file, number)| (*file, *number)).collect()
    }

    /// `owner` has no lock on `file` any more.
    pub(super) fn holds_none(&self, owner: Owner, file: FileId) {
        self.shard(owner.holder).held.remove(&(owner, file));
    }

    pub(super) fn waits(&self, owner: Owner, (file, number): WaitId) {
        self.shard(owner.holder).waits.insert((owner, file, number));
    }

    pub(super) fn waits_no_more(&self, owner: Owner, (file, number): WaitId) {
        let mut shard = self.shard(owner.holder);
        shard.waits.remove(&(owner, file, number));
        shard.behind.remove(&(owner, file, number));
    }

    /// A wait stands behind another one, and is heard of if its owner gets a lock anywhere. False:
    /// its owner has one.
    pub(super) fn stands_behind(&self, owner: Owner, (file, number): WaitId) -> bool {
        let mut shard = self.shard(owner.holder);
        let may = !shard.has_any(owner);
        if may {
            shard.behind.insert((owner, file, number));
        }
        may
    }

    /// A lock that is held bars the wait.
    pub(super) fn stands_behind_none(&self, owner: Owner, (file, number): WaitId) {
        self.shard(owner.holder).behind.remove(&(owner, file, number));
    }

    /// The files on which `owner` has locks: `max` of them.
    pub(super) fn held_by(&self, owner: Owner, max: usize) -> Vec<FileId> {
        let shard = self.shard(owner.holder);
        shard.held.range(files_of(owner)).take(max).map(|(_, file)| *file).collect()
    }

    /// Where `owner` waits: `max` of it.
    pub(super) fn waits_of(&self, owner: Owner, max: usize) -> Vec<WaitId> {
        let shard = self.shard(owner.holder);
        let waits = shard.waits.range(waits_of(owner, owner)).take(max);
        waits.map(|(_, file, number)| (*file, *number)).collect()
    }

    /// The files at which anybody of `holder` holds or waits, in order.
    pub(super) fn files_of(&self, holder: HolderId) -> BTreeSet<FileId> {
        let [first, last] = [LockOwner::MIN, LockOwner::MAX].map(|owner| Owner { holder, owner });
        let shard = self.shard(holder);
        let held = shard.held.range((first, FILE_FIRST)..=(last, FILE_LAST)).map(|held| held.1);
        held.chain(shard.waits.range(waits_of(first, last)).map(|wait| wait.1)).collect()
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        let empty = |shard: MutexGuard<'_, Shard>| {
            shard.held.is_empty() && shard.waits.is_empty() && shard.behind.is_empty()
        };
        self.shards.iter().all(|shard| empty(shard.lock().unwrap()))
    }
}
