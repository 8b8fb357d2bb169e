//! The connections of one mount, after an outage.

mod common;

use std::time::Duration;

use common::{client_options, connect, memory, serve_simulated, server_of, simulate};
use dray_core::{Context, FileSystem};
use dray_fabric::sim::Network;
use dray_rpc::server::ServerOptions;
use dray_rt::{Instant, Scope, sleep};

const CONNECTIONS: usize = 4;

/// Each waits by itself, up to half a second, but one that gets through wakes the others:
/// calls on these would fail by the mount's limit though the server is back.
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
