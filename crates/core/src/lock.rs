//! Advisory locks: flock(2) and fcntl(2) record locks.

use crate::{LockOwner, Pid};

/// Shared or exclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LockKind {
    /// Many holders at once (`F_RDLCK`, `LOCK_SH`).
    Shared,
    /// The lock has one holder (`F_WRLCK`, `LOCK_EX`).
    Exclusive,
    /// None: gives the range back (`F_UNLCK`, `LOCK_UN`).
    Unlock,
}

/// The two kinds of advisory lock, which do not see each other (as on Linux).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LockFamily {
    /// fcntl(2): belongs to a process, covers a range.
    Posix,
    /// flock(2): belongs to an open file description, covers the whole file.
    Flock,
}

/// A range of bytes, both ends included; `end` = `u64::MAX` means to the end of the file
/// wherever that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LockRange {
    /// First byte.
    pub start: u64,
    /// Last byte.
    pub end: u64,
}

impl LockRange {
    /// The whole file.
    pub const ALL: LockRange = LockRange { start: 0, end: u64::MAX };

    /// Whether the two have a byte in common.
    pub fn overlaps(self, other: LockRange) -> bool {
        self.start <= other.end && other.start <= self.end
    }
}

/// A lock as wanted or held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    /// flock or fcntl.
    pub family: LockFamily,
    /// Shared, exclusive, or to be released.
    pub kind: LockKind,
    /// Bytes covered.
    pub range: LockRange,
    /// Owner within its node.
    pub owner: LockOwner,
    /// The process that `F_GETLK` names as the holder.
    pub pid: Pid,
}

impl Lock {
    /// Whether `self` and `other` of *different* owners exclude each other.
    pub fn conflicts(&self, other: &Lock) -> bool {
        self.family == other.family
            && self.range.overlaps(other.range)
            && (self.kind == LockKind::Exclusive || other.kind == LockKind::Exclusive)
            && self.kind != LockKind::Unlock
            && other.kind != LockKind::Unlock
    }
}
