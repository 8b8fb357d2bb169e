//! Whether this mount itself has changed access rights, or is about to.
//!
//! The server lets a session's own changes pass what the session has opened ahead. So the client
//! must not use such a file once its own change of rights is under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts changes of rights: those on their way in the lower half, those that have come to an
/// end above.
#[derive(Default)]
pub(crate) struct RightsChanges(AtomicU64);

const ENDED: u64 = 1 << 32;

/// A change on its way, until its answer has come, or the connection went on which it was sent.
pub(crate) struct RightsChange(Arc<RightsChanges>);

/// The count of changes of rights at a time when none was on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RightsSnapshot(u64);

impl RightsChanges {
    /// A change is about to be sent.
    pub(crate) fn change(self: &Arc<RightsChanges>) -> RightsChange {
        self.0.fetch_add(1, Ordering::SeqCst);
        RightsChange(self.clone())
    }

    /// None if a change is on its way.
    pub(crate) fn at_rest(&self) -> Option<RightsSnapshot> {
        let count = self.0.load(Ordering::SeqCst);
        count.is_multiple_of(ENDED).then_some(RightsSnapshot(count))
    }
}

impl Drop for RightsChange {
    fn drop(&mut self) {
        self.0.0.fetch_add(ENDED - 1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_shows_while_it_is_on_its_way_and_afterwards() {
        let rights = Arc::new(RightsChanges::default());
        let before = rights.at_rest().unwrap();
        assert_eq!(rights.at_rest(), Some(before));
        let (one, other) = (rights.change(), rights.change());
        assert_eq!(rights.at_rest(), None);
        drop(one);
        assert_eq!(rights.at_rest(), None);
        drop(other);
        assert!(rights.at_rest().is_some_and(|after| after != before));
    }
}
