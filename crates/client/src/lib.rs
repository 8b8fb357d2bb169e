//! Builds a client stack from a target string: for mounts, and for applications that use
//! files of a server without mounting it.
//!
//! This crate must not know about FUSE, nor read configuration files: it is given a
//! [`Target`] and [`ConnectOptions`].

mod batch;
mod client;
mod connection;
mod connector;
mod identity;
mod memory;
mod target;

pub use client::{Client, Dir, File, connect};
pub use connection::{ClientConnection, ClientProjection};
pub use connector::{
    ConnectOptions, connect_session, connect_timeout, session_over, take_over_session,
};
pub use identity::own_identity;
pub use memory::{ClientFiles, ClientMemory};
pub use target::Target;

pub use dray_rpc::auth::Key;
pub use dray_rpc::client::{
    ChannelStats, ClientSession, ConnectError, DirtyLogSummary, KeptWritesStatus,
    LeaseMemoryStatus, LeaseWish, LocalLogDisk, LossEvent, RemoteFs, SessionMemory, SessionStatus,
    UnsyncedStatus, WriteBackOptions, dirty_log_summaries, left_dirty_bytes,
};
