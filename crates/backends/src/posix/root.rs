//! A directory that is about to be exported. It is opened first. What is found out about it is then
//! true of the directory that will be served, whatever is mounted at its path later.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use dray_core::{Errno, Error, Result};

use super::fs_identity::{self, Difference, FsIdentity};
use super::lower_fs::{LowerFs, MountLine, mount_of};
use super::sys::InodeStat;
use super::{cred, sys};

/// An opened directory, and its file system.
pub struct Root {
    /// A real descriptor, without `O_PATH`.
    pub(super) dir: OwnedFd,
    pub(super) stat: InodeStat,
    pub(super) magic: i64,
    /// The kernel's number of its mount; none where /proc does not say.
    pub(super) mount: Option<u64>,
    pub(super) below: LowerFs,
    identity: FsIdentity,
}

impl Root {
    /// Opens `dir`. The process must be root's. Errors: `EPERM` without the rights, and those of
    /// open(2), such as `ENOTDIR`.
    pub fn open(dir: &Path) -> Result<Root> {
        cred::release()?; // it is opened as the server
        // SAFETY: geteuid cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            return Err(Error::new(Errno::EPERM)
                .because("only root can serve a directory under its users' identities"));
        }
        let dir = open_dir(dir, libc::O_RDONLY)?;
        let (_, magic) = sys::statfs(dir.as_fd())?;
        let stat = sys::stat(dir.as_fd())?;
        let mount = mount_of(dir.as_fd());
        let mounted = mount.and_then(MountLine::find);
        let below = LowerFs::of(mounted.as_ref(), magic);
        let about = (&stat, mounted.as_ref());
        let identity = FsIdentity::of(dir.as_fd(), magic, about, &below.kind);
        Ok(Root { dir, stat, magic, mount, below, identity })
    }

    /// The identity of the directory and its file system.
    pub fn identity(&self) -> &FsIdentity {
        &self.identity
    }

    /// How it differs from the recorded identity `noted`. None if it is the same, or if its file
    /// system is and the recorded directory was removed. `same_boot`: the machine has not been
    /// started since.
    pub fn difference(&self, noted: &FsIdentity, same_boot: bool) -> Option<Difference> {
        let dir = self.dir.as_fd();
        if !noted.is_same_file_system(&self.identity, same_boot) {
            return Some(Difference::FileSystem);
        }
        if self.identity.in_memory && !same_boot {
            return None; // no handle of before means anything
        }
        if fs_identity::is_of_other_subvolume(noted, dir, self.magic) {
            return Some(Difference::FileSystem);
        }
        fs_identity::is_beside(noted, dir, self.magic).then_some(Difference::Directory)
    }

    /// Whether it is the top of the mount at `place`, or below that on the same mount. Errors:
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
        .map_err(|_| Error::new(Errno::EINVAL).because("the path has a NUL byte"))?;
    let flags = flags | libc::O_DIRECTORY;
    Ok(sys::open_at(libc::AT_FDCWD, path.as_ptr(), flags, 0)?)
}
