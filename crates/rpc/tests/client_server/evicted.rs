//! Clients that the administrator of a server does not want any more.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{
    client_options, connect, memory, serve_simulated, server_of, server_with, simulate,
};
use dray_core::{
    Buf, Context, CreateHow, Errno, FileSystem, Lock, LockFamily, LockKind, LockOwner, LockRange,
    Name, Op, OpenFile, OpenHow, Pid, RemoveKind,
};
use dray_fabric::sim::{Network, Weather};
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::Scope;

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

/// Messages that were sent before a connection is closed arrive.
fn as_on_tcp() -> Weather {
    let linger_max = Duration::from_millis(1);
    Weather { linger_one_in: Some(1), linger_max, ..Weather::default() }
}

// proves: P75
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
            let (kind, owner) = (LockKind::Exclusive, LockOwner::own(3));
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

/// Whether it is there when it happens or comes back later: it does not begin anew.
// proves: P75
#[test]
fn an_evicted_client_stays_out_until_it_begins_anew() {
    for away in [false, true] {
        simulate(7, async {
            let network = Network::new();
            network.set_weather(as_on_tcp());
            let server = server_of(memory(), ServerOptions::default());
            serve_simulated(&network, "s", &server, &Scope::new());
            let fs = connect(network.connector("s"), client_options()).await.unwrap();
            let cx = Context::system();
            let name = Name::new(b"f").unwrap();
            let (_, file) = fs.create(&cx, fs.info().root, name, NEW).await.unwrap();
            network.partition("s", away);
            assert!(server.evict(server.status().clients[0].session).await);
            network.partition("s", false);
            dray_rt::sleep(Duration::from_secs(5)).await;
            assert!(server.status().clients.is_empty());
            let errors = [
                fs.statfs(&cx).await.err(),
                file.getattr(&cx).await.err(),
                file.close(&cx).await.err(),
            ];
            let errnos = errors.map(|error| error.map(|error| error.errno()));
            assert_eq!(errnos, [Some(Errno::ESHUTDOWN); 3], "away: {away}");
            let anew = connect(network.connector("s"), client_options()).await.unwrap();
            anew.statfs(&cx).await.unwrap();
            assert_eq!(server.status().clients.len(), 1);
        });
    }
}

/// A write of an evicted client was made when another client had the lock that covered it. An
/// administrator who evicts a client to let another one do its work had both at work.
// proves: P76
#[test]
fn nothing_of_an_evicted_client_is_done_under_the_lock_that_others_have() {
    simulate(12, async {
        let network = Network::new();
        network.set_weather(as_on_tcp());
        let delay = Duration::from_secs(3);
        let slow = Fault { op: Some(Op::Write), when: When::Nth(1), delay, error: None };
        let fs = Observed::new(Arc::new(memory()), Arc::new(Faults::new(vec![slow])));
        let export = Export::new("data", Arc::new(fs), Vec::new());
        let journal = Arc::new(MemoryJournal::default());
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        serve_simulated(&network, "s", &server, &Scope::new());
        let open = async |name: &str| {
            let fs = connect(network.connector_from(name, "s"), client_options()).await.unwrap();
            let (cx, how) = (Context::system(), CreateHow { exclusive: false, ..NEW });
            let name = Name::new(b"f").unwrap();
            let (_, file) = fs.create(&cx, fs.info().root, name, how).await.unwrap();
            (fs, file)
        };
        let take = async |file: &Arc<dyn OpenFile>, owner: u64| {
            let (family, kind) = (LockFamily::Posix, LockKind::Exclusive);
            let (range, owner) = (LockRange::ALL, LockOwner::own(owner));
            let lock = Lock { family, kind, range, owner, pid: Pid(1) };
            file.lock(&Context::system(), lock, true).await.unwrap();
        };
        let (evicted, file) = open("evicted").await;
        take(&file, 1).await;
        let session = server.status().clients[0].session;
        let writing = dray_rt::spawn_join(async move {
            file.write(&Context::system(), dray_core::Write::at(0), Buf::from(&b"late"[..])).await
        });
        dray_rt::sleep(delay / 3).await;
        let (_other, file) = open("other").await;
        let (evicts, begin) = (server.clone(), dray_rt::now());
        dray_rt::spawn(async move { _ = evicts.evict(session).await });
        take(&file, 2).await;
        let size = async || file.getattr(&Context::system()).await.unwrap().size;
        let found = size().await;
        dray_rt::sleep(2 * delay).await;
        assert_eq!(size().await, found, "written when another one had the lock");
        assert!(begin.elapsed() < 4 * delay, "it is held up for no longer than that");
        assert!(writing.await.unwrap().is_err());
        drop(evicted);
    });
}

/// The next server accepted the evicted client again, as one with an expired lease.
// proves: P75
#[test]
fn an_evicted_client_stays_out_over_restarts_of_the_server() {
    simulate(9, async {
        let (network, files, journal) = (Network::new(), memory(), MemoryJournal::default());
        network.set_weather(as_on_tcp());
        let mut server_process = Scope::new();
        let serve = |server_process: &Scope| {
            let server = server_with(files.clone(), ServerOptions::default(), journal.clone());
            serve_simulated(&network, "s", &server, server_process);
            server
        };
        let server = serve(&server_process);
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let cx = Context::system();
        fs.statfs(&cx).await.unwrap();
        network.partition("s", true);
        assert!(server.evict(server.status().clients[0].session).await);
        for _ in 0..2 {
            server_process.kill();
            network.break_all("s");
            server_process = Scope::new();
            let next = serve(&server_process);
            next.restore(dray_rpc::server::StateLoss::Nothing).await;
        }
        network.partition("s", false);
        dray_rt::sleep(Duration::from_secs(5)).await;
        assert_eq!(fs.statfs(&cx).await.unwrap_err().errno(), Errno::ESHUTDOWN);
        let anew = connect(network.connector("s"), client_options()).await.unwrap();
        anew.statfs(&cx).await.unwrap();
    });
}
