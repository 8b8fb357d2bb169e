//! Clients write and read a few files under write leases, and keep what they write for a while. Some order must explain
//! what all of them read, and no size is shown that is older than an answered write.
//!
//! A client may be cut off for longer than its lease. Then its writes may be made later, as long as nobody else has
//! changed the file. Or an error says that they are lost. The client's status counts both, and such writes are judged so.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use dray_core::{
    Buf, BufMut, CreateHow, Errno, Error, FileSystem, Fut, OpenHow, SessionControl, Write,
};
use dray_rt::sleep;

use super::{Workload, lock, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::{SimClient, SimFile, name};
use crate::simulator::history::{EVENTS_MAX, HistoryEvent, judge, linearizable_from};
use crate::simulator::machine::LEASE_TERM;

const FILES: [&str; 2] = ["one", "other"];
/// Operations of all clients together: as many as a history may have, if all are about one file.
const OPERATIONS: u64 = EVENTS_MAX as u64 - 2;
/// The value that stands at the beginning of a file, bytes.
const VALUE_BYTES: usize = 8;
const PAGE_BYTES: usize = 64 << 10;

/// What was done to the value of a file.
#[derive(Clone, Copy, Debug)]
enum KeptOp {
    /// A read found it.
    Read(u64),
    /// A write set it.
    Write(u64),
    /// The same of a write that came later than its answer: only if the value before was this one.
    Late { upon: u64, value: u64 },
}

/// A write that was answered, and may be kept.
#[derive(Clone, Copy, Debug)]
struct PendingWrite {
    file: usize,
    event: usize,
    upon: u64,
    value: u64,
}

#[derive(Default)]
struct FileHistory {
    events: Vec<HistoryEvent<KeptOp>>,
    /// Of each write: its event, and the size that the file has behind it.
    sizes: Vec<(usize, u64)>,
    /// When a size was asked for, and what it was.
    looks: Vec<(u64, u64)>,
}

#[derive(Default)]
struct State {
    ticks: u64,
    writes: u64,
    files: [FileHistory; FILES.len()],
    /// Of each client that is gone: nothing that it hears counts any more.
    gone: Vec<usize>,
    pending: Vec<(usize, PendingWrite)>,
}

#[derive(Default)]
pub(super) struct Kept {
    clients: u64,
    state: Mutex<State>,
}

/// A file that a client has open, and the value that it has seen last.
struct OpenValue {
    file: SimFile,
    seen: Option<u64>,
}

impl State {
    fn tick(&mut self) -> u64 {
        self.ticks += 1;
        self.ticks
    }

    /// The pending writes of a client may have been made by now, later than they were answered. Or they may be lost.
    fn are_late(&mut self, client: usize, lost: bool) {
        let now = self.tick();
        for (of, PendingWrite { file, event, upon, value }) in &self.pending {
            if *of != client {
                continue;
            }
            let event = &mut self.files[*file].events[*event];
            event.kind = KeptOp::Late { upon: *upon, value: *value };
            event.optional |= lost;
            event.to = if event.optional { u64::MAX } else { now };
        }
    }
}

impl Kept {
    pub(super) fn new(clients: usize) -> Kept {
        Kept { clients: clients as u64, state: Mutex::default() }
    }

    /// What the status of the client says: how often it wrote late, and how often it lost something.
    fn mishaps(client: &SimClient) -> (u64, u64) {
        let status = client.fs.session().status().kept_writes;
        status.map_or((0, 0), |status| (status.late, status.lost))
    }

    /// How many writes the client has kept.
    fn kept(client: &SimClient) -> u64 {
        client.fs.session().status().kept_writes.map_or(0, |status| status.writes)
    }

    async fn open(&self, client: &SimClient, index: usize) -> Outcome<OpenValue> {
        let open = OpenHow { with_attr: true, ..OpenHow::new(libc::O_RDWR) };
        let file = match pick(2) {
            0 => {
                let entry = client.lookup(client.root(), FILES[index]).await;
                let id = entry.map_err(client.failed("look up"))?.id;
                client.fs.open(&client.cx(), id, open).await.map_err(client.failed("open"))?
            }
            _ => {
                let how = CreateHow { open, mode: 0o666, exclusive: false };
                let named = name(FILES[index]);
                let made = client.fs.create(&client.cx(), client.root(), &named, how).await;
                made.map_err(client.failed("create"))?.1
            }
        };
        let mut open = OpenValue { file, seen: None };
        self.read(client, index, &mut open).await?;
        Ok(open)
    }

    async fn read(&self, client: &SimClient, index: usize, open: &mut OpenValue) -> Outcome<()> {
        let from = lock(&self.state).tick();
        let read = open.file.read(&client.cx(), 0, BufMut::heap(VALUE_BYTES)).await;
        let read = read.map_err(|(error, _)| client.failed("read")(error))?;
        let mut bytes = [0; VALUE_BYTES];
        bytes[..read.len()].copy_from_slice(read.filled());
        let value = u64::from_le_bytes(bytes);
        open.seen = Some(value);
        let state = &mut *lock(&self.state);
        let (to, kind) = (state.tick(), KeptOp::Read(value));
        state.files[index].events.push(HistoryEvent { from, to, kind, optional: false });
        Ok(())
    }

    /// Writes a value that no other write has, and makes the file longer.
    async fn write(
        &self,
        client: &SimClient,
        index: usize,
        open: &mut OpenValue,
    ) -> Result<(), Error> {
        let (event, bytes, value) = {
            let state = &mut *lock(&self.state);
            state.writes += 1;
            let (value, from) = (state.writes, state.tick());
            let mut bytes = value.to_le_bytes().to_vec();
            bytes.resize(VALUE_BYTES + value as usize, 0xaa);
            let history = &mut state.files[index];
            let (to, kind) = (u64::MAX, KeptOp::Write(value));
            history.events.push(HistoryEvent { from, to, kind, optional: true });
            history.sizes.push((history.events.len() - 1, bytes.len() as u64));
            (history.events.len() - 1, bytes, value)
        };
        let kept_before = Kept::kept(client);
        open.file.write(&client.cx(), Write::at(0), Buf::from(&bytes[..])).await?;
        let state = &mut *lock(&self.state);
        let to = state.tick();
        if !state.gone.contains(&client.number) {
            let known = &mut state.files[index].events[event];
            (known.to, known.optional) = (to, false);
            // Nobody else has changed the file since it was opened, and read.
            if Kept::kept(client) != kept_before {
                let upon = open.seen.unwrap_or(0);
                let pending = PendingWrite { file: index, event, upon, value };
                state.pending.push((client.number, pending));
            }
        }
        open.seen = Some(value);
        Ok(())
    }

    /// Looks at the size of a file in one way or another.
    async fn look(&self, client: &SimClient, index: usize) -> Outcome<()> {
        let from = lock(&self.state).tick();
        let cx = client.cx();
        let by_name = || async {
            let entry = client.lookup(client.root(), FILES[index]).await;
            entry.map_err(client.failed("look up"))
        };
        let size = match pick(3) {
            0 => by_name().await?.attr.size,
            1 => {
                let id = by_name().await?.id;
                client.fs.getattr(&cx, id).await.map_err(client.failed("getattr"))?.size
            }
            _ => {
                let failed = client.failed("list");
                let dir = client.fs.open(&cx, client.root(), OpenHow::DIRECTORY).await;
                let dir = dir.map_err(&failed)?;
                let page = dir.readdir(&cx, 0, PAGE_BYTES, true).await.map_err(&failed)?;
                dir.close(&cx).await.map_err(&failed)?;
                let mut found = page.iter().filter(|(name, _)| *name == FILES[index].as_bytes());
                match found.next().and_then(|(_, entry)| entry.attr) {
                    Some(attr) => attr.size,
                    None => by_name().await?.attr.size,
                }
            }
        };
        lock(&self.state).files[index].looks.push((from, size));
        Ok(())
    }

    /// Whether everything that was written went well; if not, it was said that something is lost.
    fn is_well(client: &SimClient, what: &str, done: Result<(), Error>) -> Outcome<bool> {
        match done {
            Ok(()) => Ok(true),
            Err(error) if error.errno() == Errno::EIO => Ok(false),
            Err(error) => Err(client.failed(what)(error)),
        }
    }

    /// One step. Answers whether what was written to the file before is known to be at the server.
    async fn step(
        &self,
        client: &SimClient,
        index: usize,
        open: &mut Option<OpenValue>,
    ) -> Outcome<bool> {
        let Some(value) = open else {
            *open = Some(self.open(client, index).await?);
            return Ok(false);
        };
        match pick(8) {
            0 | 1 => self.read(client, index, value).await?,
            2 => self.look(client, index).await?,
            3 => {
                let synced = value.file.sync(&client.cx(), true).await;
                let is_well = Kept::is_well(client, "sync", synced)?;
                if !is_well {
                    value.seen = None;
                }
                return Ok(is_well);
            }
            4 => {
                let closed = value.file.close(&client.cx()).await;
                *open = None;
                return Kept::is_well(client, "close", closed);
            }
            _ => {
                // Upon what it is written is known by then.
                if value.seen.is_none() {
                    self.read(client, index, value).await?;
                }
                let written = self.write(client, index, value).await;
                if !Kept::is_well(client, "write", written)? {
                    value.seen = None;
                }
            }
        }
        Ok(false)
    }

    /// Notes what the status of the client says by now.
    fn note_mishaps(&self, client: &SimClient, known: &mut (u64, u64)) {
        let now = Kept::mishaps(client);
        if now != *known {
            lock(&self.state).are_late(client.number, now.1 != known.1);
            *known = now;
        }
    }

    fn hear_recalls(client: &SimClient) {
        client.fs.hear_recalls_by(Arc::new(|_, done| {
            let late = match pick(32) {
                0 => LEASE_TERM * 3,
                1..8 => Duration::from_micros(pick(50_000)),
                _ => return drop(done),
            };
            dray_rt::spawn(async move {
                sleep(late).await;
                drop(done);
            });
        }));
    }
}

/// The value behind an operation; none if that could not have happened.
fn behind(value: &u64, kind: &KeptOp) -> Option<u64> {
    match *kind {
        KeptOp::Read(found) => (found == *value).then_some(found),
        KeptOp::Write(new) => Some(new),
        KeptOp::Late { upon, value: new } => (upon == *value).then_some(new),
    }
}

impl Workload for Kept {
    fn name(&self) -> &'static str {
        "kept"
    }

    fn bears_crashes(&self) -> bool {
        true
    }

    fn prepare<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            for text in FILES {
                let file = client.open(client.root(), text, libc::O_RDWR).await?;
                file.close(&client.cx()).await.map_err(client.failed("close"))?;
            }
            Ok(())
        })
    }

    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            Kept::hear_recalls(client);
            let mut open: [Option<OpenValue>; FILES.len()] = [None, None];
            let mut known = Kept::mishaps(client);
            for _ in 0..OPERATIONS / self.clients / 2 {
                let index = pick(FILES.len() as u64) as usize;
                let is_there = self.step(client, index, &mut open[index]).await?;
                self.note_mishaps(client, &mut known);
                if is_there {
                    let is_other = |(of, write): &(usize, PendingWrite)| {
                        *of != client.number || write.file != index
                    };
                    lock(&self.state).pending.retain(is_other);
                }
                match pick(16) {
                    0 => {
                        sleep(Duration::from_micros(pick(2 * LEASE_TERM.as_micros() as u64))).await
                    }
                    _ => think().await,
                }
            }
            for value in open.into_iter().flatten() {
                let closed = value.file.close(&client.cx()).await;
                Kept::is_well(client, "close", closed)?;
            }
            self.note_mishaps(client, &mut known);
            lock(&self.state).pending.retain(|(of, _)| *of != client.number);
            Ok(())
        })
    }

    fn crashed(&self, number: usize) {
        let state = &mut *lock(&self.state);
        state.are_late(number, true);
        state.gone.push(number);
    }

    fn verify<'a>(&'a self, _: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            for history in &lock(&self.state).files {
                let FileHistory { events, sizes, looks } = history;
                for (at, size) in looks {
                    let is_before = |event: &HistoryEvent<KeptOp>| {
                        event.to < *at && matches!(event.kind, KeptOp::Write(_))
                    };
                    let longer =
                        |(event, long): &&(usize, u64)| *long > *size && is_before(&events[*event]);
                    if let Some(longer) = sizes.iter().find(longer) {
                        return Err(format!("a size is older than a write: {size} {longer:?}"));
                    }
                }
                judge(linearizable_from(0, events, behind), events)?;
            }
            Ok(())
        })
    }
}
