//! When a sync is due. Changes are kept for a while and synced all together. Room that runs out
//! makes a sync urgent. Room that a sync cannot free makes none urgent.
//!
//! The task that asks the server is the client's sync scheduler; here is what it has to know.

use std::task::{Poll, Waker};
use std::time::Duration;

use super::{State, UnsyncedLog};

/// After this time at most everything is synced. The server's kernel does so by itself at about
/// that age (dirty_expire_centisecs, 30 s).
pub(crate) const SYNC_AFTER: Duration = Duration::from_secs(30);
/// Between the end of a sync and the next, however urgent that is.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// The server's disks are kept busy with syncs for one part in so many, and one, of the time.
const PAUSE_FACTOR: u32 = 4;

/// Why the scheduler is woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SyncReason {
    /// A sync is urgent.
    Urgent,
    /// Something has been unsynced for long enough.
    Age,
    /// Everything is on media: no sync is needed.
    Clean,
}

/// The log's orders to the scheduler.
#[derive(Default)]
pub(super) struct SyncRequests {
    /// There is a scheduler.
    running: bool,
    /// Kept data take much of the room.
    data: bool,
    /// Notes do, or somebody wants to know.
    notes: bool,
    waker: Option<Waker>,
    /// The scheduler wants to know when everything is on media.
    for_clean: bool,
}

impl SyncRequests {
    /// Asks for a sync, soon if one of both is true. True if a scheduler has to be started.
    #[must_use]
    pub(super) fn request(&mut self, data: bool, notes: bool) -> bool {
        let news = (data && !self.data) || (notes && !self.notes);
        self.data |= data;
        self.notes |= notes;
        if news {
            self.wake();
        }
        !std::mem::replace(&mut self.running, true)
    }

    fn wake(&mut self) {
        self.waker.take().into_iter().for_each(Waker::wake);
    }
}

impl State {
    /// After a replay. True if a scheduler has to be started.
    #[must_use]
    pub(super) fn request_sync_unless_clean(&mut self) -> bool {
        if self.is_clean() {
            self.requests.wake(); // a scheduler that waits for this ends
            return false;
        }
        self.requests.request(false, true)
    }

    /// Something is on media: what was urgent may be no more, or all may be done.
    pub(super) fn relax(&mut self, is_urgent: bool) {
        self.requests.data &= is_urgent;
        if self.requests.for_clean && self.kept_bytes == 0 && self.names.len() == 0 {
            self.requests.wake(); // the scheduler looks at the rest
        }
    }
}

/// For the scheduler.
impl UnsyncedLog {
    /// Sets who starts the scheduler. The first one that is set stays. `start` is called from
    /// whichever thread makes a change, without any lock.
    pub(crate) fn schedule_syncs_by(&self, start: Box<dyn Fn() + Send + Sync>) {
        let _ = self.starter.set(start);
        let state = self.lock();
        let wanted = !state.requests.running && (state.requests.data || state.requests.notes);
        drop(state);
        if wanted {
            self.request_sync();
        }
    }

    /// Has everything synced soon.
    pub(super) fn request_sync(&self) {
        let start = self.lock().requests.request(false, true);
        self.start_scheduler_if(start);
    }

    /// Asks for a sync of the changes that a process before this one may have made.
    pub(crate) fn sync_inherited(&self) {
        if !self.is_clean() {
            self.request_sync();
        }
    }

    /// `start`: as [`SyncRequests::request`] said.
    pub(super) fn start_scheduler_if(&self, start: bool) {
        if !start {
            return;
        }
        match self.starter.get() {
            Some(starter) => starter(),
            // The session is being made: see `schedule_syncs_by`.
            None => self.lock().requests.running = false,
        }
    }

    /// Waits until a sync is urgent, with `data` also because of data, or, with `clean`, until
    /// everything is on media.
    pub(crate) async fn sync_reason(&self, data: bool, clean: bool) -> SyncReason {
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if state.requests.notes || (data && state.requests.data) {
                return Poll::Ready(SyncReason::Urgent);
            }
            if clean && state.is_clean() {
                return Poll::Ready(SyncReason::Clean);
            }
            state.requests.waker = Some(task.waker().clone());
            state.requests.for_clean = clean;
            Poll::Pending
        })
        .await
    }

    /// How long the changes that are not on media are known to be no older than `age`: other
    /// clients have had everything synced meanwhile.
    pub(crate) fn is_young_for(&self, age: Duration) -> Duration {
        let synced = self.lock().synced_by_others;
        synced.map_or(Duration::ZERO, |synced| age.saturating_sub(synced.elapsed()))
    }

    /// A sync is about to be asked for.
    pub(crate) fn sync_begins(&self) {
        let mut state = self.lock();
        (state.requests.data, state.requests.notes) = (false, false);
    }

    /// Whether everything that is not on media is kept.
    pub(crate) fn is_all_kept(&self) -> bool {
        self.lock().files.values().all(|file| !file.overflowed)
    }

    /// Gives memory that is not needed now back to its source.
    pub(crate) fn trim(&self) {
        self.copies.trim();
    }

    /// Whether the scheduler can end, since everything is on media. If so, memory is given back.
    pub(crate) fn scheduler_may_end(&self) -> bool {
        let mut state = self.lock();
        if !state.is_clean() {
            return false;
        }
        state.requests = SyncRequests::default();
        drop(state);
        self.copies.trim();
        trim_heap();
        true
    }

    /// The scheduler has ended, although changes may not be on media.
    pub(crate) fn scheduler_gave_up(&self) {
        self.lock().requests = SyncRequests::default();
    }
}

/// Gives free memory of the heap back to the system. Notes of many names, and the calls that
/// changed them, lay between what stays, and free(3) gives back only what lies at the end.
pub(super) fn trim_heap() {
    #[cfg(target_env = "gnu")]
    if !dray_rt::in_simulation() {
        // SAFETY: no pointers.
        unsafe { libc::malloc_trim(0) };
    }
}

/// How long to wait between two syncs.
#[derive(Default)]
pub(crate) struct SyncPacing {
    /// Syncs in a row at whose end there was more than could be kept.
    in_vain: u32,
}

impl SyncPacing {
    /// A sync took so long. `helped`: everything that is not on media is kept. Answers how long no
    /// other sync is asked for, and how long none because of data. A stream that is faster than
    /// the server's disks can never be kept: more syncs for it would only disturb other clients.
    pub(crate) fn after(&mut self, taken: Duration, helped: bool) -> (Duration, Duration) {
        self.in_vain = if helped { 0 } else { (self.in_vain + 1).min(16) };
        let pause = (taken * PAUSE_FACTOR).clamp(PAUSE_MIN, SYNC_AFTER);
        let for_data = pause.saturating_mul(1 << self.in_vain).min(SYNC_AFTER);
        (pause, for_data.saturating_sub(pause))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: P103
    #[test]
    fn syncs_in_vain_get_rare_and_slow_ones_leave_time_to_others() {
        let (mut pacing, ms) = (SyncPacing::default(), Duration::from_millis);
        assert_eq!(pacing.after(ms(1), true), (ms(100), ms(0)));
        assert_eq!(pacing.after(ms(500), true), (ms(2000), ms(0)));
        assert_eq!(pacing.after(ms(1), false), (ms(100), ms(100)));
        assert_eq!(pacing.after(ms(1), false), (ms(100), ms(300)));
        for _ in 0..100 {
            pacing.after(ms(1), false);
        }
        let (pause, for_data) = pacing.after(ms(1), false);
        assert_eq!(pause + for_data, SYNC_AFTER);
        assert_eq!(pacing.after(ms(100_000), false), (SYNC_AFTER, ms(0)));
        assert_eq!(pacing.after(ms(1), true), (ms(100), ms(0)));
    }
}
