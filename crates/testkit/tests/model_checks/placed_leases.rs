//! Three servers that share a file system lease what they own. Connections break, servers and clients are cut off,
//! servers die, and a client dies. Clocks of clients drift. No answer is stale: some order explains what all clients saw of each name, and
//! of the attributes of each file.

mod client;
pub mod run;
mod work;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use dray_backends::memory::{MemoryDisk, MemoryOptions};
use dray_core::Fut;
use dray_fabric::Connect;
use dray_fabric::sim::Network;
use dray_rpc::server::{
    Export, ExportDefinition, MemoryJournal, Sabotage, Server, ServerOptions, StateLoss,
};
use dray_rt::{ExecutorHandle, Scope, random_u64, sleep};
use dray_testkit::fixture::seeds;

use self::run::{Clients, Servers, run, simulated};
use crate::site::placement_over;

pub const SERVERS: usize = 3;
pub const CLIENTS: usize = 3;
const LAYOUT: &str = "layout = \"cluster\"\nleases = true";
/// How long clients believe what is leased, and how long a hold lasts at most.
const TERM: Duration = Duration::from_millis(400);
const HOLD_TIME: Duration = Duration::from_millis(2_400);

pub fn pick(below: u64) -> u64 {
    random_u64() % below.max(1)
}

/// The disk that the servers share.
pub fn disk() -> MemoryDisk {
    MemoryDisk::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() })
}

/// The definition that servers and clients have.
pub fn definition() -> Option<Arc<ExportDefinition>> {
    Some(Arc::new(ExportDefinition { fingerprint: 1, text: String::new() }))
}

/// Ends in one run of two, within ten terms.
pub async fn death_in_one_run_of_two(term: Duration) {
    if pick(2) == 0 {
        std::future::pending::<()>().await;
    }
    sleep(Duration::from_micros(pick(10 * term.as_micros() as u64))).await;
}

/// The servers: their processes, and what outlives them.
struct FixedServers {
    network: Network,
    disk: MemoryDisk,
    journals: [MemoryJournal; SERVERS],
    scopes: Mutex<[Scope; SERVERS]>,
    broken: Option<Sabotage>,
}

impl FixedServers {
    fn new(broken: Option<Sabotage>) -> FixedServers {
        FixedServers {
            network: Network::new(),
            disk: disk(),
            journals: Default::default(),
            scopes: Mutex::default(),
            broken,
        }
    }

    fn name(server: usize) -> String {
        format!("server{server}")
    }

    async fn start_one(&self, number: usize) {
        let options = ServerOptions {
            lease: Duration::from_secs(60),
            lease_term: TERM,
            hold_time: HOLD_TIME,
            sabotage: self.broken,
            ..ServerOptions::default()
        };
        let mut export = Export::new("x", Arc::new(self.disk.mount()), Vec::new());
        (export.insecure, export.leases, export.definition) = (true, true, definition());
        let server = Server::new(options, vec![export], Arc::new(self.journals[number].clone()));
        server.restore(StateLoss::Nothing).await;
        let scope = Scope::new();
        let (mut incoming, expiring) =
            (self.network.listen(&FixedServers::name(number)), server.clone());
        let handle = ExecutorHandle::current();
        scope.spawn_on(&handle, async move { expiring.expire_leases().await });
        scope.spawn_on(&handle, async move {
            while let Some(connection) = incoming.recv().await {
                let server = server.clone();
                dray_rt::spawn(async move { server.serve(Arc::new(connection)).await });
            }
        });
        self.scopes.lock().unwrap()[number] = scope;
    }

    async fn restart(&self, number: usize) {
        self.network.break_all(&FixedServers::name(number));
        let scope = std::mem::take(&mut self.scopes.lock().unwrap()[number]);
        scope.kill();
        sleep(Duration::from_micros(pick(50_000))).await;
        self.start_one(number).await;
    }
}

impl Servers for FixedServers {
    fn network(&self) -> &Network {
        &self.network
    }

    fn disk(&self) -> &MemoryDisk {
        &self.disk
    }

    fn term(&self) -> Duration {
        TERM
    }

    fn pause(&self) -> Duration {
        2 * TERM
    }

    fn may_change(&self, _: usize) -> bool {
        true
    }

    fn start(&self) -> Fut<'_, ()> {
        Box::pin(async {
            for number in 0..SERVERS {
                self.start_one(number).await;
            }
        })
    }

    fn ways(&self, client: &str) -> Vec<(String, Arc<dyn Connect>)> {
        let way = |server| self.network.connector_from(client, &FixedServers::name(server));
        (0..SERVERS).map(|server| ("x".to_owned(), way(server))).collect()
    }

    fn torment(&self) -> Fut<'_, ()> {
        Box::pin(async {
            sleep(Duration::from_micros(pick(600_000))).await;
            let (client, server) = (pick(CLIENTS as u64), pick(SERVERS as u64) as usize);
            let cut = match pick(16) {
                0 | 1 => format!("client{client}"),
                2 => FixedServers::name(server),
                3 => return self.restart(server).await,
                _ => return self.network.break_all(&format!("client{client}")),
            };
            self.network.partition(&cut, true);
            sleep(Duration::from_micros(pick(3 * TERM.as_micros() as u64))).await;
            self.network.partition(&cut, false);
        })
    }

    fn death(&self) -> Fut<'_, ()> {
        Box::pin(death_in_one_run_of_two(TERM))
    }
}

fn simulate(seed: u64, broken: Option<Sabotage>, how: Clients) -> Result<u64, String> {
    simulated(seed, || {
        run(Arc::new(FixedServers::new(broken)), placement_over(SERVERS, LAYOUT), how)
    })
}

// proves: P271, P272, P273
#[test]
fn what_several_servers_lease_is_never_stale() {
    let mut spared = 0;
    for seed in seeds(60) {
        let ran = simulate(seed, None, Clients::default());
        spared += ran.unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
    assert!(spared > 0, "nothing was believed");
}

fn is_found_out(broken: Option<Sabotage>, how: Clients) {
    let found =
        (0..400).any(|seed| simulate(seed, broken, how).is_err_and(|why| why.contains("order")));
    assert!(found, "no run shows it");
}

/// Why attributes take the lease of a second server.
#[test]
fn who_believes_the_owner_of_a_file_alone_sees_old_attributes() {
    is_found_out(None, Clients { believe_owner: true, ..Clients::default() });
}

/// Why a change tells the owners of what it changes at another server.
#[test]
fn what_another_server_changes_and_is_leased_meanwhile() {
    is_found_out(Some(Sabotage::LeaseHolds), Clients::default());
}

#[test]
fn clocks_that_drift_further_than_the_leases_of_several_servers_bear() {
    is_found_out(None, Clients { drift: true, ..Clients::default() });
}
