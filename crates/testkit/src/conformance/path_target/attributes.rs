//! Steps on attributes and extended attributes, by system calls.

use std::ffi::CString;

use dray_core::{Errno, XattrSet};

use super::{Answer, PathTarget, check, done};
use crate::conformance::fs_target::user_names;
use crate::model::StepOutcome;
use crate::step::{Action, Path, xattr_name};

impl PathTarget {
    pub(super) fn run_on_attributes(&self, client: usize, action: &Action) -> Answer {
        let path = |path: &Path| self.path(client, path);
        let at = libc::AT_FDCWD;
        match action {
            Action::Chmod { path: file, mode } => {
                // SAFETY: a C string that outlives the call.
                done(unsafe { libc::chmod(path(file).as_ptr(), *mode) })
            }
            Action::Lchown { path: file, uid, gid } => {
                let (uid, gid) = (uid.unwrap_or(u32::MAX), gid.unwrap_or(u32::MAX));
                // SAFETY: a C string that outlives the call.
                done(unsafe { libc::lchown(path(file).as_ptr(), uid, gid) })
            }
            Action::Truncate { path: file, size } => {
                let size = i64::try_from(*size).map_err(|_| Errno::EINVAL)?;
                // SAFETY: a C string that outlives the call.
                done(unsafe { libc::truncate(path(file).as_ptr(), size) })
            }
            Action::Utimens { path: file, mtime_sec } => {
                let time = |tv_sec, tv_nsec| libc::timespec { tv_sec, tv_nsec };
                let times = match mtime_sec {
                    Some(sec) => [time(0, libc::UTIME_OMIT), time(i64::from(*sec), 0)],
                    None => [time(0, libc::UTIME_NOW), time(0, libc::UTIME_NOW)],
                };
                // SAFETY: a C string and an array of two times that outlive the call.
                done(unsafe { libc::utimensat(at, path(file).as_ptr(), times.as_ptr(), 0) })
            }
            Action::Access { path: file, want } => {
                let (file, flags) = (path(file), libc::AT_EACCESS);
                // SAFETY: a C string that outlives the call. The raw call, because the C
                // library emulates AT_EACCESS with the process's ids.
                done(unsafe {
                    libc::syscall(libc::SYS_faccessat2, at, file.as_ptr(), *want, flags)
                })
            }
            _ => self.run_on_xattrs(client, action),
        }
    }

    fn run_on_xattrs(&self, client: usize, action: &Action) -> Answer {
        let path = |path: &Path| self.path(client, path);
        match action {
            Action::Setxattr { path: file, name, value, how } => {
                let (file, name) = (path(file), attribute(*name)?);
                let flags = match how {
                    XattrSet::Any => 0,
                    XattrSet::Create => libc::XATTR_CREATE,
                    XattrSet::Replace => libc::XATTR_REPLACE,
                };
                let (start, len) = (value.as_ptr().cast(), value.len());
                // SAFETY: C strings and a slice that outlive the call.
                done(unsafe { libc::lsetxattr(file.as_ptr(), name.as_ptr(), start, len, flags) })
            }
            Action::Getxattr { path: file, name } => {
                let (file, name) = (path(file), attribute(*name)?);
                let mut value = vec![0u8; dray_core::XATTR_MAX_BYTES];
                let (start, len) = (value.as_mut_ptr().cast(), value.len());
                // SAFETY: C strings, and room for `len` bytes.
                let len = check(unsafe {
                    libc::lgetxattr(file.as_ptr(), name.as_ptr(), start, len) as i64
                })?;
                value.truncate(len as usize);
                Ok(StepOutcome::Bytes(value))
            }
            Action::Listxattr { path: file } => {
                let mut list = vec![0u8; dray_core::XATTR_MAX_BYTES];
                let (start, len) = (list.as_mut_ptr().cast(), list.len());
                // SAFETY: a C string, and room for `len` bytes.
                let len =
                    check(unsafe { libc::llistxattr(path(file).as_ptr(), start, len) as i64 })?;
                list.truncate(len as usize);
                Ok(user_names(&list))
            }
            Action::Removexattr { path: file, name } => {
                let (file, name) = (path(file), attribute(*name)?);
                // SAFETY: C strings that outlive the call.
                done(unsafe { libc::lremovexattr(file.as_ptr(), name.as_ptr()) })
            }
            _ => Err(Errno::ENOSYS),
        }
    }
}

fn attribute(number: u8) -> Result<CString, Errno> {
    CString::new(xattr_name(number)).map_err(|_| Errno::EINVAL)
}
