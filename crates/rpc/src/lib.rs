//! The wire of dray: typed messages, sessions in which every change is applied exactly
//! once, the client end [`RemoteFs`](client::RemoteFs) and the server end.
//!
//! This crate must not know what serves the files (any `FileSystem` does), nor what carries the
//! frames (any `Connection` does). It must not know anything about FUSE or configuration.

pub mod auth;
pub mod client;
pub mod server;
pub mod wire;
