//! Errors: the number that the application sees, and whether the caller may retry.

use std::borrow::Cow;
use std::fmt;

use crate::{BufMut, Errno, Op, Ttl};

/// Result of an operation on a [`FileSystem`](crate::FileSystem).
pub type Result<T> = std::result::Result<T, Error>;
/// Result of an operation that must give the caller's buffer back either way.
pub type Io<T> = std::result::Result<T, (Error, BufMut)>;

/// The knowledge about a failed operation, which decides whether it may be tried again. Data in the
/// error, so that no caller has to guess from errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Decided: the operation was not applied and trying again is pointless.
    Final,
    /// Not applied; the same call may succeed later or elsewhere.
    Retry,
    /// May have been applied. Only a replay under the same key is safe.
    Unknown,
}

/// An error of a file operation: errno is chosen where the failure is
/// classified and mapped nowhere else.
#[derive(Clone)]
pub struct Error {
    errno: Errno,
    fate: Fate,
    op: Option<Op>,
    absence: Option<Ttl>,
    unmet: bool,
    what: Cow<'static, str>,
}

impl Error {
    /// A decided failure with an error number from the file system below.
    pub const fn new(errno: Errno) -> Error {
        Error {
            errno,
            fate: Fate::Final,
            op: None,
            absence: None,
            unmet: false,
            what: Cow::Borrowed(""),
        }
    }

    /// A failure after which the operation is known not to have been applied.
    pub const fn retry(errno: Errno) -> Error {
        Error {
            errno,
            fate: Fate::Retry,
            op: None,
            absence: None,
            unmet: false,
            what: Cow::Borrowed(""),
        }
    }

    /// A failure that leaves it open whether the operation was applied.
    pub const fn unknown(errno: Errno) -> Error {
        Error {
            errno,
            fate: Fate::Unknown,
            op: None,
            absence: None,
            unmet: false,
            what: Cow::Borrowed(""),
        }
    }

    /// Says what happened, for the log line about the error.
    pub fn because(mut self, what: impl Into<Cow<'static, str>>) -> Error {
        self.what = what.into();
        self
    }

    /// Says how long it may be believed that there is no such name; to `ENOENT` of a lookup.
    /// Without that, the mount's mode of consistency decides.
    pub fn absent_for(mut self, ttl: Option<Ttl>) -> Error {
        self.absence = ttl;
        self
    }

    /// Says that the id was not met where it was used, or is not where it was met; to `ESTALE`. A caller that
    /// knows a name of the file may say it ([`FileSystem::learn`](crate::FileSystem::learn)) and call again.
    pub fn unmet(mut self, unmet: bool) -> Error {
        self.unmet = unmet;
        self
    }

    /// Names the operation that failed; the innermost name stays.
    pub fn during(mut self, op: Op) -> Error {
        self.op.get_or_insert(op);
        self
    }

    /// The error number that the application gets.
    pub fn errno(&self) -> Errno {
        self.errno
    }

    /// Whether the operation may be tried again.
    pub fn fate(&self) -> Fate {
        self.fate
    }

    /// The operation that failed, where it was named.
    pub fn op(&self) -> Option<Op> {
        self.op
    }

    /// How long it may be believed that there is no such name, where that was said.
    pub fn absence(&self) -> Option<Ttl> {
        self.absence
    }

    /// Whether a name of the file would help: see [`Error::unmet`].
    pub fn is_unmet(&self) -> bool {
        self.unmet
    }

    /// The explanation, empty where the error number says it all.
    pub fn what(&self) -> &str {
        &self.what
    }
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Error {
        Error::new(errno)
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Error {
        Error::new(Errno::from(error))
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}/{:?}", self.errno, self.fate)?;
        if let Some(op) = self.op {
            write!(f, " in {}", op.name())?;
        }
        if self.what.is_empty() { Ok(()) } else { write!(f, ": {}", self.what) }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(op) = self.op {
            write!(f, "{}: ", op.name())?;
        }
        if self.what.is_empty() {
            write!(f, "{}", self.errno)
        } else {
            write!(f, "{} ({})", self.what, self.errno)
        }
    }
}

impl std::error::Error for Error {}
