//! The order of changes: every change gets a number, a stamp, and of two that touch the
//! same bytes of a file the later one has the greater.
//!
//! A change of a file's data takes its stamp before it is made, and has its range of the
//! file to itself until it is answered; other changes, such as those of names, take theirs
//! when they have been made. So whoever syncs the whole file system at a time when every
//! stamped change of data up to some number is over, has synced everything up to it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::{FileId, OpenFile};

use crate::server::session::Session;
use crate::wire::Call;

/// Files share this many queues.
const QUEUES: usize = 64;

/// All of a file.
pub(crate) const WHOLE: Range<u64> = 0..u64::MAX;

/// The stamps of one export.
pub(crate) struct Stamps {
    /// Where this life of the server began.
    before: AtomicU64,
    newest: AtomicU64,
    queues: Vec<Mutex<Queue>>,
}

#[derive(Default)]
struct Queue {
    /// Changes of data that are being made.
    running: Vec<Running>,
    waiting: VecDeque<Waker>,
}

struct Running {
    file: FileId,
    range: Range<u64>,
    number: u64,
}

/// A change of data while it is being made.
pub(crate) struct Stamped {
    stamps: Arc<Stamps>,
    queue: usize,
    /// Its stamp.
    pub(crate) number: u64,
}

impl Default for Stamps {
    /// Begins with the time, nanoseconds: a server that takes over gives greater stamps than
    /// the one before it, which counted by ones and took longer for each. Should the clock
    /// have been set back, [`Stamps::begin_above`] helps.
    fn default() -> Stamps {
        let queues = (0..QUEUES).map(|_| Mutex::default()).collect();
        let begin = dray_rt::wall_clock().as_nanos() as u64;
        Stamps { before: AtomicU64::new(begin), newest: AtomicU64::new(begin), queues }
    }
}

impl Stamps {
    fn lock(&self, queue: usize) -> MutexGuard<'_, Queue> {
        self.queues[queue].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody else changes these bytes, and takes a stamp.
    pub(crate) async fn take(self: &Arc<Stamps>, file: FileId, range: Range<u64>) -> Stamped {
        let queue = queue_of(file);
        let number = std::future::poll_fn(|task| {
            let mut state = self.lock(queue);
            let excludes = |other: &Running| {
                other.file == file && other.range.start < range.end && range.start < other.range.end
            };
            if state.running.iter().any(excludes) {
                state.waiting.push_back(task.waker().clone());
                return Poll::Pending;
            }
            let number = self.next();
            state.running.push(Running { file, range: range.clone(), number });
            Poll::Ready(number)
        })
        .await;
        Stamped { stamps: self.clone(), queue, number }
    }

    /// The stamp of a change that has just been made.
    pub(crate) fn next(&self) -> u64 {
        self.newest.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Stamps to come are greater than this one, above which no earlier life gave any. To be
    /// called before there are clients.
    pub(crate) fn begin_above(&self, number: u64) {
        self.before.fetch_max(number, Ordering::SeqCst);
        self.newest.fetch_max(number, Ordering::SeqCst);
    }

    /// The greatest stamp that an earlier life of the server can have given.
    pub(crate) fn before(&self) -> u64 {
        self.before.load(Ordering::SeqCst)
    }

    /// The last one given.
    pub(crate) fn newest(&self) -> u64 {
        self.newest.load(Ordering::SeqCst)
    }

    /// A stamp such that every change of data up to it is over.
    pub(crate) async fn settled(&self) -> u64 {
        let newest = self.newest.load(Ordering::SeqCst);
        for queue in 0..QUEUES {
            std::future::poll_fn(|task| {
                let mut state = self.lock(queue);
                if state.running.iter().all(|running| running.number > newest) {
                    return Poll::Ready(());
                }
                state.waiting.push_back(task.waker().clone());
                Poll::Pending
            })
            .await;
        }
        newest
    }
}

impl Drop for Stamped {
    fn drop(&mut self) {
        let mut state = self.stamps.lock(self.queue);
        state.running.retain(|running| running.number != self.number);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}

fn queue_of(id: FileId) -> usize {
    // Fibonacci hashing (Knuth 6.4): inode numbers come in runs.
    ((id.ino ^ id.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as usize % QUEUES
}

/// The bytes whose content a call changes; none if it changes no data.
pub(crate) fn bytes_changed(
    session: &Session,
    call: &Call<'_>,
    data_bytes: usize,
) -> Option<(FileId, Range<u64>)> {
    let of = |handle: u64| session.file(handle).map(|file: Arc<dyn OpenFile>| file.id());
    let from = |at: u64, len_bytes: u64| at..at.saturating_add(len_bytes);
    match call {
        Call::Write { handle, how } if how.append => Some((of(*handle)?, WHOLE)),
        Call::Write { handle, how } => Some((of(*handle)?, from(how.at, data_bytes as u64))),
        Call::Setattr { id, set, .. } => Some((*id, set.size?..u64::MAX)),
        Call::Allocate { handle, what } => {
            let moves = libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_INSERT_RANGE;
            let range = if what.flags & moves != 0 { WHOLE } else { from(what.at, what.len_bytes) };
            Some((of(*handle)?, range))
        }
        Call::CopyRange { to, to_at, len_bytes, .. } => Some((of(*to)?, from(*to_at, *len_bytes))),
        Call::Open { id, how, .. } if how.truncates() => Some((*id, WHOLE)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::Context as TaskContext;

    #[test]
    fn overlapping_changes_wait_and_a_settled_stamp_covers_no_running_one() {
        let stamps = Arc::new(Stamps::default());
        stamps.newest.store(0, Ordering::SeqCst);
        let file = FileId { ino: 3, generation: 1 };
        let mut task = TaskContext::from_waker(Waker::noop());
        let mut take = |range| match pin!(stamps.take(file, range)).poll(&mut task) {
            Poll::Ready(stamped) => Some(stamped),
            Poll::Pending => None,
        };
        let first = take(0..10).expect("nobody is there");
        let apart = take(10..20).expect("they do not touch");
        assert!(first.number < apart.number);
        assert!(take(5..15).is_none());
        let mut task = TaskContext::from_waker(Waker::noop());
        assert!(pin!(stamps.settled()).poll(&mut task).is_pending());
        let newest = apart.number;
        drop((first, apart));
        assert_eq!(pin!(stamps.settled()).poll(&mut task), Poll::Ready(newest));
        stamps.begin_above(1000);
        assert_eq!(stamps.next(), 1001);
    }
}
