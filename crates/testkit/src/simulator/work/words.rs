//! Several clients append to one file, write into it, cut it and read it. Some order of their operations must
//! explain all they saw.

use std::time::Duration;

use dray_core::{Buf, BufMut, CreateHow, Errno, Error, FileSystem, Fut, OpenHow, SetAttr, Write};

use super::operation_log::OperationLog;
use super::{LIMIT, Workload, pick, think};
use crate::simulator::client::{SimClient, SimFile, name};
use crate::simulator::{Outcome, World};

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
    operation_log: OperationLog<Deed>,
    /// Clients do not wait for a server that is away: what became of their calls they do not know.
    limited: bool,
}

/// Calls of one client that may fail because the server is away. Each of them may have been carried
/// out or not. What could have happened has to be looked through.
const LATE_MAX: u64 = 3;

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

/// Longest that a client needs to find a server that is back.
const BACK_WITHIN: Duration = Duration::from_secs(5);

impl Words {
    /// With clients that wait for a while only.
    pub(super) fn limited() -> Words {
        Words { limited: true, ..Words::default() }
    }

    /// True if it went well, and false if it came too late, where that may be.
    fn in_time(&self, client: &SimClient, done: Result<(), Error>) -> Outcome<bool> {
        match done {
            Ok(()) => Ok(true),
            Err(error) if self.limited && error.errno() == Errno::EHOSTDOWN => Ok(false),
            Err(error) => Err(client.failed("change or read the words")(error)),
        }
    }

    async fn step(&self, client: &SimClient, file: &SimFile, number: u64) -> Outcome<bool> {
        let (cx, word) = (client.cx(), (client.number as u64 + 1) << 32 | number);
        let bytes = Buf::from(&word.to_le_bytes()[..]);
        let done = match pick(8) {
            0..=2 => {
                let how = Write { append: true, ..Write::default() };
                let work = async { file.write(&cx, how, bytes).await.map(drop) };
                self.operation_log.note([Deed::Append(word)], work, |_, _| {}).await
            }
            3 | 4 => {
                let place = pick(PLACES);
                let work =
                    async { file.write(&cx, Write::at(place * WORD), bytes).await.map(drop) };
                self.operation_log.note([Deed::Set(place, word)], work, |_, _| {}).await
            }
            5 => {
                let count = pick(PLACES);
                let set = SetAttr { size: Some(count * WORD), ..SetAttr::default() };
                let work = async { file.setattr(&cx, set).await.map(drop) };
                self.operation_log.note([Deed::Cut(count)], work, |_, _| {}).await
            }
            6 => {
                let how = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
                let work = client.fs.open(&cx, file.id(), how);
                match self.operation_log.note([Deed::Cut(0)], work, |_, _| {}).await {
                    Ok(opened) => opened.close(&client.cx()).await,
                    Err(error) => Err(error),
                }
            }
            _ => return self.read(client, file).await,
        };
        self.in_time(client, done)
    }

    /// False if it came too late.
    async fn read(&self, client: &SimClient, file: &SimFile) -> Outcome<bool> {
        let from = self.operation_log.tick();
        let read = file.read(&client.cx(), 0, BufMut::heap(4096)).await;
        let read = match read {
            Ok(read) => read,
            Err((error, _)) => return self.in_time(client, Err(error)),
        };
        let (words, rest) = read.filled().as_chunks::<8>();
        if !rest.is_empty() {
            return Err(format!("half a word: the file has {} bytes", read.len()));
        }
        let words = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        self.operation_log.found(from, Deed::Read(words));
        Ok(true)
    }

    /// Opens the file; a caller that does not wait tries again.
    async fn open(&self, client: &SimClient) -> Outcome<SimFile> {
        let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: false };
        loop {
            match client.fs.create(&client.cx(), client.root(), &name("words"), how).await {
                Ok((_, file)) => return Ok(file),
                Err(error) => _ = self.in_time(client, Err(error))?,
            }
            think().await; // while the server is away it fails at once
        }
    }

    /// A client that is cut off gets an error in time, and goes on when it is not.
    async fn away(&self, world: &World) -> Outcome<()> {
        let client = &world.clients[0];
        let host = format!("client{}", client.number);
        let file = self.open(client).await?;
        world.network.partition(&host, true);
        let begin = dray_rt::now();
        let read = file.read(&client.cx(), 0, BufMut::heap(8)).await;
        let took = begin.elapsed();
        let reported = read.is_err_and(|(error, _)| error.errno() == Errno::EHOSTDOWN);
        world.network.partition(&host, false);
        if !reported || took > LIMIT * 2 {
            return Err(format!("without a server a read ends after {took:?}, late: {reported}"));
        }
        let begin = dray_rt::now();
        while !self.read(client, &file).await? {
            if begin.elapsed() > BACK_WITHIN {
                return Err("the server is back, and the client is not".into());
            }
            think().await;
        }
        file.close(&client.cx()).await.map_err(client.failed("close"))
    }
}

impl Workload for Words {
    fn name(&self) -> &'static str {
        if self.limited { "limited" } else { "words" }
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn prepare<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let closed = self.open(client).await?.close(&client.cx()).await;
            self.in_time(client, closed).map(drop)
        })
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let (file, mut late) = (self.open(client).await?, 0);
            for number in 0..OPERATIONS {
                late += u64::from(!self.step(client, &file, number).await?);
                if late >= LATE_MAX {
                    break;
                }
                think().await;
            }
            let closed = file.close(&client.cx()).await;
            self.in_time(client, closed).map(drop)
        })
    }

    fn crashed(&self, _: usize) {}

    fn verify<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            let file = self.open(client).await?;
            while !self.read(client, &file).await? {
                think().await;
            }
            let closed = file.close(&client.cx()).await;
            self.in_time(client, closed)?;
            self.operation_log.is_explained(Vec::new(), |words, deed| apply(words, deed))
        })
    }

    fn settled<'a>(&'a self, world: &'a mut World) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            match self.limited {
                true => self.away(world).await,
                false => Ok(()),
            }
        })
    }
}
