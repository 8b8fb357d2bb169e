//! What has become of the place of an export: whether its path leads to it still, and whether the
//! file system that it is on lives.

use std::ffi::CString;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use dray_core::{Errno, Result};

use super::PosixFs;
use super::below::{Mounted, mount_of};
use super::core::Core;
use super::{cred, sys};

/// What the path of an export leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// To the directory that is served, or nobody can tell.
    There,
    /// The directory was moved or replaced on the mount that it is on.
    Elsewhere,
    /// To another mount, or to none: its own was unmounted or moved, or something was mounted over it.
    OtherMount,
}

/// Whoever has to know at once that the file system below an export has died.
pub trait OnDeath: Send + Sync + fmt::Debug {
    /// Its program is gone, and no call to it will ever be answered. Said, perhaps often, before a
    /// call that failed because of that returns, by whichever thread made it: it must not wait.
    fn died(&self);
}

impl PosixFs {
    /// What `path`, without links, leads to. What is mounted there now may hang, so it is looked at on
    /// a thread of the export's own.
    pub async fn place(&self, path: &Path) -> Place {
        let path = path.to_owned();
        let look = move |core: &Core| cred::as_root(|| core.place(&path)).unwrap_or(Place::There);
        self.core.run_for_all(look).await.unwrap_or(Place::There)
    }

    /// Whether the file system below can die while it is mounted, as one of a program can.
    pub fn is_mortal(&self) -> bool {
        self.core.below.is_fuse()
    }

    /// Whether it has died, and nothing but another mount brings it back. It is asked, and may hang:
    /// that is done on a thread of the export's own.
    pub async fn is_dead(&self) -> bool {
        let ask = |core: &Core| core.watched.mark(|| core.is_dead());
        self.core.run_for_all(ask).await.unwrap_or(false)
    }

    /// It is about to be dropped, and whoever has files open will open them again in what takes its
    /// place: those that were deleted meanwhile are kept for that.
    pub fn leave(&self) {
        self.core.files.leave();
    }
}

impl Core {
    fn place(&self, path: &Path) -> Place {
        let Ok(c_path) = CString::new(path.as_os_str().as_encoded_bytes()) else {
            return Place::There;
        };
        let flags = libc::O_PATH | libc::O_NOFOLLOW;
        let there = match sys::open_at(libc::AT_FDCWD, c_path.as_ptr(), flags, 0) {
            Ok(there) => there,
            Err(Errno::ENOENT | Errno::ENOTDIR) => return self.place_of_missing(path),
            Err(_) => return Place::There,
        };
        match (mount_of(there.as_fd()), self.mount_number) {
            // The very directory by another mount, over its own one, is as good. One that is out of
            // the tree is not even looked at: it may hang.
            (Some(there_is), Some(own)) if there_is != own => {
                let covered =
                    Mounted::find(own).is_some() && self.is_root(there.as_fd()) == Some(true);
                if covered { Place::There } else { Place::OtherMount }
            }
            _ => match self.is_root(there.as_fd()) {
                Some(false) => Place::Elsewhere,
                _ => Place::There,
            },
        }
    }

    /// Whether this is the directory that is served; none where it cannot be looked at.
    fn is_root(&self, there: BorrowedFd<'_>) -> Option<bool> {
        let (there, root) = (sys::stat(there).ok()?, sys::stat(self.root.fd()).ok()?);
        Some((there.dev, there.attr.ino) == (root.dev, root.attr.ino))
    }

    /// Nothing is at `path`: the directory has been moved, or what it was mounted with has.
    fn place_of_missing(&self, path: &Path) -> Place {
        let Some(own) = self.mount_number else { return Place::Elsewhere };
        // One that is unmounted has no line, and one that was moved another place.
        match Mounted::find(own) {
            Some(mounted) if path.starts_with(mounted.place()) => Place::Elsewhere,
            _ => Place::OtherMount,
        }
    }

    /// The kernel answers for a program that is gone; nothing is kept of what statfs(2) says.
    fn is_dead(&self) -> bool {
        let asked = cred::as_root(|| sys::statfs(self.mount_fd()));
        self.below.is_fuse() && matches!(asked, Ok(Err(errno)) if is_death(errno))
    }

    /// Looks at what a call has come to. One that failed as all do on a file system that has died has
    /// somebody told, if it has: a program can say the same of something else.
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
