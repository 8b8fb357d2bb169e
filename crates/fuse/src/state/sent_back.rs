//! Who was sent back to look names up ([`crate::front::believed`]).
//!
//! It outlives the daemon: the kernel takes ESTALE for an answer at the second time, and the second
//! time may come to a successor. So may a request that a daemon died over, which is made once more and
//! must come to the same.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{FileId, Pid, RequestId};
use dray_rt::{Instant, now};

use crate::state::{HEADER_BYTES, RECORD_BYTES, State, header};

/// Threads that are remembered; of more the oldest are forgotten.
pub(crate) const RECORDS: usize = 120;
const _: () = assert!(header::SENT_BACK + RECORDS * RECORD_BYTES <= HEADER_BYTES);
/// How long: the kernel comes again at once.
const AGAIN_WITHIN: Duration = Duration::from_secs(1);
/// How long after its beginning a daemon may be asked for what its predecessor died over.
const INHERITED: Duration = Duration::from_secs(10);

/// Words of a record. A thread of number 0 is none.
const THREAD: usize = 0;
const INO: usize = 8;
const GENERATION: usize = 16;
/// The request that was sent back; once it came again, that one and `CAME`.
const REQUEST: usize = 24;
/// A bit that no number of a request has: the kernel counts in twos (`FUSE_REQ_ID_STEP`,
/// fs/fuse/dev.c).
const CAME: u64 = 1;

/// A request to open a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Opening {
    pub(crate) thread: Pid,
    /// What it was sent back from, or has found since.
    pub(crate) file: FileId,
    pub(crate) request: RequestId,
}

pub(crate) struct SentBack {
    state: State,
    /// There may be some.
    any: AtomicBool,
    /// Until when each is remembered.
    until: Mutex<[Instant; RECORDS]>,
    /// Until then a predecessor's requests may come once more.
    inherits_until: Option<Instant>,
}

impl SentBack {
    /// Whom a predecessor has sent back, if there was one.
    pub(crate) fn new(state: State, adopted: bool) -> SentBack {
        let until = Mutex::new([now() + AGAIN_WITHIN; RECORDS]);
        let inherits_until = adopted.then(|| now() + INHERITED);
        let sent_back = SentBack { state, any: AtomicBool::new(false), until, inherits_until };
        sent_back.look_for_any();
        sent_back
    }

    /// Lookups look no further where there are none: under `strict` nobody is ever sent back.
    fn look_for_any(&self) {
        let any = (0..RECORDS).any(|record| self.get(record, THREAD) != 0);
        self.any.store(any, Ordering::Release);
    }

    /// Whether a request may be one that a predecessor died over.
    pub(crate) fn inherits(&self) -> bool {
        self.inherits_until.is_some_and(|until| now() < until)
    }

    fn lock(&self) -> MutexGuard<'_, [Instant; RECORDS]> {
        self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, record: usize, word: usize) -> u64 {
        self.state.region.load(header::SENT_BACK + record * RECORD_BYTES + word)
    }

    fn set(&self, record: usize, word: usize, value: u64) {
        self.state.region.store(header::SENT_BACK + record * RECORD_BYTES + word, value);
    }

    fn file(&self, record: usize) -> FileId {
        FileId { ino: self.get(record, INO), generation: self.get(record, GENERATION) }
    }

    fn set_file(&self, record: usize, file: FileId) {
        self.set(record, INO, file.ino);
        self.set(record, GENERATION, file.generation);
    }

    fn of_thread(&self, thread: Pid) -> Option<usize> {
        (0..RECORDS).find(|record| self.get(*record, THREAD) == u64::from(thread.0))
    }

    /// A request is about to be answered by ESTALE. If it was before, by a predecessor, its thread may
    /// have gone on.
    pub(crate) fn note(&self, opening: Opening) {
        let mut until = self.lock();
        let noted = self.of_thread(opening.thread);
        if noted.is_some_and(|record| self.get(record, REQUEST) & !CAME == opening.request.0) {
            return;
        }
        let free = noted.or_else(|| self.of_thread(Pid(0)));
        let oldest = || (0..RECORDS).min_by_key(|record| until[*record]);
        let Some(record) = free.or_else(oldest) else { return };
        // A kill in between must not leave half of it.
        self.set(record, THREAD, 0);
        self.set_file(record, opening.file);
        self.set(record, REQUEST, opening.request.0);
        self.set(record, THREAD, opening.thread.0.into());
        until[record] = now() + AGAIN_WITHIN;
        self.any.store(true, Ordering::Release);
    }

    /// A thread has looked a name up, and is about to be told.
    pub(crate) fn finds(&self, thread: Pid, found: Option<FileId>) {
        if !self.any.load(Ordering::Acquire) || thread == Pid(0) {
            return;
        }
        let _until = self.lock();
        match (self.of_thread(thread), found) {
            (Some(record), Some(file)) => self.set_file(record, file),
            (Some(record), None) => self.set(record, THREAD, 0),
            (None, _) => {}
        }
    }

    /// A thread opens something. Whether it was sent back just before, and comes to this; if to
    /// something else, that it was sent back is over. A request that a daemon died over is what it was.
    pub(crate) fn comes(&self, opening: Opening) -> bool {
        if !self.any.load(Ordering::Acquire) || opening.thread == Pid(0) {
            return false;
        }
        let until = self.lock();
        let now = now();
        for record in (0..RECORDS).filter(|record| until[*record] <= now) {
            self.set(record, THREAD, 0);
        }
        let came = self.of_thread(opening.thread).is_some_and(|record| {
            let before = self.get(record, REQUEST);
            if before & !CAME == opening.request.0 {
                return before & CAME != 0;
            }
            let again = before & CAME == 0 && self.file(record) == opening.file;
            match again {
                true => self.set(record, REQUEST, opening.request.0 | CAME),
                false => self.set(record, THREAD, 0),
            }
            again
        });
        self.look_for_any();
        came
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(ino: u64) -> FileId {
        FileId { ino, generation: 1 }
    }

    fn opening(thread: u32, ino: u64, request: u64) -> Opening {
        Opening { thread: Pid(thread), file: file(ino), request: RequestId(2 * request) }
    }

    fn simulated(test: impl AsyncFnOnce()) {
        let mut executor =
            dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 1 }).unwrap();
        executor.block_on(test());
    }

    #[test]
    fn who_was_sent_back_is_let_through_once_and_soon() {
        simulated(async || {
            let list = SentBack::new(State::create().unwrap(), false);
            assert!(!list.any.load(Ordering::SeqCst), "each lookup would search for its thread");
            assert!(!list.comes(opening(1, 7, 1)));
            list.note(opening(1, 7, 2));
            assert!(!list.comes(opening(2, 7, 3)) && !list.comes(opening(0, 7, 4)));
            assert!(list.comes(opening(1, 7, 5)) && !list.comes(opening(1, 7, 6)));
            // Whoever found another file by its name comes to the first one by a name again.
            list.note(opening(1, 7, 7));
            assert!(!list.comes(opening(1, 8, 8)) && !list.comes(opening(1, 7, 9)));
            // What it found is what it comes to now, or nothing.
            list.note(opening(1, 7, 10));
            list.finds(Pid(2), None);
            list.finds(Pid(1), Some(file(9)));
            assert!(list.comes(opening(1, 9, 11)));
            list.note(opening(1, 7, 12));
            list.finds(Pid(1), None);
            assert!(!list.comes(opening(1, 7, 13)));
            list.note(opening(1, 7, 14));
            dray_rt::sleep(AGAIN_WITHIN).await;
            assert!(!list.comes(opening(1, 7, 15)) && !list.any.load(Ordering::SeqCst));
        });
    }

    #[test]
    fn the_oldest_are_forgotten() {
        simulated(async || {
            let list = SentBack::new(State::create().unwrap(), false);
            for thread in 1..=RECORDS as u32 + 1 {
                list.note(opening(thread, 7, thread.into()));
                dray_rt::sleep(Duration::from_micros(1)).await;
            }
            assert!(!list.comes(opening(1, 7, 1000)));
            (2..=RECORDS as u32 + 1).for_each(|thread| {
                assert!(list.comes(opening(thread, 7, 1000 + u64::from(thread))));
            });
        });
    }

    /// It may have died before the answer or behind it.
    #[test]
    fn a_successor_goes_on_where_its_predecessor_died() {
        simulated(async || {
            let state = State::create().unwrap();
            let next = || SentBack::new(state.clone(), true);
            next().note(opening(1, 7, 1));
            assert!(next().any.load(Ordering::SeqCst));
            assert!(!next().comes(opening(1, 7, 1)), "it was not told");
            next().note(opening(1, 7, 1));
            next().finds(Pid(1), Some(file(8)));
            assert!(!next().comes(opening(1, 7, 1)), "it was told: nobody waits any more");
            next().note(opening(1, 7, 1));
            assert!(next().comes(opening(1, 8, 2)));
            assert!(next().comes(opening(1, 8, 2)), "it was not told");
            assert!(!next().comes(opening(1, 8, 3)));
        });
    }
}
