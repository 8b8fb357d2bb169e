//! Connections within this process: for a front end that is a session of a server beside it, and
//! for tests.
//!
//! A frame is handed over by reference. Its data stay where they are and are shared, unless the
//! receiver wants them elsewhere ([`Sink::poll_shared`](crate::Sink::poll_shared)). Where both ends
//! are tasks of one executor nothing asks the kernel for anything. Else the one thing asked for is
//! to wake the other thread.

mod connection;
mod inbox;
mod listen;

pub use listen::{LocalConnector, LocalListener, listen};
