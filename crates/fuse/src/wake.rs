//! Setting the queues of a ring going again after their daemon has died.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::cpus;
use crate::transport::queues::possible_cpus;

/// Asks the mount at `at` for something on every CPU that this process may run on, and waits
/// for the answers. A request takes an entry of its CPU's queue, and with its answer the
/// kernel passes that entry on to what has been waiting in the queue since before there was
/// an entry.
///
/// For a process that has nothing else to do and is no daemon: it waits as any application
/// does. Errors: those of reading the list of CPUs and of starting threads.
pub fn wake_queues(at: &Path) -> io::Result<()> {
    let path = CString::new(at.as_os_str().as_bytes()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let cpus = possible_cpus()?;
    std::thread::scope(|scope| {
        for cpu in 0..cpus {
            let path = &path;
            std::thread::Builder::new().spawn_scoped(scope, move || {
                // Where we may not run, what waits is served behind the next request from
                // there; and nobody else's answer is our concern.
                if cpus::pin_to(cpu).is_ok() {
                    // SAFETY: an all-zero buffer is valid, and outlives the call.
                    unsafe {
                        let mut answer: libc::statfs = std::mem::zeroed();
                        libc::statfs(path.as_ptr(), &mut answer);
                    }
                }
            })?;
        }
        Ok(())
    })
}
