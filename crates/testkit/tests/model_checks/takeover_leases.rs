//! Three servers of a projection with failover lease what they own. Servers die and come back, early and late. They
//! are cut off from the membership, from each other and from clients. They hand slices over. No answer is stale: see
//! `placed_leases`, whose clients these are.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use dray_backends::memory::MemoryDisk;
use dray_core::{Admit, Context, Errno, Error, FileSystem, Fut, ObservedCall, Op};
use dray_fabric::sim::Network;
use dray_fabric::{Connect, ConnectInTurn};
use dray_layers::placement::{Placement, ServerIndex, SliceIndex, Slices};
use dray_layers::{Observed, Observer, Outcome};
use dray_rpc::server::{
    Export, MemoryJournal, MemoryRegistry, PageCacheId, ReplicaLink, ReplicaRefusal, Sabotage,
    ServerNumber, ServerOptions, SliceOptions, SliceServer, StateLoss,
};
use dray_rt::sync::Notify;
use dray_rt::{ExecutorHandle, Scope, sleep, timeout};
use dray_testkit::fixture::seeds;

use crate::placed_leases::run::{Clients, Servers, run, simulated};
use crate::placed_leases::{CLIENTS, SERVERS, death_in_one_run_of_two, definition, disk, pick};
use crate::site::placement_over;

const LAYOUT: &str = "layout = \"cluster\"\nfailover = true\nleases = true";
/// How long clients believe what is leased, and how long a hold lasts at most. A client believes longer than a
/// takeover takes, as it does outside of simulations.
const TERM: Duration = Duration::from_secs(3);
const HOLD_TIME: Duration = Duration::from_secs(6);
/// The same, and how long clients rest at most, where servers die all the time.
const SHORT: Duration = Duration::from_millis(300);
/// A server that is away for so long has been succeeded, if it could be.
const SUCCEEDED_AFTER: Duration = Duration::from_millis(2600);
/// Longest time of a batch of notes on its way.
const WAY_MAX: Duration = Duration::from_millis(4);
/// A removal, a rename or a link takes so long in the file system at most, if it is a slow one.
const SLOW_MAX: Duration = Duration::from_secs(2);
/// Between looks for servers that serve.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How the servers of a run behave.
#[derive(Clone, Copy, Default)]
struct Plan {
    broken: Option<Sabotage>,
    /// The last client alone changes anything. While one of its changes takes long, all servers die that do not carry it
    /// out, and are back at once. Then the client dies.
    strikes: bool,
    /// All that happens is that a server dies, and is back at once, while a client is cut off. Clients hardly rest.
    chases: bool,
}

/// The servers, with all slices.
struct Fleet {
    own: Weak<Fleet>,
    plan: Plan,
    network: Network,
    disk: MemoryDisk,
    registry: MemoryRegistry,
    slices: Slices,
    /// Each server writes through a machine of its own.
    has_machines: bool,
    /// Of each server, for each of its slices: they outlive its process.
    journals: Mutex<BTreeMap<(u16, SliceIndex), MemoryJournal>>,
    processes: Mutex<BTreeMap<u16, Process>>,
    /// How often each slice began to be served. Who began before has no way to the files any more, as if the file
    /// system below had evicted it.
    openings: BTreeMap<SliceIndex, Arc<AtomicU64>>,
    /// Slices whose servers do not reach each other.
    apart: Mutex<Vec<u16>>,
    slow: Arc<SlowChange>,
    struck: Notify,
}

struct Process {
    scope: Scope,
    slices: BTreeMap<SliceIndex, Arc<SliceServer>>,
}

/// The place on the network of a slice at a server.
fn place(server: u16, SliceIndex(slice): SliceIndex) -> String {
    format!("io{server}/{slice}")
}

impl Fleet {
    fn new(plan: Plan, placement: Placement) -> Arc<Fleet> {
        let slices = Slices::of(placement);
        Arc::new_cyclic(|own| Fleet {
            own: own.clone(),
            plan,
            network: Network::new(),
            disk: disk(),
            registry: MemoryRegistry::default(),
            has_machines: pick(2) == 0,
            journals: Mutex::default(),
            processes: Mutex::default(),
            openings: slices.all().map(|slice| (slice, Arc::default())).collect(),
            apart: Mutex::default(),
            slow: Arc::default(),
            struck: Notify::default(),
            slices,
        })
    }

    fn processes(&self) -> MutexGuard<'_, BTreeMap<u16, Process>> {
        self.processes.lock().unwrap()
    }

    /// The home of a slice, and the server behind that.
    fn servers_of(&self, slice: SliceIndex) -> [u16; 2] {
        [self.slices.home_of(slice), self.slices.successor_of(slice).unwrap()]
            .map(|ServerIndex(server)| server)
    }

    /// The slices of a server.
    fn of(&self, number: u16) -> impl Iterator<Item = SliceIndex> {
        self.slices.all().filter(move |slice| self.servers_of(*slice).contains(&number))
    }

    fn start_one(&self, number: u16) {
        let (scope, here) = (Scope::new(), ExecutorHandle::current());
        let clock = 0.85 + pick(31) as f64 / 100.0;
        let member = self.registry.member(ServerNumber(number)).with_clock(clock);
        let member = Arc::new(member);
        let mut slices = BTreeMap::new();
        for slice in self.of(number) {
            let [home, next] = self.servers_of(slice);
            let other = if home == number { next } else { home };
            let journal = self.journals.lock().unwrap().entry((number, slice)).or_default().clone();
            let of_machine = if self.has_machines { u64::from(number) } else { 0 };
            let fleet = self.own.clone();
            let serving = Arc::new(SliceServer::new(SliceOptions {
                name: self.slices.export_of(slice, "x"),
                other: ServerNumber(other),
                is_home: home == number,
                options: ServerOptions {
                    lease: Duration::from_secs(60),
                    lease_term: TERM,
                    hold_time: if self.plan.chases { SHORT } else { HOLD_TIME },
                    sabotage: self.plan.broken,
                    ..ServerOptions::default()
                },
                export: Box::new(move || {
                    fleet.upgrade().expect("it outlives servers").export(slice)
                }),
                journal: Arc::new(journal),
                loss: StateLoss::Nothing,
                page_cache: PageCacheId(1 + of_machine),
                membership: member.clone(),
                link: Arc::new(Link { fleet: self.own.clone(), slice, to: other }),
            }));
            let (running, accepting) = (serving.clone(), serving.clone());
            scope.spawn_on(&here, async move { running.run().await });
            let mut incoming = self.network.listen(&place(number, slice));
            scope.spawn_on(&here, async move {
                while let Some(connection) = incoming.recv().await {
                    let server = accepting.server();
                    dray_rt::spawn(async move { server.serve(Arc::new(connection)).await });
                }
            });
            slices.insert(slice, serving);
        }
        scope.spawn_on(&here, async move { member.keep_alive().await });
        self.processes().insert(number, Process { scope, slices });
    }

    fn export(&self, slice: SliceIndex) -> Export {
        let openings = self.openings[&slice].clone();
        let number = openings.fetch_add(1, Ordering::SeqCst) + 1;
        let evicted = Arc::new(Evicted { openings, number });
        // A change that outlasts its hold is seen by some clients before others.
        let longest = if self.plan.chases { SHORT / 3 } else { SLOW_MAX };
        let slow = Arc::new(SlowChanges { slice, longest, last: self.slow.clone() });
        let fs: Arc<dyn FileSystem> = Arc::new(self.disk.mount());
        let fs: Arc<dyn FileSystem> = Arc::new(Observed::new(fs, evicted));
        let fs: Arc<dyn FileSystem> = Arc::new(Observed::new(fs, slow));
        let mut export = Export::new(&self.slices.export_of(slice, "x"), fs, Vec::new());
        (export.insecure, export.leases, export.definition) = (true, true, definition());
        export
    }

    fn kill(&self, number: u16) {
        let Some(process) = self.processes().remove(&number) else { return };
        for slice in self.of(number) {
            self.network.break_all(&place(number, slice));
        }
        process.scope.kill();
    }

    /// The server process dies, and is back in a moment, or when it has been succeeded.
    async fn restart(&self, number: u16, succeeded: bool) {
        self.kill(number);
        sleep(Duration::from_micros(pick(50_000))).await;
        if succeeded {
            sleep(SUCCEEDED_AFTER).await;
        }
        self.start_one(number);
    }

    fn serving(&self, slice: SliceIndex) -> Option<Arc<SliceServer>> {
        let processes = self.processes();
        let mut all = processes.values().filter_map(|process| process.slices.get(&slice));
        all.find(|server| server.is_primary()).cloned()
    }

    /// A slice goes to its other server, if that is in step.
    async fn hand_over(&self, slice: SliceIndex) {
        let serving = self.serving(slice).filter(|one| one.ready_to_hand_over().is_some());
        if let Some(serving) = serving {
            let _ = timeout(SUCCEEDED_AFTER, serving.hand_over()).await; // the server may die meanwhile
        }
    }

    /// Servers cannot be reached for a while: by the membership, by each other, by clients.
    async fn cut(&self, number: u16, slice: SliceIndex) {
        let from_clients = |is_cut| {
            self.of(number).for_each(|slice| self.network.partition(&place(number, slice), is_cut));
        };
        let from_membership = |is_cut| self.registry.cut_off(ServerNumber(number), is_cut);
        let kind = pick(4);
        match kind {
            0 => self.apart.lock().unwrap().push(slice.0),
            1 => from_clients(true),
            2 => from_membership(true),
            _ => {
                from_clients(true);
                from_membership(true);
                self.apart.lock().unwrap().extend(self.of(number).map(|slice| slice.0));
            }
        }
        sleep(Duration::from_micros(pick(2 * SUCCEEDED_AFTER.as_micros() as u64))).await;
        self.apart.lock().unwrap().clear();
        from_clients(false);
        from_membership(false);
    }

    async fn strike(&self) {
        self.slow.begins.notified().await;
        let slice = *self.slow.slice.lock().unwrap();
        let carries_out = |number: &u16| {
            let processes = self.processes();
            let process = processes.get(number).and_then(|process| process.slices.get(&slice));
            process.is_some_and(|server| server.is_primary())
        };
        let others: Vec<u16> = (0..SERVERS as u16).filter(|one| !carries_out(one)).collect();
        others.iter().for_each(|number| self.kill(*number));
        sleep(Duration::from_micros(pick(50_000))).await;
        others.iter().for_each(|number| self.start_one(*number));
        self.struck.notify_one();
        std::future::pending().await
    }

    async fn cut_client(&self, client: u64) {
        let client = format!("client{client}");
        self.network.partition(&client, true);
        sleep(Duration::from_micros(pick(3 * TERM.as_micros() as u64))).await;
        self.network.partition(&client, false);
    }

    /// Changes of primaries.
    fn moves(&self) -> u64 {
        self.slices.all().map(|one| self.registry.moves(&self.slices.export_of(one, "x"))).sum()
    }
}

impl Servers for Fleet {
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
        match self.plan {
            Plan { strikes: false, chases: false, .. } => 2 * TERM,
            _ => 2 * SHORT,
        }
    }

    fn start(&self) -> Fut<'_, ()> {
        Box::pin(async {
            (0..SERVERS as u16).for_each(|number| self.start_one(number));
            while self.slices.all().any(|slice| self.serving(slice).is_none()) {
                sleep(LOOK_EVERY).await;
            }
        })
    }

    fn ways(&self, client: &str) -> Vec<(String, Arc<dyn Connect>)> {
        let way = |slice| -> (String, Arc<dyn Connect>) {
            let ways = self.servers_of(slice);
            let ways = ways.map(|to| self.network.connector_from(client, &place(to, slice)));
            (self.slices.export_of(slice, "x"), Arc::new(ConnectInTurn::new(ways.into())))
        };
        self.slices.all().map(way).collect()
    }

    fn torment(&self) -> Fut<'_, ()> {
        Box::pin(async {
            let number = pick(SERVERS as u64) as u16;
            let slice = SliceIndex(pick(self.slices.count() as u64) as u16);
            let client = pick(CLIENTS as u64);
            let until = self.pause().min(Duration::from_secs(2));
            let until = Duration::from_micros(pick(until.as_micros() as u64));
            if self.plan.strikes {
                return self.strike().await;
            }
            // Often while such a change is under way.
            let _ = timeout(until, self.slow.begins.notified()).await;
            if self.plan.chases {
                // A client does not hear of it for a while.
                let fleet = self.own.upgrade().expect("it outlives its servers");
                let cut = dray_rt::spawn_join(async move { fleet.cut_client(client).await });
                self.restart(number, false).await;
                cut.await.ok();
                return;
            }
            match pick(16) {
                0 | 1 => self.cut_client(client).await,
                2..5 => self.cut(number, slice).await,
                5..7 => self.restart(number, true).await,
                7..10 => self.restart(number, false).await,
                10..12 => self.hand_over(slice).await,
                _ => self.network.break_all(&format!("client{client}")),
            }
        })
    }

    fn may_change(&self, client: usize) -> bool {
        !self.plan.strikes || client == CLIENTS - 1
    }

    fn death(&self) -> Fut<'_, ()> {
        Box::pin(async {
            if !self.plan.strikes {
                return death_in_one_run_of_two(TERM).await;
            }
            self.struck.notified().await;
            sleep(Duration::from_micros(pick(500_000))).await;
        })
    }
}

/// From one server to the other one of a slice.
struct Link {
    fleet: Weak<Fleet>,
    slice: SliceIndex,
    to: u16,
}

impl ReplicaLink for Link {
    fn ship<'a>(
        &'a self,
        epoch: u64,
        number: u64,
        batch: Vec<u8>,
    ) -> Fut<'a, Result<(), ReplicaRefusal>> {
        Box::pin(async move {
            let way = || sleep(Duration::from_micros(pick(WAY_MAX.as_micros() as u64)));
            way().await;
            self.deliver(epoch, number, &batch)?;
            way().await;
            Ok(())
        })
    }
}

impl Link {
    fn deliver(&self, epoch: u64, number: u64, batch: &[u8]) -> Result<(), ReplicaRefusal> {
        let away = || ReplicaRefusal::Io(io::Error::from_raw_os_error(libc::ECONNREFUSED));
        let fleet = self.fleet.upgrade().ok_or_else(away)?;
        if fleet.apart.lock().unwrap().contains(&self.slice.0) {
            return Err(away());
        }
        let processes = fleet.processes();
        let process = processes.get(&self.to).ok_or_else(away)?;
        process.slices[&self.slice].replica().take(epoch, number, batch)
    }
}

/// The file system below fences who was succeeded.
struct Evicted {
    openings: Arc<AtomicU64>,
    number: u64,
}

impl Observer for Evicted {
    fn admits(&self) -> bool {
        true
    }

    fn admit<'a>(&'a self, _: &'a Context, _: &'a ObservedCall<'a>) -> Admit<'a> {
        match self.openings.load(Ordering::SeqCst) == self.number {
            true => Admit::Now,
            false => Admit::Refuse(Error::new(Errno::EIO).because("another server has the slice")),
        }
    }

    fn done(&self, _: &Context, _: &ObservedCall<'_>, _: Outcome<'_>, _: Duration) {}
}

/// The last change that takes long.
struct SlowChange {
    begins: Notify,
    slice: Mutex<SliceIndex>,
}

impl Default for SlowChange {
    fn default() -> SlowChange {
        SlowChange { begins: Notify::default(), slice: Mutex::new(SliceIndex(0)) }
    }
}

/// One change of names in four takes long in the file system.
struct SlowChanges {
    slice: SliceIndex,
    /// Longest time of such a change.
    longest: Duration,
    last: Arc<SlowChange>,
}

impl Observer for SlowChanges {
    fn admits(&self) -> bool {
        true
    }

    fn admit<'a>(&'a self, _: &'a Context, call: &'a ObservedCall<'a>) -> Admit<'a> {
        let is_change = [Op::Remove, Op::Rename, Op::Link].contains(&call.op);
        if !is_change || pick(4) != 0 {
            return Admit::Now;
        }
        *self.last.slice.lock().unwrap() = self.slice;
        self.last.begins.notify_one();
        Admit::After(Box::pin(async {
            sleep(Duration::from_micros(pick(self.longest.as_micros() as u64))).await;
            Ok(())
        }))
    }

    fn done(&self, _: &Context, _: &ObservedCall<'_>, _: Outcome<'_>, _: Duration) {}
}

/// Calls that leases have spared, with how often a slice went to another server.
fn simulate(seed: u64, plan: Plan, how: Clients) -> Result<(u64, u64), String> {
    let mut moves = 0;
    let spared = simulated(seed, || {
        let placement = placement_over(SERVERS, LAYOUT);
        let fleet = Fleet::new(plan, placement.clone());
        let moves = &mut moves;
        async move {
            let ran = run(fleet.clone(), placement, how).await;
            *moves = fleet.moves();
            ran
        }
    });
    Ok((spared?, moves))
}

// proves: P324, P325
#[test]
fn what_servers_with_failover_lease_is_never_stale() {
    let (mut spared, mut moves) = (0, 0);
    for seed in seeds(24) {
        println!("seed {seed}"); // for a run that panics
        let ran = simulate(seed, Plan::default(), Clients::default());
        let ran = ran.unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        (spared, moves) = (spared + ran.0, moves + ran.1);
    }
    println!("{spared} calls spared, {moves} slices went to other servers");
    assert!(spared > 0, "nothing was believed");
    assert!(moves > 0, "no slice went to another server");
}

/// Some run with what is left out shows it, and none without that.
fn is_found_out(plan: Plan, mut seeds: Range<u64>) {
    let whole = Plan { broken: None, ..plan };
    let found = seeds.find(|seed| {
        let ran = simulate(*seed, plan, Clients::default());
        ran.is_err_and(|why| why.contains("order"))
    });
    let seed = found.expect("a run that shows it");
    simulate(seed, whole, Clients::default()).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
}

/// Why a server asks the clients of the server before it.
// proves: P324
#[test]
fn a_server_that_asks_nobody_of_before_lets_others_see_old_state() {
    is_found_out(
        Plan { broken: Some(Sabotage::LeaseRestart), chases: true, ..Plan::default() },
        905..925,
    );
}

/// Why a server leases nothing while holds of the server before it may count.
// proves: P325
#[test]
fn a_server_that_leases_at_once_leases_what_a_client_that_died_was_changing() {
    is_found_out(
        Plan { broken: Some(Sabotage::LeaseRest), strikes: true, ..Plan::default() },
        0..400,
    );
}

/// Why the removal of a name at the home of its file tells the name's server.
#[test]
fn a_removal_at_the_home_of_a_file_that_its_name_does_not_hear_of() {
    is_found_out(Plan { broken: Some(Sabotage::LeaseHolds), ..Plan::default() }, 0..400);
}

/// While a change takes long, the servers of all else die, and then its client.
#[test]
fn what_a_client_that_died_was_changing_is_never_stale() {
    let plan = Plan { strikes: true, ..Plan::default() };
    for seed in seeds(40) {
        let ran = simulate(seed, plan, Clients::default());
        ran.unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
}

/// A server is back at once, and a client has not heard of its death.
#[test]
fn what_a_client_believes_of_a_server_that_died_is_never_stale() {
    let plan = Plan { chases: true, ..Plan::default() };
    for seed in seeds(40) {
        let ran = simulate(seed, plan, Clients::default());
        ran.unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
}
