//! Clients write and read a few files under write leases, and keep what they write for a while. Some order must explain
//! what all of them read, and no size is shown that is older than an answered write.
//!
//! A client may be cut off for longer than its lease. Then its writes may be made later, as long as nobody else has
//! changed the file. Or an error says that they are lost. The client's status counts both, and such writes are judged so.
//!
//! A client with a log on its disk may go down and come back. What was synced is made then, as long as nobody else has
//! changed the file, or its data are kept aside. If only the daemon has died, that holds for all writes.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use dray_core::{
    Buf, BufMut, CreateHow, Errno, Error, FileSystem, Fut, OpenHow, RequestId, SessionControl,
    Write,
};
use dray_rt::sleep;

use super::kept_history::{FileHistory, Handle, KeptOp, KeptState, KernelOpening, PendingWrite};
use super::{Workload, lock, pick, think};
use crate::simulator::Outcome;
use crate::simulator::client::{SimClient, SimFile, name};
use crate::simulator::client_machine::ClientCrash;
use crate::simulator::history::{EVENTS_MAX, HistoryEvent};
use crate::simulator::machine::LEASE_TERM;

pub(super) const FILES: [&str; 2] = ["one", "other"];
/// Operations of all clients together: as many as a history may have, if all are about one file.
const OPERATIONS: u64 = EVENTS_MAX as u64 - 2;
/// The value that stands at the beginning of a file, bytes.
const VALUE_BYTES: usize = 8;
const PAGE_BYTES: usize = 64 << 10;
/// The number of a step that writes.
const WRITE: u64 = 7;

#[derive(Default)]
pub(super) struct Kept {
    clients: u64,
    rounds: u64,
    state: Mutex<KeptState>,
}

/// A file that a client has open, and the value that it has seen last.
struct OpenValue {
    file: SimFile,
    request: RequestId,
    seen: Option<u64>,
    /// The machine has a log, and the file was synced. The first sync asks the server, and later ones may not.
    is_synced: bool,
}

impl KernelOpening {
    async fn ask(self, client: &SimClient) -> Outcome<SimFile> {
        let (open, cx) = (self.how, client.cx_of(self.request));
        match self.id {
            Some(id) => client.fs.open(&cx, id, open).await.map_err(client.failed("open")),
            None => {
                let how = CreateHow { open, mode: 0o666, exclusive: false };
                let named = name(FILES[self.index]);
                let made = client.fs.create(&cx, client.root(), &named, how).await;
                Ok(made.map_err(client.failed("create"))?.1)
            }
        }
    }
}

impl Kept {
    pub(super) fn new(clients: usize, rounds: u64) -> Kept {
        Kept { clients: clients as u64, rounds, state: Mutex::default() }
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
        let entry = match pick(2) {
            0 => {
                let entry = client.lookup(client.root(), FILES[index]).await;
                Some(entry.map_err(client.failed("look up"))?.id)
            }
            _ => None,
        };
        let how = OpenHow { with_attr: true, ..OpenHow::new(libc::O_RDWR) };
        let opening = KernelOpening { request: client.next_request(), index, id: entry, how };
        let mut open = self.ask_to_open(client, opening).await?;
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
            state.file_of.insert(value, index);
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
                let (file, is_synced, is_down) = (index, false, false);
                let pending = PendingWrite { file, event, upon, value, is_synced, is_down };
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
                let (id, how) = (Some(client.root()), OpenHow::DIRECTORY);
                let opening = KernelOpening { request: client.next_request(), index, id, how };
                let dir = self.ask_to_open(client, opening).await?;
                let page = dir.file.readdir(&cx, 0, PAGE_BYTES, true).await.map_err(&failed)?;
                self.close(client, dir).await?;
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

    /// Which file is next. A client with a log mostly works on one: what others use as well is not kept.
    fn draw_file(client: &SimClient) -> usize {
        match client.machine.is_some() && pick(4) > 0 {
            true => client.number % FILES.len(),
            false => pick(FILES.len() as u64) as usize,
        }
    }

    async fn sync(client: &SimClient, open: &mut OpenValue) -> Outcome<bool> {
        let synced = open.file.sync(&client.cx(), true).await;
        let is_well = Kept::is_well(client, "sync", synced)?;
        if !is_well {
            open.seen = None;
        }
        open.is_synced = is_well && client.machine.is_some();
        Ok(is_well)
    }

    /// One step. Answers whether what was written to the file before is known to be at the server, or on the disk here.
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
        // What is written and synced once more is in the log alone.
        let again = value.is_synced && pick(2) == 0;
        match if again { WRITE } else { pick(8) } {
            0 | 1 => self.read(client, index, value).await?,
            2 => self.look(client, index).await?,
            3 => return Kept::sync(client, value).await,
            4 => {
                let closing = open.take().expect("it is open");
                let is_well = self.close(client, closing).await?;
                // With a log a close waits for no media.
                return Ok(is_well && client.machine.is_none());
            }
            _ => {
                // Upon what it is written is known by then.
                if value.seen.is_none() {
                    self.read(client, index, value).await?;
                }
                let written = self.write(client, index, value).await;
                if !Kept::is_well(client, "write", written)? {
                    value.seen = None;
                } else if client.machine.is_some() && pick(2) == 0 {
                    return Kept::sync(client, value).await;
                }
            }
        }
        Ok(false)
    }

    /// Notes what the status of the client says by now.
    fn note_mishaps(&self, client: &SimClient) {
        let now = Kept::mishaps(client);
        let known = lock(&self.state).mishaps.insert(client.number, now).unwrap_or_default();
        let Some(machine) = &client.machine else {
            if now != known {
                lock(&self.state).are_late(client.number, true, |_| now.1 != known.1);
            }
            return;
        };
        let is_sent = Kept::kept_bytes(client) == 0;
        let state = &mut *lock(&self.state);
        let is_own = |(of, _): &(usize, PendingWrite)| *of == client.number;
        let was_down = state.pending.iter().any(|write| is_own(write) && write.1.is_down);
        if now != known || is_sent && was_down {
            let aside = machine.kept_aside();
            let pending = state.pending.iter().map(|(_, write)| write);
            let lost = pending.filter(|write| state.is_aside(&aside, write));
            let lost: Vec<_> = lost.map(|write| write.value).collect();
            state.are_late(client.number, is_sent, |write| lost.contains(&write.value));
        }
        if is_sent {
            state.pending.retain(|write| !is_own(write));
        }
    }

    /// What the client wrote to a file is at the server, or on its disk.
    fn are_synced(&self, client: &SimClient, index: usize) {
        let state = &mut *lock(&self.state);
        let is_meant = |of: usize, write: &PendingWrite| of == client.number && write.file == index;
        if client.machine.is_none() {
            return state.pending.retain(|(of, write)| !is_meant(*of, write));
        }
        let pending = state.pending.iter_mut().filter(|(of, write)| is_meant(*of, write));
        pending.for_each(|(_, write)| write.is_synced = true);
    }

    /// Bytes that the client keeps.
    fn kept_bytes(client: &SimClient) -> u64 {
        client.fs.session().status().kept_writes.map_or(0, |status| status.bytes)
    }

    async fn ask_to_open(&self, client: &SimClient, opening: KernelOpening) -> Outcome<OpenValue> {
        lock(&self.state).opening.insert(client.number, opening);
        let file = opening.ask(client).await?;
        let KernelOpening { request, how, .. } = opening;
        let mut state = lock(&self.state);
        state.opening.remove(&client.number);
        state.handles.push(Handle { client: client.number, request, how, id: file.id() });
        Ok(OpenValue { file, request, seen: None, is_synced: false })
    }

    /// A daemon has died: the kernel asks again for what had no answer, and programs close what they have open.
    async fn close_inherited(&self, client: &SimClient) -> Outcome<()> {
        let (unanswered, handles) = {
            let state = lock(&self.state);
            let own = state.handles.iter().filter(|handle| handle.client == client.number);
            (state.opening.get(&client.number).copied(), own.copied().collect::<Vec<_>>())
        };
        let attach = |Handle { id, how, request, .. }: Handle| {
            let file = client.fs.attach(id, how, request).ok_or("it cannot be attached")?;
            Ok(OpenValue { file, request, seen: None, is_synced: false })
        };
        let mut files = handles.into_iter().map(attach).collect::<Outcome<Vec<_>>>()?;
        client.fs.attached();
        client.fs.release_inherited();
        if let Some(opening) = unanswered {
            files.push(self.ask_to_open(client, opening).await?);
        }
        for file in files {
            self.close(client, file).await?;
        }
        Ok(())
    }

    /// Closes a file.
    async fn close(&self, client: &SimClient, open: OpenValue) -> Outcome<bool> {
        let closed = open.file.close(&client.cx()).await;
        let is_it =
            |handle: &Handle| handle.client == client.number && handle.request == open.request;
        lock(&self.state).handles.retain(|handle| !is_it(handle));
        Kept::is_well(client, "close", closed)
    }

    /// Reads what is in the files in the end.
    async fn read_all(&self, client: &SimClient) -> Outcome<()> {
        for (index, text) in FILES.iter().enumerate() {
            let file = client.open(client.root(), text, libc::O_RDWR).await?;
            let mut open = OpenValue { file, request: RequestId(0), seen: None, is_synced: false };
            self.read(client, index, &mut open).await?;
            open.file.close(&client.cx()).await.map_err(client.failed("close"))?;
        }
        Ok(())
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
            self.close_inherited(client).await?;
            let mut open: [Option<OpenValue>; FILES.len()] = [None, None];
            for _ in 0..OPERATIONS / self.clients / self.rounds / 2 {
                let index = Kept::draw_file(client);
                let is_there = self.step(client, index, &mut open[index]).await?;
                self.note_mishaps(client);
                if is_there {
                    self.are_synced(client, index);
                }
                // What is synced to a log stays there alone for a while.
                let is_logged = is_there && client.machine.is_some();
                match pick(if is_logged { 2 } else { 16 }) {
                    0 => {
                        sleep(Duration::from_micros(pick(2 * LEASE_TERM.as_micros() as u64))).await
                    }
                    _ => think().await,
                }
            }
            for value in open.into_iter().flatten() {
                self.close(client, value).await?;
            }
            self.note_mishaps(client);
            if client.machine.is_none() {
                lock(&self.state).pending.retain(|(of, _)| *of != client.number);
            }
            Ok(())
        })
    }

    fn crashed(&self, number: usize) {
        let state = &mut *lock(&self.state);
        state.are_late(number, true, |_| true);
        state.gone.push(number);
    }

    fn goes_down(&self, number: usize, how: ClientCrash) {
        let state = &mut *lock(&self.state);
        let is_lost = |write: &PendingWrite| how == ClientCrash::Machine && !write.is_synced;
        let own = state.pending.iter_mut().filter(|(of, _)| *of == number);
        own.for_each(|(_, write)| write.is_down = true);
        state.are_late(number, false, is_lost);
        if how == ClientCrash::Machine {
            state.opening.remove(&number);
            state.handles.retain(|handle| handle.client != number);
        }
        state.mishaps.remove(&number); // those of the next process are counted anew
    }

    fn has_synced(&self, number: usize) -> bool {
        let state = lock(&self.state);
        state.pending.iter().any(|(of, write)| *of == number && write.is_synced && !write.is_down)
    }

    fn is_back(&self, client: &SimClient) {
        self.note_mishaps(client);
    }

    fn verify<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async move {
            if client.machine.is_some() {
                self.read_all(client).await?;
            }
            lock(&self.state).files.iter().try_for_each(FileHistory::verify)
        })
    }
}
