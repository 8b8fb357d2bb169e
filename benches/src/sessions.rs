//! Clients of the wire without a mount: to count what a call costs, and what a connection
//! on which nothing happens costs the server.

use std::sync::Arc;
use std::time::Duration;

use dray_core::NodeId;
use dray_fabric::{Address, ReservedPort};
use dray_rpc::client::{ClientOptions, ClientSession, LeaseWish, RemoteFs, SessionMemory};
use dray_rt::{DriverKind, Executor};

use crate::{CommandResult, context, idle};

/// A session of its own on `address`.
pub async fn client(address: &Address, export: &str) -> CommandResult<RemoteFs> {
    connect(address, export, LeaseWish::No, SessionMemory::heap()).await
}

/// The same for a further server of a projection, whose sessions have one node.
pub async fn client_of(address: &Address, export: &str, node: NodeId) -> CommandResult<RemoteFs> {
    let memory = SessionMemory::heap();
    memory.set_node(node);
    connect(address, export, LeaseWish::No, memory).await
}

/// The same with leases.
pub async fn leased_client(address: &Address, export: &str) -> CommandResult<RemoteFs> {
    let leases = LeaseWish::Yes { callers_are_checked: true, keeps_writes: false };
    connect(address, export, leases, SessionMemory::heap()).await
}

async fn connect(
    address: &Address,
    export: &str,
    leases: LeaseWish,
    memory: SessionMemory,
) -> CommandResult<RemoteFs> {
    let options = ClientOptions {
        export: export.to_owned(),
        key: None,
        timeout: Some(Duration::from_secs(10)),
        host: "dray-bench".to_owned(),
        replay_bytes: 0,
        split_min_bytes: ClientOptions::SPLIT_MIN_BYTES,
        caches: false,
        counts_on_one_user: false,
        leases,
        lease_share: None,
        definition: 0,
        group: None,
        aside: None,
        write_back: None,
    };
    let session =
        ClientSession::connect(Arc::new(ReservedPort(address.clone())), options, memory).await;
    session.map(RemoteFs::new).map_err(context("connect"))
}

/// Sessions opened first, so that what the server allocates once is in no figure.
const FIRST: usize = 32;
/// Time for the server to settle.
const SETTLE_TIME: Duration = Duration::from_millis(500);

/// Resident memory that one more idle session, connected, costs the processes `server`,
/// KiB (kernel memory of sockets not counted).
pub fn kib_per_session(
    address: &Address,
    export: &str,
    count: usize,
    server: &[i32],
) -> CommandResult<f64> {
    let mut executor = Executor::new(DriverKind::Epoll).map_err(context("executor"))?;
    executor.block_on(async {
        let mut sessions = Vec::new();
        for _ in 0..FIRST {
            sessions.push(client(address, export).await?);
        }
        dray_rt::sleep(SETTLE_TIME).await;
        let before = idle::resident_kib(server);
        for _ in 0..count {
            sessions.push(client(address, export).await?);
        }
        dray_rt::sleep(SETTLE_TIME).await;
        let after = idle::resident_kib(server);
        sessions.iter().for_each(|fs| fs.session().goodbye());
        dray_rt::sleep(SETTLE_TIME).await; // the goodbyes are sent
        Ok(after.saturating_sub(before) as f64 / count.max(1) as f64)
    })
}
