//! A client writes, syncs nothing and leaves; then the server's machine loses power. What it
//! wrote is there, or the server tells that a client has not come back.

use std::time::Duration;

use dray_core::{Buf, BufMut, FileSystem, OpenHow, Write};
use dray_fabric::sim::Network;
use dray_rpc::server::Sabotage;
use dray_rt::{random_u64, sleep};

use super::client::{ClientNode, SimClient};
use super::machine::ServerMachine;
use super::{Outcome, RunFailure};

/// One run. Half of the clients are let go a while before the loss, the others at once.
pub fn run_leaving(seed: u64, sabotage: Option<Sabotage>) -> Result<(), RunFailure> {
    let ran = super::in_simulation(seed, simulate(sabotage));
    ran.map_err(|what| RunFailure { seed, plan: "leaving before a loss of power".into(), what })
}

async fn mount(network: &Network, name: &'static str) -> Outcome<SimClient> {
    let (node, net) = (ClientNode::new(network, name.into()), network.clone());
    let mounted =
        node.run(async move { SimClient::mount(&net, name, 0, (1 << 20, None, None)).await }).await;
    mounted.map_err(|_| "the client died".to_owned())
}

async fn simulate(sabotage: Option<Sabotage>) -> Outcome<()> {
    let network = Network::new();
    let machine = ServerMachine::new(&network, sabotage, None);
    machine.start().await;
    let client = mount(&network, "client0").await?;
    let file = client.open(client.root(), "last", libc::O_RDWR).await?;
    let text = "written last ".repeat(5000);
    let written = file.write(&client.cx(), Write::at(0), Buf::from(text.as_bytes())).await;
    written.map_err(client.failed("write"))?;
    file.close(&client.cx()).await.map_err(client.failed("close"))?;
    client.fs.session().goodbye();
    let at_once = random_u64().is_multiple_of(2);
    sleep(Duration::from_micros(if at_once { random_u64() % 500 } else { 100_000 })).await;
    machine.lose_power(random_u64(), false);
    machine.start().await;
    let second = mount(&network, "client1").await?;
    let there = is_there(&second, &text).await?;
    match machine.status().recovery.clients_missing {
        _ if there => Ok(()),
        0 => Err("the last write is lost, and no client was notified".into()),
        _ if at_once => Ok(()),
        _ => Err("what was written last was not synced in 100 ms".into()),
    }
}

async fn is_there(client: &SimClient, text: &str) -> Outcome<bool> {
    let Ok(found) = client.lookup(client.root(), "last").await else { return Ok(false) };
    let file = client.fs.open(&client.cx(), found.id, OpenHow::READ).await;
    let file = file.map_err(client.failed("open"))?;
    let read = file.read(&client.cx(), 0, BufMut::heap(1 << 17)).await;
    let read = read.map_err(|(error, _)| client.failed("read")(error))?;
    file.close(&client.cx()).await.map_err(client.failed("close"))?;
    Ok(read.filled() == text.as_bytes())
}
