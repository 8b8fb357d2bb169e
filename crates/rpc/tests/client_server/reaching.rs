//! The connections of one mount, after an outage, and of many that come at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, server_of, simulate};
use dray_core::{Context, FileSystem};
use dray_fabric::Connection;
use dray_fabric::sim::Network;
use dray_rpc::server::ServerOptions;
use dray_rt::{Instant, Scope, sleep};

const CONNECTIONS: usize = 4;

/// Each connection waits by itself, up to half a second, but one that gets through wakes the
/// others. Otherwise calls on these would fail by the mount's limit though the server is back.
// proves: P62
#[test]
fn one_connection_that_is_back_wakes_the_others() {
    for seed in 0..40 {
        simulate(seed, async {
            let (network, scope) = (Network::new(), Scope::new());
            let server = server_of(memory(), ServerOptions::default());
            serve_simulated(&network, "s", &server, &scope);
            let fs = connect(network.connector("s"), client_options()).await.unwrap();
            (1..CONNECTIONS).for_each(|_| fs.session().attach_another());
            sleep(Duration::from_secs(1)).await;
            let up = || fs.session().status().channels.iter().filter(|one| one.up).count();
            assert_eq!(up(), CONNECTIONS);
            network.partition("s", true);
            sleep(Duration::from_secs(5)).await;
            assert_eq!(up(), 0);
            network.partition("s", false);
            let mut first: Option<Instant> = None;
            while up() < CONNECTIONS {
                sleep(Duration::from_micros(200)).await;
                if up() > 0 && first.is_none() {
                    first = Some(dray_rt::now());
                }
            }
            let behind = first.map_or(Duration::ZERO, |first| first.elapsed());
            assert!(behind < Duration::from_millis(20), "{seed}: {behind:?}");
            fs.statfs(&Context::system()).await.unwrap();
        });
    }
}

/// More of one address than may be in their handshake at once: the ranks of a job. The clients that
/// found no place failed.
// proves: P131
#[test]
fn a_crowd_that_comes_at_once_is_let_in() {
    const CLIENTS: usize = 300;
    for seed in 0..5 {
        simulate(seed, async {
            let (network, scope) = (Network::new(), Scope::new());
            let server = server_of(memory(), ServerOptions::default());
            serve_simulated(&network, "s", &server, &scope);
            let come = |_| {
                let connector = network.connector("s");
                dray_rt::spawn_join(async move { connect(connector, client_options()).await })
            };
            let coming: Vec<_> = (0..CLIENTS).map(come).collect();
            let mut crowd = Vec::new();
            for client in coming {
                crowd.push(client.await.unwrap().unwrap_or_else(|error| panic!("{seed}: {error}")));
            }
            assert_eq!(server.status().clients.len(), CLIENTS);
        });
    }
}

/// Nor does a peer that ends each connection delay a client for long.
// proves: P131
#[test]
fn a_server_that_ends_each_connection_is_given_up() {
    simulate(1, async {
        let network = Network::new();
        let mut incoming = network.listen("s");
        let tries = Arc::new(AtomicU32::new(0));
        let counted = tries.clone();
        dray_rt::spawn(async move {
            while let Some(connection) = incoming.recv().await {
                connection.close();
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        let begin = dray_rt::now();
        let error = connect(network.connector("s"), client_options()).await.err().unwrap();
        assert!(error.to_string().contains("has it room"), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(6), "{:?}", begin.elapsed());
        sleep(Duration::from_secs(60)).await;
        let tries = tries.load(Ordering::Relaxed);
        assert!((5..60).contains(&tries), "{tries} tries");
    });
}
