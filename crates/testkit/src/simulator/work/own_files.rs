//! Each client writes, cuts, punches and syncs a file of its own, and makes new ones. A file holds what
//! the client wrote, or the client got an error that says that it does not.

use std::sync::Mutex;

use dray_core::{Allocate, Buf, BufMut, Errno, Error, FileSystem, Fut, OpenHow, SetAttr, Write};

use super::{Workload, lock, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::{SimClient, SimFile};

/// Steps of each client.
const STEPS: u64 = 40;
/// Longest file, bytes: some chunks of the disk.
const SIZE_MAX: u64 = 40_000;
/// Longest write, bytes.
const WRITE_MAX: u64 = 9000;

pub(super) struct OwnFiles {
    /// Nothing may be lost.
    kept: bool,
    /// Files made: by whom, and which.
    made: Mutex<Vec<(usize, String)>>,
}

/// A file as its client knows it.
struct Known {
    file: SimFile,
    content: Vec<u8>,
    /// Losses that had been reported to the client when its file was last right.
    losses: u64,
}

impl OwnFiles {
    pub(super) fn new(kept: bool) -> OwnFiles {
        OwnFiles { kept, made: Mutex::default() }
    }

    async fn step(&self, client: &SimClient, known: &mut Known) -> Outcome<()> {
        let cx = client.cx();
        let size = known.content.len() as u64;
        match pick(12) {
            0..4 => {
                let (at, len) = (pick(SIZE_MAX - WRITE_MAX), 1 + pick(WRITE_MAX));
                let bytes = vec![pick(256) as u8; len as usize];
                let how = Write::at(at);
                let written = known.file.write(&cx, how, Buf::from(&bytes[..])).await;
                written.map_err(client.failed("write"))?;
                let end = (at + len) as usize;
                known.content.resize(known.content.len().max(end), 0);
                known.content[at as usize..end].copy_from_slice(&bytes);
            }
            4 => {
                let size = pick(SIZE_MAX);
                let set = SetAttr { size: Some(size), ..SetAttr::default() };
                known.file.setattr(&cx, set).await.map_err(client.failed("cut"))?;
                known.content.resize(size as usize, 0);
            }
            5 if size > 0 => {
                let (at, len_bytes) = (pick(size), 1 + pick(WRITE_MAX));
                let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                let what = Allocate { flags, at, len_bytes };
                known.file.allocate(&cx, what).await.map_err(client.failed("punch"))?;
                known.content[at as usize..(at + len_bytes).min(size) as usize].fill(0);
            }
            6 => self.check_loss(client, known, known.file.sync(&cx, false).await).await?,
            7 => {
                let closed = known.file.close(&cx).await;
                let reopened = client.open(client.root(), &own(client), libc::O_RDWR).await;
                known.file = reopened?;
                self.check_loss(client, known, closed).await?;
            }
            8 => {
                let text = format!("new{}-{}", client.number, pick(1 << 40));
                let file = client.open(client.root(), &text, libc::O_RDWR).await?;
                let closed = file.close(&client.cx()).await;
                lock(&self.made).push((client.number, text));
                self.allow(closed, client)?;
            }
            9 => self.begin_anew(client, known).await?,
            _ => self.look(client, known).await?,
        }
        Ok(())
    }

    /// Cuts the file by opening it, by its name or without.
    async fn begin_anew(&self, client: &SimClient, known: &mut Known) -> Outcome<()> {
        let closed = known.file.close(&client.cx()).await;
        let flags = libc::O_RDWR | libc::O_TRUNC;
        known.file = match pick(2) {
            0 => client.open(client.root(), &own(client), flags).await?,
            _ => {
                let (cx, id) = (client.cx(), known.file.id());
                let opened = client.fs.open(&cx, id, OpenHow::new(flags)).await;
                opened.map_err(client.failed("cut by opening"))?
            }
        };
        if self.allow(closed, client)? && self.kept {
            return Err(format!("client {} lost what it had kept", client.number));
        }
        known.content.clear();
        Ok(())
    }

    /// A loss that must not be, or an error that is none.
    fn allow(&self, result: Result<(), Error>, client: &SimClient) -> Outcome<bool> {
        match result {
            Ok(()) => Ok(false),
            // A file that was made just before the loss of power can be gone whatever is kept. A
            // client that has it open is notified.
            Err(error) if error.errno() == Errno::EIO => Ok(true),
            Err(error) => Err(client.failed("sync or close")(error)),
        }
    }

    /// After a sync or close: with an error the client knows that its file is what it is.
    async fn check_loss(
        &self,
        client: &SimClient,
        known: &mut Known,
        how: Result<(), Error>,
    ) -> Outcome<()> {
        if self.allow(how, client)? {
            if self.kept {
                return Err(format!("client {} lost what it had kept", client.number));
            }
            // Before anything is waited for: more may be lost meanwhile.
            let losses = client.fs.session().status().unsynced.losses;
            self.learn(client, known).await?;
            self.check_reported_once(client, known, losses).await?;
        }
        Ok(())
    }

    /// After a loss was reported: another sync reports nothing, unless more was lost than `before`.
    async fn check_reported_once(
        &self,
        client: &SimClient,
        known: &Known,
        before: u64,
    ) -> Outcome<()> {
        let losses = || client.fs.session().status().unsynced.losses;
        let again = known.file.sync(&client.cx(), false).await;
        match self.allow(again, client)? {
            true if losses() == before => {
                Err(format!("{} is notified twice of one loss", own(client)))
            }
            _ => Ok(()),
        }
    }

    async fn learn(&self, client: &SimClient, known: &mut Known) -> Outcome<()> {
        known.content = read(client, &known.file).await?;
        known.losses = client.fs.session().status().unsynced.losses;
        Ok(())
    }

    /// The file is as it is known, or the loss is reported.
    async fn look(&self, client: &SimClient, known: &mut Known) -> Outcome<()> {
        let found = read(client, &known.file).await?;
        if found == known.content {
            return Ok(());
        }
        let first = found.iter().zip(&known.content).position(|(one, other)| one != other);
        let wrong = format!(
            "client {}: {} bytes, not {}, differ at {first:?}",
            client.number,
            found.len(),
            known.content.len()
        );
        let losses = client.fs.session().status().unsynced.losses;
        match self.allow(known.file.sync(&client.cx(), false).await, client)? {
            _ if self.kept => return Err(format!("{wrong}, and it had kept them")),
            // The loss was reported at once, or by an event if nobody had the file open.
            true => {}
            false if losses > known.losses => {}
            false => return Err(format!("{wrong}, and no client was notified")),
        }
        self.learn(client, known).await
    }
}

fn own(client: &SimClient) -> String {
    format!("own{}", client.number)
}

async fn read(client: &SimClient, file: &SimFile) -> Outcome<Vec<u8>> {
    let read = file.read(&client.cx(), 0, BufMut::heap(2 * SIZE_MAX as usize)).await;
    Ok(read.map_err(|(error, _)| client.failed("read")(error))?.filled().to_vec())
}

impl Workload for OwnFiles {
    fn name(&self) -> &'static str {
        "own"
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let file = client.open(client.root(), &own(client), libc::O_RDWR).await?;
            let mut known = Known { file, content: Vec::new(), losses: 0 };
            for _ in 0..STEPS {
                self.step(client, &mut known).await?;
                think().await;
            }
            self.look(client, &mut known).await?;
            let closed = known.file.close(&client.cx()).await;
            self.allow(closed, client).map(drop)
        })
    }

    fn crashed(&self, number: usize) {
        lock(&self.made).retain(|(client, _)| *client != number);
    }

    fn verify<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let status = client.fs.session().status().unsynced;
            let made = lock(&self.made).clone();
            for (maker, text) in made {
                if maker != client.number || client.lookup(client.root(), &text).await.is_ok() {
                    continue;
                }
                if !status.events.iter().any(|event| event.what.contains(&text)) {
                    return Err(format!("{text} was made and is gone, and no client was notified"));
                }
            }
            let root = client.fs.open(&client.cx(), client.root(), OpenHow::DIRECTORY).await;
            let root = root.map_err(client.failed("open the root"))?;
            root.close(&client.cx()).await.map_err(client.failed("close the root"))
        })
    }
}
