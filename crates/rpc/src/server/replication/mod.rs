//! The journal of a slice at two servers, so that one of them can go on where the other one died.
//!
//! A *slice* is an export that two servers can serve. One of them is its primary, the other one its
//! backup. The primary notes in its own journal, and ships each note to its backup
//! (`ReplicatedJournal`, `JournalStream`). The backup applies the notes ([`JournalReplica`]). Who is
//! what, and whether the backup has all that clients rely on, stands in a [`Membership`].
//! [`SliceServer`] drives one slice at one server. docs/adr/0042-failover.md has the reasons.

mod entry;
mod hand_over;
mod journal;
mod lease;
mod link;
mod membership;
mod quiesce;
mod registry;
mod replica;
mod slice;
mod stream;

pub use hand_over::HandOverRefusal;
pub(crate) use lease::LeaseFence;
pub use lease::ServingLease;
pub use link::WireLink;
pub use membership::{Membership, PageCacheId, Revision, ServerNumber, SliceChange, SliceState};
pub use registry::{MemoryRegistry, RegistryMember};
pub use replica::{BatchTaker, JournalReplica, ReplicaRefusal};
pub use slice::{ReplicaLink, SliceOptions, SliceServer};
