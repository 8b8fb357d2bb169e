//! Layers between front ends and backends.
//!
//! *Observers* look on: they may let a call wait or refuse it, and they learn how it ended.
//! [`Observed`] puts an observer around any file system, and asks it there. [`observe_export`] is for
//! a file system that a server serves: there the server asks, before a call waits for others.
//! [`metrics`], [`faults`] and [`audit`] are observers. [`qos`] lets calls wait, and is notified when they
//! have ended.
//!
//! *Transformers* carry out a call in their own way: [`placement`] makes one file system of several servers,
//! and [`aggregate`] reads ahead and merges small writes.
//!
//! This crate must not know what is below or above it: neither wires, nor FUSE, nor where
//! the options come from. It imports `core` and `rt` only.

pub mod aggregate;
pub mod audit;
mod export;
pub mod faults;
pub mod metrics;
mod observe;
mod observed;
pub mod placement;
pub mod qos;
mod session;

pub use export::{ObservedExport, observe_export};
pub use observe::{Observer, Outcome};
pub use observed::Observed;
pub use session::observed_stack;
