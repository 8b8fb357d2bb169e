//! Counts of leases, for the status.

use std::sync::atomic::{AtomicU64, Ordering};

/// Leases of an export or of a client, and what became of recalls since the export was opened or
/// the client came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseStatus {
    /// Files that are leased now: pairs of a file and a client.
    pub held: usize,
    /// Of these, files that one client may keep data of.
    pub written: usize,
    /// Files on whose fcntl locks one client decides. They count in no other way.
    pub locks: usize,
    /// Recalls that were sent to clients.
    pub recalls: u64,
    /// Recalls that clients have answered.
    pub acknowledged: u64,
    /// Recalls that ended with the leases of their client.
    pub expired: u64,
    /// How often a client did not answer, and lost its leases and connections.
    pub fences: u64,
}

#[derive(Default)]
pub(super) struct RecallCounts {
    pub(super) sent: AtomicU64,
    pub(super) acknowledged: AtomicU64,
    pub(super) expired: AtomicU64,
    pub(super) fences: AtomicU64,
}

impl RecallCounts {
    pub(super) fn with(&self, held: usize, (written, locks): (usize, usize)) -> LeaseStatus {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        LeaseStatus {
            held,
            written,
            locks,
            recalls: count(&self.sent),
            acknowledged: count(&self.acknowledged),
            expired: count(&self.expired),
            fences: count(&self.fences),
        }
    }
}
