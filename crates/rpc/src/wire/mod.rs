//! The messages that travel, as plain typed structs, little-endian, every length checked.
//!
//! Core types are not wire types. This module alone knows how they are laid out, and a change here
//! is a change of the protocol version.

use std::time::Duration;

mod absent_xattrs;
mod audit;
mod call;
mod changed;
mod codec;
mod head;
mod hello;
mod jobs;
mod leases;
mod lock_purpose;
mod operations;
mod replica;
mod reply;
mod results;
mod rows;
mod stamp;
mod ticket;
mod types;
mod usage;
mod write_back;

pub use absent_xattrs::{AbsentXattrs, LISTED_XATTRS, get_page, put_page};
pub use audit::{
    AuditCall, AuditConsumer, AuditHello, AuditPart, AuditReply, AuditSummary, AuditWanted,
    AuditWelcome,
};
pub use call::Call;
pub use changed::{CHANGED_MAX, get_changed, put_changed};
pub use codec::{Input, Malformed, Wire};
pub(crate) use codec::{wire_fields, wire_numbers};
pub use head::{CallHead, Kind, NO_SLOT, NotifyHead, peek_kind, peek_tag, peek_unknown_op};
pub use hello::{Auth, Challenge, HandshakeError, Hello, Proof, Refused, Welcome};
pub use jobs::{CALLERS_MAX, get_callers, get_jobs, put_callers, put_jobs};
pub use leases::{RECALL_ITEMS_MAX, RecallMessage};
pub use lock_purpose::LockPurpose;
pub(crate) use operations::copied_bytes;
use operations::features_of_operations;
pub use operations::{FEATURE_LOOKUP_OPEN, FEATURE_OPEN_NAMED, feature_of};
pub use replica::{BatchHead, BatchOutcome, BatchReply, ReplicaHello, ReplicaWelcome};
pub use reply::ReplyHead;
pub use results::Results;
pub use rows::{
    Breaks, CallRow, Changes, Extent, FileRef, Intent, NameLease, OpRow, Opening, Operand,
    SessionChange, SlotUse, Trace,
};
pub use stamp::{Change, FileDurableStamp, Stamp, get_durable_stamps, put_durable_stamp};
pub use ticket::Ticket;
pub use usage::{USAGE_MAX, UsageEntry, get_usage, put_usage};
pub use write_back::{EXTENTS_MAX, WriteBase, get_extents, put_extents};

/// Oldest protocol version that is understood.
pub const VERSION_MIN: u16 = 1;
/// Newest protocol version that is understood. Both ends use the newest they share.
pub const VERSION_MAX: u16 = 1;

/// Feature: answers to changes carry a [`Stamp`], and `sync_all`, `recover` and `redo` are
/// understood.
pub const FEATURE_STAMPS: u64 = 1;
/// Feature: answers carry a [`Ticket`] that a client can show to a later server epoch, and `reopen`
/// and `declare` are understood.
pub const FEATURE_TICKETS: u64 = 2;
/// Feature: a close may be sent that nobody waits for ([`CallHead::ONE_WAY`]).
pub const FEATURE_ONE_WAY: u64 = 4;
/// How long after it was sent a `lookup_open` a client may use the file that it opened, by the
/// client's clock.
pub const OPEN_AHEAD_USED_MAX: Duration = Duration::from_millis(2);
/// Feature: the server reports the version of a part of a split read ([`CallHead::SPLIT_READ`]).
pub const FEATURE_SPLIT_READS: u64 = 16;
/// Feature: [`NotifyHead::JOB_QUERY`] is answered.
pub const FEATURE_JOBS: u64 = 32;
/// Feature: the client caches what it has open, and wants to hear of changes by others
/// ([`NotifyHead::CHANGED`]). A client that does not cache is not woken for them.
pub const FEATURE_CHANGES: u64 = 64;
/// Feature: the client keeps what is leased to it, and answers [`NotifyHead::RECALL`]. Where an
/// export leases nothing, the server leaves the feature out.
pub const FEATURE_LEASES: u64 = 1024;
/// Feature: the server answers [`NotifyHead::PROBE`].
pub const FEATURE_PROBES: u64 = 2048;
/// Feature: answers to changes have the attributes of changed files beside their results
/// ([`ReplyHead::changed_files`]), where these are leased. A server without leases leaves the feature out.
pub const FEATURE_CHANGED_FILES: u64 = 8192;
/// Feature: `write_back` is understood, and the client may keep what it writes under a write lease, which answers
/// give with [`ReplyHead::write_lease`]. Where an export gives none, the server leaves the feature out.
pub const FEATURE_WRITE_LEASES: u64 = 16_384;
/// Feature: the client leases on to others what is leased to it. So it is asked back for files that it changes itself
/// by a name alone: the file may be another one than it knows. Where an export leases nothing, the server leaves the
/// feature out.
pub const FEATURE_LEASES_ON: u64 = 32_768;
/// Feature: the client may decide on the fcntl locks of a file by itself under a lease, which the answer to a lock gives
/// ([`LockPurpose::AskForLease`]). Where an export gives none, the server leaves the feature out.
pub const FEATURE_LOCK_LEASES: u64 = 65_536;
/// How long a hold lasts at most, by the server's clock. A server begins to lease only so long after its start, where
/// another one may have lost holds with its end.
pub const HOLD_TIME: Duration = Duration::from_secs(30);
/// The features that are not of operations alone, which are in the table of operations.
const OTHER_FEATURES: u64 = FEATURE_STAMPS
    | FEATURE_TICKETS
    | FEATURE_ONE_WAY
    | FEATURE_SPLIT_READS
    | FEATURE_JOBS
    | FEATURE_CHANGES
    | FEATURE_LEASES
    | FEATURE_PROBES
    | FEATURE_CHANGED_FILES
    | FEATURE_WRITE_LEASES
    | FEATURE_LEASES_ON
    | FEATURE_LOCK_LEASES;
/// All features that this version knows.
pub const FEATURES: u64 = OTHER_FEATURES | features_of_operations();
const _: () = assert!(
    OTHER_FEATURES & features_of_operations() == FEATURE_TICKETS | FEATURE_WRITE_LEASES,
    "a bit stands for two features"
);
/// Among a server's features: its machine has lost power, and it waits for what clients
/// have kept.
pub const RECOVERING: u64 = 1 << 63;
/// Among a server's features: every caller is the same user there, so that a client's kernel must
/// not judge by the ids of its callers.
pub const ONE_USER: u64 = 1 << 62;
/// Among a server's features: some callers are other users there than they say. A server that
/// forwards looks at files as root for its clients, and needs an export without that.
pub const SQUASHES: u64 = 1 << 61;
/// Among a server's features: it carries out writes after it has answered them, so that closes have to be
/// passed on, which report errors.
pub const LATE_WRITES: u64 = 1 << 60;

/// Most bytes that a page of directory entries takes; it travels as data.
pub const PAGE_MAX_BYTES: usize = 256 << 10;
