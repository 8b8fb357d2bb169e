//! Makes a change of a directory and the look at its result one step.
//!
//! Changes of one directory take turns, and nobody else waits for them: what the file system
//! below does in a turn can take as long as its disk. Who waits for a turn is a task, and has no
//! thread meanwhile. Those that wait are bounded by the calls that connections may have under way.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::{FileId, IdMap};

/// Independent parts of the table, so that threads seldom meet.
const SHARDS: usize = 8;

/// The directories that are being changed.
#[derive(Default)]
pub(crate) struct Directories([Mutex<Shard>; SHARDS]);

#[derive(Default)]
struct Shard {
    /// Those that somebody has his turn with, and who waits behind.
    lines: IdMap<FileId, VecDeque<Waiting>>,
    next: u64,
}

struct Waiting {
    number: u64,
    waker: Waker,
    /// It is its turn.
    has_turn: bool,
}

/// A turn with a directory, until it is dropped.
pub(crate) struct Turn<'a> {
    directories: &'a Directories,
    dir: FileId,
}

/// A place in the line.
struct Place<'a> {
    directories: &'a Directories,
    dir: FileId,
    number: u64,
    over: bool,
}

impl Directories {
    fn shard(&self, dir: FileId) -> MutexGuard<'_, Shard> {
        let mixed = (dir.ino ^ dir.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        self.0[mixed as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody else changes `dir`. Who came first goes first.
    pub(crate) async fn turn(&self, dir: FileId) -> Turn<'_> {
        let number = {
            let mut shard = self.shard(dir);
            let number = shard.next;
            shard.next += 1;
            match shard.lines.get_mut(&dir) {
                None => {
                    shard.lines.insert(dir, VecDeque::new()); // which takes no memory
                    return Turn { directories: self, dir };
                }
                Some(line) => {
                    let waker = Waker::noop().clone();
                    line.push_back(Waiting { number, waker, has_turn: false });
                }
            }
            number
        };
        let mut place = Place { directories: self, dir, number, over: false };
        std::future::poll_fn(|task| place.poll(task.waker())).await;
        Turn { directories: self, dir }
    }

    /// The turns of two directories, in the same order for everybody.
    pub(crate) async fn turns(&self, one: FileId, two: FileId) -> (Turn<'_>, Option<Turn<'_>>) {
        let key = |dir: FileId| (dir.ino, dir.generation);
        let (first, second) = if key(one) <= key(two) { (one, two) } else { (two, one) };
        let turn = self.turn(first).await;
        if first == second {
            return (turn, None);
        }
        (turn, Some(self.turn(second).await))
    }

    /// Gives the turn to who is next.
    fn pass_on(&self, dir: FileId) {
        let mut shard = self.shard(dir);
        let next = shard.lines.get_mut(&dir).and_then(|line| line.front_mut());
        let waker = next.map(|next| {
            next.has_turn = true;
            next.waker.clone()
        });
        if waker.is_none() {
            shard.lines.remove(&dir);
        }
        drop(shard);
        waker.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.directories.pass_on(self.dir);
    }
}

impl Place<'_> {
    fn poll(&mut self, waker: &Waker) -> Poll<()> {
        let mut shard = self.directories.shard(self.dir);
        let line = shard.lines.get_mut(&self.dir);
        let Some(line) = line else { return Poll::Pending }; // there is one while we are in it
        match line.front().is_some_and(|first| first.number == self.number && first.has_turn) {
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

/// Who waits no more lets the next one pass.
impl Drop for Place<'_> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let mut shard = self.directories.shard(self.dir);
        let Some(line) = shard.lines.get_mut(&self.dir) else { return };
        let own = line.iter().position(|one| one.number == self.number);
        let had_turn = own.and_then(|at| line.remove(at)).is_some_and(|own| own.has_turn);
        drop(shard);
        if had_turn {
            self.directories.pass_on(self.dir);
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

    #[test]
    fn one_directory_is_changed_by_one_at_a_time_and_others_meanwhile() {
        let (directories, mut task) = (Directories::default(), Context::from_waker(Waker::noop()));
        let mut first = pin!(directories.turn(dir(1)));
        let Poll::Ready(held) = first.as_mut().poll(&mut task) else { panic!("nobody has it") };
        let mut second = pin!(directories.turn(dir(1)));
        let mut third = pin!(directories.turn(dir(1)));
        assert!(second.as_mut().poll(&mut task).is_pending());
        assert!(third.as_mut().poll(&mut task).is_pending());
        for ino in 2..1000 {
            assert!(pin!(directories.turn(dir(ino))).poll(&mut task).is_ready());
        }
        drop(held);
        assert!(third.as_mut().poll(&mut task).is_pending(), "who came first goes first");
        let Poll::Ready(held) = second.as_mut().poll(&mut task) else { panic!("its turn") };
        drop(held);
        assert!(third.as_mut().poll(&mut task).is_ready());
        assert!(directories.0.iter().all(|shard| shard.lock().unwrap().lines.is_empty()));
    }

    #[test]
    fn who_waits_no_more_is_in_nobodys_way() {
        let (directories, mut task) = (Directories::default(), Context::from_waker(Waker::noop()));
        let mut first = pin!(directories.turn(dir(1)));
        let Poll::Ready(held) = first.as_mut().poll(&mut task) else { panic!("nobody has it") };
        let mut last = pin!(directories.turns(dir(2), dir(1)));
        {
            let mut waits = pin!(directories.turn(dir(1)));
            let mut gives_up = pin!(directories.turn(dir(1)));
            assert!(waits.as_mut().poll(&mut task).is_pending());
            assert!(gives_up.as_mut().poll(&mut task).is_pending());
            assert!(last.as_mut().poll(&mut task).is_pending());
            drop(held); // to the first that waits, which never looks
        }
        assert!(last.as_mut().poll(&mut task).is_ready());
        assert!(directories.0.iter().all(|shard| shard.lock().unwrap().lines.is_empty()));
    }
}
