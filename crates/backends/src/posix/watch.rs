//! Watches the calls to the file systems below, to notice one that hangs.
//!
//! A thread changes a mark of its own when it begins a call for an export, and again when the call ends.
//! That costs two stores to memory of the thread, and no look at a clock. The check of the marks reads
//! the clock. A call that an earlier check saw has lasted at least since that check.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use dray_rt::Instant;

/// Names an export among all of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExportWatch(u64);

/// What lasts, of one export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LastingCalls {
    pub(crate) calls: usize,
    /// How long the longest of them has lasted at least.
    pub(crate) longest: Duration,
}

/// One thread's mark, on a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct ThreadMark {
    /// The kernel's number of the thread.
    thread: i32,
    /// Counts beginnings and ends of calls: odd inside of one.
    count: AtomicU64,
    export: AtomicU64,
    seen: Mutex<Option<SeenCall>>,
}

/// What the last look saw.
#[derive(Clone, Copy)]
struct SeenCall {
    count: u64,
    since: Instant,
}

static MARKS: Mutex<Vec<Weak<ThreadMark>>> = Mutex::new(Vec::new());

thread_local! {
    static MARK: Arc<ThreadMark> = new_mark();
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn new_mark() -> Arc<ThreadMark> {
    // SAFETY: the call cannot fail.
    let thread = unsafe { libc::gettid() };
    let mark = Arc::new(ThreadMark { thread, ..ThreadMark::default() });
    let mut marks = lock(&MARKS);
    marks.retain(|mark| mark.strong_count() > 0); // threads end
    marks.push(Arc::downgrade(&mark));
    mark
}

impl ExportWatch {
    /// A number that no other export of the process has.
    pub(crate) fn new() -> ExportWatch {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        ExportWatch(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Does `work`, a call to the file system below, under this thread's mark.
    pub(crate) fn mark<T>(self, work: impl FnOnce() -> T) -> T {
        struct SeenInside<'a>(&'a ThreadMark);
        impl Drop for SeenInside<'_> {
            fn drop(&mut self) {
                let count = self.0.count.load(Ordering::Relaxed);
                self.0.count.store(count + 1, Ordering::Relaxed);
            }
        }
        MARK.with(|mark| {
            mark.export.store(self.0, Ordering::Relaxed);
            let count = mark.count.load(Ordering::Relaxed);
            mark.count.store(count | 1, Ordering::Relaxed);
            let _inside = SeenInside(mark);
            work()
        })
    }

    /// The threads whose last call was for this export.
    pub(crate) fn threads(self) -> HashSet<i32> {
        let marks = lock(&MARKS);
        let marks = marks.iter().filter_map(Weak::upgrade);
        let mine = marks.filter(|mark| mark.export.load(Ordering::Relaxed) == self.0);
        mine.map(|mark| mark.thread).collect()
    }

    /// Calls that have lasted for `least` or longer, as far as earlier looks can tell.
    pub(crate) fn lasting(self, least: Duration) -> Option<LastingCalls> {
        let marks: Vec<_> = lock(&MARKS).iter().filter_map(Weak::upgrade).collect();
        let mine = marks.iter().filter(|mark| mark.export.load(Ordering::Relaxed) == self.0);
        let ages = mine.filter_map(|mark| mark.look()).filter(|age| *age >= least);
        ages.fold(None, |sum: Option<LastingCalls>, age| {
            let (calls, longest) = sum.map_or((0, age), |sum| (sum.calls, sum.longest.max(age)));
            Some(LastingCalls { calls: calls + 1, longest })
        })
    }
}

impl ThreadMark {
    /// How long the call that the thread is in has been seen to last; none outside of one.
    fn look(&self) -> Option<Duration> {
        let count = self.count.load(Ordering::Relaxed);
        let mut seen = lock(&self.seen);
        if count.is_multiple_of(2) {
            *seen = None;
            return None;
        }
        let now = dray_rt::now();
        let last =
            seen.filter(|seen| seen.count == count).unwrap_or(SeenCall { count, since: now });
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
        let (mine, other) = (ExportWatch::new(), ExportWatch::new());
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
        let mine = ExportWatch::new();
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
            // The call was not there at the look before.
            let first = mine.lasting(Duration::ZERO).unwrap();
            assert_eq!(first, LastingCalls { calls: 1, longest: Duration::ZERO });
            std::thread::sleep(Duration::from_millis(10));
            assert!(mine.lasting(Duration::ZERO).unwrap().longest >= Duration::from_millis(10));
            thaw.send(()).unwrap();
        }
        thread.join().unwrap();
    }
}
