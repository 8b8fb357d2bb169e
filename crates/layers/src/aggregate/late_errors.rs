//! Errors of late writes: each is reported once through each open file, as errseq_t does in the kernel.

use std::sync::atomic::{AtomicU64, Ordering};

use dray_core::{Errno, Error};

/// The errors of one file.
#[derive(Debug, Default)]
pub(super) struct LateErrors {
    count: u64,
    /// Up to this one somebody has been told.
    reported: u64,
    last: Option<Errno>,
}

/// Up to which error one open file has been told.
#[derive(Debug, Default)]
pub(super) struct Heard {
    /// By a sync, or by the close of a descriptor.
    by_sync: AtomicU64,
    by_write: AtomicU64,
}

impl LateErrors {
    pub(super) fn note(&mut self, errno: Errno) {
        self.count += 1;
        self.last = Some(errno);
    }

    /// For a file that is opened now: it is told of an error that nobody has been told of.
    pub(super) fn heard_at_open(&self) -> Heard {
        let heard = if self.reported == self.count { self.count } else { self.count - 1 };
        Heard { by_sync: heard.into(), by_write: heard.into() }
    }

    /// What a sync has to report. Writes need not report it any more.
    pub(super) fn at_sync(&mut self, heard: &Heard) -> Result<(), Error> {
        heard.by_write.store(self.count, Ordering::Relaxed);
        self.report(&heard.by_sync)
    }

    /// What a write has to report. A sync reports it once more, because it must not succeed.
    pub(super) fn at_write(&mut self, heard: &Heard) -> Result<(), Error> {
        self.report(&heard.by_write)
    }

    fn report(&mut self, heard: &AtomicU64) -> Result<(), Error> {
        let before = heard.swap(self.count, Ordering::Relaxed);
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
    fn each_open_file_is_told_of_an_error_once() {
        let mut errors = LateErrors::default();
        let (one, two) = (errors.heard_at_open(), errors.heard_at_open());
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
        assert!(errors.at_sync(&errors.heard_at_open()).is_ok());
    }

    #[test]
    fn an_error_that_nobody_was_told_of_is_reported_to_the_next_who_opens_the_file() {
        let mut errors = LateErrors::default();
        errors.note(Errno::EIO);
        let next = errors.heard_at_open();
        assert!(errors.at_sync(&next).is_err());
        assert!(errors.at_sync(&errors.heard_at_open()).is_ok());
    }
}
