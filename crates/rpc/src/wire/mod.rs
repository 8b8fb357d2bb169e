//! What travels: messages as plain typed structs, little-endian, every length checked.
//!
//! Core types are not wire types: this module alone knows how they are laid out, and a
//! change here is a change of the protocol version.

mod call;
mod codec;
mod head;
mod hello;
mod stamp;
mod types;

pub use call::Call;
pub use codec::{Input, Malformed, Wire};
pub use head::{
    CallHead, Kind, NO_SLOT, NotifyHead, ReplyHead, peek_kind, peek_tag, peek_unknown_op,
};
pub use hello::{Auth, Challenge, HandshakeError, Hello, Proof, Refused, Welcome};
pub use stamp::{Change, Stamp, get_floors, put_floor};

/// Oldest protocol version that is understood.
pub const VERSION_MIN: u16 = 1;
/// Newest protocol version that is understood. Both ends use the newest they share.
pub const VERSION_MAX: u16 = 1;

/// Feature: answers to changes carry a [`Stamp`], and `sync_all`, `recover` and `redo` are
/// understood.
pub const FEATURE_STAMPS: u64 = 1;
/// All features that this version knows.
pub const FEATURES: u64 = FEATURE_STAMPS;
/// Among a server's features: its machine has lost power, and it waits for what clients
/// have kept.
pub const RECOVERING: u64 = 1 << 63;

/// Most bytes that a page of directory entries takes; it travels as data.
pub const PAGE_MAX_BYTES: usize = 256 << 10;
