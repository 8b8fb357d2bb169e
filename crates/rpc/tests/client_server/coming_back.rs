//! The files and locks of a mount at a server that died are its own at the next one. That holds on
//! however many connections the mount comes back, and however soon that server dies, too.

use std::sync::Arc;
use std::time::Duration;

use crate::common::forgetful::serve_forgetfully;
use crate::common::{client_options, connect, memory, serve_simulated, server_of, simulate};
use dray_backends::memory::{MemoryDisk, MemoryOptions};
use dray_core::{
    Buf, BufMut, Context, CreateHow, Errno, FileSystem, Lock, LockFamily, LockKind, LockOwner,
    LockRange, Name, Op, OpenFile, OpenHow, Pid, RemoveKind, SetAttr, Write,
};
use dray_fabric::sim::{Network, Weather};
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::client::{ClientOptions, RemoteFs};
use dray_rpc::server::{Export, Journal, MemoryJournal, Server, ServerOptions, StateLoss};
use dray_rt::{Scope, sleep, timeout};

const HOW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: false };

/// A server on a disk and a journal that outlive it.
struct Machine {
    network: Network,
    disk: MemoryDisk,
    journal: MemoryJournal,
    boot: u128,
    server_process: Scope,
}

impl Machine {
    fn new(network: &Network) -> Machine {
        Machine {
            network: network.clone(),
            disk: MemoryDisk::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() }),
            journal: MemoryJournal::default(),
            boot: 1,
            server_process: Scope::new(),
        }
    }

    /// `delay`: how long each opening takes.
    async fn start(&mut self, loss: StateLoss, delay: Duration) -> Server {
        let fault = Fault { op: Some(Op::Open), when: When::Always, delay, error: None };
        let faults = Arc::new(Faults::new(vec![fault]));
        let fs = Arc::new(Observed::new(Arc::new(self.disk.mount()), faults));
        let options = ServerOptions { boot: self.boot, ..ServerOptions::default() };
        let export = Export::new("data", fs, Vec::new());
        let server = Server::new(options, vec![export], Arc::new(self.journal.clone()));
        server.restore(loss).await;
        self.server_process = Scope::new();
        serve_simulated(&self.network, "s", &server, &self.server_process);
        server
    }

    /// The process dies; nothing else does.
    fn kill(&mut self) {
        self.disk.kill();
        self.server_process.kill();
        self.network.break_all("s");
    }

    /// The power goes, and the journal with it. The files are on media.
    fn lose_everything(&mut self) {
        self.kill();
        self.journal.forget();
        self.boot += 1;
    }
}

async fn mount(network: &Network, name: &str) -> RemoteFs {
    connect(network.connector_from(name, "s"), client_options()).await.unwrap()
}

async fn open(fs: &RemoteFs, name: &[u8]) -> Arc<dyn OpenFile> {
    let name = Name::new(name).unwrap();
    fs.create(&Context::system(), fs.info().root, name, HOW).await.unwrap().1
}

async fn lock(file: &Arc<dyn OpenFile>, owner: u64) -> Result<(), Errno> {
    let owner = LockOwner::own(owner);
    let (family, kind, range) = (LockFamily::Posix, LockKind::Exclusive, LockRange::ALL);
    let lock = Lock { family, kind, range, owner, pid: Pid(1) };
    file.lock(&Context::system(), lock, false).await.map_err(|error| error.errno())
}

async fn flock(file: &Arc<dyn OpenFile>, kind: LockKind) -> Result<(), Errno> {
    let (family, range, owner) = (LockFamily::Flock, LockRange::ALL, LockOwner::own(1));
    let lock = Lock { family, kind, range, owner, pid: Pid(1) };
    file.lock(&Context::system(), lock, false).await.map_err(|error| error.errno())
}

async fn write(file: &Arc<dyn OpenFile>) {
    let (cx, bytes) = (Context::system(), Buf::from(&b"mine"[..]));
    file.write(&cx, Write::at(0), bytes).await.unwrap();
}

/// Two connections that came back at once to a server that knew nothing of their session began one
/// each. Locks reclaimed in the first were released a lease after its only connection had moved to
/// the second. Another client got a held lock.
// proves: P73
#[test]
fn a_mount_that_was_forgotten_begins_one_session_on_all_its_connections() {
    for seed in 0..8 {
        simulate(seed, forgotten_on_two_connections()); // either of them is the first
    }
}

async fn forgotten_on_two_connections() {
    let network = Network::new();
    let mut machine = Machine::new(&network);
    drop(machine.start(StateLoss::Nothing, Duration::ZERO).await);
    let fs = mount(&network, "holder").await;
    let file = open(&fs, b"f").await;
    lock(&file, 1).await.unwrap();
    fs.sync_all(&Context::system()).await.unwrap();
    // A handshake takes longer than the wait before it differs between connections.
    let delay = Duration::from_millis(20);
    let slow = Weather { delay_min: delay, delay_max: delay, ..Weather::default() };
    network.set_weather(slow);
    // Here the mount has a second connection, to send again what it kept.
    machine.lose_everything();
    let server = machine.start(StateLoss::SessionsToo, Duration::ZERO).await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(server.status().clients[0].connections, 2, "the test needs two");
    drop(server);
    // And here both come back at once.
    machine.lose_everything();
    let server = machine.start(StateLoss::SessionsToo, Duration::ZERO).await;
    sleep(Duration::from_secs(1)).await;
    let sessions = server.status().clients;
    assert_eq!(sessions.len(), 1, "{sessions:?}");
    assert_eq!(machine.journal.load().len(), 1);
    server.recovered().await;
    network.break_all("holder");
    sleep(server.lease() * 2).await;
    let other = open(&mount(&network, "other").await, b"f").await;
    assert_eq!(lock(&other, 2).await, Err(Errno::EAGAIN));
    write(&file).await;
}

/// A test for a lock answered that it was free, before its holder had reclaimed it.
// proves: P91
#[test]
fn a_lock_test_after_a_restart_reports_locks_that_are_not_reclaimed_yet() {
    simulate(6, async {
        let network = Network::new();
        let mut machine = Machine::new(&network);
        drop(machine.start(StateLoss::Nothing, Duration::ZERO).await);
        let (holder, other) = (mount(&network, "holder").await, mount(&network, "other").await);
        let (held, looked_at) = (open(&holder, b"f").await, open(&other, b"f").await);
        lock(&held, 1).await.unwrap();
        machine.kill();
        network.partition("holder", true);
        drop(machine.start(StateLoss::Nothing, Duration::ZERO).await);
        let looking = dray_rt::spawn_join(async move {
            let (family, kind, range) = (LockFamily::Posix, LockKind::Shared, LockRange::ALL);
            let wanted = Lock { family, kind, range, owner: LockOwner::own(2), pid: Pid(2) };
            looked_at.test_lock(&Context::system(), wanted).await.unwrap()
        });
        sleep(Duration::from_secs(5)).await;
        network.partition("holder", false);
        let found = looking.await.unwrap().expect("somebody has it");
        assert_eq!(found.kind, LockKind::Exclusive);
        write(&held).await;
    });
}

/// The call waited for what was being sent again to be over, however long the server was away.
// proves: P64
#[test]
fn a_close_during_recovery_has_the_mounts_limit() {
    simulate(4, async {
        let (network, cx) = (Network::new(), Context::system());
        let mut machine = Machine::new(&network);
        drop(machine.start(StateLoss::Nothing, Duration::ZERO).await);
        let limit = Duration::from_secs(20);
        let options = ClientOptions { timeout: Some(limit), ..client_options() };
        let fs = connect(network.connector_from("holder", "s"), options).await.unwrap();
        let file = open(&fs, b"f").await;
        write(&file).await;
        // Recovery waits for somebody else, so that it lasts.
        let other = mount(&network, "other").await;
        write(&open(&other, b"g").await).await;
        network.partition("other", true);
        machine.kill();
        machine.boot += 1;
        drop(machine.start(StateLoss::Unsynced, Duration::ZERO).await);
        sleep(Duration::from_secs(2)).await;
        assert!(fs.session().status().unsynced.recovering, "the test needs it");
        network.partition("s", true);
        let begin = dray_rt::now();
        let closed = dray_rt::timeout(10 * limit, file.close(&cx)).await;
        let error = closed.expect("it waits for ever").unwrap_err();
        assert_eq!(error.errno(), Errno::EHOSTDOWN);
        assert!(begin.elapsed() < limit + limit / 2, "{:?}", begin.elapsed());
    });
}

/// Data that were written with O_SYNC were on media, and not kept. The earlier change, which was
/// kept, was made again over it: the file was cut.
// proves: P101
#[test]
fn what_was_synced_as_it_was_written_outlives_what_is_made_again() {
    simulate(5, async {
        let (network, cx) = (Network::new(), Context::system());
        let mut machine = Machine::new(&network);
        drop(machine.start(StateLoss::Nothing, Duration::ZERO).await);
        let fs = mount(&network, "holder").await;
        let file = open(&fs, b"f").await;
        write(&file).await;
        let cut = SetAttr { size: Some(0), ..SetAttr::default() };
        file.setattr(&cx, cut).await.unwrap();
        let synced = Write { sync: true, ..Write::at(0) };
        file.write(&cx, synced, Buf::from(&b"synced"[..])).await.unwrap();
        machine.kill();
        machine.boot += 1;
        let server = machine.start(StateLoss::Unsynced, Duration::ZERO).await;
        server.recovered().await;
        let read = file.read(&cx, 0, BufMut::heap(10)).await.map_err(|(error, _)| error).unwrap();
        assert_eq!(read.filled(), b"synced");
        assert_eq!(fs.session().status().unsynced.losses, 0);
    });
}

/// The earlier change that another client had kept was made again over it.
// proves: P101
#[test]
fn what_was_synced_as_it_was_written_outlives_what_others_make_again() {
    for comes_back_first in ["writer", "other"] {
        simulate(7, async move {
            let (network, cx) = (Network::new(), Context::system());
            let mut machine = Machine::new(&network);
            drop(machine.start(StateLoss::Nothing, Duration::ZERO).await);
            let (writer, other) = (mount(&network, "writer").await, mount(&network, "other").await);
            let (written, kept) = (open(&writer, b"f").await, open(&other, b"f").await);
            written.sync(&cx, false).await.unwrap();
            write(&kept).await;
            let synced = Write { sync: true, ..Write::at(0) };
            written.write(&cx, synced, Buf::from(&b"synced"[..])).await.unwrap();
            let later = Write::at(5);
            kept.write(&cx, later, Buf::from(&b"later"[..])).await.unwrap();
            machine.kill();
            machine.boot += 1;
            network.partition("writer", true);
            network.partition("other", true);
            let server = machine.start(StateLoss::Unsynced, Duration::ZERO).await;
            network.partition(comes_back_first, false);
            sleep(Duration::from_secs(2)).await;
            network.partition("writer", false);
            network.partition("other", false);
            server.recovered().await;
            let read = kept.read(&cx, 0, BufMut::heap(20)).await.map_err(|(error, _)| error);
            assert_eq!(read.unwrap().filled(), b"syncelater");
            for fs in [&writer, &other] {
                assert_eq!(fs.session().status().unsynced.losses, 0);
                fs.sync_all(&cx).await.unwrap();
                assert_eq!(fs.session().status().unsynced.kept_bytes, 0);
            }
        });
    }
}

/// The close of another file cleared the journal's note of locks while they were still being
/// reclaimed. The next server awaited no client, and refused the reclaim.
// proves: P91
#[test]
fn locks_stay_in_the_journal_until_they_are_reclaimed_or_released() {
    simulate(2, async {
        let (network, cx) = (Network::new(), Context::system());
        let mut machine = Machine::new(&network);
        drop(machine.start(StateLoss::Nothing, Duration::ZERO).await);
        let fs = mount(&network, "holder").await;
        let file = open(&fs, b"f").await;
        lock(&file, 1).await.unwrap();
        let journal = machine.journal.clone();
        let noted = || journal.load()[0].1.had_locks();
        assert!(noted());
        // A server that dies before the locked file is open again.
        machine.kill();
        drop(machine.start(StateLoss::Nothing, Duration::from_secs(2)).await);
        sleep(Duration::from_millis(500)).await;
        open(&fs, b"g").await.close(&cx).await.unwrap();
        sleep(Duration::from_millis(500)).await;
        assert!(noted());
        machine.kill();
        drop(machine.start(StateLoss::Nothing, Duration::ZERO).await);
        sleep(Duration::from_secs(5)).await;
        write(&file).await;
        assert!(noted());
        let other = open(&mount(&network, "other").await, b"f").await;
        assert_eq!(lock(&other, 2).await, Err(Errno::EAGAIN));
        file.close(&cx).await.unwrap();
        sleep(Duration::from_secs(1)).await;
        lock(&other, 2).await.unwrap();
    });
}

/// A call that waits for a lock, or removes a file, must not wait for a client that has finished
/// its recovery. That holds whenever the client's connection broke meanwhile.
// proves: P85
#[test]
fn a_returned_client_blocks_no_other_though_its_notification_was_lost() {
    for step in 0..75 {
        simulate(step, come_back_and_break(Duration::from_micros(20 * step)));
    }
}

/// The client's connection breaks so long after the server knows it again.
async fn come_back_and_break(after: Duration) {
    let (network, cx) = (Network::new(), Context::system());
    let mut machine = Machine::new(&network);
    drop(machine.start(StateLoss::Nothing, Duration::ZERO).await);
    let holder = mount(&network, "holder").await;
    let file = open(&holder, b"f").await;
    lock(&file, 1).await.unwrap();
    machine.kill();
    let server = machine.start(StateLoss::Nothing, Duration::ZERO).await;
    while server.status().clients.iter().any(|client| client.away.is_some()) {
        sleep(Duration::from_micros(10)).await;
    }
    sleep(after).await;
    network.break_all("holder");
    let other = mount(&network, "other").await;
    let big = open(&other, b"big").await;
    let granted = timeout(server.lease() / 2, lock(&big, 2)).await;
    assert_eq!(granted.expect("it waits for a client that has reclaimed all"), Ok(()), "{after:?}");
    sleep(Duration::from_secs(1)).await;
    let free = async || other.statfs(&cx).await.unwrap().files_free;
    let before = free().await;
    let gone = open(&other, b"gone").await;
    gone.close(&cx).await.unwrap();
    let name = Name::new(b"gone").unwrap();
    other.remove(&cx, other.info().root, name, RemoveKind::File).await.unwrap();
    sleep(Duration::from_secs(1)).await;
    assert_eq!(free().await, before, "{after:?}: it is held for a client that has returned");
}

/// Locks of an open file description end with its last close, and the server learns of nothing but
/// the close. They were reclaimed from the next server, and no caller could release them.
// proves: P59
#[test]
fn locks_of_a_closed_file_are_not_reclaimed() {
    simulate(3, async {
        let (network, cx) = (Network::new(), Context::system());
        let mut machine = Machine::new(&network);
        drop(machine.start(StateLoss::Nothing, Duration::ZERO).await);
        let fs = mount(&network, "holder").await;
        let (closed, dropped) = (open(&fs, b"f").await, open(&fs, b"g").await);
        let held = open(&fs, b"held").await;
        lock(&held, 9).await.unwrap();
        lock(&closed, 1).await.unwrap();
        lock(&dropped, 2).await.unwrap();
        closed.close(&cx).await.unwrap();
        drop(dropped);
        sleep(Duration::from_secs(1)).await;
        machine.kill();
        let server = machine.start(StateLoss::Nothing, Duration::ZERO).await;
        sleep(Duration::from_secs(1)).await;
        server.recovered().await;
        let other = mount(&network, "other").await;
        for name in [&b"f"[..], b"g"] {
            let file = open(&other, name).await;
            assert_eq!(lock(&file, 3).await, Ok(()), "{}", name.escape_ascii());
        }
        write(&held).await;
    });
}

/// The kernel calls the owner of a lock of an open file description by an address. The next open
/// file may have that address before the close of the former one has come. That close ended the
/// lock of both.
// proves: P59
#[test]
fn a_lock_outlives_the_close_of_a_former_file_whose_owner_had_the_same_name() {
    simulate(5, async {
        let (network, cx) = (Network::new(), Context::system());
        let mut machine = Machine::new(&network);
        drop(machine.start(StateLoss::Nothing, Duration::ZERO).await);
        let fs = mount(&network, "holder").await;
        let (former, next) = (open(&fs, b"f").await, open(&fs, b"f").await);
        lock(&former, 1).await.unwrap();
        lock(&next, 1).await.unwrap();
        former.close(&cx).await.unwrap();
        sleep(Duration::from_secs(1)).await; // nobody waits for the close
        let other = open(&mount(&network, "other").await, b"f").await;
        assert_eq!(lock(&other, 2).await, Err(Errno::EAGAIN));
        machine.kill();
        let server = machine.start(StateLoss::Nothing, Duration::ZERO).await;
        sleep(Duration::from_secs(1)).await;
        server.recovered().await;
        assert_eq!(lock(&other, 2).await, Err(Errno::EAGAIN));
        next.close(&cx).await.unwrap();
        sleep(Duration::from_secs(1)).await;
        assert_eq!(lock(&other, 2).await, Ok(()));
    });
}

/// The mount's limit once counted for reclaims, too: locks were lost that the server was about to
/// grant. Callers that wait for them get their error in time.
// proves: P106
#[test]
fn reclaiming_locks_has_no_limit_and_waiting_callers_have_one() {
    simulate(4, async {
        let (network, cx) = (Network::new(), Context::system());
        let limit = Duration::from_secs(1);
        let mut machine = Machine::new(&network);
        drop(machine.start(StateLoss::Nothing, Duration::ZERO).await);
        let options = ClientOptions { timeout: Some(limit), ..client_options() };
        let fs = connect(network.connector_from("holder", "s"), options).await.unwrap();
        let file = open(&fs, b"f").await;
        lock(&file, 1).await.unwrap();
        machine.kill();
        let server = machine.start(StateLoss::Nothing, limit * 3).await;
        sleep(Duration::from_millis(600)).await;
        let begin = dray_rt::now();
        let error = file.getattr(&cx).await.unwrap_err();
        assert_eq!(error.errno(), Errno::EHOSTDOWN);
        assert!(begin.elapsed() < limit * 2, "{:?}", begin.elapsed());
        sleep(limit * 8).await;
        server.recovered().await;
        write(&file).await;
        let other = open(&mount(&network, "other").await, b"f").await;
        assert_eq!(lock(&other, 2).await, Err(Errno::EAGAIN));
    });
}

/// The close came behind an opening that was tried again and again, and waited for ever.
// proves: P64
#[test]
fn a_close_of_what_is_never_opened_again_has_the_mounts_limit() {
    simulate(9, async {
        let (network, scope, cx) = (Network::new(), Scope::new(), Context::system());
        let server = server_of(memory(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &scope);
        let limit = Duration::from_secs(5);
        let options = ClientOptions { timeout: Some(limit), ..client_options() };
        let fs = connect(network.connector_from("c", "s"), options).await.unwrap();
        let root = fs.info().root;
        let mut files = Vec::new();
        for name in [&b"locked"[..], b"not locked"] {
            let made = fs.create(&cx, root, Name::new(name).unwrap(), HOW).await;
            files.push(made.unwrap().1);
        }
        let lock = Lock {
            family: LockFamily::Flock,
            kind: LockKind::Exclusive,
            range: LockRange::ALL,
            owner: LockOwner::own(1),
            pid: Pid(1),
        };
        files[0].lock(&cx, lock, false).await.unwrap();
        scope.kill();
        let (epochs, _) = serve_forgetfully(&network, fs.info().clone(), Duration::MAX);
        network.break_all("s");
        while epochs.load(std::sync::atomic::Ordering::Relaxed) == 0 {
            sleep(Duration::from_millis(10)).await;
        }
        sleep(Duration::from_millis(100)).await; // both are being opened again
        for file in files {
            let closed = timeout(limit * 4, file.close(&cx)).await;
            let _ = closed.expect("it waits too long"); // an error or not: it is closed later
        }
    });
}

/// A refused conversion of a flock loses the lock, as on Linux. The mount reclaimed the former one
/// at the next server, and held it until the file was closed.
// proves: P59
#[test]
fn a_flock_lost_by_a_refused_conversion_is_not_reclaimed() {
    simulate(9, async {
        let network = Network::new();
        let mut machine = Machine::new(&network);
        drop(machine.start(StateLoss::Nothing, Duration::ZERO).await);
        let (one, other) = (mount(&network, "one").await, mount(&network, "other").await);
        let (refused, held) = (open(&one, b"f").await, open(&other, b"f").await);
        flock(&refused, LockKind::Shared).await.unwrap();
        flock(&held, LockKind::Shared).await.unwrap();
        assert_eq!(flock(&refused, LockKind::Exclusive).await, Err(Errno::EAGAIN));
        machine.lose_everything();
        drop(machine.start(StateLoss::SessionsToo, Duration::ZERO).await);
        flock(&held, LockKind::Exclusive).await.unwrap();
    });
}
