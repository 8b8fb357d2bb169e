//! Keeps reads and writes of one file from seeing each other half done.
//!
//! ext4, tmpfs and others copy page by page, so that a read beside a write can return some
//! old and some new pages. Ranges of one inode that are read (shared) or written
//! (exclusive) are registered here in the order of their arrival; one that overlaps an
//! earlier one it cannot share with waits. Uncontended that is two uses of a mutex, some
//! 30 ns beside the 600 ns and more of a read of 4 KiB.
//!
//! Nobody waits on a thread: those whose range is in use are tasks, and have no thread meanwhile.
//! How many there are is bounded by the calls that connections may have under way.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use super::files::OpenInode;

/// The ranges in use of one inode.
#[derive(Default)]
pub(crate) struct Ranges(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    /// In order of arrival: those in use, and those that wait for an earlier one.
    entries: Vec<Entry>,
    next: u64,
}

struct Entry {
    number: u64,
    range: Range,
    /// Of who waits; none: it is in use.
    waker: Option<Waker>,
}

#[derive(Clone, Copy)]
struct Range {
    start: u64,
    end: u64,
    exclusive: bool,
}

impl Range {
    fn excludes(self, other: Range) -> bool {
        (self.exclusive || other.exclusive) && self.start < other.end && other.start < self.end
    }

    fn covers(self, other: Range) -> bool {
        self.start <= other.start && other.end <= self.end
    }
}

/// A range in use, or a place in the queue for it, until it is dropped.
pub(crate) struct Held {
    inode: Arc<OpenInode>,
    number: u64,
}

impl OpenInode {
    /// Takes `start..start + len_bytes`, if that is free.
    pub(crate) fn try_take(
        self: &Arc<OpenInode>,
        start: u64,
        len_bytes: u64,
        exclusive: bool,
    ) -> Option<Held> {
        let range = Range { start, end: start.saturating_add(len_bytes), exclusive };
        let mut queue = self.ranges.lock();
        if queue.entries.iter().any(|earlier| earlier.range.excludes(range)) {
            return None;
        }
        let number = queue.push(range, None);
        drop(queue);
        Some(Held { inode: self.clone(), number })
    }

    /// Takes `start..start + len_bytes`, behind those that came before.
    pub(crate) async fn take(
        self: &Arc<OpenInode>,
        start: u64,
        len_bytes: u64,
        exclusive: bool,
    ) -> Held {
        if let Some(held) = self.try_take(start, len_bytes, exclusive) {
            return held; // nearly always
        }
        let range = Range { start, end: start.saturating_add(len_bytes), exclusive };
        let number = self.ranges.lock().push(range, Some(Waker::noop().clone()));
        let held = Held { inode: self.clone(), number };
        std::future::poll_fn(|task| self.ranges.lock().poll_turn(number, task.waker())).await;
        held
    }
}

impl Ranges {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn push(&mut self, range: Range, waker: Option<Waker>) -> u64 {
        let number = self.next;
        self.next += 1;
        self.entries.push(Entry { number, range, waker });
        number
    }

    /// Entries are in the order of their numbers.
    fn position(&self, number: u64) -> Option<usize> {
        self.entries.binary_search_by_key(&number, |entry| entry.number).ok()
    }

    fn poll_turn(&mut self, number: u64, waker: &Waker) -> Poll<()> {
        let Some(at) = self.position(number) else { return Poll::Ready(()) };
        let barred = self.is_barred(at);
        if let Some(entry) = self.entries.get_mut(at) {
            entry.waker = barred.then(|| waker.clone());
        }
        if barred { Poll::Pending } else { Poll::Ready(()) }
    }

    /// Whether somebody before this one excludes it.
    fn is_barred(&self, at: usize) -> bool {
        let Some(entry) = self.entries.get(at) else { return false };
        let mut before = self.entries.iter().take(at);
        before.any(|other| other.range.excludes(entry.range))
    }

    /// Takes one out. Answers whom to wake: those whose turn it is by that.
    fn remove(&mut self, number: u64) -> Vec<Waker> {
        let Some(at) = self.position(number) else { return Vec::new() };
        let gone = self.entries.remove(at).range;
        let mut wakers = Vec::new();
        for (at, entry) in self.entries.iter().enumerate().skip(at) {
            if !entry.range.excludes(gone) {
                continue;
            }
            if let Some(waker) = &entry.waker
                && !self.is_barred(at)
            {
                wakers.push(waker.clone());
            }
            if entry.range.exclusive && entry.range.covers(gone) {
                break; // whoever comes behind it, and wants some of that, waits for it
            }
        }
        wakers
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let wakers = self.inode.ranges.lock().remove(self.number);
        wakers.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake};

    use super::*;

    #[test]
    fn only_overlapping_writes_exclude() {
        let ranges = OpenInode::lone();
        let read = ranges.try_take(0, 100, false).unwrap();
        assert!(ranges.try_take(50, 100, false).is_some());
        assert!(ranges.try_take(100, 1, true).is_some());
        assert!(ranges.try_take(99, 1, true).is_none());
        drop(read);
        let write = ranges.try_take(99, 1, true).unwrap();
        assert!(ranges.try_take(0, u64::MAX, false).is_none());
        drop(write);
        assert!(ranges.try_take(0, u64::MAX, true).is_some());
    }

    #[test]
    fn whoever_came_first_goes_first_and_nobody_waits_on_a_thread() {
        let ranges = OpenInode::lone();
        let mut task = Context::from_waker(Waker::noop());
        let reader = ranges.try_take(0, 10, false).unwrap();
        let mut writer = pin!(ranges.take(0, 10, true));
        assert!(writer.as_mut().poll(&mut task).is_pending());
        // A reader that comes now stands behind the writer.
        assert!(ranges.try_take(0, 10, false).is_none());
        drop(reader);
        let Poll::Ready(held) = writer.as_mut().poll(&mut task) else { panic!("it waits") };
        assert!(ranges.try_take(0, 10, false).is_none());
        drop(held);
        assert!(ranges.try_take(0, 10, false).is_some());
    }

    #[test]
    fn who_waits_no_more_is_in_nobodys_way() {
        let ranges = OpenInode::lone();
        let mut task = Context::from_waker(Waker::noop());
        let _reader = ranges.try_take(0, 10, false).unwrap();
        {
            let mut writer = pin!(ranges.take(0, 10, true));
            assert!(writer.as_mut().poll(&mut task).is_pending());
        }
        assert!(ranges.try_take(0, 10, false).is_some());
    }

    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Woken>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Against the plainest model: of all that wait, those that nobody before them excludes.
    #[test]
    fn any_sequence_wakes_all_whose_turn_it_is_and_nobody_else() {
        let mut random = 12345u64;
        let mut pick = move |below: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) % below
        };
        for _ in 0..200 {
            let mut queue = Queue::default();
            // Number, range, its waker's counter, whether it has its turn.
            let mut model: Vec<(u64, Range, Arc<Woken>, bool)> = Vec::new();
            for _ in 0..40 {
                let start = pick(12);
                let range = Range { start, end: start + 1 + pick(12), exclusive: pick(2) == 0 };
                let woken = Arc::new(Woken(AtomicUsize::new(0)));
                let number = queue.push(range, Some(Waker::noop().clone()));
                let has = queue.poll_turn(number, &Waker::from(woken.clone())).is_ready();
                assert_eq!(has, !model.iter().any(|(_, other, ..)| other.excludes(range)));
                model.push((number, range, woken, has));
                if pick(3) == 0 {
                    continue;
                }
                let (gone, ..) = model.remove(pick(model.len() as u64) as usize);
                queue.remove(gone).into_iter().for_each(Waker::wake);
                for at in 0..model.len() {
                    let (number, range, woken, has) = model[at].clone();
                    let free = !model[..at].iter().any(|(_, other, ..)| other.excludes(range));
                    assert_eq!(woken.0.swap(0, Ordering::SeqCst), usize::from(free && !has));
                    if free && !has {
                        assert!(queue.poll_turn(number, Waker::noop()).is_ready());
                        model[at].3 = true;
                    }
                }
            }
        }
    }
}
