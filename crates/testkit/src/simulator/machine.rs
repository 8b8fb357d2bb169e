//! The server's machine: a disk and a journal that outlive the server process. Or the two machines of a
//! slice, of which one serves ([`ServerPair`]).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_backends::memory::{MemoryDisk, MemoryFs, MemoryOptions};
use dray_core::{FileSystem, FsUuid};
use dray_fabric::BufferPool;
use dray_fabric::sim::Network;
use dray_layers::Observed;
use dray_layers::aggregate::{
    Aggregate, AggregateFigures, AggregateOptions, PendingEra, PendingOptions, recover,
};
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::server::{
    Export, MemoryJournal, Sabotage, Server, ServerOptions, ServerStatus, StateLoss,
};
use dray_rt::{ExecutorHandle, Scope};

use super::pair::ServerPair;
use crate::fixture::TempDir;

/// The server's name on the network.
pub(super) const SERVER: &str = "server";
/// The export's name.
pub(super) const EXPORT: &str = "data";
/// How long a session outlives its last connection.
pub(super) const LEASE: Duration = Duration::from_secs(60);

/// How long clients believe what is leased to them.
pub(super) const LEASE_TERM: Duration = Duration::from_millis(400);

/// Between the pieces of a read: about as long as a message takes. Without it hardly any seed has a
/// write between them.
const READ_PAUSE: Duration = Duration::from_micros(100);

/// Pending data, and data that are read ahead, at a server that merges writes, bytes.
const MERGE_BYTES: usize = 4 << 20;
const READ_AHEAD_BYTES: usize = 4 << 20;

/// Memory for data at the server, bytes.
pub(super) const POOL_BYTES: usize = 64 << 20;

/// The machine that the server runs on.
#[derive(Clone)]
pub(super) struct ServerMachine(Arc<Inner>);

struct Inner {
    network: Network,
    disk: Arc<MemoryDisk>,
    journal: MemoryJournal,
    sabotage: Option<Sabotage>,
    slow: Option<(u64, Duration)>,
    /// Where pending data outlive the process, if the server merges writes.
    merging: Option<TempDir>,
    /// There are several machines.
    pair: Option<ServerPair>,
    instance: Mutex<ServerInstance>,
}

struct ServerInstance {
    scope: Scope,
    server: Option<Server>,
    fs: Option<MemoryFs>,
    figures: Option<Arc<AggregateFigures>>,
    /// Writes that servers merged which are dead.
    merged: u64,
    pools: Vec<BufferPool>,
    boot: u128,
    /// What the server that starts next has lost.
    loss: StateLoss,
    /// The server leases names and attributes.
    leases: bool,
    /// The server gives write leases.
    write_leases: bool,
    /// Files that it leases to one session at most.
    session_leases_max: usize,
    deaths: u64,
    power_losses: u64,
    /// Changes that came again to servers that are dead.
    repeated: u64,
}

impl ServerMachine {
    /// One that does not run yet. `slow`: one operation in so many takes so long.
    pub(super) fn new(
        network: &Network,
        sabotage: Option<Sabotage>,
        slow: Option<(u64, Duration)>,
    ) -> ServerMachine {
        ServerMachine::with(network, sabotage, slow, None)
    }

    /// The same, whose server reads ahead and merges writes. Their data outlive it in `merging`.
    pub(super) fn with(
        network: &Network,
        sabotage: Option<Sabotage>,
        slow: Option<(u64, Duration)>,
        merging: Option<TempDir>,
    ) -> ServerMachine {
        ServerMachine::of(network, (new_disk(), None), (sabotage, slow), merging)
    }

    /// The two of a slice, of which one serves and the other one takes over.
    pub(super) fn of_pair(pair: ServerPair) -> ServerMachine {
        let network = pair.network().clone();
        ServerMachine::of(&network, (pair.disk(), Some(pair)), (None, None), None)
    }

    fn of(
        network: &Network,
        (disk, pair): (Arc<MemoryDisk>, Option<ServerPair>),
        (sabotage, slow): (Option<Sabotage>, Option<(u64, Duration)>),
        merging: Option<TempDir>,
    ) -> ServerMachine {
        ServerMachine(Arc::new(Inner {
            network: network.clone(),
            disk,
            pair,
            journal: MemoryJournal::default(),
            sabotage,
            slow,
            merging,
            instance: Mutex::new(ServerInstance {
                scope: Scope::default(),
                server: None,
                fs: None,
                figures: None,
                merged: 0,
                pools: Vec::new(),
                boot: 1,
                loss: StateLoss::Nothing,
                leases: false,
                write_leases: false,
                session_leases_max: usize::MAX,
                deaths: 0,
                power_losses: 0,
                repeated: 0,
            }),
        }))
    }

    /// The network of its clients.
    pub(super) fn network(&self) -> &Network {
        &self.0.network
    }

    fn instance(&self) -> MutexGuard<'_, ServerInstance> {
        self.0.instance.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether servers that start from now on lease names and attributes, and of how many files to one session.
    pub(super) fn lease(&self, leases: bool, write_leases: bool, session_leases_max: usize) {
        let mut instance = self.instance();
        (instance.leases, instance.write_leases) = (leases, write_leases);
        instance.session_leases_max = session_leases_max;
    }

    /// Starts the server process, which takes over from the one before.
    pub(super) async fn start(&self) {
        if let Some(pair) = &self.0.pair {
            return pair.fleet().start().await;
        }
        let loss = self.instance().loss;
        // As `dray serve` has it: a server that died may have ended its recovery.
        self.instance().boot += u128::from(loss != StateLoss::Nothing);
        let fs = self.0.disk.mount();
        let mut below: Arc<dyn FileSystem> = Arc::new(fs.clone());
        if let Some(slow) = self.0.slow {
            let faults = Faults::new(vec![slow_fault(slow)]);
            below = Arc::new(Observed::new(below, Arc::new(faults)));
        }
        below = self.merging(below).await;
        let pool = BufferPool::new(POOL_BYTES, 0);
        let session_leases_max = self.instance().session_leases_max;
        let options = ServerOptions {
            lease: LEASE,
            lease_term: LEASE_TERM,
            session_leases_max,
            pool: pool.clone(),
            boot: self.instance().boot,
            sabotage: self.0.sabotage,
            ..ServerOptions::default()
        };
        let mut export = Export::new(EXPORT, below, Vec::new());
        (export.leases, export.write_leases) = {
            let instance = self.instance();
            (instance.leases, instance.write_leases)
        };
        export.lock_leases = export.leases;
        let server = Server::new(options, vec![export], Arc::new(self.0.journal.clone()));
        server.restore(loss).await;
        let scope = Scope::new();
        serve(&self.0.network, &server, &scope);
        let (machine, recovering) = (self.clone(), server.clone());
        scope.spawn_on(&ExecutorHandle::current(), async move {
            recovering.recovered().await;
            machine.instance().loss = StateLoss::Nothing;
        });
        let mut instance = self.instance();
        instance.pools.retain(|pool| pool.stats().used_bytes > 0);
        instance.pools.push(pool);
        (instance.scope, instance.server, instance.fs) = (scope, Some(server), Some(fs));
    }

    /// With read-ahead and merged writes, if the server has them. What the process before has left is written
    /// first.
    async fn merging(&self, below: Arc<dyn FileSystem>) -> Arc<dyn FileSystem> {
        let Some(dir) = &self.0.merging else { return below };
        let (path, era) = (
            dir.path().join("pending"),
            PendingEra { boot: self.instance().boot, uuid: FsUuid(1) },
        );
        let mut recovered = recover(&path, era, &*below, || false).await;
        if recovered.is_err() {
            // Something of the process before is still referred to here. A kernel would have unlocked it.
            let copy = path.with_extension("copy");
            std::fs::copy(&path, &copy)
                .and_then(|_| std::fs::rename(&copy, &path))
                .expect("a copy");
            recovered = recover(&path, era, &*below, || false).await;
        }
        let recovered = recovered.expect("nobody else has it");
        assert!(recovered.failed.is_empty(), "{recovered:?}");
        let pending = Some(PendingOptions { path, bytes: MERGE_BYTES, era });
        let options = AggregateOptions {
            read_ahead_bytes: READ_AHEAD_BYTES,
            pending,
            ..AggregateOptions::default()
        };
        let layer =
            Aggregate::new(below, options, recovered.failed).expect("room for pending data");
        self.instance().figures = Some(layer.figures());
        Arc::new(layer)
    }

    /// Writes that were merged.
    pub(super) fn merged(&self) -> u64 {
        let instance = self.instance();
        instance.merged
            + instance.figures.as_ref().map_or(0, |figures| figures.counts().writes_merged)
    }

    /// The server process is killed; nothing that it wrote is lost.
    pub(super) fn kill(&self) {
        if let Some(pair) = &self.0.pair {
            let repeated = self.status().repeated_calls;
            pair.fleet().kill();
            self.instance().repeated += repeated;
            return;
        }
        self.0.disk.kill(); // first: the end of the process's objects must change nothing
        self.end_process();
    }

    /// The machine loses power; `seed` decides what of the unsynced changes survives. The
    /// journal, which nobody syncs, is gone with `forget`.
    pub(super) fn lose_power(&self, seed: u64, forget: bool) {
        if self.0.pair.is_some() {
            return self.kill(); // what a machine takes with it there is decided by the kind of pair
        }
        self.0.disk.crash(seed);
        self.end_process();
        if forget {
            self.0.journal.forget();
        }
        let mut instance = self.instance();
        instance.power_losses += 1;
        if forget || instance.loss != StateLoss::SessionsToo {
            instance.loss = if forget { StateLoss::SessionsToo } else { StateLoss::Unsynced };
        }
    }

    fn end_process(&self) {
        let (repeated, merged) = (self.status().repeated_calls, self.merged());
        let (scope, server) = {
            let mut instance = self.instance();
            instance.deaths += 1;
            instance.repeated += repeated;
            (instance.merged, instance.figures) = (merged, None);
            instance.fs = None;
            (std::mem::take(&mut instance.scope), instance.server.take())
        };
        self.0.network.break_all(SERVER);
        scope.kill();
        drop(server);
    }

    /// Times that the server process died.
    pub(super) fn deaths(&self) -> u64 {
        match &self.0.pair {
            Some(pair) => pair.fleet().deaths(),
            None => self.instance().deaths,
        }
    }

    /// Of these, times that the machine lost power.
    pub(super) fn power_losses(&self) -> u64 {
        self.instance().power_losses
    }

    /// Changes that reached a server more than once.
    pub(super) fn repeated(&self) -> u64 {
        let now = self.status().repeated_calls;
        self.instance().repeated + now
    }

    /// The server, if it runs.
    pub(super) fn server(&self) -> Option<Server> {
        match &self.0.pair {
            Some(pair) => pair.primary(),
            None => self.instance().server.clone(),
        }
    }

    pub(super) fn status(&self) -> ServerStatus {
        self.server().as_ref().map(Server::status).unwrap_or_default()
    }

    /// Both machines of a slice, if there are two.
    pub(super) fn as_pair(&self) -> Option<&ServerPair> {
        self.0.pair.as_ref()
    }

    /// Locks held at the server.
    pub(super) fn locks(&self) -> usize {
        if let Some(pair) = &self.0.pair {
            return pair.locks();
        }
        self.instance().fs.as_ref().map_or(0, |fs| fs.locks().list(usize::MAX).len())
    }

    /// Bytes of buffers that any instance of the server has lent and not got back.
    pub(super) fn buffer_bytes(&self) -> usize {
        if let Some(pair) = &self.0.pair {
            return pair.buffer_bytes();
        }
        self.instance().pools.iter().map(|pool| pool.stats().used_bytes).sum()
    }

    /// Gives up deleted files that outlived a kill.
    pub(super) fn drop_orphans(&self) {
        self.0.disk.drop_orphans();
    }

    /// Sessions noted in the journal.
    pub(super) fn sessions_noted(&self) -> usize {
        if let Some(pair) = &self.0.pair {
            return pair.sessions_noted();
        }
        dray_rpc::server::Journal::load(&self.0.journal).len()
    }
}

/// An empty disk of a server's.
pub(super) fn new_disk() -> Arc<MemoryDisk> {
    Arc::new(MemoryDisk::new(MemoryOptions {
        root_mode: 0o777,
        read_pause: Some(READ_PAUSE),
        ..MemoryOptions::default()
    }))
}

/// One operation in so many takes so long.
pub(super) fn slow_fault((one_in, delay): (u64, Duration)) -> Fault {
    Fault { op: None, when: When::OneIn(one_in), delay, error: None }
}

fn serve(network: &Network, server: &Server, scope: &Scope) {
    let mut incoming = network.listen(SERVER);
    let handle = ExecutorHandle::current();
    let (expiring, serving) = (server.clone(), server.clone());
    scope.spawn_on(&handle, async move { expiring.expire_leases().await });
    scope.spawn_on(&handle, async move {
        while let Some(connection) = incoming.recv().await {
            let server = serving.clone();
            dray_rt::spawn(async move { server.serve(Arc::new(connection)).await });
        }
    });
}
