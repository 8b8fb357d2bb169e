//! Locks of directories: each change of a directory and the lookup of its result are one step.
//!
//! Changes of one directory come one after the other. Changes of other directories do not wait for
//! them, since a change takes as long as the disk below. A waiting request is a task and has no
//! thread. The limit on waiting requests is that of the calls that connections may have under way.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::{FileId, IdMap};

/// Independent parts of the table, so that threads rarely meet.
const SHARDS: usize = 8;

/// The locks of all directories of an export.
#[derive(Default)]
pub(crate) struct DirectoryLocks([Mutex<Shard>; SHARDS]);

#[derive(Default)]
struct Shard {
    /// The directories that are locked, each with the requests that wait for its lock.
    lines: IdMap<FileId, VecDeque<Waiting>>,
    next: u64,
}

struct Waiting {
    number: u64,
    waker: Waker,
    /// The lock is granted to this request.
    is_granted: bool,
}

/// The lock of one directory. Its drop gives the lock back.
pub(crate) struct DirectoryLock<'a> {
    directory_locks: &'a DirectoryLocks,
    dir: FileId,
}

/// A request that waits in the line of a directory.
struct QueuedRequest<'a> {
    directory_locks: &'a DirectoryLocks,
    dir: FileId,
    number: u64,
    over: bool,
}

impl DirectoryLocks {
    fn shard(&self, dir: FileId) -> MutexGuard<'_, Shard> {
        let mixed = (dir.ino ^ dir.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        self.0[mixed as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the lock of `dir`. Requests are granted in the order of their arrival.
    pub(crate) async fn lock(&self, dir: FileId) -> DirectoryLock<'_> {
        let number = {
            let mut shard = self.shard(dir);
            let number = shard.next;
            shard.next += 1;
            match shard.lines.get_mut(&dir) {
                None => {
                    shard.lines.insert(dir, VecDeque::new()); // which takes no memory
                    return DirectoryLock { directory_locks: self, dir };
                }
                Some(line) => {
                    let waker = Waker::noop().clone();
                    line.push_back(Waiting { number, waker, is_granted: false });
                }
            }
            number
        };
        let mut request = QueuedRequest { directory_locks: self, dir, number, over: false };
        std::future::poll_fn(|task| request.poll(task.waker())).await;
        DirectoryLock { directory_locks: self, dir }
    }

    /// The locks of two directories, always taken in the order of the ids, so that no two requests
    /// wait for each other.
    pub(crate) async fn lock_both(
        &self,
        one: FileId,
        two: FileId,
    ) -> (DirectoryLock<'_>, Option<DirectoryLock<'_>>) {
        let key = |dir: FileId| (dir.ino, dir.generation);
        let (first, second) = if key(one) <= key(two) { (one, two) } else { (two, one) };
        let lock = self.lock(first).await;
        if first == second {
            return (lock, None);
        }
        (lock, Some(self.lock(second).await))
    }

    /// Grants the lock to the next request in the line.
    fn grant_next(&self, dir: FileId) {
        let mut shard = self.shard(dir);
        let next = shard.lines.get_mut(&dir).and_then(|line| line.front_mut());
        let waker = next.map(|next| {
            next.is_granted = true;
            next.waker.clone()
        });
        if waker.is_none() {
            shard.lines.remove(&dir);
        }
        drop(shard);
        waker.into_iter().for_each(Waker::wake);
    }
}

impl Drop for DirectoryLock<'_> {
    fn drop(&mut self) {
        self.directory_locks.grant_next(self.dir);
    }
}

impl QueuedRequest<'_> {
    fn poll(&mut self, waker: &Waker) -> Poll<()> {
        let mut shard = self.directory_locks.shard(self.dir);
        let line = shard.lines.get_mut(&self.dir);
        let Some(line) = line else { return Poll::Pending }; // a line lasts while a request is in it
        match line.front().is_some_and(|first| first.number == self.number && first.is_granted) {
            true => {
                line.pop_front();
                self.over = true;
                Poll::Ready(())
            }
            false => {
                if let Some(own) = line.iter_mut().find(|one| one.number == self.number) {
                    own.waker.clone_from(waker);
                }
                Poll::Pending
            }
        }
    }
}

/// A request that is dropped leaves the line, and hands on a lock that it has been granted.
impl Drop for QueuedRequest<'_> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let mut shard = self.directory_locks.shard(self.dir);
        let Some(line) = shard.lines.get_mut(&self.dir) else { return };
        let own = line.iter().position(|one| one.number == self.number);
        let had_grant = own.and_then(|at| line.remove(at)).is_some_and(|own| own.is_granted);
        drop(shard);
        if had_grant {
            self.directory_locks.grant_next(self.dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Context;

    use super::*;

    fn dir(ino: u64) -> FileId {
        FileId { ino, generation: 1 }
    }

    // proves: P110
    #[test]
    fn one_directory_has_one_lock_and_others_are_free_meanwhile() {
        let (directory_locks, mut task) =
            (DirectoryLocks::default(), Context::from_waker(Waker::noop()));
        let mut first = pin!(directory_locks.lock(dir(1)));
        let Poll::Ready(held) = first.as_mut().poll(&mut task) else { panic!("the lock is free") };
        let mut second = pin!(directory_locks.lock(dir(1)));
        let mut third = pin!(directory_locks.lock(dir(1)));
        assert!(second.as_mut().poll(&mut task).is_pending());
        assert!(third.as_mut().poll(&mut task).is_pending());
        for ino in 2..1000 {
            assert!(pin!(directory_locks.lock(dir(ino))).poll(&mut task).is_ready());
        }
        drop(held);
        assert!(
            third.as_mut().poll(&mut task).is_pending(),
            "requests are granted in the order of their arrival"
        );
        let Poll::Ready(held) = second.as_mut().poll(&mut task) else { panic!("it is next") };
        drop(held);
        assert!(third.as_mut().poll(&mut task).is_ready());
        assert!(directory_locks.0.iter().all(|shard| shard.lock().unwrap().lines.is_empty()));
    }

    #[test]
    fn a_request_that_is_dropped_blocks_no_other() {
        let (directory_locks, mut task) =
            (DirectoryLocks::default(), Context::from_waker(Waker::noop()));
        let mut first = pin!(directory_locks.lock(dir(1)));
        let Poll::Ready(held) = first.as_mut().poll(&mut task) else { panic!("the lock is free") };
        let mut last = pin!(directory_locks.lock_both(dir(2), dir(1)));
        {
            let mut waits = pin!(directory_locks.lock(dir(1)));
            let mut gives_up = pin!(directory_locks.lock(dir(1)));
            assert!(waits.as_mut().poll(&mut task).is_pending());
            assert!(gives_up.as_mut().poll(&mut task).is_pending());
            assert!(last.as_mut().poll(&mut task).is_pending());
            drop(held); // granted to the first request, which is not polled again
        }
        assert!(last.as_mut().poll(&mut task).is_ready());
        assert!(directory_locks.0.iter().all(|shard| shard.lock().unwrap().lines.is_empty()));
    }
}
