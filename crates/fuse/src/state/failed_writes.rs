//! Writes that failed and that the kernel undoes.
//!
//! A write of aio(7) or io_uring(7), and one past the cache of a mount that has one, is taken by the
//! kernel to make the file longer if it goes beyond the size that this kernel last heard of. If such
//! a write fails, or is done in part only, the kernel cuts the file to that size (`fuse_direct_IO` in
//! fs/fuse/file.c). What other clients have written behind it would be lost, so that such a cut must
//! not be made. It looks like ftruncate(2), but comes from the thread that has just had the error.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::Pid;

/// Failed writes remembered; the oldest are forgotten beyond it.
const FAILED_MAX: usize = 1024;

struct FailedWrite {
    fh: u64,
    pid: Pid,
    /// The kernel cuts to less than this, bytes.
    end: u64,
}

/// The failed writes of a mount whose cuts have not come yet.
#[derive(Default)]
pub(crate) struct FailedWrites {
    any: AtomicBool,
    list: Mutex<VecDeque<FailedWrite>>,
}

impl FailedWrites {
    fn lock(&self) -> MutexGuard<'_, VecDeque<FailedWrite>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A write of thread `pid` through the handle `fh`, up to the offset `end`, has failed.
    pub(crate) fn note(&self, fh: u64, pid: Pid, end: u64) {
        let mut list = self.lock();
        let of_same_call = list.iter_mut().find(|known| (known.fh, known.pid) == (fh, pid));
        match of_same_call {
            Some(known) => known.end = known.end.max(end),
            None => list.push_back(FailedWrite { fh, pid, end }),
        }
        if list.len() > FAILED_MAX {
            list.pop_front();
        }
        self.any.store(true, Ordering::Release);
    }

    /// Whether the kernel undoes a failed write when thread `pid` has the file behind `fh` cut to
    /// `size` bytes. Each is undone once.
    pub(crate) fn undoes(&self, fh: u64, pid: Pid, size: u64) -> bool {
        if !self.any.load(Ordering::Acquire) {
            return false; // as good as always
        }
        let mut list = self.lock();
        let undone = |known: &FailedWrite| (known.fh, known.pid) == (fh, pid) && size < known.end;
        let found = list.iter().position(undone);
        if let Some(index) = found {
            list.remove(index);
        }
        self.any.store(!list.is_empty(), Ordering::Release);
        found.is_some()
    }

    /// Thread `pid` asks for something else: the kernel has undone what it would.
    pub(crate) fn goes_on(&self, pid: Pid) {
        if !self.any.load(Ordering::Acquire) {
            return;
        }
        let mut list = self.lock();
        list.retain(|known| known.pid != pid);
        self.any.store(!list.is_empty(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_is_undone_once_and_by_its_thread() {
        let failed = FailedWrites::default();
        assert!(!failed.undoes(1, Pid(7), 0));
        failed.note(1, Pid(7), 100);
        failed.note(1, Pid(7), 50); // the parts of one call come in any order
        assert!(!failed.undoes(2, Pid(7), 99) && !failed.undoes(1, Pid(8), 99));
        assert!(!failed.undoes(1, Pid(7), 100), "nothing was to become longer");
        assert!(failed.undoes(1, Pid(7), 99));
        assert!(!failed.undoes(1, Pid(7), 99));
    }

    #[test]
    fn who_goes_on_cuts_by_itself() {
        let failed = FailedWrites::default();
        (0..=FAILED_MAX as u64).for_each(|fh| failed.note(fh, Pid(fh as u32 % 2), 100));
        assert_eq!(failed.lock().len(), FAILED_MAX);
        failed.goes_on(Pid(1));
        assert!(!failed.undoes(1, Pid(1), 5) && failed.undoes(2, Pid(0), 5));
    }
}
