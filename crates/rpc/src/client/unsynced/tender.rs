//! When a sync is asked for. Most is kept for a while and synced all together; room that
//! runs out hurries it, but what a sync cannot help is not hurried.

use std::task::Waker;
use std::time::Duration;

/// After this time at most everything is synced: about when the server's kernel does so by itself
/// (dirty_expire_centisecs, 30 s).
pub(crate) const SYNC_AFTER: Duration = Duration::from_secs(30);
/// Between the end of a sync and the next, however urgent that is.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// The server's disks are kept busy with syncs for one part in so many, and one, of the time.
const PAUSE_FACTOR: u32 = 4;

/// What a task that asks for syncs is woken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    /// A sync is urgent.
    Urgent,
    /// Something has been unsynced for long enough.
    Time,
    /// Everything is on media.
    Clean,
}

/// What a task that asks for syncs has to know.
#[derive(Default)]
pub(super) struct Tender {
    pub(super) there: bool,
    /// Data that are kept take much of the room.
    pub(super) data: bool,
    /// Notes do, or somebody wants to know.
    pub(super) notes: bool,
    pub(super) waker: Option<Waker>,
    /// It wants to know when everything is on media.
    pub(super) for_clean: bool,
}

impl Tender {
    /// True if there is none.
    pub(super) fn call(&mut self, data: bool, notes: bool) -> bool {
        let news = (data && !self.data) || (notes && !self.notes);
        self.data |= data;
        self.notes |= notes;
        if news {
            self.wake();
        }
        !std::mem::replace(&mut self.there, true)
    }

    pub(super) fn wake(&mut self) {
        self.waker.take().into_iter().for_each(Waker::wake);
    }
}

/// How long to wait between two syncs.
#[derive(Default)]
pub(crate) struct Pace {
    /// Syncs in a row at whose end there was more than could be kept.
    in_vain: u32,
}

impl Pace {
    /// A sync has `taken` so long; `helped`: everything that is not on media is kept.
    /// Answers how long no other is asked for, and how long none because of data: a stream
    /// that is faster than the server's disks can never be kept, and syncing for it over and
    /// over would only be in everybody's way.
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

    #[test]
    fn syncs_in_vain_get_rare_and_slow_ones_leave_time_to_others() {
        let (mut pace, ms) = (Pace::default(), Duration::from_millis);
        assert_eq!(pace.after(ms(1), true), (ms(100), ms(0)));
        assert_eq!(pace.after(ms(500), true), (ms(2000), ms(0)));
        assert_eq!(pace.after(ms(1), false), (ms(100), ms(100)));
        assert_eq!(pace.after(ms(1), false), (ms(100), ms(300)));
        for _ in 0..100 {
            pace.after(ms(1), false);
        }
        let (pause, for_data) = pace.after(ms(1), false);
        assert_eq!(pause + for_data, SYNC_AFTER);
        assert_eq!(pace.after(ms(100_000), false), (SYNC_AFTER, ms(0)));
        assert_eq!(pace.after(ms(1), true), (ms(100), ms(0)));
    }
}
