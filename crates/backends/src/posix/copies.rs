//! What an overlay is copying. Of a file that is changed for the first time it makes a copy, of
//! another birth: from then on, and until [`Core::changed`] has noted that, it looks like another
//! file under the name that the path table has for it. Whoever finds it so waits, and looks again.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use dray_core::FileId;

use super::core::Core;

/// Locks that inodes share by their ids.
const LOCKS: usize = 64;

/// Read: an inode is being changed. Write: somebody wants to know what it is.
pub(crate) struct Copies([RwLock<()>; LOCKS]);

/// Held while one inode or two are being changed; none where nothing is copied.
pub(crate) type Copying<'a> = [Option<RwLockReadGuard<'a, ()>>; 2];

impl Default for Copies {
    fn default() -> Copies {
        Copies([const { RwLock::new(()) }; LOCKS])
    }
}

fn stripe(id: FileId) -> usize {
    ((id.ino ^ id.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize % LOCKS
}

impl Core {
    /// To be held from before a change of these inodes until what they look like is noted.
    /// Meanwhile their thread must look for no id.
    pub(crate) fn copying(&self, ids: [Option<FileId>; 2]) -> Copying<'_> {
        let Some(copies) = &self.copies else { return [None, None] };
        // In one order for everybody, and no lock twice.
        let [one, other] = ids.map(|id| id.map(stripe));
        let (one, other) = if one <= other { (one, other) } else { (other, one) };
        let take = |at: usize| {
            copies.0.get(at).map(|lock| lock.read().unwrap_or_else(PoisonError::into_inner))
        };
        [one.filter(|_| one != other).and_then(take), other.and_then(take)]
    }

    /// Waits until nobody changes this inode, and keeps everybody from beginning to. None where
    /// nothing is copied.
    pub(crate) fn none_copying(&self, id: FileId) -> Option<RwLockWriteGuard<'_, ()>> {
        let lock = self.copies.as_ref()?.0.get(stripe(id))?;
        Some(lock.write().unwrap_or_else(PoisonError::into_inner))
    }
}
