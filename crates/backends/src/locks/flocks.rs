//! Which owners took flock locks through which open file. A lock ends with the last open file that
//! it was taken through.
//!
//! The kernel of a client has one open file for each such owner. A server between can have two for
//! a while. There is one that its process before had opened, and one through which the client has
//! claimed the lock again.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::{FileId, LockFamily};

use super::{LockTable, Owner};

/// The owners of flock locks of one open file.
#[derive(Default)]
pub(crate) struct Flocks(Mutex<Vec<Owner>>);

impl Flocks {
    /// Before `owner` asks for a lock through this open file: another one's close must not end it.
    pub(crate) fn add(&self, table: &LockTable, file: FileId, owner: Owner) {
        let mut owners = self.lock();
        if !owners.contains(&owner) {
            owners.push(owner);
            table.flock_users.add(file, owner);
        }
    }

    /// The file is closed: gives back what no other open file has.
    pub(crate) fn release(&self, table: &LockTable, file: FileId) {
        for owner in std::mem::take(&mut *self.lock()) {
            table.flock_users.remove(file, owner, || table.release(file, LockFamily::Flock, owner));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Owner>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many open files each owner of flock locks has them through. Bounded as open files are.
#[derive(Default)]
pub(super) struct FlockUsers(Mutex<BTreeMap<(FileId, Owner), u32>>);

impl FlockUsers {
    fn add(&self, file: FileId, owner: Owner) {
        *self.lock().entry((file, owner)).or_default() += 1;
    }

    /// One less; `last` is done before the next one can be added.
    fn remove(&self, file: FileId, owner: Owner, last: impl FnOnce()) {
        let mut users = self.lock();
        let left = users.get_mut(&(file, owner)).map_or(0, |count| {
            *count -= 1;
            *count
        });
        if left == 0 {
            users.remove(&(file, owner));
            last();
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(FileId, Owner), u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_core::{HolderId, Lock, LockKind, LockOwner, LockRange, Pid};
    use dray_rt::{DriverKind, Executor};

    #[test]
    fn a_lock_ends_with_the_last_open_file_that_has_it() {
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let (table, file) = (LockTable::new(8), FileId { ino: 1, generation: 1 });
            let cx = dray_core::Context { holder: HolderId(3), ..dray_core::Context::system() };
            let (family, kind) = (LockFamily::Flock, LockKind::Exclusive);
            let (owner, range) = (LockOwner::own(7), LockRange::ALL);
            let lock = Lock { family, kind, range, owner, pid: Pid(1) };
            let (before, after) = (Flocks::default(), Flocks::default());
            for flocks in [&before, &after, &after] {
                flocks.add(&table, file, Owner::of(&cx, owner));
                table.lock(&cx, file, lock, false).await.unwrap();
            }
            before.release(&table, file);
            assert_eq!(table.len(), 1);
            after.release(&table, file);
            after.release(&table, file);
            assert_eq!(table.len(), 0);
        });
    }
}
