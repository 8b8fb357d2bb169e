//! Moves frames between two ends: buffer pools and providers of connections.
//!
//! A frame is a short head and, behind it, data that lands in memory which the receiver
//! chooses once it has seen the head. This crate knows bytes, not files: what a head
//! says is not its business.
//!
//! A provider is one folder: sockets, [`local`] (within this process) and [`sim`] (a simulated
//! network with faults). It has a [`Listener`], an [`Incoming`], a [`Connect`] and a [`Connection`],
//! and passes the suite in `tests/providers`; one that has addresses is named in `provider.rs`.

mod address;
mod connection;
mod in_turn;
pub mod local;
mod pool;
mod provider;
pub mod sim;
mod sockets;

pub use address::Address;
pub use connection::{
    Connection, DATA_MAX_BYTES, FIRST_HEAD_MAX_BYTES, HEAD_MAX_BYTES, NOTICES_MAX, Progress, Sink,
    Unfinished,
};
pub use dray_core::{Peer, RESERVED_PORTS_END};
pub use in_turn::ConnectInTurn;
pub use pool::{BufferPool, Charge, PoolShare, PoolStats};
pub use provider::{
    Bound, Connect, ConnectFrom, Incoming, Listener, Listening, connector, listen, listen_first,
};
pub use sockets::{ReservedPort, Sockets, somebody_listens};
