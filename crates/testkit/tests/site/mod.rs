//! Stacks to test: layers that do nothing, and servers with clients.
#![allow(dead_code)] // each test file uses its part

mod generated;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dray_backends::posix::{PosixFs, PosixOptions, Squash};
use dray_core::{
    Admit, Context, Errno, FileSystem, FsUuid, HoldLeases, Make, Name, ObservedCall, Op,
    UpperLeases,
};
use dray_fabric::sim::{Network, Weather};
use dray_fabric::{Address, Connect, Sockets, listen_first, local};
use dray_layers::faults::{Fault, Faults, When};
use dray_layers::placement::{
    NAMES_DIR, OBJECTS_DIR, Placement, SHARDS, Slices, own_disks_stack, parse_definitions,
    placed_stack,
};
use dray_layers::{Observed, Observer, Outcome};
use dray_rpc::client::{
    ClientOptions, ClientSession, LeaseGroup, LeaseShare, LeaseWish, RemoteFs, SessionMemory,
};
use dray_rpc::server::{Export, ExportDefinition, MemoryJournal, Server, ServerOptions, StateLoss};

#[allow(unused_imports)] // as above
pub use generated::{agree, generated, generated_with_seeds, on_posix};

type Stack = Arc<dyn FileSystem>;

/// Sees every call and does nothing; counts, so that a test can tell that it was there.
#[derive(Default)]
pub struct IdleObserver {
    calls: AtomicU64,
}

impl Observer for IdleObserver {
    fn admits(&self) -> bool {
        false
    }

    fn admit<'a>(&'a self, _: &'a Context, _: &'a ObservedCall<'a>) -> Admit<'a> {
        Admit::Now
    }

    fn done(&self, _: &Context, _: &ObservedCall<'_>, _: Outcome<'_>, _: Duration) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }
}

impl IdleObserver {
    /// Calls seen so far.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}

/// `fs` under three layers that do nothing.
pub fn layered(fs: Stack, idle: &Arc<IdleObserver>) -> Stack {
    (0..3).fold(fs, |below, _| Arc::new(Observed::new(below, idle.clone())))
}

/// A directory, with every user as who they are.
pub fn posix(root: &Path) -> Arc<PosixFs> {
    let options = PosixOptions { squash: Squash::None, ..PosixOptions::default() };
    PosixFs::open(root, FsUuid(7), options).expect("a directory that can be served")
}

const EXPORT: &str = "data";

pub fn server_of(fs: Stack) -> Server {
    let export = Export::new(EXPORT, fs, Vec::new());
    Server::new(ServerOptions::default(), vec![export], Arc::new(MemoryJournal::default()))
}

/// Clients of `fs`, which a server serves: calls pass layers that do nothing on either side.
async fn clients_of(
    connectors: Vec<Arc<dyn Connect>>,
    idle: &Arc<IdleObserver>,
) -> Vec<Arc<dyn FileSystem>> {
    let mut clients = Vec::new();
    for (number, connector) in connectors.into_iter().enumerate() {
        let host = format!("client{number}");
        let remote = client_of(connector, host, SessionMemory::heap()).await;
        clients.push(layered(Arc::new(remote), idle));
    }
    clients
}

async fn client_of(connector: Arc<dyn Connect>, host: String, memory: SessionMemory) -> RemoteFs {
    let session = ClientSession::connect(connector, client_options(host), memory).await;
    RemoteFs::new(session.expect("a session in fair weather"))
}

fn client_options(host: String) -> ClientOptions {
    ClientOptions {
        export: EXPORT.into(),
        key: None,
        timeout: None,
        host,
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

/// So many clients of a projection. Each of `servers` is the file system of a server within the
/// process, and all of them have the same files.
pub async fn placed(servers: Vec<Stack>, count: usize, options: &str) -> Vec<Stack> {
    let placement = placement_over(servers.len(), options);
    if options.contains("leases = true") {
        return leased(servers, &placement, count).await;
    }
    let clients = match placement.fails_over() {
        false => connected(servers.into_iter().map(server_of).collect(), count).await,
        true => with_slices(&Slices::of(placement.clone()), &servers, count),
    };
    let clients = clients.into_iter();
    clients
        .map(|stacks| placed_stack(placement.clone(), Arc::default(), stacks, Vec::new()).fs)
        .collect()
}

/// So many clients of servers that lease what they own. The front ends above check nobody.
async fn leased(servers: Vec<Stack>, placement: &Placement, count: usize) -> Vec<Stack> {
    let mut connectors = Vec::new();
    let root = servers[0].info().root;
    for fs in servers {
        let mut export = Export::new(EXPORT, fs, Vec::new());
        export.leases = true;
        let (text, journal) = (String::new(), Arc::new(MemoryJournal::default()));
        export.definition = Some(Arc::new(ExportDefinition { fingerprint: 1, text }));
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        let (listener, connector) = local::listen();
        dray_rt::spawn(async move { drop(server.serve_all(Box::new(listener)).await) });
        connectors.push(Arc::new(connector) as Arc<dyn Connect>);
    }
    let mut clients = Vec::new();
    for number in 0..count {
        let (node, slices) = (SessionMemory::heap().node(), Slices::of(placement.clone()));
        let group = LeaseGroup::new(move |id| usize::from(slices.home(id).0));
        group.set_root(root);
        let (mut stacks, mut holders) = (Vec::new(), Vec::<Arc<dyn HoldLeases>>::new());
        for (member, connector) in connectors.iter().enumerate() {
            let memory = SessionMemory::heap();
            memory.set_node(node);
            let options = ClientOptions {
                leases: LeaseWish::Yes { callers_are_checked: false, keeps_writes: false },
                lease_share: Some(LeaseShare { group: group.clone(), member }),
                definition: 1,
                ..client_options(format!("client{number}"))
            };
            let session = ClientSession::connect(connector.clone(), options, memory).await;
            let session = session.expect("a session in fair weather");
            assert!(session.has_leases());
            holders.push(Arc::new(RemoteFs::new(session.clone())));
            stacks.push(RemoteFs::stack(session));
        }
        clients.push(placed_stack(placement.clone(), Arc::default(), stacks, holders).fs);
    }
    clients
}

/// Clients of a server that leases on what the server of `fs` leases to it, and behind them one of the server of `fs`.
/// The front ends above check nobody.
pub async fn on_leased_levels(fs: Stack, below: usize) -> Vec<Stack> {
    let checked = LeaseWish::Yes { callers_are_checked: false, keeps_writes: false };
    let upper = leasing(fs, None).await;
    let between = Arc::new(lessee(&upper, LeaseWish::LeasedOn, "between").await);
    let server = leasing(between.clone(), Some(between)).await;
    let mut clients: Vec<Stack> = Vec::new();
    for number in 0..=below {
        let connector = if number < below { &server } else { &upper };
        clients.push(Arc::new(lessee(connector, checked, &format!("client{number}")).await));
    }
    clients
}

/// A server of `fs` that leases.
async fn leasing(fs: Stack, upper_leases: Option<Arc<dyn UpperLeases>>) -> Arc<dyn Connect> {
    let mut export = Export::new(EXPORT, fs, Vec::new());
    (export.leases, export.upper_leases) = (true, upper_leases);
    let journal = Arc::new(MemoryJournal::default());
    let server = Server::new(ServerOptions::default(), vec![export], journal);
    server.restore(StateLoss::Nothing).await;
    let (listener, connector) = local::listen();
    dray_rt::spawn(async move { drop(server.serve_all(Box::new(listener)).await) });
    Arc::new(connector)
}

async fn lessee(connector: &Arc<dyn Connect>, leases: LeaseWish, host: &str) -> RemoteFs {
    let options = ClientOptions { leases, ..client_options(host.to_owned()) };
    let session = ClientSession::connect(connector.clone(), options, SessionMemory::heap()).await;
    let session = session.expect("a session in fair weather");
    assert!(session.has_leases());
    RemoteFs::new(session)
}

/// Each client's sessions with all slices, which begin with their use.
fn with_slices(slices: &Slices, servers: &[Stack], count: usize) -> Vec<Vec<dray_core::Stack>> {
    let mut connectors: Vec<Arc<dyn Connect>> = Vec::new();
    for slice in slices.all() {
        let server = server_of(servers[usize::from(slices.home_of(slice).0)].clone());
        let (listener, connector) = local::listen();
        dray_rt::spawn(async move { drop(server.serve_all(Box::new(listener)).await) });
        connectors.push(Arc::new(connector));
    }
    let info = servers[0].info();
    let client = |number| {
        let node = SessionMemory::heap().node();
        let session = |connector: &Arc<dyn Connect>| {
            let memory = SessionMemory::heap();
            memory.set_node(node);
            let options = client_options(format!("client{number}"));
            ClientSession::begin_with_use(connector.clone(), options, memory, info.clone())
        };
        connectors.iter().map(|connector| RemoteFs::stack(session(connector))).collect()
    };
    (0..count).map(client).collect()
}

/// The same, of servers with their own disks, which are prepared as `dray serve` does it.
pub async fn own_disks(servers: Vec<Stack>, count: usize, options: &str) -> Vec<Stack> {
    let placement = placement_over(servers.len(), options);
    let mut ready = Vec::new();
    for (position, fs) in servers.into_iter().enumerate() {
        prepare_disk(&*fs).await;
        let mut export = Export::new(EXPORT, fs, Vec::new());
        export.gives_object_ids = position == 0;
        let journal = Arc::new(MemoryJournal::default());
        ready.push(Server::new(ServerOptions::default(), vec![export], journal));
    }
    let clients = connected(ready, count).await.into_iter();
    clients.map(|stacks| own_disks_stack(placement.clone(), stacks).fs).collect()
}

async fn prepare_disk(fs: &dyn FileSystem) {
    let (cx, root) = (Context::system(), fs.info().root);
    let make = async |dir, name: &str, mode| {
        let what = Make::Directory { mode };
        fs.make(&cx, dir, Name::new(name.as_bytes()).unwrap(), what).await.unwrap().id
    };
    make(root, NAMES_DIR, 0o777).await;
    let objects = make(root, OBJECTS_DIR, 0o700).await;
    for shard in 0..SHARDS {
        make(objects, &format!("{shard:02x}"), 0o700).await;
    }
}

pub fn placement_over(servers: usize, options: &str) -> Placement {
    let names: Vec<String> = (1..=servers).map(|number| format!("\"tcp://io{number}\"")).collect();
    let names = names.join(", ");
    let text = format!("[projection.x]\nservers = [{names}]\npath = \"/\"\n{options}");
    Placement::new(&parse_definitions(&text).expect("a definition").remove(0))
}

/// Each client's sessions with all servers.
pub async fn connected(servers: Vec<Server>, count: usize) -> Vec<Vec<dray_core::Stack>> {
    let connectors = served(servers);
    let mut clients = Vec::new();
    for number in 0..count {
        let sessions = sessions_of(&connectors, number).await;
        clients.push(sessions.into_iter().map(RemoteFs::stack).collect());
    }
    clients
}

/// One client's sessions with all servers.
pub async fn sessions_with(servers: Vec<Server>) -> Vec<Arc<ClientSession>> {
    sessions_of(&served(servers), 0).await
}

/// Serves within the process; answers the ways there.
fn served(servers: Vec<Server>) -> Vec<Arc<dyn Connect>> {
    let serve = |server: Server| {
        let (listener, connector) = local::listen();
        dray_rt::spawn(async move { drop(server.serve_all(Box::new(listener)).await) });
        Arc::new(connector) as Arc<dyn Connect>
    };
    servers.into_iter().map(serve).collect()
}

async fn sessions_of(connectors: &[Arc<dyn Connect>], number: usize) -> Vec<Arc<ClientSession>> {
    let (mut sessions, node) = (Vec::new(), SessionMemory::heap().node());
    for connector in connectors {
        let memory = SessionMemory::heap();
        memory.set_node(node);
        let remote = client_of(connector.clone(), format!("client{number}"), memory).await;
        sessions.push(remote.session().clone());
    }
    sessions
}

/// A server at which calls of one kind fail.
pub fn failing(fs: Stack, op: Op, errno: Errno) -> Stack {
    let fault =
        Fault { op: Some(op), when: When::Always, delay: Duration::ZERO, error: Some(errno) };
    Arc::new(Observed::new(fs, Arc::new(Faults::new(vec![fault]))))
}

/// So many clients over the simulated `network`. To be called in a simulation.
pub async fn simulated(
    network: &Network,
    fs: Stack,
    count: usize,
    idle: &Arc<IdleObserver>,
) -> Vec<Stack> {
    let server = server_of(layered(fs, idle));
    let mut incoming = network.listen("server");
    dray_rt::spawn(async move {
        while let Some(connection) = incoming.recv().await {
            let server = server.clone();
            dray_rt::spawn(async move { server.serve(Arc::new(connection)).await });
        }
    });
    let connector = |number| network.connector_from(&format!("client{number}"), "server");
    clients_of((0..count).map(connector).collect(), idle).await
}

/// Weather in which nothing is well for long. Frames are late, get lost with their connection,
/// arrive with only the answer lost, or arrive when they have been given up.
pub const FOUL: Weather = Weather {
    delay_min: Duration::from_micros(5),
    delay_max: Duration::from_millis(1),
    break_one_in: Some(25),
    deliver_then_break_one_in: Some(2),
    linger_one_in: Some(2),
    linger_max: Duration::from_millis(50),
};

/// So many clients within the process of their server, on one executor.
pub async fn within(fs: Stack, count: usize, idle: &Arc<IdleObserver>) -> Vec<Stack> {
    let server = server_of(layered(fs, idle));
    let (listener, connector) = local::listen();
    dray_rt::spawn(async move { drop(server.serve_all(Box::new(listener)).await) });
    let connector = |_| Arc::new(connector.clone()) as Arc<dyn Connect>;
    clients_of((0..count).map(connector).collect(), idle).await
}

/// So many clients over a Unix socket in `dir`. To be called on an executor with a real
/// driver.
pub async fn on_a_socket(
    dir: &Path,
    fs: Stack,
    count: usize,
    idle: &Arc<IdleObserver>,
) -> Vec<Stack> {
    on_a_socket_of(dir, &server_of(layered(fs, idle)), count, idle).await
}

/// The same, of a server that other threads serve as well, each at a socket of its own.
pub async fn on_a_socket_of(
    dir: &Path,
    server: &Server,
    count: usize,
    idle: &Arc<IdleObserver>,
) -> Vec<Stack> {
    let address: Address = format!("unix://{}/socket", dir.display()).parse().expect("an address");
    let server = server.clone();
    let listener = listen_first(&address).await.expect("a socket").listener;
    dray_rt::spawn(async move { drop(server.serve_all(listener).await) });
    let connector = |_| Arc::new(Sockets(address.clone())) as Arc<dyn Connect>;
    clients_of((0..count).map(connector).collect(), idle).await
}
