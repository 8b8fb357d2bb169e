//! Several clients copy words within and between two files, and set and read them. Some order of their
//! operations must explain all they saw.

use dray_core::{Buf, BufMut, Fut, Write};

use super::operation_log::OperationLog;
use super::{Workload, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::{SimClient, SimFile};

/// Operations of each client.
const OPERATIONS: u64 = 24;
/// Words are at one of the first so many places.
const PLACES: u64 = 4;
/// Bytes of a word.
const WORD: u64 = 8;

/// The two files, which are lists of words.
type Files = [Vec<u64>; 2];

#[derive(Clone, Copy, Debug)]
struct Place {
    file: usize,
    word: u64,
}

#[derive(Clone, Debug)]
enum Deed {
    Set(Place, u64),
    /// With how many bytes were copied, once that is known.
    Copy(Place, Place, Option<u64>),
    Read(usize, Vec<u64>),
}

fn drawn() -> Place {
    Place { file: pick(2) as usize, word: pick(PLACES) }
}

fn set(files: &Files, to: Place, word: u64) -> Files {
    let mut files = files.clone();
    let words = &mut files[to.file];
    words.resize(words.len().max(to.word as usize + 1), 0);
    words[to.word as usize] = word;
    files
}

fn apply(files: &Files, deed: &Deed) -> Option<Files> {
    match deed {
        Deed::Set(to, word) => Some(set(files, *to, *word)),
        Deed::Copy(from, to, copied) => {
            let word = files[from.file].get(from.word as usize);
            let bytes = if word.is_some() { WORD } else { 0 };
            let after = word.map_or_else(|| files.clone(), |word| set(files, *to, *word));
            copied.is_none_or(|copied| copied == bytes).then_some(after)
        }
        Deed::Read(file, found) => (*found == files[*file]).then(|| files.clone()),
    }
}

#[derive(Default)]
pub(super) struct CopyWorkload {
    operation_log: OperationLog<Deed>,
}

impl CopyWorkload {
    async fn step(&self, client: &SimClient, files: &[SimFile; 2], number: u64) -> Outcome<()> {
        let cx = client.cx();
        let (from, to) = (drawn(), drawn());
        let done = match pick(4) {
            0 => {
                let word = (client.number as u64 + 1) << 32 | number;
                let bytes = Buf::from(&word.to_le_bytes()[..]);
                let written = files[to.file].write(&cx, Write::at(to.word * WORD), bytes);
                self.operation_log.note([Deed::Set(to, word)], written, |_, _| {}).await.map(drop)
            }
            1 | 2 if from.file != to.file || from.word != to.word => {
                let (source, target) = (&files[from.file], &*files[to.file]);
                let copied = source.copy_range(&cx, from.word * WORD, target, to.word * WORD, WORD);
                let learn = |deed: &mut Deed, bytes: &u64| {
                    *deed = Deed::Copy(from, to, Some(*bytes));
                };
                self.operation_log.note([Deed::Copy(from, to, None)], copied, learn).await.map(drop)
            }
            _ => return self.read(client, files, to.file).await,
        };
        done.map_err(client.failed("set or copy a word"))
    }

    async fn read(&self, client: &SimClient, files: &[SimFile; 2], file: usize) -> Outcome<()> {
        let from = self.operation_log.tick();
        let read = files[file].read(&client.cx(), 0, BufMut::heap(4096)).await;
        let read = read.map_err(|(error, _)| client.failed("read")(error))?;
        let (words, rest) = read.filled().as_chunks::<8>();
        if !rest.is_empty() {
            return Err(format!("half a word: the file has {} bytes", read.len()));
        }
        let words = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        self.operation_log.found(from, Deed::Read(file, words));
        Ok(())
    }
}

async fn open(client: &SimClient) -> Outcome<[SimFile; 2]> {
    let [left, right] =
        ["left", "right"].map(|text| client.open(client.root(), text, libc::O_RDWR));
    Ok([left.await?, right.await?])
}

async fn close(client: &SimClient, files: [SimFile; 2]) -> Outcome<()> {
    for file in files {
        file.close(&client.cx()).await.map_err(client.failed("close"))?;
    }
    Ok(())
}

impl Workload for CopyWorkload {
    fn name(&self) -> &'static str {
        "copies"
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn prepare<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move { close(client, open(client).await?).await })
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let files = open(client).await?;
            for number in 0..OPERATIONS {
                self.step(client, &files, number).await?;
                think().await;
            }
            close(client, files).await
        })
    }

    fn crashed(&self, _: usize) {}

    fn verify<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let files = open(client).await?;
            self.read(client, &files, 0).await?;
            self.read(client, &files, 1).await?;
            close(client, files).await?;
            self.operation_log.is_explained(Files::default(), apply)
        })
    }
}
