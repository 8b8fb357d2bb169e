//! Opening once more what is at hand, with rights that the caller need not have.
//!
//! This is the one place where that is done. What the kernel would check is left out here, so that the
//! flags are not the caller's: each purpose has its own, and none of them makes, cuts or hides anything.

use std::os::fd::{BorrowedFd, OwnedFd};

use dray_core::Result;

use super::core::Core;
use super::{cred, sys};

/// What the server opens something for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To refer to it: what is done with it is checked then.
    Refer,
    /// To read what the caller may execute, which has been checked.
    Execute(Granted),
    /// To go on with what has been opened before.
    GoOn(Granted),
}

/// The flags of an opening that was checked: the kernel has opened the file with them as its caller,
/// or a ticket says that it once did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Granted(i32);

/// Flags of open(2) that matter after the opening itself, and change nothing when it is repeated.
const LASTING: i32 = libc::O_ACCMODE
    | libc::O_APPEND
    | libc::O_SYNC
    | libc::O_DIRECT
    | libc::O_DIRECTORY
    | libc::O_NOATIME;

/// Those of them that give nothing but what reading does.
const READING: i32 = libc::O_SYNC | libc::O_DIRECT;

impl Granted {
    /// What lasts of the flags with which the kernel has opened a file for its caller.
    pub(super) fn to_caller(flags: i32) -> Granted {
        Granted(flags & LASTING)
    }

    /// What lasts of the flags that a ticket is shown with. A ticket says nothing of the owner, who
    /// alone may leave no trace in the time of access.
    pub(super) fn by_ticket(flags: i32) -> Granted {
        Granted(flags & LASTING & !libc::O_NOATIME)
    }

    /// The same for reading alone.
    pub(super) fn without_changes(self) -> Granted {
        Granted(self.0 & !(libc::O_ACCMODE | libc::O_APPEND))
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
            Purpose::Execute(Granted(flags)) => libc::O_RDONLY | flags & READING,
            Purpose::GoOn(Granted(flags)) => flags,
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
        let to_caller = Granted::to_caller(ALL);
        for purpose in [
            Purpose::Refer,
            Purpose::Execute(to_caller),
            Purpose::GoOn(to_caller),
            Purpose::GoOn(Granted::by_ticket(ALL)),
        ] {
            assert_eq!(purpose.flags() & changing, 0, "{purpose:?}");
        }
        let read = Purpose::Execute(to_caller).flags();
        assert_eq!(read & !(libc::O_SYNC | libc::O_DIRECT), libc::O_RDONLY);
        assert_eq!(Purpose::GoOn(Granted::by_ticket(ALL)).flags() & libc::O_NOATIME, 0);
        let reading = Granted::to_caller(libc::O_RDWR | libc::O_APPEND).without_changes();
        assert_eq!(Purpose::GoOn(reading).flags(), libc::O_RDONLY);
    }
}
