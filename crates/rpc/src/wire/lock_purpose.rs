//! The purposes of a call for a lock.

use crate::wire::codec::wire_numbers;

/// Why a client calls for a lock. All but the first two are of clients that have
/// [`FEATURE_LOCK_LEASES`](super::FEATURE_LOCK_LEASES).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LockPurpose {
    /// A program takes a lock, or gives it back.
    #[default]
    Program,
    /// The lock was held before the server lost its state.
    Reclaim,
    /// As [`LockPurpose::Program`]. The client wants the lease on the file's fcntl locks with the answer. No other call
    /// of the client that changes such locks of the file is under way, and none begins before the answer.
    AskForLease,
    /// The client gives the lease back. What the server has of its fcntl locks of the file is void. The locks that the
    /// client has follow, one by one. The lock of this call says nothing.
    GiveBackLocks,
    /// The same of a client that has no such lock: the lease ends.
    GiveBackNone,
    /// One of these locks.
    GivenBack,
    /// The last one of these locks: the lease ends.
    LastGivenBack,
}

impl LockPurpose {
    /// Whether the call is a part of giving a lease back.
    pub(crate) fn gives_back(self) -> bool {
        match self {
            LockPurpose::Program | LockPurpose::Reclaim | LockPurpose::AskForLease => false,
            LockPurpose::GiveBackLocks
            | LockPurpose::GiveBackNone
            | LockPurpose::GivenBack
            | LockPurpose::LastGivenBack => true,
        }
    }
}

wire_numbers!(LockPurpose {
    LockPurpose::Program = 0,
    LockPurpose::Reclaim = 1,
    LockPurpose::AskForLease = 2,
    LockPurpose::GiveBackLocks = 3,
    LockPurpose::GiveBackNone = 4,
    LockPurpose::GivenBack = 5,
    LockPurpose::LastGivenBack = 6,
});
