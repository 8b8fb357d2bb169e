//! Callers that were answered with ESTALE, so that they look names up again ([`crate::front::believed`]).
//!
//! It outlives the daemon: the kernel takes ESTALE for an answer at the second time, and the second
//! time may come to a successor. So may a request that a daemon died over, which is made once more and
//! must come to the same.
//!
//! A call looks names up again, perhaps several times, before it opens what it has found last.
//! Others may have given a name away and taken it meanwhile. Another call of the thread has nothing
//! to do with that. It is recognised by its print
//! ([`SystemCall`](crate::worker::caller::SystemCall)), where that is to be seen. Where not, one
//! look that finds nothing is taken for the end of the call.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{FileId, Pid, RequestId};
use dray_rt::{Instant, now};

use crate::state::{HEADER_BYTES, RECORD_BYTES, State, header};

/// Threads that are remembered; of more the oldest are forgotten.
pub(crate) const RECORDS: usize = 120;
const _: () = assert!(header::STALE_RETRIES + RECORDS * RECORD_BYTES <= HEADER_BYTES);
/// How long: the kernel comes again at once.
const AGAIN_WITHIN: Duration = Duration::from_secs(1);
/// How long after its beginning a daemon may be asked for what its predecessor died over.
const INHERITED: Duration = Duration::from_secs(10);

/// Words of a record. A thread of number 0 is none; in the upper half the print of its call, or 0.
const THREAD: usize = 0;
const INO: usize = 8;
const GENERATION: usize = 16;
/// The request that was answered with ESTALE; once it came again, that one and `CAME`.
const REQUEST: usize = 24;
/// A bit that no number of a request has: the kernel counts in twos (`FUSE_REQ_ID_STEP`,
/// fs/fuse/dev.c).
const CAME: u64 = 1;

/// What a call finds where there is nothing; no file has this id.
pub(crate) const NOTHING: FileId = FileId { ino: 0, generation: 0 };

/// The caller that asks: a thread, and in which call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RetryCaller {
    pub(crate) thread: Pid,
    /// The print of the call, where that is seen; of who is to be noted, if it is one that opens files.
    pub(crate) call: Option<NonZeroU32>,
}

/// What is known of the call of a record and that of a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Calls {
    Same,
    Other,
    Unknown,
}

/// A request to open a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RetriedOpen {
    pub(crate) caller: RetryCaller,
    /// The file whose open was answered with ESTALE, or the file found since.
    pub(crate) file: FileId,
    pub(crate) request: RequestId,
}

pub(crate) struct StaleRetries {
    state: State,
    /// There may be some.
    any: AtomicBool,
    /// Until when each is remembered.
    until: Mutex<[Instant; RECORDS]>,
    /// Until then a predecessor's requests may come once more.
    inherits_until: Option<Instant>,
}

impl StaleRetries {
    /// Callers that a predecessor answered with ESTALE, if there was one.
    pub(crate) fn new(state: State, adopted: bool) -> StaleRetries {
        let until = Mutex::new([now() + AGAIN_WITHIN; RECORDS]);
        let inherits_until = adopted.then(|| now() + INHERITED);
        let stale_retries =
            StaleRetries { state, any: AtomicBool::new(false), until, inherits_until };
        stale_retries.look_for_any();
        stale_retries
    }

    /// Lookups look no further where there are none: under `strict` no caller is ever answered with ESTALE.
    fn look_for_any(&self) {
        let any = (0..RECORDS).any(|record| self.thread(record) != Pid(0));
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
        self.state.region.load(header::STALE_RETRIES + record * RECORD_BYTES + word)
    }

    fn set(&self, record: usize, word: usize, value: u64) {
        self.state.region.store(header::STALE_RETRIES + record * RECORD_BYTES + word, value);
    }

    fn file(&self, record: usize) -> FileId {
        FileId { ino: self.get(record, INO), generation: self.get(record, GENERATION) }
    }

    fn set_file(&self, record: usize, file: FileId) {
        self.set(record, INO, file.ino);
        self.set(record, GENERATION, file.generation);
    }

    fn thread(&self, record: usize) -> Pid {
        Pid(self.get(record, THREAD) as u32)
    }

    fn set_caller(&self, record: usize, RetryCaller { thread, call }: RetryCaller) {
        let print = call.map_or(0, NonZeroU32::get);
        self.set(record, THREAD, u64::from(print) << 32 | u64::from(thread.0));
    }

    fn of_thread(&self, thread: Pid) -> Option<usize> {
        (0..RECORDS).find(|record| self.thread(*record) == thread)
    }

    fn calls(&self, record: usize, caller: RetryCaller) -> Calls {
        let noted = NonZeroU32::new((self.get(record, THREAD) >> 32) as u32);
        match (noted, caller.call) {
            (Some(noted), Some(call)) if noted == call => Calls::Same,
            (Some(_), Some(_)) => Calls::Other,
            _ => Calls::Unknown,
        }
    }

    /// Whether anything depends on the call that the thread is in.
    pub(crate) fn remembers(&self, thread: Pid) -> bool {
        if !self.any.load(Ordering::Acquire) || thread == Pid(0) {
            return false;
        }
        let _until = self.lock();
        self.of_thread(thread).is_some()
    }

    /// Whether `request` is known to have been answered with ESTALE, or to be the retry.
    pub(crate) fn knows(&self, thread: Pid, request: RequestId) -> bool {
        let _until = self.lock();
        self.of_thread(thread).is_some_and(|record| self.is_of(record, request))
    }

    fn is_of(&self, record: usize, request: RequestId) -> bool {
        self.get(record, REQUEST) & !CAME == request.0
    }

    /// A request is about to be answered by ESTALE. If it was before, by a predecessor, its thread may
    /// have gone on.
    pub(crate) fn note(&self, opening: RetriedOpen) {
        let mut until = self.lock();
        let noted = self.of_thread(opening.caller.thread);
        if noted.is_some_and(|record| self.is_of(record, opening.request)) {
            return;
        }
        let free = noted.or_else(|| self.of_thread(Pid(0)));
        let oldest = || (0..RECORDS).min_by_key(|record| until[*record]);
        let Some(record) = free.or_else(oldest) else { return };
        // A kill in between must not leave half of it.
        self.set(record, THREAD, 0);
        self.set_file(record, opening.file);
        self.set(record, REQUEST, opening.request.0);
        self.set_caller(record, opening.caller);
        until[record] = now() + AGAIN_WITHIN;
        self.any.store(true, Ordering::Release);
    }

    /// A thread has looked a name up, and is about to get the answer.
    pub(crate) fn finds(&self, caller: RetryCaller, found: Option<FileId>) {
        let mut until = self.lock();
        let Some(record) = self.of_thread(caller.thread) else { return };
        match (self.calls(record, caller), found) {
            (Calls::Same, found) => {
                self.set_file(record, found.unwrap_or(NOTHING));
                until[record] = now() + AGAIN_WITHIN;
            }
            (Calls::Unknown, Some(file)) => self.set_file(record, file),
            (Calls::Other, _) | (Calls::Unknown, None) => self.set(record, THREAD, 0),
        }
    }

    /// A thread opens something. Whether it was answered with ESTALE just before, and comes to this; if to
    /// something else, the ESTALE counts no more. A request that a daemon died over is what it was.
    pub(crate) fn comes(&self, opening: RetriedOpen) -> bool {
        let thread = opening.caller.thread;
        if !self.any.load(Ordering::Acquire) || thread == Pid(0) {
            return false;
        }
        let until = self.lock();
        let now = now();
        for record in (0..RECORDS).filter(|record| until[*record] <= now) {
            self.set(record, THREAD, 0);
        }
        let came = self.of_thread(thread).is_some_and(|record| {
            let before = self.get(record, REQUEST);
            if self.is_of(record, opening.request) {
                return before & CAME != 0;
            }
            let again = before & CAME == 0
                && self.file(record) == opening.file
                && self.calls(record, opening.caller) != Calls::Other;
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

    /// In a call that cannot be seen.
    fn unseen(thread: u32) -> RetryCaller {
        RetryCaller { thread: Pid(thread), call: None }
    }

    fn opening(thread: u32, ino: u64, request: u64) -> RetriedOpen {
        RetriedOpen { caller: unseen(thread), file: file(ino), request: RequestId(2 * request) }
    }

    fn simulated(test: impl AsyncFnOnce()) {
        let mut executor =
            dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 1 }).unwrap();
        executor.block_on(test());
    }

    #[test]
    fn a_caller_that_retries_after_estale_is_let_through_once_and_soon() {
        simulated(async || {
            let list = StaleRetries::new(State::create().unwrap(), false);
            assert!(!list.any.load(Ordering::SeqCst), "each lookup would search for its thread");
            assert!(!list.comes(opening(1, 7, 1)));
            list.note(opening(1, 7, 2));
            assert!(list.knows(Pid(1), RequestId(4)) && !list.knows(Pid(2), RequestId(4)));
            assert!(!list.comes(opening(2, 7, 3)) && !list.comes(opening(0, 7, 4)));
            assert!(list.comes(opening(1, 7, 5)) && !list.comes(opening(1, 7, 6)));
            // A thread that found another file by its name comes to the first one by a name again.
            list.note(opening(1, 7, 7));
            assert!(!list.comes(opening(1, 8, 8)) && !list.comes(opening(1, 7, 9)));
            // What it found is what it comes to now, or nothing.
            list.note(opening(1, 7, 10));
            list.finds(unseen(2), None);
            list.finds(unseen(1), Some(file(9)));
            assert!(list.comes(opening(1, 9, 11)));
            list.note(opening(1, 7, 12));
            list.finds(unseen(1), None);
            assert!(!list.comes(opening(1, 7, 13)));
            list.note(opening(1, 7, 14));
            dray_rt::sleep(AGAIN_WITHIN).await;
            assert!(!list.comes(opening(1, 7, 15)) && !list.any.load(Ordering::SeqCst));
        });
    }

    /// Others give the name away and take it between the looks of a call: within a call that is no
    /// end.
    #[test]
    fn what_a_call_has_found_last_is_what_counts_and_no_other_call() {
        simulated(async || {
            let list = StaleRetries::new(State::create().unwrap(), false);
            let caller = |call| RetryCaller { thread: Pid(1), call: NonZeroU32::new(call) };
            let opens = |call, ino, request| RetriedOpen {
                caller: caller(call),
                ..opening(1, ino, request)
            };
            list.note(opens(5, 7, 1));
            list.finds(caller(5), None);
            assert!(list.remembers(Pid(1)) && !list.remembers(Pid(2)) && !list.remembers(Pid(0)));
            list.finds(caller(5), Some(file(8)));
            assert!(list.comes(opens(5, 8, 2)));
            // However long the server takes.
            list.note(opens(5, 7, 3));
            (0..3).for_each(|_| list.finds(caller(5), None));
            dray_rt::sleep(AGAIN_WITHIN).await;
            list.finds(caller(5), Some(file(8)));
            assert!(list.comes(opens(5, 8, 4)));
            // The call ended with nothing. The next call looks for itself, or opens the file that
            // it believes in.
            list.note(opens(5, 7, 5));
            list.finds(caller(5), None);
            list.finds(caller(6), Some(file(8)));
            assert!(!list.remembers(Pid(1)) && !list.comes(opens(6, 8, 6)));
            list.note(opens(5, 7, 7));
            assert!(!list.comes(opens(6, 7, 8)) && !list.remembers(Pid(1)));
            // A call that found nothing is not to open a file, whatever the request.
            list.note(opens(5, 7, 9));
            list.finds(caller(5), None);
            assert!(!list.comes(opens(5, 7, 10)));
        });
    }

    #[test]
    fn the_oldest_are_forgotten() {
        simulated(async || {
            let list = StaleRetries::new(State::create().unwrap(), false);
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

    /// The predecessor may have died before the answer or behind it.
    // proves: P6
    #[test]
    fn a_successor_goes_on_where_its_predecessor_died() {
        simulated(async || {
            let state = State::create().unwrap();
            let next = || StaleRetries::new(state.clone(), true);
            next().note(opening(1, 7, 1));
            assert!(next().any.load(Ordering::SeqCst));
            assert!(!next().comes(opening(1, 7, 1)), "the lookup was not noted");
            next().note(opening(1, 7, 1));
            next().finds(unseen(1), Some(file(8)));
            assert!(!next().comes(opening(1, 7, 1)), "the lookup was noted: no caller waits");
            next().note(opening(1, 7, 1));
            assert!(next().comes(opening(1, 8, 2)));
            assert!(next().comes(opening(1, 8, 2)), "the lookup was not noted");
            assert!(!next().comes(opening(1, 8, 3)));
        });
    }
}
