//! Users and groups by their names, as this machine knows them.

use std::ffi::CString;

/// Longest entry of a user or a group, bytes: one with thousands of members is long.
const ENTRY_MAX_BYTES: usize = 1 << 20;

/// The id of a user; none: there is none of that name.
pub fn uid_of(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; ENTRY_MAX_BYTES];
    // SAFETY: all zeros is a passwd.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: the name ends with a zero, and all that is written to outlives the call.
    let error = unsafe {
        let (at, len) = (buffer.as_mut_ptr(), buffer.len());
        libc::getpwnam_r(name.as_ptr(), &raw mut entry, at, len, &raw mut found)
    };
    (error == 0 && !found.is_null()).then_some(entry.pw_uid)
}

/// The id of a group; none: there is none of that name.
pub fn gid_of(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0; ENTRY_MAX_BYTES];
    // SAFETY: all zeros is a group.
    let mut entry: libc::group = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: as above.
    let error = unsafe {
        let (at, len) = (buffer.as_mut_ptr(), buffer.len());
        libc::getgrnam_r(name.as_ptr(), &raw mut entry, at, len, &raw mut found)
    };
    (error == 0 && !found.is_null()).then_some(entry.gr_gid)
}
