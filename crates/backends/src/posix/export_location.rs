//! The location of an export: whether its path still leads to the served directory, and whether the
//! file system of that directory is alive.

use std::ffi::CString;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use dray_core::{Errno, Result};

use super::PosixFs;
use super::core::Core;
use super::lower_fs::{MountLine, mount_of};
use super::{cred, sys};

/// Where the path of an export leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportLocation {
    /// To the served directory, or it cannot be determined.
    There,
    /// The directory was moved or replaced on the mount that it is on.
    Elsewhere,
    /// To another mount, or to none: its own was unmounted or moved, or something was mounted over it.
    OtherMount,
}

/// A receiver of the news that the file system below an export has died.
pub trait OnDeath: Send + Sync + fmt::Debug {
    /// The program of the file system has ended, and will never answer another call. The thread of
    /// a failed call says so before that call returns, perhaps often. The method must not wait.
    fn died(&self);
}

impl PosixFs {
    /// Where `path`, without links, leads. A file system that is mounted there now may hang, so a
    /// thread of the export looks at it.
    pub async fn location(&self, path: &Path) -> ExportLocation {
        let path = path.to_owned();
        let look = move |core: &Core| {
            cred::as_root(|| core.location(&path)).unwrap_or(ExportLocation::There)
        };
        self.core.run_for_all(look).await.unwrap_or(ExportLocation::There)
    }

    /// Whether the file system below can die while it is mounted, as one of a program can.
    pub fn is_mortal(&self) -> bool {
        self.core.below.is_fuse()
    }

    /// Whether it has died, so that only another mount brings it back. The question may hang, so a
    /// thread of the export asks it.
    pub async fn is_dead(&self) -> bool {
        let ask = |core: &Core| core.watch.mark(|| core.is_dead());
        self.core.run_for_all(ask).await.unwrap_or(false)
    }

    /// This backend is about to be dropped. Clients will open their files again in its successor.
    /// Files that were deleted meanwhile are kept for that.
    pub fn leave(&self) {
        self.core.files.leave();
        self.core.outside.end();
    }
}

impl Core {
    fn location(&self, path: &Path) -> ExportLocation {
        let Ok(c_path) = CString::new(path.as_os_str().as_encoded_bytes()) else {
            return ExportLocation::There;
        };
        let flags = libc::O_PATH | libc::O_NOFOLLOW;
        let there = match sys::open_at(libc::AT_FDCWD, c_path.as_ptr(), flags, 0) {
            Ok(there) => there,
            Err(Errno::ENOENT | Errno::ENOTDIR) => return self.location_of_missing(path),
            Err(_) => return ExportLocation::There,
        };
        match (mount_of(there.as_fd()), self.mount_number) {
            // Another mount of the same directory, over its own one, is as good. A mount that is
            // out of the tree is not looked at: it may hang.
            (Some(there_is), Some(own)) if there_is != own => {
                let covered =
                    MountLine::find(own).is_some() && self.is_root(there.as_fd()) == Some(true);
                if covered { ExportLocation::There } else { ExportLocation::OtherMount }
            }
            _ => match self.is_root(there.as_fd()) {
                Some(false) => ExportLocation::Elsewhere,
                _ => ExportLocation::There,
            },
        }
    }

    /// Whether this is the directory that is served; none where it cannot be looked at.
    fn is_root(&self, there: BorrowedFd<'_>) -> Option<bool> {
        let (there, root) = (sys::stat(there).ok()?, sys::stat(self.root.fd()).ok()?);
        Some((there.dev, there.attr.ino) == (root.dev, root.attr.ino))
    }

    /// Nothing is at `path`: the directory was moved, or a mount above it was moved or unmounted.
    fn location_of_missing(&self, path: &Path) -> ExportLocation {
        let Some(own) = self.mount_number else { return ExportLocation::Elsewhere };
        // An unmounted mount has no line, and a moved mount has another place.
        match MountLine::find(own) {
            Some(mounted) if path.starts_with(mounted.place()) => ExportLocation::Elsewhere,
            _ => ExportLocation::OtherMount,
        }
    }

    /// The kernel answers for a program that has ended. The answer of statfs(2) is not used
    /// otherwise.
    fn is_dead(&self) -> bool {
        let asked = cred::as_root(|| sys::statfs(self.mount_fd()));
        self.below.is_fuse() && matches!(asked, Ok(Err(errno)) if is_death(errno))
    }

    /// Checks the outcome of a call, and reports the death of the file system below. An error alone
    /// does not prove the death, since a program can answer the same for another reason.
    pub(super) fn noticing_death<T>(&self, done: Option<Result<T>>) -> Option<Result<T>> {
        if let (Some(Err(error)), Some(on_death)) = (&done, &self.options.on_death)
            && is_death(error.errno())
            && self.is_dead()
        {
            on_death.died();
        }
        done
    }
}

/// What the kernel answers once the connection to a program is gone (`fuse_abort_conn` and
/// `fuse_simple_request` in fs/fuse/dev.c).
fn is_death(errno: Errno) -> bool {
    errno == Errno::ENOTCONN || errno.raw() == libc::ECONNABORTED
}
