//! The simulator: the real client and server on a simulated clock, network and disk, with
//! everything going wrong that the seed says. One seed is one run.
//!
//! [`run`] mounts several clients, lets them work while connections break, the server dies and
//! clients crash. Then it heals everything. It looks whether what was acknowledged is there,
//! whether anything happened twice, and whether all see the same. It looks whether every buffer,
//! lock, open file and session has been given back.

mod check;
mod client;
mod client_crashes;
mod client_disk;
mod client_machine;
mod eviction;
mod faults;
mod fleet;
mod fleet_link;
mod history;
mod leaving;
mod machine;
mod pair;
mod power;
mod torment;
mod work;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use dray_core::Fut;
use dray_fabric::sim::Network;
use dray_rpc::server::Sabotage;
use dray_rt::{DriverKind, Executor, random_u64, timeout};

use crate::fixture::TempDir;
use client::{ClientNode, MountHow, SimClient};
use client_machine::ClientMachine;
use fleet::Fleet;
use machine::ServerMachine;
use torment::RunPlan;
use work::Workload;

pub use faults::FaultCounts;
pub use fleet::PairKind;
pub use history::{HistoryEvent, RegisterOp, linearizable, linearizable_from};
pub use leaving::run_leaving;
pub use power::{run_power_loss, run_power_losses, run_power_losses_merging, run_power_losses_of};
pub use work::{PowerKind, WorkloadKind};

/// Success, or what is wrong.
type Outcome<T> = Result<T, String>;

/// Simulated time after which a run makes no progress any more.
const TIME_MAX: Duration = Duration::from_secs(3600);

/// What clients keep, bytes.
const REPLAY_BYTES: u64 = 1 << 20;
/// Files that are leased to one session of a run in which sessions have too few leases.
const FEW_LEASES: usize = 3;

/// What a run was like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunReport {
    /// The work done.
    pub work: &'static str,
    /// Clients.
    pub clients: usize,
    /// What went wrong until it was healed.
    pub faults: FaultCounts,
    /// Writes that the server merged.
    pub merged: u64,
    /// How often a second server took over from the first, or the first from it.
    pub takeovers: u64,
    /// Simulated time that it took.
    pub took: Duration,
    /// Differs, as good as always, between runs that differ anywhere.
    pub fingerprint: u64,
}

/// A run that shows a fault.
#[derive(Clone, Debug)]
pub struct RunFailure {
    /// Repeats it.
    pub seed: u64,
    /// What was going on.
    pub plan: String,
    /// What is wrong.
    pub what: String,
}

impl RunFailure {
    /// Whether the run neither shows a fault nor proves that there is none: too many calls may have
    /// been carried out or not.
    pub fn is_undecided(&self) -> bool {
        self.what.starts_with(history::UNDECIDED)
    }
}

impl fmt::Display for RunFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}: {}\n  with {}", self.seed, self.what, self.plan)
    }
}

/// Carries out the run that `seed` stands for, with a protection of the server left out if
/// so wanted.
pub fn run(seed: u64, sabotage: Option<Sabotage>) -> Result<RunReport, RunFailure> {
    run_planned(seed, sabotage, RunPlan::draw)
}

/// As [`run`], with another kind of work: one generated sequence through several clients in
/// turn, whose results must be the model's whatever goes wrong.
pub fn run_interleaved(seed: u64) -> Result<RunReport, RunFailure> {
    run_of(WorkloadKind::Interleaved, seed, None)
}

/// As [`run`], with this kind of work.
pub fn run_of(
    kind: WorkloadKind,
    seed: u64,
    sabotage: Option<Sabotage>,
) -> Result<RunReport, RunFailure> {
    run_planned(seed, sabotage, |seed| RunPlan { kind, ..RunPlan::draw(seed) })
}

/// A run with leases in which clients are cut off all the time and nothing else goes wrong. Their clocks count so
/// many seconds in a second of the server, in turn.
pub fn run_drifting(clocks: [f64; 3], seed: u64) -> Result<RunReport, RunFailure> {
    run_planned(seed, None, |seed| RunPlan::of_drift(seed, clocks))
}

/// As [`run_of`], with a server that dies all the time: for changes of files by several
/// clients.
pub fn run_cut_short(
    kind: WorkloadKind,
    seed: u64,
    sabotage: Option<Sabotage>,
) -> Result<RunReport, RunFailure> {
    let kill_every = Some(Duration::from_millis(3));
    run_planned(seed, sabotage, |seed| RunPlan { kind, kill_every, ..RunPlan::draw(seed) })
}

/// As [`run_of`], with a server that reads ahead and merges writes. `kill_every`: it dies so often.
pub fn run_merging(
    kind: WorkloadKind,
    seed: u64,
    kill_every: Option<Duration>,
) -> Result<RunReport, RunFailure> {
    run_planned(seed, None, |seed| {
        let plan = RunPlan { kind, merges: true, ..RunPlan::draw(seed) };
        RunPlan { kill_every: kill_every.or(plan.kill_every), ..plan }
    })
}

/// As [`run_of`], with two servers that die all the time, and take over from each other.
pub fn run_takeovers(
    pair: PairKind,
    kind: WorkloadKind,
    seed: u64,
    sabotage: Option<Sabotage>,
) -> Result<RunReport, RunFailure> {
    run_failover(2, (pair, kind), seed, sabotage)
}

/// The same with this many servers, which are two or three. Three have three slices, with clients of their
/// own.
pub fn run_failover(
    servers: usize,
    (pair, kind): (PairKind, WorkloadKind),
    seed: u64,
    sabotage: Option<Sabotage>,
) -> Result<RunReport, RunFailure> {
    let draw = |seed| RunPlan { kind, ..RunPlan::of_fleet(seed, pair, servers) };
    run_planned(seed, sabotage, draw)
}

fn run_planned(
    seed: u64,
    sabotage: Option<Sabotage>,
    draw: impl FnOnce(u64) -> RunPlan,
) -> Result<RunReport, RunFailure> {
    let mut plan = None;
    let ran = in_simulation(seed, async {
        let drawn = plan.insert(draw(seed));
        simulate(drawn, sabotage).await
    });
    ran.map_err(|what| RunFailure { seed, plan: format!("{plan:?}"), what })
}

/// Runs it in a simulation, but not for ever.
fn in_simulation<T>(seed: u64, work: impl Future<Output = Outcome<T>>) -> Outcome<T> {
    let executor = Executor::new(DriverKind::Simulated { seed });
    let mut executor = executor.expect("a simulation needs nothing");
    let limited = timeout(TIME_MAX * 8, work);
    match executor.try_block_on(limited) {
        Some(Ok(outcome)) => outcome,
        Some(Err(_)) => Err("hours went by and it is not done".into()),
        None => Err("everybody waits for ever".into()),
    }
}

/// A simulated site.
struct World {
    network: Network,
    machine: ServerMachine,
    nodes: Vec<ClientNode>,
    clients: Vec<SimClient>,
    /// Of clients that write back.
    machines: Vec<ClientMachine>,
    work: Arc<dyn Workload>,
}

async fn simulate(plan: &RunPlan, sabotage: Option<Sabotage>) -> Outcome<RunReport> {
    let mut world = World::new(plan, sabotage);
    let leases_max = if plan.few_leases { FEW_LEASES } else { usize::MAX };
    world.machine.lease(plan.kind.leases(), plan.kind.keeps_writes(), leases_max);
    world.machine.start().await;
    if plan.kind.writes_back() {
        let machines = (0..plan.clients).map(|_| plan.client_machine(sabotage));
        world.machines = machines.collect();
    }
    world.begin_work(plan).await?;
    let mut others = world.of_further_slices(plan);
    let further = plan.of_further_slice();
    for other in &mut others {
        other.begin_work(&further).await?;
    }
    let mut crashed = None;
    let gone = if plan.kind.writes_back() {
        client_crashes::during(&mut world, plan).await?
    } else {
        let others = others.iter().map(|other| (other, &further));
        let all = std::iter::once((&world, plan)).chain(others);
        let torments =
            all.map(|(world, plan)| -> Fut<'_, _> { Box::pin(torment::during(world, plan)) });
        for tormented in dray_rt::join_all(torments.collect()).await {
            crashed = tormented?.or(crashed);
        }
        u64::from(crashed.is_some())
    };
    let (evictions, crashes) = if plan.evicts() { (gone, 0) } else { (0, gone) };
    let faults = FaultCounts::of(&world.machine, world.network.counts(), (crashes, evictions));
    world.check(crashed).await?;
    for other in &mut others {
        other.check(None).await?;
    }
    Ok(RunReport {
        work: world.work.name(),
        clients: plan.clients,
        faults,
        merged: world.machine.merged(),
        takeovers: others.iter().chain([&world]).map(World::takeovers).sum(),
        took: Duration::from_nanos(dray_rt::now().as_nanos()),
        fingerprint: random_u64(),
    })
}

impl World {
    /// One whose servers do not run yet.
    fn new(plan: &RunPlan, sabotage: Option<Sabotage>) -> World {
        let pair = plan.fleet.and_then(|fleet| {
            let fleet = Fleet::new(fleet, sabotage, plan.slow, machine::new_disk);
            fleet.pairs().next()
        });
        let machine = match pair {
            Some(pair) => ServerMachine::of_pair(pair),
            None => {
                let merging = plan.merges.then(|| TempDir::new("merging").expect("a directory"));
                ServerMachine::with(&Network::new(), sabotage, plan.slow, merging)
            }
        };
        World::of(machine, plan)
    }

    fn of(machine: ServerMachine, plan: &RunPlan) -> World {
        let (network, work) = (machine.network().clone(), plan.kind.work(plan.clients));
        World {
            network,
            machine,
            nodes: Vec::new(),
            clients: Vec::new(),
            machines: Vec::new(),
            work,
        }
    }

    /// The worlds of the other slices of the same servers.
    fn of_further_slices(&self, plan: &RunPlan) -> Vec<World> {
        let pairs = self.machine.as_pair().into_iter().flat_map(|pair| pair.fleet().pairs());
        pairs.skip(1).map(|pair| World::of(ServerMachine::of_pair(pair), plan)).collect()
    }

    /// Mounts the clients.
    async fn begin_work(&mut self, plan: &RunPlan) -> Outcome<()> {
        for number in 0..plan.clients {
            self.add_client(number, plan).await?;
        }
        let (work, client) = (self.work.clone(), self.clients[0].clone());
        let prepared = self.nodes[0].run(async move { work.prepare(&client).await }).await;
        prepared.map_err(|_| "a client died while it prepared")?
    }

    /// After the last fault.
    async fn check(&mut self, crashed: Option<usize>) -> Outcome<()> {
        let checked = timeout(TIME_MAX, check::after(self, crashed)).await;
        checked.map_err(|_| format!("the checks do not end: {}", self.standstill()))?
    }

    /// How often the share of one server became that of another one.
    fn takeovers(&self) -> u64 {
        self.machine.as_pair().map_or(0, pair::ServerPair::takeovers)
    }

    /// What everybody waits for, when it takes too long.
    fn standstill(&self) -> String {
        let clients: Vec<_> =
            self.clients.iter().map(|client| client.fs.session().status()).collect();
        let (status, locks) = (self.machine.status(), self.machine.locks());
        format!("no progress in an hour: {status:?} {locks} locks {clients:?}")
    }

    async fn add_client(&mut self, number: usize, plan: &RunPlan) -> Outcome<()> {
        let slice = self.machine.as_pair().map(pair::ServerPair::name);
        let how = MountHow { slice, ..plan.mount_how(number) };
        let name = format!("client{number}");
        let node = ClientNode::with_clock(&self.network, name.clone(), plan.clock(number));
        let network = self.network.clone();
        let machine = self.machines.get(number).cloned();
        let mounted = node.run(async move {
            match machine {
                Some(machine) => machine.mount(&network, &name, (number, how)).await,
                None => SimClient::mount(&network, &name, number, how).await,
            }
        });
        let mounted = mounted.await;
        self.nodes.push(node);
        self.clients.push(mounted.map_err(|_| "a client died while it mounted")?);
        Ok(())
    }
}
