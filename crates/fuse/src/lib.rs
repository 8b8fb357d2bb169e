//! The kernel's FUSE protocol over /dev/fuse and io_uring, and the front end on it, which
//! turns the kernel's requests into calls on a [`FileSystem`](dray_core::FileSystem).
//!
//! This crate must not know what serves the files: neither networks nor wires, nor where
//! the options come from. It imports `core` and `rt`, and speaks to the kernel by itself.

mod agree;
mod capabilities;
mod choice;
mod cpus;
mod crew;
mod device;
mod flight;
mod front;
mod handles;
mod identity;
mod mount;
mod moved;
mod nodes;
mod notify;
mod options;
mod places;
pub mod proto;
mod region;
mod session;
mod shared;
mod state;
mod transport;
mod wake;
mod worker;

pub use choice::NoRing;
pub use device::{clone_device, open_device};
pub use flight::InFlight;
pub use mount::{MountFlags, MountOptions, mode_at, mount, remount, unmount};
pub use notify::{Notifier, resend};
pub use options::{Consistency, Host, NoHost, Options, Transport, TransportWish, WORKERS_MAX};
pub use session::Session;
pub use state::State;
pub use wake::wake_queues;
pub use worker::{Device, Mounted, PerThread, Reporter, Stats};
