//! The servers of a projection with failover, each on a machine of its own, and the slices that they serve.
//!
//! Slice k has its home at server k and its other server behind that. So a server that dies takes the
//! primary of one slice and the backup of another one with it. Servers, membership and leases are common.
//! Each slice has a disk, a network and clients to itself: what happens to one is no excuse for another.
//!
//! What a server that was succeeded still has under way in the file system is fenced there, as Lustre
//! and CephFS do it. The next server's mount ends those before it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use dray_backends::memory::{MemoryDisk, MemoryFs};
use dray_core::FileSystem;
use dray_fabric::BufferPool;
use dray_fabric::sim::Network;
use dray_layers::Observed;
use dray_layers::faults::Faults;
use dray_rpc::server::{
    Export, MemoryJournal, MemoryRegistry, PageCacheId, RegistryMember, Sabotage, ServerNumber,
    ServerOptions, SliceOptions, SliceServer, StateLoss,
};
use dray_rt::{ExecutorHandle, Scope, random_u64, sleep};

use super::fleet_link::SimLink;
use super::machine::{EXPORT, LEASE, POOL_BYTES, SERVER, slow_fault};
use super::pair::ServerPair;
use super::work::WorkloadKind;

/// The names of both servers of a slice on its network.
pub(super) const SERVERS: [&str; 2] = [SERVER, "server2"];
/// The slices, in the order of their homes.
const SLICES: [&str; 3] = [EXPORT, "data1", "data2"];
/// Longest time of a batch of notes on its way. Each run draws its own up to this.
const WAY_MAX: Duration = Duration::from_millis(8);
/// Clocks of servers run so much faster or slower, at most.
const DRIFT_MAX: f64 = 0.15;
/// Between looks for the server that serves.
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

    /// The kinds of work that such a takeover leaves as it was. Copies, extended attributes and what a
    /// client has given up on are kept by nobody: a takeover by another machine counts them as lost.
    pub fn kinds(self) -> impl Iterator<Item = WorkloadKind> {
        WorkloadKind::ALL.into_iter().filter(move |kind| self.bears(*kind))
    }

    fn bears(self, kind: WorkloadKind) -> bool {
        match kind {
            WorkloadKind::Append
            | WorkloadKind::Counter
            | WorkloadKind::Flocks
            | WorkloadKind::Register
            | WorkloadKind::Words
            | WorkloadKind::Rights
            | WorkloadKind::Believed => true,
            // A file that was removed while it was open goes with the machine that had it open.
            WorkloadKind::Names | WorkloadKind::Puts | WorkloadKind::Deleted => {
                self != PairKind::TwoMachinesLost
            }
            // A change that its client has given up on is sent again by nobody, though others have seen it.
            WorkloadKind::Limited
            | WorkloadKind::Model
            | WorkloadKind::Copies
            | WorkloadKind::Notified
            | WorkloadKind::Interleaved
            | WorkloadKind::Leased
            | WorkloadKind::Locked
            | WorkloadKind::Kept => self == PairKind::OneMachine,
            // Clients come back to one server.
            WorkloadKind::WrittenBack => false,
        }
    }
}

/// The servers of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct FleetPlan {
    pub(super) kind: PairKind,
    /// Two, with one slice, or three, with three.
    pub(super) servers: usize,
}

impl FleetPlan {
    /// How many slices they serve.
    fn slices(self) -> usize {
        match self.servers {
            0..=2 => 1,
            servers => servers.min(SLICES.len()),
        }
    }
}

/// What is cut off from what: servers by their numbers, the two servers of a slice by its number.
#[derive(Clone, Copy, Debug)]
pub(super) enum FleetCut {
    Membership(usize),
    Peers(usize),
    Clients(usize),
    All(usize),
}

/// All servers. Cheap to clone.
#[derive(Clone)]
pub(super) struct Fleet(pub(super) Arc<Inner>);

pub(super) struct Inner {
    plan: FleetPlan,
    pub(super) registry: MemoryRegistry,
    sabotage: Option<Sabotage>,
    slow: Option<(u64, Duration)>,
    /// Longest time of a batch of notes on its way.
    pub(super) way_max: Duration,
    hosts: Vec<Mutex<Host>>,
    pub(super) slices: Vec<SimSlice>,
    deaths: AtomicU64,
}

/// What outlives the servers of a slice.
pub(super) struct SimSlice {
    pub(super) network: Network,
    pub(super) disk: Arc<MemoryDisk>,
    /// The home of the slice, and the other server.
    servers: [usize; 2],
    /// The servers do not reach each other.
    pub(super) are_peers_cut: AtomicBool,
    /// The newest mount of the disk.
    pub(super) fs: Mutex<Option<MemoryFs>>,
}

impl SimSlice {
    /// The name of a server on the slice's network; none: it does not serve the slice.
    fn role(&self, server: usize) -> Option<usize> {
        self.servers.iter().position(|one| *one == server)
    }
}

/// A server's machine.
struct Host {
    /// What its clock takes for a second, seconds.
    clock: f64,
    /// How often it was lost.
    losses: u64,
    /// The server process, and that of each slice in it.
    process: Option<Scope>,
    slices: BTreeMap<usize, HostSlice>,
}

/// A slice at a machine.
#[derive(Default)]
struct HostSlice {
    journal: MemoryJournal,
    /// What the machine's losses mean for the next process.
    loss: Option<StateLoss>,
    server: Option<Arc<SliceServer>>,
    pools: Vec<BufferPool>,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number between 0 and 1.
pub(super) fn fraction() -> f64 {
    random_u64() as f64 / u64::MAX as f64
}

fn below(bound: usize) -> usize {
    (random_u64() % bound as u64) as usize
}

impl Fleet {
    /// Servers that do not run yet, over disks that `disk` makes. `slow`: one operation in so many takes so
    /// long.
    pub(super) fn new(
        plan: FleetPlan,
        sabotage: Option<Sabotage>,
        slow: Option<(u64, Duration)>,
        disk: impl Fn() -> Arc<MemoryDisk>,
    ) -> Fleet {
        let slice = |number: usize| SimSlice {
            network: Network::new(),
            disk: disk(),
            servers: [number, (number + 1) % plan.servers],
            are_peers_cut: AtomicBool::new(false),
            fs: Mutex::default(),
        };
        let slices: Vec<SimSlice> = (0..plan.slices()).map(slice).collect();
        let host = |number: usize| {
            let served = (0..slices.len()).filter(|slice| slices[*slice].role(number).is_some());
            Mutex::new(Host {
                clock: 1.0 + DRIFT_MAX * (2.0 * fraction() - 1.0),
                losses: 0,
                process: None,
                slices: served.map(|slice| (slice, HostSlice::default())).collect(),
            })
        };
        let hosts = (0..plan.servers).map(host).collect();
        Fleet(Arc::new(Inner {
            plan,
            registry: MemoryRegistry::default(),
            sabotage,
            slow,
            way_max: WAY_MAX.mul_f64(fraction()),
            hosts,
            slices,
            deaths: AtomicU64::new(0),
        }))
    }

    /// The servers of each slice.
    pub(super) fn pairs(&self) -> impl Iterator<Item = ServerPair> {
        (0..self.0.slices.len()).map(|slice| ServerPair::new(self.clone(), slice))
    }

    /// The servers of any slice.
    pub(super) fn draw_pair(&self) -> ServerPair {
        ServerPair::new(self.clone(), below(self.0.slices.len()))
    }

    /// The name of a slice, which is that of its export.
    pub(super) fn name(slice: usize) -> &'static str {
        SLICES[slice]
    }

    fn host(&self, number: usize) -> MutexGuard<'_, Host> {
        lock(&self.0.hosts[number])
    }

    /// A slice at its home (0) or at its other server (1), if that runs.
    pub(super) fn server(&self, slice: usize, role: usize) -> Option<Arc<SliceServer>> {
        self.host(self.0.slices[slice].servers[role]).slices.get(&slice)?.server.clone()
    }

    /// Who of both serves a slice.
    pub(super) fn primary(&self, slice: usize) -> Option<usize> {
        let serves = |role: &usize| self.server(slice, *role).is_some_and(|one| one.is_primary());
        (0..SERVERS.len()).find(serves)
    }

    /// What a slice has noted at one of its servers.
    pub(super) fn journal(&self, slice: usize, role: usize) -> Option<MemoryJournal> {
        let host = self.host(self.0.slices[slice].servers[role]);
        host.slices.get(&slice).map(|one| one.journal.clone())
    }

    /// Bytes of buffers that the servers of a slice have lent and not got back.
    pub(super) fn buffer_bytes(&self, slice: usize) -> usize {
        let of = |server: &usize| -> usize {
            let host = self.host(*server);
            let pools = host.slices.get(&slice).into_iter().flat_map(|one| &one.pools);
            pools.map(|pool| pool.stats().used_bytes).sum()
        };
        self.0.slices[slice].servers.iter().map(of).sum()
    }

    /// Times that a server died.
    pub(super) fn deaths(&self) -> u64 {
        self.0.deaths.load(Ordering::SeqCst)
    }

    /// Starts whatever does not run. At first it waits until somebody serves each slice.
    pub(super) async fn start(&self) {
        let first = self.0.registry.peek(EXPORT).is_none();
        // Often so late that the other one has taken over.
        if !first && !random_u64().is_multiple_of(4) {
            sleep(SUCCEEDED_AFTER).await;
        }
        for number in 0..self.0.hosts.len() {
            if self.host(number).process.is_none() {
                self.start_one(number);
            }
        }
        while first && (0..self.0.slices.len()).any(|slice| self.primary(slice).is_none()) {
            sleep(LOOK_EVERY).await;
        }
    }

    fn start_one(&self, number: usize) {
        let (scope, here) = (Scope::new(), ExecutorHandle::current());
        let (clock, slices): (_, Vec<usize>) = {
            let host = self.host(number);
            (host.clock, host.slices.keys().copied().collect())
        };
        let server = ServerNumber(number as u16);
        let member = Arc::new(self.0.registry.member(server).with_clock(clock));
        let alive = member.clone();
        scope.spawn_on(&here, async move { alive.keep_alive().await });
        for slice in slices {
            self.start_slice(slice, number, &member, &scope);
        }
        self.host(number).process = Some(scope);
    }

    fn start_slice(
        &self,
        slice: usize,
        number: usize,
        member: &Arc<RegistryMember>,
        scope: &Scope,
    ) {
        let site = &self.0.slices[slice];
        let role = site.role(number).expect("a slice of this server");
        let pool = BufferPool::new(POOL_BYTES, 0);
        let mut host = self.host(number);
        let losses = host.losses;
        let one = host.slices.entry(slice).or_default();
        let page_cache = match self.0.plan.kind {
            PairKind::OneMachine => PageCacheId(1),
            PairKind::TwoMachines | PairKind::TwoMachinesLost => {
                PageCacheId(1 + number as u64 + self.0.plan.servers as u64 * losses)
            }
        };
        let fleet = Arc::downgrade(&self.0); // which has the server
        let export = move || {
            let fleet = Inner::upgraded(&fleet).expect("it outlives its servers");
            Export::new(Fleet::name(slice), fleet.mount(slice), Vec::new())
        };
        let server = Arc::new(SliceServer::new(SliceOptions {
            name: Fleet::name(slice).into(),
            other: ServerNumber(site.servers[1 - role] as u16),
            is_home: role == 0,
            options: ServerOptions {
                lease: LEASE,
                pool: pool.clone(),
                sabotage: self.0.sabotage,
                ..ServerOptions::default()
            },
            export: Box::new(export),
            journal: Arc::new(one.journal.clone()),
            loss: one.loss.unwrap_or(StateLoss::Nothing),
            page_cache,
            membership: member.clone(),
            link: Arc::new(SimLink::new(Arc::downgrade(&self.0), slice, 1 - role)),
        }));
        one.pools.retain(|pool| pool.stats().used_bytes > 0);
        one.pools.push(pool);
        one.server = Some(server.clone());
        drop(host);
        let (here, running) = (ExecutorHandle::current(), server.clone());
        scope.spawn_on(&here, async move { running.run().await });
        let mut incoming = site.network.listen(SERVERS[role]);
        scope.spawn_on(&here, async move {
            while let Some(connection) = incoming.recv().await {
                let server = server.server();
                dray_rt::spawn(async move { server.serve(Arc::new(connection)).await });
            }
        });
    }

    /// The disk of a slice, as the server sees it that begins to serve.
    fn mount(&self, slice: usize) -> Arc<dyn FileSystem> {
        let site = &self.0.slices[slice];
        site.disk.kill();
        let fs = site.disk.mount();
        *lock(&site.fs) = Some(fs.clone());
        match self.0.slow {
            None => Arc::new(fs),
            Some(slow) => {
                Arc::new(Observed::new(Arc::new(fs), Arc::new(Faults::new(vec![slow_fault(slow)]))))
            }
        }
    }

    /// Kills a server process: nearly always one that serves.
    pub(super) fn kill(&self) {
        let chosen = random_u64().is_multiple_of(8).then(|| below(self.0.hosts.len()));
        let slice = below(self.0.slices.len());
        let serving = self.primary(slice).map(|role| self.0.slices[slice].servers[role]);
        let number = chosen.or(serving).unwrap_or_else(|| below(self.0.hosts.len()));
        self.0.deaths.fetch_add(1, Ordering::SeqCst);
        self.kill_one(number);
    }

    fn kill_one(&self, number: usize) {
        let mut host = self.host(number);
        let Some(scope) = host.process.take() else { return };
        let mut served = Vec::new();
        for (slice, one) in &mut host.slices {
            let Some(server) = one.server.take() else { continue };
            if server.has_begun() {
                one.loss = None;
            }
            match server.is_primary() {
                true => served.push(*slice),
                // It may have handed over what it has open for clients that have not come back.
                false => self.0.slices[*slice].disk.keep_removed(),
            }
        }
        let is_machine_lost = self.0.plan.kind == PairKind::TwoMachinesLost
            && !served.is_empty()
            && random_u64().is_multiple_of(2);
        if is_machine_lost {
            host.losses += 1;
            host.slices.values_mut().for_each(|one| one.loss = Some(StateLoss::Unsynced));
        }
        drop(host);
        for slice in served {
            let site = &self.0.slices[slice];
            // First: the end of the process's objects must change nothing.
            match is_machine_lost {
                true => site.disk.lose_written(random_u64()),
                false => site.disk.kill(),
            }
            *lock(&site.fs) = None;
        }
        self.at_its_slices(number, |site, role| site.network.break_all(SERVERS[role]));
        scope.kill();
    }

    fn at_its_slices(&self, number: usize, work: impl Fn(&SimSlice, usize)) {
        for site in &self.0.slices {
            if let Some(role) = site.role(number) {
                work(site, role);
            }
        }
    }

    /// What could be cut.
    pub(super) fn draw_cut(&self) -> FleetCut {
        let (server, slice) = (below(self.0.hosts.len()), below(self.0.slices.len()));
        match random_u64() % 4 {
            0 => FleetCut::Membership(server),
            1 => FleetCut::Peers(slice),
            2 => FleetCut::Clients(server),
            _ => FleetCut::All(server),
        }
    }

    /// Cuts a server off from what servers agree on, from other ones, or from everybody who connects to it,
    /// or ends that.
    pub(super) fn cut(&self, what: FleetCut, is_cut: bool) {
        let from_membership = |number| self.0.registry.cut_off(ServerNumber(number as u16), is_cut);
        let from_peers = |site: &SimSlice| site.are_peers_cut.store(is_cut, Ordering::SeqCst);
        let from_clients =
            |site: &SimSlice, role: usize| site.network.partition(SERVERS[role], is_cut);
        match what {
            FleetCut::Membership(number) => from_membership(number),
            FleetCut::Peers(slice) => from_peers(&self.0.slices[slice]),
            FleetCut::Clients(number) => self.at_its_slices(number, from_clients),
            FleetCut::All(number) => {
                from_membership(number);
                self.at_its_slices(number, |site, role| {
                    from_peers(site);
                    from_clients(site, role);
                });
            }
        }
    }
}

impl Inner {
    /// The fleet, as long as the simulation lasts.
    pub(super) fn upgraded(weak: &Weak<Inner>) -> Option<Fleet> {
        weak.upgrade().map(Fleet)
    }
}
