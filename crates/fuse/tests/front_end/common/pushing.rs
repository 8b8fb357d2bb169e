//! What a mount's supervisor has another process do, and a mount without one needs from the test
//! that uses it. Entries that are added to a queue of a ring get what waits there with their first
//! answer only.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// From one look at a queue that may wait behind an entry to the next.
pub const PUSH_TIME: Duration = Duration::from_millis(100);

/// Asks for something that the front end knows by itself, in the queue of the CPU that this thread
/// runs on.
pub fn push(at: &Path) {
    let path = CString::new(at.as_os_str().as_bytes()).unwrap();
    let name = c"system.dray.wake";
    // SAFETY: both are C strings that outlive the call; no memory is written.
    unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0) };
}

/// Pushes as long as there is this, in the queues of the CPUs that the thread may run on which has
/// made it.
pub struct QueuePusher {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl QueuePusher {
    pub fn new(at: &Path) -> QueuePusher {
        let over = Arc::new(AtomicBool::new(false));
        let (at, ends) = (at.to_owned(), over.clone());
        let thread = std::thread::spawn(move || {
            let mut pushes = Vec::new();
            while !ends.load(Ordering::Relaxed) {
                std::thread::sleep(PUSH_TIME);
                // Each may wait itself.
                let at = at.clone();
                pushes.push(std::thread::spawn(move || push(&at)));
            }
            pushes.into_iter().for_each(|push| push.join().unwrap());
        });
        QueuePusher { over, thread: Some(thread) }
    }
}

impl Drop for QueuePusher {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, Some(Ok(()))));
    }
}
