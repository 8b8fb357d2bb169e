//! A client and a server in one place.
#![allow(dead_code)] // each test file uses its part

pub mod calls;
pub mod forgetful;
pub mod leased_site;
pub mod lessee;
pub mod raw;
pub mod server_epochs;

use std::sync::Arc;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_fabric::sim::Network;
use dray_fabric::{Address, Connect, Listening, listen_first, local};
use dray_rpc::auth::Key;
use dray_rpc::client::{
    ClientOptions, ClientSession, ConnectError, LeaseWish, RemoteFs, SessionMemory,
};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::{DriverKind, Executor, Scope};

/// Runs `test` in a simulation with this seed.
pub fn simulate<T>(seed: u64, test: impl Future<Output = T>) -> T {
    Executor::new(DriverKind::Simulated { seed }).unwrap().block_on(test)
}

/// Runs `test` on the real epoll driver.
pub fn run<T>(test: impl Future<Output = T>) -> T {
    Executor::new(DriverKind::Epoll).unwrap().block_on(test)
}

pub fn memory() -> MemoryFs {
    MemoryFs::new(MemoryOptions::default())
}

pub fn server_of(fs: MemoryFs, options: ServerOptions) -> Server {
    server_with(fs, options, MemoryJournal::default())
}

pub fn server_with(fs: MemoryFs, options: ServerOptions, journal: MemoryJournal) -> Server {
    let mut export = Export::new("data", Arc::new(fs), Vec::new());
    export.insecure = true; // tests may run without root
    Server::new(options, vec![export], Arc::new(journal))
}

pub fn client_options() -> ClientOptions {
    ClientOptions {
        export: "data".into(),
        key: None,
        timeout: None,
        host: "node1".into(),
        replay_bytes: 1 << 20,
        split_min_bytes: ClientOptions::SPLIT_MIN_BYTES,
        caches: false,
        counts_on_one_user: false,
        leases: LeaseWish::No,
        lease_share: None,
        definition: 0,
        group: None,
        aside: None,
        write_back: None,
    }
}

pub fn key(text: &str) -> Option<Key> {
    Some(Key::new(text.as_bytes()).unwrap())
}

/// Serves on a simulated network as `name`, in `scope`.
pub fn serve_simulated(network: &Network, name: &str, server: &Server, scope: &Scope) {
    let mut incoming = network.listen(name);
    let server = server.clone();
    let handle = dray_rt::ExecutorHandle::current();
    scope.spawn_on(&handle, {
        let server = server.clone();
        async move { server.expire_leases().await }
    });
    scope.spawn_on(&handle, async move {
        while let Some(connection) = incoming.recv().await {
            let server = server.clone();
            dray_rt::spawn(async move { server.serve(Arc::new(connection)).await });
        }
    });
}

/// Serves within this process, on the calling executor; answers the way there.
pub fn serve_within(server: Server) -> Arc<dyn Connect> {
    let (listener, connector) = local::listen();
    dray_rt::spawn(async move { drop(server.serve_all(Box::new(listener)).await) });
    Arc::new(connector)
}

pub async fn connect(
    connector: Arc<dyn Connect>,
    options: ClientOptions,
) -> Result<RemoteFs, ConnectError> {
    ClientSession::connect(connector, options, SessionMemory::heap()).await.map(RemoteFs::new)
}

/// Serves on `address` by sockets; answers where.
pub async fn serve_sockets(address: &Address, server: Server) -> Address {
    let Listening { address, listener } = listen_first(address).await.unwrap();
    dray_rt::spawn(async move { drop(server.serve_all(listener).await) });
    address
}
