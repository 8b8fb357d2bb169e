//! Files are removed or replaced by other clients while they are open, and go on.

use std::sync::Mutex;

use dray_core::{Buf, BufMut, Errno, FileSystem, Fut, RemoveKind, RenameHow, Write};

use super::{Workload, lock, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::{SimClient, name};

/// Files that each client opens one after the other.
const FILES: u64 = 8;
/// Times that each is written and read.
const USES: u64 = 5;

#[derive(Default)]
pub(super) struct Deleted {
    /// Names of files that are open and not removed so far.
    victims: Mutex<Vec<String>>,
}

impl Deleted {
    /// Removes somebody's file, or puts another in its place and removes that.
    async fn remove_one(&self, client: &SimClient) -> Outcome<()> {
        let victim = lock(&self.victims).pop();
        let Some(victim) = victim else { return Ok(()) };
        let (cx, root, victim) = (client.cx(), client.root(), name(&victim));
        if pick(2) == 0 {
            let removed = client.fs.remove(&cx, root, &victim, RemoveKind::File).await;
            return removed.map_err(client.failed("remove a file that is open"));
        }
        let text = format!("new{}", client.number);
        let file = client.open(root, &text, libc::O_RDWR).await?;
        file.close(&client.cx()).await.map_err(client.failed("close"))?;
        let new = name(&text);
        let renamed =
            client.fs.rename(&cx, (root, &new), (root, &victim), RenameHow::Replace).await;
        renamed.map_err(client.failed("replace a file that is open"))?;
        let removed = client.fs.remove(&client.cx(), root, &victim, RemoveKind::File).await;
        removed.map_err(client.failed("remove what took its place"))
    }
}

impl Workload for Deleted {
    fn name(&self) -> &'static str {
        "deleted"
    }

    fn bears_crashes(&self) -> bool {
        false
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            for number in 0..FILES {
                let text = format!("open-{}-{number}", client.number);
                let file = client.open(client.root(), &text, libc::O_RDWR).await?;
                lock(&self.victims).push(text.clone());
                for used in 0..USES {
                    let failed = client.failed(&format!("use {text} while it is open"));
                    let bytes = Buf::from(&[used as u8][..]);
                    let written = file.write(&client.cx(), Write::at(used), bytes).await;
                    written.map_err(&failed)?;
                    if pick(2) == 0 {
                        self.remove_one(client).await?;
                    }
                    think().await;
                    let read = file.read(&client.cx(), 0, BufMut::heap(16)).await;
                    let read = read.map_err(|(error, _)| failed(error))?;
                    let expected: Vec<u8> = (0..=used as u8).collect();
                    if read.filled() != expected {
                        return Err(format!("{text} holds {:?}", read.filled()));
                    }
                }
                file.close(&client.cx()).await.map_err(client.failed("close"))?;
            }
            Ok(())
        })
    }

    fn crashed(&self, _: usize) {}

    fn verify<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            while !lock(&self.victims).is_empty() {
                self.remove_one(client).await?;
            }
            let gone = client.lookup(client.root(), "open-0-0").await;
            match gone {
                Err(error) if error.errno() == Errno::ENOENT => Ok(()),
                other => Err(format!("a removed file is found: {other:?}")),
            }
        })
    }
}
