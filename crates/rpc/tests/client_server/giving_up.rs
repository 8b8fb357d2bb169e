//! Tests of the state that abandoned and expired calls leave behind, and of what waiting calls
//! take.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, server_of, simulate};
use dray_backends::memory::MemoryFs;
use dray_core::{
    BufMut, Cancel, Context, CreateHow, Errno, FileSystem, Lock, LockFamily, LockKind, LockOwner,
    LockRange, Make, Name, Op, OpenHow, Pid,
};
use dray_fabric::sim::{Network, Weather};
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::client::{ClientOptions, ClientSession, RemoteFs, SessionMemory};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::{Scope, sleep, spawn_join, timeout};

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: false };
/// Long enough for everything that is to happen at all.
const A_WHILE: Duration = Duration::from_secs(20);
/// More calls than one connection may have under way.
const MANY: u64 = 200;

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

/// An fcntl lock of the whole file.
fn lock(kind: LockKind, owner: u64) -> Lock {
    let (family, range) = (LockFamily::Posix, LockRange::ALL);
    Lock { family, kind, range, owner: LockOwner::own(owner), pid: Pid(1) }
}

/// A server at which calls of this kind take so long.
fn slow_server(below: MemoryFs, op: Op, delay: Duration) -> Server {
    let fault = Fault { op: Some(op), when: When::Always, delay, error: None };
    let fs = Observed::new(Arc::new(below), Arc::new(Faults::new(vec![fault])));
    let export = Export::new("data", Arc::new(fs), Vec::new());
    Server::new(ServerOptions::default(), vec![export], Arc::new(MemoryJournal::default()))
}

fn open_files(server: &Server) -> usize {
    server.status().clients.iter().map(|client| client.files).sum()
}

/// Waiting locks once took every call that reads could be made with. The holder of the lock could
/// not go on, and so never released it.
// proves: P58
#[test]
fn waiting_locks_leave_room_for_the_holder_of_the_lock() {
    simulate(1, async {
        let (network, scope, cx) = (Network::new(), Scope::new(), Context::system());
        let server = server_of(memory(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &scope);
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let (_, file) = fs.create(&cx, fs.info().root, name("f"), NEW).await.unwrap();
        file.lock(&cx, lock(LockKind::Exclusive, 0), false).await.unwrap();
        let wait = |owner| {
            let file = file.clone();
            spawn_join(async move {
                let cx = Context::system();
                file.lock(&cx, lock(LockKind::Exclusive, owner), true).await.unwrap();
                file.lock(&cx, lock(LockKind::Unlock, owner), false).await.unwrap();
            })
        };
        let waiters: Vec<_> = (1..=MANY).map(wait).collect();
        sleep(Duration::from_secs(1)).await;
        let read = timeout(A_WHILE, file.read(&cx, 0, BufMut::heap(10))).await;
        assert!(read.is_ok_and(|read| read.is_ok()), "the holder of the lock waits for the others");
        file.lock(&cx, lock(LockKind::Unlock, 0), false).await.unwrap();
        for waiter in waiters {
            assert!(timeout(10 * A_WHILE, waiter).await.is_ok(), "each is served");
        }
    });
}

/// Calls that nobody answers keep their tags. A call that waited for a tag did so for ever.
// proves: P64
#[test]
fn the_limit_holds_while_all_calls_that_there_may_be_are_stuck() {
    simulate(2, async {
        let (network, scope) = (Network::new(), Scope::new());
        let server = slow_server(memory(), Op::Statfs, Duration::from_secs(86_400));
        serve_simulated(&network, "s", &server, &scope);
        let limit = Duration::from_secs(3);
        let options = ClientOptions { timeout: Some(limit), ..client_options() };
        let fs = connect(network.connector("s"), options).await.unwrap();
        let ask = |_| {
            let fs = fs.clone();
            spawn_join(async move { fs.statfs(&Context::system()).await })
        };
        let calls: Vec<_> = (0..MANY).map(ask).collect();
        for call in calls {
            let outcome = timeout(limit + Duration::from_millis(100), call).await;
            let error = outcome.expect("it waits for longer than it may").unwrap().unwrap_err();
            assert_eq!(error.errno(), Errno::EHOSTDOWN);
        }
    });
}

/// Changes that nobody answers keep their slots. A call that waited for a slot had the limit to
/// wait for as often as there were changes before it.
// proves: P64
#[test]
fn the_limit_holds_while_all_changes_that_there_may_be_are_stuck() {
    simulate(7, async {
        let (network, scope) = (Network::new(), Scope::new());
        let server = slow_server(memory(), Op::Make, Duration::from_secs(86_400));
        serve_simulated(&network, "s", &server, &scope);
        let limit = Duration::from_secs(3);
        let options = ClientOptions { timeout: Some(limit), ..client_options() };
        let fs = connect(network.connector("s"), options).await.unwrap();
        let make = |number| {
            let fs = fs.clone();
            spawn_join(async move {
                let (cx, name) = (Context::system(), format!("dir{number}"));
                let dir = Make::Directory { mode: 0o755 };
                fs.make(&cx, fs.info().root, self::name(&name), dir).await.map(drop)
            })
        };
        let changes: Vec<_> = (0..MANY).map(make).collect();
        for change in changes {
            let outcome = timeout(limit + Duration::from_millis(100), change).await;
            let error = outcome.expect("it waits for longer than it may").unwrap().unwrap_err();
            assert_eq!(error.errno(), Errno::EHOSTDOWN);
        }
    });
}

/// Makes a file, makes one without a name, or opens one that is there.
async fn open_something(
    fs: &RemoteFs,
    cx: &Context,
    which: usize,
    truncates: bool,
) -> dray_core::Result<()> {
    let root = fs.info().root;
    match which {
        0 => fs.create(cx, root, name("f"), NEW).await.map(drop),
        1 => fs.tmpfile(cx, root, NEW).await.map(drop),
        _ => {
            let id = fs.lookup(cx, root, name("there")).await?.id;
            let cut = if truncates { libc::O_TRUNC } else { 0 };
            fs.open(cx, id, OpenHow::new(libc::O_RDWR | cut)).await.map(drop)
        }
    }
}

/// Makes a call that opens a file, and gives up before it is answered.
async fn give_up_opening(fs: &RemoteFs, which: usize) {
    let cancel = Arc::new(Cancel::default());
    let cx = Context { cancel: Some(cancel.clone()), ..Context::system() };
    let fs = fs.clone();
    let opening = spawn_join(async move { open_something(&fs, &cx, which, true).await });
    sleep(Duration::from_millis(100)).await;
    cancel.set();
    assert_eq!(opening.await.unwrap().unwrap_err().errno(), Errno::EINTR);
}

// proves: P72
#[test]
fn a_file_created_for_a_caller_that_gave_up_is_closed() {
    for (which, op) in [Op::Create, Op::Tmpfile].into_iter().enumerate() {
        simulate(3, async {
            let (network, scope) = (Network::new(), Scope::new());
            let server = slow_server(memory(), op, Duration::from_secs(1));
            serve_simulated(&network, "s", &server, &scope);
            let fs = connect(network.connector("s"), client_options()).await.unwrap();
            give_up_opening(&fs, which).await;
            sleep(A_WHILE).await;
            assert_eq!(open_files(&server), 0, "{op:?}");
        });
    }
}

/// The client's connection broke as well, and the next one came while the server still made the
/// file. The close that was sent on that connection found nothing to close.
// proves: P72
#[test]
fn what_was_made_by_a_connection_that_has_gone_is_closed() {
    for (which, op) in [Op::Create, Op::Tmpfile, Op::Open].into_iter().enumerate() {
        simulate(6, async {
            let (network, scope, below) = (Network::new(), Scope::new(), memory());
            let cx = Context::system();
            below.create(&cx, below.info().root, name("there"), NEW).await.unwrap();
            let server = slow_server(below, op, Duration::from_secs(5));
            serve_simulated(&network, "s", &server, &scope);
            let fs = connect(network.connector("s"), client_options()).await.unwrap();
            let breaking = Weather { break_one_in: Some(1), ..Weather::default() };
            let breaks = {
                let network = network.clone();
                spawn_join(async move {
                    sleep(Duration::from_millis(50)).await;
                    network.set_weather(breaking);
                    network.partition("s", true);
                    sleep(Duration::from_millis(200)).await;
                    network.set_weather(Weather::default());
                    network.partition("s", false);
                })
            };
            give_up_opening(&fs, which).await;
            breaks.await.unwrap();
            sleep(A_WHILE).await;
            assert_eq!(open_files(&server), 0, "{op:?}");
        });
    }
}

/// The client did not send the call again when the server was back. So nobody closed the file that
/// the call had opened.
// proves: P72
#[test]
fn a_file_opened_for_a_caller_that_timed_out_is_closed() {
    for (which, op) in [Op::Create, Op::Tmpfile, Op::Open].into_iter().enumerate() {
        for truncates in [false, true] {
            simulate(7, async {
                let (network, scope, below) = (Network::new(), Scope::new(), memory());
                let cx = Context::system();
                below.create(&cx, below.info().root, name("there"), NEW).await.unwrap();
                let server = slow_server(below, op, Duration::from_secs(1));
                serve_simulated(&network, "s", &server, &scope);
                let limit = Some(Duration::from_secs(3));
                let options = ClientOptions { timeout: limit, ..client_options() };
                let fs = connect(network.connector("s"), options).await.unwrap();
                let breaking = Weather { break_one_in: Some(1), ..Weather::default() };
                dray_rt::spawn({
                    let network = network.clone();
                    async move {
                        sleep(Duration::from_millis(500)).await;
                        network.set_weather(breaking);
                        network.partition("s", true);
                        sleep(Duration::from_secs(10)).await;
                        network.set_weather(Weather::default());
                        network.partition("s", false);
                    }
                });
                let error = open_something(&fs, &cx, which, truncates).await.unwrap_err();
                assert_eq!(error.errno(), Errno::EHOSTDOWN);
                assert_eq!(open_files(&server), 1, "{op:?}");
                sleep(A_WHILE).await;
                assert_eq!(open_files(&server), 0, "{op:?}");
            });
        }
    }
}

/// The process that gave up is killed before the answer comes, which nobody waits for then.
// proves: P72
#[test]
fn a_successor_closes_files_opened_for_callers_that_gave_up() {
    for (which, op) in [Op::Create, Op::Tmpfile, Op::Open].into_iter().enumerate() {
        simulate(8, async {
            let (network, scope, below) = (Network::new(), Scope::new(), memory());
            let cx = Context::system();
            below.create(&cx, below.info().root, name("there"), NEW).await.unwrap();
            let server = slow_server(below, op, Duration::from_secs(2));
            serve_simulated(&network, "s", &server, &scope);
            let memory = SessionMemory::create_memfd().unwrap();
            let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
            let process = Scope::new();
            process.spawn_on(&dray_rt::ExecutorHandle::current(), {
                let network = network.clone();
                async move {
                    let first =
                        ClientSession::connect(network.connector("s"), client_options(), memory);
                    let first = RemoteFs::new(first.await.unwrap());
                    give_up_opening(&first, which).await;
                    std::future::pending::<()>().await;
                }
            });
            sleep(Duration::from_secs(1)).await;
            process.kill();
            network.break_all("s");
            sleep(Duration::from_secs(5)).await;
            assert_eq!(open_files(&server), 1, "{op:?}");
            let memory = SessionMemory::from_fd(fd).unwrap();
            let next =
                ClientSession::connect(network.connector("s"), client_options(), memory).await;
            sleep(A_WHILE).await;
            assert_eq!(open_files(&server), 0, "{op:?}");
            drop(next.unwrap());
        });
    }
}

/// A wait for a lock that was given up is undone when the server is back. A close of the file
/// waits for that, and did so whatever the mount's limit.
// proves: P64
#[test]
fn the_limit_holds_for_a_close_behind_a_lock_that_is_being_undone() {
    simulate(4, async {
        let (network, scope, below) = (Network::new(), Scope::new(), memory());
        let server = server_of(below.clone(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &scope);
        let limit = Duration::from_secs(3);
        let options = ClientOptions { timeout: Some(limit), ..client_options() };
        let fs = connect(network.connector("s"), options).await.unwrap();
        let cx = Context::system();
        let (entry, file) = fs.create(&cx, fs.info().root, name("f"), NEW).await.unwrap();
        let lock = |owner| Lock {
            family: LockFamily::Posix,
            kind: LockKind::Exclusive,
            range: LockRange::ALL,
            owner: LockOwner::own(owner),
            pid: Pid(1),
        };
        let beside = below.open(&cx, entry.id, OpenHow::READ_WRITE).await.unwrap();
        beside.lock(&cx, lock(1), false).await.unwrap();
        let cancel = Arc::new(Cancel::default());
        let waiting = Context { cancel: Some(cancel.clone()), ..Context::system() };
        let waiter = {
            let file = file.clone();
            spawn_join(async move { file.lock(&waiting, lock(2), true).await })
        };
        sleep(Duration::from_millis(50)).await;
        network.partition("s", true);
        cancel.set();
        assert_eq!(waiter.await.unwrap().unwrap_err().errno(), Errno::EINTR);
        let closed = timeout(limit * 2, file.flush(&cx, LockOwner::own(2))).await;
        assert_eq!(closed.expect("it waits too long").unwrap_err().errno(), Errno::EHOSTDOWN);
    });
}

/// An abandoned connect left a running task behind, and a session without an owner, beside the
/// session of the next try of the same mount.
#[test]
fn a_connection_that_is_given_up_begins_no_session() {
    simulate(5, async {
        let (network, scope) = (Network::new(), Scope::new());
        let server = server_of(memory(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &scope);
        let delay = Duration::from_millis(100);
        network.set_weather(Weather { delay_min: delay, delay_max: delay, ..Weather::default() });
        let connecting = connect(network.connector("s"), client_options());
        assert!(timeout(3 * delay, connecting).await.is_err());
        sleep(Duration::from_secs(5)).await;
        assert!(server.status().clients.is_empty());
    });
}

/// A network in which nothing arrives, and no connection breaks.
fn standstill() -> Weather {
    let delay = Duration::from_secs(86_400);
    Weather { delay_min: delay, delay_max: delay, ..Weather::default() }
}

/// Each call waited for the limit again as long as nobody noticed that the server stood still. A
/// path of several names waited for many times the limit. So did processes that the kernel lets ask
/// one after the other.
// proves: P65
#[test]
fn a_server_that_stands_still_costs_the_limit_once() {
    simulate(8, async {
        let (network, scope, cx) = (Network::new(), Scope::new(), Context::system());
        let server = server_of(memory(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &scope);
        let limit = Duration::from_secs(3);
        let options = ClientOptions { timeout: Some(limit), ..client_options() };
        let fs = connect(network.connector("s"), options).await.unwrap();
        network.set_weather(standstill());
        let begin = dray_rt::now();
        for _ in 0..20 {
            let error = fs.statfs(&cx).await.unwrap_err();
            assert_eq!(error.errno(), Errno::EHOSTDOWN);
        }
        let to_be_welcome = Duration::from_secs(1);
        assert!(begin.elapsed() <= limit + 2 * to_be_welcome, "{:?}", begin.elapsed());
        network.set_weather(Weather::default());
        sleep(A_WHILE).await;
        fs.statfs(&cx).await.unwrap();
    });
}

/// A caller that waited for a lock at such a server did so for ever, since locks may be waited for.
// proves: P65
#[test]
fn a_lock_is_waited_for_as_long_as_the_server_answers() {
    simulate(9, async {
        let (network, scope, cx) = (Network::new(), Scope::new(), Context::system());
        let server = server_of(memory(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &scope);
        let limit = Duration::from_secs(3);
        let options = ClientOptions { timeout: Some(limit), ..client_options() };
        let fs = connect(network.connector("s"), options).await.unwrap();
        let (_, file) = fs.create(&cx, fs.info().root, name("f"), NEW).await.unwrap();
        file.lock(&cx, lock(LockKind::Exclusive, 0), false).await.unwrap();
        let wait = |owner| {
            let file = file.clone();
            spawn_join(async move {
                file.lock(&Context::system(), lock(LockKind::Exclusive, owner), true).await
            })
        };
        let waiter = wait(1);
        sleep(10 * limit).await;
        file.lock(&cx, lock(LockKind::Unlock, 0), false).await.unwrap();
        timeout(A_WHILE, waiter).await.expect("it is served").unwrap().unwrap();
        let waiter = wait(2);
        sleep(limit / 3).await;
        network.set_weather(standstill());
        let outcome = timeout(4 * limit, waiter).await.expect("it waits for ever").unwrap();
        assert_eq!(outcome.unwrap_err().errno(), Errno::EHOSTDOWN);
        network.set_weather(Weather::default());
        sleep(A_WHILE).await;
        file.lock(&cx, lock(LockKind::Unlock, 1), false).await.unwrap();
        timeout(A_WHILE, file.lock(&cx, lock(LockKind::Exclusive, 3), true))
            .await
            .unwrap()
            .unwrap();
    });
}
