//! Signals as a descriptor for poll(2), for a process without an executor.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// An end, an upgrade, the end of a child.
const HEARD: [i32; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGCHLD];
/// Signals taken at a time; more wait.
const AT_A_TIME: usize = 8;
const INFO_BYTES: usize = size_of::<libc::signalfd_siginfo>();

/// The signals that a supervisor listens to.
pub struct Signals(OwnedFd);

impl Signals {
    /// Holds them back from here on. Errors: those of signalfd(2).
    pub fn new() -> io::Result<Signals> {
        // SAFETY: an all-zero set is valid memory for sigemptyset, which sets it up; the
        // signal numbers are valid; the set outlives the calls.
        let fd = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            for signal in HEARD {
                libc::sigaddset(&mut set, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            libc::signalfd(-1, &set, libc::SFD_NONBLOCK | libc::SFD_CLOEXEC)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, owned by nobody else.
        Ok(Signals(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The signals that have come.
    pub fn read(&self) -> io::Result<Vec<i32>> {
        let mut info = [0u8; AT_A_TIME * INFO_BYTES];
        // SAFETY: the kernel writes at most info.len() bytes to it.
        let read = unsafe { libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), info.len()) };
        if read < 0 {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(Vec::new()),
                _ => Err(error),
            };
        }
        let signal = |one: &[u8]| i32::from_ne_bytes([one[0], one[1], one[2], one[3]]);
        Ok(info[..read as usize].chunks_exact(INFO_BYTES).map(signal).collect())
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
