//! The simulated disk: what remains of a memory file system after a power failure.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use super::store::Store;
use super::{MemoryFs, MemoryOptions, Shared};

/// A disk that can lose power, for the simulator.
///
/// - Operations change the volatile side. Each change of names or attributes is one record of a
///   journal, and records become durable in order, as on ext4. Syncing a file or a directory makes
///   all records up to its last one durable, and the file's data.
/// - [`MemoryDisk::crash`] keeps what is durable, then a random prefix of the journal, and of the
///   data not synced each 4 KiB chunk or not. A chunk written since the file was cut can survive
///   only if the cut did. So no data come back that a durable truncation removed. One thing is
///   weaker than ext4's ordered mode: a size may survive without the data behind it, which then
///   read as zeros.
/// - collapse and insert of ranges make the file durable first and themselves at once.
/// - [`MemoryDisk::kill`] ends a server process: nothing is lost. Files that were deleted
///   and open stay reachable by id, as if a supervisor had their descriptors, until
///   [`MemoryDisk::drop_orphans`]. What is deleted afterwards goes, if nobody has opened
///   it again.
///
/// Numbers and generations of surviving files stay; those of lost files are not used
/// again. File systems and open files from before a crash or kill answer `EIO`.
pub struct MemoryDisk {
    shared: Arc<Shared>,
    orphans: Mutex<BTreeSet<u64>>,
}

/// SplitMix64 (Steele, Lea, Flood 2014): a seed is a whole sequence of choices.
struct Choices(u64);

impl Choices {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

impl MemoryDisk {
    /// An empty disk; the root directory is durable.
    pub fn new(options: MemoryOptions) -> MemoryDisk {
        let mut store = Store::new(options);
        store.attach_journal();
        MemoryDisk { shared: Arc::new(Shared::new(store)), orphans: Mutex::default() }
    }

    /// The file system on it, as a server process started now sees it.
    pub fn mount(&self) -> MemoryFs {
        self.shared.clone().mount()
    }

    /// Makes everything durable, as sync(2) does.
    pub fn sync_all(&self) {
        self.shared.lock().sync_all();
    }

    /// The machine loses power; `seed` decides what of the unsynced changes survives.
    pub fn crash(&self, seed: u64) {
        let mut choices = Choices(seed);
        let mut store = self.shared.lock();
        let Some((journal, inodes)) = store.journal_mut() else {
            return;
        };
        let prefix = choices.next() % (journal.waiting() as u64 + 1);
        for _ in 0..prefix {
            journal.commit_next();
        }
        let left = journal.crash(inodes, || choices.next() & 1 == 1);
        store.begin_epoch(left);
        self.shared.forget_locks(store.options().locks_max);
        self.lock_orphans().clear();
    }

    /// A machine that uses the disk over a network is lost, with what was written there and not synced;
    /// `seed` decides what of that survives. Names and attributes are the disk's, and stay.
    pub fn lose_written(&self, seed: u64) {
        let mut choices = Choices(seed);
        let mut store = self.shared.lock();
        let Some((journal, inodes)) = store.journal_mut() else {
            return;
        };
        while journal.commit_next() {}
        let left = journal.crash(inodes, || choices.next() & 1 == 1);
        store.begin_epoch(left);
        self.shared.forget_locks(store.options().locks_max);
        self.lock_orphans().clear();
    }

    /// The server process is killed. Nothing is lost, synced or not, but the advisory
    /// locks, which only its memory held.
    pub fn kill(&self) {
        let mut store = self.shared.lock();
        let mut inodes = store.inodes().clone();
        let mut orphans = self.lock_orphans();
        for (&ino, inode) in &mut inodes {
            let held = inode.meta.nlink == 0;
            inode.opens = u32::from(held);
            if held {
                orphans.insert(ino);
            }
        }
        store.begin_epoch(inodes);
        self.shared.forget_locks(store.options().locks_max);
    }

    /// Keeps deleted files that are open, as a [`MemoryDisk::kill`] does, and ends nothing: a server
    /// process ends beside the one that uses the disk.
    pub fn keep_removed(&self) {
        let mut store = self.shared.lock();
        let removed = store.inodes().iter().filter(|(_, inode)| inode.meta.nlink == 0);
        let removed: Vec<u64> = removed.map(|(&ino, _)| ino).collect();
        let mut orphans = self.lock_orphans();
        for ino in removed {
            if let Ok(inode) = store.unlogged(ino)
                && orphans.insert(ino)
            {
                inode.opens += 1;
            }
        }
    }

    /// Gives up the deleted files that outlived a [`MemoryDisk::kill`]; those opened
    /// again since live on until they are closed.
    pub fn drop_orphans(&self) {
        let mut store = self.shared.lock();
        for ino in std::mem::take(&mut *self.lock_orphans()) {
            if let Ok(inode) = store.unlogged(ino) {
                inode.opens = inode.opens.saturating_sub(1);
            }
            store.drop_if_unused(ino);
        }
        store.finish();
    }

    fn lock_orphans(&self) -> std::sync::MutexGuard<'_, BTreeSet<u64>> {
        self.orphans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
