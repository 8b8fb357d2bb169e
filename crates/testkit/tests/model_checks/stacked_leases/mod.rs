//! A server leases on what the server above leases to it. Clients of both look and change. Connections break, clients and
//! servers are cut off, both servers die, and clocks drift. No answer is stale: some order explains what all
//! clients saw of each name, and of the attributes of each file.

mod scenes;

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use dray_backends::memory::{MemoryDisk, MemoryOptions};
use dray_core::{
    Context, CreateHow, Errno, FileId, FileSystem, Identity, Name, OpenHow, Pid, RemoveKind,
    RenameHow, RequestId, SessionControl, SetAttr, TimeSet, Timestamp,
};
use dray_fabric::sim::{Network, Weather};
use dray_rpc::client::{ClientOptions, ClientSession, LeaseWish, RemoteFs, SessionMemory};
use dray_rpc::server::{Export, MemoryJournal, Sabotage, Server, ServerOptions, StateLoss};
use dray_rt::sync::oneshot;
use dray_rt::{DriverKind, Executor, ExecutorHandle, Scope, random_u64, sleep, timeout};
use dray_testkit::fixture::seeds;
use dray_testkit::simulator::{HistoryEvent, linearizable_from};

/// Two are clients of the server between, the last one of the server above.
const CLIENTS: usize = 3;
const BELOW: usize = 2;
/// How long the server between believes what is leased to it.
const TERM: Duration = Duration::from_millis(400);
/// Operations of each client. A history of one thing has no more than 128.
const OPERATIONS: usize = 128 / CLIENTS;
/// What clocks count in a second of the server above, seconds: of the clients, and of the server between. That of the
/// second client counts a tenth less than that of its server.
const CLOCKS: [f64; CLIENTS] = [1.0, 1.0 / 1.21, 1.0 / 1.1];
const CLOCK_BETWEEN: f64 = 1.0 / 1.1;
/// Simulated time after which a run makes no progress any more.
const TIME_MAX: Duration = Duration::from_secs(600);
/// Names that stand for one file or another, or for none. The second one is for further names of two files.
const GIVEN: &str = "given";
const SHARED: &str = "shared";

fn pick(below: u64) -> u64 {
    random_u64() % below.max(1)
}

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

fn options(leases: LeaseWish, host: &str) -> ClientOptions {
    ClientOptions {
        export: "x".into(),
        key: None,
        timeout: None,
        host: host.into(),
        replay_bytes: 1 << 20,
        split_min_bytes: ClientOptions::SPLIT_MIN_BYTES,
        caches: false,
        counts_on_one_user: false,
        leases,
        lease_share: None,
        definition: 0,
        group: None,
        aside: None,
        write_back: None,
    }
}

/// What a process had written to its memory.
fn snapshot(memory: &SessionMemory) -> SessionMemory {
    let copy = SessionMemory::create_memfd().unwrap();
    let [from, to] = [memory, &copy]
        .map(|one| std::fs::File::from(one.fd().unwrap().as_fd().try_clone_to_owned().unwrap()));
    let mut chunk = vec![0; 1 << 20];
    for at in (0..from.metadata().unwrap().len()).step_by(chunk.len()) {
        let read = from.read_at(&mut chunk, at).unwrap();
        if chunk[..read].iter().any(|byte| *byte != 0) {
            to.write_all_at(&chunk[..read], at).unwrap();
        }
    }
    copy
}

/// What is wrong with the servers.
#[derive(Clone, Copy, Debug, Default)]
struct Broken {
    between: Option<Sabotage>,
    leases_nothing_above: bool,
}

/// Both servers: their processes, and what outlives these.
struct Servers {
    network: Network,
    disk: MemoryDisk,
    journals: [MemoryJournal; 2],
    scopes: Mutex<[Scope; 2]>,
    memory: Mutex<SessionMemory>,
    above: Mutex<Option<Server>>,
    broken: Broken,
}

impl Servers {
    fn new(disk: MemoryDisk, broken: Broken) -> Arc<Servers> {
        let memory = Mutex::new(SessionMemory::create_memfd().unwrap());
        let above = Mutex::default();
        let (network, journals, scopes) = (Network::new(), Default::default(), Mutex::default());
        Arc::new(Servers { network, disk, journals, scopes, memory, above, broken })
    }

    fn options(sabotage: Option<Sabotage>) -> ServerOptions {
        let lease = Duration::from_secs(60);
        ServerOptions { lease, lease_term: TERM, sabotage, ..ServerOptions::default() }
    }

    /// Serves the export as the host `listens`, in the process of the calling task.
    async fn serve(&self, listens: &str, export: Export, number: usize) {
        let broken = [None, self.broken.between][number];
        let journal = Arc::new(self.journals[number].clone());
        let server = Server::new(Servers::options(broken), vec![export], journal);
        server.restore(StateLoss::Nothing).await;
        if number == 0 {
            *self.above.lock().unwrap() = Some(server.clone());
        }
        let expiring = server.clone();
        dray_rt::spawn(async move { expiring.expire_leases().await });
        let mut incoming = self.network.listen(listens);
        dray_rt::spawn(async move {
            while let Some(connection) = incoming.recv().await {
                let server = server.clone();
                dray_rt::spawn(async move { server.serve(Arc::new(connection)).await });
            }
        });
    }

    fn export(fs: Arc<dyn FileSystem>) -> Export {
        let mut export = Export::new("x", fs, Vec::new());
        (export.insecure, export.leases) = (true, true);
        export
    }

    fn start_above(self: &Arc<Self>) {
        let (servers, scope) = (self.clone(), Scope::new());
        scope.spawn_on(&ExecutorHandle::current(), async move {
            let mut export = Servers::export(Arc::new(servers.disk.mount()));
            export.leases = !servers.broken.leases_nothing_above;
            servers.serve("above", export, 0).await;
        });
        self.scopes.lock().unwrap()[0] = scope;
    }

    /// How often the server above has ended leases of a client that did not answer.
    fn fences(&self) -> u64 {
        self.above.lock().unwrap().as_ref().unwrap().status().leases[0].1.fences
    }

    /// That of the session between both.
    fn memory(&self) -> SessionMemory {
        let memory = self.memory.lock().unwrap();
        let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
        SessionMemory::from_fd(fd).unwrap()
    }

    /// The server between goes on where the process before it was, once it has reached the server above.
    fn start_between(self: &Arc<Self>) {
        let (servers, scope) = (self.clone(), Scope::with_clock(CLOCK_BETWEEN));
        scope.spawn_on(&ExecutorHandle::current(), async move {
            let session = loop {
                let connector = servers.network.connector_from("upward", "above");
                let options = options(LeaseWish::LeasedOn, "between");
                match ClientSession::connect(connector, options, servers.memory()).await {
                    Ok(session) => break session,
                    Err(_) => sleep(Duration::from_millis(20)).await,
                }
            };
            session.attach_another();
            let fs = Arc::new(RemoteFs::new(session));
            fs.attached();
            let mut export = Servers::export(fs.clone());
            export.upper_leases = Some(fs);
            servers.serve("between", export, 1).await;
        });
        self.scopes.lock().unwrap()[1] = scope;
    }

    async fn restart(self: &Arc<Self>, between: bool, rest: Duration) {
        let hosts: &[&str] = if between { &["between", "upward"] } else { &["above"] };
        let copy = snapshot(&self.memory.lock().unwrap());
        hosts.iter().for_each(|host| self.network.break_all(host));
        let scope = std::mem::take(&mut self.scopes.lock().unwrap()[usize::from(between)]);
        scope.kill();
        sleep(rest).await;
        if between {
            *self.memory.lock().unwrap() = copy;
            self.start_between();
        } else {
            self.start_above();
        }
    }
}

#[derive(Clone)]
struct Client {
    number: usize,
    fs: RemoteFs,
    requests: Arc<AtomicU64>,
}

impl Client {
    fn host(number: usize) -> String {
        format!("client{number}")
    }

    async fn mount(network: &Network, number: usize) -> Client {
        let leases = LeaseWish::Yes { callers_are_checked: true, keeps_writes: false };
        Client::mount_with(network, number, leases).await
    }

    async fn mount_with(network: &Network, number: usize, leases: LeaseWish) -> Client {
        let to = if number < BELOW { "between" } else { "above" };
        let host = Client::host(number);
        let session = loop {
            let connector = network.connector_from(&host, to);
            let options = options(leases, &host);
            match ClientSession::connect(connector, options, SessionMemory::heap()).await {
                Ok(session) => break session,
                Err(_) => sleep(Duration::from_millis(1)).await,
            }
        };
        session.attach_another();
        let fs = RemoteFs::new(session);
        hear_recalls(&fs);
        Client { number, fs, requests: Arc::new(AtomicU64::new(1)) }
    }

    fn cx(&self) -> Context {
        let request = RequestId(self.requests.fetch_add(1, Ordering::Relaxed));
        let node = self.fs.session().node();
        Context::new(node, request, Identity::system(), Pid(self.number as u32 + 1))
    }
}

/// What is asked back is given back at once, or late, or never.
fn hear_recalls(fs: &RemoteFs) {
    fs.hear_recalls_by(Arc::new(|_, done| {
        let late = match pick(32) {
            0 => TERM * 3,
            1..8 => Duration::from_micros(pick(60_000)),
            _ => return drop(done),
        };
        dray_rt::spawn(async move {
            sleep(late).await;
            drop(done);
        });
    }));
}

/// What is changed and looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Subject {
    /// The file that a name stands for.
    Given,
    /// Which of two files has a further name. Their numbers of links say it, too.
    Shared,
    /// The time of change of each of two files.
    Time(usize),
}

impl Subject {
    const ALL: [Subject; 4] = [Subject::Given, Subject::Shared, Subject::Time(0), Subject::Time(1)];

    fn number(self) -> usize {
        Subject::ALL.iter().position(|one| *one == self).unwrap()
    }
}

/// An event of a subject, whose state is a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Found(u64),
    /// This is what it is not.
    FoundOther(u64),
    Becomes(u64),
    /// From nothing, which is 0.
    BecomesFromNothing(u64),
    /// From anything.
    BecomesNothing,
}

fn apply(state: &u64, event: &Event) -> Option<u64> {
    match *event {
        Event::Found(found) => (found == *state).then_some(*state),
        Event::FoundOther(found) => (found != *state).then_some(*state),
        Event::Becomes(new) => Some(new),
        Event::BecomesFromNothing(new) => (*state == 0).then_some(new),
        Event::BecomesNothing => (*state != 0).then_some(0),
    }
}

/// The work of all clients, and what came of it.
struct Work {
    root: FileId,
    files: [FileId; 2],
    ticks: AtomicU64,
    histories: [Mutex<Vec<HistoryEvent<Event>>>; Subject::ALL.len()],
}

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

impl Work {
    async fn prepare(disk: &MemoryDisk) -> Work {
        let (fs, cx) = (disk.mount(), Context::system());
        let root = fs.info().root;
        let mut files = Vec::new();
        for text in ["one", "other"] {
            let (entry, file) = fs.create(&cx, root, name(text), NEW).await.unwrap();
            fs.setattr(&cx, entry.id, time(0)).await.unwrap();
            file.close(&cx).await.unwrap();
            files.push(entry.id);
        }
        let files = [files[0], files[1]];
        Work { root, files, ticks: AtomicU64::new(0), histories: Default::default() }
    }

    fn tick(&self) -> u64 {
        self.ticks.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn history(&self, subject: Subject) -> MutexGuard<'_, Vec<HistoryEvent<Event>>> {
        self.histories[subject.number()].lock().unwrap()
    }

    /// A change that may happen or not, until it is answered.
    fn begin(&self, subject: Subject, kind: Event) -> usize {
        let from = self.tick();
        let mut events = self.history(subject);
        events.push(HistoryEvent { from, to: u64::MAX, kind, optional: true });
        events.len() - 1
    }

    fn end(&self, subject: Subject, index: usize, kind: Event) {
        let to = self.tick();
        let event = &mut self.history(subject)[index];
        (event.to, event.kind, event.optional) = (to, kind, false);
    }

    fn saw(&self, subject: Subject, from: u64, kind: Event) {
        let to = self.tick();
        self.history(subject).push(HistoryEvent { from, to, kind, optional: false });
    }

    async fn look(&self, client: &Client, subject: Subject) {
        let (cx, from) = (client.cx(), self.tick());
        let seen = match subject {
            Subject::Given => Event::Found(self.found(client, GIVEN).await),
            Subject::Shared if pick(2) == 0 => Event::Found(self.found(client, SHARED).await),
            Subject::Shared => {
                let id = self.files[pick(2) as usize];
                match client.fs.getattr(&cx, id).await.unwrap().nlink {
                    1 => Event::FoundOther(id.ino),
                    links => {
                        assert_eq!(links, 2);
                        Event::Found(id.ino)
                    }
                }
            }
            Subject::Time(file) => {
                let attr = client.fs.getattr(&cx, self.files[file]).await.unwrap();
                Event::Found(attr.mtime.sec as u64)
            }
        };
        self.saw(subject, from, seen);
    }

    /// The file of a name, or 0.
    async fn found(&self, client: &Client, text: &str) -> u64 {
        match client.fs.lookup(&client.cx(), self.root, name(text)).await {
            Ok(entry) => entry.id.ino,
            Err(error) => {
                assert_eq!(error.errno(), Errno::ENOENT, "{error:?}");
                0
            }
        }
    }

    async fn change(&self, client: &Client, subject: Subject) {
        match subject {
            Subject::Given if pick(3) == 0 => self.remove(client, subject, GIVEN).await,
            Subject::Given => self.give(client).await,
            Subject::Shared if pick(2) == 0 => self.remove(client, subject, SHARED).await,
            Subject::Shared => {
                let id = self.files[pick(2) as usize];
                let begun = self.begin(subject, Event::BecomesFromNothing(id.ino));
                let linked = client.fs.link(&client.cx(), id, self.root, name(SHARED)).await;
                let kind = match linked.map_err(|error| error.errno()) {
                    Ok(_) => Event::BecomesFromNothing(id.ino),
                    Err(Errno::EEXIST) => Event::FoundOther(0),
                    Err(error) => panic!("link: {error:?}"),
                };
                self.end(subject, begun, kind);
            }
            Subject::Time(file) => {
                let unique = ((client.number as u64 + 1) << 20) | self.tick();
                let begun = self.begin(subject, Event::Becomes(unique));
                let (cx, id) = (client.cx(), self.files[file]);
                client.fs.setattr(&cx, id, time(unique)).await.unwrap();
                self.end(subject, begun, Event::Becomes(unique));
            }
        }
    }

    async fn remove(&self, client: &Client, subject: Subject, text: &str) {
        let begun = self.begin(subject, Event::BecomesNothing);
        let (cx, name) = (client.cx(), name(text));
        let removed = client.fs.remove(&cx, self.root, name, RemoveKind::File).await;
        let kind = match removed.map_err(|error| error.errno()) {
            Ok(()) => Event::BecomesNothing,
            Err(Errno::ENOENT) => Event::Found(0),
            Err(error) => panic!("remove: {error:?}"),
        };
        self.end(subject, begun, kind);
    }

    /// Gives the name to a new file.
    async fn give(&self, client: &Client) {
        let new = format!("new{}-{}", client.number, client.requests.load(Ordering::Relaxed));
        let made = client.fs.create(&client.cx(), self.root, name(&new), NEW).await;
        let (entry, file) = made.unwrap();
        file.close(&client.cx()).await.unwrap();
        let begun = self.begin(Subject::Given, Event::Becomes(entry.id.ino));
        let (from, to) = ((self.root, name(&new)), (self.root, name(GIVEN)));
        client.fs.rename(&client.cx(), from, to, RenameHow::Replace).await.unwrap();
        self.end(Subject::Given, begun, Event::Becomes(entry.id.ino));
    }

    async fn work(&self, client: &Client) {
        for _ in 0..OPERATIONS {
            let subject = Subject::ALL[pick(Subject::ALL.len() as u64) as usize];
            match pick(4) {
                0 => self.change(client, subject).await,
                _ => self.look(client, subject).await,
            }
            match pick(4) {
                0 => sleep(Duration::from_micros(pick(2 * TERM.as_micros() as u64))).await,
                _ => sleep(Duration::from_micros(pick(3_000))).await,
            }
        }
    }
}

fn time(sec: u64) -> SetAttr {
    let mtime = Timestamp { sec: sec as i64, nsec: 0 };
    SetAttr { mtime: Some(TimeSet::At(mtime)), ..SetAttr::default() }
}

/// What goes wrong, until it is to stop.
async fn torment(servers: &Arc<Servers>, stopped: &AtomicBool) {
    while !stopped.load(Ordering::Relaxed) {
        sleep(Duration::from_micros(pick(600_000))).await;
        let cut = match pick(16) {
            0 | 1 => Client::host(pick(CLIENTS as u64) as usize),
            2..6 => "upward".to_owned(),
            6 => "between".to_owned(),
            7 | 8 => {
                servers.restart(true, Duration::from_micros(pick(300_000))).await;
                continue;
            }
            9 => {
                servers.restart(false, Duration::from_micros(pick(300_000))).await;
                continue;
            }
            _ => {
                servers.network.break_all(&Client::host(pick(CLIENTS as u64) as usize));
                continue;
            }
        };
        servers.network.partition(&cut, true);
        sleep(Duration::from_micros(pick(3 * TERM.as_micros() as u64))).await;
        servers.network.partition(&cut, false);
    }
}

/// Calls that leases have spared those below, or what is wrong.
async fn run(broken: Broken) -> Result<u64, String> {
    let options = MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() };
    let servers = Servers::new(MemoryDisk::new(options), broken);
    let work = Arc::new(Work::prepare(&servers.disk).await);
    servers.start_above();
    servers.start_between();
    let scopes = CLOCKS.map(Scope::with_clock);
    let mut clients = Vec::new();
    for (number, scope) in scopes.iter().enumerate() {
        let (servers, (tell, mounted)) = (servers.clone(), oneshot::channel());
        scope.spawn_on(&ExecutorHandle::current(), async move {
            let _ = tell.send(Client::mount(&servers.network, number).await); // it is waited for
        });
        clients.push(mounted.await.map_err(|_| "a client died while it mounted")?);
    }
    servers.network.set_weather(Weather { break_one_in: Some(400), ..Weather::default() });
    let (stopped, tormented) = (Arc::new(AtomicBool::new(false)), servers.clone());
    let stops = stopped.clone();
    dray_rt::spawn(async move { torment(&tormented, &stops).await });
    let mut ends = Vec::new();
    for (client, scope) in clients.iter().zip(&scopes) {
        let (client, work, (tell, ended)) =
            (client.clone(), work.clone(), oneshot::channel::<()>());
        scope.spawn_on(&ExecutorHandle::current(), async move {
            work.work(&client).await;
            drop(tell);
        });
        ends.push(ended);
    }
    for ended in ends {
        let ended = timeout(TIME_MAX, ended).await;
        ended.map_err(|_| "no progress".to_owned())?.ok();
    }
    stopped.store(true, Ordering::Relaxed);
    for events in &work.histories {
        let events = events.lock().unwrap();
        if linearizable_from(0, &events, apply) == Some(false) {
            return Err(format!("no order of these explains them: {:#?}", *events));
        }
    }
    let hits = |client: &Client| client.fs.session().status().leases.map_or(0, |one| one.hits);
    Ok(clients[..BELOW].iter().map(hits).sum())
}

fn simulate(seed: u64, broken: Broken) -> Result<u64, String> {
    let mut executor = Executor::new(DriverKind::Simulated { seed }).unwrap();
    let ran = executor.try_block_on(async { run(broken).await });
    ran.unwrap_or_else(|| Err("everybody waits for ever".into()))
}

// proves: P329, P330, P331
#[test]
fn what_is_leased_on_is_never_stale() {
    let mut spared = 0;
    for seed in seeds(15) {
        spared +=
            simulate(seed, Broken::default()).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
    assert!(spared > 0, "nothing was believed");
}
