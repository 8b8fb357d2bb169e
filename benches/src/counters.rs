//! What one call costs in allocations, bytes, system calls and round trips. Client and server are
//! on a thread each in this process, a Unix socket between, a file system in memory below. Nothing
//! here depends on how fast or busy the machine is (system calls a little, where two wake-ups fall
//! together). So upper bounds can be gated.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{
    Buf, BufMut, Context, CreateHow, FileId, FileSystem, Name, OpenFile, OpenHow, Pid, RemoveKind,
    Write,
};
use dray_fabric::{Address, listen_first};
use dray_layers::placement::{Placement, parse_definitions, placed_stack};
use dray_rpc::client::RemoteFs;
use dray_rpc::server::{Export, FileJournal, Server, ServerOptions};
use dray_rt::{DriverKind, Executor};

use crate::alloc::{ThreadRole, counted, play};
use crate::syscalls_here::{ThreadCounter, thread_id};
use crate::{CommandResult, context, sessions};

/// Repetitions before counting: pools, tables and vectors have grown then.
const WARM: u64 = 200;
/// Repetitions counted.
const COUNTED: u64 = 1000;

/// What one operation costs on average.
#[derive(Clone, Debug)]
pub struct OperationCost {
    /// Which operation.
    pub op: &'static str,
    /// Allocations on the client's thread.
    pub client_allocations: f64,
    /// Allocations on the server's thread.
    pub server_allocations: f64,
    /// Bytes allocated on the client's thread.
    pub client_allocated_bytes: f64,
    /// Bytes allocated on the server's thread.
    pub server_allocated_bytes: f64,
    /// Bytes copied between buffers, both ends and the backend together.
    pub copied_bytes: f64,
    /// Calls sent over the wire.
    pub round_trips: f64,
    /// System calls of client and server thread, where they can be counted.
    pub system_calls: Option<(f64, f64)>,
}

/// Counts them all. `dir` is where the socket goes.
pub fn all(dir: &Path) -> CommandResult<Vec<OperationCost>> {
    let address = Address::Unix(dir.join("counters.socket"));
    let (ready, started) = mpsc::channel();
    let (listen, sessions) = (address.clone(), dir.join("sessions"));
    // The server's thread ends with the process: an executor has no other end.
    std::thread::spawn(move || {
        play(ThreadRole::Server);
        let outcome = serve(listen, sessions, &ready);
        drop(ready.send(outcome)); // only after a failure; nobody may listen any more
    });
    let server_tid = started.recv().map_err(context("server"))??;
    let client = std::thread::spawn(move || {
        play(ThreadRole::Client);
        let mut executor = Executor::new(DriverKind::Epoll).map_err(context("executor"))?;
        executor.block_on(count_all(address, server_tid))
    });
    client.join().map_err(|_| "the client thread failed".to_owned())?
}

fn serve(
    address: Address,
    sessions: PathBuf,
    ready: &mpsc::Sender<CommandResult<i32>>,
) -> CommandResult<i32> {
    let mut executor = Executor::new(DriverKind::Epoll).map_err(context("executor"))?;
    executor.block_on(async {
        let fs = || Arc::new(MemoryFs::new(MemoryOptions::default()));
        let shared = fs();
        let export = Export::new("data", shared.clone(), Vec::new());
        let again = Export::new("again", shared, Vec::new());
        let mut leased = Export::new("leased", fs(), Vec::new());
        leased.leases = true;
        let journal = FileJournal::open(&sessions).map_err(context("journal"))?;
        let server =
            Server::new(ServerOptions::default(), vec![export, again, leased], Arc::new(journal));
        let listener = listen_first(&address).await.map_err(context("bind"))?.listener;
        drop(ready.send(Ok(thread_id()))); // the starting thread waits
        Err(server.serve_all(listener).await).map_err(context("accept"))
    })
}

struct Counters {
    fs: RemoteFs,
    /// Over an export that leases names and attributes.
    leased: RemoteFs,
    /// A projection of this one server, and the session under it.
    placed: Projected,
    /// One of two servers, which are two exports of one file system.
    of_two: Projected,
    system_calls: Option<(ThreadCounter, ThreadCounter)>,
}

/// A projection, and the sessions under it.
struct Projected {
    fs: Arc<dyn FileSystem>,
    sessions: Vec<RemoteFs>,
}

struct Snapshot {
    client: (u64, u64),
    server: (u64, u64),
    copied: u64,
    calls: u64,
    system_calls: Option<(u64, u64)>,
}

impl Counters {
    fn now(&mut self) -> Snapshot {
        let system_calls = self.system_calls.as_mut();
        let calls = |fs: &RemoteFs| -> u64 {
            fs.session().status().channels.iter().map(|channel| channel.calls).sum()
        };
        let placed = self.placed.sessions.iter().chain(&self.of_two.sessions);
        Snapshot {
            calls: [&self.fs, &self.leased].map(calls).into_iter().sum::<u64>()
                + placed.map(calls).sum::<u64>(),
            system_calls: system_calls.map(|(client, server)| (client.count(), server.count())),
            copied: dray_core::copied_bytes(),
            client: counted(ThreadRole::Client),
            server: counted(ThreadRole::Server),
        }
    }

    fn cost(op: &'static str, times: u64, before: &Snapshot, after: &Snapshot) -> OperationCost {
        let each = |after: u64, before: u64| (after - before) as f64 / times as f64;
        let system_calls = before.system_calls.zip(after.system_calls);
        OperationCost {
            op,
            client_allocations: each(after.client.0, before.client.0),
            server_allocations: each(after.server.0, before.server.0),
            client_allocated_bytes: each(after.client.1, before.client.1),
            server_allocated_bytes: each(after.server.1, before.server.1),
            copied_bytes: each(after.copied, before.copied),
            round_trips: each(after.calls, before.calls),
            system_calls: system_calls
                .map(|(before, after)| (each(after.0, before.0), each(after.1, before.1))),
        }
    }
}

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

/// Every other file is at home at the server of its name, and costs the least. Only that one counts.
const OF_TWO: &str = "create_unlink_of_two";

/// The operations counted, by name.
const OPERATIONS: [&str; 17] = [
    "lookup",
    "lookup_placed",
    "getattr",
    "stat_leased",
    "read_4k",
    "read_1m",
    "write_4k",
    "write_1m",
    "open_close",
    "open_close_placed",
    "create_unlink",
    "create_unlink_placed",
    OF_TWO,
    "create_close",
    "small_file_leased",
    "put_4k",
    "remove",
];

/// What the operations work on, made once.
struct Scene {
    cx: Context,
    root: FileId,
    id: FileId,
    file: Arc<dyn OpenFile>,
    data: Buf,
    /// A small buffer and a large one.
    into: [Option<BufMut>; 2],
}

async fn count_all(address: Address, server_tid: i32) -> CommandResult<Vec<OperationCost>> {
    let fs = sessions::client(&address, "data").await?;
    let leased = sessions::leased_client(&address, "leased").await?;
    let system_calls = ThreadCounter::new(thread_id()).zip(ThreadCounter::new(server_tid));
    let placed = projected(vec![sessions::client(&address, "data").await?])?;
    let one = sessions::client(&address, "data").await?;
    let other = sessions::client_of(&address, "again", one.session().node()).await?;
    let of_two = projected(vec![one, other])?;
    let mut counters = Counters { fs, leased, placed, of_two, system_calls };
    // A thread of a program: what it has just looked up, it need not have looked up again.
    let cx = Context { pid: Pid(7), ..Context::system() };
    let root = counters.fs.info().root;
    let name = Name::new(b"file").map_err(context("name"))?;
    let (entry, file) =
        counters.fs.create(&cx, root, name, NEW).await.map_err(context("create"))?;
    let leased = &counters.leased;
    drop(leased.create(&cx, leased.info().root, name, NEW).await.map_err(context("create"))?);
    let data = Buf::from(vec![1; 1 << 20]);
    file.write(&cx, Write::at(0), data.clone()).await.map_err(context("write"))?;
    let into = [Some(BufMut::heap(4096)), Some(BufMut::heap(1 << 20))];
    let mut scene = Scene { cx, root, id: entry.id, file, data, into };
    let mut costs = Vec::new();
    for op in OPERATIONS {
        for index in 0..WARM {
            scene.once(&counters, op, index).await?;
        }
        if op == OF_TWO {
            costs.push(scene.least(&mut counters, op).await?);
            continue;
        }
        let before = counters.now();
        for index in WARM..WARM + COUNTED {
            scene.once(&counters, op, index).await?;
        }
        let after = counters.now();
        costs.push(Counters::cost(op, COUNTED, &before, &after));
    }
    Ok(costs)
}

/// A projection with whose servers these are sessions.
fn projected(sessions: Vec<RemoteFs>) -> CommandResult<Projected> {
    let servers: Vec<_> = (0..sessions.len()).map(|number| format!("'tcp://io{number}'")).collect();
    let servers = servers.join(", ");
    let text = format!("[projection.x]\nlayout = 'cluster'\nservers = [{servers}]\npath = '/'\n");
    let definitions = parse_definitions(&text).map_err(|_| "the definition is wrong".to_owned())?;
    let definition = definitions.first().ok_or("there is no definition")?;
    let stacks = sessions.iter().map(|one| RemoteFs::stack(one.session().clone())).collect();
    let places = Arc::default();
    let stack = placed_stack(Placement::new(definition), places, stacks, Vec::new());
    Ok(Projected { fs: stack.fs, sessions })
}

impl Scene {
    /// Does `op` once. What the counting itself allocates (a name for `create_close` and
    /// `remove`) is on the stack.
    async fn once(&mut self, counters: &Counters, op: &str, index: u64) -> CommandResult {
        let Counters { fs, leased, placed: Projected { fs: placed, .. }, of_two, .. } = counters;
        let numbered = *b"f0000000";
        let numbered = numbered_name(numbered, index);
        let new_name = Name::new(&numbered).map_err(context("name"))?;
        let (cx, root) = (&self.cx, self.root);
        match op {
            "lookup" | "lookup_placed" => {
                let name = Name::new(b"file").map_err(context("name"))?;
                let fs: &dyn FileSystem = if op == "lookup" { fs } else { &**placed };
                fs.lookup(cx, root, name).await.map(drop).map_err(context(op))
            }
            "getattr" => fs.getattr(cx, self.id).await.map(drop).map_err(context(op)),
            "stat_leased" => {
                let name = Name::new(b"file").map_err(context("name"))?;
                let root = leased.info().root;
                let entry = leased.lookup(cx, root, name).await.map_err(context(op))?;
                leased.getattr(cx, entry.id).await.map(drop).map_err(context(op))
            }
            "read_4k" => self.read(4096).await,
            "read_1m" => self.read(1 << 20).await,
            "write_4k" => self.write(4096).await,
            "write_1m" => self.write(1 << 20).await,
            "create_unlink" | "create_unlink_placed" | OF_TWO => {
                let fs: &dyn FileSystem = match op {
                    "create_unlink" => fs,
                    OF_TWO => &*of_two.fs,
                    _ => &**placed,
                };
                let (_, file) = fs.create(cx, root, new_name, NEW).await.map_err(context(op))?;
                file.close(cx).await.map_err(context(op))?;
                let _ = fs.lookup(cx, root, new_name).await.map_err(context(op))?;
                fs.remove(cx, root, new_name, RemoveKind::File).await.map_err(context(op))
            }
            "open_close" | "open_close_placed" => {
                let fs: &dyn FileSystem = if op == "open_close" { fs } else { &**placed };
                let file = fs.open(cx, self.id, OpenHow::READ).await.map_err(context(op))?;
                file.close(cx).await.map_err(context(op))
            }
            "create_close" => {
                let (_, file) = fs.create(cx, root, new_name, NEW).await.map_err(context(op))?;
                file.close(cx).await.map_err(context(op))
            }
            // As the kernel asks for the attributes of the directory, and a program for those of the file.
            "small_file_leased" => {
                let (root, data) = (leased.info().root, self.data.slice(0..4096));
                let made = leased.create(cx, root, new_name, NEW).await;
                let (entry, file) = made.map_err(context(op))?;
                file.write(cx, Write::at(0), data).await.map_err(context(op))?;
                file.close(cx).await.map_err(context(op))?;
                leased.getattr(cx, root).await.map_err(context(op))?;
                leased.getattr(cx, entry.id).await.map(drop).map_err(context(op))
            }
            "put_4k" => {
                let (name, data) = (Name::new(b"put").map_err(context("name"))?, &self.data);
                fs.put(cx, root, name, 0o644, data.slice(0..4096)).await.map_err(context(op))
            }
            "remove" => fs.remove(cx, root, new_name, RemoveKind::File).await.map_err(context(op)),
            _ => Err(format!("no operation is called {op}")),
        }
    }

    /// The cost of the cheapest of many operations. Its system calls are not known: to count each by itself takes some.
    async fn least(
        &mut self,
        counters: &mut Counters,
        op: &'static str,
    ) -> CommandResult<OperationCost> {
        let mut costs = Vec::new();
        for index in WARM..WARM + COUNTED {
            let before = counters.now();
            self.once(counters, op, index).await?;
            let client = counted(ThreadRole::Client); // before the look itself allocates
            let after = Snapshot { client, ..counters.now() };
            costs.push(Counters::cost(op, 1, &before, &after));
        }
        let cheapest = |one: &OperationCost, other: &OperationCost| {
            one.client_allocations.total_cmp(&other.client_allocations)
        };
        let least = costs.into_iter().min_by(cheapest).ok_or("nothing was counted")?;
        Ok(OperationCost { system_calls: None, ..least })
    }

    /// Reads into the same buffer every time, as a FUSE payload is used again.
    async fn read(&mut self, bytes: usize) -> CommandResult {
        let place = usize::from(bytes > 4096);
        let mut into = self.into[place].take().ok_or("the buffer is lost")?;
        into.clear();
        let into = self.file.read(&self.cx, 0, into).await;
        let into = into.map_err(|error| format!("read: {error:?}"))?;
        if into.len() != bytes {
            return Err(format!("read {} of {bytes} bytes", into.len()));
        }
        self.into[place] = Some(into);
        Ok(())
    }

    async fn write(&mut self, bytes: usize) -> CommandResult {
        let data = self.data.slice(0..bytes);
        self.file.write(&self.cx, Write::at(0), data).await.map(drop).map_err(context("write"))
    }
}

fn numbered_name(mut name: [u8; 8], index: u64) -> [u8; 8] {
    let mut rest = index;
    for digit in name[1..].iter_mut().rev() {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    name
}
