//! What the benchmarks of dray are made of: load generators, the raw denominators that
//! their figures are held against, counters per operation, and the reports.
//!
//! `script/bench` starts servers, mounts and peers; this crate loads them and reads the clocks. It
//! must not know how dray is built inside. It sees a mount as any other directory, a daemon as a
//! process id, and `dray status --json` as text. Only [`counters`], [`sessions`], [`lock_waiters`],
//! [`hoard`] and [`many`] speak the wire themselves, as a client would. [`batch`] is a program with the client
//! library, and [`null_mount`] uses the front end alone. [`at_home`] knows which server of a projection has a file.

pub mod aggregate;
pub mod alloc;
pub mod args;
pub mod at_home;
pub mod audit;
pub mod batch;
pub mod counters;
pub mod cpu;
pub mod field;
pub mod hoard;
pub mod idle;
pub mod inetd;
pub mod json;
pub mod layers;
pub mod load;
pub mod lock_waiters;
pub mod many;
pub mod measure;
pub mod nfs;
pub mod null_mount;
pub mod plot;
pub mod qos;
pub mod relay;
pub mod report;
pub mod sessions;
pub mod syscalls;
pub mod syscalls_here;
pub mod target;
pub mod tcp;
pub mod workload;

/// What any command of this crate answers: an error is text for people.
pub type CommandResult<T = ()> = Result<T, String>;

/// Turns any error into text that says what was being done.
pub fn context<E: std::fmt::Display>(what: &str) -> impl Fn(E) -> String + '_ {
    move |error| format!("{what}: {error}")
}
