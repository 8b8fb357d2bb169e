//! Advisory locks of an export: fcntl(2) ranges and flock(2), over all clients.
//!
//! The table knows ids and owners, no files and no clients, so that every backend can use
//! it. Blocked requests are granted in the order of their arrival, but for those of owners that
//! have locks, which others may wait for: these pass.

mod circle;
mod file;
mod files;
mod held;
mod owners;
mod queue;
mod ranges;
mod table;

pub use table::{LockTable, Locked};

use dray_core::{LockOwner, NodeId};

/// Parts of the maps that all locks of an export are found by, each with a mutex that is held for one
/// look only.
const SHARDS: usize = 32;

/// Who holds a lock: an owner within a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner {
    /// The node whose process asked.
    pub node: NodeId,
    /// The owner as that node's kernel numbers it.
    pub owner: LockOwner,
}
