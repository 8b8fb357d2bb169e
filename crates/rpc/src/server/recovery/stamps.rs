//! The order of changes: every change gets a number, a stamp, and of two that touch the
//! same bytes of a file the later one has the greater.
//!
//! A change of a file's data takes its stamp before it is made, and has its range of the
//! file to itself until it is answered; other changes, such as those of names, take theirs
//! when they have been made. So whoever syncs the whole file system at a time when every
//! stamped change of data up to some number is over, has synced everything up to it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::{FileId, IdMap, OpenFile};

use crate::server::claims::{Claims, Span};
use crate::server::session::Session;
use crate::wire::Call;

/// Files share this many queues.
const QUEUES: usize = 64;

/// The stamps of one export.
pub(crate) struct Stamps {
    /// Where this life of the server began.
    before: AtomicU64,
    newest: AtomicU64,
    queues: Vec<Mutex<Queue>>,
}

#[derive(Default)]
struct Queue {
    /// Changes of data: those that are being made, by their stamps, and those that wait for an
    /// earlier one.
    files: IdMap<FileId, Claims<u64>>,
    next_ticket: u64,
    /// Who waits until some of those that are being made are over.
    settling: Vec<Waker>,
}

/// A change of data while it is being made.
pub(crate) struct Stamped {
    /// Its stamp.
    pub(crate) number: u64,
    _claimed: Claimed,
}

/// A place among the changes, given back in the end.
struct Claimed {
    stamps: Arc<Stamps>,
    file: FileId,
    ticket: u64,
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

    fn enter(self: &Arc<Stamps>, file: FileId, span: Span) -> Claimed {
        let mut queue = self.lock(queue_of(file));
        let ticket = queue.next_ticket;
        queue.next_ticket += 1;
        queue.files.entry(file).or_default().wait(ticket, span);
        Claimed { stamps: self.clone(), file, ticket }
    }

    /// Waits until nobody else changes these bytes, and takes a stamp. Who came first goes
    /// first: a sync wants all of the file, and writers could keep it waiting for ever.
    pub(crate) async fn take(self: &Arc<Stamps>, file: FileId, span: Span) -> Stamped {
        let claimed = self.enter(file, span);
        let number = std::future::poll_fn(|task| {
            let mut queue = self.lock(queue_of(file));
            let claims = queue.files.get_mut(&file).expect("it is taken out by its end alone");
            let mut number = 0;
            let stamp = || {
                number = self.next();
                number
            };
            match claims.try_turn(claimed.ticket, span, task.waker(), stamp) {
                true => Poll::Ready(number),
                false => Poll::Pending,
            }
        })
        .await;
        Stamped { number, _claimed: claimed }
    }

    /// Whether a change of the file's data is being made, or waits for its turn.
    pub(crate) fn is_changing(&self, file: FileId) -> bool {
        self.lock(queue_of(file)).files.contains_key(&file)
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
                let mut queue = self.lock(queue);
                // Those that wait get later ones.
                let later =
                    |claims: &Claims<u64>| claims.having(Span::ALL).all(|number| *number > newest);
                if queue.files.values().all(later) {
                    return Poll::Ready(());
                }
                queue.settling.push(task.waker().clone());
                Poll::Pending
            })
            .await;
        }
        newest
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        let mut queue = self.stamps.lock(queue_of(self.file));
        let Some(claims) = queue.files.get_mut(&self.file) else { return };
        let wakers = claims.remove(self.ticket);
        if claims.is_empty() {
            queue.files.remove(&self.file);
        }
        let settling = std::mem::take(&mut queue.settling);
        drop(queue);
        wakers.into_iter().chain(settling).for_each(Waker::wake);
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
) -> Option<(FileId, Span)> {
    let of = |handle: u64| session.file(handle).map(|file: Arc<dyn OpenFile>| file.id());
    match call {
        Call::Write { handle, how } if how.append => Some((of(*handle)?, Span::ALL)),
        Call::Write { handle, how } => Some((of(*handle)?, Span::bytes(how.at, data_bytes as u64))),
        Call::Setattr { id, set, .. } => Some((*id, Span::from(set.size?))),
        Call::Allocate { handle, what } => {
            let moves = libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_INSERT_RANGE;
            let span = match what.flags & moves {
                0 => Span::bytes(what.at, what.len_bytes),
                _ => Span::ALL,
            };
            Some((of(*handle)?, span))
        }
        Call::CopyRange { to, to_at, len_bytes, .. } => {
            Some((of(*to)?, Span::bytes(*to_at, *len_bytes)))
        }
        Call::Open { id, how, .. } | Call::OpenNamed { id, how, .. } if how.truncates() => {
            Some((*id, Span::ALL))
        }
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
        let first = take(Span::bytes(0, 10)).expect("nobody is there");
        let apart = take(Span::bytes(10, 10)).expect("they do not touch");
        assert!(first.number < apart.number);
        assert!(take(Span::bytes(5, 10)).is_none());
        let mut task = TaskContext::from_waker(Waker::noop());
        assert!(pin!(stamps.settled()).poll(&mut task).is_pending());
        let newest = apart.number;
        drop((first, apart));
        assert_eq!(pin!(stamps.settled()).poll(&mut task), Poll::Ready(newest));
        stamps.begin_above(1000);
        assert_eq!(stamps.next(), 1001);
    }

    /// What has the newest stamp and is not over is not on media either.
    #[test]
    fn a_settled_stamp_waits_for_the_newest_change_too() {
        let stamps = Arc::new(Stamps::default());
        let file = FileId { ino: 3, generation: 1 };
        let mut task = TaskContext::from_waker(Waker::noop());
        let Poll::Ready(only) = pin!(stamps.take(file, Span::ALL)).poll(&mut task) else {
            panic!("nobody is there");
        };
        assert!(pin!(stamps.settled()).poll(&mut task).is_pending());
        let number = only.number;
        drop(only);
        assert_eq!(pin!(stamps.settled()).poll(&mut task), Poll::Ready(number));
    }

    /// A sync of a file waited as long as there was always some write to it under way.
    #[test]
    fn whoever_wants_all_of_a_file_is_not_passed_by_those_that_come_later() {
        let stamps = Arc::new(Stamps::default());
        let file = FileId { ino: 3, generation: 1 };
        let mut task = TaskContext::from_waker(Waker::noop());
        let mut polled = |take: std::pin::Pin<&mut dyn Future<Output = Stamped>>| {
            take.poll(&mut task).is_ready().then_some(())
        };
        let mut first = pin!(stamps.take(file, Span::bytes(0, 10)));
        let Poll::Ready(first) = first.as_mut().poll(&mut TaskContext::from_waker(Waker::noop()))
        else {
            panic!("nobody is there");
        };
        let mut all = pin!(stamps.take(file, Span::ALL));
        assert!(polled(all.as_mut()).is_none());
        {
            let mut later = pin!(stamps.take(file, Span::bytes(20, 10)));
            assert!(polled(later.as_mut()).is_none(), "it came later");
            let other = FileId { ino: 3, generation: 2 };
            assert!(polled(pin!(stamps.take(other, Span::bytes(20, 10)))).is_some());
        }
        drop(first);
        assert!(polled(all.as_mut()).is_some());
    }
}
