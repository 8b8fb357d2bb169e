//! Faults that the simulator makes while clients work.

use std::time::Duration;

use dray_fabric::sim::Weather;
use dray_rpc::server::Sabotage;
use dray_rt::sync::watch;
use dray_rt::{random_u64, sleep, timeout};

use super::client::MountHow;
use super::client_disk::DiskFaults;
use super::client_machine::ClientMachine;
use super::fleet::{FleetPlan, PairKind};
use super::machine::SERVER;
use super::work::{WorkloadKind, notifications};
use super::{Outcome, REPLAY_BYTES, TIME_MAX, World, eviction};

/// Deaths of the server in one run: where locks are reclaimed after each, a server
/// that dies all the time lets nobody get anywhere.
const DEATHS_MAX: u64 = 60;
/// The same where another server takes over, seconds later.
const TAKEOVERS_MAX: u64 = 8;

/// Mean time between looks at the server.
const LOOK_EVERY: Duration = Duration::from_millis(30);
/// Longest that a look may take: twice as long as clients are waited for.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// What a seed stands for.
#[derive(Clone, Debug)]
pub(super) struct RunPlan {
    pub(super) kind: WorkloadKind,
    pub(super) clients: usize,
    /// One operation in so many takes so long at the server.
    pub(super) slow: Option<(u64, Duration)>,
    pub(super) weather: Weather,
    /// Mean time between deaths of the server.
    pub(super) kill_every: Option<Duration>,
    /// Mean time between cuts of the network.
    pub(super) cut_every: Option<Duration>,
    /// When a client crashes.
    pub(super) crash_after: Option<Duration>,
    /// The client does not crash then: the administrator evicts it. See [`RunPlan::evicts`].
    pub(super) evict: bool,
    /// The server reads ahead and merges writes.
    pub(super) merges: bool,
    /// Sessions may have fewer leases than they want, and give some back all the time.
    pub(super) few_leases: bool,
    /// What the clocks of clients count in a second of the server, in turn, seconds. None: as the kind of work
    /// bears.
    pub(super) clocks: Option<[f64; 3]>,
    /// There are several servers that take over from each other.
    pub(super) fleet: Option<FleetPlan>,
}

fn below(bound: u64) -> u64 {
    random_u64() % bound
}

fn millis(least: u64, most: u64) -> Duration {
    Duration::from_micros(1000 * least + below(1000 * (most - least) + 1))
}

impl RunPlan {
    /// The kind of work goes round with the seed; the rest is drawn.
    pub(super) fn draw(seed: u64) -> RunPlan {
        let breaks = below(4) > 0;
        let weather = Weather {
            break_one_in: breaks.then(|| 8 + below(60)),
            deliver_then_break_one_in: breaks.then(|| 1 + below(3)),
            linger_one_in: (below(3) > 0).then(|| 1 + below(3)),
            linger_max: millis(5, 400),
            delay_max: Duration::from_micros(20 + below(1000)),
            ..Weather::default()
        };
        let mut plan = RunPlan {
            kind: WorkloadKind::ALL[(seed % WorkloadKind::ALL.len() as u64) as usize],
            clients: 2 + below(3) as usize,
            slow: (below(3) == 0).then(|| (1 + below(10), millis(1, 30))),
            weather,
            kill_every: (below(3) > 0).then(|| millis(2, 60)),
            cut_every: (below(4) == 0).then(|| millis(20, 300)),
            crash_after: (below(4) == 0).then(|| millis(1, 100)),
            // Not drawn: seeds that once showed a fault show it still.
            evict: seed % 3 == 1,
            merges: false,
            few_leases: seed / WorkloadKind::ALL.len() as u64 % 2 == 1,
            clocks: None,
            fleet: None,
        };
        if plan.evict && plan.crash_after.is_some() {
            (plan.kill_every, plan.cut_every) = (None, None);
        }
        plan
    }

    /// As [`RunPlan::draw`], with several servers. Nobody is evicted, and no client crashes. What it wrote last
    /// nobody sends again, and an older change that another client sends again would replace it.
    pub(super) fn of_fleet(seed: u64, kind: PairKind, servers: usize) -> RunPlan {
        let plan = RunPlan::draw(seed);
        let kill_every = Some(millis(2, 400));
        let fleet = Some(FleetPlan { kind, servers });
        RunPlan { evict: false, crash_after: None, fleet, kill_every, ..plan }
    }

    /// Leases, clocks of clients that count so many seconds in a second of the server, and cuts.
    pub(super) fn of_drift(seed: u64, clocks: [f64; 3]) -> RunPlan {
        RunPlan {
            kind: WorkloadKind::Leased,
            clocks: Some(clocks),
            cut_every: Some(millis(20, 300)),
            kill_every: None,
            crash_after: None,
            slow: None,
            weather: Weather { delay_max: Duration::from_micros(20), ..Weather::default() },
            ..RunPlan::draw(seed)
        }
    }

    /// Of further slices of the same servers: one of them sees to the deaths of these.
    pub(super) fn of_further_slice(&self) -> RunPlan {
        RunPlan { kill_every: None, cut_every: None, ..self.clone() }
    }

    /// What the clock of a client counts in a second of the server, seconds.
    pub(super) fn clock(&self, client: usize) -> f64 {
        self.clocks.unwrap_or_else(|| self.kind.clocks())[client % 3]
    }

    /// How a client mounts. The fourth one has no leases.
    pub(super) fn mount_how(&self, client: usize) -> MountHow {
        let kind = self.kind;
        let (leases, keeps_writes) = (kind.leases() && client < 3, kind.keeps_writes());
        MountHow { limit: kind.limit(), leases, keeps_writes, ..MountHow::keeping(REPLAY_BYTES) }
    }

    /// The machine of a client that writes back.
    pub(super) fn client_machine(&self, sabotage: Option<Sabotage>) -> ClientMachine {
        let ignores_syncs = sabotage == Some(Sabotage::LocalSyncs);
        let fails_one_in = (below(4) == 0).then(|| 10 + below(40));
        let faults = DiskFaults { fails_one_in, ignores_syncs };
        ClientMachine::new(faults, millis(20, 3000))
    }

    /// Whether somebody is evicted: only where nobody else lets a client in again that is cut off
    /// for that.
    pub(super) fn evicts(&self) -> bool {
        self.evict
            && !self.kind.writes_back()
            && self.kill_every.is_none()
            && self.cut_every.is_none()
    }
}

/// Lets the clients work while everything goes wrong, then heals. Answers who crashed, or was
/// evicted.
pub(super) async fn during(world: &World, plan: &RunPlan) -> Outcome<Option<usize>> {
    world.network.set_weather(plan.weather);
    let works = world.nodes.iter().zip(&world.clients).map(|(node, client)| {
        let (work, client) = (world.work.clone(), client.clone());
        node.run(async move { work.run(&client).await })
    });
    let mut works: Vec<_> = works.map(Some).collect();
    let (stop, stopped) = watch::channel(false);
    let mut torments = Vec::new();
    if let Some(every) = plan.kill_every {
        torments.push(dray_rt::spawn_join(kill_servers(world, plan, every, stopped.clone())));
    }
    if let Some(every) = plan.cut_every {
        torments.push(dray_rt::spawn_join(cut_networks(world, plan, every, stopped.clone())));
    }
    let looks = match plan.kind {
        WorkloadKind::Notified => Some(dray_rt::spawn_join(look(world, stopped))),
        _ => None,
    };
    let (mut crashed, mut outcome) = (None, Ok(()));
    if let Some(after) = plan.crash_after.filter(|_| world.work.bears_crashes()) {
        sleep(after).await;
        let whom = below(plan.clients as u64) as usize;
        match works[whom].take() {
            Some(work) if plan.evicts() => outcome = eviction::of(world, plan, whom, work).await,
            _ => world.work.crashed(whom),
        }
        world.nodes[whom].crash();
        crashed = Some(whom);
    }
    for work in works.into_iter().flatten() {
        let done = match timeout(TIME_MAX, work).await {
            Ok(done) => done.unwrap_or_else(|_| Err("a client's task died".into())),
            Err(_) => Err(world.standstill()),
        };
        outcome = outcome.and(done);
    }
    let _ = stop.send(true); // nobody may be left to be stopped
    for torment in torments {
        torment.await.map_err(|_| "a torment died")?;
    }
    if let Some(looks) = looks {
        outcome =
            outcome.and(looks.await.map_err(|_| "the task that inspects the server panicked")?);
    }
    world.network.set_weather(Weather::default());
    outcome.map(|()| crashed)
}

/// Kills the server again and again; often somebody comes back much later than the others.
pub(super) fn kill_servers(
    world: &World,
    plan: &RunPlan,
    every: Duration,
    stopped: watch::Receiver<bool>,
) -> impl Future<Output = ()> + use<> {
    let (machine, network) = (world.machine.clone(), world.network.clone());
    let clients = plan.clients as u64;
    let deaths_max = if plan.fleet.is_some() { TAKEOVERS_MAX } else { DEATHS_MAX };
    let every = every * plan.kind.slowness();
    async move {
        while machine.deaths() < deaths_max && go_on(&stopped, every).await {
            if let Some(pair) = machine.as_pair()
                && below(3) == 0
                && pair.fleet().draw_pair().hand_over().await
            {
                continue;
            }
            machine.kill();
            let late = (below(2) == 0).then(|| format!("client{}", below(clients)));
            late.iter().for_each(|late| network.partition(late, true));
            sleep(if below(8) == 0 { millis(0, 2000) } else { millis(0, 20) }).await;
            machine.start().await;
            if let Some(late) = late {
                sleep(millis(0, 100)).await;
                network.partition(&late, false);
            }
        }
    }
}

/// Cuts off one client, or the server, again and again.
pub(super) fn cut_networks(
    world: &World,
    plan: &RunPlan,
    every: Duration,
    stopped: watch::Receiver<bool>,
) -> impl Future<Output = ()> + use<> {
    let (network, clients) = (world.network.clone(), plan.clients as u64);
    let fleet = world.machine.as_pair().map(|pair| pair.fleet().clone());
    // What is kept is in danger only if a client is cut off with it for longer than its lease.
    let keeps = plan.kind.keeps_writes();
    let every = if keeps { every / 4 } else { every };
    async move {
        while go_on(&stopped, every).await {
            let cut = if keeps { millis(500, 2500) } else { millis(0, 1500) };
            if let Some(fleet) = &fleet
                && below(2) == 0
            {
                let what = fleet.draw_cut();
                fleet.cut(what, true);
                sleep(millis(0, 4000)).await;
                fleet.cut(what, false);
                continue;
            }
            let whom = below(clients + 1);
            let whom = if whom == clients { SERVER.to_owned() } else { format!("client{whom}") };
            network.partition(&whom, true);
            sleep(cut).await;
            network.partition(&whom, false);
        }
    }
}

/// Looks at the server again and again, as `dray status` does: it asks clients for the jobs of
/// their callers, of whom some never answer.
fn look(
    world: &World,
    stopped: watch::Receiver<bool>,
) -> impl Future<Output = Outcome<()>> + use<> {
    let machine = world.machine.clone();
    async move {
        while go_on(&stopped, LOOK_EVERY).await {
            let Some(server) = machine.server() else { continue };
            let looked = timeout(LOOK_MAX, server.status_with_paths()).await;
            let status = looked.map_err(|_| "a look at the server takes too long")?;
            for operation in status.operations {
                let client = status.clients.iter().find(|one| one.session == operation.session);
                let (Some(client), Some(job)) = (client, operation.job) else { continue };
                if job != notifications::job_on(&client.host) {
                    return Err(format!("a call of {} belongs to {job}", client.host));
                }
            }
        }
        Ok(())
    }
}

/// Waits about so long; false when it is over.
async fn go_on(stopped: &watch::Receiver<bool>, every: Duration) -> bool {
    let mut stopped = stopped.clone();
    let wait = every.mul_f64(below(2000) as f64 / 1000.0);
    let ended = timeout(wait, stopped.wait_for(|stop| *stop)).await;
    ended.is_err()
}
