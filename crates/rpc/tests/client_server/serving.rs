//! A remote file system behaves as the one that it stands for.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{
    client_options, connect, key, memory, run, serve_simulated, serve_sockets, serve_within,
    server_of, simulate,
};
use dray_core::{
    Buf, BufMut, Cancel, Context, CreateHow, Errno, FileSystem, Lock, LockFamily, LockKind,
    LockOwner, LockRange, Make, Name, Op, OpenHow, Pid, RemoveKind, Write, XattrSet,
};
use dray_fabric::sim::{Network, Weather};
use dray_fabric::{Address, Connection, Sockets};
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::client::{ClientOptions, ConnectError};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::Scope;

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

/// As a front end does that is a session of the server beside it.
#[test]
fn within_the_process() {
    async fn both_ends() {
        let server = server_of(memory(), ServerOptions::default());
        let fs = connect(serve_within(server.clone()), client_options()).await.unwrap();
        use_files(&fs).await;
        let status = server.status();
        assert_eq!((status.clients[0].files, status.buffer_used_bytes), (0, 0));
        server.disconnect();
        fs.statfs(&Context::system()).await.unwrap(); // by another connection
        assert_eq!(server.status().clients.len(), 1);
        fs.session().goodbye();
    }
    run(both_ends());
    simulate(1, both_ends());
}

/// The same, with the server on a thread of its own.
#[test]
fn within_the_process_by_another_thread() {
    let (tell, receiver) = std::sync::mpsc::channel();
    let (end, ended) = dray_rt::sync::oneshot::channel::<()>();
    let thread = std::thread::spawn(move || {
        run(async move {
            let connector = serve_within(server_of(memory(), ServerOptions::default()));
            tell.send(connector).unwrap();
            let _ = ended.await;
        });
    });
    run(async {
        let fs = connect(receiver.recv().unwrap(), client_options()).await.unwrap();
        use_files(&fs).await;
    });
    drop(end);
    thread.join().unwrap();
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
// proves: P62
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

// proves: P117
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

/// Any peer that reached the port was trusted to name its callers.
#[test]
fn without_a_key_a_client_comes_from_a_reserved_port() {
    run(async {
        let address = Address::Tcp { host: "127.0.0.1".into(), port: 0 };
        for (server_key, insecure) in
            [(None, false), (None, true), (key("a key of the site"), false)]
        {
            let mut export = Export::new("data", Arc::new(memory()), Vec::new());
            export.insecure = insecure;
            let options = ServerOptions { key: server_key.clone(), ..Default::default() };
            let journal = Arc::new(MemoryJournal::default());
            let server = Server::new(options, vec![export], journal);
            let bound = serve_sockets(&address, server.clone()).await;
            let is_let_in = insecure || server_key.is_some();
            let options = ClientOptions { key: server_key, ..client_options() };
            match connect(Arc::new(Sockets(bound)), options).await {
                Ok(_) => assert!(is_let_in),
                Err(ConnectError::Refused { errno, message }) => {
                    assert!(!is_let_in && errno == Errno::EACCES, "{message}");
                    assert!(message.contains("ports below 1024 only"), "{message}");
                    assert!(server.status().clients.is_empty());
                }
                Err(error) => panic!("{error}"),
            }
        }
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

// proves: P64
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
        // The limit counts from when the server went, not from each call.
        let begin = dray_rt::now();
        assert_eq!(fs.statfs(&cx).await.unwrap_err().errno(), Errno::EHOSTDOWN);
        assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
        network.partition("s", false);
        dray_rt::sleep(Duration::from_secs(3)).await;
        fs.statfs(&cx).await.unwrap();
    });
}

/// The answer that granted it was lost, and its waiter gave up before the server was back.
// proves: P61
#[test]
fn a_lock_that_no_caller_knows_of_is_released() {
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
            owner: LockOwner::own(owner),
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

/// A long attribute name once did not fit into the intent that is noted of a change, and ended the
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
// proves: P109
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

#[test]
fn a_socket_that_is_not_ours_is_not_taken_for_one_without_a_server() {
    let error = std::io::Error::from_raw_os_error(libc::EACCES);
    let said = ConnectError::Unreachable { target: "unix:///s".into(), error }.to_string();
    assert!(said.contains("its owner alone") && !said.contains("running"), "{said}");
}

/// Only the server has the clock that the times are from, and knows of writes under way. Those
/// writes have given the file their time and go on changing it.
// proves: P7
#[test]
fn an_open_reports_whether_the_next_change_gives_the_file_other_times() {
    simulate(9, async {
        let (network, scope) = (Network::new(), Scope::new());
        let delay = Duration::from_secs(2);
        let slow = Fault { op: Some(Op::Write), when: When::Always, delay, error: None };
        let below = Observed::new(Arc::new(memory()), Arc::new(Faults::new(vec![slow])));
        let export = Export::new("data", Arc::new(below), Vec::new());
        let journal = Arc::new(MemoryJournal::default());
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        serve_simulated(&network, "s", &server, &scope);
        let fs = Arc::new(connect(network.connector("s"), client_options()).await.unwrap());
        let cx = Context::system();
        let (entry, file) = fs.create(&cx, fs.info().root, name("f"), NEW).await.unwrap();
        let times_past = async || {
            let how = OpenHow { with_attr: true, ..OpenHow::READ };
            let opened = fs.open(&cx, entry.id, how).await.unwrap();
            let seen = opened.at_open().unwrap();
            opened.close(&cx).await.unwrap();
            seen.times_past.expect("it has the clock")
        };
        assert!(!times_past().await, "it has only just been made");
        dray_rt::sleep(entry.attr.grain()).await;
        assert!(times_past().await);
        let write = dray_rt::spawn_join(async move {
            file.write(&Context::system(), Write::at(0), Buf::from(&b"x"[..])).await.unwrap();
        });
        dray_rt::sleep(delay / 2).await;
        assert!(!times_past().await, "it is being changed");
        write.await.unwrap();
        assert!(!times_past().await);
        dray_rt::sleep(entry.attr.grain()).await;
        assert!(times_past().await);
    });
}
