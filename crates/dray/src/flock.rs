//! Locks of flock(2) that are waited for, with a time limit.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Locks `file` for its open file description. False if another process did not give it up within
/// `patience`. Errors: the others of flock(2).
pub fn lock_within(file: &File, patience: Duration) -> io::Result<bool> {
    let begin = Instant::now();
    loop {
        // SAFETY: no memory is passed; the descriptor is open.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::WouldBlock {
            return Err(error);
        }
        if begin.elapsed() > patience {
            return Ok(false);
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}
