//! The backends: implementations of [`dray_core::FileSystem`] with no other file system of dray below
//! them.
//!
//! This crate must not know wires, sessions or FUSE, and reads no configuration. The code that puts a
//! stack together gives it options. [`backend`] has what a server needs of a backend.

pub mod backend;
pub mod locks;
pub mod memory;
pub mod null;
pub mod posix;

/// The kinds of backends here, a line each. A server may have one more, which knows wires.
pub static KINDS: &[&dyn backend::BackendKind] = &[
    &posix::PosixKind, // the first is that of exports that name none
    &memory::MemoryKind,
];
