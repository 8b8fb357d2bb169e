//! System calls, each wrapped once. They are safe to call, give errors as [`Errno`], and repeat a call
//! that ended with `EINTR`. Nothing here knows exports, identities or caches.

mod data;
mod fanotify;
mod meta;
mod open;
mod uuid;
mod xattr;

pub(crate) use data::*;
pub(crate) use fanotify::*;
pub(crate) use meta::*;
pub(crate) use open::*;
pub(crate) use uuid::*;
pub(crate) use xattr::*;

use std::ffi::CStr;

use dray_core::{Errno, NAME_MAX_BYTES, Name};

/// Result of a system call.
pub(crate) type Sys<T> = Result<T, Errno>;

/// Turns the return value of a system call into a result; calls again after `EINTR`. That this
/// process has no descriptor left is to others that the system has none (`ENFILE`): they have.
pub(crate) fn call<T: Copy + PartialEq + From<i8>>(mut syscall: impl FnMut() -> T) -> Sys<T> {
    loop {
        let value = syscall();
        if value != T::from(-1) {
            return Ok(value);
        }
        match Errno::last() {
            Errno::EINTR => {}
            Errno::EMFILE => return Err(Errno::ENFILE),
            errno => return Err(errno),
        }
    }
}

/// A name with the NUL byte that the kernel wants behind it, on the stack.
pub(crate) struct CName {
    bytes: [u8; NAME_MAX_BYTES + 1],
}

impl CName {
    pub(crate) fn new(name: &Name) -> CName {
        let mut bytes = [0; NAME_MAX_BYTES + 1];
        let name = name.as_bytes();
        bytes[..name.len()].copy_from_slice(name); // a Name is never longer than that
        CName { bytes }
    }

    /// The decimal digits of a descriptor: its name in /proc/self/fd.
    pub(crate) fn number(number: i32) -> CName {
        CName::digits(b"", number)
    }

    /// The absolute path of a descriptor's link.
    pub(crate) fn proc_path(number: i32) -> CName {
        CName::digits(b"/proc/self/fd/", number)
    }

    fn digits(prefix: &[u8], number: i32) -> CName {
        let mut bytes = [0; NAME_MAX_BYTES + 1];
        bytes[..prefix.len()].copy_from_slice(prefix);
        let mut digits = [0u8; 10];
        let mut rest = number.unsigned_abs();
        let mut at = digits.len();
        loop {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        let count = digits.len() - at;
        bytes[prefix.len()..prefix.len() + count].copy_from_slice(&digits[at..]);
        CName { bytes }
    }

    pub(crate) fn as_ptr(&self) -> *const libc::c_char {
        self.bytes.as_ptr().cast()
    }

    #[cfg(test)]
    pub(crate) fn to_bytes(&self) -> &[u8] {
        CStr::from_bytes_until_nul(&self.bytes).map_or(&[], CStr::to_bytes)
    }
}

/// The empty path, for calls on the descriptor itself.
pub(crate) const EMPTY: &CStr = c"";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_descriptors_are_decimal() {
        assert_eq!(CName::number(0).to_bytes(), b"0");
        assert_eq!(CName::number(20_417).to_bytes(), b"20417");
        assert_eq!(CName::proc_path(i32::MAX).to_bytes(), b"/proc/self/fd/2147483647");
    }

    #[test]
    fn the_longest_name_has_room_for_its_end() {
        let name = [b'x'; NAME_MAX_BYTES];
        let name = Name::new(&name).unwrap();
        assert_eq!(CName::new(name).to_bytes(), name.as_bytes());
    }
}
