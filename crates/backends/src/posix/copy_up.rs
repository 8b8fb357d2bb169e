//! Guards for copies that an overlay makes (copy-up).
//!
//! An overlay copies a file when the file is changed for the first time. The copy has another time of
//! birth. Until [`Core::changed`] has recorded that, the file looks like another one under the name
//! that the path table has for it. A lookup in this time waits for the change, and looks again.
//! A copy takes time in proportion to the size of the file. Other files do not wait.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use dray_core::{FileId, IdMap};

use super::core::Core;

/// Independent parts of the table, so that threads rarely meet.
const SHARDS: usize = 8;

/// The inodes that are being changed, or looked at. As many as threads do either.
#[derive(Default)]
pub(crate) struct CopyUps([Shard; SHARDS]);

#[derive(Default)]
struct Shard {
    inodes: Mutex<IdMap<FileId, InodeUses>>,
    ended: Condvar,
}

/// The uses of one inode. Lookups go first, so that changes without end do not keep them waiting.
#[derive(Default)]
struct InodeUses {
    changing: usize,
    waiting_to_look: usize,
    looking: bool,
}

/// While it is there, one inode is being changed.
pub(crate) struct ChangeGuard<'a> {
    copy_ups: &'a CopyUps,
    id: FileId,
}

/// While this guard exists, no call changes the inode.
pub(crate) struct LookupGuard<'a> {
    copy_ups: &'a CopyUps,
    id: FileId,
}

/// Held while one inode or two are being changed; none where nothing is copied.
pub(crate) type ChangeGuards<'a> = [Option<ChangeGuard<'a>>; 2];

impl CopyUps {
    fn shard(&self, id: FileId) -> &Shard {
        let mixed = (id.ino ^ id.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        &self.0[mixed as usize % SHARDS]
    }

    fn change(&self, id: FileId) -> ChangeGuard<'_> {
        let shard = self.shard(id);
        let mut inodes =
            shard.wait_while(shard.lock(), id, |uses| uses.looking || uses.waiting_to_look > 0);
        inodes.entry(id).or_default().changing += 1;
        ChangeGuard { copy_ups: self, id }
    }

    fn look(&self, id: FileId) -> LookupGuard<'_> {
        let shard = self.shard(id);
        let mut inodes = shard.lock();
        inodes.entry(id).or_default().waiting_to_look += 1;
        let mut inodes = shard.wait_while(inodes, id, |uses| uses.looking || uses.changing > 0);
        let uses = inodes.entry(id).or_default();
        uses.waiting_to_look -= 1;
        uses.looking = true;
        LookupGuard { copy_ups: self, id }
    }
}

impl Shard {
    fn lock(&self) -> MutexGuard<'_, IdMap<FileId, InodeUses>> {
        self.inodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_while<'a>(
        &self,
        inodes: MutexGuard<'a, IdMap<FileId, InodeUses>>,
        id: FileId,
        busy: impl Fn(&InodeUses) -> bool,
    ) -> MutexGuard<'a, IdMap<FileId, InodeUses>> {
        let waits = |inodes: &mut IdMap<FileId, InodeUses>| inodes.get(&id).is_some_and(&busy);
        self.ended.wait_while(inodes, waits).unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, id: FileId, end: impl FnOnce(&mut InodeUses)) {
        let mut inodes = self.lock();
        let uses = inodes.entry(id).or_default();
        end(uses);
        if uses.changing == 0 && uses.waiting_to_look == 0 && !uses.looking {
            inodes.remove(&id);
        }
        self.ended.notify_all();
    }
}

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        self.copy_ups.shard(self.id).end(self.id, |uses| uses.changing -= 1);
    }
}

impl Drop for LookupGuard<'_> {
    fn drop(&mut self) {
        self.copy_ups.shard(self.id).end(self.id, |uses| uses.looking = false);
    }
}

impl Core {
    /// To be held from before a change of these inodes until what they look like is noted.
    /// Meanwhile their thread must look for no id.
    pub(crate) fn copying(&self, ids: [Option<FileId>; 2]) -> ChangeGuards<'_> {
        let Some(copy_ups) = &self.copy_ups else { return [None, None] };
        // Always in the same order, and no inode twice.
        let [one, other] = ids;
        let (one, other) = if one <= other { (one, other) } else { (other, one) };
        let one = one.filter(|_| one != other);
        [one.map(|id| copy_ups.change(id)), other.map(|id| copy_ups.change(id))]
    }

    /// Waits until no call changes this inode, and keeps new changes waiting. None where the file
    /// system makes no copies.
    pub(crate) fn none_copying(&self, id: FileId) -> Option<LookupGuard<'_>> {
        self.copy_ups.as_ref().map(|copy_ups| copy_ups.look(id))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    fn id(ino: u64) -> FileId {
        FileId { ino, generation: 1 }
    }

    #[test]
    fn a_lookup_waits_for_the_changes_of_its_own_inode_alone() {
        let copy_ups = &CopyUps::default();
        let (one, other) = (copy_ups.change(id(1)), copy_ups.change(id(1)));
        for ino in 2..1000 {
            drop(copy_ups.look(id(ino)));
        }
        std::thread::scope(|scope| {
            let (tell, hear) = mpsc::channel();
            scope.spawn(move || {
                let looking = copy_ups.look(id(1));
                tell.send(()).unwrap();
                drop(looking);
            });
            drop(one);
            assert!(hear.recv_timeout(Duration::from_millis(50)).is_err(), "one goes on");
            drop(other);
            hear.recv_timeout(Duration::from_secs(10)).unwrap();
        });
        assert!(copy_ups.0.iter().all(|shard| shard.lock().is_empty()));
    }

    #[test]
    fn changes_begin_behind_the_lookup_that_waits() {
        let copy_ups = &CopyUps::default();
        let first = copy_ups.change(id(1));
        std::thread::scope(|scope| {
            let (tell, hear) = mpsc::channel();
            let looked = tell.clone();
            scope.spawn(move || {
                let looking = copy_ups.look(id(1));
                looked.send("look").unwrap();
                drop((looking, looked));
            });
            while copy_ups
                .shard(id(1))
                .lock()
                .get(&id(1))
                .is_none_or(|uses| uses.waiting_to_look < 1)
            {
                std::thread::yield_now();
            }
            scope.spawn(move || {
                let changing = copy_ups.change(id(1));
                tell.send("change").unwrap();
                drop((changing, tell));
            });
            assert!(hear.recv_timeout(Duration::from_millis(50)).is_err());
            drop(first);
            assert_eq!(hear.iter().collect::<Vec<_>>(), ["look", "change"]);
        });
        assert!(copy_ups.0.iter().all(|shard| shard.lock().is_empty()));
    }
}
