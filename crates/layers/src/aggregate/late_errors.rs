//! Errors of late writes: each is reported once through each open file, as errseq_t does in the kernel.

use std::sync::atomic::{AtomicU64, Ordering};

use dray_core::{Errno, Error};

/// The errors of one file.
#[derive(Debug, Default)]
pub(super) struct LateErrors {
    count: u64,
    /// Errors up to this one were reported through some open file.
    reported: u64,
    last: Option<Errno>,
}

/// Up to which error one open file has reported.
#[derive(Debug, Default)]
pub(super) struct ErrorCursor {
    /// By a sync, or by the close of a descriptor.
    by_sync: AtomicU64,
    by_write: AtomicU64,
}

impl LateErrors {
    pub(super) fn note(&mut self, errno: Errno) {
        self.count += 1;
        self.last = Some(errno);
    }

    /// For a file that is opened now: it reports an error that no open file has reported.
    pub(super) fn cursor_at_open(&self) -> ErrorCursor {
        let cursor = if self.reported == self.count { self.count } else { self.count - 1 };
        ErrorCursor { by_sync: cursor.into(), by_write: cursor.into() }
    }

    /// What a sync has to report. Writes need not report it any more.
    pub(super) fn at_sync(&mut self, cursor: &ErrorCursor) -> Result<(), Error> {
        cursor.by_write.store(self.count, Ordering::Relaxed);
        self.report(&cursor.by_sync)
    }

    /// What a write has to report. A sync reports it once more, because it must not succeed.
    pub(super) fn at_write(&mut self, cursor: &ErrorCursor) -> Result<(), Error> {
        self.report(&cursor.by_write)
    }

    fn report(&mut self, cursor: &AtomicU64) -> Result<(), Error> {
        let before = cursor.swap(self.count, Ordering::Relaxed);
        match self.last {
            Some(errno) if before < self.count => {
                self.reported = self.count;
                Err(Error::new(errno).because("an earlier write failed when it was carried out"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: P168
    #[test]
    fn each_open_file_reports_an_error_once() {
        let mut errors = LateErrors::default();
        let (one, two) = (errors.cursor_at_open(), errors.cursor_at_open());
        assert!(errors.at_sync(&one).is_ok());
        errors.note(Errno::ENOSPC);
        assert_eq!(errors.at_write(&one).unwrap_err().errno(), Errno::ENOSPC);
        assert!(errors.at_write(&one).is_ok());
        assert!(
            errors.at_sync(&one).is_err(),
            "a write that failed is no reason for a sync to succeed"
        );
        assert!(errors.at_sync(&one).is_ok());
        assert!(errors.at_sync(&two).is_err() && errors.at_write(&two).is_ok());
        assert!(errors.at_sync(&errors.cursor_at_open()).is_ok());
    }

    #[test]
    fn an_error_that_was_not_reported_is_reported_to_the_next_open_of_the_file() {
        let mut errors = LateErrors::default();
        errors.note(Errno::EIO);
        let next = errors.cursor_at_open();
        assert!(errors.at_sync(&next).is_err());
        assert!(errors.at_sync(&errors.cursor_at_open()).is_ok());
    }
}
