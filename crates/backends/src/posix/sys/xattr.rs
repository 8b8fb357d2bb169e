//! Extended attributes of any descriptor's file, through its link in /proc/self/fd. The calls that take
//! a descriptor refuse one that was opened with `O_PATH`.

use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd};

use dray_core::{Errno, XATTR_MAX_BYTES, XattrSet};

use super::{CName, Sys, call};

/// An attribute's name; `EINVAL` with a NUL byte in it, `ERANGE` if it is no name's length.
pub(crate) fn xattr_name(name: &[u8]) -> Sys<CString> {
    if name.is_empty() || name.len() > 255 {
        return Err(Errno::ERANGE);
    }
    CString::new(name).map_err(|_| Errno::EINVAL)
}

/// getxattr(2).
pub(crate) fn get_xattr(fd: BorrowedFd<'_>, name: &CString) -> Sys<Vec<u8>> {
    let path = CName::proc_path(fd.as_raw_fd());
    fill(|room, bytes| {
        // SAFETY: the strings outlive the call; the kernel writes at most `bytes`.
        call(|| unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), room.cast(), bytes) })
    })
}

/// listxattr(2).
pub(crate) fn list_xattr(fd: BorrowedFd<'_>) -> Sys<Vec<u8>> {
    let path = CName::proc_path(fd.as_raw_fd());
    fill(|room, bytes| {
        // SAFETY: the path outlives the call; the kernel writes at most `bytes`.
        call(|| unsafe { libc::listxattr(path.as_ptr(), room.cast(), bytes) })
    })
}

/// Most values are small: a buffer of this many bytes first.
const FIRST_BYTES: usize = 256;

fn fill(mut syscall: impl FnMut(*mut u8, usize) -> Sys<isize>) -> Sys<Vec<u8>> {
    let mut value = vec![0; FIRST_BYTES];
    let count = match syscall(value.as_mut_ptr(), value.len()) {
        Err(Errno::ERANGE) => {
            value.resize(XATTR_MAX_BYTES, 0);
            syscall(value.as_mut_ptr(), value.len())?
        }
        result => result?,
    };
    value.truncate(count as usize);
    Ok(value)
}

/// setxattr(2).
pub(crate) fn set_xattr(
    fd: BorrowedFd<'_>,
    name: &CString,
    value: &[u8],
    how: XattrSet,
) -> Sys<()> {
    let path = CName::proc_path(fd.as_raw_fd());
    let flags = match how {
        XattrSet::Any => 0,
        XattrSet::Create => libc::XATTR_CREATE,
        XattrSet::Replace => libc::XATTR_REPLACE,
    };
    // SAFETY: everything outlives the call, which only reads.
    call(|| unsafe {
        libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), flags)
    })?;
    Ok(())
}

/// removexattr(2).
pub(crate) fn remove_xattr(fd: BorrowedFd<'_>, name: &CString) -> Sys<()> {
    let path = CName::proc_path(fd.as_raw_fd());
    // SAFETY: the strings outlive the call.
    call(|| unsafe { libc::removexattr(path.as_ptr(), name.as_ptr()) })?;
    Ok(())
}
