//! Extended attributes of files by their paths. Symbolic links are not followed.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use dray_core::XATTR_MAX_BYTES;

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

fn counted(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// None: there is no such attribute. Errors: those of lgetxattr(2).
pub fn get(path: &Path, name: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let (path, name) = (c_path(path)?, CString::new(name)?);
    let mut value = vec![0; XATTR_MAX_BYTES];
    // SAFETY: both names end with NUL, and the buffer has the size that is said.
    let count = counted(unsafe {
        libc::lgetxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len())
    });
    match count {
        Ok(count) => {
            value.truncate(count);
            Ok(Some(value))
        }
        Err(error) if error.raw_os_error() == Some(libc::ENODATA) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The names. Errors: those of llistxattr(2).
pub(super) fn list(path: &Path) -> io::Result<Vec<Vec<u8>>> {
    let path = c_path(path)?;
    let mut names = vec![0_u8; XATTR_MAX_BYTES];
    // SAFETY: the path ends with NUL, and the buffer has the size that is said.
    let count = counted(unsafe {
        libc::llistxattr(path.as_ptr(), names.as_mut_ptr().cast(), names.len())
    })?;
    names.truncate(count);
    let names = names.split_inclusive(|byte| *byte == 0);
    Ok(names
        .filter_map(|name| CStr::from_bytes_with_nul(name).ok())
        .map(CStr::to_bytes)
        .map(Vec::from)
        .collect())
}

/// Errors: those of lsetxattr(2).
pub fn set(path: &Path, name: &[u8], value: &[u8]) -> io::Result<()> {
    let (path, name) = (c_path(path)?, CString::new(name)?);
    // SAFETY: both names end with NUL, and the value has the size that is said.
    let done = unsafe {
        libc::lsetxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
