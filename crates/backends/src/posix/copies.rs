//! What an overlay is copying. Of a file that is changed for the first time it makes a copy, of
//! another birth: from then on, and until [`Core::changed`] has noted that, it looks like another
//! file under the name that the path table has for it. A lookup that finds it so waits for that
//! file, and looks again. A copy takes as long as the file is large; other files wait for nothing.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use dray_core::{FileId, IdMap};

use super::core::Core;

/// Independent parts of the table, so that threads seldom meet.
const SHARDS: usize = 8;

/// The inodes that are being changed, or looked at. As many as threads do either.
#[derive(Default)]
pub(crate) struct Copies([Shard; SHARDS]);

#[derive(Default)]
struct Shard {
    inodes: Mutex<IdMap<FileId, Uses>>,
    ended: Condvar,
}

/// Of one inode. Those who look go first, so that changes without end do not keep them waiting.
#[derive(Default)]
struct Uses {
    changing: usize,
    waiting_to_look: usize,
    looking: bool,
}

/// While it is there, one inode is being changed.
pub(crate) struct Changing<'a> {
    copies: &'a Copies,
    id: FileId,
}

/// While it is there, nobody changes one inode.
pub(crate) struct Looking<'a> {
    copies: &'a Copies,
    id: FileId,
}

/// Held while one inode or two are being changed; none where nothing is copied.
pub(crate) type Copying<'a> = [Option<Changing<'a>>; 2];

impl Copies {
    fn shard(&self, id: FileId) -> &Shard {
        let mixed = (id.ino ^ id.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        &self.0[mixed as usize % SHARDS]
    }

    fn change(&self, id: FileId) -> Changing<'_> {
        let shard = self.shard(id);
        let mut inodes =
            shard.wait_while(shard.lock(), id, |uses| uses.looking || uses.waiting_to_look > 0);
        inodes.entry(id).or_default().changing += 1;
        Changing { copies: self, id }
    }

    fn look(&self, id: FileId) -> Looking<'_> {
        let shard = self.shard(id);
        let mut inodes = shard.lock();
        inodes.entry(id).or_default().waiting_to_look += 1;
        let mut inodes = shard.wait_while(inodes, id, |uses| uses.looking || uses.changing > 0);
        let uses = inodes.entry(id).or_default();
        uses.waiting_to_look -= 1;
        uses.looking = true;
        Looking { copies: self, id }
    }
}

impl Shard {
    fn lock(&self) -> MutexGuard<'_, IdMap<FileId, Uses>> {
        self.inodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_while<'a>(
        &self,
        inodes: MutexGuard<'a, IdMap<FileId, Uses>>,
        id: FileId,
        busy: impl Fn(&Uses) -> bool,
    ) -> MutexGuard<'a, IdMap<FileId, Uses>> {
        let waits = |inodes: &mut IdMap<FileId, Uses>| inodes.get(&id).is_some_and(&busy);
        self.ended.wait_while(inodes, waits).unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, id: FileId, end: impl FnOnce(&mut Uses)) {
        let mut inodes = self.lock();
        let uses = inodes.entry(id).or_default();
        end(uses);
        if uses.changing == 0 && uses.waiting_to_look == 0 && !uses.looking {
            inodes.remove(&id);
        }
        self.ended.notify_all();
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.copies.shard(self.id).end(self.id, |uses| uses.changing -= 1);
    }
}

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.copies.shard(self.id).end(self.id, |uses| uses.looking = false);
    }
}

impl Core {
    /// To be held from before a change of these inodes until what they look like is noted.
    /// Meanwhile their thread must look for no id.
    pub(crate) fn copying(&self, ids: [Option<FileId>; 2]) -> Copying<'_> {
        let Some(copies) = &self.copies else { return [None, None] };
        // In one order for everybody, and no inode twice.
        let [one, other] = ids;
        let (one, other) = if one <= other { (one, other) } else { (other, one) };
        let one = one.filter(|_| one != other);
        [one.map(|id| copies.change(id)), other.map(|id| copies.change(id))]
    }

    /// Waits until nobody changes this inode, and keeps everybody from beginning to. None where
    /// nothing is copied.
    pub(crate) fn none_copying(&self, id: FileId) -> Option<Looking<'_>> {
        self.copies.as_ref().map(|copies| copies.look(id))
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
        let copies = &Copies::default();
        let (one, other) = (copies.change(id(1)), copies.change(id(1)));
        for ino in 2..1000 {
            drop(copies.look(id(ino)));
        }
        std::thread::scope(|scope| {
            let (tell, hear) = mpsc::channel();
            scope.spawn(move || {
                let looking = copies.look(id(1));
                tell.send(()).unwrap();
                drop(looking);
            });
            drop(one);
            assert!(hear.recv_timeout(Duration::from_millis(50)).is_err(), "one goes on");
            drop(other);
            hear.recv_timeout(Duration::from_secs(10)).unwrap();
        });
        assert!(copies.0.iter().all(|shard| shard.lock().is_empty()));
    }

    #[test]
    fn changes_begin_behind_the_lookup_that_waits() {
        let copies = &Copies::default();
        let first = copies.change(id(1));
        std::thread::scope(|scope| {
            let (tell, hear) = mpsc::channel();
            let looked = tell.clone();
            scope.spawn(move || {
                let looking = copies.look(id(1));
                looked.send("look").unwrap();
                drop((looking, looked));
            });
            while copies.shard(id(1)).lock().get(&id(1)).is_none_or(|uses| uses.waiting_to_look < 1)
            {
                std::thread::yield_now();
            }
            scope.spawn(move || {
                let changing = copies.change(id(1));
                tell.send("change").unwrap();
                drop((changing, tell));
            });
            assert!(hear.recv_timeout(Duration::from_millis(50)).is_err());
            drop(first);
            assert_eq!(hear.iter().collect::<Vec<_>>(), ["look", "change"]);
        });
        assert!(copies.0.iter().all(|shard| shard.lock().is_empty()));
    }
}
