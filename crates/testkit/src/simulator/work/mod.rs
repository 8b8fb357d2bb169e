//! Workloads, and the check of each that every change happened once.

mod append;
mod cached_names;
mod copies;
mod counter;
mod deleted;
pub(super) mod interleaved;
mod kept;
mod kept_history;
mod leased;
mod model;
mod names;
pub(super) mod notifications;
mod operation_log;
mod own_files;
mod puts;
mod register;
mod rights;
mod words;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{Fut, LockFamily};
use dray_rt::{random_u64, sleep};

use super::client::SimClient;
use super::client_machine::ClientCrash;
use super::machine::ServerMachine;
use super::{Outcome, World};

/// Something that several clients do at once.
pub(super) trait Workload: Send + Sync + 'static {
    /// For people.
    fn name(&self) -> &'static str;

    /// Whether it can be checked if a client crashes.
    fn bears_crashes(&self) -> bool;

    /// Before the first fault, by one client.
    fn prepare<'a>(&'a self, _client: &'a SimClient) -> Fut<'a, Outcome<()>> {
        Box::pin(async { Ok(()) })
    }

    /// Of one client.
    fn run<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>>;

    /// The node of this client has crashed.
    fn crashed(&self, number: usize);

    /// The client goes down, and comes back later.
    fn goes_down(&self, _number: usize, _how: ClientCrash) {}

    /// Whether something that its programs have synced is at the client alone.
    fn has_synced(&self, _number: usize) -> bool {
        false
    }

    /// The client works again, or still. Nothing of before is under way but what it has kept.
    fn is_back(&self, _client: &SimClient) {}

    /// After the last fault: says what is wrong.
    fn verify<'a>(&'a self, client: &'a SimClient) -> Fut<'a, Outcome<()>>;

    /// After that, with everybody: what can be seen in calm alone.
    fn settled<'a>(&'a self, _world: &'a mut World) -> Fut<'a, Outcome<()>> {
        Box::pin(async { Ok(()) })
    }
}

/// How often the clients of [`WorkloadKind::WrittenBack`] work; before each time some may have gone down.
pub(super) const ROUNDS: u64 = 4;

/// How long clients wait, where they do not wait for ever: less than most faults last.
const LIMIT: Duration = Duration::from_millis(300);

/// Kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkloadKind {
    /// Appends to one log.
    Append,
    /// Counting under a lock.
    Counter,
    /// Counting and looking under flocks.
    Flocks,
    /// Counting under locks on which clients decide by themselves.
    Locked,
    /// Changes of names, each by a user that may.
    Names,
    /// Writes and reads of one value.
    Register,
    /// Generated sequences, each client in a directory of its own.
    Model,
    /// Appends, writes, cuts and reads of one file.
    Words,
    /// Files that are removed while they are open.
    Deleted,
    /// Whole files put, removed and read.
    Puts,
    /// Copies within and between two files.
    Copies,
    /// A right that one client gives and takes, and openings by the others.
    Rights,
    /// Changes of files that others have open, and the notifications that these get.
    Notified,
    /// Appends, writes, cuts and reads of one file by clients that wait for a while only.
    Limited,
    /// A name that one client gives to file after file, and openings of these by it.
    Believed,
    /// One generated sequence through all clients in turn.
    Interleaved,
    /// Names and attributes that are leased, and changes of them.
    Leased,
    /// Files whose writes are kept under write leases.
    Kept,
    /// The same with logs on the disks of clients, which go down and come back.
    WrittenBack,
}

impl WorkloadKind {
    /// The kinds that seeds choose from.
    pub const ALL: [WorkloadKind; 14] = [
        WorkloadKind::Append,
        WorkloadKind::Counter,
        WorkloadKind::Names,
        WorkloadKind::Register,
        WorkloadKind::Model,
        WorkloadKind::Words,
        WorkloadKind::Deleted,
        WorkloadKind::Puts,
        WorkloadKind::Copies,
        WorkloadKind::Rights,
        WorkloadKind::Notified,
        WorkloadKind::Flocks,
        WorkloadKind::Limited,
        WorkloadKind::Believed,
    ];

    /// How long clients wait for a server that is away; none: for ever.
    pub(super) fn limit(self) -> Option<Duration> {
        (self == WorkloadKind::Limited).then_some(LIMIT)
    }

    /// Whether the server leases names and attributes to the clients.
    pub(super) fn leases(self) -> bool {
        matches!(self, WorkloadKind::Leased | WorkloadKind::Locked) || self.keeps_writes()
    }

    /// Whether clients keep what they write under write leases.
    pub(super) fn keeps_writes(self) -> bool {
        self == WorkloadKind::Kept || self.writes_back()
    }

    /// Whether clients keep that in logs on their disks.
    pub(super) fn writes_back(self) -> bool {
        self == WorkloadKind::WrittenBack
    }

    /// What the clocks of clients count in a second of the server, in turn, seconds. Leases bear that it counts a
    /// tenth more than theirs.
    pub(super) fn clocks(self) -> [f64; 3] {
        if self.leases() { [1.0 / 1.1, 1.0, 1.1] } else { [1.0; 3] }
    }

    /// What faults of a run wait for is so many times as long. Changes wait for leases after each
    /// death of the server.
    pub(super) fn slowness(self) -> u32 {
        if self.leases() { 20 } else { 1 }
    }

    /// The work for so many clients.
    pub(super) fn work(self, clients: usize) -> Arc<dyn Workload> {
        match self {
            WorkloadKind::Append => Arc::new(append::Append::default()),
            WorkloadKind::Counter => Arc::new(counter::Counter::under(LockFamily::Posix)),
            WorkloadKind::Flocks => Arc::new(counter::Counter::under(LockFamily::Flock)),
            WorkloadKind::Locked => Arc::new(counter::Counter::under_leases()),
            WorkloadKind::Names => Arc::new(names::Names::new(clients)),
            WorkloadKind::Register => Arc::new(register::Register::default()),
            WorkloadKind::Model => Arc::new(model::Disjoint::new(clients)),
            WorkloadKind::Words => Arc::new(words::Words::default()),
            WorkloadKind::Limited => Arc::new(words::Words::limited()),
            WorkloadKind::Deleted => Arc::new(deleted::Deleted::default()),
            WorkloadKind::Puts => Arc::new(puts::Puts::default()),
            WorkloadKind::Copies => Arc::new(copies::CopyWorkload::default()),
            WorkloadKind::Rights => Arc::new(rights::Rights::default()),
            WorkloadKind::Believed => Arc::new(cached_names::CachedNames::default()),
            WorkloadKind::Notified => Arc::new(notifications::Notifications::default()),
            WorkloadKind::Leased => Arc::new(leased::Leased::new(clients)),
            WorkloadKind::Kept => Arc::new(kept::Kept::new(clients, 1)),
            WorkloadKind::WrittenBack => Arc::new(kept::Kept::new(clients, ROUNDS)),
            WorkloadKind::Interleaved => Arc::new(interleaved::Interleaved::new(clients)),
        }
    }
}

/// Kinds of work for which the server's machine loses power.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerKind {
    /// Each client changes a file of its own and makes new ones.
    Own,
    /// Writes and reads of one value.
    Register,
    /// Appends to one log.
    Append,
    /// Counting under a lock.
    Counter,
}

impl PowerKind {
    /// All of them.
    pub const ALL: [PowerKind; 4] =
        [PowerKind::Own, PowerKind::Register, PowerKind::Append, PowerKind::Counter];

    /// The work while `machine` loses power. `kept`: clients keep whatever can be kept, so
    /// that nothing else may be lost.
    pub(super) fn work(self, machine: &ServerMachine, kept: bool) -> Arc<dyn Workload> {
        match self {
            PowerKind::Own => Arc::new(own_files::OwnFiles::new(kept)),
            PowerKind::Register => Arc::new(register::Register::without_power(machine.clone())),
            PowerKind::Append => Arc::new(append::Append::default()),
            PowerKind::Counter => Arc::new(counter::Counter::under(LockFamily::Posix)),
        }
    }
}

/// A number below `below`.
fn pick(below: u64) -> u64 {
    random_u64() % below
}

/// Thinks for a while.
async fn think() {
    sleep(Duration::from_micros(pick(3000))).await;
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
