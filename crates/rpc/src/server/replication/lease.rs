//! For how long a server may answer without having heard from the membership.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dray_rt::Instant;

/// A server that has not been heard of for so long is no member any more.
pub(super) const LEASE: Duration = Duration::from_secs(2);
/// How often a server says that it is there.
pub(super) const KEEP_ALIVE_EVERY: Duration = Duration::from_millis(500);
/// A server stops to answer so long before its lease can end: the clocks of two machines may run at
/// different speeds, and a call that was under way may still be answered.
pub(super) const MARGIN: Duration = Duration::from_millis(500);

/// Until when a server may answer. Each keepalive that went well prolongs it.
#[derive(Debug)]
pub struct ServingLease {
    /// What a keepalive is good for.
    length: Duration,
    /// Nanoseconds of the monotonic clock; 0: it has never begun, or was given up.
    until_ns: AtomicU64,
}

impl Default for ServingLease {
    fn default() -> ServingLease {
        ServingLease { length: LEASE - MARGIN, until_ns: AtomicU64::new(0) }
    }
}

impl ServingLease {
    /// One beside a lease of `ttl` in the membership. It is shorter by a quarter.
    pub fn within(ttl: Duration) -> ServingLease {
        ServingLease { length: ttl - ttl / 4, ..ServingLease::default() }
    }

    /// A keepalive that was sent at `sent` went well. The time of its sending counts: it arrived later,
    /// so that the membership's lease ends later than this one.
    pub fn prolong(&self, sent: Instant) {
        let until = sent + self.length;
        self.until_ns.fetch_max(until.as_nanos(), Ordering::SeqCst);
    }

    /// It ends now. Only who prolongs it gives it up, and prolongs it no more unless the membership
    /// begins another one.
    pub fn give_up(&self) {
        self.until_ns.store(0, Ordering::SeqCst);
    }

    /// When it ends, if nothing prolongs it.
    pub fn until(&self) -> Instant {
        Instant::from_nanos(self.until_ns.load(Ordering::SeqCst))
    }

    /// Whether the server may answer now.
    pub fn holds(&self) -> bool {
        dray_rt::now() < self.until()
    }

    /// Waits until it has ended.
    pub(super) async fn lapsed(&self) {
        while self.holds() {
            dray_rt::sleep_until(self.until()).await;
        }
    }
}
