//! The notes of a primary on their way to its backup, in their order.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_rt::sync::Notify;

use super::entry::JournalEntry;
use crate::wire::Wire;

/// A batch ends with the note that reaches this size, bytes; so it has less than twice as much.
const BATCH_BYTES: usize = 256 << 10;
/// Notes that may wait for the backup, bytes. What clients can have under way is far below that,
/// since each change waits for its note. A backup that is so far behind is given up.
const WAITING_MAX_BYTES: usize = 64 << 20;

/// What the primary has to do for its backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// There is none that counts, and nothing is kept for one.
    Alone,
    /// The replica gets a copy: notes are kept for it, and nobody waits for it.
    Copying,
    /// The replica has everything: changes wait until it has their notes.
    InStep,
    /// This server is no longer the primary: nothing that waits may go on.
    Deposed,
}

/// The notes on their way.
pub struct JournalStream {
    state: Mutex<State>,
    /// There is something to send, or the mode has changed.
    news: Notify,
}

struct State {
    mode: Mode,
    /// Notes so far, and how many of them nobody has to wait for any more.
    noted: u64,
    acknowledged: u64,
    batches: VecDeque<Batch>,
    waiting_bytes: usize,
    /// More waited than may: the backup misses notes.
    overflowed: bool,
    waiting: Vec<Waker>,
}

/// Notes that are sent together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// The notes, one after the other.
    pub bytes: Vec<u8>,
    /// The number of the last one.
    last: u64,
}

impl Default for JournalStream {
    /// Without a backup.
    fn default() -> JournalStream {
        let state = State {
            mode: Mode::Alone,
            noted: 0,
            acknowledged: 0,
            batches: VecDeque::new(),
            waiting_bytes: 0,
            overflowed: false,
            waiting: Vec::new(),
        };
        JournalStream { state: Mutex::new(state), news: Notify::new() }
    }
}

impl State {
    fn drop_batches(&mut self) {
        self.batches.clear();
        self.waiting_bytes = 0;
        self.overflowed = false;
        self.acknowledged = self.noted;
    }
}

impl JournalStream {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a note.
    pub(super) fn note(&self, entry: &JournalEntry<'_>) {
        let mut state = self.lock();
        state.noted += 1;
        match state.mode {
            Mode::Alone | Mode::Deposed => state.acknowledged = state.noted,
            Mode::Copying | Mode::InStep if state.waiting_bytes >= WAITING_MAX_BYTES => {
                state.overflowed = true;
            }
            Mode::Copying | Mode::InStep => {
                if state.batches.back().is_none_or(|batch| batch.bytes.len() >= BATCH_BYTES) {
                    state.batches.push_back(Batch::default());
                }
                let State { batches, noted, waiting_bytes, .. } = &mut *state;
                if let Some(batch) = batches.back_mut() {
                    let before = batch.bytes.len();
                    entry.put(&mut batch.bytes);
                    batch.last = *noted;
                    *waiting_bytes += batch.bytes.len() - before;
                }
                drop(state);
                self.news.notify_one();
            }
        }
    }

    /// Waits until everything noted so far is at the backup, if one counts. False: this server is no
    /// longer the primary, and must not go on.
    pub(super) async fn settled(&self) -> bool {
        let noted = self.lock().noted;
        poll_fn(|task| {
            let mut state = self.lock();
            match state.mode {
                Mode::Alone | Mode::Copying => Poll::Ready(true),
                Mode::Deposed => Poll::Ready(false),
                Mode::InStep if state.acknowledged >= noted => Poll::Ready(true),
                Mode::InStep => {
                    state.waiting.push(task.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    fn enter(&self, mode: Mode, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        if state.mode == Mode::Deposed {
            return; // for ever
        }
        state.mode = mode;
        change(&mut state);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
        self.news.notify_one();
    }

    /// There is no backup any more, as the membership says.
    pub(super) fn go_on_alone(&self) {
        self.enter(Mode::Alone, State::drop_batches);
    }

    /// A backup gets a copy: from now on notes are kept for it.
    pub(super) fn begin_copy(&self) {
        self.enter(Mode::Copying, State::drop_batches);
    }

    /// The backup has the copy, and changes wait for it from now on. Answers the number of the last
    /// note so far: the backup is in step once it has that.
    pub(super) fn get_in_step(&self) -> u64 {
        let mut last = 0;
        self.enter(Mode::InStep, |state| last = state.noted);
        last
    }

    /// Whether the backup has the note of this number.
    pub(super) fn has_arrived(&self, number: u64) -> bool {
        self.lock().acknowledged >= number
    }

    /// This server is no longer the primary.
    pub(super) fn depose(&self) {
        self.enter(Mode::Deposed, State::drop_batches);
    }

    /// The next batch, once there is one. None: the backup has missed notes.
    pub(super) async fn next_batch(&self) -> Option<Batch> {
        loop {
            {
                let mut state = self.lock();
                if state.overflowed {
                    return None;
                }
                if let Some(batch) = state.batches.pop_front() {
                    state.waiting_bytes -= batch.bytes.len();
                    return Some(batch);
                }
            }
            self.news.notified().await;
        }
    }

    /// The backup has this batch.
    pub(super) fn acknowledged(&self, batch: &Batch) {
        let mut state = self.lock();
        state.acknowledged = state.acknowledged.max(batch.last);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_rt::{DriverKind, Executor, timeout};
    use std::time::Duration;

    const SOON: Duration = Duration::from_millis(10);

    fn simulated(test: impl Future<Output = ()>) {
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(test);
    }

    #[test]
    fn who_is_in_step_waits_for_what_was_noted_before_and_for_nothing_later() {
        simulated(async {
            let stream = JournalStream::default();
            stream.note(&JournalEntry::SessionEnded { session: 1 });
            assert!(stream.settled().await, "nobody is waited for");
            stream.begin_copy();
            stream.note(&JournalEntry::SessionEnded { session: 2 });
            assert!(stream.settled().await, "nobody counts so far");
            stream.get_in_step();
            assert!(timeout(SOON, stream.settled()).await.is_err());
            let batch = stream.next_batch().await.unwrap();
            let mut settled = std::pin::pin!(stream.settled());
            assert!(timeout(SOON, &mut settled).await.is_err());
            stream.note(&JournalEntry::SessionEnded { session: 3 });
            stream.acknowledged(&batch);
            assert!(timeout(SOON, settled).await.unwrap());
            assert!(timeout(SOON, stream.settled()).await.is_err(), "the third is not there");
            stream.go_on_alone();
            assert!(stream.settled().await);
        });
    }

    #[test]
    fn who_is_deposed_never_goes_on() {
        simulated(async {
            let stream = JournalStream::default();
            stream.begin_copy();
            stream.get_in_step();
            stream.note(&JournalEntry::SessionEnded { session: 1 });
            stream.depose();
            assert!(!stream.settled().await);
            stream.go_on_alone();
            assert!(!stream.settled().await);
        });
    }

    #[test]
    fn a_backup_that_is_far_behind_is_given_up_and_memory_is_bounded() {
        simulated(async {
            let stream = JournalStream::default();
            stream.begin_copy();
            let bytes = vec![0; 1 << 20];
            let what = crate::server::journal::PersistentRecord::Evicted;
            for _ in 0..100 {
                stream.note(&JournalEntry::Kept { what, bytes: &bytes });
            }
            assert!(stream.lock().waiting_bytes < WAITING_MAX_BYTES + (2 << 20));
            assert!(stream.next_batch().await.is_none());
            stream.begin_copy();
            stream.note(&JournalEntry::CopyBegins);
            assert!(stream.next_batch().await.is_some());
        });
    }
}
