//! What all workers of a mount share.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use dray_core::{Attr, FileId, LockOwner, Timestamp};

use crate::flight::Flights;
use crate::handles::Handles;
use crate::identity::Identities;
use crate::nodes::Nodes;
use crate::options::Options;
use crate::session::Session;
use crate::state::State;

pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) session: Session,
    pub(crate) device: Arc<OwnedFd>,
    pub(crate) nodes: Nodes,
    pub(crate) handles: Handles,
    pub(crate) identities: Identities,
    pub(crate) flights: Flights,
    pub(crate) lock_owners: LockOwners,
    pub(crate) versions: Versions,
    /// Somebody searches for signals that the kernel did not tell of.
    pub(crate) searching: AtomicBool,
}

impl Shared {
    pub(crate) fn new(
        options: Options,
        session: Session,
        device: Arc<OwnedFd>,
        state: &State,
        adopted: bool,
        root: FileId,
        workers: usize,
    ) -> Shared {
        Shared {
            identities: Identities::new(options.job_ids),
            options,
            session,
            device,
            nodes: Nodes::new(state.clone(), root),
            handles: Handles::new(state.clone()),
            flights: Flights::new(workers),
            lock_owners: LockOwners { adopted, owners: Mutex::default() },
            versions: Versions::default(),
            searching: AtomicBool::new(false),
        }
    }
}

/// Which processes took fcntl locks on which files: only their closes must be told to
/// the server.
pub(crate) struct LockOwners {
    /// A predecessor may have served locks whose owners are not known here.
    adopted: bool,
    owners: Mutex<HashSet<(u64, LockOwner)>>,
}

impl LockOwners {
    /// `owner` asks for a lock on `node`.
    pub(crate) fn add(&self, nodes: &Nodes, node: u64, owner: LockOwner) {
        nodes.mark_locked(node);
        self.owners.lock().unwrap_or_else(PoisonError::into_inner).insert((node, owner));
    }

    /// Whether `owner` may hold a lock on `node`.
    pub(crate) fn may_hold(&self, nodes: &Nodes, node: u64, owner: LockOwner) -> bool {
        let known =
            self.owners.lock().unwrap_or_else(PoisonError::into_inner).contains(&(node, owner));
        known || self.adopted && nodes.was_locked(node)
    }

    /// `owner` holds no lock on `node` any more.
    pub(crate) fn remove(&self, node: u64, owner: LockOwner) {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner).remove(&(node, owner));
    }
}

/// Which version of a file the kernel's page cache holds, under close-to-open.
#[derive(Default)]
pub(crate) struct Versions {
    seen: Mutex<HashMap<u64, Version>>,
}

type Version = (Timestamp, Timestamp, u64);

/// Versions remembered; beyond it all are forgotten, which costs cached pages only.
const VERSIONS_MAX: usize = 1 << 20;

impl Versions {
    /// Notes what `node` is like at an open; whether it is what it was at the last one.
    pub(crate) fn unchanged(&self, node: u64, attr: &Attr) -> bool {
        let version = (attr.mtime, attr.ctime, attr.size);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.len() >= VERSIONS_MAX {
            seen.clear();
        }
        seen.insert(node, version) == Some(version)
    }

    /// The kernel has forgotten `node`.
    pub(crate) fn forget(&self, node: u64) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).remove(&node);
    }
}
