//! Opening at the lookup: a round trip fewer, and nothing else changes.

mod common;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use common::{client_options, connect, memory, serve_simulated, server_of, server_with, simulate};
use dray_core::{
    BufMut, Context, CreateHow, Entry, Errno, FileId, FileSystem, Gid, Identity, Name, OpenFile,
    OpenHow, Pid, RemoveKind, RequestId, Result, SetAttr, Uid, XattrSet,
};
use dray_fabric::sim::{Network, Weather};
use dray_rpc::client::{RemoteFs, Session, SessionMemory};
use dray_rpc::server::{Loss, MemoryJournal, Sabotage, Server, ServerOptions};
use dray_rt::{Scope, now, sleep};

const FILE: &[u8] = b"f";
const READ: OpenHow = OpenHow::READ;
/// Longer than anything is kept open unused.
const A_WHILE: Duration = Duration::from_millis(200);

/// A program on a mount: one thread of an ordinary user.
struct Program {
    fs: RemoteFs,
    pid: u32,
    requests: Cell<u64>,
}

impl Program {
    async fn mount(network: &Network, pid: u32) -> Program {
        Program::on(connect(network.connector("s"), client_options()).await.unwrap(), pid)
    }

    fn on(fs: RemoteFs, pid: u32) -> Program {
        // As the kernel numbers its requests.
        Program { fs, pid, requests: Cell::new(1000 * u64::from(pid)) }
    }

    fn cx_of(&self, uid: u32) -> Context {
        self.requests.set(self.requests.get() + 2);
        let (uid, gid) = (Uid(uid), Gid(uid));
        let who = Identity { uid, gid, ..Identity::default() };
        let request = RequestId(self.requests.get());
        Context::new(self.fs.session().node(), request, Arc::new(who), Pid(self.pid))
    }

    fn cx(&self) -> Context {
        self.cx_of(1001)
    }

    fn root(&self) -> FileId {
        self.fs.info().root
    }

    async fn lookup(&self, name: &[u8]) -> Result<Entry> {
        self.fs.lookup(&self.cx(), self.root(), Name::new(name).unwrap()).await
    }

    async fn open(&self, id: FileId, how: OpenHow) -> Result<Arc<dyn OpenFile>> {
        self.fs.open(&self.cx(), id, how).await
    }

    /// open(2) and close(2).
    async fn open_close(&self, name: &[u8], how: OpenHow) {
        let entry = self.lookup(name).await.unwrap();
        let file = self.open(entry.id, how).await.unwrap();
        file.close(&self.cx()).await.unwrap();
    }

    /// stat(2).
    async fn stat(&self, name: &[u8]) {
        let entry = self.lookup(name).await.unwrap();
        self.fs.getattr(&self.cx(), entry.id).await.unwrap();
    }

    async fn chmod(&self, id: FileId, mode: u32) {
        let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
        self.fs.setattr(&self.cx_of(0), id, set).await.unwrap();
    }

    fn round_trips(&self) -> u64 {
        self.fs.session().status().channels.iter().map(|channel| channel.calls).sum()
    }

    fn made(&self) -> u64 {
        self.fs.session().status().ahead.made
    }
}

/// A file that everybody may read and write.
async fn make(fs: &RemoteFs, name: &[u8]) -> FileId {
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: true };
    let name = Name::new(name).unwrap();
    let made = fs.create(&Context::system(), fs.info().root, name, how).await;
    let (entry, file) = made.unwrap();
    file.close(&Context::system()).await.unwrap();
    entry.id
}

fn open_files(server: &Server) -> usize {
    server.status().clients.iter().map(|client| client.files).sum()
}

/// A server, one program that has learned to open what it looks up, and the file.
async fn learned(
    network: &Network,
    sabotage: Option<Sabotage>,
) -> (Server, Scope, Program, FileId) {
    let options = ServerOptions { sabotage, ..ServerOptions::default() };
    let (server, scope) = (server_of(memory(), options), Scope::new());
    serve_simulated(network, "s", &server, &scope);
    let program = Program::mount(network, 7).await;
    let id = make(&program.fs, FILE).await;
    program.open_close(FILE, READ).await;
    sleep(A_WHILE).await;
    (server, scope, program, id)
}

#[test]
fn opening_what_was_looked_up_is_one_round_trip_once_it_was_learned() {
    simulate(1, async {
        let network = Network::new();
        let (server, _life, program, _) = learned(&network, None).await;
        for how in [READ, OpenHow::READ_WRITE] {
            program.open_close(FILE, how).await;
            program.open_close(FILE, how).await;
            let before = program.round_trips();
            for _ in 0..100 {
                program.open_close(FILE, how).await;
            }
            // The simulation holds some up until what they opened must not be used any more.
            let made = program.round_trips() - before;
            assert!((100..115).contains(&made), "{how:?}: {made} round trips");
        }
        sleep(A_WHILE).await;
        assert_eq!(open_files(&server), 0);
    });
}

#[test]
fn what_a_lookup_opened_is_read_like_any_other() {
    simulate(2, async {
        let network = Network::new();
        let (_server, _life, program, id) = learned(&network, None).await;
        assert_eq!(program.lookup(FILE).await.unwrap().id, id);
        let before = program.round_trips();
        let file = program.open(id, READ).await.unwrap();
        assert_eq!((file.id(), program.round_trips()), (id, before));
        let read = file.read(&program.cx(), 0, BufMut::heap(10)).await;
        assert!(read.is_ok_and(|read| read.is_empty()));
    });
}

#[test]
fn who_only_looks_opens_nothing() {
    simulate(3, async {
        let network = Network::new();
        let (server, _life, program, _) = learned(&network, None).await;
        let before = program.made();
        for _ in 0..100 {
            program.stat(FILE).await;
        }
        assert!(program.made() - before <= 3, "{} opened in vain", program.made() - before);
        sleep(A_WHILE).await;
        assert_eq!(open_files(&server), 0);
    });
}

#[test]
fn what_nobody_uses_is_closed() {
    simulate(4, async {
        let network = Network::new();
        let (server, _life, program, _) = learned(&network, None).await;
        program.lookup(FILE).await.unwrap();
        assert_eq!(open_files(&server), 1);
        sleep(A_WHILE).await;
        assert_eq!(open_files(&server), 0);
        let stats = program.fs.session().status().ahead;
        assert_eq!((stats.made, stats.used, stats.given_up), (1, 0, 1));
    });
}

/// Its space must be free when unlink(2) returns.
#[test]
fn what_is_removed_is_not_kept_open_by_its_lookup() {
    simulate(5, async {
        let network = Network::new();
        let (server, _life, program, _) = learned(&network, None).await;
        program.lookup(FILE).await.unwrap();
        let name = Name::new(FILE).unwrap();
        program.fs.remove(&program.cx_of(0), program.root(), name, RemoveKind::File).await.unwrap();
        assert_eq!(open_files(&server), 0);
    });
}

#[test]
fn another_opening_than_was_expected_is_asked_for() {
    simulate(6, async {
        let network = Network::new();
        let (server, _life, program, id) = learned(&network, None).await;
        program.lookup(FILE).await.unwrap();
        let file = program.open(id, OpenHow::READ_WRITE).await.unwrap();
        file.write(&program.cx(), dray_core::Write::at(0), (&b"x"[..]).into()).await.unwrap();
        program.lookup(FILE).await.unwrap();
        let other = program.fs.open(&program.cx_of(1002), id, READ).await.unwrap();
        sleep(A_WHILE).await;
        assert_eq!(open_files(&server), 2);
        drop((file, other));
        sleep(A_WHILE).await;
        assert_eq!(open_files(&server), 0);
    });
}

#[test]
fn what_was_opened_for_one_user_is_not_anothers() {
    simulate(17, async {
        let network = Network::new();
        let (_server, _life, program, id) = learned(&network, None).await;
        let set = SetAttr { mode: Some(0o600), uid: Some(Uid(1001)), ..SetAttr::default() };
        program.fs.setattr(&program.cx_of(0), id, set).await.unwrap();
        program.lookup(FILE).await.unwrap();
        assert_eq!(program.made(), 1);
        let other = program.fs.open(&program.cx_of(1002), id, READ).await;
        assert_eq!(other.err().expect("it may not").errno(), Errno::EACCES);
    });
}

/// Who takes rights away, and how.
#[derive(Clone, Copy, Debug)]
enum Taking {
    Mode,
    Owner,
    List,
}

impl Taking {
    async fn take(self, by: &Program, id: FileId) {
        let cx = by.cx_of(0);
        match self {
            Taking::Mode => by.chmod(id, 0o600).await,
            Taking::Owner => {
                let set = SetAttr { mode: Some(0o600), uid: Some(Uid(5)), ..SetAttr::default() };
                by.fs.setattr(&cx, id, set).await.unwrap();
            }
            Taking::List => {
                let name = b"system.posix_acl_access";
                let _ = by.fs.setxattr(&cx, id, name, &[2, 0, 0, 0], XattrSet::Any).await;
                by.chmod(id, 0).await;
            }
        }
    }
}

/// Somebody takes a program's right to a file away, and tells it so. Whether the program can
/// open the file then, which it has looked up before.
async fn opened_without_right(seed: u64, sabotage: Option<Sabotage>, taking: Taking) -> bool {
    let network = Network::new();
    let (_server, _life, program, id) = learned(&network, sabotage).await;
    let other = Program::mount(&network, 8).await;
    sleep(Duration::from_micros(seed * 37 % 1000)).await;
    let id = program.lookup(FILE).await.map_or(id, |entry| entry.id);
    taking.take(&other, id).await;
    match program.open(id, READ).await {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.errno(), Errno::EACCES);
            false
        }
    }
}

#[test]
fn a_right_that_another_client_took_away_is_gone() {
    for taking in [Taking::Mode, Taking::Owner, Taking::List] {
        for seed in 0..50 {
            let opened = simulate(seed, opened_without_right(seed, None, taking));
            assert!(!opened, "seed {seed}: {taking:?}");
        }
    }
}

/// The server waits for what was opened ahead so long that this is over by then.
#[test]
fn what_was_opened_is_used_for_a_moment_only() {
    simulate(5, async {
        let network = Network::new();
        let (_server, _life, program, id) = learned(&network, None).await;
        for (rests_us, asks) in [(500, 0), (2_100, 1)] {
            program.open_close(FILE, READ).await;
            // Until one comes that opens, and whose answer is not held up.
            loop {
                let (asked, made) = (now(), program.made());
                program.lookup(FILE).await.unwrap();
                if program.made() > made && asked.elapsed() < Duration::from_millis(1) {
                    break;
                }
                program.open(id, READ).await.unwrap().close(&program.cx()).await.unwrap();
            }
            sleep(Duration::from_micros(rests_us)).await;
            let before = program.round_trips();
            let file = program.open(id, READ).await.unwrap();
            assert_eq!(program.round_trips() - before, asks, "{rests_us} us after the lookup");
            file.close(&program.cx()).await.unwrap();
        }
    });
}

#[test]
fn a_server_that_does_not_wait_for_what_is_open_is_found_out() {
    let opened =
        |seed| simulate(seed, opened_without_right(seed, Some(Sabotage::Ahead), Taking::Mode));
    assert!((0..50).any(opened), "the wait was left out, and nobody noticed");
}

/// The server lets a client's own changes pass: the client knows of them.
#[test]
fn a_right_that_the_same_client_took_away_is_gone_at_once() {
    let mut waited = Duration::ZERO;
    for seed in 0..50 {
        waited += simulate(seed, async {
            let network = Network::new();
            let (_server, _life, program, id) = learned(&network, None).await;
            let other = Program::on(program.fs.clone(), 9);
            program.lookup(FILE).await.unwrap();
            let before = now();
            other.chmod(id, 0o600).await;
            let waited = before.elapsed();
            let error = program.open(id, READ).await.err().expect("it may not");
            assert_eq!(error.errno(), Errno::EACCES);
            waited
        });
    }
    assert!(waited < 50 * Duration::from_millis(4), "nobody has to be waited for: {waited:?}");
}

/// What is on its way when the file is looked up counts, too.
#[test]
fn a_change_under_way_keeps_lookups_from_opening() {
    for seed in 0..200 {
        simulate(seed, async {
            let network = Network::new();
            let (_server, _life, program, id) = learned(&network, None).await;
            let other = Rc::new(Program::mount(&network, 8).await);
            let (taken, looked) = (Cell::new(false), program.lookup(FILE));
            let mut change = std::pin::pin!(async {
                other.chmod(id, 0o600).await;
                taken.set(true);
            });
            let mut work = std::pin::pin!(async {
                looked.await.unwrap();
                loop {
                    let gone = taken.get();
                    match program.open(id, READ).await {
                        Ok(_) if gone => panic!("seed {seed}: opened without the right"),
                        Ok(file) => drop(file),
                        Err(_) => break,
                    }
                    program.lookup(FILE).await.unwrap();
                }
            });
            let mut changed = false;
            std::future::poll_fn(|task| {
                changed = changed || change.as_mut().poll(task).is_ready();
                work.as_mut().poll(task)
            })
            .await;
        });
    }
}

/// Whoever opens a file again and again must not hold up its change for ever.
#[test]
fn a_change_of_rights_waits_for_a_moment_only() {
    simulate(12, async {
        let network = Network::new();
        let (_server, _life, program, id) = learned(&network, None).await;
        let other = Program::mount(&network, 8).await;
        let scope = Scope::new();
        scope.spawn_on(&dray_rt::Handle::current(), {
            let program = Program::on(program.fs.clone(), 10);
            let (fs, cx, root) = (program.fs.clone(), program.cx_of(0), program.root());
            async move {
                loop {
                    let entry = fs.lookup(&cx, root, Name::new(FILE).unwrap()).await.unwrap();
                    drop(fs.open(&cx, entry.id, READ).await.unwrap());
                }
            }
        });
        sleep(A_WHILE).await;
        let before = now();
        other.chmod(id, 0o600).await;
        let took = before.elapsed();
        assert!(took < Duration::from_millis(20), "{took:?}");
        scope.kill();
    });
}

#[test]
fn threads_without_a_number_open_nothing_ahead() {
    simulate(13, async {
        let network = Network::new();
        let (_server, _life, program, _) = learned(&network, None).await;
        let contained = Program::on(program.fs.clone(), 0);
        for _ in 0..10 {
            contained.open_close(FILE, READ).await;
        }
        assert_eq!(program.made(), 0);
    });
}

/// Where answers take longer than what they opened may be used, they open seldom.
#[test]
fn over_a_slow_network_little_is_opened_in_vain() {
    simulate(14, async {
        let network = Network::new();
        let (server, _life, program, _) = learned(&network, None).await;
        let delay = Duration::from_millis(3);
        network.set_weather(Weather { delay_min: delay, delay_max: delay, ..Weather::default() });
        for _ in 0..1000 {
            program.open_close(FILE, READ).await;
        }
        assert!(program.made() < 30, "{} opened in vain", program.made());
        sleep(A_WHILE).await;
        assert_eq!(open_files(&server), 0);
    });
}

#[test]
fn nothing_stays_open_over_broken_connections_and_deaths_of_the_server() {
    for seed in 0..60 {
        simulate(seed, async {
            let network = Network::new();
            let (files, journal) = (memory(), MemoryJournal::default());
            let start = async |life: &Scope| {
                let (options, journal) = (ServerOptions::default(), journal.clone());
                let server = server_with(files.clone(), options, journal);
                server.restore(Loss::Nothing).await;
                serve_simulated(&network, "s", &server, life);
                server
            };
            let mut life = Scope::new();
            let mut server = start(&life).await;
            let program = Program::mount(&network, 7).await;
            make(&program.fs, FILE).await;
            network.set_weather(Weather {
                break_one_in: Some(9),
                deliver_then_break_one_in: Some(2),
                ..Weather::default()
            });
            for round in 0..60 {
                match round % 4 {
                    3 => drop(program.lookup(FILE).await.unwrap()),
                    _ => program.open_close(FILE, READ).await,
                }
                if round % 20 == 19 {
                    program.lookup(FILE).await.unwrap();
                    life.kill();
                    network.break_all("s");
                    life = Scope::new();
                    server = start(&life).await;
                }
            }
            network.set_weather(Weather::default());
            sleep(Duration::from_secs(5)).await;
            assert_eq!(open_files(&server), 0, "seed {seed}");
            assert!(program.made() > 5, "seed {seed}: {}", program.made());
        });
    }
}

/// The daemon dies with one file in use that a lookup opened, and one that nobody used.
#[test]
fn a_successor_goes_on_with_what_was_used_and_closes_the_rest() {
    simulate(16, async {
        let network = Network::new();
        let (server, scope) = (server_of(memory(), ServerOptions::default()), Scope::new());
        serve_simulated(&network, "s", &server, &scope);
        let memory = SessionMemory::create_memfd().unwrap();
        let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
        let process = Scope::new();
        let (tell, told) = dray_rt::sync::oneshot::channel();
        process.spawn_on(&dray_rt::Handle::current(), {
            let network = network.clone();
            async move {
                let first = Session::connect(network.connector("s"), client_options(), memory);
                let fs = RemoteFs::new(first.await.unwrap());
                let id = make(&fs, FILE).await;
                let cx = |request| {
                    let who = Identity::system();
                    Context::new(fs.session().node(), RequestId(request), who, Pid(7))
                };
                let name = Name::new(FILE).unwrap();
                for request in [100, 200] {
                    fs.lookup(&cx(request), fs.info().root, name).await.unwrap();
                    let file = fs.open(&cx(request + 2), id, READ).await.unwrap();
                    // A process that is killed drops nothing.
                    std::mem::forget(file);
                }
                assert_eq!(fs.session().status().ahead.used, 1);
                fs.lookup(&cx(300), fs.info().root, name).await.unwrap();
                let _ = tell.send(id);
                std::future::pending::<()>().await;
            }
        });
        let id = told.await.unwrap();
        process.kill();
        network.break_all("s");
        assert_eq!(open_files(&server), 3);
        let memory = SessionMemory::from_fd(fd).unwrap();
        let next = Session::connect(network.connector("s"), client_options(), memory).await;
        let next = RemoteFs::new(next.unwrap());
        let files = [102, 202].map(|request| next.attach(id, READ, request));
        next.session().attached();
        let before: u64 = next.session().status().channels.iter().map(|one| one.calls).sum();
        for file in &files {
            file.read(&Context::system(), 0, BufMut::heap(10)).await.map_err(|one| one.0).unwrap();
        }
        let after: u64 = next.session().status().channels.iter().map(|one| one.calls).sum();
        // A third may ask for a sync.
        assert!(after - before <= 3, "opened again: {} round trips", after - before);
        assert_eq!(open_files(&server), 2);
        // The kernel did not hear of the last opening, and asks again.
        let mut cx = Context::system();
        (cx.node, cx.request) = (next.session().node(), RequestId(202));
        let again = next.open(&cx, id, READ).await.unwrap();
        assert_eq!(open_files(&server), 2);
        drop((files, again));
        sleep(A_WHILE).await;
        assert_eq!(open_files(&server), 0);
    });
}
