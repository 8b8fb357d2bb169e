//! Files on whose fcntl locks a client decides by itself. What that costs, and who gets which lock. What becomes of locks that
//! the server does not know.

use std::sync::Arc;
use std::time::Duration;

use crate::common::leased_site::{LeasedSite, TERM, YES};
use crate::common::{client_options, serve_simulated, simulate};
use dray_backends::locks::LockTable;
use dray_backends::memory::{MemoryDisk, MemoryOptions};
use dray_core::{
    Context, CreateHow, Errno, FileId, FileSystem, HolderId, Identity, Lock, LockFamily, LockKind,
    LockOwner, LockRange, Name, OpenFile, OpenHow, Pid, RequestId, SessionControl,
};
use dray_fabric::sim::Network;
use dray_rpc::client::{ClientOptions, ClientSession, LeaseWish, RemoteFs, SessionMemory};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions, StateLoss};
use dray_rt::sync::oneshot;
use dray_rt::{ExecutorHandle, Scope, random_u64, sleep, spawn_join, timeout};

/// Longer than a file rests that was fought over once.
const RESTED: Duration = Duration::from_secs(1);

fn site() -> LeasedSite {
    LeasedSite::with(|export| export.lock_leases = true)
}

async fn open(fs: &RemoteFs, root: FileId) -> Arc<dyn OpenFile> {
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: false };
    let name = Name::new(b"file").unwrap();
    fs.create(&Context::system(), root, name, how).await.unwrap().1
}

fn lock(owner: u64, kind: LockKind, (start, end): (u64, u64)) -> Lock {
    let range = LockRange { start, end };
    Lock { family: LockFamily::Posix, kind, range, owner: LockOwner::own(owner), pid: Pid(1) }
}

fn all(owner: u64, kind: LockKind) -> Lock {
    lock(owner, kind, (0, u64::MAX))
}

/// Tries to take a lock, and gives it back.
async fn takes(file: &Arc<dyn OpenFile>, lock: Lock) -> bool {
    outcome(file, lock).await.is_ok()
}

async fn outcome(file: &Arc<dyn OpenFile>, lock: Lock) -> Result<(), Errno> {
    let taken = file.lock(&Context::system(), lock, false).await;
    taken.map_err(|error| error.errno())
}

/// Calls that the server has got.
fn calls(site: &LeasedSite) -> u64 {
    site.server.status().clients.iter().map(|client| client.calls).sum()
}

fn leased(site: &LeasedSite) -> usize {
    site.server.status().leases[0].1.locks
}

/// As sqlite locks its database for a select.
async fn select(file: &Arc<dyn OpenFile>, owner: u64) {
    let (pending, shared) = ((1 << 30, 1 << 30), ((1 << 30) + 2, (1 << 30) + 511));
    let reserved = lock(owner, LockKind::Exclusive, ((1 << 30) + 1, (1 << 30) + 1));
    assert!(takes(file, lock(owner, LockKind::Shared, pending)).await);
    assert!(takes(file, lock(owner, LockKind::Shared, shared)).await);
    assert!(takes(file, lock(owner, LockKind::Unlock, pending)).await);
    assert_eq!(file.test_lock(&Context::system(), reserved).await.unwrap(), None);
    assert!(takes(file, all(owner, LockKind::Unlock)).await);
}

// proves: P335
#[test]
fn locks_of_a_file_that_one_client_uses_cost_one_call() {
    simulate(1, async {
        let (site, cx) = (site(), Context::system());
        let one = site.client("one", YES).await;
        let file = open(&one, site.root).await;
        let before = calls(&site);
        for _ in 0..300 {
            select(&file, 1).await;
        }
        assert_eq!((calls(&site) - before, leased(&site)), (1, 1), "the first lock");
        // Another program of the client, and the close of a descriptor.
        let other = open(&one, site.root).await;
        let before = calls(&site);
        assert!(takes(&file, all(1, LockKind::Exclusive)).await);
        assert_eq!(outcome(&other, all(2, LockKind::Shared)).await, Err(Errno::EAGAIN));
        file.flush(&cx, LockOwner::own(1)).await.unwrap();
        assert!(takes(&other, all(2, LockKind::Shared)).await);
        assert_eq!(calls(&site) - before, 0);
        other.flush(&cx, LockOwner::own(2)).await.unwrap();
        file.close(&cx).await.unwrap();
        assert_eq!((calls(&site) - before, leased(&site)), (1, 0), "the lease goes back");
    });
}

// proves: P336
#[test]
fn a_lock_of_which_the_server_does_not_know_excludes_other_clients() {
    simulate(2, async {
        let (site, cx) = (site(), Context::system());
        let (one, other) = (site.client("one", YES).await, site.client("other", YES).await);
        let (mine, theirs) = (open(&one, site.root).await, open(&other, site.root).await);
        select(&mine, 1).await;
        assert!(takes(&mine, lock(1, LockKind::Shared, (10, 19))).await);
        assert!(takes(&mine, lock(2, LockKind::Exclusive, (30, 39))).await);
        assert_eq!(leased(&site), 1);
        let found = theirs.test_lock(&cx, all(1, LockKind::Exclusive)).await.unwrap().unwrap();
        assert_eq!((found.kind, found.range), (LockKind::Shared, LockRange { start: 10, end: 19 }));
        assert_eq!(leased(&site), 0, "it was asked back");
        assert!(takes(&theirs, lock(1, LockKind::Shared, (0, 29))).await);
        assert!(!takes(&theirs, lock(1, LockKind::Shared, (30, 30))).await);
        assert!(!takes(&theirs, lock(1, LockKind::Exclusive, (19, 19))).await);
        // What was given back before is free, though the server had heard of it.
        assert!(takes(&theirs, lock(1, LockKind::Exclusive, (1 << 30, 1 << 31))).await);
        // Nor does the client grant what it does not know by now.
        assert!(!takes(&mine, lock(2, LockKind::Exclusive, (1 << 30, 1 << 30))).await);
        assert!(takes(&mine, all(2, LockKind::Unlock)).await);
        assert!(takes(&theirs, lock(1, LockKind::Shared, (30, 30))).await);
    });
}

// proves: P336
#[test]
fn who_waits_gets_the_lock_when_its_holder_gives_it_back() {
    simulate(3, async {
        let site = site();
        let (one, other) = (site.client("one", YES).await, site.client("other", YES).await);
        let (mine, theirs) = (open(&one, site.root).await, open(&other, site.root).await);
        for (round, waiter) in [&mine, &theirs].into_iter().enumerate() {
            sleep(RESTED).await;
            assert!(takes(&mine, all(1, LockKind::Exclusive)).await);
            assert_eq!(leased(&site), 1, "round {round}");
            let waiter = waiter.clone();
            let waits = spawn_join(async move {
                let wanted = all(2, LockKind::Exclusive);
                waiter.lock(&Context::system(), wanted, true).await.unwrap();
                assert!(takes(&waiter, Lock { kind: LockKind::Unlock, ..wanted }).await);
            });
            sleep(Duration::from_millis(100)).await;
            assert_eq!(leased(&site), 0, "who waits is known to the server");
            assert!(takes(&mine, all(1, LockKind::Unlock)).await);
            assert!(timeout(Duration::from_secs(1), waits).await.unwrap().is_ok());
        }
    });
}

/// Any locks by any owners through two clients, and what becomes of them, beside one table of locks.
// proves: P336
#[test]
fn clients_that_decide_by_themselves_grant_what_one_table_grants() {
    let leased_steps = (0..40).map(|seed| {
        simulate(seed, async move {
            let (site, table) = (site(), LockTable::new(1000));
            let clients = [site.client("one", YES).await, site.client("other", YES).await];
            let files = [open(&clients[0], site.root).await, open(&clients[1], site.root).await];
            let mut leases = 0;
            for step in 0..300 {
                let pick = |of: u64| random_u64() % of;
                // Most of the time one client alone is busy.
                let at = if pick(40) > 0 { step / 60 % 2 } else { pick(2) } as usize;
                let holder = HolderId(at as u64 + 1);
                let cx = Context { holder, ..Context::system() };
                let kinds = [LockKind::Shared, LockKind::Exclusive, LockKind::Unlock];
                let start = pick(12);
                let range = (start, if pick(4) == 0 { u64::MAX } else { start + pick(6) });
                let wanted = lock(1 + pick(3), kinds[pick(3) as usize], range);
                let (file, id) = (&files[at], files[at].id());
                match pick(20) {
                    // Who looks for locks of others has nothing to find for a while.
                    4 if pick(3) == 0 => {
                        for (at, owner) in (0..2).flat_map(|at| [(at, 1), (at, 2), (at, 3)]) {
                            files[at]
                                .flush(&Context::system(), LockOwner::own(owner))
                                .await
                                .unwrap();
                            let cx =
                                Context { holder: HolderId(at as u64 + 1), ..Context::system() };
                            table.lock(&cx, id, all(owner, LockKind::Unlock), false).await.unwrap();
                        }
                    }
                    0 => {
                        file.flush(&Context::system(), wanted.owner).await.unwrap();
                        let unlock = all(wanted.owner.number, LockKind::Unlock);
                        table.lock(&cx, id, unlock, false).await.unwrap();
                    }
                    1 => {
                        let found = file.test_lock(&Context::system(), wanted).await.unwrap();
                        let expected = table.test(&cx, id, wanted);
                        // Of shared ones that begin at one place any is the first one.
                        let first = |lock: Lock| (lock.kind, lock.range.start);
                        assert_eq!(found.map(first), expected.map(first), "seed {seed}, {step}");
                    }
                    2 => site.network.break_all("s"),
                    3 => sleep(Duration::from_millis(pick(20_000))).await,
                    _ => {
                        let expected = table.lock(&cx, id, wanted, false).await;
                        let expected = expected.map_err(|error| error.errno());
                        let got = outcome(file, wanted).await;
                        assert_eq!(got, expected, "seed {seed}, step {step}: {wanted:?}");
                    }
                }
                leases += leased(&site);
            }
            leases
        })
    });
    let leased_steps: usize = leased_steps.sum();
    assert!(leased_steps > 2_000, "it was leased at {leased_steps} of 12,000 steps");
}

// proves: P343
#[test]
fn a_client_that_is_cut_off_keeps_its_locks_as_long_as_its_session() {
    simulate(5, async {
        let (site, cx) = (site(), Context::system());
        let (one, other) = (site.client("one", YES).await, site.client("other", YES).await);
        let (mine, theirs) = (open(&one, site.root).await, open(&other, site.root).await);
        select(&mine, 1).await;
        assert!(takes(&mine, all(1, LockKind::Exclusive)).await);
        site.network.partition("one", true);
        let before = dray_rt::now();
        let wanted = all(2, LockKind::Exclusive);
        assert_eq!(outcome(&theirs, wanted).await, Err(Errno::EAGAIN));
        assert!(dray_rt::now() - before >= TERM, "its answer is waited for");
        let before = dray_rt::now();
        assert_eq!(outcome(&theirs, wanted).await, Err(Errno::EAGAIN));
        assert!(dray_rt::now() - before < TERM, "but once");
        // It grants nothing by itself for long.
        let waits = spawn_join({
            let mine = mine.clone();
            async move { outcome(&mine, all(3, LockKind::Shared)).await }
        });
        theirs.lock(&cx, wanted, true).await.unwrap(); // its session has ended
        site.network.partition("one", false);
        assert!(waits.await.unwrap().is_err(), "it was not granted beside the other one");
        assert_eq!(outcome(&mine, all(1, LockKind::Unlock)).await, Err(Errno::EIO), "it was lost");
    });
}

/// A server whose process dies; its disk and its journal stay.
struct Machine {
    network: Network,
    disk: MemoryDisk,
    journal: MemoryJournal,
    epoch: Scope,
}

impl Machine {
    fn new() -> Machine {
        let disk = MemoryDisk::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() });
        let (network, journal) = (Network::new(), MemoryJournal::default());
        Machine { network, disk, journal, epoch: Scope::new() }
    }

    async fn start(&mut self) -> Server {
        let mut export = Export::new("data", Arc::new(self.disk.mount()), Vec::new());
        (export.insecure, export.leases, export.lock_leases) = (true, true, true);
        let options = ServerOptions { lease_term: TERM, ..ServerOptions::default() };
        let server = Server::new(options, vec![export], Arc::new(self.journal.clone()));
        server.restore(StateLoss::Nothing).await;
        self.epoch = Scope::new();
        serve_simulated(&self.network, "s", &server, &self.epoch);
        server
    }

    fn kill(&mut self) {
        self.epoch.kill();
        self.network.break_all("s");
        self.disk.kill();
    }

    /// A process of a client, in a scope of its own. The files that the process before had open are
    /// `before`, each with the request that opened it.
    async fn client(
        &self,
        name: &'static str,
        memory: SessionMemory,
        before: Vec<(FileId, u64)>,
    ) -> (Scope, RemoteFs, Vec<Arc<dyn OpenFile>>) {
        let (scope, (give, given)) = (Scope::new(), oneshot::channel());
        let connector = self.network.connector_from(name, "s");
        scope.spawn_on(&ExecutorHandle::current(), async move {
            let leases = LeaseWish::Yes { callers_are_checked: true, keeps_writes: false };
            let options = ClientOptions { leases, ..client_options() };
            let session = ClientSession::connect(connector, options, memory).await;
            let fs = RemoteFs::new(session.expect("a session"));
            let attach = |(id, request)| fs.attach(id, OpenHow::READ_WRITE, RequestId(request));
            let files = before.into_iter().filter_map(attach).collect();
            fs.attached();
            fs.release_inherited();
            let _ = give.send((fs, files)); // the test waits for it
        });
        let (fs, files) = given.await.expect("it connects");
        (scope, fs, files)
    }
}

async fn open_by(fs: &RemoteFs, request: u64) -> Arc<dyn OpenFile> {
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: false };
    let node = fs.session().node();
    let cx = Context::new(node, RequestId(request), Identity::system(), Pid(1));
    fs.create(&cx, fs.info().root, Name::new(b"file").unwrap(), how).await.unwrap().1
}

/// Who has locks of which no server knows, and whether what it gave back is free.
async fn are_the_locks(theirs: &Arc<dyn OpenFile>) {
    assert_eq!(outcome(theirs, lock(1, LockKind::Shared, (10, 19))).await, Err(Errno::EAGAIN));
    assert_eq!(outcome(theirs, lock(1, LockKind::Exclusive, (0, 9))).await, Ok(()));
}

async fn take_locks(mine: &Arc<dyn OpenFile>) {
    assert!(takes(mine, lock(1, LockKind::Exclusive, (0, 9))).await, "this one asks the server");
    assert!(takes(mine, lock(1, LockKind::Exclusive, (10, 19))).await);
    assert!(takes(mine, lock(1, LockKind::Unlock, (0, 9))).await);
}

// proves: P344
#[test]
fn locks_of_which_no_server_knew_are_reclaimed_from_the_next_one() {
    simulate(6, async {
        let mut machine = Machine::new();
        machine.start().await;
        let (_scope, fs, _) = machine.client("a", SessionMemory::heap(), Vec::new()).await;
        let mine = open_by(&fs, 1).await;
        take_locks(&mine).await;
        machine.kill();
        let server = machine.start().await;
        let (_other, fs, _) = machine.client("b", SessionMemory::heap(), Vec::new()).await;
        are_the_locks(&open_by(&fs, 1).await).await;
        assert!(takes(&mine, lock(1, LockKind::Unlock, (10, 19))).await);
        assert_eq!(server.status().clients.len(), 2);
    });
}

/// The first lock is given back, and no lock is held any more: a later server has to wait for this client all the same.
// proves: P344
#[test]
fn a_server_waits_for_a_client_that_decides_on_locks() {
    simulate(7, async {
        let mut machine = Machine::new();
        machine.start().await;
        let (_scope, fs, _) = machine.client("a", SessionMemory::heap(), Vec::new()).await;
        let mine = open_by(&fs, 1).await;
        take_locks(&mine).await;
        mine.flush(&Context::system(), LockOwner::own(1)).await.unwrap();
        assert!(takes(&mine, lock(1, LockKind::Exclusive, (10, 19))).await);
        machine.kill();
        machine.network.partition("a", true); // it comes back late
        machine.start().await;
        let (_other, fs, _) = machine.client("b", SessionMemory::heap(), Vec::new()).await;
        let theirs = open_by(&fs, 1).await;
        let asks = spawn_join(async move { are_the_locks(&theirs).await });
        sleep(Duration::from_secs(3)).await;
        machine.network.partition("a", false);
        assert!(asks.await.is_ok());
    });
}

// proves: P345
#[test]
fn locks_of_which_the_server_does_not_know_outlive_the_process_of_the_client() {
    for server_dies in [false, true] {
        simulate(8, async move {
            let mut machine = Machine::new();
            machine.start().await;
            let memory = SessionMemory::create_memfd().unwrap();
            let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
            let (process, fs, _) = machine.client("a", memory, Vec::new()).await;
            let mine = open_by(&fs, 1).await;
            take_locks(&mine).await;
            let id = mine.id();
            process.kill();
            machine.network.break_all("a");
            if server_dies {
                machine.kill();
                machine.start().await;
            }
            let memory = SessionMemory::from_fd(fd).unwrap();
            let (_process, _fs, files) = machine.client("a", memory, vec![(id, 1)]).await;
            let (_other, fs, _) = machine.client("b", SessionMemory::heap(), Vec::new()).await;
            let theirs = open_by(&fs, 1).await;
            are_the_locks(&theirs).await;
            let mine = files.first().unwrap();
            assert!(takes(mine, lock(1, LockKind::Unlock, (10, 19))).await);
            assert!(takes(&theirs, lock(1, LockKind::Exclusive, (10, 19))).await);
        });
    }
}
