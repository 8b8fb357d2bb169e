//! A remote file system behaves as the one that it stands for.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{
    client_options, connect, key, memory, run, serve_simulated, serve_sockets, server_of, simulate,
};
use dray_core::{
    Buf, BufMut, Cancel, Context, CreateHow, Errno, Fate, FileSystem, Lock, LockFamily, LockKind,
    LockOwner, LockRange, Make, Name, Op, OpenHow, Pid, RemoveKind, Write, XattrSet,
};
use dray_fabric::sim::{Network, Weather};
use dray_fabric::{Address, Connection, Sockets};
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::client::{ClientOptions, ConnectError};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::{Scope, spawn_join};

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

async fn use_files(fs: &dyn FileSystem) {
    let cx = Context::system();
    let root = fs.info().root;
    let dir = fs.make(&cx, root, name("d"), Make::Directory { mode: 0o755 }).await.unwrap();
    let (entry, file) = fs.create(&cx, dir.id, name("f"), NEW).await.unwrap();
    let error = fs.create(&cx, dir.id, name("f"), NEW).await.err().unwrap();
    assert_eq!(error.errno(), Errno::EEXIST);
    let data: Vec<u8> = (0..1_000_000u32).map(|n| (n * 7) as u8).collect();
    for at in [0, 1_000_000, 123] {
        let written = file.write(&cx, Write::at(at), Buf::from(&data[..])).await.unwrap();
        assert_eq!(written, data.len());
    }
    assert_eq!(file.getattr(&cx).await.unwrap().size, 2_000_000);
    for (at, len) in [(123, 1 << 20), (123, 4096), (1_999_999, 4096), (2_000_000, 10)] {
        let read = file.read(&cx, at, BufMut::heap(len)).await.unwrap();
        let end = (at as usize + len).min(2_000_000);
        assert_eq!(read.len(), end - at as usize);
        if at == 123 {
            assert_eq!(read.filled()[..4096], data[..4096]);
        }
    }
    assert_eq!(fs.lookup(&cx, dir.id, name("f")).await.unwrap().id, entry.id);
    let listing = fs.open(&cx, dir.id, OpenHow::DIRECTORY).await.unwrap();
    let page = listing.readdir(&cx, 0, 65_536, true).await.unwrap();
    let names: Vec<_> = page.iter().map(|(name, _)| name.to_vec()).collect();
    assert_eq!(names, [b"f"]);
    assert!(page.end);
    listing.close(&cx).await.unwrap();
    fs.remove(&cx, dir.id, name("f"), RemoveKind::File).await.unwrap();
    assert_eq!(file.getattr(&cx).await.unwrap().nlink, 0);
    file.close(&cx).await.unwrap();
    let gone = fs.getattr(&cx, entry.id).await.unwrap_err();
    assert_eq!(gone.errno(), Errno::ESTALE);
}

#[test]
fn over_tcp_and_unix_sockets() {
    let dir = tempfile::tempdir().unwrap();
    for address in [
        Address::Unix(dir.path().join("socket")),
        Address::Tcp { host: "127.0.0.1".into(), port: 0 },
    ] {
        run(async {
            let server = server_of(memory(), ServerOptions::default());
            let bound = serve_sockets(&address, server.clone()).await;
            let fs = connect(Arc::new(Sockets(bound)), client_options()).await.unwrap();
            use_files(&fs).await;
            let status = server.status();
            assert_eq!(status.clients.len(), 1);
            assert_eq!((status.clients[0].files, status.buffer_used_bytes), (0, 0));
        });
    }
}

#[test]
fn over_a_simulated_network() {
    simulate(1, async {
        let network = Network::new();
        let server = server_of(memory(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &Scope::new());
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        use_files(&fs).await;
    });
}

/// Connections break all the time, replies get lost: every change happens once.
#[test]
fn changes_are_applied_once_over_broken_connections() {
    for seed in 0..40 {
        simulate(seed, async {
            let network = Network::new();
            let server = server_of(memory(), ServerOptions::default());
            serve_simulated(&network, "s", &server, &Scope::new());
            let fs = connect(network.connector("s"), client_options()).await.unwrap();
            network.set_weather(Weather {
                break_one_in: Some(12),
                deliver_then_break_one_in: Some(2),
                ..Weather::default()
            });
            let cx = Context::system();
            let root = fs.info().root;
            let (_, log) = fs.create(&cx, root, name("log"), NEW).await.unwrap();
            for round in 0..50 {
                let text = format!("{round:04}");
                let made = fs.make(&cx, root, name(&text), Make::Directory { mode: 0o700 }).await;
                made.unwrap_or_else(|error| panic!("seed {seed}: mkdir {text}: {error}"));
                let how = Write { append: true, ..Write::default() };
                log.write(&cx, how, Buf::from(text.as_bytes())).await.unwrap();
                let removed = fs.remove(&cx, root, name(&text), RemoveKind::Directory).await;
                removed.unwrap_or_else(|error| panic!("seed {seed}: rmdir {text}: {error}"));
            }
            let read = log.read(&cx, 0, BufMut::heap(4096)).await.unwrap();
            let expected: String = (0..50).map(|round| format!("{round:04}")).collect();
            assert_eq!(String::from_utf8_lossy(read.filled()), expected, "seed {seed}");
            assert!(fs.session().status().channels[0].resent > 0, "seed {seed}: nothing broke");
        });
    }
}

#[test]
fn a_wrong_key_is_refused_from_both_sides() {
    run(async {
        let options = ServerOptions { key: key("the key of the site"), ..Default::default() };
        let address = Address::Tcp { host: "127.0.0.1".into(), port: 0 };
        let bound = serve_sockets(&address, server_of(memory(), options)).await;
        for (client_key, hint) in [(None, "psk"), (key("another key, wrong"), "key")] {
            let options = ClientOptions { key: client_key, ..client_options() };
            let error = connect(Arc::new(Sockets(bound.clone())), options).await.err().unwrap();
            assert!(error.to_string().contains(hint), "{error}");
        }
        let options = ClientOptions { key: key("the key of the site"), ..client_options() };
        use_files(&connect(Arc::new(Sockets(bound)), options).await.unwrap()).await;
    });
}

#[test]
fn an_unknown_export_is_named_with_those_there_are() {
    run(async {
        let address = Address::Tcp { host: "127.0.0.1".into(), port: 0 };
        let bound = serve_sockets(&address, server_of(memory(), ServerOptions::default())).await;
        let options = ClientOptions { export: "dta".into(), ..client_options() };
        let error = connect(Arc::new(Sockets(bound)), options).await.err().unwrap();
        assert!(matches!(error, ConnectError::Refused { errno: Errno::ENOENT, .. }), "{error:?}");
        assert!(error.to_string().contains("data"), "{error}");
    });
}

#[test]
fn a_server_that_stays_away_fails_calls_after_the_limit_and_serves_when_it_is_back() {
    simulate(3, async {
        let network = Network::new();
        let server = server_of(memory(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &Scope::new());
        let options = ClientOptions { timeout: Some(Duration::from_secs(20)), ..client_options() };
        let fs = connect(network.connector("s"), options).await.unwrap();
        let cx = Context::system();
        network.partition("s", true);
        let begin = dray_rt::now();
        let error = fs.statfs(&cx).await.unwrap_err();
        assert_eq!(error.errno(), Errno::EHOSTDOWN);
        let waited = begin.elapsed();
        assert!(
            waited >= Duration::from_secs(20) && waited < Duration::from_secs(23),
            "{waited:?}"
        );
        // It counts from when the server went, not from each call.
        let begin = dray_rt::now();
        assert_eq!(fs.statfs(&cx).await.unwrap_err().errno(), Errno::EHOSTDOWN);
        assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
        network.partition("s", false);
        dray_rt::sleep(Duration::from_secs(3)).await;
        fs.statfs(&cx).await.unwrap();
    });
}

#[test]
fn a_client_that_stays_away_loses_its_session_and_opens_its_files_again() {
    simulate(4, async {
        let network = Network::new();
        let server = server_of(memory(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &Scope::new());
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let cx = Context::system();
        let (_, file) = fs.create(&cx, fs.info().root, name("f"), NEW).await.unwrap();
        network.partition("s", true);
        dray_rt::sleep(Duration::from_secs(100)).await;
        assert!(server.status().clients.is_empty());
        network.partition("s", false);
        file.write(&cx, Write::at(0), Buf::from(&b"again"[..])).await.unwrap();
        assert_eq!(server.status().clients.len(), 1);
        assert_eq!(fs.session().status().lost, 1);
    });
}

/// Its change was being made when the connection went, and the session with it: to make it
/// again would be wrong, and so would the error of trying.
#[test]
fn what_a_lost_session_had_under_way_ends_with_an_error_and_happened_once() {
    // In which the call gets through and its answer does not.
    simulate(9, async {
        let network = Network::new();
        let delay = Duration::from_millis(10);
        let slow = Fault { op: Some(Op::Make), when: When::Always, delay, error: None };
        let below = Observed::new(Arc::new(memory()), Arc::new(Faults::new(vec![slow])));
        let export = Export::new("data", Arc::new(below), Vec::new());
        let journal = Arc::new(MemoryJournal::default());
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        serve_simulated(&network, "s", &server, &Scope::new());
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let (cx, root) = (Context::system(), fs.info().root);
        let (there, at) = (fs.clone(), Context::system());
        let made = dray_rt::spawn_join(async move {
            there.make(&at, root, name("d"), Make::Directory { mode: 0o755 }).await
        });
        dray_rt::sleep(delay / 2).await;
        assert_eq!(server.status().operations.len(), 1);
        network.partition("s", true);
        let (there, at) = (fs.clone(), Context::system());
        let unsent = dray_rt::spawn_join(async move {
            there.make(&at, root, name("later"), Make::Directory { mode: 0o755 }).await
        });
        dray_rt::sleep(Duration::from_secs(100)).await;
        assert!(server.status().clients.is_empty());
        network.partition("s", false);
        let error = made.await.unwrap().unwrap_err();
        assert_eq!((error.errno(), error.fate()), (Errno::EIO, Fate::Unknown));
        unsent.await.unwrap().unwrap();
        fs.lookup(&cx, root, name("d")).await.unwrap();
        fs.remove(&cx, root, name("d"), RemoveKind::Directory).await.unwrap();
    });
}

#[test]
fn a_session_begun_anew_with_fewer_slots_goes_on() {
    simulate(8, async {
        let (network, fs) = (Network::new(), memory());
        let life = Scope::new();
        let server = server_of(fs.clone(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &life);
        let client = connect(network.connector("s"), client_options()).await.unwrap();
        let (cx, root) = (Context::system(), client.info().root);
        let make = async |round: &str| {
            for number in 0..20 {
                let (name, what) = (format!("{round}-{number}"), Make::Directory { mode: 0o755 });
                let name = dray_core::NameBuf::new(name.as_bytes()).unwrap();
                client.make(&cx, root, &name, what).await.unwrap();
            }
        };
        make("before").await;
        life.kill();
        network.break_all("s");
        let server = server_of(fs, ServerOptions { slots: 2, ..ServerOptions::default() });
        serve_simulated(&network, "s", &server, &Scope::new());
        dray_rt::sleep(Duration::from_secs(1)).await; // what is sent before it notices is lost
        make("after").await;
        assert_eq!(client.session().status().lost, 1);
    });
}

/// More of them wait for the server than it has slots in its next life: each is made, or ends
/// with an error as one whose fate nobody knows; the server is never asked for a slot that it
/// has not.
#[test]
fn what_waits_for_a_slot_that_is_gone_is_made_or_ends_with_an_error() {
    simulate(10, async {
        let (network, fs) = (Network::new(), memory());
        let life = Scope::new();
        serve_simulated(&network, "s", &server_of(fs.clone(), ServerOptions::default()), &life);
        let client = connect(network.connector("s"), client_options()).await.unwrap();
        let (cx, root) = (Context::system(), client.info().root);
        network.partition("s", true);
        life.kill();
        dray_rt::sleep(Duration::from_secs(1)).await; // it has noticed
        let make = |number: usize| {
            let client = client.clone();
            dray_rt::spawn_join(async move {
                let name = dray_core::NameBuf::new(format!("d{number}").as_bytes()).unwrap();
                let (cx, what) = (Context::system(), Make::Directory { mode: 0o755 });
                client.make(&cx, root, &name, what).await.map_err(|error| error.errno())
            })
        };
        let making: Vec<_> = (0..8).map(make).collect();
        dray_rt::sleep(Duration::from_secs(1)).await;
        let server = server_of(fs, ServerOptions { slots: 2, ..ServerOptions::default() });
        serve_simulated(&network, "s", &server, &Scope::new());
        network.partition("s", false);
        let mut made = 0;
        for (number, one) in making.into_iter().enumerate() {
            let outcome = one.await.unwrap();
            let name = dray_core::NameBuf::new(format!("d{number}").as_bytes()).unwrap();
            let there = client.lookup(&cx, root, &name).await.is_ok();
            assert_eq!(outcome.is_ok(), there, "{number}: {outcome:?}");
            assert!(outcome.is_ok() || outcome == Err(Errno::EIO), "{number}: {outcome:?}");
            made += usize::from(there);
        }
        assert!(made >= 2, "only {made} were made");
    });
}

/// The answer that granted it was lost, and its waiter gave up before the server was back.
#[test]
fn a_lock_that_nobody_knows_of_is_given_back() {
    simulate(9, async {
        let (network, below) = (Network::new(), memory());
        let server = server_of(below.clone(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &Scope::new());
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let cx = Context::system();
        let (entry, file) = fs.create(&cx, fs.info().root, name("f"), NEW).await.unwrap();
        let lock = |kind, owner| Lock {
            family: LockFamily::Posix,
            kind,
            range: LockRange { start: 0, end: 9 },
            owner: LockOwner(owner),
            pid: Pid(1),
        };
        let beside = below.open(&cx, entry.id, OpenHow::READ_WRITE).await.unwrap();
        beside.lock(&cx, lock(LockKind::Exclusive, 1), false).await.unwrap();
        let cancel = Arc::new(Cancel::default());
        let waiting = Context { cancel: Some(cancel.clone()), ..Context::system() };
        let waiter = dray_rt::spawn_join(async move {
            let result = file.lock(&waiting, lock(LockKind::Exclusive, 2), true).await;
            (file, result)
        });
        dray_rt::sleep(Duration::from_millis(50)).await;
        network.set_weather(Weather { break_one_in: Some(1), ..Weather::default() });
        beside.lock(&cx, lock(LockKind::Unlock, 1), false).await.unwrap();
        dray_rt::sleep(Duration::from_millis(5)).await;
        network.partition("s", true);
        cancel.set();
        let (file, result) = waiter.await.unwrap();
        assert_eq!(result.unwrap_err().errno(), Errno::EINTR);
        assert_eq!(below.locks().len(), 1);
        network.set_weather(Weather::default());
        network.partition("s", false);
        dray_rt::sleep(Duration::from_secs(2)).await;
        assert!(below.locks().is_empty());
        file.lock(&cx, lock(LockKind::Exclusive, 2), true).await.unwrap();
        file.close(&cx).await.unwrap();
    });
}

#[test]
fn an_evicted_client_gives_everything_back() {
    simulate(5, async {
        let (network, below) = (Network::new(), memory());
        let server = server_of(below.clone(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &Scope::new());
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let (cx, root) = (Context::system(), fs.info().root);
        let (entry, file) = fs.create(&cx, root, name("f"), NEW).await.unwrap();
        for family in [LockFamily::Posix, LockFamily::Flock] {
            let (kind, owner) = (LockKind::Exclusive, LockOwner(3));
            let lock = Lock { family, kind, range: LockRange::ALL, owner, pid: Pid(1) };
            file.lock(&cx, lock, false).await.unwrap();
        }
        fs.remove(&cx, root, name("f"), RemoveKind::File).await.unwrap();
        assert_eq!(below.locks().len(), 2);
        below.getattr(&cx, entry.id).await.unwrap();
        let session = server.status().clients[0].session;
        assert!(server.evict(session).await);
        assert!(!server.evict(session).await);
        assert!(server.status().clients.is_empty());
        assert!(below.locks().is_empty(), "{:?}", below.locks().len());
        let gone = below.getattr(&cx, entry.id).await.unwrap_err();
        assert_eq!(gone.errno(), Errno::ESTALE, "it was removed, and nobody has it open");
    });
}

/// Such a name once did not fit into the intent that is noted of a change, and ended the
/// server.
#[test]
fn an_oversized_attribute_name_is_an_error_and_no_more() {
    simulate(6, async {
        let network = Network::new();
        let server = server_of(memory(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &Scope::new());
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let (cx, root) = (Context::system(), fs.info().root);
        let long = [b'x'; 5000];
        assert!(fs.setxattr(&cx, root, &long, b"v", XattrSet::Any).await.is_err());
        assert!(fs.removexattr(&cx, root, &long).await.is_err());
        fs.statfs(&cx).await.unwrap();
    });
}

/// Calls that a file system holds up kept the descriptors of connections that had gone, one more
/// with each that their client made anew.
#[test]
fn a_connection_that_has_gone_is_not_kept_by_its_calls() {
    simulate(11, async {
        let when = When::Always;
        let hangs = Fault { op: None, when, delay: Duration::from_secs(10_000), error: None };
        let below = Observed::new(Arc::new(memory()), Arc::new(Faults::new(vec![hangs])));
        let export = Export::new("data", Arc::new(below), Vec::new());
        let journal = Arc::new(MemoryJournal::default());
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        let (network, served) = (Network::new(), Arc::new(Mutex::new(Vec::new())));
        let (mut incoming, seen) = (network.listen("s"), served.clone());
        dray_rt::spawn(async move {
            while let Some(connection) = incoming.recv().await {
                let connection: Arc<dyn Connection> = Arc::new(connection);
                seen.lock().unwrap().push(Arc::downgrade(&connection));
                let server = server.clone();
                dray_rt::spawn(async move { server.serve(connection).await });
            }
        });
        let fs = Arc::new(connect(network.connector("s"), client_options()).await.unwrap());
        let root = fs.info().root;
        for changes in [true, false] {
            let fs = fs.clone();
            dray_rt::spawn(async move {
                let (cx, directory) = (Context::system(), Make::Directory { mode: 0o755 });
                match changes {
                    true => drop(fs.make(&cx, root, name("d"), directory).await),
                    false => drop(fs.getattr(&cx, root).await),
                }
            });
        }
        for _ in 0..3 {
            dray_rt::sleep(Duration::from_secs(5)).await;
            network.break_all("s");
        }
        dray_rt::sleep(Duration::from_secs(5)).await;
        let all = served.lock().unwrap().clone();
        assert!(all.len() > 3);
        assert_eq!(all.iter().filter(|one| one.upgrade().is_some()).count(), 1);
    });
}

/// A server whose making of names takes `delay`, so that it can be looked at meanwhile.
fn slow_server(delay: Duration) -> Server {
    let slow = Fault { op: Some(Op::Make), when: When::Always, delay, error: None };
    let below = Observed::new(Arc::new(memory()), Arc::new(Faults::new(vec![slow])));
    let export = Export::new("data", Arc::new(below), Vec::new());
    Server::new(ServerOptions::default(), vec![export], Arc::new(MemoryJournal::default()))
}

/// With each call jobs would cost every caller a look at its environment: they were to be switched
/// on, and nobody knew.
#[test]
fn clients_tell_the_jobs_of_callers_when_their_server_is_looked_at() {
    simulate(11, async {
        let (network, scope) = (Network::new(), Scope::new());
        let server = slow_server(Duration::from_secs(60));
        serve_simulated(&network, "s", &server, &scope);
        let asked = Arc::new(Mutex::new(Vec::new()));
        for (pid, name_of_dir) in [(77, "told"), (78, "never told"), (79, "unknown")] {
            let fs = connect(network.connector("s"), client_options()).await.unwrap();
            let asked = asked.clone();
            let find: dray_rpc::client::FindJobs = Box::new(move |callers, tell| {
                asked.lock().unwrap().extend(callers.clone());
                match callers[..] {
                    [Pid(77)] => tell(vec![(Pid(77), "4711".into()), (Pid(78), "forged".into())]),
                    _ => std::mem::forget(tell),
                }
            });
            if pid != 79 {
                fs.session().find_jobs_by(find);
            }
            let cx = Context { pid: Pid(pid), ..Context::system() };
            dray_rt::spawn(async move {
                let what = Make::Directory { mode: 0o755 };
                fs.make(&cx, fs.info().root, name(name_of_dir), what).await.unwrap();
            });
        }
        dray_rt::sleep(Duration::from_secs(1)).await;
        assert_eq!(*asked.lock().unwrap(), [], "nobody had looked");
        let begin = dray_rt::now();
        let status = server.status_with_paths().await;
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        let mut jobs: Vec<_> =
            status.operations.iter().map(|one| (one.pid, one.job.as_deref())).collect();
        jobs.sort_unstable();
        assert_eq!(jobs, [(Pid(77), Some("4711")), (Pid(78), None), (Pid(79), None)]);
        asked.lock().unwrap().sort_unstable();
        assert_eq!(*asked.lock().unwrap(), [Pid(77), Pid(78)]);
    });
}

/// Nobody else is woken for it.
#[test]
fn who_caches_an_open_file_is_told_once_when_another_client_changes_it() {
    simulate(12, async {
        let (network, scope) = (Network::new(), Scope::new());
        let server = server_of(memory(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &scope);
        let (cx, mut clients, mut heard) = (Context::system(), Vec::new(), Vec::new());
        for caches in [true, true, false] {
            let options = ClientOptions { caches, ..client_options() };
            let fs = connect(network.connector("s"), options).await.unwrap();
            let told = Arc::new(Mutex::new(Vec::new()));
            let tell = told.clone();
            fs.session().hear_changes_by(Box::new(move |files| tell.lock().unwrap().extend(files)));
            clients.push(fs);
            heard.push(told);
        }
        let news = || -> Vec<_> {
            heard.iter().map(|told| std::mem::take(&mut *told.lock().unwrap())).collect()
        };
        let root = clients[0].info().root;
        let (entry, file) = clients[0].create(&cx, root, name("f"), NEW).await.unwrap();
        let (_, other) = clients[1].create(&cx, root, name("other"), NEW).await.unwrap();
        let mut files = vec![file];
        for fs in &clients[1..] {
            files.push(fs.open(&cx, entry.id, OpenHow::READ_WRITE).await.unwrap());
        }
        for at in 0..5 {
            files[1].write(&cx, Write::at(at), Buf::from(&b"x"[..])).await.unwrap();
            other.write(&cx, Write::at(at), Buf::from(&b"x"[..])).await.unwrap();
        }
        dray_rt::sleep(Duration::from_secs(1)).await;
        assert_eq!(
            news(),
            [vec![entry.id], vec![], vec![]],
            "the first alone has it open and caches"
        );
        files[2].write(&cx, Write::at(9), Buf::from(&b"x"[..])).await.unwrap();
        dray_rt::sleep(Duration::from_secs(1)).await;
        assert_eq!(news(), [vec![entry.id], vec![entry.id], vec![]]);
        // By name, too: a file that is put, and one that is cut because it was there.
        clients[2].put(&cx, root, name("f"), 0o644, Buf::from(&b"put"[..])).await.unwrap();
        dray_rt::sleep(Duration::from_secs(1)).await;
        assert_eq!(news(), [vec![entry.id], vec![entry.id], vec![]]);
        let open = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
        let cut = CreateHow { open, mode: 0o644, exclusive: false };
        let (_, cut) = clients[2].create(&cx, root, name("f"), cut).await.unwrap();
        cut.close(&cx).await.unwrap();
        dray_rt::sleep(Duration::from_secs(1)).await;
        assert_eq!(news(), [vec![entry.id], vec![entry.id], vec![]]);
        drop(files.remove(0));
        dray_rt::sleep(Duration::from_secs(1)).await;
        files[1].write(&cx, Write::at(9), Buf::from(&b"x"[..])).await.unwrap();
        dray_rt::sleep(Duration::from_secs(1)).await;
        assert_eq!(news(), [vec![], vec![entry.id], vec![]], "who has closed it is not told");
    });
}

/// It counted as answers that the client had not read. On a slow network whoever had about as many
/// calls under way as it may lost its connection for that, as if it had made more.
#[test]
fn what_a_client_is_told_takes_no_place_of_its_calls() {
    simulate(13, async {
        let (network, scope) = (Network::new(), Scope::new());
        let server = server_of(memory(), ServerOptions { calls_max: 4, ..Default::default() });
        serve_simulated(&network, "s", &server, &scope);
        let (cx, options) = (Context::system(), ClientOptions { caches: true, ..client_options() });
        let [writer, reader] =
            [options.clone(), options].map(|options| connect(network.connector("s"), options));
        let (writer, reader) = (writer.await.unwrap(), reader.await.unwrap());
        let told = Arc::new(Mutex::new(Vec::new()));
        let tell = told.clone();
        reader.session().hear_changes_by(Box::new(move |files| tell.lock().unwrap().push(files)));
        let root = writer.info().root;
        let (entry, changed) = writer.create(&cx, root, name("f"), NEW).await.unwrap();
        let read = reader.open(&cx, entry.id, OpenHow::READ_WRITE).await.unwrap();
        let slow = Duration::from_secs(2);
        let weather = Weather { delay_min: slow, delay_max: slow, ..Weather::default() };
        network.set_weather(weather);
        let writes: Vec<_> = (0..4u32)
            .map(|at| {
                let file = changed.clone();
                spawn_join(async move {
                    dray_rt::sleep(Duration::from_millis(20) * at).await;
                    let data = Buf::from(&b"x"[..]);
                    file.write(&Context::system(), Write::at(at.into()), data).await.unwrap()
                })
            })
            .collect();
        dray_rt::sleep(Duration::from_millis(200)).await;
        for _ in 0..3 {
            // What was told of these writes is under way when this comes.
            assert!(read.getattr(&cx).await.is_ok());
        }
        for write in writes {
            assert_eq!(write.await.unwrap(), 1);
        }
        dray_rt::sleep(Duration::from_secs(10)).await;
        assert!(told.lock().unwrap().len() > 2, "it was told too little at once");
        assert_eq!(network.counts().lost, 0, "a connection was ended");
    });
}

#[test]
fn a_socket_that_is_not_ours_is_not_taken_for_one_without_a_server() {
    let error = std::io::Error::from_raw_os_error(libc::EACCES);
    let said = ConnectError::Unreachable { target: "unix:///s".into(), error }.to_string();
    assert!(said.contains("its owner alone") && !said.contains("running"), "{said}");
}
