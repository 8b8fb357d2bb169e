//! What `dray status` shows of leases.

use std::sync::atomic::Ordering;

use super::LeasedAnswers;

/// The leases of a session, as far as it remembers what they cover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseMemoryStatus {
    /// Names remembered, absent ones included.
    pub names: u64,
    /// Files whose attributes are remembered.
    pub attributes: u64,
    /// Directories whose listings are remembered.
    pub listings: u64,
    /// Bytes that listings take.
    pub listing_bytes: u64,
    /// Bytes that extended attributes and targets of links take.
    pub detail_bytes: u64,
    /// Calls answered without the server: a round trip spared each.
    pub hits: u64,
    /// Leases that the server has recalled.
    pub recalled: u64,
}

impl LeasedAnswers {
    /// None if the session wants no leases.
    pub(crate) fn status(&self) -> Option<LeaseMemoryStatus> {
        let leased = self.0.as_ref()?;
        Some(LeaseMemoryStatus {
            names: leased.names.count(),
            attributes: leased.attributes.count(),
            listings: leased.listings.count(),
            listing_bytes: leased.listings.bytes(),
            detail_bytes: leased.attributes.bytes(),
            hits: leased.hits.load(Ordering::Relaxed),
            recalled: leased.listener.recalled(),
        })
    }
}
