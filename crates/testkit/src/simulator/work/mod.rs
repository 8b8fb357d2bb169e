//! What clients do, and how it shows afterwards that every change happened once.

mod append;
mod believed;
mod copies;
mod counter;
mod deleted;
pub(super) mod interleaved;
mod model;
mod names;
mod noted;
mod own;
mod puts;
mod register;
mod rights;
pub(super) mod told;
mod words;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{Fut, LockFamily};
use dray_rt::{random_u64, sleep};

use super::client::Client;
use super::machine::Machine;
use super::{Outcome, World};

/// Something that several clients do at once.
pub(super) trait Work: Send + Sync + 'static {
    /// For people.
    fn name(&self) -> &'static str;

    /// Whether it can be checked if a client crashes.
    fn bears_crashes(&self) -> bool;

    /// Before the first fault, by one client.
    fn prepare<'a>(&'a self, _client: &'a Client) -> Fut<'a, Outcome<()>> {
        Box::pin(async { Ok(()) })
    }

    /// Of one client.
    fn run<'a>(&'a self, client: &'a Client) -> Fut<'a, Outcome<()>>;

    /// The node of this client has crashed.
    fn crashed(&self, number: usize);

    /// After the last fault: says what is wrong.
    fn verify<'a>(&'a self, client: &'a Client) -> Fut<'a, Outcome<()>>;

    /// After that, with everybody: what can be seen in calm alone.
    fn settled<'a>(&'a self, _world: &'a mut World) -> Fut<'a, Outcome<()>> {
        Box::pin(async { Ok(()) })
    }
}

/// How long clients wait, where they do not wait for ever: less than most faults last.
const LIMIT: Duration = Duration::from_millis(300);

/// Kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Appends to one log.
    Append,
    /// Counting under a lock.
    Counter,
    /// Counting and looking under flocks.
    Flocks,
    /// Changes of names, each by whoever may.
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
    /// Changes of files that others have open, and what these are told of them.
    Told,
    /// Appends, writes, cuts and reads of one file by clients that wait for a while only.
    Limited,
    /// A name that one client gives to file after file, and openings of these by it.
    Believed,
    /// One generated sequence through all clients in turn.
    Interleaved,
}

impl Kind {
    /// Those that seeds choose from.
    pub const ALL: [Kind; 14] = [
        Kind::Append,
        Kind::Counter,
        Kind::Names,
        Kind::Register,
        Kind::Model,
        Kind::Words,
        Kind::Deleted,
        Kind::Puts,
        Kind::Copies,
        Kind::Rights,
        Kind::Told,
        Kind::Flocks,
        Kind::Limited,
        Kind::Believed,
    ];

    /// How long clients wait for a server that is away; none: for ever.
    pub(super) fn limit(self) -> Option<Duration> {
        (self == Kind::Limited).then_some(LIMIT)
    }

    /// The work for so many clients.
    pub(super) fn work(self, clients: usize) -> Arc<dyn Work> {
        match self {
            Kind::Append => Arc::new(append::Append::default()),
            Kind::Counter => Arc::new(counter::Counter::under(LockFamily::Posix)),
            Kind::Flocks => Arc::new(counter::Counter::under(LockFamily::Flock)),
            Kind::Names => Arc::new(names::Names::new(clients)),
            Kind::Register => Arc::new(register::Register::default()),
            Kind::Model => Arc::new(model::Disjoint::new(clients)),
            Kind::Words => Arc::new(words::Words::default()),
            Kind::Limited => Arc::new(words::Words::limited()),
            Kind::Deleted => Arc::new(deleted::Deleted::default()),
            Kind::Puts => Arc::new(puts::Puts::default()),
            Kind::Copies => Arc::new(copies::Copies::default()),
            Kind::Rights => Arc::new(rights::Rights::default()),
            Kind::Believed => Arc::new(believed::Believed::default()),
            Kind::Told => Arc::new(told::Told::default()),
            Kind::Interleaved => Arc::new(interleaved::Interleaved::new(clients)),
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
    pub(super) fn work(self, machine: &Machine, kept: bool) -> Arc<dyn Work> {
        match self {
            PowerKind::Own => Arc::new(own::Own::new(kept)),
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
