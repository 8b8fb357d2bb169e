//! Errors of write-back to the disk, kept over the close of a descriptor.
//!
//! The kernel reports such an error once to each open descriptor (`errseq_t`, lib/errseq.c). The
//! server may close the descriptor of a file that is open at a client, and open it again later. The
//! error must not be lost between the two.
//!
//! So data are synced before the descriptor that wrote them is closed. The kernel may drop an inode
//! without descriptors, and its error with it. An error that another descriptor has already reported
//! is not reported to a descriptor that is opened later.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::Errno;

use super::sys::Sys;

/// The write-back errors of one inode that were reported to its descriptors.
#[derive(Default)]
pub(crate) struct WriteBackErrors {
    count: AtomicU64,
    last: AtomicI32,
}

impl WriteBackErrors {
    /// Records an error that was reported to a descriptor. An error that says that a file cannot be
    /// synced at all says nothing of the disk, and is left out.
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

/// The write-back state of one open file.
#[derive(Default)]
pub(crate) struct WriteBack {
    /// Data were written through it since its last sync.
    written: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The count of errors of the inode when the descriptor was closed.
    parked_at: u64,
    /// An error that was not reported to the client yet.
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

    /// Whether data have to be synced before the descriptor is closed.
    pub(crate) fn is_due(&self) -> bool {
        self.written.load(Ordering::SeqCst)
    }

    /// Syncs them by `write`.
    pub(crate) fn write_back(
        &self,
        write_back_errors: &WriteBackErrors,
        write: impl FnOnce() -> Sys<()>,
    ) {
        self.written.store(false, Ordering::SeqCst); // before: what is written meanwhile counts
        if let Err(errno) = write() {
            write_back_errors.add(errno);
            self.state().owed = Some(errno);
        }
    }

    /// The descriptor has been closed.
    pub(crate) fn parked(&self, write_back_errors: &WriteBackErrors) {
        self.state().parked_at = write_back_errors.count();
    }

    /// The file has a descriptor again.
    pub(crate) fn reopened(&self, write_back_errors: &WriteBackErrors) {
        let mut state = self.state();
        if write_back_errors.count() != state.parked_at {
            state.owed = Some(write_back_errors.last());
        }
    }

    /// Syncs it by `sync`. Errors: the kernel's, or one that was not reported to the client yet.
    pub(crate) fn sync(
        &self,
        write_back_errors: &WriteBackErrors,
        sync: impl FnOnce() -> Sys<()>,
    ) -> Sys<()> {
        let was_written = self.written.swap(false, Ordering::SeqCst);
        let synced = sync();
        if let Err(errno) = synced {
            write_back_errors.add(errno);
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

    fn sync(file: &WriteBack, write_back_errors: &WriteBackErrors, result: Sys<()>) -> Sys<()> {
        file.sync(write_back_errors, || result)
    }

    #[test]
    fn an_error_reported_to_others_while_it_had_no_descriptor_is_reported_once() {
        let (write_back_errors, file, other) =
            (WriteBackErrors::default(), WriteBack::default(), WriteBack::default());
        file.parked(&write_back_errors);
        assert_eq!(sync(&other, &write_back_errors, FAILED), FAILED);
        file.reopened(&write_back_errors);
        assert_eq!(sync(&file, &write_back_errors, Ok(())), FAILED);
        assert_eq!(sync(&file, &write_back_errors, Ok(())), Ok(()));
        // An error that this descriptor reported is not reported again.
        assert_eq!(sync(&file, &write_back_errors, FAILED), FAILED);
        file.parked(&write_back_errors);
        file.reopened(&write_back_errors);
        assert_eq!(sync(&file, &write_back_errors, Ok(())), Ok(()));
    }

    #[test]
    fn a_failure_before_the_descriptor_is_closed_is_reported_once() {
        let (write_back_errors, file) = (WriteBackErrors::default(), WriteBack::default());
        assert!(!file.is_due());
        file.written();
        assert!(file.is_due());
        file.write_back(&write_back_errors, || FAILED);
        assert!(!file.is_due());
        file.parked(&write_back_errors);
        file.reopened(&write_back_errors);
        // Of the kernel's error and the unreported one, one is reported.
        assert_eq!(sync(&file, &write_back_errors, FAILED), FAILED);
        assert_eq!(sync(&file, &write_back_errors, Ok(())), Ok(()));
    }
}
