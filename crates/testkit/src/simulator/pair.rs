//! The two servers of one slice, as its clients and their checks see them.

use std::sync::Arc;

use dray_backends::memory::MemoryDisk;
use dray_fabric::sim::Network;
use dray_rpc::server::{Journal, Server};

use super::fleet::{Fleet, SimSlice, lock};

/// Both servers. Cheap to clone.
#[derive(Clone)]
pub(super) struct ServerPair {
    fleet: Fleet,
    slice: usize,
}

impl ServerPair {
    pub(super) fn new(fleet: Fleet, slice: usize) -> ServerPair {
        ServerPair { fleet, slice }
    }

    fn site(&self) -> &SimSlice {
        &self.fleet.0.slices[self.slice]
    }

    /// All servers of the projection.
    pub(super) fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// The slice's name, which is that of its export.
    pub(super) fn name(&self) -> &'static str {
        Fleet::name(self.slice)
    }

    /// The network of its servers and clients.
    pub(super) fn network(&self) -> &Network {
        &self.site().network
    }

    /// The disk that they share.
    pub(super) fn disk(&self) -> Arc<MemoryDisk> {
        self.site().disk.clone()
    }

    /// The server that serves.
    pub(super) fn primary(&self) -> Option<Server> {
        let role = self.fleet.primary(self.slice)?;
        self.fleet.server(self.slice, role).map(|slice| slice.server())
    }

    /// Has the server that serves hand over to the other one; false: it could not.
    pub(super) async fn hand_over(&self) -> bool {
        let role = self.fleet.primary(self.slice);
        let serving = role.and_then(|role| self.fleet.server(self.slice, role));
        let Some(slice) = serving.filter(|slice| slice.ready_to_hand_over().is_some()) else {
            return false;
        };
        slice.hand_over().await.is_ok()
    }

    /// How often one server has taken over from the other, or got the slice from it.
    pub(super) fn takeovers(&self) -> u64 {
        self.fleet.0.registry.moves(self.name())
    }

    pub(super) fn locks(&self) -> usize {
        lock(&self.site().fs).as_ref().map_or(0, |fs| fs.locks().list(usize::MAX).len())
    }

    pub(super) fn buffer_bytes(&self) -> usize {
        self.fleet.buffer_bytes(self.slice)
    }

    /// Sessions that the one that serves has noted.
    pub(super) fn sessions_noted(&self) -> usize {
        let role = self.fleet.primary(self.slice);
        let journal = role.and_then(|role| self.fleet.journal(self.slice, role));
        journal.map_or(0, |journal| journal.load().len())
    }
}
