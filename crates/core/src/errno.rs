//! The error number that the application sees.

use std::fmt;

/// A Linux error number, always positive.
///
/// A newtype, so that a negated value or a return code cannot pass for one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Errno(i32);

macro_rules! errnos {
    ($($name:ident),* $(,)?) => {
        #[allow(missing_docs)] // The names are those of errno(3).
        impl Errno {
            $(pub const $name: Errno = Errno(libc::$name);)*

            /// The symbolic name, such as `ENOENT`; `E?` for one not listed here.
            pub fn name(self) -> &'static str {
                match self.0 {
                    $(libc::$name => stringify!($name),)*
                    _ => "E?",
                }
            }
        }
    };
}

errnos! {
    E2BIG, EACCES, EAGAIN, EBADF, EBUSY, ECANCELED, ECONNREFUSED, ECONNRESET, EDEADLK, EDQUOT,
    EEXIST, EFAULT, EFBIG, EHOSTDOWN, EHOSTUNREACH, EINTR, EINVAL, EIO, EISDIR, ELOOP, EMFILE,
    EMLINK, ENAMETOOLONG, ENFILE, ENODATA, ENODEV, ENOENT, ENOLCK, ENOMEM, ENOSPC, ENOSYS,
    ENOTCONN, ENOTDIR, ENOTEMPTY, ENOTSUP, ENOTTY, ENXIO, EOVERFLOW, EPERM,
    EPIPE, EPROTO, EPROTONOSUPPORT, ERANGE, EROFS, ESPIPE, ESRCH, ESTALE, ETIMEDOUT, ETXTBSY,
    EXDEV, EBADMSG, EUCLEAN, EADDRINUSE, EADDRNOTAVAIL, EMSGSIZE, ESHUTDOWN, EKEYREJECTED, EMEDIUMTYPE,
    EREMCHG,
}

impl Errno {
    /// Takes an error number from the kernel or the wire. Anything outside
    /// 1..=4095 (the kernel's `MAX_ERRNO`) is not an error number and becomes `EIO`.
    pub fn new(raw: i32) -> Errno {
        if (1..=4095).contains(&raw) { Errno(raw) } else { Errno::EIO }
    }

    /// The positive number.
    pub fn raw(self) -> i32 {
        self.0
    }

    /// The error that the last system call of this thread left in `errno`.
    pub fn last() -> Errno {
        Errno::from(std::io::Error::last_os_error())
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Errno {
        Errno::new(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl From<Errno> for std::io::Error {
    fn from(errno: Errno) -> std::io::Error {
        std::io::Error::from_raw_os_error(errno.0)
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.name(), self.0)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", std::io::Error::from_raw_os_error(self.0), self.name())
    }
}
