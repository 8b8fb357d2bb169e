//! The kernel's FUSE protocol over /dev/fuse and io_uring, and the front end on it, which
//! turns the kernel's requests into calls on a [`FileSystem`](dray_core::FileSystem).
//!
//! This crate must not know what serves the files: neither networks nor wires, nor where
//! the options come from. It imports `core` and `rt`, and speaks to the kernel by itself.

mod front;
mod mount;
mod notify;
mod options;
pub mod proto;
mod state;
mod transport;
mod worker;

pub use mount::choice::NoRing;
pub use mount::device::{clone_device, open_device};
pub use mount::entry_reclaim::reclaim_entries;
pub use mount::session::{KernelSession, request_time_max};
pub use mount::wake::{is_aborted, wake_queues};
pub use mount::{MountFlags, MountOptions, mode_at, mount, remount, unmount};
pub use notify::{Notifier, resend};
pub use options::{Consistency, Host, NoHost, Options, Transport, TransportWish, WORKERS_MAX};
pub use state::State;
pub use state::passthrough::PassthroughStats;
pub use worker::flight::InFlight;
pub use worker::invalidator::{InvalidatorProcess, invalidate_nodes};
pub use worker::jobs::JobTable;
pub use worker::{Device, PerThread, Reporter, ServedMount, Stats};
