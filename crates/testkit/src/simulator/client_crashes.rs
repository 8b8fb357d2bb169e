//! Clients that write back go down again and again, while everything else goes wrong. Each time the daemon dies, or the
//! machine loses power. A while later the client is back.

use std::time::Duration;

use dray_fabric::sim::Weather;
use dray_rt::sync::{oneshot, watch};
use dray_rt::{now, random_u64, sleep, timeout};

use super::client::{ClientNode, SimClient};
use super::client_machine::{self, ClientCrash, ClientMachine};
use super::machine::LEASE;
use super::torment::{RunPlan, cut_networks, kill_servers};
use super::work::ROUNDS;
use super::{Outcome, TIME_MAX, World};

/// The longest time from the beginning of a round to a crash in it, and until the client is back.
const UP_MAX: Duration = Duration::from_millis(1500);
const DOWN_MAX: Duration = Duration::from_millis(2500);

/// How often it is looked whether sessions are lost.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How often it is looked whether a client alone has what its programs have synced.
const LOG_LOOK_EVERY: Duration = Duration::from_millis(20);

/// What a client does in a round. It answers itself, since it may be another process.
type RoundResult = oneshot::Receiver<Outcome<SimClient>>;

fn below(bound: u64) -> u64 {
    random_u64() % bound
}

fn up_to(most: Duration) -> Duration {
    Duration::from_micros(below(most.as_micros() as u64 + 1))
}

/// Lets the clients work in some rounds. In the last one nothing goes wrong. Then everybody sends what it has kept.
/// Answers how many clients went down.
pub(super) async fn during(world: &mut World, plan: &RunPlan) -> Outcome<u64> {
    let (stop_looks, stopped) = watch::channel(false);
    let looks = dray_rt::spawn_join(note_losses(world.machines.clone(), stopped));
    let (mut crashes, mut down) = (0, vec![false; plan.clients]);
    for round in 0..ROUNDS {
        let is_calm = round + 1 == ROUNDS;
        world.network.set_weather(if is_calm { Weather::default() } else { plan.weather });
        let rounds =
            (0..plan.clients).map(|number| begin_round(world, plan, (number, down[number])));
        let rounds: Vec<_> = rounds.collect();
        let (stop, stopped) = watch::channel(false);
        let mut torments = Vec::new();
        if let Some(every) = plan.kill_every.filter(|_| !is_calm) {
            torments.push(dray_rt::spawn_join(kill_servers(world, plan, every, stopped.clone())));
        }
        if let Some(every) = plan.cut_every.filter(|_| !is_calm) {
            torments.push(dray_rt::spawn_join(cut_networks(world, plan, every, stopped)));
        }
        down = go_down(world, plan, is_calm).await;
        crashes += down.iter().filter(|down| **down).count() as u64;
        let mut outcome = Ok(());
        for (number, round) in rounds.into_iter().enumerate() {
            if down[number] {
                continue;
            }
            let ended = timeout(TIME_MAX, round).await.map_err(|_| world.standstill())?;
            match ended.unwrap_or_else(|_| Err("a client's task died".into())) {
                Ok(client) => world.clients[number] = client,
                Err(why) => outcome = outcome.and(Err(why)),
            }
        }
        let _ = stop.send(true); // nobody may be left to be stopped
        for torment in torments {
            torment.await.map_err(|_| "a torment died")?;
        }
        outcome?;
    }
    drop(stop_looks);
    looks.await.map_err(|_| "the task that looks at the sessions died")?;
    end(world).await.map(|()| crashes)
}

/// Looks at all sessions until that is stopped, and once more.
async fn note_losses(machines: Vec<ClientMachine>, mut stopped: watch::Receiver<bool>) {
    let mut is_over = false;
    while !is_over {
        is_over = timeout(LOOK_EVERY, stopped.wait_for(|stop| *stop)).await.is_ok();
        machines.iter().for_each(ClientMachine::note_losses);
    }
}

/// One client in one round. If it is down, it comes back first.
fn begin_round(world: &World, plan: &RunPlan, (number, is_down): (usize, bool)) -> RoundResult {
    let (work, network, how) = (world.work.clone(), world.network.clone(), plan.mount_how(number));
    let (client, machine) = (world.clients[number].clone(), world.machines[number].clone());
    world.nodes[number].run(async move {
        let client = match is_down {
            false => client,
            true => {
                drop(client);
                sleep(up_to(DOWN_MAX)).await;
                let name = format!("client{number}");
                machine.mount(&network, &name, (number, how)).await
            }
        };
        work.is_back(&client);
        work.run(&client).await.map(|()| client)
    })
}

/// Waits until the log of a client alone has what programs have synced.
async fn has_synced(world: &World, number: usize) {
    while !world.work.has_synced(number) {
        sleep(LOG_LOOK_EVERY).await;
    }
}

/// Some clients go down. Answers which.
async fn go_down(world: &mut World, plan: &RunPlan, is_calm: bool) -> Vec<bool> {
    let mut when = Vec::new();
    for number in 0..plan.clients {
        let how = if below(2) == 0 { ClientCrash::Daemon } else { ClientCrash::Machine };
        let crash = (up_to(UP_MAX), number, how);
        when.extend((!is_calm && below(2) == 0).then_some(crash));
    }
    when.sort_unstable_by_key(|(after, ..)| *after);
    let (mut down, begun) = (vec![false; plan.clients], now());
    for (after, number, how) in when {
        let left = after.saturating_sub(begun.elapsed());
        match how {
            ClientCrash::Daemon => sleep(left).await,
            // Or as soon as something could be lost that must not be.
            ClientCrash::Machine => _ = timeout(left, has_synced(world, number)).await,
        }
        world.machines[number].note_losses(); // nobody looks at this process later
        world.work.goes_down(number, how);
        world.nodes[number].crash();
        world.machines[number].crash(how);
        let name = format!("client{number}");
        world.nodes[number] = ClientNode::with_clock(&world.network, name, plan.clock(number));
        down[number] = true;
    }
    down
}

/// Everybody sends what it has kept. Then nothing is left on any disk.
async fn end(world: &World) -> Outcome<()> {
    for (client, node) in world.clients.iter().zip(&world.nodes) {
        let leaving = client.clone();
        let finished = node.run(async move { client_machine::finish(&leaving).await });
        let finished = timeout(TIME_MAX, finished).await.map_err(|_| world.standstill())?;
        finished.map_err(|_| "a client's task died")??;
        world.work.is_back(client);
    }
    world.machines.iter().try_for_each(ClientMachine::has_nothing_left)?;
    sleep(LEASE * 2).await; // sessions of machines that lost power are over by then
    Ok(())
}
