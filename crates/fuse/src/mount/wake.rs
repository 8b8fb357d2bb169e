//! Setting the queues of a ring going again after their daemon has died.
//!
//! The kernel gives what waits in a queue only to entries that become free there, never to those
//! that are registered. So somebody has to ask the mount for something on the queue's CPU. The
//! request takes a registered entry, and with its answer the entry goes on to what waits. That once
//! is not enough. The entry may get a request that blocks, a lock that is waited for. The unlocking
//! may wait in the queue behind it.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::options::RING_SPARES_MAX;
use crate::transport::queues::possible_cpus;
use crate::worker::cpus;

/// What is asked for: an attribute that no file has, which the front end knows by itself, so
/// that no server has to be there.
pub(crate) const ATTRIBUTE: &[u8] = b"system.dray.wake";
const ATTRIBUTE_C: &CStr = c"system.dray.wake";
/// Questions on each CPU: one more than requests that can block without being refused.
const ROUNDS: usize = RING_SPARES_MAX + 1;

/// Asks the mount at `at` often enough on every CPU that this process may run on, and waits
/// for the answers.
///
/// For a process that has nothing else to do and is no daemon: it waits as any application
/// does. Errors: those of reading the list of CPUs and of starting threads.
pub fn wake_queues(at: &Path) -> io::Result<()> {
    let asking = MountQuestion::new(at, ATTRIBUTE_C)?;
    let cpus = possible_cpus()?;
    std::thread::scope(|scope| {
        for cpu in 0..cpus {
            let asking = &asking;
            std::thread::Builder::new().spawn_scoped(scope, move || {
                // Where we may not run, what waits is served behind the next request from
                // there.
                if cpus::pin_to(cpu).is_ok() {
                    (0..ROUNDS).all(|_| is_there(asking));
                }
            })?;
        }
        Ok(())
    })
}

/// Whether the connection of the mount at `at` has been aborted, so that nobody will ever serve
/// it. A mount that does not answer within `patience` has not: then an answer comes at once.
pub fn is_aborted(at: &Path, patience: Duration) -> bool {
    let Ok(asking) = MountQuestion::new(at, ATTRIBUTE_C) else { return false };
    let (sender, receiver) = channel();
    // The daemon of the mount may stand still: the thread that asks is not waited for.
    let asking = std::thread::Builder::new().spawn(move || {
        let _ = sender.send(ask(&asking).err().and_then(|error| error.raw_os_error())); // in vain if it took too long
    });
    let aborted = [Some(libc::ENOTCONN), Some(libc::ECONNABORTED), Some(libc::EIO)];
    asking.is_ok() && receiver.recv_timeout(patience).is_ok_and(|error| aborted.contains(&error))
}

/// A question that the front end answers by itself: how long an attribute of a mount is.
pub(super) struct MountQuestion {
    path: CString,
    attribute: &'static CStr,
}

impl MountQuestion {
    /// Errors: `InvalidInput` for a path with a NUL in it.
    pub(super) fn new(at: &Path, attribute: &'static CStr) -> io::Result<MountQuestion> {
        let path = CString::new(at.as_os_str().as_bytes());
        Ok(MountQuestion { path: path.map_err(|_| io::ErrorKind::InvalidInput)?, attribute })
    }
}

/// Asks once. False if the mount is not there any more.
fn is_there(asking: &MountQuestion) -> bool {
    ask(asking).err().is_none_or(|error| error.raw_os_error() == Some(libc::ENODATA))
}

/// The answer. Errors: those of getxattr(2).
pub(super) fn ask(asking: &MountQuestion) -> io::Result<usize> {
    let (path, name) = (asking.path.as_ptr(), asking.attribute.as_ptr());
    // SAFETY: both are C strings that outlive the call; no memory is written, as the size is 0.
    let length = unsafe { libc::getxattr(path, name, std::ptr::null_mut(), 0) };
    usize::try_from(length).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_attribute_has_one_name() {
        assert_eq!(ATTRIBUTE, ATTRIBUTE_C.to_bytes());
    }
}
