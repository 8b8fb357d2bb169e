//! Room on the local disk: within the size of the cache, and when the disk itself is full.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::eviction;
use crate::store::{LocalCache, add};

/// What threads of a process that make room tell each other.
#[derive(Default)]
pub(crate) struct DiskRoom {
    /// Bytes that were stored since the size was looked at last.
    unchecked_bytes: AtomicU64,
    /// How often a full disk was met and something was evicted.
    rounds: AtomicU64,
    /// One evicts at a time.
    turn: Mutex<()>,
}

/// Whether an error says that the disk, or the share of it that its owner may use, is full.
pub(crate) fn is_full(error: &io::Error) -> bool {
    [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded].contains(&error.kind())
}

impl LocalCache {
    /// Does what may need `need_bytes` of the disk. If the disk is full, entries are evicted, and it is tried once more.
    /// Waits for the disk. Errors: those of `work`, or of the eviction.
    pub(crate) fn with_room<T>(
        &self,
        need_bytes: u64,
        work: impl Fn() -> io::Result<T>,
    ) -> io::Result<T> {
        let rounds = self.room.rounds.load(Ordering::SeqCst);
        let done = work();
        if !done.as_ref().is_err_and(is_full) || !self.evict_from_full_disk(rounds, need_bytes)? {
            return done;
        }
        work()
    }

    /// Answers whether anything was evicted, by this thread or by another one since there were `rounds`.
    fn evict_from_full_disk(&self, rounds: u64, need_bytes: u64) -> io::Result<bool> {
        let _turn = self.room.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if self.room.rounds.load(Ordering::SeqCst) != rounds {
            return Ok(true);
        }
        let freed_bytes = eviction::evict_from_full_disk(&self.options.dir, need_bytes)?;
        if freed_bytes == 0 {
            return Ok(false);
        }
        self.room.rounds.fetch_add(1, Ordering::SeqCst);
        add(&self.counts.evicted_bytes, freed_bytes);
        let dir = self.options.dir.display();
        log::warn!("cache {dir}: the disk is full; {freed_bytes} bytes of the cache were given up");
        Ok(true)
    }

    /// Looks what all processes have stored after each sixty-fourth of the size.
    pub(crate) fn make_room(&self, new_bytes: u64) -> io::Result<()> {
        let step = (self.options.size_bytes / 64).max(1 << 20);
        let before = self.room.unchecked_bytes.fetch_add(new_bytes, Ordering::Relaxed);
        if before + new_bytes < step {
            return Ok(());
        }
        self.room.unchecked_bytes.store(0, Ordering::Relaxed);
        match eviction::evict(&self.options.dir, self.options.size_bytes)? {
            true => Ok(()),
            false => Err(io::ErrorKind::StorageFull.into()),
        }
    }
}
