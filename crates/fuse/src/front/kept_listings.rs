//! Listings that the kernel keeps under leases (ADR 0059).
//!
//! A listing that follows another one at once asks for nothing but an open and a close. One that comes later is made anew,
//! which renews the names: the kernel would look up each of them.

use dray_core::{FileId, Timestamp};
use dray_rt::timeout;

use crate::front::Worker;
use crate::proto::abi::{fopen, init};
use crate::state::changes::ChangeNumber;
use crate::state::kernel_listings::{ListingAtOpen, ListingDoubt};
use crate::worker::recalls::{PAGES_MAX, drop_listing_soon, listing_dropped};
use crate::worker::shared::MountShared;

/// Whether all that goes into one answer was asked for under the lease that holds.
pub(super) struct AnswerUnderLease {
    /// None: the kernel keeps nothing of the answer.
    doubt: Option<ListingDoubt>,
    stands: bool,
}

impl AnswerUnderLease {
    /// Something that was asked for under this doubt, if there was a lease then, is in the answer or ends it.
    pub(super) fn has(&mut self, asked: Option<ListingDoubt>) {
        self.stands &= self.doubt.is_some() && asked == self.doubt;
    }
}

impl Worker {
    /// What the kernel may do with the listing of a directory that was opened. `changed`: the last change
    /// before.
    pub(super) fn listing_flags(&self, (node, id): (u64, FileId), changed: ChangeNumber) -> u32 {
        let MountShared { mode, session, nodes, control, changes, listings, .. } = &*self.shared;
        let may_keep = mode.keeps_listings()
            && session.has(init::AUTO_INVAL_DATA)
            // A recall finds a directory by its id, and so one node of it.
            && nodes.find(id) == Some(node)
            && control.leased_attributes(id).is_some();
        if !may_keep {
            return 0;
        }
        match listings.opened(node, changed, |before| changes.since(before, id)) {
            ListingAtOpen::Past => {
                drop_listing_soon(&self.shared, node);
                0
            }
            ListingAtOpen::Anew => fopen::CACHE_DIR,
            ListingAtOpen::Kept => fopen::CACHE_DIR | fopen::KEEP_CACHE,
        }
    }

    /// Under which doubt a page of a listing is asked for. None: there is no lease, or nothing is kept.
    pub(super) fn asks_under(&self, node: u64, id: FileId) -> Option<ListingDoubt> {
        // A recall ends the lease first, and puts the directory in doubt then.
        let doubt = self.shared.listings.last_doubt(node)?;
        self.shared.control.leased_attributes(id).map(|_| doubt)
    }

    pub(super) fn begin_answer(&self, node: u64) -> AnswerUnderLease {
        AnswerUnderLease { doubt: self.shared.listings.last_doubt(node), stands: true }
    }

    /// Whether the kernel may keep an answer that it is about to get.
    pub(super) fn may_be_kept(&self, node: u64, answer: &AnswerUnderLease, is_end: bool) -> bool {
        let asked = answer.doubt.filter(|_| answer.stands);
        self.shared.listings.answers(node, asked, is_end)
    }

    /// Before a listing the kernel makes sure that it has valid attributes. It has none of a directory whose
    /// listing is in doubt.
    pub(super) fn doubts_listing(&self, node: u64) -> bool {
        let doubted = self.shared.listings.doubted(node).is_some();
        if doubted {
            drop_listing_soon(&self.shared, node);
        }
        doubted
    }

    /// The kernel has asked for attributes, perhaps to see whether it may use the listing that it has. Has that
    /// dropped if it is in doubt. The kernel may hold a lock that the drop waits for, behind names of other
    /// directories. So this waits for a while only. True: it was not dropped.
    pub(super) async fn drops_listing(&self, node: u64) -> bool {
        if self.shared.listings.doubted(node).is_none() {
            return false;
        }
        let _ = timeout(PAGES_MAX, listing_dropped(&self.shared, node)).await;
        self.shared.listings.doubted(node).is_some()
    }
}

/// A time of change that differs by as little as there is. A kernel that gets it with the attributes of a
/// directory makes the listing anew.
pub(super) fn another_time(time: Timestamp) -> Timestamp {
    Timestamp { nsec: time.nsec ^ 1, ..time }
}
