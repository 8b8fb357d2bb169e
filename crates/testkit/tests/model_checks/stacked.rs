//! A server whose file system is a client of another server, as a forwarder is. What it does for
//! its clients is done for them, and its death leaves nothing behind.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{
    Admit, Buf, Context, CreateHow, Errno, FileSystem, Identity, Lock, LockFamily, LockKind,
    LockOwner, LockRange, Name, NodeId, ObservedCall, OpenFile, OpenHow, Origin, Pid, RequestId,
    SessionControl, Write,
};
use dray_fabric::sim::Network;
use dray_layers::{Observed, Observer, Outcome};
use dray_rpc::client::{ClientOptions, ClientSession, LeaseWish, RemoteFs, SessionMemory};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions, StateLoss};
use dray_rt::{ExecutorHandle, Scope, sleep, spawn_join};
use dray_testkit::fixture::{TempDir, simulate};

const EXPORT: &str = "data";
const BOOT: u128 = 7;
/// Longer than clients take to come back to a server.
const COME_BACK: Duration = Duration::from_secs(10);

/// Notes where the calls began that reach the far server.
#[derive(Default)]
struct Origins(Mutex<BTreeSet<Origin>>);

impl Observer for Origins {
    fn admits(&self) -> bool {
        false
    }

    fn admit<'a>(&'a self, _: &'a Context, _: &'a ObservedCall<'a>) -> Admit<'a> {
        Admit::Now
    }

    fn done(&self, cx: &Context, _: &ObservedCall<'_>, _: Outcome<'_>, _: Duration) {
        self.0.lock().unwrap().insert(cx.origin);
    }
}

/// A client of a server.
struct Client {
    fs: RemoteFs,
    requests: AtomicU64,
}

impl Client {
    async fn of(network: &Network, from: &str, to: &str, memory: SessionMemory) -> Client {
        let options = ClientOptions {
            export: EXPORT.into(),
            key: None,
            timeout: None,
            host: from.into(),
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
        };
        let connector = network.connector_from(from, to);
        let session = ClientSession::connect(connector, options, memory).await.expect("a session");
        Client { fs: RemoteFs::new(session), requests: AtomicU64::new(1) }
    }

    fn node(&self) -> NodeId {
        self.fs.session().node()
    }

    fn cx(&self) -> Context {
        let request = RequestId(self.requests.fetch_add(1, Ordering::Relaxed));
        Context::new(self.node(), request, Identity::system(), Pid(1))
    }

    async fn open(&self, name: &str, flags: i32) -> dray_core::Result<Arc<dyn OpenFile>> {
        let open = OpenHow::new(libc::O_RDWR | flags);
        let how = CreateHow { open, mode: 0o666, exclusive: flags & libc::O_EXCL != 0 };
        let root = self.fs.info().root;
        let made = self.fs.create(&self.cx(), root, Name::new(name.as_bytes()).unwrap(), how).await;
        made.map(|(_, file)| file)
    }
}

fn lock(kind: LockKind, family: LockFamily) -> Lock {
    Lock { family, kind, range: LockRange::ALL, owner: LockOwner::own(1), pid: Pid(1) }
}

fn listen(network: &Network, name: &str, server: &Server) {
    let mut incoming = network.listen(name);
    let server = server.clone();
    dray_rt::spawn(async move {
        while let Some(connection) = incoming.recv().await {
            let server = server.clone();
            dray_rt::spawn(async move { server.serve(Arc::new(connection)).await });
        }
    });
}

/// The far server, and the one in between with what of it outlives its process.
struct Site {
    network: Network,
    far: Server,
    far_fs: MemoryFs,
    origins: Arc<Origins>,
    journal: MemoryJournal,
    dir: TempDir,
    starts: u32,
    process: Option<(Scope, RemoteFs, Server)>,
}

impl Site {
    async fn new() -> Site {
        let network = Network::new();
        let far_fs = MemoryFs::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() });
        let origins = Arc::new(Origins::default());
        let seen = Observed::new(Arc::new(far_fs.clone()), origins.clone());
        let export = Export::new(EXPORT, Arc::new(seen), Vec::new());
        let journal = Arc::new(MemoryJournal::default());
        let far = Server::new(ServerOptions::default(), vec![export], journal);
        listen(&network, "far", &far);
        let mut site = Site {
            network,
            far,
            far_fs,
            origins,
            journal: MemoryJournal::default(),
            dir: TempDir::new("stacked").unwrap(),
            starts: 0,
            process: None,
        };
        site.start().await;
        site
    }

    fn memory(&self) -> PathBuf {
        self.dir.path().join(self.starts.to_string())
    }

    /// Starts the server in between, which goes on where the one before it was.
    async fn start(&mut self) {
        let (network, path, journal) = (self.network.clone(), self.memory(), self.journal.clone());
        let (give, given) = dray_rt::sync::oneshot::channel();
        let scope = Scope::new();
        scope.spawn_on(&ExecutorHandle::current(), async move {
            let memory = SessionMemory::open_file(&path, BOOT).expect("a file of its own");
            let client = Client::of(&network, "between", "far", memory).await;
            client.fs.attached();
            let export = Export::new(EXPORT, Arc::new(client.fs.clone()), Vec::new());
            let server = Server::new(ServerOptions::default(), vec![export], Arc::new(journal));
            server.restore(StateLoss::Nothing).await;
            listen(&network, "between", &server);
            let _ = give.send((client.fs, server)); // the test waits for it
        });
        let (fs, server) = given.await.expect("it starts");
        self.process = Some((scope, fs, server));
    }

    /// Kills the server's process: of its memory there is what it had written by now.
    fn kill(&mut self) {
        let before = self.memory();
        self.starts += 1;
        std::fs::copy(before, self.memory()).unwrap();
        let (scope, _fs, _server) = self.process.take().unwrap();
        self.network.break_all("between");
        scope.kill();
    }

    async fn client(&self, name: &str) -> Arc<Client> {
        Arc::new(Client::of(&self.network, name, "between", SessionMemory::heap()).await)
    }

    /// What clients of the processes before have not come back for is given up.
    async fn release(&self) {
        self.process.as_ref().unwrap().1.session().release_inherited();
        sleep(Duration::from_secs(1)).await;
    }

    /// Open files and locks at the far server.
    fn left(&self) -> (usize, usize) {
        let clients = self.far.status().clients;
        assert_eq!(clients.len(), 1, "the server in between is one client over all its restarts");
        (clients[0].files, self.far_fs.locks().len())
    }
}

#[test]
fn locks_of_two_clients_behind_a_server_are_theirs() {
    simulate(1, async {
        let site = Site::new().await;
        let (one, two) = (site.client("one").await, site.client("two").await);
        for family in [LockFamily::Posix, LockFamily::Flock] {
            let (first, second) =
                (one.open("f", 0).await.unwrap(), two.open("f", 0).await.unwrap());
            let exclusive = lock(LockKind::Exclusive, family);
            first.lock(&one.cx(), exclusive, false).await.unwrap();
            let refused = second.lock(&two.cx(), exclusive, false).await.unwrap_err();
            assert_eq!(refused.errno(), Errno::EAGAIN, "the number of its owner is the same");
            if family == LockFamily::Posix {
                assert!(second.test_lock(&two.cx(), exclusive).await.unwrap().is_some());
                second.flush(&two.cx(), exclusive.owner).await.unwrap(); // not the other's
                assert_eq!(site.far_fs.locks().len(), 1);
            }
            assert!(first.test_lock(&one.cx(), exclusive).await.unwrap().is_none());
            first.lock(&one.cx(), lock(LockKind::Unlock, family), false).await.unwrap();
            second.lock(&two.cx(), exclusive, false).await.unwrap();
            first.close(&one.cx()).await.unwrap();
            second.close(&two.cx()).await.unwrap();
            sleep(Duration::from_secs(1)).await;
            assert_eq!(site.left(), (0, 0));
        }
    });
}

#[test]
fn the_far_server_knows_where_a_call_began() {
    simulate(1, async {
        let site = Site::new().await;
        let (one, two) = (site.client("one").await, site.client("two").await);
        let file = one.open("f", 0).await.unwrap();
        let cx = two.cx();
        two.fs.lookup(&cx, two.fs.info().root, Name::new(b"f").unwrap()).await.unwrap();
        let write = one.cx();
        file.write(&write, Write::at(0), Buf::from(b"data".to_vec())).await.unwrap();
        let seen = site.origins.0.lock().unwrap().clone();
        assert!(seen.contains(&cx.origin) && seen.contains(&write.origin), "{seen:?}");
        let nodes: BTreeSet<NodeId> = seen.iter().map(|origin| origin.node).collect();
        assert!(nodes.contains(&one.node()) && nodes.contains(&two.node()));
    });
}

/// A client that makes files, each once, under a lock of another.
async fn work(client: Arc<Client>, name: &'static str) {
    for number in 0..40 {
        let common = client.open("lock", 0).await.unwrap();
        common
            .lock(&client.cx(), lock(LockKind::Exclusive, LockFamily::Posix), true)
            .await
            .unwrap();
        let made = client.open(&format!("{name}{number}"), libc::O_CREAT | libc::O_EXCL).await;
        let made = made.expect("made once: nobody else makes it");
        let log = client.open("log", libc::O_APPEND).await.unwrap();
        let how = Write { append: true, ..Write::at(0) };
        log.write(&client.cx(), how, Buf::from(b"x".to_vec())).await.unwrap();
        for file in [made, log] {
            file.close(&client.cx()).await.unwrap();
        }
        common.flush(&client.cx(), LockOwner::own(1)).await.unwrap();
        common.close(&client.cx()).await.unwrap();
    }
}

#[test]
fn a_server_that_is_a_client_dies_and_leaves_nothing_behind() {
    let mut repeated = 0;
    for seed in 0..20 {
        simulate(seed, async {
            let mut site = Site::new().await;
            let (one, two) = (site.client("one").await, site.client("two").await);
            let working = [(one.clone(), "a"), (two.clone(), "b")]
                .map(|(client, name)| spawn_join(work(client, name)));
            for _ in 0..8 {
                sleep(Duration::from_micros(300 + dray_rt::random_u64() % 5000)).await;
                site.kill();
                sleep(Duration::from_millis(5)).await;
                site.start().await;
            }
            for client in working {
                client.await.expect("it works to its end");
            }
            let log = two.open("log", 0).await.unwrap();
            assert_eq!(log.getattr(&two.cx()).await.unwrap().size, 80, "each once");
            log.close(&two.cx()).await.unwrap();
            sleep(COME_BACK).await; // both clients are still there, to send their last closes
            site.release().await;
            drop((one, two));
            let between = &site.process.as_ref().unwrap().2;
            let open: Vec<usize> = between.status().clients.iter().map(|one| one.files).collect();
            assert_eq!(open, [0, 0], "open files of its clients, seed {seed}");
            assert_eq!(site.left(), (0, 0), "open files and locks of dead processes, seed {seed}");
            repeated += site.far.status().repeated_calls;
        });
    }
    assert!(repeated > 0, "no change was ever asked for again");
}

#[test]
fn what_a_client_holds_outlives_the_server_in_between() {
    simulate(1, async {
        let mut site = Site::new().await;
        let (one, two) = (site.client("one").await, site.client("two").await);
        let (first, second) = (one.open("f", 0).await.unwrap(), two.open("f", 0).await.unwrap());
        let exclusive = lock(LockKind::Exclusive, LockFamily::Posix);
        first.lock(&one.cx(), exclusive, false).await.unwrap();
        site.kill();
        assert_eq!(site.far_fs.locks().len(), 1, "nobody can have it meanwhile");
        site.start().await;
        sleep(COME_BACK).await;
        site.release().await;
        assert_eq!(site.left(), (2, 1), "opened again by both, and locked again by the first");
        let refused = second.lock(&two.cx(), exclusive, false).await.unwrap_err();
        assert_eq!(refused.errno(), Errno::EAGAIN);
        first.close(&one.cx()).await.unwrap();
        sleep(Duration::from_secs(1)).await;
        second.lock(&two.cx(), exclusive, false).await.unwrap();
        second.close(&two.cx()).await.unwrap();
        sleep(Duration::from_secs(1)).await;
        assert_eq!(site.left(), (0, 0));
    });
}
