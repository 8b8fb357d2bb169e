//! Layers between front ends and backends.
//!
//! *Observers* look on: they may let a call wait or refuse it, and they learn how it ended.
//! One wrapper, [`Observed`], puts any of them around any file system; [`metrics`] and
//! [`faults`] are observers.
//!
//! This crate must not know what is below or above it: neither wires, nor FUSE, nor where
//! the options come from. It imports `core` and `rt` only.

pub mod faults;
pub mod metrics;
mod observe;
mod observed;

pub use observe::{Admit, Call, Observer, Outcome};
pub use observed::{Observed, observed_file};
