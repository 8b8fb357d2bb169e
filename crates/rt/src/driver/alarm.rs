//! The clock of an executor that waits for descriptors.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use crate::time::Instant;

/// A timerfd(2) that goes off when the first timer is due, or before.
///
/// It is set when an earlier time is wanted than it is set to, and at no other time: to give
/// every wait its end costs the setting and the taking back of a timer in the kernel each
/// time, about a microsecond, and most waits end before. So it may go off for a timer that is
/// there no more, once.
pub(crate) struct Alarm {
    fd: OwnedFd,
    set_to: Option<Instant>,
}

impl Alarm {
    /// Errors: those of timerfd_create(2).
    pub(crate) fn new() -> io::Result<Alarm> {
        let flags = libc::TFD_NONBLOCK | libc::TFD_CLOEXEC;
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, owned by nobody else.
        Ok(Alarm { fd: unsafe { OwnedFd::from_raw_fd(fd) }, set_to: None })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Sees to it that it goes off at `next`, if not before.
    pub(crate) fn set(&mut self, next: Option<Instant>) {
        let Some(next) = next else { return };
        if self.set_to.is_some_and(|at| at <= next) {
            return;
        }
        let nanos = next.as_nanos().max(1); // all zero would switch it off
        let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let value = libc::timespec {
            tv_sec: i64::try_from(nanos / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (nanos % 1_000_000_000) as i64,
        };
        let spec = libc::itimerspec { it_interval: zero, it_value: value };
        let flags = libc::TFD_TIMER_ABSTIME;
        // SAFETY: `spec` is read during the call; nothing is written.
        let set = unsafe { libc::timerfd_settime(self.fd(), flags, &spec, std::ptr::null_mut()) };
        assert!(set == 0, "timerfd_settime(2) refused a time: {}", io::Error::last_os_error());
        self.set_to = Some(next);
    }

    /// It went off. The next setting takes back that it can be read.
    pub(crate) fn went_off(&mut self) {
        self.set_to = None;
    }
}
