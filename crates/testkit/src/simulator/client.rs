//! A client's node: its process can be crashed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dray_core::{
    Context, CreateHow, Entry, Error, FileId, FileSystem, NameBuf, OpenFile, OpenHow, Pid,
    RequestId,
};
use dray_fabric::sim::Network;
use dray_fabric::{Connect, ConnectInTurn};
use dray_rpc::client::{ClientOptions, ClientSession, LeaseWish, RemoteFs, SessionMemory};
use dray_rt::sync::oneshot;
use dray_rt::{ExecutorHandle, Scope};

use super::Outcome;
use super::client_machine::ClientMachine;
use super::fleet::SERVERS;
use super::machine::EXPORT;
use crate::step::identity;

/// All callers are root, so it matters to none who checks them.
fn leases(keeps_writes: bool) -> LeaseWish {
    LeaseWish::Yes { callers_are_checked: true, keeps_writes }
}

/// Where a client's process runs.
pub(super) struct ClientNode {
    name: String,
    network: Network,
    scope: Scope,
}

impl ClientNode {
    pub(super) fn new(network: &Network, name: String) -> ClientNode {
        ClientNode::with_clock(network, name, 1.0)
    }

    /// The same, whose clock counts so many seconds in a second.
    pub(super) fn with_clock(network: &Network, name: String, clock: f64) -> ClientNode {
        ClientNode { name, network: network.clone(), scope: Scope::with_clock(clock) }
    }

    /// Runs something on the node; nothing comes of it if the node crashes.
    pub(super) fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> oneshot::Receiver<T> {
        let (sender, receiver) = oneshot::channel();
        self.scope.spawn_on(&ExecutorHandle::current(), async move {
            let _ = sender.send(work.await); // the caller may have given up
        });
        receiver
    }

    /// The process dies where it stands.
    pub(super) fn crash(&self) {
        self.network.break_all(&self.name);
        self.scope.kill();
    }
}

/// How a client mounts.
#[derive(Clone, Copy)]
pub(super) struct MountHow {
    /// Bytes of changes that it keeps.
    pub(super) replay_bytes: u64,
    /// How long it waits for the server; none: for ever.
    pub(super) limit: Option<Duration>,
    /// The slice that it mounts, which has two servers; none: the export of the only server.
    pub(super) slice: Option<&'static str>,
    /// The client wants leases.
    pub(super) leases: bool,
    /// The client keeps what it writes under write leases.
    pub(super) keeps_writes: bool,
}

impl MountHow {
    /// One that keeps so many bytes, and waits for its one server for ever.
    pub(super) fn keeping(replay_bytes: u64) -> MountHow {
        MountHow { replay_bytes, limit: None, slice: None, leases: false, keeps_writes: false }
    }
}

/// A mounted client.
#[derive(Clone)]
pub(super) struct SimClient {
    pub(super) number: usize,
    pub(super) fs: RemoteFs,
    requests: Arc<AtomicU64>,
    /// The machine, if it has a disk.
    pub(super) machine: Option<ClientMachine>,
}

/// What a client of this host says when it mounts.
pub(super) fn options(
    host: &str,
    MountHow { replay_bytes, limit, slice, leases: has_leases, keeps_writes }: MountHow,
) -> ClientOptions {
    ClientOptions {
        export: slice.unwrap_or(EXPORT).into(),
        key: None,
        timeout: limit,
        host: host.into(),
        replay_bytes,
        split_min_bytes: 8,
        caches: true,
        counts_on_one_user: false,
        leases: if has_leases { leases(keeps_writes) } else { LeaseWish::No },
        lease_share: None,
        definition: 0,
        group: None,
        aside: None,
        write_back: None,
    }
}

impl SimClient {
    pub(super) fn new(
        number: usize,
        fs: RemoteFs,
        requests: Arc<AtomicU64>,
        machine: Option<ClientMachine>,
    ) -> SimClient {
        SimClient { number, fs, requests, machine }
    }

    /// Mounts. To be run on a [`ClientNode`] of this name.
    pub(super) async fn mount(
        network: &Network,
        name: &str,
        number: usize,
        how: MountHow,
    ) -> SimClient {
        let (options, slice) = (options(name, how), how.slice);
        loop {
            let servers = SERVERS.map(|server| network.connector_from(name, server));
            let connector: Arc<dyn Connect> = match slice {
                Some(_) => Arc::new(ConnectInTurn::new(servers.into())),
                None => servers[0].clone(),
            };
            let session =
                ClientSession::connect(connector, options.clone(), SessionMemory::heap()).await;
            if let Ok(session) = session {
                session.attach_another();
                let fs = RemoteFs::new(session);
                return SimClient::new(number, fs, Arc::new(AtomicU64::new(1)), None);
            }
            dray_rt::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Of the next request, by root.
    pub(super) fn cx(&self) -> Context {
        self.cx_of(self.next_request())
    }

    /// The number of the next request.
    pub(super) fn next_request(&self) -> RequestId {
        RequestId(self.requests.fetch_add(1, Ordering::Relaxed))
    }

    /// Of a request, as a kernel repeats it that has had no answer.
    pub(super) fn cx_of(&self, request: RequestId) -> Context {
        Context::new(self.fs.session().node(), request, identity(0), Pid(self.number as u32 + 1))
    }

    pub(super) fn root(&self) -> FileId {
        self.fs.info().root
    }

    pub(super) async fn lookup(&self, dir: FileId, text: &str) -> Result<Entry, Error> {
        self.fs.lookup(&self.cx(), dir, &name(text)).await
    }

    /// Opens a file, which is made if need be.
    pub(super) async fn open(&self, dir: FileId, text: &str, flags: i32) -> Outcome<SimFile> {
        let how = CreateHow { open: OpenHow::new(flags), mode: 0o666, exclusive: false };
        let opened = self.fs.create(&self.cx(), dir, &name(text), how).await;
        Ok(opened.map_err(self.failed(&format!("open {text}")))?.1)
    }

    /// Says who failed, and with what.
    pub(super) fn failed(&self, what: &str) -> impl Fn(Error) -> String + use<> {
        let text = format!("client {}: {what}", self.number);
        let session = self.fs.session().clone();
        move |error| {
            let lost = session.status().unsynced.events;
            let lost: Vec<_> = lost.iter().map(|event| event.what.as_str()).collect();
            format!("{text}: {error:?} {lost:?}")
        }
    }
}

pub(super) type SimFile = Arc<dyn OpenFile>;

pub(super) fn name(text: &str) -> NameBuf {
    NameBuf::new(text.as_bytes()).expect("names of workloads are names")
}
