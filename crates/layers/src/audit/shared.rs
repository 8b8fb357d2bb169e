//! What the calls and the thread that writes share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::ring::RecordRing;

/// Figures of a log, for status and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditStatus {
    /// Records in the log, gaps included, since the server began.
    pub records: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// The number of the next record.
    pub next_index: u64,
    /// Segments that are there.
    pub segments: u64,
    /// Bytes of all of them.
    pub log_bytes: u64,
    /// Records that were dropped, each of which a gap record counts.
    pub dropped: u64,
    /// Calls that had to wait for room.
    pub held: u64,
    /// Calls wait for room now.
    pub blocked: bool,
    /// Consumers.
    pub consumers: u64,
    /// Records that the slowest of them has not seen.
    pub lag: u64,
    /// Why nothing can be written now; empty: it can.
    pub trouble: String,
}

/// Both ends.
pub(super) struct Shared {
    pub(super) ring: RecordRing,
    /// New changes wait: the log has no room.
    pub(super) blocked: AtomicBool,
    /// Records that did not fit into the ring.
    pub(super) lost: AtomicU64,
    pub(super) held: AtomicU64,
    pub(super) status: Mutex<AuditStatus>,
    asleep: AtomicBool,
    wake: Mutex<Wake>,
    woken: Condvar,
}

#[derive(Default)]
struct Wake {
    called: bool,
    ending: bool,
    ended: bool,
}

impl Shared {
    pub(super) fn new(ring: RecordRing) -> Shared {
        Shared {
            ring,
            blocked: AtomicBool::new(false),
            lost: AtomicU64::new(0),
            held: AtomicU64::new(0),
            status: Mutex::default(),
            asleep: AtomicBool::new(false),
            wake: Mutex::default(),
            woken: Condvar::new(),
        }
    }

    pub(super) fn status(&self) -> AuditStatus {
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner).clone();
        status.held = self.held.load(Ordering::Relaxed);
        status.blocked = self.blocked.load(Ordering::Relaxed);
        status
    }

    /// Something is in the ring. Most calls find the thread at work.
    pub(super) fn pushed(&self) {
        fence(Ordering::SeqCst); // the record is seen, or the sleep
        if self.asleep.load(Ordering::Relaxed) {
            self.call();
        }
    }

    fn call(&self) {
        let mut wake = self.wake.lock().unwrap_or_else(PoisonError::into_inner);
        wake.called = true;
        drop(wake);
        self.woken.notify_all();
    }

    /// Sleeps until something is in the ring, or `longest` is over. `resting`: calls wake it.
    pub(super) fn sleep(&self, resting: bool, longest: Duration) {
        if resting {
            self.asleep.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
        }
        let wake = self.wake.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |wake: &mut Wake| {
            !(wake.called || wake.ending || resting && self.ring.used_bytes() > 0)
        };
        let waited = self.woken.wait_timeout_while(wake, longest, waits);
        waited.unwrap_or_else(PoisonError::into_inner).0.called = false;
        self.asleep.store(false, Ordering::Relaxed);
    }

    pub(super) fn is_ending(&self) -> bool {
        self.wake.lock().unwrap_or_else(PoisonError::into_inner).ending
    }

    /// Has the thread write what there is, and end.
    pub(super) fn end(&self) {
        self.wake.lock().unwrap_or_else(PoisonError::into_inner).ending = true;
        self.woken.notify_all();
    }

    pub(super) fn ended(&self) {
        self.wake.lock().unwrap_or_else(PoisonError::into_inner).ended = true;
        self.woken.notify_all();
    }

    /// Waits for the thread's end, at most so long.
    pub(super) fn wait_for_end(&self, longest: Duration) -> bool {
        let wake = self.wake.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.woken.wait_timeout_while(wake, longest, |wake| !wake.ended);
        waited.unwrap_or_else(PoisonError::into_inner).0.ended
    }
}
