//! The work of a client after the server has ended its session.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, server_of, simulate};
use dray_core::{
    Buf, Context, CreateHow, Errno, Fate, FileSystem, Make, Name, Op, OpenHow, RemoveKind, Write,
};
use dray_fabric::sim::Network;
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::Scope;

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

// proves: P73
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

/// The client's change was being made when the connection went, and the session with it. To make
/// the change again would be wrong, and so would the error of trying.
// proves: P74
#[test]
fn what_a_lost_session_had_under_way_ends_with_an_error_and_happened_once() {
    // A run in which the call gets through and its answer does not.
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

// proves: P74
#[test]
fn a_session_begun_anew_with_fewer_slots_goes_on() {
    simulate(8, async {
        let (network, fs) = (Network::new(), memory());
        let server_process = Scope::new();
        let server = server_of(fs.clone(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &server_process);
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
        server_process.kill();
        network.break_all("s");
        let server = server_of(fs, ServerOptions { slots: 2, ..ServerOptions::default() });
        serve_simulated(&network, "s", &server, &Scope::new());
        dray_rt::sleep(Duration::from_secs(1)).await; // what is sent before it notices is lost
        make("after").await;
        assert_eq!(client.session().status().lost, 1);
    });
}

/// More of them wait for the server than it has slots in its next epoch. Each is made, or ends with
/// an error as one of unknown outcome. No call names a slot that the server does not have.
// proves: P74
#[test]
fn what_waits_for_a_slot_that_is_gone_is_made_or_ends_with_an_error() {
    simulate(10, async {
        let (network, fs) = (Network::new(), memory());
        let server_process = Scope::new();
        serve_simulated(
            &network,
            "s",
            &server_of(fs.clone(), ServerOptions::default()),
            &server_process,
        );
        let client = connect(network.connector("s"), client_options()).await.unwrap();
        let (cx, root) = (Context::system(), client.info().root);
        network.partition("s", true);
        server_process.kill();
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
