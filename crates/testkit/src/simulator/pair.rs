//! Two servers of one slice, each on a machine of its own, and the disk that they share.
//!
//! What a server that was succeeded still has under way in the file system is fenced there, as Lustre
//! and CephFS do it. The next server's mount ends those before it.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use dray_backends::memory::{MemoryDisk, MemoryFs};
use dray_core::{FileSystem, Fut};
use dray_fabric::BufferPool;
use dray_fabric::sim::Network;
use dray_layers::Observed;
use dray_layers::faults::Faults;
use dray_rpc::server::{
    Export, MemoryJournal, MemoryRegistry, PageCacheId, ReplicaLink, ReplicaRefusal, Sabotage,
    Server, ServerNumber, ServerOptions, SliceOptions, SliceServer, StateLoss,
};
use dray_rt::{ExecutorHandle, Scope, random_u64, sleep};

use super::machine::{EXPORT, LEASE, POOL_BYTES, SERVER, slow_fault};

/// The names of both on the network.
pub(super) const SERVERS: [&str; 2] = [SERVER, "server2"];
/// Longest time of a batch of notes on its way.
const WAY_MAX: Duration = Duration::from_micros(500);
/// Between looks for whoever serves.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// A server that is away for so long has been succeeded, if it could be.
const SUCCEEDED_AFTER: Duration = Duration::from_millis(2600);

/// Where the two servers of a slice run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairKind {
    /// On one machine: what one of them has written is there for the other one, synced or not.
    OneMachine,
    /// On a machine each: a server that takes over cannot know whether what the other one has not synced
    /// is there. It is.
    TwoMachines,
    /// The same, and often it is not: the machine is lost with its server.
    TwoMachinesLost,
}

impl PairKind {
    /// All of them.
    pub const ALL: [PairKind; 3] =
        [PairKind::OneMachine, PairKind::TwoMachines, PairKind::TwoMachinesLost];
}

/// What a server of a pair is cut off from.
#[derive(Clone, Copy, Debug)]
pub(super) enum PairCut {
    Membership(usize),
    Peers,
    Clients(usize),
    All(usize),
}

impl PairCut {
    pub(super) fn draw() -> PairCut {
        let number = (random_u64() % 2) as usize;
        match random_u64() % 4 {
            0 => PairCut::Membership(number),
            1 => PairCut::Peers,
            2 => PairCut::Clients(number),
            _ => PairCut::All(number),
        }
    }
}

/// Both servers. Cheap to clone.
#[derive(Clone)]
pub(super) struct ServerPair(Arc<Inner>);

struct Inner {
    network: Network,
    disk: Arc<MemoryDisk>,
    registry: MemoryRegistry,
    sabotage: Option<Sabotage>,
    slow: Option<(u64, Duration)>,
    kind: PairKind,
    hosts: [Mutex<Host>; 2],
    /// The servers do not reach each other.
    peers_cut: AtomicBool,
    /// The newest mount of the disk.
    fs: Mutex<Option<MemoryFs>>,
}

#[derive(Default)]
struct Host {
    journal: MemoryJournal,
    /// How often its machine was lost, and what that means for the next process.
    machine_losses: u64,
    loss: Option<StateLoss>,
    process: Option<Process>,
    pools: Vec<BufferPool>,
}

struct Process {
    scope: Scope,
    slice: Arc<SliceServer>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ServerPair {
    pub(super) fn new(
        network: &Network,
        disk: Arc<MemoryDisk>,
        sabotage: Option<Sabotage>,
        slow: Option<(u64, Duration)>,
        kind: PairKind,
    ) -> ServerPair {
        ServerPair(Arc::new(Inner {
            network: network.clone(),
            disk,
            registry: MemoryRegistry::default(),
            sabotage,
            slow,
            kind,
            hosts: Default::default(),
            peers_cut: AtomicBool::new(false),
            fs: Mutex::default(),
        }))
    }

    fn host(&self, number: usize) -> MutexGuard<'_, Host> {
        lock(&self.0.hosts[number])
    }

    fn slice(&self, number: usize) -> Option<Arc<SliceServer>> {
        self.host(number).process.as_ref().map(|process| process.slice.clone())
    }

    /// Starts whatever does not run. At first it waits until somebody serves.
    pub(super) async fn start(&self) {
        let first = self.0.registry.peek(EXPORT).is_none();
        // Often so late that the other one has taken over.
        if !first && !random_u64().is_multiple_of(4) {
            sleep(SUCCEEDED_AFTER).await;
        }
        for number in 0..SERVERS.len() {
            if self.slice(number).is_none() {
                self.start_one(number);
            }
        }
        while first && self.primary().is_none() {
            sleep(LOOK_EVERY).await;
        }
    }

    fn start_one(&self, number: usize) {
        let scope = Scope::new();
        let pool = BufferPool::new(POOL_BYTES, 0);
        let member = Arc::new(self.0.registry.member(ServerNumber(number as u16)));
        let pair = self.clone();
        let (journal, loss, machine_losses) = {
            let host = self.host(number);
            (host.journal.clone(), host.loss.unwrap_or(StateLoss::Nothing), host.machine_losses)
        };
        let page_cache = match self.0.kind {
            PairKind::OneMachine => PageCacheId(1),
            PairKind::TwoMachines | PairKind::TwoMachinesLost => {
                PageCacheId(1 + number as u64 + 2 * machine_losses)
            }
        };
        let slice = Arc::new(SliceServer::new(SliceOptions {
            name: EXPORT.into(),
            other: ServerNumber(1 - number as u16),
            is_home: number == 0,
            options: ServerOptions {
                lease: LEASE,
                pool: pool.clone(),
                sabotage: self.0.sabotage,
                ..ServerOptions::default()
            },
            export: Box::new(move || Export::new(EXPORT, pair.mount(), Vec::new())),
            journal: Arc::new(journal),
            loss,
            page_cache,
            membership: member.clone(),
            link: Arc::new(SimLink { pair: Arc::downgrade(&self.0), to: 1 - number }),
        }));
        let here = ExecutorHandle::current();
        scope.spawn_on(&here, async move { member.keep_alive().await });
        let running = slice.clone();
        scope.spawn_on(&here, async move { running.run().await });
        let (mut incoming, serving) = (self.0.network.listen(SERVERS[number]), slice.clone());
        scope.spawn_on(&here, async move {
            while let Some(connection) = incoming.recv().await {
                let server = serving.server();
                dray_rt::spawn(async move { server.serve(Arc::new(connection)).await });
            }
        });
        let mut host = self.host(number);
        host.pools.retain(|pool| pool.stats().used_bytes > 0);
        host.pools.push(pool);
        host.process = Some(Process { scope, slice });
    }

    /// The disk, as the server sees it that begins to serve.
    fn mount(&self) -> Arc<dyn FileSystem> {
        self.0.disk.kill();
        let fs = self.0.disk.mount();
        *lock(&self.0.fs) = Some(fs.clone());
        match self.0.slow {
            None => Arc::new(fs),
            Some(slow) => {
                Arc::new(Observed::new(Arc::new(fs), Arc::new(Faults::new(vec![slow_fault(slow)]))))
            }
        }
    }

    fn primary_number(&self) -> Option<usize> {
        (0..SERVERS.len()).find(|number| self.slice(*number).is_some_and(|one| one.is_primary()))
    }

    /// The server that serves.
    pub(super) fn primary(&self) -> Option<Server> {
        self.slice(self.primary_number()?).map(|slice| slice.server())
    }

    /// Kills a server process: nearly always that which serves.
    pub(super) fn kill(&self) {
        let chosen = random_u64().is_multiple_of(8).then_some((random_u64() % 2) as usize);
        let serving = self.primary_number();
        let number = chosen.or(serving).unwrap_or((random_u64() % 2) as usize);
        let Some(process) = self.host(number).process.take() else { return };
        if process.slice.has_begun() {
            self.host(number).loss = None;
        }
        if serving == Some(number) {
            // First: the end of the process's objects must change nothing.
            if self.0.kind == PairKind::TwoMachinesLost && random_u64().is_multiple_of(2) {
                self.0.disk.lose_written(random_u64());
                let mut host = self.host(number);
                host.machine_losses += 1;
                host.loss = Some(StateLoss::Unsynced);
            } else {
                self.0.disk.kill();
            }
            *lock(&self.0.fs) = None;
        }
        self.0.network.break_all(SERVERS[number]);
        process.scope.kill();
    }

    /// Has the server that serves hand over to the other one; false: it could not.
    pub(super) async fn hand_over(&self) -> bool {
        let serving = self.primary_number().and_then(|number| self.slice(number));
        let Some(slice) = serving.filter(|slice| slice.ready_to_hand_over().is_some()) else {
            return false;
        };
        slice.hand_over().await.is_ok()
    }

    /// Cuts a server off from what servers agree on, from the other one, or from everybody who connects
    /// to it, or ends that.
    pub(super) fn cut(&self, what: PairCut, is_cut: bool) {
        let set = |what| match what {
            PairCut::Membership(number) => {
                self.0.registry.cut_off(ServerNumber(number as u16), is_cut);
            }
            PairCut::Peers => self.0.peers_cut.store(is_cut, Ordering::SeqCst),
            PairCut::Clients(number) => self.0.network.partition(SERVERS[number], is_cut),
            PairCut::All(_) => {}
        };
        set(what);
        if let PairCut::All(number) = what {
            let each = [PairCut::Membership(number), PairCut::Peers, PairCut::Clients(number)];
            each.into_iter().for_each(set);
        }
    }

    /// How often one server has taken over from the other, or got the slice from it.
    pub(super) fn takeovers(&self) -> u64 {
        self.0.registry.moves(EXPORT)
    }

    pub(super) fn locks(&self) -> usize {
        lock(&self.0.fs).as_ref().map_or(0, |fs| fs.locks().list(usize::MAX).len())
    }

    pub(super) fn buffer_bytes(&self) -> usize {
        let of = |number| -> usize {
            self.host(number).pools.iter().map(|pool| pool.stats().used_bytes).sum()
        };
        of(0) + of(1)
    }

    /// Sessions that the one that serves has noted.
    pub(super) fn sessions_noted(&self) -> usize {
        let journal = self.primary_number().map(|number| self.host(number).journal.clone());
        journal.map_or(0, |journal| dray_rpc::server::Journal::load(&journal).len())
    }
}

/// From one server to the other.
struct SimLink {
    pair: Weak<Inner>,
    to: usize,
}

impl ReplicaLink for SimLink {
    fn ship<'a>(
        &'a self,
        epoch: u64,
        number: u64,
        batch: Vec<u8>,
    ) -> Fut<'a, Result<(), ReplicaRefusal>> {
        Box::pin(async move {
            let away = || ReplicaRefusal::Io(io::Error::from_raw_os_error(libc::ECONNREFUSED));
            let way = || WAY_MAX.mul_f64(random_u64() as f64 / u64::MAX as f64);
            sleep(way()).await;
            let pair = self.pair.upgrade().map(ServerPair).ok_or_else(away)?;
            if pair.0.peers_cut.load(Ordering::SeqCst) {
                return Err(away());
            }
            let slice = pair.slice(self.to).ok_or_else(away)?;
            slice.replica().take(epoch, number, &batch)?;
            drop((slice, pair));
            sleep(way()).await;
            Ok(())
        })
    }
}
