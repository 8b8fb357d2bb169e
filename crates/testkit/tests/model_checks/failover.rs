//! Clients of a projection with failover over three servers: one dies, and they go on at the others.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{
    Buf, BufMut, Context, CreateHow, Entry, FileSystem, Fut, Identity, Lock, LockFamily, LockKind,
    LockOwner, LockRange, Make, Name, NodeId, OpenFile, OpenHow, Pid, RequestId, Stack, Write,
};
use dray_fabric::sim::{Network, Weather};
use dray_fabric::{Connect, ConnectInTurn};
use dray_layers::placement::{
    Placement, ServerIndex, SliceIndex, Slices, parse_definitions, placed_stack,
};
use dray_rpc::client::{
    ClientOptions, ClientSession, LeaseWish, RemoteFs, SessionGroup, SessionMemory,
};
use dray_rpc::server::{
    Export, MemoryJournal, MemoryRegistry, PageCacheId, ReplicaLink, ReplicaRefusal, ServerNumber,
    ServerOptions, SliceOptions, SliceServer, StateLoss,
};
use dray_rt::{ExecutorHandle, Scope, now, sleep};
use dray_testkit::fixture::simulate;

const SERVERS: u16 = 3;
/// What issue 23 promises of a takeover.
const TAKEOVER_MAX: Duration = Duration::from_secs(5);
/// How long connections with a silent server last, by chance up to this: for good.
const SILENT_MAX: Duration = Duration::from_secs(1 << 20);
/// A server that nobody hears counts as gone after so long: TTL, and what it takes to find out.
const NOTICED_MAX: Duration = Duration::from_secs(3);

/// Three servers of one file system, with all slices. Cheap to clone.
#[derive(Clone)]
struct Site(Arc<Servers>);

struct Servers {
    network: Network,
    fs: Arc<dyn FileSystem>,
    registry: MemoryRegistry,
    slices: Slices,
    /// The servers are on one machine: what one has written and not synced the others find.
    one_machine: bool,
    /// Of each server, for each of its slices: they outlive its process.
    journals: Mutex<BTreeMap<(u16, SliceIndex), MemoryJournal>>,
    processes: Mutex<BTreeMap<u16, Process>>,
}

struct Process {
    scope: Scope,
    slices: BTreeMap<SliceIndex, Arc<SliceServer>>,
}

fn slices(layout: &str) -> Slices {
    let text = format!(
        "[projection.x]\nservers = [\"tcp://io1\", \"tcp://io2\", \"tcp://io3\"]\npath = \"/\"\n\
         failover = true\n{layout}"
    );
    Slices::of(Placement::new(&parse_definitions(&text).unwrap()[0]))
}

/// The place on the network of a slice at a server.
fn place(server: ServerIndex, SliceIndex(slice): SliceIndex) -> String {
    format!("io{}/{slice}", server.0)
}

impl Servers {
    fn page_cache(&self, number: u16) -> PageCacheId {
        PageCacheId(if self.one_machine { 1 } else { 1 + u64::from(number) })
    }
}

impl Site {
    fn new(layout: &str, one_machine: bool) -> Site {
        let options = MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() };
        Site(Arc::new(Servers {
            network: Network::new(),
            fs: Arc::new(MemoryFs::new(options)),
            registry: MemoryRegistry::default(),
            slices: slices(layout),
            one_machine,
            journals: Mutex::default(),
            processes: Mutex::default(),
        }))
    }

    fn processes(&self) -> MutexGuard<'_, BTreeMap<u16, Process>> {
        self.0.processes.lock().unwrap()
    }

    /// The slices of a server, each with its other server.
    fn of(&self, number: u16) -> Vec<(SliceIndex, ServerIndex, ServerIndex)> {
        let slices = &self.0.slices;
        let both = |slice| (slice, slices.home_of(slice), slices.successor_of(slice).unwrap());
        let all = slices.all().map(both);
        all.filter(|(_, home, next)| home.0 == number || next.0 == number).collect()
    }

    fn start(&self, number: u16) {
        let (scope, here) = (Scope::new(), ExecutorHandle::current());
        let member = Arc::new(self.0.registry.member(ServerNumber(number)));
        let mut slices = BTreeMap::new();
        for (slice, home, next) in self.of(number) {
            let (name, fs) = (self.0.slices.export_of(slice, "x"), self.0.fs.clone());
            let other = if home.0 == number { next } else { home };
            let journal =
                self.0.journals.lock().unwrap().entry((number, slice)).or_default().clone();
            let export = name.clone();
            let serving = Arc::new(SliceServer::new(SliceOptions {
                name,
                other: ServerNumber(other.0),
                is_home: home.0 == number,
                options: ServerOptions::default(),
                export: Box::new(move || Export::new(&export, fs.clone(), Vec::new())),
                journal: Arc::new(journal),
                loss: StateLoss::Nothing,
                page_cache: self.0.page_cache(number),
                membership: member.clone(),
                link: Arc::new(Link { site: Arc::downgrade(&self.0), slice, to: other.0 }),
            }));
            let running = serving.clone();
            scope.spawn_on(&here, async move { running.run().await });
            let mut incoming = self.0.network.listen(&place(ServerIndex(number), slice));
            let accepting = serving.clone();
            scope.spawn_on(&here, async move {
                while let Some(connection) = incoming.recv().await {
                    let server = accepting.server();
                    dray_rt::spawn(async move { server.serve(Arc::new(connection)).await });
                }
            });
            slices.insert(slice, serving);
        }
        scope.spawn_on(&here, async move { member.keep_alive().await });
        self.processes().insert(number, Process { scope, slices });
    }

    /// Ends a server's machine without a sign: nobody's connection breaks for `SILENT_MAX`, or nearly so long.
    fn silence(&self, number: u16) {
        let weather =
            Weather { linger_one_in: Some(1), linger_max: SILENT_MAX, ..Weather::default() };
        self.0.network.set_weather(weather);
        self.kill(number);
        self.0.network.set_weather(Weather::default());
    }

    fn kill(&self, number: u16) {
        let process = self.processes().remove(&number).unwrap();
        for (slice, ..) in self.of(number) {
            self.0.network.break_all(&place(ServerIndex(number), slice));
        }
        process.scope.kill();
    }

    /// Waits until each slice has a backup that may take over.
    async fn in_step(&self) {
        let in_step = |slice| {
            let state = self.0.registry.peek(&self.0.slices.export_of(slice, "x"));
            state.is_some_and(|state| state.in_step && !state.recovering)
        };
        while !self.0.slices.all().all(in_step) {
            sleep(Duration::from_millis(20)).await;
        }
    }

    fn client(&self) -> Client {
        let node = SessionMemory::heap().node();
        let group = SessionGroup::new(1 << 20);
        let session = |slice| {
            let servers =
                [self.0.slices.home_of(slice), self.0.slices.successor_of(slice).unwrap()];
            let connect = |server| self.0.network.connector_from("client", &place(server, slice));
            let connector: Arc<dyn Connect> =
                Arc::new(ConnectInTurn::new(servers.map(connect).into()));
            let options = ClientOptions {
                export: self.0.slices.export_of(slice, "x"),
                key: None,
                timeout: None,
                host: "client".into(),
                replay_bytes: 1 << 20,
                split_min_bytes: ClientOptions::SPLIT_MIN_BYTES,
                caches: false,
                counts_on_one_user: false,
                leases: LeaseWish::No,
                lease_share: None,
                definition: 0,
                group: Some(group.clone()),
                aside: None,
                write_back: None,
            };
            let memory = SessionMemory::heap();
            memory.set_node(node);
            let info = self.0.fs.info().clone();
            ClientSession::begin_with_use(connector, options, memory, info)
        };
        let sessions: Vec<_> = self.0.slices.all().map(session).collect();
        let stacks = sessions.iter().cloned().map(RemoteFs::stack).collect();
        let stack =
            placed_stack(self.0.slices.placement().clone(), Arc::default(), stacks, Vec::new());
        Client { stack, sessions, node, requests: AtomicU64::new(1) }
    }
}

/// From one server to the other one of a slice.
struct Link {
    site: Weak<Servers>,
    slice: SliceIndex,
    to: u16,
}

impl ReplicaLink for Link {
    fn ship<'a>(
        &'a self,
        epoch: u64,
        number: u64,
        batch: Vec<u8>,
    ) -> Fut<'a, Result<(), ReplicaRefusal>> {
        Box::pin(async move {
            let away = || ReplicaRefusal::Io(io::Error::from_raw_os_error(libc::ECONNREFUSED));
            sleep(Duration::from_micros(100)).await;
            let site = Site(self.site.upgrade().ok_or_else(away)?);
            let processes = site.processes();
            let process = processes.get(&self.to).ok_or_else(away)?;
            process.slices[&self.slice].replica().take(epoch, number, &batch)
        })
    }
}

struct Client {
    stack: Stack,
    sessions: Vec<Arc<ClientSession>>,
    node: NodeId,
    requests: AtomicU64,
}

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

impl Client {
    fn cx(&self) -> Context {
        let request = RequestId(self.requests.fetch_add(1, Ordering::Relaxed));
        let root = Identity {
            uid: dray_core::Uid(0),
            gid: dray_core::Gid(0),
            groups: [].into(),
            job: "".into(),
        };
        Context::new(self.node, request, Arc::new(root), Pid(1))
    }

    async fn directory(&self, text: &str) -> Entry {
        let (root, what) = (self.stack.fs.info().root, Make::Directory { mode: 0o755 });
        self.stack.fs.make(&self.cx(), root, name(text), what).await.unwrap()
    }

    async fn create(&self, dir: &Entry, text: &str) -> (Entry, Arc<dyn OpenFile>) {
        let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
        self.stack.fs.create(&self.cx(), dir.id, name(text), how).await.unwrap()
    }

    fn begun(&self) -> usize {
        self.sessions.iter().filter(|session| session.has_begun()).count()
    }
}

fn lock() -> Lock {
    Lock {
        kind: LockKind::Exclusive,
        family: LockFamily::Posix,
        range: LockRange { start: 0, end: 9 },
        owner: LockOwner::own(7),
        pid: Pid(1),
    }
}

/// Files, locks and names are used all the time while each server dies in turn and comes back.
#[test]
fn clients_go_on_at_the_survivors_of_each_server() {
    for layout in ["layout = \"cluster\"", "layout = \"cluster-stripe\"\nstripe = \"4K\""] {
        simulate(1, async move {
            let site = Site::new(layout, true);
            (0..SERVERS).for_each(|number| site.start(number));
            site.in_step().await;
            let client = site.client();
            assert_eq!(client.begun(), 0);
            let mut files = Vec::new();
            for number in 0..8 {
                let dir = client.directory(&format!("dir{number}")).await;
                let (_, file) = client.create(&dir, "open").await;
                file.lock(&client.cx(), lock(), false).await.unwrap();
                files.push((dir, file));
            }
            for round in 0..u64::from(SERVERS) {
                site.in_step().await;
                site.kill(round as u16);
                let killed = now();
                for (dir, file) in &files {
                    let data = vec![round as u8 + 1; 12_288];
                    let at = Write::at(round * 12_288);
                    let written = file.write(&client.cx(), at, Buf::from(data)).await.unwrap();
                    assert_eq!(written, 12_288);
                    let (_, new) = client.create(dir, &format!("new{round}")).await;
                    new.close(&client.cx()).await.unwrap();
                }
                let took = now() - killed;
                assert!(took < TAKEOVER_MAX, "round {round} of {layout}: {took:?}");
                site.start(round as u16);
            }
            for (dir, file) in &files {
                let other = Lock { owner: LockOwner::own(8), ..lock() };
                let held = file.test_lock(&client.cx(), other).await.unwrap();
                assert!(held.is_some(), "a lock was lost");
                let read = file.read(&client.cx(), 0, BufMut::heap(65_536)).await.unwrap();
                let wanted: Vec<u8> = (1..=SERVERS as u8).flat_map(|one| [one; 12_288]).collect();
                assert_eq!(read.filled(), wanted);
                for round in 0..SERVERS {
                    let text = format!("new{round}");
                    client.stack.fs.lookup(&client.cx(), dir.id, name(&text)).await.unwrap();
                }
                file.close(&client.cx()).await.unwrap();
            }
            for session in &client.sessions {
                let status = session.status();
                assert_eq!((status.lost, status.unsynced.losses), (0, 0));
            }
        });
    }
}

/// A client of many servers would else begin a session with each pair of them.
#[test]
fn a_session_begins_with_the_first_call_for_its_slice_and_a_sync_begins_none() {
    simulate(1, async {
        let site = Site::new("layout = \"cluster\"", true);
        (0..SERVERS).for_each(|number| site.start(number));
        site.in_step().await;
        let client = site.client();
        client.stack.fs.sync_all(&client.cx()).await.unwrap();
        assert_eq!(client.begun(), 0);
        let root = client.stack.fs.info().root;
        client.stack.fs.getattr(&client.cx(), root).await.unwrap();
        assert_eq!(client.begun(), 1);
        assert!(client.sessions[usize::from(site.0.slices.home(root).0)].has_begun());
        client.stack.fs.sync_all(&client.cx()).await.unwrap();
        assert_eq!(client.begun(), 1);
        client.stack.session.goodbye();
        assert_eq!(client.begun(), 1);
    });
}

/// The next server of a slice waits for all clients that may have something to send again. A client that waited for
/// nothing at the silent server did not find out, and delayed the others by 60 s.
// proves: P203, P400
#[test]
fn an_idle_client_of_a_silent_server_delays_nobody() {
    for has_lock in [false, true] {
        simulate(3, async move {
            let site = Site::new("layout = \"cluster\"", false);
            (0..SERVERS).for_each(|number| site.start(number));
            site.in_step().await;
            let (idle, busy) = (site.client(), site.client());
            let mut files = Vec::new();
            for number in 0..8 {
                let dir = idle.directory(&format!("dir{number}")).await;
                let (_, file) = idle.create(&dir, "open").await;
                file.write(&idle.cx(), Write::at(0), Buf::from(vec![7; 4096])).await.unwrap();
                if has_lock {
                    file.lock(&idle.cx(), lock(), false).await.unwrap();
                }
                files.push((dir, file));
            }
            sleep(Duration::from_secs(30)).await;
            site.silence(1);
            let silent = now();
            for (dir, _) in &files {
                let (_, new) = busy.create(dir, "new").await;
                new.close(&busy.cx()).await.unwrap();
            }
            let took = now() - silent;
            assert!(took < NOTICED_MAX + TAKEOVER_MAX, "lock {has_lock}: {took:?}");
            for (_, file) in &files {
                let read = file.read(&idle.cx(), 0, BufMut::heap(4096)).await.unwrap();
                assert_eq!(read.filled(), vec![7; 4096]);
            }
            for session in idle.sessions.iter().chain(&busy.sessions) {
                let status = session.status();
                assert_eq!((status.lost, status.unsynced.losses), (0, 0));
            }
        });
    }
}
