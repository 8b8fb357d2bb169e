//! An export that leases, in memory, and clients of it.

use std::sync::Arc;
use std::time::Duration;

use dray_backends::memory::MemoryFs;
use dray_core::{FileId, FileSystem};
use dray_fabric::sim::Network;
use dray_rpc::client::{ClientOptions, LeaseWish, RemoteFs};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::Scope;

use super::{client_options, connect, memory, serve_simulated};

pub const TERM: Duration = Duration::from_secs(5);
/// The wish of a client that keeps what it writes, too.
pub const KEEPS: LeaseWish = LeaseWish::Yes { callers_are_checked: true, keeps_writes: true };
/// The wish of a client whose kernel checks what each caller may do.
pub const YES: LeaseWish = LeaseWish::Yes { callers_are_checked: true, keeps_writes: false };

pub struct LeasedSite {
    pub network: Network,
    _scope: Scope,
    /// What the server serves.
    pub below: MemoryFs,
    pub server: Server,
    pub root: FileId,
}

impl LeasedSite {
    pub fn new() -> LeasedSite {
        LeasedSite::with(|_| {})
    }

    /// The same with an export that is changed a little.
    pub fn with(change: impl FnOnce(&mut Export)) -> LeasedSite {
        let fs = memory();
        let root = fs.info().root;
        let mut export = Export::new("data", Arc::new(fs.clone()), Vec::new());
        (export.insecure, export.leases, export.write_leases) = (true, true, true);
        change(&mut export);
        let options = ServerOptions { lease_term: TERM, ..ServerOptions::default() };
        let server = Server::new(options, vec![export], Arc::new(MemoryJournal::default()));
        let (network, scope) = (Network::new(), Scope::new());
        serve_simulated(&network, "s", &server, &scope);
        LeasedSite { network, _scope: scope, below: fs, server, root }
    }

    pub async fn client(&self, host: &str, leases: LeaseWish) -> RemoteFs {
        let options = ClientOptions { leases, ..client_options() };
        connect(self.network.connector_from(host, "s"), options).await.unwrap()
    }
}
