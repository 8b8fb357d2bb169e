//! Checks after the last fault: every client converges, and every resource is given back.

use std::collections::BTreeMap;
use std::time::Duration;

use dray_core::{Errno, Error, FileId, FileSystem, FileType, NameBuf, OpenHow};
use dray_rt::{sleep, timeout};

use super::client::SimClient;
use super::machine::LEASE;
use super::{Outcome, World};

/// Longest that a client needs to find its way back.
const RETURN_MAX: Duration = Duration::from_secs(60);
/// Time for notices on their way.
const SETTLED: Duration = Duration::from_secs(1);

/// Looks at everything; the client `crashed` is gone.
pub(super) async fn after(world: &mut World, crashed: Option<usize>) -> Outcome<()> {
    if let Some(number) = crashed {
        world.nodes.remove(number);
        world.clients.remove(number);
        sleep(LEASE * 2).await; // by then it is known that it is gone
    }
    for (client, node) in world.clients.iter().zip(&world.nodes) {
        let asking = client.clone();
        let asks = node.run(async move { works(&asking).await });
        let works = timeout(RETURN_MAX, asks).await;
        works
            .map_err(|_| format!("client {} never comes back", client.number))?
            .map_err(|_| "a client's task died")?
            .map_err(client.failed("statfs after healing"))?;
        let is_lost = match &client.machine {
            Some(machine) => machine.lost_session_too_early(),
            None => client.fs.session().status().lost > 0,
        };
        if is_lost {
            return Err(format!("client {}'s session was lost", client.number));
        }
    }
    world.work.verify(&world.clients[0]).await?;
    // A call that its caller no longer waits for may still be under way.
    at_rest(world).await?;
    same_trees(world).await?;
    world.work.clone().settled(world).await?;
    given_back(world).await
}

/// The client has its server again; one that does not wait for it asks more than once.
async fn works(client: &SimClient) -> Result<(), Error> {
    loop {
        match client.fs.statfs(&client.cx()).await {
            Err(error) if error.errno() == Errno::EHOSTDOWN => {
                sleep(Duration::from_millis(10)).await;
            }
            answered => return answered.map(drop),
        }
    }
}

/// Names and what lies under them, as one client sees it.
type Tree = BTreeMap<Vec<u8>, (FileId, u64, u32)>;

async fn same_trees(world: &World) -> Outcome<()> {
    let mut first = None;
    for (client, node) in world.clients.iter().zip(&world.nodes) {
        let looking = client.clone();
        let seen = node.run(async move { tree(&looking).await }).await;
        let seen = seen.map_err(|_| "a client's task died")??;
        let first = first.get_or_insert_with(|| seen.clone());
        if seen != *first {
            return Err(format!(
                "clients {} and {} see different trees: {first:?} {seen:?}",
                world.clients[0].number, client.number
            ));
        }
    }
    Ok(())
}

async fn tree(client: &SimClient) -> Outcome<Tree> {
    let mut found = Tree::new();
    let mut next = vec![(Vec::new(), client.root())];
    while let Some((path, dir)) = next.pop() {
        let failed = client.failed("list");
        let open = client.fs.open(&client.cx(), dir, OpenHow::DIRECTORY).await;
        let open = open.map_err(&failed)?;
        let page = open.readdir(&client.cx(), 0, 60_000, false).await.map_err(&failed)?;
        for (name, _) in page.iter() {
            let named = NameBuf::new(name).map_err(|_| "a name that is none")?;
            let entry = client.fs.lookup(&client.cx(), dir, &named).await.map_err(&failed)?;
            let mut path = path.clone();
            path.push(b'/');
            path.extend_from_slice(name);
            if entry.attr.file_type() == FileType::Directory {
                next.push((path.clone(), entry.id));
            }
            found.insert(path, (entry.id, entry.attr.size, entry.attr.mode));
        }
        open.close(&client.cx()).await.map_err(&failed)?;
    }
    Ok(found)
}

/// Nothing is under way, or soon will not be: a sync of what was written last may have begun.
async fn at_rest(world: &World) -> Outcome<()> {
    let mut under_way = String::new();
    for _ in 0..10 {
        let operations = world.machine.status().operations;
        let calls = |client: &SimClient| -> u64 {
            client.fs.session().status().channels.iter().map(|channel| channel.in_flight).sum()
        };
        let busy = world.clients.iter().find(|client| calls(client) > 0);
        under_way = match (operations.first(), busy) {
            (Some(operation), _) => format!("still under way: {operation:?}"),
            (None, Some(client)) => format!("client {} has calls under way", client.number),
            (None, None) => return Ok(()),
        };
        sleep(SETTLED).await;
    }
    Err(under_way)
}

async fn given_back(world: &mut World) -> Outcome<()> {
    sleep(SETTLED).await;
    let status = world.machine.status();
    for client in &status.clients {
        if client.files > 0 {
            return Err(format!("{} files of {} are open", client.files, client.host));
        }
    }
    if status.clients.len() != world.clients.len() {
        let hosts: Vec<_> =
            status.clients.iter().map(|client| (&client.host, client.away)).collect();
        return Err(format!("{} clients, and sessions {hosts:?}", world.clients.len()));
    }
    at_rest(world).await?;
    if world.machine.locks() > 0 {
        return Err(format!("{} locks are held", world.machine.locks()));
    }
    for client in &world.clients {
        client.fs.session().goodbye();
    }
    sleep(Duration::from_millis(1)).await; // a goodbye gets there before the node goes
    world.clients.clear();
    world.nodes.iter().for_each(super::client::ClientNode::crash);
    sleep(SETTLED).await;
    let status = world.machine.status();
    if !status.clients.is_empty() || world.machine.sessions_noted() > 0 {
        return Err(format!("sessions after every goodbye: {:?}", status.clients));
    }
    world.machine.drop_orphans();
    match world.machine.buffer_bytes() {
        0 => Ok(()),
        bytes => Err(format!("{bytes} bytes of buffers are out")),
    }
}
