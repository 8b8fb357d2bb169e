//! Where files end up: the implementations of [`dray_core::FileSystem`] that have no other
//! file system of ours below them.
//!
//! This crate must not know about wires, sessions or FUSE, and reads no configuration: it
//! is given options by whoever puts a stack together.

pub mod locks;
pub mod memory;
pub mod null;
pub mod posix;
