//! A client's process dies while it reestablishes its files and locks at a new server epoch. Its
//! successor does that to the end.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{client_options, serve_simulated, simulate};
use dray_backends::memory::{MemoryDisk, MemoryOptions};
use dray_core::{
    Context, CreateHow, Errno, FileId, FileSystem, Identity, Lock, LockFamily, LockKind, LockOwner,
    LockRange, Name, NodeId, Op, OpenFile, OpenHow, Pid, RequestId, Result, SessionControl,
};
use dray_fabric::sim::Network;
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::client::{ClientSession, RemoteFs, SessionMemory};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions, StateLoss};
use dray_rt::sync::oneshot;
use dray_rt::{ExecutorHandle, Scope, sleep, timeout};

const LOCK: Lock = Lock {
    family: LockFamily::Posix,
    kind: LockKind::Exclusive,
    range: LockRange::ALL,
    owner: LockOwner::own(1),
    pid: Pid(1),
};

/// Longer than a client takes to come back, and much shorter than a lease.
const SOON: Duration = Duration::from_secs(5);

/// A server whose process dies; its disk and its journal stay.
struct Machine {
    network: Network,
    disk: MemoryDisk,
    journal: MemoryJournal,
    epoch: Scope,
}

impl Machine {
    fn new() -> Machine {
        let disk = MemoryDisk::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() });
        let (network, journal) = (Network::new(), MemoryJournal::default());
        Machine { network, disk, journal, epoch: Scope::new() }
    }

    async fn start(&mut self, faults: Vec<Fault>) -> Server {
        let fs = Observed::new(Arc::new(self.disk.mount()), Arc::new(Faults::new(faults)));
        let exports = vec![Export::new("data", Arc::new(fs), Vec::new())];
        let journal = Arc::new(self.journal.clone());
        let server = Server::new(ServerOptions::default(), exports, journal);
        server.restore(StateLoss::Nothing).await;
        self.epoch = Scope::new();
        serve_simulated(&self.network, "s", &server, &self.epoch);
        server
    }

    fn kill(&mut self) {
        self.epoch.kill();
        self.network.break_all("s");
        self.disk.kill();
    }

    /// A process of a client, in a scope of its own. The files that the process before had open are
    /// `before`, each with the request that opened it.
    async fn client(
        &self,
        name: &'static str,
        memory: SessionMemory,
        before: Vec<(FileId, u64)>,
    ) -> (Scope, RemoteFs, Vec<Arc<dyn OpenFile>>) {
        let (scope, (give, given)) = (Scope::new(), oneshot::channel());
        let connector = self.network.connector_from(name, "s");
        scope.spawn_on(&ExecutorHandle::current(), async move {
            let session = ClientSession::connect(connector, client_options(), memory).await;
            let fs = RemoteFs::new(session.expect("a session"));
            let attach = |(id, request)| fs.attach(id, OpenHow::READ_WRITE, RequestId(request));
            let files = before.into_iter().filter_map(attach).collect();
            fs.attached();
            let _ = give.send((fs, files)); // the test waits for it
        });
        let (fs, files) = given.await.expect("it connects");
        (scope, fs, files)
    }
}

fn cx(node: NodeId, request: u64) -> Context {
    Context::new(node, RequestId(request), Identity::system(), Pid(1))
}

async fn open(fs: &RemoteFs, name: &str, request: u64) -> Result<Arc<dyn OpenFile>> {
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: false };
    let cx = cx(fs.session().node(), request);
    let made = fs.create(&cx, fs.info().root, Name::new(name.as_bytes()).unwrap(), how).await;
    made.map(|(_, file)| file)
}

/// The successor took the server for one that it had come back to. It claimed no lock and opened no
/// file, and others waited for it as long as a lease. Then the lock was lost.
// proves: P95
#[test]
fn a_process_that_dies_while_it_reestablishes_leaves_the_rest_to_its_successor() {
    // The first process dies at the reopening of the file with the lock, or of the one without.
    for nth in [1, 2] {
        simulate(nth, async {
            let mut machine = Machine::new();
            machine.start(Vec::new()).await;
            let memory = SessionMemory::create_memfd().unwrap();
            let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
            let (_other_process, other, _) =
                machine.client("b", SessionMemory::heap(), Vec::new()).await;
            let (process, fs, _) = machine.client("a", memory, Vec::new()).await;
            let node = fs.session().node();
            let locked = open(&fs, "locked", 1).await.unwrap();
            locked.lock(&cx(node, 2), LOCK, false).await.unwrap();
            let plain = open(&fs, "plain", 3).await.unwrap();

            machine.kill();
            let delay = 2 * SOON; // longer than the first process lives
            let when = When::Nth(nth);
            let held_up = Fault { op: Some(Op::Open), when, delay, error: None };
            let server = machine.start(vec![held_up]).await;
            sleep(SOON).await;
            process.kill();
            machine.network.break_all("a");

            let memory = SessionMemory::from_fd(fd).unwrap();
            let before = vec![(locked.id(), 1), (plain.id(), 3)];
            let (_process, _fs, _files) = machine.client("a", memory, before).await;
            sleep(2 * SOON).await;
            let clients = server.status().clients;
            let files: Vec<usize> = clients.iter().map(|client| client.files).collect();
            assert_eq!(clients.len(), 2, "it goes on with its session");
            assert!(files.contains(&2), "it has both files open again: {files:?}");
            let mine = other.session().node();
            let theirs = open(&other, "locked", 1).await.unwrap();
            let refused = timeout(SOON, theirs.lock(&cx(mine, 2), LOCK, false)).await;
            let refused = refused.expect("nobody is waited for any more").unwrap_err();
            assert_eq!(refused.errno(), Errno::EAGAIN);
        });
    }
}
