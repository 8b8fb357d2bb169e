//! Counts of what losses of power cost, for the status of a server.

use std::sync::atomic::{AtomicU64, Ordering};

/// The outcome of the changes that were not on media when the machine lost power. Counts begin with
/// the process, which is the one that clients come back to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecoveryStatus {
    /// New work waits for clients that send again what they kept.
    pub running: bool,
    /// Changes made again, and their data.
    pub redone_changes: u64,
    /// The data of the changes made again, bytes.
    pub redone_bytes: u64,
    /// Losses that clients found and reported to their users.
    pub losses: u64,
    /// The data of these changes, as far as it was counted.
    pub lost_bytes: u64,
    /// Clients that did not come back: their losses are unknown.
    pub clients_missing: u64,
}

impl RecoveryStatus {
    /// The counts of two exports together.
    pub(crate) fn and(self, other: RecoveryStatus) -> RecoveryStatus {
        RecoveryStatus {
            running: self.running || other.running,
            redone_changes: self.redone_changes.saturating_add(other.redone_changes),
            redone_bytes: self.redone_bytes.saturating_add(other.redone_bytes),
            losses: self.losses.saturating_add(other.losses),
            lost_bytes: self.lost_bytes.saturating_add(other.lost_bytes),
            clients_missing: self.clients_missing.saturating_add(other.clients_missing),
        }
    }
}

#[derive(Default)]
pub(crate) struct RecoveryCounts {
    redone_changes: AtomicU64,
    redone_bytes: AtomicU64,
    losses: AtomicU64,
    lost_bytes: AtomicU64,
    clients_missing: AtomicU64,
}

impl RecoveryCounts {
    pub(crate) fn redone(&self, bytes: u64) {
        self.redone_changes.fetch_add(1, Ordering::Relaxed);
        self.redone_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A client says what it has lost; it may say anything.
    pub(crate) fn lost(&self, losses: u64, bytes: u64) {
        for (sum, more) in [(&self.losses, losses), (&self.lost_bytes, bytes)] {
            sum.fetch_add(more.min(u64::from(u32::MAX) << 16), Ordering::Relaxed);
        }
    }

    pub(crate) fn missing(&self, clients: usize) {
        self.clients_missing.fetch_add(clients as u64, Ordering::Relaxed);
    }

    pub(crate) fn status(&self, running: bool) -> RecoveryStatus {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        RecoveryStatus {
            running,
            redone_changes: get(&self.redone_changes),
            redone_bytes: get(&self.redone_bytes),
            losses: get(&self.losses),
            lost_bytes: get(&self.lost_bytes),
            clients_missing: get(&self.clients_missing),
        }
    }
}
