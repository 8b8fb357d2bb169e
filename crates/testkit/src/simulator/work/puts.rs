//! Several clients put whole files under the same names, remove and read them: some order
//! of what they did explains everything that they saw.
//!
//! A put makes the file or cuts it, and then fills it. In between the file is empty, for
//! a client that reads it; nobody may see a part of what is put.

use dray_core::{Buf, BufMut, Errno, Error, FileSystem, Fut, OpenHow, RemoveKind};

use super::operation_log::OperationLog;
use super::{Workload, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::{SimClient, name};

/// Operations of each client.
const OPERATIONS: u64 = 24;
/// Names that are put and removed.
const NAMES: usize = 3;
/// Longest content, words of 8 bytes: some chunks of the disk.
const WORDS_MAX: u64 = 3000;

#[derive(Clone, Debug)]
enum Deed {
    /// The file was made, and is empty.
    Begin(u64),
    Fill(u64),
    Remove,
    Found(Found),
}

/// What a name was found to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Found {
    Nothing,
    Empty,
    Content(u64),
}

/// A name: what it holds, and which put has begun and not filled it.
type NameRecord = (Found, Option<u64>);

fn apply((found, begun): &NameRecord, deed: &Deed) -> Option<NameRecord> {
    match deed {
        Deed::Begin(content) => Some((Found::Empty, Some(*content))),
        Deed::Fill(content) => {
            (*begun == Some(*content)).then_some((Found::Content(*content), None))
        }
        // A put whose file has been removed fills what nobody finds.
        Deed::Remove => (*found != Found::Nothing).then_some((Found::Nothing, None)),
        Deed::Found(seen) => (seen == found).then_some((*found, *begun)),
    }
}

#[derive(Default)]
pub(super) struct Puts {
    of_names: [OperationLog<Deed>; NAMES],
}

/// The lower half of a content's number is its length in words.
fn content(client: &SimClient, number: u64) -> u64 {
    (client.number as u64 + 1) << 48 | number << 32 | (1 + pick(WORDS_MAX))
}

impl Puts {
    async fn put(&self, client: &SimClient, of: usize, content: u64) -> Result<(), Error> {
        let words = content & u64::from(u32::MAX);
        let bytes = content.to_le_bytes().repeat(words as usize);
        let (cx, named) = (client.cx(), name(&format!("put{of}")));
        let put = client.fs.put(&cx, client.root(), &named, 0o644, Buf::from(&bytes[..]));
        let deeds = [Deed::Begin(content), Deed::Fill(content)];
        self.of_names[of].note(deeds, put, |_, _| {}).await.map(drop)
    }

    async fn remove(&self, client: &SimClient, of: usize) -> Result<(), Error> {
        let (cx, named) = (client.cx(), name(&format!("put{of}")));
        let removed = client.fs.remove(&cx, client.root(), &named, RemoveKind::File);
        let removed = async {
            match removed.await {
                Err(error) if error.errno() == Errno::ENOENT => Ok(false),
                removed => removed.map(|()| true),
            }
        };
        let learn = |deed: &mut Deed, removed: &bool| {
            if !removed {
                *deed = Deed::Found(Found::Nothing);
            }
        };
        self.of_names[of].note([Deed::Remove], removed, learn).await.map(drop)
    }

    async fn look(&self, client: &SimClient, of: usize) -> Outcome<()> {
        let from = self.of_names[of].tick();
        let found = match read(client, &format!("put{of}")).await {
            Ok(bytes) => parse(&bytes)?,
            Err(error) if error.errno() == Errno::ENOENT => Found::Nothing,
            Err(error) => return Err(client.failed("read what was put")(error)),
        };
        self.of_names[of].found(from, Deed::Found(found));
        Ok(())
    }
}

async fn read(client: &SimClient, text: &str) -> Result<Vec<u8>, Error> {
    let found = client.lookup(client.root(), text).await?;
    let file = match client.fs.open(&client.cx(), found.id, OpenHow::READ).await {
        // Removed in between.
        Err(error) if error.errno() == Errno::ESTALE => return Err(Errno::ENOENT.into()),
        file => file?,
    };
    let read = file.read(&client.cx(), 0, BufMut::heap(8 * WORDS_MAX as usize + 8)).await;
    file.close(&client.cx()).await?;
    Ok(read.map_err(|(error, _)| error)?.filled().to_vec())
}

fn parse(bytes: &[u8]) -> Outcome<Found> {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
    let count = words.len() as u64;
    let Some(first) = words.next().filter(|_| rest.is_empty()) else {
        return match bytes.is_empty() {
            true => Ok(Found::Empty),
            false => Err(format!("{} bytes were put by nobody", bytes.len())),
        };
    };
    match words.all(|word| word == first) && count == first & u64::from(u32::MAX) {
        true => Ok(Found::Content(first)),
        false => Err(format!("a part of what was put: {count} words, the first is {first:x}")),
    }
}

impl Workload for Puts {
    fn name(&self) -> &'static str {
        "puts"
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            for number in 0..OPERATIONS {
                let of = pick(NAMES as u64) as usize;
                let failed = client.failed("put or remove");
                match pick(5) {
                    0 | 1 => {
                        self.put(client, of, content(client, number)).await.map_err(failed)?;
                    }
                    2 => self.remove(client, of).await.map_err(failed)?,
                    _ => self.look(client, of).await?,
                }
                think().await;
            }
            Ok(())
        })
    }

    fn crashed(&self, _: usize) {}

    fn verify<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            for (of, operation_log) in self.of_names.iter().enumerate() {
                self.look(client, of).await?;
                operation_log.is_explained((Found::Nothing, None), apply)?;
            }
            Ok(())
        })
    }
}
