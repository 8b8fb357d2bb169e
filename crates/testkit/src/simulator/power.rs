//! The server's machine loses power. What was synced is there afterwards. What was not is sent
//! again by the clients that kept it, and the loss of other data is reported.

use std::time::Duration;

use dray_core::{Buf, BufMut, FileSystem, OpenHow, Write};
use dray_fabric::sim::{Network, Weather};
use dray_rpc::server::Sabotage;
use dray_rt::{random_u64, sleep, timeout};

use super::client::{ClientNode, SimClient};
use super::machine::ServerMachine;
use super::work::{PowerKind, Workload};
use crate::fixture::TempDir;

use super::{FaultCounts, Outcome, RunFailure, RunReport, TIME_MAX};

/// Losses of power in one run.
const LOSSES: u64 = 5;
/// Longest that a client needs to send again what it kept, leases of others included.
const RECOVERED_MAX: Duration = Duration::from_secs(60);

/// One client writes and syncs while the server's machine loses power again and again.
/// Looks for what was synced only: what was not is the client's to send again.
pub fn run_power_loss(seed: u64) -> Result<(), RunFailure> {
    let ran = super::in_simulation(seed, simulate());
    ran.map_err(|what| RunFailure { seed, plan: "losses of power".into(), what })
}

async fn simulate() -> Outcome<()> {
    let network = Network::new();
    let machine = ServerMachine::new(&network, None, None);
    machine.start().await;
    let node = ClientNode::new(&network, "client0".into());
    let net = network.clone();
    let client =
        node.run(async move { SimClient::mount(&net, "client0", 0, (0, None, None)).await }).await;
    let client = client.map_err(|_| "the client died")?;
    let mut synced = Vec::new();
    for loss in 0..LOSSES {
        for number in 0..1 + random_u64() % 6 {
            let text = format!("{loss}-{number}");
            let file = client.open(client.root(), &text, libc::O_RDWR).await?;
            let bytes = Buf::from(text.repeat(2000).as_bytes());
            let written = file.write(&client.cx(), Write::at(0), bytes).await;
            written.map_err(client.failed("write"))?;
            if random_u64().is_multiple_of(2) {
                file.sync(&client.cx(), false).await.map_err(client.failed("sync"))?;
                synced.push(text);
            }
            file.close(&client.cx()).await.map_err(client.failed("close"))?;
        }
        machine.lose_power(random_u64(), random_u64().is_multiple_of(2));
        sleep(Duration::from_millis(random_u64() % 500)).await;
        machine.start().await;
        for text in &synced {
            look(&client, text).await?;
        }
    }
    Ok(())
}

async fn look(client: &SimClient, text: &str) -> Outcome<()> {
    let failed = client.failed(&format!("{text} was synced"));
    let found = client.lookup(client.root(), text).await.map_err(&failed)?;
    let file = client.fs.open(&client.cx(), found.id, OpenHow::READ).await.map_err(&failed)?;
    let read = file.read(&client.cx(), 0, BufMut::heap(1 << 16)).await;
    let read = read.map_err(|(error, _)| failed(error))?;
    file.close(&client.cx()).await.map_err(&failed)?;
    match read.filled() == text.repeat(2000).as_bytes() {
        true => Ok(()),
        false => Err(format!("{text} was synced and is not what was written")),
    }
}

/// What a seed stands for.
#[derive(Debug)]
struct RunPlan {
    kind: PowerKind,
    clients: usize,
    /// What clients keep, bytes.
    replay_bytes: u64,
    /// The server's notes on its clients are lost, too.
    forget: bool,
    /// One of so many messages ends its connection.
    break_one_in: Option<u64>,
    /// The server dies once more while clients send what they kept.
    kills: bool,
    /// When a client crashes.
    crash_after: Option<Duration>,
    /// The server reads ahead and merges writes.
    merges: bool,
}

fn below(bound: u64) -> u64 {
    random_u64() % bound
}

impl RunPlan {
    fn draw(kind: PowerKind) -> RunPlan {
        let own = kind == PowerKind::Own;
        // Only a client's own file can be compared where something may be lost. A server that has
        // forgotten its clients cannot know an append that comes again.
        let replay_bytes = match below(3) {
            0 if own => 0,
            1 if own => 20_000,
            _ => 1 << 20,
        };
        RunPlan {
            kind,
            clients: 1 + below(3) as usize,
            replay_bytes,
            forget: kind != PowerKind::Append && below(3) == 0,
            break_one_in: (below(2) == 0).then(|| 10 + below(50)),
            kills: below(3) == 0,
            // What it kept goes with it: that must show in nobody else's file.
            crash_after: (own && below(4) == 0).then(|| Duration::from_millis(below(60))),
            merges: false,
        }
    }
}

/// Clients work while the server's machine loses power again and again. What they keep must
/// be there afterwards as if nothing had happened; losses of what they do not keep must be reported.
/// The kind of work goes round with the seed.
pub fn run_power_losses(seed: u64, sabotage: Option<Sabotage>) -> Result<RunReport, RunFailure> {
    let kind = PowerKind::ALL[(seed % PowerKind::ALL.len() as u64) as usize];
    run_power_losses_of(kind, seed, sabotage)
}

/// As [`run_power_losses`], with this kind of work.
pub fn run_power_losses_of(
    kind: PowerKind,
    seed: u64,
    sabotage: Option<Sabotage>,
) -> Result<RunReport, RunFailure> {
    run_power_losses_with(kind, seed, sabotage, false)
}

/// As [`run_power_losses`], with a server that reads ahead and merges writes.
pub fn run_power_losses_merging(seed: u64) -> Result<RunReport, RunFailure> {
    let kind = PowerKind::ALL[(seed % PowerKind::ALL.len() as u64) as usize];
    run_power_losses_with(kind, seed, None, true)
}

fn run_power_losses_with(
    kind: PowerKind,
    seed: u64,
    sabotage: Option<Sabotage>,
    merges: bool,
) -> Result<RunReport, RunFailure> {
    let mut plan = None;
    let ran = super::in_simulation(seed, async {
        let drawn = plan.insert(RunPlan { merges, ..RunPlan::draw(kind) });
        simulate_kept(drawn, sabotage).await
    });
    ran.map_err(|what| RunFailure { seed, plan: format!("{plan:?}"), what })
}

async fn simulate_kept(plan: &RunPlan, sabotage: Option<Sabotage>) -> Outcome<RunReport> {
    let network = Network::new();
    let merging = plan.merges.then(|| TempDir::new("merging").expect("a directory"));
    let machine = ServerMachine::with(&network, sabotage, None, merging);
    machine.start().await;
    let (nodes, clients) = mount_all(plan, &network).await?;
    let work = plan.kind.work(&machine, plan.replay_bytes >= 1 << 20);
    work.prepare(&clients[0]).await?;
    for name in ["own0", "own1", "own2", "log", "counter"] {
        let file = clients[0].open(clients[0].root(), name, libc::O_RDWR).await?;
        file.close(&clients[0].cx()).await.map_err(clients[0].failed("close"))?;
    }
    // What is there at the beginning stays there.
    clients[0].fs.sync_all(&clients[0].cx()).await.map_err(clients[0].failed("sync"))?;
    network.set_weather(Weather { break_one_in: plan.break_one_in, ..Weather::default() });
    let mut works: Vec<_> = nodes
        .iter()
        .zip(&clients)
        .map(|(node, client)| {
            let (work, client) = (work.clone(), client.clone());
            Some(node.run(async move { work.run(&client).await }))
        })
        .collect();
    let mut crashed = 0;
    for _ in 0..LOSSES {
        sleep(Duration::from_micros(below(25_000))).await;
        if plan.crash_after.is_some() && crashed == 0 && below(2) == 0 {
            nodes[0].crash();
            work.crashed(0);
            works[0] = None;
            crashed = 1;
        }
        lose_power(plan, &machine).await;
    }
    for work in works.into_iter().flatten() {
        let standstill = |_| {
            let clients: Vec<_> =
                clients.iter().map(|client| client.fs.session().status()).collect();
            format!("no progress in an hour: {:?} {clients:?}", machine.status())
        };
        let done = timeout(TIME_MAX, work).await.map_err(standstill)?;
        done.map_err(|_| "a client's task died")??;
    }
    network.set_weather(Weather::default());
    let faults = FaultCounts::of(&machine, network.counts(), (crashed as u64, 0));
    for client in clients.iter().skip(crashed) {
        verify(&*work, client).await?;
    }
    Ok(RunReport {
        work: work.name(),
        clients: plan.clients,
        faults,
        merged: machine.merged(),
        takeovers: 0,
        took: Duration::from_nanos(dray_rt::now().as_nanos()),
        fingerprint: random_u64(),
    })
}

async fn mount_all(
    plan: &RunPlan,
    network: &Network,
) -> Outcome<(Vec<ClientNode>, Vec<SimClient>)> {
    let (mut nodes, mut clients) = (Vec::new(), Vec::new());
    for number in 0..plan.clients {
        let name = format!("client{number}");
        let (node, net) = (ClientNode::new(network, name.clone()), network.clone());
        let how = (plan.replay_bytes, None, None);
        let mount = async move { SimClient::mount(&net, &name, number, how).await };
        clients.push(node.run(mount).await.map_err(|_| "a client died")?);
        nodes.push(node);
    }
    Ok((nodes, clients))
}

/// The power fails and comes back, and the next server may die once more.
async fn lose_power(plan: &RunPlan, machine: &ServerMachine) {
    machine.lose_power(random_u64(), plan.forget);
    sleep(Duration::from_millis(below(300))).await;
    machine.start().await;
    if plan.kills {
        sleep(Duration::from_micros(below(5000))).await;
        machine.kill();
        machine.start().await;
    }
}

async fn verify(work: &dyn Workload, client: &SimClient) -> Outcome<()> {
    work.verify(client).await?;
    let begin = dray_rt::now();
    while client.fs.session().status().unsynced.recovering {
        if begin.elapsed() > RECOVERED_MAX {
            return Err(format!("client {} recovers for ever", client.number));
        }
        sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}
