//! The kernel's FUSE interface: numbers, requests, answers.

pub mod abi;
pub(crate) mod reply;
mod request;
pub(crate) mod wire;

pub use request::{
    CopyArgs, Head, InitArgs, LockArgs, Operation, Request, SetattrArgs, decode_classic,
    decode_ring, forgets,
};
