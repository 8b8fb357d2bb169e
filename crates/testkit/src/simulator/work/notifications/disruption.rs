//! One disruption of a calm system. The server dies, with its machine or alone, or a client is away
//! for a while, or for so long that its session ends. Afterwards every client has its files open
//! again.

use std::time::Duration;

use dray_core::FileSystem;
use dray_fabric::sim::Weather;
use dray_rt::{random_u64, sleep};

use super::{NOTIFY_MAX, Notifications, lock, pick};
use crate::simulator::client::SimClient;
use crate::simulator::machine::LEASE;
use crate::simulator::{Outcome, World, eviction};

/// Longest that everybody needs to have open again what he had.
const BACK_WITHIN: Duration = Duration::from_secs(60);

impl Notifications {
    pub(super) async fn disruption(&self, world: &World) -> Outcome<()> {
        let whom = &world.clients[pick(world.clients.len() as u64) as usize];
        let host = format!("client{}", whom.number);
        match pick(5) {
            0 => {
                world.machine.kill();
                world.machine.start().await;
            }
            power @ (1 | 2) => {
                self.sync(&world.clients).await?;
                world.machine.lose_power(random_u64(), power == 2);
                world.machine.start().await;
            }
            away => {
                let lease = if away == 3 { LEASE * 2 } else { Duration::ZERO };
                world.network.partition(&host, true);
                sleep(lease + Duration::from_millis(pick(300))).await;
                world.network.partition(&host, false);
            }
        }
        self.everybody_is_back(world).await
    }

    /// What is lost with the machine's power is another matter.
    async fn sync(&self, clients: &[SimClient]) -> Outcome<()> {
        for client in clients {
            client.fs.sync_all(&client.cx()).await.map_err(client.failed("sync"))?;
        }
        Ok(())
    }

    /// Waits until the server has as many files of each client as that has open.
    pub(super) async fn everybody_is_back(&self, world: &World) -> Outcome<()> {
        let begin = dray_rt::now();
        loop {
            let status = world.machine.status();
            let back = |client: &SimClient| {
                let host = format!("client{}", client.number);
                let mut sessions = status.clients.iter().filter(|one| one.host == host);
                let open = lock(&self.0).open.get(&client.number).map_or(0, Vec::len);
                sessions.any(|one| one.away.is_none() && one.files == open)
            };
            match world.clients.iter().find(|client| !back(client)) {
                None => break,
                Some(client) if begin.elapsed() > BACK_WITHIN => {
                    let number = client.number;
                    return Err(format!(
                        "client {number} has its files not open again: {status:?}"
                    ));
                }
                Some(_) => sleep(Duration::from_millis(50)).await,
            }
        }
        sleep(NOTIFY_MAX).await;
        Ok(())
    }

    /// The administrator has a client go: what it had is given back at once, it hears of that, and
    /// the others notice nothing.
    pub(super) async fn evict_one(&self, world: &mut World) -> Outcome<()> {
        let at = pick(world.clients.len() as u64) as usize;
        let client = world.clients.remove(at);
        let node = world.nodes.remove(at);
        let host = eviction::host_of(&client);
        world.network.set_weather(eviction::as_on_tcp(Weather::default()));
        // One that is away hears of it when it comes back.
        let away = pick(2) == 0;
        world.network.partition(&host, away);
        eviction::evict(world, &client).await?;
        world.network.partition(&host, false);
        eviction::hears(&client).await?;
        world.network.set_weather(Weather::default());
        lock(&self.0).open.remove(&client.number);
        node.crash();
        self.everybody_is_back(world).await
    }

    /// A client that has nothing open gets no notification.
    pub(super) async fn calm_without_files(&self, clients: &[SimClient]) -> Outcome<()> {
        sleep(NOTIFY_MAX).await;
        self.round(clients).await
    }
}
