//! Read-ahead and write aggregation at the server, for file systems that are slow for each call.
//!
//! [`Aggregate`] stands around an export's file system. It recognises streams of reads and reads ahead in
//! pieces of 1 MiB. It merges small writes into pieces of 1 MiB, which it writes later. There is one
//! state for each file (`file_state`), for all that have the file open. All calls pass it.
//!
//! - *Calls on the same bytes* are kept apart by the server's ranges (ADR 0036), not here.
//! - *Pending data* lie in a mapped file (`store`). A killed server loses none of them, and the next one
//!   writes them before it serves ([`recover`]).
//! - *Syncs* write pending data first. So do calls that see or change the size, times or space of a file.
//! - *Read-ahead* is forgotten before and after each change of the same bytes.
//! - *Errors of late writes* are reported once through each open file, as the kernel reports errors of its
//!   own late writes (errseq_t in lib/errseq.c).
//!
//! ADR 0045 has the reasons.

mod ahead;
mod core;
mod extents;
mod figures;
mod file;
mod file_state;
mod fs;
mod late_errors;
mod map;
mod pending;
mod recover;
mod store;
mod streams;
#[cfg(test)]
mod tests;

pub use core::{AggregateOptions, PendingOptions};
pub(crate) use map::Map;

pub use figures::{AggregateCounts, AggregateFigures};
pub use fs::Aggregate;
pub use recover::{Recovered, recover};
pub use store::PendingEra;

use std::time::Duration;

/// The unit of requests to the file system below: what one call may move.
pub const BLOCK_BYTES: usize = dray_core::IO_MAX_BYTES;

/// Pending data are written, and data that were read ahead are forgotten, when they are so old. So this is
/// how late changes pass between clients and programs outside dray.
pub const AGE_MAX: Duration = Duration::from_secs(1);
