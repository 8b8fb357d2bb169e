//! A directory that is about to be exported: opened, so that what is found out about it is true of
//! what will be served, whatever is mounted at its path meanwhile.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use dray_core::{Errno, Error, Result};

use super::below::{Below, Mounted, mount_of};
use super::origin::{self, Difference, Origin};
use super::sys::Stat;
use super::{cred, sys};

/// An opened directory, and what it is on.
pub struct Root {
    /// A real descriptor, not one for paths alone.
    pub(super) dir: OwnedFd,
    pub(super) stat: Stat,
    pub(super) magic: i64,
    /// The kernel's number of its mount; none where /proc does not say.
    pub(super) mount: Option<u64>,
    pub(super) below: Below,
    origin: Origin,
}

impl Root {
    /// Opens `dir`. The process must be root's. Errors: `EPERM` without the rights, and those of
    /// open(2), such as `ENOTDIR`.
    pub fn open(dir: &Path) -> Result<Root> {
        cred::release()?; // it is opened as the server
        // SAFETY: geteuid cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            return Err(Error::new(Errno::EPERM)
                .because("serving a directory under its users' identities takes root"));
        }
        let dir = open_dir(dir, libc::O_RDONLY)?;
        let (_, magic) = sys::statfs(dir.as_fd())?;
        let stat = sys::stat(dir.as_fd())?;
        let mount = mount_of(dir.as_fd());
        let mounted = mount.and_then(Mounted::find);
        let below = Below::of(mounted.as_ref(), magic);
        let about = (&stat, mounted.as_ref());
        let origin = Origin::of(dir.as_fd(), magic, about, &below.kind);
        Ok(Root { dir, stat, magic, mount, below, origin })
    }

    /// What it is to be known by.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// How it differs from what was `noted`. None: it is the same, or its file system is, and the
    /// directory that was noted has been removed from that. `same_boot`: the machine has not been
    /// started since.
    pub fn difference(&self, noted: &Origin, same_boot: bool) -> Option<Difference> {
        let dir = self.dir.as_fd();
        if !noted.is_same_file_system(&self.origin, same_boot) {
            return Some(Difference::FileSystem);
        }
        if self.origin.in_memory && !same_boot {
            return None; // no handle of before means anything
        }
        if origin::is_of_other_subvolume(noted, dir, self.magic) {
            return Some(Difference::FileSystem);
        }
        origin::is_beside(noted, dir, self.magic).then_some(Difference::Directory)
    }

    /// Whether it is the top of what is mounted at `place`, or below that on the same mount. Errors:
    /// those of opening `place`.
    pub fn is_on_what_is_mounted_at(&self, place: &Path) -> Result<bool> {
        let place = open_dir(place, libc::O_PATH)?;
        let mounted = |fd: BorrowedFd<'_>| -> Result<bool> {
            let bit = libc::STATX_ATTR_MOUNT_ROOT as u64;
            Ok(sys::stat(fd)?.attr.attributes & bit != 0)
        };
        Ok(mounted(place.as_fd())? && mount_of(place.as_fd()) == self.mount)
    }
}

fn open_dir(dir: &Path, flags: i32) -> Result<OwnedFd> {
    let path = CString::new(dir.as_os_str().as_encoded_bytes())
        .map_err(|_| Error::new(Errno::EINVAL).because("a path with a NUL byte"))?;
    let flags = flags | libc::O_DIRECTORY;
    Ok(sys::open_at(libc::AT_FDCWD, path.as_ptr(), flags, 0)?)
}
