//! The server's machine loses power: what was synced is there afterwards.

use std::time::Duration;

use dray_core::{Buf, BufMut, FileSystem, OpenHow, Write};
use dray_fabric::sim::Network;
use dray_rt::{random_u64, sleep};

use super::client::{Client, Node};
use super::machine::Machine;
use super::{Failure, Outcome};

/// Losses of power in one run.
const LOSSES: u64 = 5;

/// One client writes and syncs while the server's machine loses power again and again.
/// Looks for what was synced only: what was not is the client's to send again.
pub fn run_power_loss(seed: u64) -> Result<(), Failure> {
    let ran = super::in_simulation(seed, simulate());
    ran.map_err(|what| Failure { seed, plan: "losses of power".into(), what })
}

async fn simulate() -> Outcome<()> {
    let network = Network::new();
    let machine = Machine::new(&network, None, None);
    machine.start(false).await;
    let node = Node::new(&network, "client0".into());
    let net = network.clone();
    let client = node.run(async move { Client::mount(&net, "client0", 0).await }).await;
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
        machine.start(true).await;
        for text in &synced {
            look(&client, text).await?;
        }
    }
    Ok(())
}

async fn look(client: &Client, text: &str) -> Outcome<()> {
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
