//! The kernel's FUSE interface: numbers, requests, answers.

pub mod abi;
mod decode;
pub(crate) mod reply;
mod request;
pub(crate) mod wire;

pub use decode::{decode_classic, decode_ring, forgets};
pub use request::{
    AttributeOperation, CopyArgs, FileOperation, Head, InitArgs, LockArgs, NameOperation,
    OpenOperation, Operation, Request, SessionOperation, SetattrArgs, WriteArgs, XattrOperation,
};
