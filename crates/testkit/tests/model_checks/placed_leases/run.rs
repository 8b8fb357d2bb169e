//! A run: clients at work at servers that lease what they own, while things go wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dray_backends::memory::MemoryDisk;
use dray_core::{FileSystem, Fut};
use dray_fabric::Connect;
use dray_fabric::sim::{Network, Weather};
use dray_layers::placement::Placement;
use dray_rt::sync::oneshot;
use dray_rt::{DriverKind, Executor, ExecutorHandle, Scope, timeout};
use dray_testkit::simulator::linearizable;

use super::CLIENTS;
use super::client::{Client, Mount};
use super::work::Work;

/// What the clocks of clients count in a second of the servers, seconds: a tenth less and more.
const CLOCKS: [f64; CLIENTS] = [1.0 / 1.1, 1.1, 1.0];
/// Simulated time after which nothing goes wrong any more. A client that has died holds a recovery up for as long as
/// its session lasts, and each death of a server begins that anew.
const TORMENT_MAX: Duration = Duration::from_secs(60);
/// Simulated time after which a run makes no progress any more.
const TIME_MAX: Duration = Duration::from_secs(600);

/// The servers of a run, and what outlives them.
pub trait Servers: Send + Sync + 'static {
    fn network(&self) -> &Network;
    fn disk(&self) -> &MemoryDisk;
    /// How long clients believe what is leased.
    fn term(&self) -> Duration;
    /// How long a client rests at most, between two calls of four.
    fn pause(&self) -> Duration;
    /// Whether a client changes anything.
    fn may_change(&self, client: usize) -> bool;
    /// Ends when all of them serve.
    fn start(&self) -> Fut<'_, ()>;
    /// The export of each slice, and the way there, in the order of the slices.
    fn ways(&self, client: &str) -> Vec<(String, Arc<dyn Connect>)>;
    /// Something goes wrong, and ends.
    fn torment(&self) -> Fut<'_, ()>;
    /// Ends when the last client dies.
    fn death(&self) -> Fut<'_, ()>;
}

/// How clients behave.
#[derive(Clone, Copy, Default)]
pub struct Clients {
    /// Clients believe the owner of a file alone.
    pub believe_owner: bool,
    /// Clocks of clients drift further than leases bear.
    pub drift: bool,
}

/// Calls that leases have spared, or what is wrong.
pub async fn run(
    servers: Arc<dyn Servers>,
    placement: Placement,
    how: Clients,
) -> Result<u64, String> {
    let work = Arc::new(Work::prepare(servers.disk(), &placement, servers.pause()).await);
    servers.start().await;
    let scopes = if how.drift { [0.3; CLIENTS] } else { CLOCKS }.map(Scope::with_clock);
    let mut clients = Vec::new();
    for (number, scope) in scopes.iter().enumerate() {
        let (servers, placement, (tell, mounted)) =
            (servers.clone(), placement.clone(), oneshot::channel());
        scope.spawn_on(&ExecutorHandle::current(), async move {
            let fs = servers.disk().mount();
            let mount = Mount {
                number,
                placement: &placement,
                info: fs.info(),
                term: servers.term(),
                ways: servers.ways(&format!("client{number}")),
                believes_owner: how.believe_owner,
            };
            let _ = tell.send(Client::mount(mount).await); // it is waited for
        });
        clients.push(mounted.await.map_err(|_| "a client died while it mounted")?);
    }
    let network = servers.network();
    network.set_weather(Weather { break_one_in: Some(400), ..Weather::default() });
    let (stopped, tormented) = (Arc::new(AtomicBool::new(false)), servers.clone());
    let stops = stopped.clone();
    dray_rt::spawn(async move {
        let begun = dray_rt::now();
        while !stops.load(Ordering::Relaxed) && begun.elapsed() < TORMENT_MAX {
            tormented.torment().await;
        }
    });
    let mut ends = Vec::new();
    for (client, scope) in clients.iter().zip(&scopes) {
        let (client, work, servers) = (client.clone(), work.clone(), servers.clone());
        let (tell, ended) = oneshot::channel::<()>();
        scope.spawn_on(&ExecutorHandle::current(), async move {
            let may_change = servers.may_change(client.number);
            work.work(&client, servers.disk(), may_change).await;
            drop(tell);
        });
        ends.push(ended);
    }
    let (killed, dying) = (scopes[CLIENTS - 1].clone(), servers.clone());
    dray_rt::spawn(async move {
        dying.death().await;
        dying.network().break_all(&format!("client{}", CLIENTS - 1));
        killed.kill();
    });
    for ended in ends {
        let ended = timeout(TIME_MAX, ended).await;
        ended.map_err(|_| "no progress".to_owned())?.ok();
    }
    stopped.store(true, Ordering::Relaxed);
    work.settle(servers.disk()).await;
    for events in &work.histories {
        let events = events.lock().unwrap();
        if linearizable(&events) == Some(false) {
            return Err(format!("no order of these explains them: {:#x?}", *events));
        }
    }
    Ok(clients[..CLIENTS - 1].iter().map(Client::spared).sum())
}

/// What `run` comes to in a simulation of its own.
pub fn simulated<F>(seed: u64, run: impl FnOnce() -> F) -> Result<u64, String>
where
    F: Future<Output = Result<u64, String>>,
{
    let mut executor = Executor::new(DriverKind::Simulated { seed }).unwrap();
    let ran = executor.try_block_on(async { run().await });
    ran.unwrap_or_else(|| Err("everybody waits for ever".into()))
}
