//! Advisory locks of an export: fcntl(2) ranges and flock(2), over all clients.
//!
//! The table knows ids and owners, no files and no clients, so that every backend can use
//! it. Blocked requests are granted in the order of their arrival, but for those of owners that
//! have locks, which others may wait for: these pass.

mod circle;
mod file;
mod files;
mod flocks;
mod held;
mod owners;
mod queue;
mod ranges;
mod table;

pub(crate) use flocks::Flocks;
pub use table::{LockTable, Locked};

use dray_core::{Context, HolderId, LockOwner};

/// Parts of the maps that all locks of an export are found by, each with a mutex that is held for one
/// look only.
const SHARDS: usize = 32;

/// Who holds a lock. Of two clients no owner is the same, whatever they say of nodes: what a client
/// had is given back with its session, and nobody gives back what is another client's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner {
    /// The client by whom the lock was asked for.
    pub holder: HolderId,
    /// The owner and its node: those of a client that is a server itself are of many nodes.
    pub owner: LockOwner,
}

impl Owner {
    /// The owner that a call is about.
    pub fn of(cx: &Context, owner: LockOwner) -> Owner {
        Owner { holder: cx.holder, owner: owner.of_node(cx.origin.node) }
    }
}
