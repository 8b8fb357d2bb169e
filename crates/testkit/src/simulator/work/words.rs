//! Several clients append to one file, write into it, cut it and read it: some order of
//! what they did explains everything that they saw.

use dray_core::{Buf, BufMut, FileSystem, Fut, OpenHow, SetAttr, Write};

use super::noted::Noted;
use super::{Work, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::{Client, File};

/// Operations of each client.
const OPERATIONS: u64 = 24;
/// Words are written at one of the first so many places.
const PLACES: u64 = 6;
/// Bytes of a word.
const WORD: u64 = 8;

/// What was done to the file, which is a list of words.
#[derive(Clone, Debug)]
enum Deed {
    Append(u64),
    Set(u64, u64),
    Cut(u64),
    Read(Vec<u64>),
}

#[derive(Default)]
pub(super) struct Words {
    noted: Noted<Deed>,
}

fn apply(words: &[u64], deed: &Deed) -> Option<Vec<u64>> {
    let mut words = words.to_vec();
    match deed {
        Deed::Append(word) => words.push(*word),
        Deed::Set(place, word) => {
            let place = *place as usize;
            words.resize(words.len().max(place + 1), 0);
            words[place] = *word;
        }
        Deed::Cut(count) => words.resize(*count as usize, 0),
        Deed::Read(found) => return (*found == words).then_some(words),
    }
    Some(words)
}

impl Words {
    async fn step(&self, client: &Client, file: &File, number: u64) -> Outcome<()> {
        let (cx, word) = (client.cx(), (client.number as u64 + 1) << 32 | number);
        let bytes = Buf::from(&word.to_le_bytes()[..]);
        let done = match pick(8) {
            0..=2 => {
                let how = Write { append: true, ..Write::default() };
                let work = async { file.write(&cx, how, bytes).await.map(drop) };
                self.noted.note([Deed::Append(word)], work, |_, _| {}).await
            }
            3 | 4 => {
                let place = pick(PLACES);
                let work =
                    async { file.write(&cx, Write::at(place * WORD), bytes).await.map(drop) };
                self.noted.note([Deed::Set(place, word)], work, |_, _| {}).await
            }
            5 => {
                let count = pick(PLACES);
                let set = SetAttr { size: Some(count * WORD), ..SetAttr::default() };
                let work = async { file.setattr(&cx, set).await.map(drop) };
                self.noted.note([Deed::Cut(count)], work, |_, _| {}).await
            }
            6 => {
                let how = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
                let work = client.fs.open(&cx, file.id(), how);
                match self.noted.note([Deed::Cut(0)], work, |_, _| {}).await {
                    Ok(opened) => opened.close(&client.cx()).await,
                    Err(error) => Err(error),
                }
            }
            _ => return self.read(client, file).await,
        };
        done.map_err(client.failed("change the words"))
    }

    async fn read(&self, client: &Client, file: &File) -> Outcome<()> {
        let from = self.noted.tick();
        let read = file.read(&client.cx(), 0, BufMut::heap(4096)).await;
        let read = read.map_err(|(error, _)| client.failed("read")(error))?;
        let (words, rest) = read.filled().as_chunks::<8>();
        if !rest.is_empty() {
            return Err(format!("half a word: the file has {} bytes", read.len()));
        }
        let words = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        self.noted.found(from, Deed::Read(words));
        Ok(())
    }
}

impl Work for Words {
    fn name(&self) -> &'static str {
        "words"
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn prepare<'a>(&'a self, client: &'a Client) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let file = client.open(client.root(), "words", libc::O_RDWR).await?;
            file.close(&client.cx()).await.map_err(client.failed("close"))
        })
    }

    fn run<'a>(&'a self, client: &'a Client) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let file = client.open(client.root(), "words", libc::O_RDWR).await?;
            for number in 0..OPERATIONS {
                self.step(client, &file, number).await?;
                think().await;
            }
            file.close(&client.cx()).await.map_err(client.failed("close"))
        })
    }

    fn crashed(&self, _: usize) {}

    fn verify<'a>(&'a self, client: &'a Client) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let file = client.open(client.root(), "words", libc::O_RDWR).await?;
            self.read(client, &file).await?;
            file.close(&client.cx()).await.map_err(client.failed("close"))?;
            self.noted.is_explained(Vec::new(), |words, deed| apply(words, deed))
        })
    }
}
