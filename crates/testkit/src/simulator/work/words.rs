//! Several clients append to one file, write into it, cut it and read it: some order of
//! what they did explains everything that they saw.

use std::sync::Mutex;

use dray_core::{Buf, BufMut, FileSystem, Fut, OpenHow, SetAttr, Write};

use super::{Work, lock, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::{Client, File};
use crate::simulator::history::{Event, linearizable_from};

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
    state: Mutex<(u64, Vec<Event<Deed>>)>,
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
    fn tick(&self) -> u64 {
        let mut state = lock(&self.state);
        state.0 += 1;
        state.0
    }

    /// Does something; until it is answered it may have happened or not.
    async fn note(
        &self,
        deed: Deed,
        work: impl Future<Output = Result<(), dray_core::Error>>,
    ) -> Result<(), dray_core::Error> {
        let from = self.tick();
        let index = {
            let events = &mut lock(&self.state).1;
            events.push(Event { from, to: u64::MAX, kind: deed, optional: true });
            events.len() - 1
        };
        work.await?;
        let to = self.tick();
        let event = &mut lock(&self.state).1[index];
        (event.to, event.optional) = (to, false);
        Ok(())
    }

    async fn step(&self, client: &Client, file: &File, number: u64) -> Outcome<()> {
        let (cx, word) = (client.cx(), (client.number as u64 + 1) << 32 | number);
        let bytes = Buf::from(&word.to_le_bytes()[..]);
        let done = match pick(8) {
            0..=2 => {
                let how = Write { append: true, ..Write::default() };
                let work = async { file.write(&cx, how, bytes).await.map(drop) };
                self.note(Deed::Append(word), work).await
            }
            3 | 4 => {
                let place = pick(PLACES);
                let work =
                    async { file.write(&cx, Write::at(place * WORD), bytes).await.map(drop) };
                self.note(Deed::Set(place, word), work).await
            }
            5 => {
                let count = pick(PLACES);
                let set = SetAttr { size: Some(count * WORD), ..SetAttr::default() };
                let work = async { file.setattr(&cx, set).await.map(drop) };
                self.note(Deed::Cut(count), work).await
            }
            6 => {
                let how = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
                let opened = Mutex::default();
                let work = async {
                    let file = client.fs.open(&cx, file.id(), how).await?;
                    *lock(&opened) = Some(file);
                    Ok(())
                };
                let done = self.note(Deed::Cut(0), work).await;
                let opened = lock(&opened).take();
                if let Some(opened) = opened {
                    opened.close(&client.cx()).await.map_err(client.failed("close"))?;
                }
                done
            }
            _ => return self.read(client, file).await,
        };
        done.map_err(client.failed("change the words"))
    }

    async fn read(&self, client: &Client, file: &File) -> Outcome<()> {
        let from = self.tick();
        let read = file.read(&client.cx(), 0, BufMut::heap(4096)).await;
        let read = read.map_err(|(error, _)| client.failed("read")(error))?;
        let (words, rest) = read.filled().as_chunks::<8>();
        if !rest.is_empty() {
            return Err(format!("half a word: the file has {} bytes", read.len()));
        }
        let words = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let to = self.tick();
        lock(&self.state).1.push(Event { from, to, kind: Deed::Read(words), optional: false });
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
            let events = &lock(&self.state).1;
            if linearizable_from(Vec::new(), events, |words, deed| apply(words, deed)) {
                return Ok(());
            }
            Err(format!("no order of these explains them: {events:#x?}"))
        })
    }
}
