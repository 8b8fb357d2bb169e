//! Advisory locks of an export: fcntl(2) ranges and flock(2), over all clients.
//!
//! The table knows ids and owners, but neither files nor clients, so every backend can use it.
//! Blocked requests are granted in the order of their arrival, with one exception. Other requests may
//! wait for an owner that has locks, so the requests of such an owner pass earlier ones.

mod deadlock;
mod file;
mod files;
mod flocks;
mod held;
mod owners;
mod queue;
mod ranges;
mod table;

pub(crate) use flocks::Flocks;
pub use table::{LockStatus, LockTable};

use dray_core::{Context, HolderId, LockOwner};

/// Parts of the maps that all locks of an export are found by, each with a mutex that is held for one
/// look only.
const SHARDS: usize = 32;

/// The holder of a lock. Two clients never have the same owner, whatever nodes they name. The locks
/// of a client are given back with its session, and no client gives back another's.
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
