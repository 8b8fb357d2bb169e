//! The kernel's FUSE interface: numbers, requests, answers.

pub mod abi;
mod decode;
pub(crate) mod reply;
mod request;
pub(crate) mod wire;

pub use decode::{decode_classic, decode_ring, forgets};
pub use request::{CopyArgs, Head, InitArgs, LockArgs, Operation, Request, SetattrArgs};
