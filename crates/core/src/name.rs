//! A component of a path.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;

use crate::{Errno, Error, Result};

/// Longest name that Linux passes on (`NAME_MAX`), in bytes.
pub const NAME_MAX_BYTES: usize = 255;

/// A borrowed name: 1 to 255 bytes, no `/`, no NUL, neither `.` nor `..`.
/// Any other byte is allowed; names need not be UTF-8.
///
/// Because a `Name` cannot lead anywhere but to a child, a path made of names
/// cannot leave its export.
#[derive(PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct Name([u8]);

impl Name {
    /// Checks `bytes`. Errors: `ENOENT` for an empty name (as path_resolution(7) has it), and
    /// `ENAMETOOLONG` past 255 bytes. The error is `EINVAL` for a byte or a name that no directory
    /// can hold.
    pub fn new(bytes: &[u8]) -> Result<&Name> {
        if bytes.is_empty() {
            return Err(Error::new(Errno::ENOENT).because("the name is empty"));
        }
        if bytes.len() > NAME_MAX_BYTES {
            return Err(Error::new(Errno::ENAMETOOLONG));
        }
        if bytes == b"." || bytes == b".." || bytes.iter().any(|&b| b == b'/' || b == 0) {
            return Err(
                Error::new(Errno::EINVAL).because("the name is not one component of a path")
            );
        }
        // SAFETY: Name is a transparent wrapper of [u8].
        Ok(unsafe { &*(bytes as *const [u8] as *const Name) })
    }

    /// The bytes of the name.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        String::from_utf8_lossy(&self.0).fmt(f)
    }
}

impl ToOwned for Name {
    type Owned = NameBuf;
    fn to_owned(&self) -> NameBuf {
        NameBuf(self.0.into())
    }
}

/// An owned [`Name`].
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NameBuf(Box<[u8]>);

impl NameBuf {
    /// Checks and copies `bytes`; errors as [`Name::new`].
    pub fn new(bytes: &[u8]) -> Result<NameBuf> {
        Name::new(bytes).map(Name::to_owned)
    }
}

impl Deref for NameBuf {
    type Target = Name;
    fn deref(&self) -> &Name {
        // SAFETY: Name is a transparent wrapper of [u8], checked when this was made.
        unsafe { &*(&*self.0 as *const [u8] as *const Name) }
    }
}

impl Borrow<Name> for NameBuf {
    fn borrow(&self) -> &Name {
        self
    }
}

impl fmt::Debug for NameBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl fmt::Display for NameBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&**self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: P36
    #[test]
    fn what_no_directory_can_hold_is_refused() {
        let errno = |bytes: &[u8]| Name::new(bytes).unwrap_err().errno();
        assert_eq!(errno(b""), Errno::ENOENT);
        assert_eq!(errno(b"."), Errno::EINVAL);
        assert_eq!(errno(b".."), Errno::EINVAL);
        assert_eq!(errno(b"a/b"), Errno::EINVAL);
        assert_eq!(errno(b"a\0b"), Errno::EINVAL);
        assert_eq!(errno(&[b'x'; 256]), Errno::ENAMETOOLONG);
    }

    // proves: P36
    #[test]
    fn any_other_bytes_are_a_name() {
        for bytes in [&b"..."[..], b"\xff\xfe", &[b'x'; 255], b" ", b"a\nb"] {
            assert_eq!(Name::new(bytes).unwrap().as_bytes(), bytes);
        }
    }
}
