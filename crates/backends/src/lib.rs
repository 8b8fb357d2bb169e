//! Where files end up: the implementations of [`dray_core::FileSystem`] that have no other
//! file system of ours below them.
//!
//! This crate must not know about wires, sessions or FUSE, and reads no configuration: it
//! is given options by whoever puts a stack together. What a server needs of a backend is in
//! [`backend`].

pub mod backend;
pub mod locks;
pub mod memory;
pub mod null;
pub mod posix;

/// The kinds of backends that a server can serve, a line each.
pub static KINDS: &[&dyn backend::BackendKind] = &[
    &posix::PosixKind, // the first is that of exports that name none
    &memory::MemoryKind,
];
