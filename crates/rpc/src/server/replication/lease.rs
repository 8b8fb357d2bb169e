//! For how long a server may answer without having heard from the membership.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dray_core::Fence;
use dray_rt::Instant;

/// A server that has not been heard of for so long is no member any more.
pub(super) const LEASE: Duration = Duration::from_secs(2);
/// How often a server says that it is there.
pub(super) const KEEP_ALIVE_EVERY: Duration = Duration::from_millis(500);
/// A server stops to answer so long before its lease can end. The clocks of two machines may run at
/// different speeds, and a call that was under way may still be answered.
pub(super) const MARGIN: Duration = Duration::from_millis(500);

/// Until when a server may answer. Each keepalive that went well prolongs it.
#[derive(Debug)]
pub struct ServingLease {
    /// What a keepalive is good for.
    length: Duration,
    /// Nanoseconds of the monotonic clock; 0: it has never begun, or was given up.
    until_ns: AtomicU64,
    /// How often it has begun.
    era: AtomicU64,
}

/// A time in which a lease held all the while. Another server may have served between two of them, even
/// where nobody looked at the lease then: this process may have been stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LeaseEra(u64);

impl ServingLease {
    /// One beside a lease of `ttl` in the membership. It is shorter by a quarter.
    pub fn within(ttl: Duration) -> ServingLease {
        ServingLease::of_length(ttl - ttl / 4)
    }

    /// One that each keepalive prolongs by this.
    pub(super) fn of_length(length: Duration) -> ServingLease {
        ServingLease { length, until_ns: AtomicU64::new(0), era: AtomicU64::new(0) }
    }

    /// A keepalive that was sent at `sent` went well. The time of its sending counts: it arrived later,
    /// so that the membership's lease ends later than this one.
    pub fn prolong(&self, sent: Instant) {
        if !self.holds() {
            self.era.fetch_add(1, Ordering::SeqCst);
        }
        let until = sent + self.length;
        self.until_ns.fetch_max(until.as_nanos(), Ordering::SeqCst);
    }

    /// The lease ends now. Only who prolongs it gives it up, and prolongs it no more unless the membership
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

    /// The era that begins now, or goes on.
    pub(super) fn era(&self) -> LeaseEra {
        LeaseEra(self.era.load(Ordering::SeqCst))
    }

    /// Whether the server may answer now what it began in `era`.
    pub(super) fn holds_since(&self, era: LeaseEra) -> bool {
        // In this order: the next era begins before its end is set.
        self.holds() && self.era() == era
    }

    /// Waits until `era` has ended.
    pub(super) async fn lapsed(&self, era: LeaseEra) {
        while self.holds_since(era) {
            dray_rt::sleep_until(self.until()).await;
        }
    }
}

/// The right of a server to change what it serves. It ends with the era in which it began.
#[derive(Debug)]
pub(crate) struct LeaseFence {
    lease: Arc<ServingLease>,
    era: LeaseEra,
}

impl LeaseFence {
    /// That of the era that begins now, or goes on.
    pub(crate) fn now(lease: Arc<ServingLease>) -> LeaseFence {
        let era = lease.era();
        LeaseFence { lease, era }
    }
}

impl Fence for LeaseFence {
    fn holds(&self) -> bool {
        self.lease.holds_since(self.era)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_rt::{DriverKind, Executor, now, sleep};

    #[test]
    fn a_lease_that_lapsed_while_nobody_looked_does_not_hold_for_what_began_before() {
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let lease = ServingLease::within(Duration::from_secs(2));
            lease.prolong(now());
            let era = lease.era();
            sleep(Duration::from_millis(1400)).await;
            lease.prolong(now());
            sleep(Duration::from_millis(1400)).await;
            assert!(lease.holds_since(era), "it was prolonged in time");
            sleep(Duration::from_millis(200)).await;
            lease.prolong(now());
            assert!(lease.holds() && lease.holds_since(lease.era()));
            assert!(!lease.holds_since(era), "another server may have served meanwhile");
            lease.lapsed(era).await;
            let era = lease.era();
            lease.give_up();
            lease.prolong(now());
            assert!(!lease.holds_since(era));
        });
    }
}
