//! What clients do, and how it shows afterwards that every change happened once.

mod append;
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
mod words;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::Fut;
use dray_rt::{random_u64, sleep};

use super::Outcome;
use super::client::Client;
use super::machine::Machine;

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
}

/// Kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Appends to one log.
    Append,
    /// Counting under a lock.
    Counter,
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
    /// One generated sequence through all clients in turn.
    Interleaved,
}

impl Kind {
    /// Those that seeds choose from.
    pub const ALL: [Kind; 10] = [
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
    ];

    /// The work for so many clients.
    pub(super) fn work(self, clients: usize) -> Arc<dyn Work> {
        match self {
            Kind::Append => Arc::new(append::Append::default()),
            Kind::Counter => Arc::new(counter::Counter::default()),
            Kind::Names => Arc::new(names::Names::new(clients)),
            Kind::Register => Arc::new(register::Register::default()),
            Kind::Model => Arc::new(model::Disjoint::new(clients)),
            Kind::Words => Arc::new(words::Words::default()),
            Kind::Deleted => Arc::new(deleted::Deleted::default()),
            Kind::Puts => Arc::new(puts::Puts::default()),
            Kind::Copies => Arc::new(copies::Copies::default()),
            Kind::Rights => Arc::new(rights::Rights::default()),
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
            PowerKind::Counter => Arc::new(counter::Counter::default()),
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
