//! The administrator has a client go in the middle of its work. What it had is given back at once.
//! Nothing of what it had asked for comes behind that. Whatever it asks for from then on fails with
//! ESHUTDOWN, until somebody mounts anew.

use std::time::Duration;

use dray_core::{Errno, FileSystem};
use dray_fabric::sim::Weather;
use dray_rt::sync::oneshot;
use dray_rt::{random_u64, sleep, timeout};

use super::client::SimClient;
use super::torment::RunPlan;
use super::{Outcome, TIME_MAX, World};

/// Longest that a client needs to hear of it, over whatever goes wrong.
const HEARS_WITHIN: Duration = Duration::from_secs(60);
/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Evicts client `whom`, which is cut off meanwhile, and waits for the end of its `work`.
pub(super) async fn of(
    world: &World,
    plan: &RunPlan,
    whom: usize,
    work: oneshot::Receiver<Outcome<()>>,
) -> Outcome<()> {
    let client = &world.clients[whom];
    let host = host_of(client);
    // Every answer that it has got by now holds, and none that it gets later.
    world.network.partition(&host, true);
    world.work.crashed(whom);
    evict(world, client).await?;
    for _ in 0..random_u64() % 3 {
        sleep(Duration::from_micros(random_u64() % 100_000)).await;
        world.machine.kill();
        world.machine.start().await;
    }
    world.network.set_weather(as_on_tcp(plan.weather));
    world.network.partition(&host, false);
    let ended = timeout(TIME_MAX, work).await.map_err(|_| world.standstill())?;
    if let Err(what) = ended.unwrap_or_else(|_| Err("its task died".into()))
        && !what.contains("ESHUTDOWN")
    {
        return Err(format!("client {} was evicted: {what}", client.number));
    }
    hears(client).await?;
    world.network.set_weather(plan.weather);
    Ok(())
}

pub(super) fn host_of(client: &SimClient) -> String {
    format!("client{}", client.number)
}

/// What was sent before the end of a connection arrives, unless something goes wrong.
pub(super) fn as_on_tcp(weather: Weather) -> Weather {
    Weather { linger_one_in: Some(1), ..weather }
}

/// Ends its session, as `dray evict` does.
pub(super) async fn evict(world: &World, client: &SimClient) -> Outcome<()> {
    let host = host_of(client);
    let clients = world.machine.status().clients;
    let session = clients.iter().find(|one| one.host == host).map(|one| one.session);
    let (Some(server), Some(session)) = (world.machine.server(), session) else {
        return Err(format!("{host} has no session to be ended"));
    };
    server.evict(session).await;
    match world.machine.status().clients.iter().any(|one| one.host == host) {
        true => Err(format!("{host} was evicted, and has a session")),
        false => Ok(()),
    }
}

/// Waits until it knows: nothing that it asks for is done any more.
pub(super) async fn hears(client: &SimClient) -> Outcome<()> {
    let begin = dray_rt::now();
    loop {
        let asked = timeout(HEARS_WITHIN, client.fs.statfs(&client.cx())).await;
        match asked.map(|answer| answer.map_err(|error| error.errno())) {
            Ok(Err(Errno::ESHUTDOWN)) => return Ok(()),
            // It does not wait for a server that is away.
            Ok(Err(Errno::EHOSTDOWN)) if begin.elapsed() < HEARS_WITHIN => sleep(LOOK_EVERY).await,
            other => return Err(format!("client {} was evicted: {other:?}", client.number)),
        }
    }
}
