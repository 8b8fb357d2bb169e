//! Opens a file once more from a descriptor, with rights that the caller need not have.
//!
//! No other code of this backend does that. The kernel checks no rights of the caller here, so the
//! caller's flags are not used. Each purpose has its own flags. None of them creates, truncates or hides
//! anything.

use std::os::fd::{BorrowedFd, OwnedFd};

use dray_core::Result;

use super::core::Core;
use super::{cred, sys};

/// Why the server opens a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To refer to it. Rights are checked with each later use.
    Refer,
    /// To read a file that the caller may execute, which has been checked.
    Execute(OpenGrant),
    /// To continue an open that was granted before.
    GoOn(OpenGrant),
}

/// The flags of an open whose rights were checked. The kernel has opened the file with them as its
/// caller, or a ticket says that it once did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OpenGrant(i32);

/// Flags of open(2) that matter after the open, and change nothing when it is repeated.
const LASTING: i32 = libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_SYNC
    | libc::O_DIRECT
    | libc::O_DIRECTORY
    | libc::O_NOATIME;

/// The flags among them that allow only reading.
const READING: i32 = libc::O_SYNC | libc::O_DIRECT;

impl OpenGrant {
    /// The lasting flags of an open that the kernel has made for its caller.
    pub(super) fn to_caller(flags: i32) -> OpenGrant {
        OpenGrant(flags & LASTING)
    }

    /// The lasting flags of an open by ticket. A ticket does not prove the owner, who alone may
    /// suppress changes of the time of access.
    pub(super) fn by_ticket(flags: i32) -> OpenGrant {
        OpenGrant(flags & LASTING & !libc::O_NOATIME)
    }

    /// The same for reading alone.
    pub(super) fn without_changes(self) -> OpenGrant {
        OpenGrant(self.0 & !(libc::O_ACCMODE | libc::O_APPEND))
    }

    /// Whether more than reading was granted.
    pub(super) fn changes(self) -> bool {
        self.0 & libc::O_ACCMODE != libc::O_RDONLY
    }

    pub(super) fn reads(self) -> bool {
        matches!(self.0 & libc::O_ACCMODE, libc::O_RDONLY | libc::O_RDWR)
    }

    pub(super) fn appends(self) -> bool {
        self.0 & libc::O_APPEND != 0
    }
}

impl Purpose {
    fn flags(self) -> i32 {
        match self {
            Purpose::Refer => libc::O_PATH,
            Purpose::Execute(OpenGrant(flags)) => libc::O_RDONLY | flags & READING,
            Purpose::GoOn(OpenGrant(flags)) => flags,
        }
    }
}

impl Core {
    /// Opens what `fd` refers to as the server. Errors: those of open(2).
    pub(super) fn reopen_as_server(&self, fd: BorrowedFd<'_>, purpose: Purpose) -> Result<OwnedFd> {
        Ok(cred::as_root(|| sys::reopen(self.proc_fd(), fd, purpose.flags()))??)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every flag that there may ever be.
    const ALL: i32 = i32::MAX;

    #[test]
    fn whatever_was_asked_for_nothing_is_made_or_cut_or_hidden() {
        let changing = libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC | libc::O_TMPFILE;
        let changing = changing & !libc::O_DIRECTORY; // O_TMPFILE has that, too
        let to_caller = OpenGrant::to_caller(ALL);
        for purpose in [
            Purpose::Refer,
            Purpose::Execute(to_caller),
            Purpose::GoOn(to_caller),
            Purpose::GoOn(OpenGrant::by_ticket(ALL)),
        ] {
            assert_eq!(purpose.flags() & changing, 0, "{purpose:?}");
        }
        let read = Purpose::Execute(to_caller).flags();
        assert_eq!(read & !(libc::O_SYNC | libc::O_DIRECT), libc::O_RDONLY);
        assert_eq!(Purpose::GoOn(OpenGrant::by_ticket(ALL)).flags() & libc::O_NOATIME, 0);
        let reading = OpenGrant::to_caller(libc::O_RDWR | libc::O_APPEND).without_changes();
        assert_eq!(Purpose::GoOn(reading).flags(), libc::O_RDONLY);
    }
}
