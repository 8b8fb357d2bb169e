//! A cache of `O_PATH` descriptors of recently used inodes.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{FileId, FileType, IdMap};

use super::expected_removal::ExpectedRemoval;
use super::lanes::DeferredClose;
use super::recently_unlinked::LookupHolders;

/// An inode and a descriptor by which it can be named, but not read or written.
pub(crate) struct CachedInode {
    pub(crate) id: FileId,
    pub(crate) kind: FileType,
    fd: DeferredClose,
    /// In a directory: what is probably removed next.
    pub(super) removal: ExpectedRemoval,
    /// Lookups in this directory, one after the other, of files that were not in the cache. It counts up
    /// to [`COLD_LOOKUPS`].
    cold_lookups: AtomicU8,
    /// The client threads that have just looked it up by a name.
    lookup_holders: Mutex<LookupHolders>,
}

/// So many lookups of files that are not in the cache make the next one open its file at once. To ask for
/// the id first costs a system call, and saves three where the file is in the cache.
const COLD_LOOKUPS: u8 = 3;

impl CachedInode {
    pub(crate) fn new(id: FileId, kind: FileType, fd: DeferredClose) -> CachedInode {
        CachedInode {
            id,
            kind,
            fd,
            removal: ExpectedRemoval::default(),
            cold_lookups: AtomicU8::new(0),
            lookup_holders: Mutex::default(),
        }
    }

    /// Whether the next file that is looked up in this directory is probably not in the cache.
    pub(crate) fn looks_cold(&self) -> bool {
        self.cold_lookups.load(Ordering::Relaxed) >= COLD_LOOKUPS
    }

    /// A lookup in this directory has found a file. The count is written only where it changes: threads
    /// that look names up in one directory share it.
    pub(crate) fn looked_up(&self, was_cached: bool) {
        let before = self.cold_lookups.load(Ordering::Relaxed);
        let after = if was_cached { 0 } else { (before + 1).min(COLD_LOOKUPS) };
        if after != before {
            self.cold_lookups.store(after, Ordering::Relaxed);
        }
    }

    pub(crate) fn lookup_holders(&self) -> MutexGuard<'_, LookupHolders> {
        self.lookup_holders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Independent parts of the cache, so that threads rarely meet.
const SHARDS: usize = 8;

/// A bounded cache. When it is full, an entry goes that is drawn by lot, unless it was used since it was
/// last drawn. A program that goes through more files than there is room for, again and again, finds a
/// part of them. By age it would find none.
pub(crate) struct InodeCache {
    shards: [Mutex<Shard>; SHARDS],
    shard_max: usize,
    idle_secs: u64,
    /// Second at which idle entries are looked for next.
    next_trim_secs: AtomicU64,
}

#[derive(Default)]
struct Shard {
    index: IdMap<FileId, usize>,
    slots: Vec<Slot>,
    lots: Lots,
}

/// Pseudo-random numbers, the same in each run: xorshift64 of G. Marsaglia, "Xorshift RNGs" (2003).
struct Lots(u64);

impl Default for Lots {
    fn default() -> Lots {
        Lots(0x9e37_79b9_7f4a_7c15)
    }
}

impl Lots {
    /// A number below `count`, which is not 0.
    fn draw(&mut self, count: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % count as u64) as usize
    }
}

struct Slot {
    node: Arc<CachedInode>,
    used_secs: u64,
    used_since_drawn: bool,
}

fn now_secs() -> u64 {
    dray_rt::now().as_nanos() / 1_000_000_000
}

impl InodeCache {
    pub(crate) fn new(nodes_max: usize, idle_secs: u64) -> InodeCache {
        InodeCache {
            shards: Default::default(),
            shard_max: (nodes_max / SHARDS).max(1),
            idle_secs,
            next_trim_secs: AtomicU64::new(now_secs() + idle_secs.max(1)),
        }
    }

    fn shard(&self, id: FileId) -> MutexGuard<'_, Shard> {
        let mixed = (id.ino ^ id.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        self.shards[mixed as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, id: FileId) -> Option<Arc<CachedInode>> {
        let mut shard = self.shard(id);
        let index = *shard.index.get(&id)?;
        let slot = shard.slots.get_mut(index)?;
        slot.used_since_drawn = true;
        slot.used_secs = now_secs();
        Some(slot.node.clone())
    }

    /// Keeps `node` in place of the cached one. `node` was found by its name just now. The other
    /// one may be of an inode that a network file system no longer serves.
    pub(crate) fn replace(&self, node: CachedInode) -> Arc<CachedInode> {
        self.keep(node, |_| true)
    }

    /// Keeps `node`, unless one is there already; answers the cached one. A cached one that has
    /// lost a name is about to be forgotten, so it is replaced: this lookup must not be forgotten
    /// with it.
    pub(crate) fn insert(&self, node: CachedInode) -> Arc<CachedInode> {
        self.keep(node, |old| old.lookup_holders().is_gone())
    }

    fn keep(
        &self,
        node: CachedInode,
        replaces: impl FnOnce(&CachedInode) -> bool,
    ) -> Arc<CachedInode> {
        self.trim_when_due();
        let id = node.id;
        let mut shard = self.shard(id);
        let old = shard.index.get(&id).copied();
        if let Some(slot) = old.and_then(|at| shard.slots.get(at))
            && !replaces(&slot.node)
        {
            let kept = slot.node.clone();
            drop(shard);
            node.fd.close_beside(kept.fd());
            return kept;
        }
        let node = Arc::new(node);
        let slot = Slot { node: node.clone(), used_secs: now_secs(), used_since_drawn: false };
        let _closed_after_the_lock = match old {
            Some(at) => shard.slots.get_mut(at).map(|old| {
                slot.node.lookup_holders().take_over(&old.node.lookup_holders());
                std::mem::replace(old, slot)
            }),
            None => shard.put(id, slot, self.shard_max),
        };
        drop(shard);
        node
    }

    /// Closes this descriptor of an inode that has lost a name, unless another one has taken its
    /// place.
    pub(crate) fn forget_this(&self, node: &Arc<CachedInode>) {
        let mut shard = self.shard(node.id);
        let kept = shard.index.get(&node.id).and_then(|at| shard.slots.get(*at));
        let is_this = kept.is_some_and(|slot| Arc::ptr_eq(&slot.node, node));
        let _closed_after_the_lock = if is_this { shard.remove(node.id) } else { None };
        drop(shard);
    }

    /// Closes the descriptor of an inode that is going away, so that its space is freed.
    pub(crate) fn forget(&self, id: FileId) {
        let _closed_after_the_lock = self.shard(id).remove(id);
    }

    /// Closes idle descriptors. The space of a file that was removed without the server then
    /// becomes free.
    pub(crate) fn trim(&self) {
        let before = now_secs().saturating_sub(self.idle_secs);
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let idle: Vec<FileId> = shard
                .slots
                .iter()
                .filter(|slot| slot.used_secs <= before)
                .map(|slot| slot.node.id)
                .collect();
            let closed: Vec<_> = idle.into_iter().map(|id| shard.remove(id)).collect();
            drop(shard);
            drop(closed); // which may take a while
        }
    }

    fn trim_when_due(&self) {
        if self.claims_check() {
            self.trim();
        }
    }

    /// Whether it is time to look for idle descriptors, and no other thread does.
    fn claims_check(&self) -> bool {
        let now = now_secs();
        let due = self.next_trim_secs.load(Ordering::Relaxed);
        let next = now + self.idle_secs.max(1);
        let (relaxed, exchange) = (Ordering::Relaxed, &self.next_trim_secs);
        now >= due && exchange.compare_exchange(due, next, relaxed, relaxed).is_ok()
    }

    /// Whether there is something that may have been idle for long.
    pub(crate) fn is_to_be_trimmed(&self) -> bool {
        self.len() > 0 && self.claims_check()
    }

    /// Descriptors held now.
    pub(crate) fn len(&self) -> usize {
        let len =
            |shard: &Mutex<Shard>| shard.lock().unwrap_or_else(PoisonError::into_inner).slots.len();
        self.shards.iter().map(len).sum()
    }
}

impl Shard {
    fn put(&mut self, id: FileId, slot: Slot, max: usize) -> Option<Slot> {
        if self.slots.len() < max {
            self.index.insert(id, self.slots.len());
            self.slots.push(slot);
            return None;
        }
        let at = loop {
            let at = self.lots.draw(self.slots.len());
            if !std::mem::replace(&mut self.slots[at].used_since_drawn, false) {
                break at;
            }
        };
        let old = std::mem::replace(&mut self.slots[at], slot);
        self.index.remove(&old.node.id);
        self.index.insert(id, at);
        Some(old)
    }

    fn remove(&mut self, id: FileId) -> Option<Slot> {
        let at = self.index.remove(&id)?;
        let slot = self.slots.swap_remove(at);
        if let Some(moved) = self.slots.get(at) {
            self.index.insert(moved.node.id, at);
        }
        Some(slot)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::recently_unlinked::{ClientThread, RecentlyUnlinked};
    use super::*;

    pub(crate) fn node(ino: u64) -> CachedInode {
        let fd = DeferredClose::without_lanes(std::fs::File::open("/dev/null").unwrap().into());
        CachedInode::new(FileId { ino, generation: 1 }, FileType::Regular, fd)
    }

    #[test]
    fn it_stays_within_its_bound_and_finds_what_it_has() {
        let cache = InodeCache::new(64, 1000);
        for ino in 0..1000 {
            cache.insert(node(ino));
        }
        assert!(cache.len() <= 64);
        let found = (0..1000).filter(|ino| {
            let id = FileId { ino: *ino, generation: 1 };
            cache.get(id).is_some_and(|node| node.id == id)
        });
        assert_eq!(found.count(), cache.len());
    }

    /// A program that goes through more files than there is room for met none of them again.
    #[test]
    fn a_part_of_more_files_than_there_is_room_for_is_found_again() {
        let cache = InodeCache::new(64, 1000);
        let mut found = 0;
        for ino in (0..10).flat_map(|_| 0..96) {
            let id = FileId { ino, generation: 1 };
            match cache.get(id) {
                Some(_) => found += 1,
                None => _ = cache.insert(node(ino)),
            }
        }
        assert!(cache.len() <= 64 && found > 96 * 9 / 4, "{found}");
    }

    #[test]
    fn a_directory_looks_cold_after_lookups_in_a_row_of_files_that_are_not_cached() {
        let dir = node(1);
        for _ in 0..COLD_LOOKUPS {
            assert!(!dir.looks_cold());
            dir.looked_up(false);
        }
        (0..300).for_each(|_| dir.looked_up(false)); // the count does not wrap around
        assert!(dir.looks_cold());
        dir.looked_up(true);
        dir.looked_up(false);
        assert!(!dir.looks_cold());
    }

    /// An inode that a network file system had given up was used for as long as anybody asked for
    /// its file. Yet each lookup had found the new one.
    #[test]
    fn what_was_found_just_now_takes_the_place_of_what_was_there() {
        let cache = InodeCache::new(64, 1000);
        let old = cache.insert(node(1));
        assert!(Arc::ptr_eq(&cache.insert(node(1)), &old));
        let new = cache.replace(node(1));
        assert!(Arc::ptr_eq(&cache.get(new.id).unwrap(), &new) && !Arc::ptr_eq(&old, &new));
        assert_eq!((cache.len(), Arc::strong_count(&old)), (1, 1));
        cache.replace(node(2));
        assert_eq!(cache.len(), 2);
    }

    /// Between the two steps of forgetting a file that had lost one of its names it was looked up
    /// by another one. Nobody knew of that a moment later.
    #[test]
    fn what_lost_a_name_gives_way_to_what_is_found_by_another() {
        let (cache, now) = (InodeCache::new(64, 1000), dray_rt::now());
        let thread = ClientThread::of(&dray_core::Context::system());
        let old = cache.insert(node(1));
        RecentlyUnlinked::default().add(&old, thread);
        let new = cache.insert(node(1));
        assert!(!Arc::ptr_eq(&old, &new) && new.lookup_holders().add(thread, now));
        cache.forget_this(&old);
        assert!(Arc::ptr_eq(&cache.get(new.id).unwrap(), &new));
        cache.forget_this(&new);
        assert!(cache.get(new.id).is_none() && cache.len() == 0);
    }

    #[test]
    fn what_is_forgotten_or_idle_is_closed() {
        let cache = InodeCache::new(64, 0);
        let held = cache.insert(node(1));
        cache.insert(node(2));
        cache.forget(held.id);
        assert!(cache.get(held.id).is_none());
        assert_eq!(Arc::strong_count(&held), 1);
        cache.trim();
        assert_eq!(cache.len(), 0);
    }
}
