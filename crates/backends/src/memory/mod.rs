//! The memory backend: a file system in memory, which is also the disk of the simulator.
//!
//! It behaves as Linux's own file systems do. Owner, group and other have permissions. Directories can
//! be sticky or set-group-id. Writes clear set-id bits. Open files outlive their names. Two things
//! differ. POSIX ACLs are stored as plain attributes and not enforced. What Linux checks above file
//! systems, such as protected hard links, is left to the caller.
//!
//! Everything is ordered (no hash tables) and time comes from `dray_rt`, so a run in the simulator
//! repeats exactly. Inode numbers are never used again: the id of a deleted file answers `ESTALE` for
//! ever.

mod attrs;
mod content;
mod data;
mod directory;
mod disk;
mod file;
mod fs;
mod inode;
mod journal;
mod kind;
mod names;
mod piecemeal;
mod rename;
mod store;
mod xattr;

#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{Errno, Error, FileId, FsInfo, FsUuid, Result, Ttl, Validity};

use crate::locks::LockTable;

pub use disk::MemoryDisk;
pub use file::MemoryFile;
pub use kind::MemoryKind;
use store::Store;

/// Limits and identity of a [`MemoryFs`].
#[derive(Clone, Debug)]
pub struct MemoryOptions {
    /// Identity; chosen at random by default.
    pub uuid: FsUuid,
    /// Data that fit in, bytes; beyond it `ENOSPC`. Rounded down to 4 KiB.
    pub capacity_bytes: u64,
    /// Files of any kind that fit in; beyond it `ENOSPC`.
    pub inodes_max: u64,
    /// Permission bits of the root directory, which belongs to root.
    pub root_mode: u32,
    /// Changes answer `EROFS`.
    pub read_only: bool,
    /// Locks held and waited for; beyond it `ENOLCK`.
    pub locks_max: usize,
    /// Reads and writes are made in pieces, with other calls between them, as on file systems that
    /// copy page by page. Between its pieces a read waits this long, and a write only until others
    /// have run. The server has to keep calls on the same bytes apart, and a test finds
    /// out whether it does.
    pub read_pause: Option<Duration>,
}

impl Default for MemoryOptions {
    fn default() -> MemoryOptions {
        let uuid = u128::from(dray_rt::random_u64()) << 64 | u128::from(dray_rt::random_u64());
        MemoryOptions {
            uuid: FsUuid(uuid),
            capacity_bytes: 1 << 30,
            inodes_max: 1 << 20,
            root_mode: 0o755,
            read_only: false,
            locks_max: 65_536,
            read_pause: None,
        }
    }
}

/// The store and what never changes about it.
struct Shared {
    info: FsInfo,
    read_pause: Option<Duration>,
    store: Mutex<Store>,
    /// Locks are the server process's: each epoch of the store has its own table.
    locks: Mutex<Arc<LockTable>>,
}

/// A file system in memory. Cheap to clone; clones are the same file system.
#[derive(Clone)]
pub struct MemoryFs {
    shared: Arc<Shared>,
    /// The epoch of the store that this object belongs to: see [`MemoryDisk`].
    epoch: u64,
    locks: Arc<LockTable>,
}

impl MemoryFs {
    /// An empty one, without a simulated disk: syncing costs and means nothing.
    pub fn new(options: MemoryOptions) -> MemoryFs {
        Arc::new(Shared::new(Store::new(options))).mount()
    }

    /// The advisory locks. The server releases those of a client whose session ended.
    pub fn locks(&self) -> &LockTable {
        &self.locks
    }

    /// Has answers about `id` say this from now on. Errors: `ESTALE`, the file is gone.
    pub fn set_validity(&self, id: FileId, validity: Validity) -> Result<()> {
        self.with(|store| {
            let ino = store.find(id)?;
            store.unlogged(ino)?.meta.validity = validity;
            Ok(())
        })
    }

    /// Has lookups that find nothing say this from now on. Errors: the machine of the file system has
    /// died.
    pub fn set_absence(&self, ttl: Option<Ttl>) -> Result<()> {
        self.with(|store| {
            store.absence = ttl;
            Ok(())
        })
    }

    fn with<T>(&self, op: impl FnOnce(&mut Store) -> Result<T>) -> Result<T> {
        self.shared.with(self.epoch, op)
    }

    /// As `with`, for operations that a read-only file system refuses.
    fn with_change<T>(&self, op: impl FnOnce(&mut Store) -> Result<T>) -> Result<T> {
        self.shared.with_change(self.epoch, op)
    }
}

impl Shared {
    fn new(store: Store) -> Shared {
        let info = FsInfo {
            uuid: store.options().uuid,
            root: store.root_id(),
            kind: "memory".to_owned(),
            read_only: store.options().read_only,
        };
        let locks = Mutex::new(Arc::new(LockTable::new(store.options().locks_max)));
        let read_pause = store.options().read_pause;
        Shared { info, read_pause, store: Mutex::new(store), locks }
    }

    /// The file system as it is in this epoch of the store.
    fn mount(self: Arc<Shared>) -> MemoryFs {
        let epoch = self.lock().epoch();
        let locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        MemoryFs { shared: self, epoch, locks }
    }

    /// Forgets all locks, as the end of the server process does.
    fn forget_locks(&self, locks_max: usize) {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        *locks = Arc::new(LockTable::new(locks_max));
    }

    fn lock(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one operation, alone, and records what it changed.
    fn with<T>(&self, epoch: u64, op: impl FnOnce(&mut Store) -> Result<T>) -> Result<T> {
        let mut store = self.lock();
        if store.epoch() != epoch {
            return Err(Error::new(Errno::EIO).because("the machine of this file system has died"));
        }
        let result = op(&mut store);
        store.finish();
        result
    }

    fn with_change<T>(&self, epoch: u64, op: impl FnOnce(&mut Store) -> Result<T>) -> Result<T> {
        if self.info.read_only {
            return Err(Errno::EROFS.into());
        }
        self.with(epoch, op)
    }
}
