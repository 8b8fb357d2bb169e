//! Errors of writing back to the disk, which the kernel tells each open descriptor once
//! (`errseq_t`, lib/errseq.c): they must not get lost where the descriptor of a file that is open
//! at a client is closed, and opened again, for want of others.
//!
//! What was written through a descriptor is brought to the disk before it is closed: without one
//! the kernel may drop the inode, and the error with it. And one that somebody else has been told
//! meanwhile is none any more to a descriptor that is opened later.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::Errno;

use super::sys::Sys;

/// Of one inode: what descriptors of it were told.
#[derive(Default)]
pub(crate) struct Failures {
    count: AtomicU64,
    last: AtomicI32,
}

impl Failures {
    /// A descriptor was told this. That it cannot be synced at all says nothing of the disk.
    pub(crate) fn add(&self, errno: Errno) {
        if matches!(errno, Errno::EINVAL | Errno::EINTR) {
            return;
        }
        self.last.store(errno.raw(), Ordering::SeqCst);
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    fn last(&self) -> Errno {
        Errno::new(self.last.load(Ordering::SeqCst))
    }
}

/// Of one open file.
#[derive(Default)]
pub(crate) struct WriteBack {
    /// Something was written through it since it was last brought to the disk.
    written: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Failures of the inode when the descriptor was closed.
    parked_at: u64,
    /// An error that its client has not been told.
    owed: Option<Errno>,
}

impl WriteBack {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something was written through it.
    pub(crate) fn written(&self) {
        if !self.written.load(Ordering::Relaxed) {
            self.written.store(true, Ordering::SeqCst);
        }
    }

    /// Whether something is to be brought to the disk before the descriptor is closed.
    pub(crate) fn is_due(&self) -> bool {
        self.written.load(Ordering::SeqCst)
    }

    /// Brings it there by `write`.
    pub(crate) fn write_back(&self, failures: &Failures, write: impl FnOnce() -> Sys<()>) {
        self.written.store(false, Ordering::SeqCst); // before: what is written meanwhile counts
        if let Err(errno) = write() {
            failures.add(errno);
            self.state().owed = Some(errno);
        }
    }

    /// Its descriptor is closed.
    pub(crate) fn parked(&self, failures: &Failures) {
        self.state().parked_at = failures.count();
    }

    /// It has one again.
    pub(crate) fn reopened(&self, failures: &Failures) {
        let mut state = self.state();
        if failures.count() != state.parked_at {
            state.owed = Some(failures.last());
        }
    }

    /// Syncs it by `sync`. Errors: the kernel's, or one that its client has not been told.
    pub(crate) fn sync(&self, failures: &Failures, sync: impl FnOnce() -> Sys<()>) -> Sys<()> {
        let was_written = self.written.swap(false, Ordering::SeqCst);
        let synced = sync();
        if let Err(errno) = synced {
            failures.add(errno);
            self.written.fetch_or(was_written, Ordering::SeqCst);
        }
        let owed = self.state().owed.take();
        synced.and(owed.map_or(Ok(()), Err))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAILED: Sys<()> = Err(Errno::EIO);

    fn sync(file: &WriteBack, failures: &Failures, result: Sys<()>) -> Sys<()> {
        file.sync(failures, || result)
    }

    #[test]
    fn what_was_told_to_others_while_it_had_no_descriptor_is_told_once() {
        let (failures, file, other) =
            (Failures::default(), WriteBack::default(), WriteBack::default());
        file.parked(&failures);
        assert_eq!(sync(&other, &failures, FAILED), FAILED);
        file.reopened(&failures);
        assert_eq!(sync(&file, &failures, Ok(())), FAILED);
        assert_eq!(sync(&file, &failures, Ok(())), Ok(()));
        // What it was told itself is told no more.
        assert_eq!(sync(&file, &failures, FAILED), FAILED);
        file.parked(&failures);
        file.reopened(&failures);
        assert_eq!(sync(&file, &failures, Ok(())), Ok(()));
    }

    #[test]
    fn what_fails_before_the_descriptor_is_closed_is_told_once() {
        let (failures, file) = (Failures::default(), WriteBack::default());
        assert!(!file.is_due());
        file.written();
        assert!(file.is_due());
        file.write_back(&failures, || FAILED);
        assert!(!file.is_due());
        file.parked(&failures);
        file.reopened(&failures);
        // Of the kernel's and of what is owed one is told.
        assert_eq!(sync(&file, &failures, FAILED), FAILED);
        assert_eq!(sync(&file, &failures, Ok(())), Ok(()));
    }
}
