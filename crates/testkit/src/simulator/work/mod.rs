//! What clients do, and how it shows afterwards that every change happened once.

mod append;
mod counter;
mod deleted;
pub(super) mod interleaved;
mod model;
mod names;
mod own;
mod register;
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
    fn prepare<'a>(&'a self, client: &'a Client) -> Fut<'a, Outcome<()>>;

    /// Of one client.
    fn run<'a>(&'a self, client: &'a Client) -> Fut<'a, Outcome<()>>;

    /// The node of this client has crashed.
    fn crashed(&self, number: usize);

    /// After the last fault: says what is wrong.
    fn verify<'a>(&'a self, client: &'a Client) -> Fut<'a, Outcome<()>>;
}

/// Kinds of work that seeds choose from.
pub(super) const KINDS: u64 = 7;

/// The kind that is [`words::Words`].
pub(super) const WORDS: u64 = 5;

/// The work of this kind for so many clients; [`KINDS`]: one sequence through all.
pub(super) fn of_kind(kind: u64, clients: usize) -> Arc<dyn Work> {
    match kind {
        0 => Arc::new(append::Append::default()),
        1 => Arc::new(counter::Counter::default()),
        2 => Arc::new(names::Names::new(clients)),
        3 => Arc::new(register::Register::default()),
        4 => Arc::new(model::Disjoint::new(clients)),
        WORDS => Arc::new(words::Words::default()),
        6 => Arc::new(deleted::Deleted::default()),
        _ => Arc::new(interleaved::Interleaved::new(clients)),
    }
}

/// Kinds of work for which the server's machine loses power.
pub(super) const POWER_KINDS: u64 = 3;

/// The work of this kind while the server's machine loses power. `kept`: clients keep
/// whatever they write, so that nothing may be lost.
pub(super) fn for_power(kind: u64, machine: &Machine, kept: bool) -> Arc<dyn Work> {
    match kind {
        0 => Arc::new(own::Own::new(kept)),
        1 => Arc::new(register::Register::without_power(machine.clone())),
        _ => Arc::new(append::Append::default()),
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
