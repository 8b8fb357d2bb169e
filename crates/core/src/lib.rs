//! The vocabulary that all other crates of dray share. It has the [`FileSystem`] and [`OpenFile`]
//! traits, and the [`SessionControl`] that front ends need beside them. It also has ids, the
//! request [`Context`], errors and buffers.
//!
//! This crate must not know how anything is done. It performs no I/O, owns no clock, starts no
//! task, and imports no other crate of dray. Messages on the wire are not defined here: core types
//! are not wire types.

mod admission;
mod attr;
mod buf;
mod context;
mod dir;
mod errno;
mod error;
mod fs;
mod glob;
mod hash;
mod how;
mod id;
mod leases;
mod lock;
mod name;
mod named;
mod object;
mod op;
mod outside;
mod peer;
mod put;
mod session;
mod shares;
mod steps;
mod upper_leases;
mod validity;

pub use admission::{
    Admit, CallAdmission, CallDetail, Grant, GrantedAdmit, MakeKind, ObservedCall, OpenTotals,
};
pub use attr::{Attr, Entry, FileType, SetAttr, Statfs, TimeSet, Timestamp};
pub use buf::{Buf, BufMut, Memory, Pages, RegionId, Take, copied_bytes};
pub use context::{Cancel, Class, Context, Counted, Fence, Identity};
pub use dir::{DirEntry, DirPage};
pub use errno::Errno;
pub use error::{Error, Fate, Io, Result};
pub use fs::{FileSystem, Fut, LocalCopy, OpenFile};
pub use glob::glob_matches;
pub use hash::{IdHash, IdMap, fnv1a};
pub use how::{
    Access, Allocate, AtOpen, CreateHow, FsInfo, Make, OpenHow, RemoveKind, RenameHow, Seek, Write,
    XattrSet, Xflags,
};
pub use id::{
    ClientAddress, FileId, FsUuid, Gid, HolderId, LockOwner, NodeId, Origin, Pid, RequestId,
    SessionId, Uid,
};
pub use leases::{HearRecalls, HoldLeases, HoldNumber, LeaseKinds, Recall, RecallDone, RecallItem};
pub use lock::{Lock, LockFamily, LockKind, LockRange};
pub use name::{NAME_MAX_BYTES, Name, NameBuf};
pub use named::{must_be_named, open_named};
pub use object::{NEW_OBJECT_ATTRIBUTE, OBJECT_ATTRIBUTE};
pub use op::{Op, OpFacts};
pub use outside::{OnOutsideChanges, OutsideChange};
pub use peer::{Peer, RESERVED_PORTS_END, Via};
pub use put::{must_fit_one_call, put_in_steps};
pub use session::{CallersJob, FindJobs, HearChanges, NoSession, SessionControl, Stack, TellJobs};
pub use shares::{Reservation, Shares, Shortage, Taker};
pub use upper_leases::UpperLeases;
pub use validity::{PageValidity, Ttl, Validity};

/// Bytes that one read or write call may carry, everywhere in dray. The Linux
/// FUSE client splits larger calls at the same bound (`fs.fuse.max_pages_limit`
/// default of 256 pages).
pub const IO_MAX_BYTES: usize = 1 << 20;
/// Bytes of one extended attribute's value that Linux accepts (`XATTR_SIZE_MAX`).
pub const XATTR_MAX_BYTES: usize = 64 << 10;
/// Supplementary groups of a caller that a server takes. An access token of Windows holds as many,
/// so users of mixed sites can be in so many. Linux has room for 65,536 (`NGROUPS_MAX`), but takes
/// 40 ms to become a user in that many.
pub const GROUPS_MAX: usize = 1024;
/// Bytes of a symbolic link's target or of a path (`PATH_MAX`).
pub const PATH_MAX_BYTES: usize = 4096;
