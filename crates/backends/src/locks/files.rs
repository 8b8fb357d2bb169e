//! The locked files of an export. Each has a mutex of its own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::FileId;

use super::SHARDS;
use super::file::FileLocks;

type File = Arc<Mutex<FileLocks>>;

/// Finds the locks of a file. There is an entry for each file with granted locks or waiting
/// requests, and for no other.
///
/// The mutex of a shard is held for one look into its map, and no other mutex is taken under it. It
/// is taken under the mutex of a file that has lost its last lock.
#[derive(Default)]
pub(super) struct LockedFiles {
    shards: [Mutex<HashMap<FileId, File>>; SHARDS],
}

impl LockedFiles {
    fn shard(&self, file: FileId) -> MutexGuard<'_, HashMap<FileId, File>> {
        let mixed = (file.ino ^ file.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let shard = &self.shards[(mixed >> 32) as usize % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the locks of a file, under its mutex.
    pub(super) fn with<R>(&self, file: FileId, work: impl FnOnce(&mut FileLocks) -> R) -> R {
        loop {
            let new = || Arc::new(Mutex::new(FileLocks::new(file)));
            let entry = self.shard(file).entry(file).or_insert_with(new).clone();
            let mut locks = entry.lock().unwrap_or_else(PoisonError::into_inner);
            if locks.removed {
                continue; // between the two mutexes; its shard does not have it any more
            }
            let answer = work(&mut locks);
            if locks.is_empty() {
                self.shard(file).remove(&file);
                locks.removed = true;
            }
            return answer;
        }
    }

    /// Looks at the locks of a file, if it has any.
    pub(super) fn look<R>(&self, file: FileId, work: impl FnOnce(&FileLocks) -> R) -> Option<R> {
        let entry = self.shard(file).get(&file).cloned()?;
        let locks = entry.lock().unwrap_or_else(PoisonError::into_inner);
        (!locks.removed).then(|| work(&locks))
    }

    /// Looks at those of each file, in no order, until the work says that it is enough.
    pub(super) fn look_at_each(&self, mut work: impl FnMut(FileId, &FileLocks) -> bool) {
        for shard in &self.shards {
            let all: Vec<(FileId, File)> = {
                let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
                shard.iter().map(|(file, entry)| (*file, entry.clone())).collect()
            };
            for (file, entry) in all {
                if !work(file, &entry.lock().unwrap_or_else(PoisonError::into_inner)) {
                    return;
                }
            }
        }
    }
}
