//! Three servers that share a file system lease what they own. Connections break, servers and clients are cut off,
//! servers die, and a client dies. Clocks of clients drift. No answer is stale: some order explains what all clients saw of each name, and
//! of the attributes of each file.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dray_backends::memory::{MemoryDisk, MemoryOptions};
use dray_core::{
    Context, CreateHow, Errno, FileId, FileSystem, FileType, HoldLeases, Identity, Make, Name,
    OpenHow, Pid, RemoveKind, RenameHow, RequestId, SessionControl, Timestamp,
};
use dray_fabric::sim::{Network, Weather};
use dray_layers::placement::{Placement, Slices, placed_stack};
use dray_rpc::client::{
    ClientOptions, ClientSession, LeaseGroup, LeaseShare, LeaseWish, RemoteFs, SessionMemory,
};
use dray_rpc::server::{
    Export, ExportDefinition, MemoryJournal, Sabotage, Server, ServerOptions, StateLoss,
};
use dray_rt::sync::oneshot;
use dray_rt::{DriverKind, Executor, ExecutorHandle, Scope, random_u64, sleep, timeout};
use dray_testkit::simulator::{HistoryEvent, RegisterOp, linearizable};

use crate::site::placement_over;

const SERVERS: usize = 3;
const CLIENTS: usize = 3;
const LAYOUT: &str = "layout = \"cluster\"\nleases = true";
/// How long clients believe what is leased, and how long a hold lasts at most.
const TERM: Duration = Duration::from_millis(400);
const HOLD_TIME: Duration = Duration::from_millis(2_400);
/// Operations of each client. A history of one thing has no more than 128.
const OPERATIONS: usize = 128 / CLIENTS;
/// What the clocks of clients count in a second of the servers, seconds: a tenth less and more.
const CLOCKS: [f64; CLIENTS] = [1.0 / 1.1, 1.1, 1.0];
/// Simulated time after which a run makes no progress any more.
const TIME_MAX: Duration = Duration::from_secs(600);
/// In each directory: a name that stands for one file or another.
const GIVEN: &str = "given";

/// What a run does besides.
#[derive(Clone, Copy, Default)]
struct Broken {
    server: Option<Sabotage>,
    /// Clients believe the owner of a file alone.
    believes_owner: bool,
    /// Clocks of clients drift further than leases bear.
    drifts: bool,
}

fn pick(below: u64) -> u64 {
    random_u64() % below.max(1)
}

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

/// The servers: their processes, and what outlives them.
struct Servers {
    network: Network,
    disk: MemoryDisk,
    journals: [MemoryJournal; SERVERS],
    scopes: Mutex<[Scope; SERVERS]>,
    broken: Option<Sabotage>,
}

impl Servers {
    fn name(server: usize) -> String {
        format!("server{server}")
    }

    async fn start(&self, number: usize) {
        let options = ServerOptions {
            lease: Duration::from_secs(60),
            lease_term: TERM,
            hold_time: HOLD_TIME,
            sabotage: self.broken,
            ..ServerOptions::default()
        };
        let mut export = Export::new("x", Arc::new(self.disk.mount()), Vec::new());
        (export.insecure, export.leases) = (true, true);
        export.definition =
            Some(Arc::new(ExportDefinition { fingerprint: 1, text: String::new() }));
        let server = Server::new(options, vec![export], Arc::new(self.journals[number].clone()));
        server.restore(StateLoss::Nothing).await;
        let scope = Scope::new();
        let (mut incoming, expiring) =
            (self.network.listen(&Servers::name(number)), server.clone());
        let handle = ExecutorHandle::current();
        scope.spawn_on(&handle, async move { expiring.expire_leases().await });
        scope.spawn_on(&handle, async move {
            while let Some(connection) = incoming.recv().await {
                let server = server.clone();
                dray_rt::spawn(async move { server.serve(Arc::new(connection)).await });
            }
        });
        self.scopes.lock().unwrap()[number] = scope;
    }

    async fn restart(&self, number: usize) {
        self.network.break_all(&Servers::name(number));
        let scope = std::mem::take(&mut self.scopes.lock().unwrap()[number]);
        scope.kill();
        sleep(Duration::from_micros(pick(50_000))).await;
        self.start(number).await;
    }
}

/// A client with a session at each server.
#[derive(Clone)]
struct Client {
    number: usize,
    fs: Arc<dyn FileSystem>,
    sessions: Vec<RemoteFs>,
    requests: Arc<AtomicU64>,
}

impl Client {
    async fn mount(
        network: &Network,
        placement: &Placement,
        (number, root): (usize, FileId),
        broken: Broken,
    ) -> Client {
        let (node, slices) = (SessionMemory::heap().node(), Slices::of(placement.clone()));
        let owner = move |id| match broken.believes_owner {
            true => SERVERS, // nobody: each session counts on itself
            false => usize::from(slices.home(id).0),
        };
        let group = LeaseGroup::new(owner);
        group.set_root(root);
        let mut sessions = Vec::new();
        for member in 0..SERVERS {
            let memory = SessionMemory::heap();
            memory.set_node(node);
            let options = ClientOptions {
                export: "x".into(),
                key: None,
                timeout: None,
                host: format!("client{number}"),
                replay_bytes: 1 << 20,
                split_min_bytes: ClientOptions::SPLIT_MIN_BYTES,
                caches: false,
                counts_on_one_user: false,
                leases: LeaseWish::Yes { callers_are_checked: true, keeps_writes: false },
                lease_share: Some(LeaseShare { group: group.clone(), member }),
                definition: 1,
                group: None,
                aside: None,
                write_back: None,
            };
            let host = format!("client{number}");
            let connector = network.connector_from(&host, &Servers::name(member));
            let session = ClientSession::connect(connector, options, memory).await.unwrap();
            session.attach_another();
            sessions.push(RemoteFs::new(session));
        }
        sessions.iter().for_each(hear_recalls);
        let stacks = sessions.iter().map(|remote| RemoteFs::stack(remote.session().clone()));
        let holders = sessions.iter().map(|remote| Arc::new(remote.clone()) as Arc<dyn HoldLeases>);
        let (stacks, holders) = (stacks.collect(), holders.collect());
        let fs = placed_stack(placement.clone(), Arc::default(), stacks, holders).fs;
        Client { number, fs, sessions, requests: Arc::new(AtomicU64::new(1)) }
    }

    fn cx(&self) -> Context {
        let request = RequestId(self.requests.fetch_add(1, Ordering::Relaxed));
        let node = self.sessions[0].session().node();
        Context::new(node, request, Identity::system(), Pid(self.number as u32 + 1))
    }

    /// Calls that leases have spared.
    fn spared(&self) -> u64 {
        let hits = |remote: &RemoteFs| remote.session().status().leases.map_or(0, |one| one.hits);
        self.sessions.iter().map(hits).sum()
    }
}

/// What is asked back is given back at once, or late, or never.
fn hear_recalls(session: &RemoteFs) {
    session.hear_recalls_by(Arc::new(|_, done| {
        let late = match pick(48) {
            0 => TERM * 3,
            1..8 => Duration::from_micros(pick(30_000)),
            _ => return drop(done),
        };
        dray_rt::spawn(async move {
            sleep(late).await;
            drop(done);
        });
    }));
}

/// What is changed and looked at.
#[derive(Clone, Copy)]
enum Subject {
    /// The file that a directory's name stands for.
    Given(usize),
    /// How many names a file has. It gets a second one in another directory, and loses that.
    Links(usize),
    /// When a file's attributes changed. One client alone moves it.
    Moved(usize),
}

impl Subject {
    const COUNT: usize = 2 * SERVERS + CLIENTS;

    fn any() -> Subject {
        match pick(Subject::COUNT as u64) as usize {
            one if one < SERVERS => Subject::Given(one),
            one if one < 2 * SERVERS => Subject::Links(one - SERVERS),
            one => Subject::Moved(one - 2 * SERVERS),
        }
    }

    fn number(self) -> usize {
        match self {
            Subject::Given(one) => one,
            Subject::Links(one) => SERVERS + one,
            Subject::Moved(one) => 2 * SERVERS + one,
        }
    }
}

/// The work of all clients, and what came of it.
#[derive(Default)]
struct Work {
    /// One at each server.
    dirs: Vec<FileId>,
    /// The files of `Links` and `Moved`.
    linked: Vec<FileId>,
    moved: Vec<FileId>,
    ticks: AtomicU64,
    /// Moves of each file that have been asked for.
    moves: Mutex<[usize; CLIENTS]>,
    histories: [Mutex<Vec<HistoryEvent>>; Subject::COUNT],
}

fn nanos(time: Timestamp) -> u64 {
    time.sec as u64 * 1_000_000_000 + u64::from(time.nsec)
}

/// The directories before and behind the move of this number.
fn way(number: usize) -> (usize, usize) {
    (number % SERVERS, (number + 1) % SERVERS)
}

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

impl Work {
    /// Directories at three servers, with the files that are linked and moved.
    async fn prepare(disk: &MemoryDisk, placement: &Placement) -> Work {
        let (fs, cx) = (disk.mount(), Context::system());
        let mut dirs: [Option<FileId>; SERVERS] = [None; SERVERS];
        for number in 0.. {
            let made = format!("dir{number}");
            let what = Make::Directory { mode: 0o755 };
            let id = fs.make(&cx, fs.info().root, name(&made), what).await.unwrap().id;
            dirs[usize::from(placement.directory(id).0)].get_or_insert(id);
            if dirs.iter().all(Option::is_some) {
                break;
            }
        }
        let dirs: Vec<FileId> = dirs.into_iter().flatten().collect();
        let mut work = Work { dirs, ..Work::default() };
        for number in 0..SERVERS {
            // Their attributes are not at the server of the name.
            let at = usize::from(placement.directory(work.dirs[number]).0);
            for (text, files) in [("linked", &mut work.linked), ("moved", &mut work.moved)] {
                let text = format!("{text}{number}");
                loop {
                    let dir = if text.starts_with('m') { work.dirs[0] } else { work.dirs[number] };
                    let (entry, file) = fs.create(&cx, dir, name(&text), NEW).await.unwrap();
                    file.close(&cx).await.unwrap();
                    if usize::from(placement.home(entry.id).0) != at {
                        files.push(entry.id);
                        break;
                    }
                    fs.remove(&cx, dir, name(&text), RemoveKind::File).await.unwrap();
                }
            }
        }
        for number in 0..SERVERS {
            let subjects = [
                (Subject::Links(number), 1),
                (
                    Subject::Moved(number),
                    nanos(fs.getattr(&cx, work.moved[number]).await.unwrap().ctime),
                ),
            ];
            for (subject, value) in subjects {
                let begun = work.begin(subject, value);
                work.end(subject, begun, RegisterOp::Write(value));
            }
        }
        work
    }

    fn tick(&self) -> u64 {
        self.ticks.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn history(&self, subject: Subject) -> std::sync::MutexGuard<'_, Vec<HistoryEvent>> {
        self.histories[subject.number()].lock().unwrap()
    }

    fn begin(&self, subject: Subject, value: u64) -> usize {
        let (from, kind) = (self.tick(), RegisterOp::Write(value));
        let mut events = self.history(subject);
        events.push(HistoryEvent { from, to: u64::MAX, kind, optional: true });
        events.len() - 1
    }

    fn end(&self, subject: Subject, index: usize, kind: RegisterOp) {
        let to = self.tick();
        let event = &mut self.history(subject)[index];
        (event.to, event.kind, event.optional) = (to, kind, false);
    }

    async fn look(&self, client: &Client, subject: Subject) {
        let cx = client.cx();
        match subject {
            Subject::Given(dir) => {
                let from = self.tick();
                let found = match pick(3) {
                    0 => listed(client, self.dirs[dir]).await,
                    _ => match client.fs.lookup(&cx, self.dirs[dir], name(GIVEN)).await {
                        Ok(entry) => entry.id.ino,
                        Err(error) => absent(error),
                    },
                };
                self.read(subject, from, found);
            }
            Subject::Links(number) => {
                self.find(client, (number, "linked", number)).await;
                let from = self.tick();
                let attr = client.fs.getattr(&cx, self.linked[number]).await.unwrap();
                self.read(subject, from, attr.nlink.into());
            }
            Subject::Moved(number) => {
                let dir = pick(SERVERS as u64) as usize;
                self.find(client, (dir, "moved", number)).await;
                let from = self.tick();
                let attr = client.fs.getattr(&cx, self.moved[number]).await.unwrap();
                self.read(subject, from, nanos(attr.ctime));
            }
        }
    }

    /// By a name attributes are leased.
    async fn find(&self, client: &Client, (dir, text, number): (usize, &str, usize)) {
        let text = format!("{text}{number}");
        let found = client.fs.lookup(&client.cx(), self.dirs[dir], name(&text)).await;
        found.map(drop).map_err(absent).ok();
    }

    fn read(&self, subject: Subject, from: u64, found: u64) {
        let (to, kind) = (self.tick(), RegisterOp::Read(found));
        self.history(subject).push(HistoryEvent { from, to, kind, optional: false });
    }

    async fn change(&self, client: &Client, disk: &MemoryDisk, subject: Subject) {
        match subject {
            Subject::Given(dir) if pick(3) == 0 => {
                let begun = self.begin(subject, 0);
                let (cx, dir) = (client.cx(), self.dirs[dir]);
                let kind = match client.fs.remove(&cx, dir, name(GIVEN), RemoveKind::File).await {
                    Ok(()) => RegisterOp::Write(0),
                    Err(error) => RegisterOp::Read(absent(error)),
                };
                self.end(subject, begun, kind);
            }
            Subject::Given(dir) => self.give(client, dir).await,
            Subject::Links(number) => self.link(client, number).await,
            Subject::Moved(number) if number == client.number => {
                self.move_on(client, disk, number).await;
            }
            Subject::Moved(_) => self.look(client, subject).await,
        }
    }

    /// Gives the name to a new file, which is made in any directory.
    async fn give(&self, client: &Client, dir: usize) {
        let unique = client.requests.load(Ordering::Relaxed);
        let new = format!("new{}-{unique}", client.number);
        let above = self.dirs[pick(SERVERS as u64) as usize];
        let made = client.fs.create(&client.cx(), above, name(&new), NEW).await;
        let (entry, file) = made.unwrap();
        file.close(&client.cx()).await.unwrap();
        let subject = Subject::Given(dir);
        let begun = self.begin(subject, entry.id.ino);
        let (from, to) = ((above, name(&new)), (self.dirs[dir], name(GIVEN)));
        client.fs.rename(&client.cx(), from, to, RenameHow::Replace).await.unwrap();
        self.end(subject, begun, RegisterOp::Write(entry.id.ino));
    }

    /// Gives a file its second name, or takes it away.
    async fn link(&self, client: &Client, number: usize) {
        let subject = Subject::Links(number);
        let (cx, dir) = (client.cx(), self.dirs[(number + 1) % SERVERS]);
        let second = format!("second{number}");
        let links = pick(2) == 0;
        let begun = self.begin(subject, if links { 2 } else { 1 });
        let done = match links {
            true => client.fs.link(&cx, self.linked[number], dir, name(&second)).await.map(drop),
            false => client.fs.remove(&cx, dir, name(&second), RemoveKind::File).await,
        };
        let kind = match (links, done.map_err(|error| error.errno())) {
            (true, Ok(())) => RegisterOp::Write(2),
            (true, Err(Errno::EEXIST)) => RegisterOp::Read(2),
            (false, Ok(())) => RegisterOp::Write(1),
            (false, Err(Errno::ENOENT)) => RegisterOp::Read(1),
            (_, Err(error)) => panic!("link or unlink: {error:?}"),
        };
        self.end(subject, begun, kind);
    }

    async fn move_on(&self, client: &Client, disk: &MemoryDisk, number: usize) {
        let (from, to) = {
            let mut moves = self.moves.lock().unwrap();
            moves[number] += 1;
            way(moves[number] - 1)
        };
        let subject = Subject::Moved(number);
        // What it is set to is known behind it.
        let begun = self.begin(subject, u64::MAX);
        let text = format!("moved{number}");
        let (from, to) = ((self.dirs[from], name(&text)), (self.dirs[to], name(&text)));
        client.fs.rename(&client.cx(), from, to, RenameHow::NoReplace).await.unwrap();
        let id = self.moved[number];
        let attr = disk.mount().getattr(&Context::system(), id).await.unwrap();
        self.end(subject, begun, RegisterOp::Write(nanos(attr.ctime)));
    }

    /// A client that has died in the middle of its last move has not said what the move came to.
    async fn settle(&self, disk: &MemoryDisk) {
        for (number, id) in self.moved.iter().enumerate() {
            let attr = disk.mount().getattr(&Context::system(), *id).await.unwrap();
            for event in self.history(Subject::Moved(number)).iter_mut() {
                if event.kind == RegisterOp::Write(u64::MAX) {
                    event.kind = RegisterOp::Write(nanos(attr.ctime));
                }
            }
        }
    }

    async fn work(&self, client: &Client, disk: &MemoryDisk) {
        for _ in 0..OPERATIONS {
            let subject = Subject::any();
            match pick(4) {
                0 => self.change(client, disk, subject).await,
                _ => self.look(client, subject).await,
            }
            match pick(4) {
                0 => sleep(Duration::from_micros(pick(2 * TERM.as_micros() as u64))).await,
                _ => sleep(Duration::from_micros(pick(3_000))).await,
            }
        }
    }
}

fn absent(error: dray_core::Error) -> u64 {
    assert_eq!(error.errno(), Errno::ENOENT, "{error:?}");
    0
}

/// The file of the name in a listing.
async fn listed(client: &Client, dir: FileId) -> u64 {
    let cx = client.cx();
    let attr = client.fs.getattr(&cx, dir).await.unwrap();
    assert_eq!(attr.file_type(), FileType::Directory);
    let open = client.fs.open(&cx, dir, OpenHow::DIRECTORY).await;
    let open = open.unwrap();
    let page = open.readdir(&cx, 0, 64 << 10, pick(2) == 0).await.unwrap();
    open.close(&cx).await.unwrap();
    let found = page.iter().find(|(found, _)| *found == GIVEN.as_bytes());
    found.map_or(0, |(_, entry)| entry.id.ino)
}

/// What goes wrong, until it is to stop.
async fn torment(servers: &Servers, stopped: &AtomicBool) {
    while !stopped.load(Ordering::Relaxed) {
        sleep(Duration::from_micros(pick(600_000))).await;
        let (client, server) = (pick(CLIENTS as u64), pick(SERVERS as u64) as usize);
        let cut = match pick(16) {
            0 | 1 => format!("client{client}"),
            2 => Servers::name(server),
            3 => {
                servers.restart(server).await;
                continue;
            }
            _ => {
                servers.network.break_all(&format!("client{client}"));
                continue;
            }
        };
        servers.network.partition(&cut, true);
        sleep(Duration::from_micros(pick(3 * TERM.as_micros() as u64))).await;
        servers.network.partition(&cut, false);
    }
}

/// Calls that leases have spared, or what is wrong.
async fn run(broken: Broken) -> std::result::Result<u64, String> {
    let placement = placement_over(SERVERS, LAYOUT);
    let options = MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() };
    let servers = Arc::new(Servers {
        network: Network::new(),
        disk: MemoryDisk::new(options),
        journals: Default::default(),
        scopes: Mutex::default(),
        broken: broken.server,
    });
    let work = Arc::new(Work::prepare(&servers.disk, &placement).await);
    let root = servers.disk.mount().info().root;
    for number in 0..SERVERS {
        servers.start(number).await;
    }
    let scopes = if broken.drifts { [0.6; CLIENTS] } else { CLOCKS }.map(Scope::with_clock);
    let mut clients = Vec::new();
    for (number, scope) in scopes.iter().enumerate() {
        let (servers, placement, (tell, mounted)) =
            (servers.clone(), placement.clone(), oneshot::channel());
        scope.spawn_on(&ExecutorHandle::current(), async move {
            let mount = Client::mount(&servers.network, &placement, (number, root), broken);
            let _ = tell.send(mount.await); // it is waited for
        });
        clients.push(mounted.await.map_err(|_| "a client died while it mounted")?);
    }
    servers.network.set_weather(Weather { break_one_in: Some(400), ..Weather::default() });
    let (stopped, tormented) = (Arc::new(AtomicBool::new(false)), servers.clone());
    let stops = stopped.clone();
    dray_rt::spawn(async move { torment(&tormented, &stops).await });
    let mut ends = Vec::new();
    for (client, scope) in clients.iter().zip(&scopes) {
        let (client, work, servers) = (client.clone(), work.clone(), servers.clone());
        let (tell, ended) = oneshot::channel::<()>();
        scope.spawn_on(&ExecutorHandle::current(), async move {
            work.work(&client, &servers.disk).await;
            drop(tell);
        });
        ends.push(ended);
    }
    // The last client dies in one run of two.
    if pick(2) == 0 {
        sleep(Duration::from_micros(pick(4_000_000))).await;
        servers.network.break_all(&format!("client{}", CLIENTS - 1));
        scopes[CLIENTS - 1].kill();
    }
    for ended in ends {
        let ended = timeout(TIME_MAX, ended).await;
        ended.map_err(|_| "no progress".to_owned())?.ok();
    }
    stopped.store(true, Ordering::Relaxed);
    work.settle(&servers.disk).await;
    for events in &work.histories {
        let events = events.lock().unwrap();
        if linearizable(&events) == Some(false) {
            return Err(format!("no order of these explains them: {:#x?}", *events));
        }
    }
    Ok(clients[..CLIENTS - 1].iter().map(Client::spared).sum())
}

fn simulate(seed: u64, broken: Broken) -> std::result::Result<u64, String> {
    let mut executor = Executor::new(DriverKind::Simulated { seed }).unwrap();
    let ran = executor.try_block_on(async { run(broken).await });
    ran.unwrap_or_else(|| Err("everybody waits for ever".into()))
}

fn seeds(default: u64) -> std::ops::Range<u64> {
    let more = std::env::var("DRAY_SEEDS").ok().and_then(|count| count.parse().ok());
    0..more.unwrap_or(default)
}

// proves: P271, P272, P273
#[test]
fn what_several_servers_lease_is_never_stale() {
    let mut spared = 0;
    for seed in seeds(60) {
        spared +=
            simulate(seed, Broken::default()).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
    assert!(spared > 0, "nothing was believed");
}

fn is_found_out(broken: Broken) {
    let found = (0..400).any(|seed| simulate(seed, broken).is_err_and(|why| why.contains("order")));
    assert!(found, "no run shows it");
}

/// Why attributes take the lease of a second server.
#[test]
fn who_believes_the_owner_of_a_file_alone_sees_old_attributes() {
    is_found_out(Broken { believes_owner: true, ..Broken::default() });
}

/// Why a change tells the owners of what it changes at another server.
#[test]
fn what_another_server_changes_and_is_leased_meanwhile() {
    is_found_out(Broken { server: Some(Sabotage::LeaseHolds), ..Broken::default() });
}

#[test]
fn clocks_that_drift_further_than_the_leases_of_several_servers_bear() {
    is_found_out(Broken { drifts: true, ..Broken::default() });
}
