//! Who is in the file system below, and since when: how one that hangs is noticed.
//!
//! A thread leaves a mark when it begins a call for an export and when the call ends: two
//! stores to memory of its own, and no look at a clock. Whoever looks at the marks reads
//! the clock: a call that stood there at an earlier look has lasted at least since then.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use dray_rt::Instant;

/// Names an export among all of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Watched(u64);

/// What lasts, of one export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lasting {
    pub(crate) calls: usize,
    /// How long the longest of them has lasted at least.
    pub(crate) longest: Duration,
}

/// One thread's mark, on a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct Mark {
    /// Counts beginnings and ends of calls: odd inside of one.
    count: AtomicU64,
    export: AtomicU64,
    seen: Mutex<Option<Seen>>,
}

/// What the last look saw.
#[derive(Clone, Copy)]
struct Seen {
    count: u64,
    since: Instant,
}

static MARKS: Mutex<Vec<Weak<Mark>>> = Mutex::new(Vec::new());

thread_local! {
    static MARK: Arc<Mark> = new_mark();
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn new_mark() -> Arc<Mark> {
    let mark = Arc::new(Mark::default());
    let mut marks = lock(&MARKS);
    marks.retain(|mark| mark.strong_count() > 0); // threads end
    marks.push(Arc::downgrade(&mark));
    mark
}

impl Watched {
    /// A name that nobody else has.
    pub(crate) fn new() -> Watched {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Watched(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Does `work`, a call to the file system below, under this thread's mark.
    pub(crate) fn mark<T>(self, work: impl FnOnce() -> T) -> T {
        struct Inside<'a>(&'a Mark);
        impl Drop for Inside<'_> {
            fn drop(&mut self) {
                let count = self.0.count.load(Ordering::Relaxed);
                self.0.count.store(count + 1, Ordering::Relaxed);
            }
        }
        MARK.with(|mark| {
            mark.export.store(self.0, Ordering::Relaxed);
            let count = mark.count.load(Ordering::Relaxed);
            mark.count.store(count | 1, Ordering::Relaxed);
            let _inside = Inside(mark);
            work()
        })
    }

    /// Calls that have lasted for `least` or longer, as far as earlier looks can tell.
    pub(crate) fn lasting(self, least: Duration) -> Option<Lasting> {
        let marks: Vec<_> = lock(&MARKS).iter().filter_map(Weak::upgrade).collect();
        let mine = marks.iter().filter(|mark| mark.export.load(Ordering::Relaxed) == self.0);
        let ages = mine.filter_map(|mark| mark.look()).filter(|age| *age >= least);
        ages.fold(None, |sum: Option<Lasting>, age| {
            let (calls, longest) = sum.map_or((0, age), |sum| (sum.calls, sum.longest.max(age)));
            Some(Lasting { calls: calls + 1, longest })
        })
    }
}

impl Mark {
    /// How long the call that the thread is in has been seen to last; none outside of one.
    fn look(&self) -> Option<Duration> {
        let count = self.count.load(Ordering::Relaxed);
        let mut seen = lock(&self.seen);
        if count.is_multiple_of(2) {
            *seen = None;
            return None;
        }
        let now = dray_rt::now();
        let last = seen.filter(|seen| seen.count == count).unwrap_or(Seen { count, since: now });
        *seen = Some(last);
        Some(now - last.since)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn only_a_call_that_lasts_is_seen_and_only_of_its_export() {
        let (mine, other) = (Watched::new(), Watched::new());
        let (inside, is_inside) = mpsc::channel();
        let (thaw, frozen) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            mine.mark(|| ()); // over at once
            mine.mark(|| {
                inside.send(()).unwrap();
                frozen.recv().unwrap();
            });
            inside.send(()).unwrap();
            frozen.recv().unwrap();
        });
        is_inside.recv().unwrap();
        assert_eq!(mine.lasting(Duration::from_millis(20)), None, "it has only begun");
        std::thread::sleep(Duration::from_millis(30));
        let lasting = mine.lasting(Duration::from_millis(20)).unwrap();
        assert_eq!(lasting.calls, 1);
        assert!(lasting.longest >= Duration::from_millis(30));
        assert_eq!(other.lasting(Duration::ZERO), None);
        thaw.send(()).unwrap();
        is_inside.recv().unwrap();
        assert_eq!(mine.lasting(Duration::ZERO), None);
        thaw.send(()).unwrap();
        thread.join().unwrap();
    }

    #[test]
    fn calls_one_after_the_other_do_not_last() {
        let mine = Watched::new();
        let (inside, is_inside) = mpsc::channel();
        let (thaw, frozen) = mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            for _ in 0..3 {
                mine.mark(|| {
                    inside.send(()).unwrap();
                    frozen.recv().unwrap();
                });
            }
        });
        for _ in 0..3 {
            is_inside.recv().unwrap();
            // It was not there at the look before.
            let first = mine.lasting(Duration::ZERO).unwrap();
            assert_eq!(first, Lasting { calls: 1, longest: Duration::ZERO });
            std::thread::sleep(Duration::from_millis(10));
            assert!(mine.lasting(Duration::ZERO).unwrap().longest >= Duration::from_millis(10));
            thaw.send(()).unwrap();
        }
        thread.join().unwrap();
    }
}
