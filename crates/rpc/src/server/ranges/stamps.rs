//! The stamps of changes: numbers that grow.
//!
//! A change of data takes its stamp with the grant of its bytes, and has them to itself until it is
//! answered. Other changes, such as those of names, take theirs when they have been made. So a sync
//! of the file system, begun when every change of data up to some stamp is over, covers everything
//! up to that stamp.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the stamps of one export.
pub(crate) struct Stamps {
    /// Where this run of the server began to count.
    before: AtomicU64,
    newest: AtomicU64,
}

impl Default for Stamps {
    /// Begins with the time, nanoseconds. So a server that takes over gives greater stamps than the
    /// server before it, which counted by ones and took longer for each. Should the clock have been
    /// set back, [`Stamps::begin_above`] helps.
    fn default() -> Stamps {
        let begin = dray_rt::wall_clock().as_nanos() as u64;
        Stamps { before: AtomicU64::new(begin), newest: AtomicU64::new(begin) }
    }
}

impl Stamps {
    /// The stamp of a change that has just been made, or is now granted.
    pub(crate) fn next(&self) -> u64 {
        self.newest.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Stamps to come are greater than this one, above which no earlier server gave any. To be
    /// called before there are clients.
    pub(crate) fn begin_above(&self, stamp: u64) {
        self.before.fetch_max(stamp, Ordering::SeqCst);
        self.newest.fetch_max(stamp, Ordering::SeqCst);
    }

    /// The greatest stamp that an earlier server can have given.
    pub(crate) fn before(&self) -> u64 {
        self.before.load(Ordering::SeqCst)
    }

    /// The last one given.
    pub(crate) fn newest(&self) -> u64 {
        self.newest.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_grow_and_begin_above_those_of_earlier_servers() {
        let stamps = Stamps::default();
        let first = stamps.next();
        assert!(stamps.before() < first && stamps.newest() == first);
        stamps.begin_above(first + 1000);
        assert_eq!(stamps.next(), first + 1001);
        stamps.begin_above(1);
        assert_eq!(stamps.next(), first + 1002);
    }
}
