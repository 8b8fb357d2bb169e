//! What is being changed, and when it was changed last.
//!
//! A change marks what it changes before it recalls leases, until its answer has been noted. An
//! answer is leased only if nothing that it says was marked since its call began. The marks are
//! numbers in an array, chosen by hash: a change costs no entry of a map. Two things with one
//! place in the array cost a lease at times, and no more.

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};

use dray_core::{FileId, IdHash, LeaseKinds};

/// Places.
const ROWS: usize = 4096;
/// In a place: the lower bits count the changes under way. The others are the number of the last
/// change that is over.
const CHANGING_BITS: u32 = 24;
const CHANGING: u64 = (1 << CHANGING_BITS) - 1;

/// A place in the array.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct MarkRow(u16);

/// A thing that changes as one.
#[derive(Clone, Copy, Hash)]
pub(super) enum Part<'a> {
    Attributes(FileId),
    /// All names in a directory, as who may look them up.
    Names(FileId),
    /// One name in a directory.
    Name(FileId, &'a [u8]),
}

impl Part<'_> {
    /// The file, or the directory of the name.
    pub(super) fn file(self) -> FileId {
        match self {
            Part::Attributes(id) | Part::Names(id) | Part::Name(id, _) => id,
        }
    }

    /// The kind of lease that covers it.
    pub(super) fn kind(self) -> LeaseKinds {
        match self {
            Part::Attributes(_) => LeaseKinds::ATTRIBUTES,
            Part::Names(_) | Part::Name(..) => LeaseKinds::NAMES,
        }
    }
}

/// A number of changes that are over.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FinishedChanges(u64);

pub(super) struct Marks {
    rows: Box<[AtomicU64]>,
    last: AtomicU64,
    /// The number of the last change that may have been of anything.
    of_all: AtomicU64,
    hash: IdHash,
}

impl Marks {
    pub(super) fn new() -> Marks {
        let rows = (0..ROWS).map(|_| AtomicU64::new(0)).collect();
        let (last, of_all) = (AtomicU64::new(0), AtomicU64::new(0));
        Marks { rows, last, of_all, hash: IdHash::default() }
    }

    pub(super) fn row(&self, part: Part<'_>) -> MarkRow {
        MarkRow((self.hash.hash_one(part) % ROWS as u64) as u16)
    }

    /// Before a call is carried out. What is over by now, the call sees.
    pub(super) fn now(&self) -> FinishedChanges {
        FinishedChanges(self.last.load(Ordering::SeqCst))
    }

    /// A change begins.
    pub(super) fn mark(&self, row: MarkRow) {
        self.rows[usize::from(row.0)].fetch_add(1, Ordering::SeqCst);
    }

    /// The change is over, and answered.
    pub(super) fn unmark(&self, rows: &[MarkRow]) {
        // First the number: a call that begins behind it sees the change.
        let number = self.last.fetch_add(1, Ordering::SeqCst) + 1;
        for row in rows {
            let ended = |before: u64| {
                let last = (before >> CHANGING_BITS).max(number);
                Some((last << CHANGING_BITS) | ((before & CHANGING) - 1))
            };
            let place = &self.rows[usize::from(row.0)];
            let _ = place.fetch_update(Ordering::SeqCst, Ordering::SeqCst, ended); // never none
        }
    }

    /// Anything may have been changed, and that is over.
    pub(super) fn all_changed(&self) {
        let number = self.last.fetch_add(1, Ordering::SeqCst) + 1;
        self.of_all.fetch_max(number, Ordering::SeqCst);
    }

    /// Whether nothing there was under change since then, but one change of the asker's `own`.
    pub(super) fn is_unchanged(&self, row: MarkRow, since: FinishedChanges, own: bool) -> bool {
        let now = self.rows[usize::from(row.0)].load(Ordering::SeqCst);
        let last = (now >> CHANGING_BITS).max(self.of_all.load(Ordering::SeqCst));
        now & CHANGING == u64::from(own) && last <= since.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_under_change_since_a_call_began_counts_as_changed() {
        let marks = Marks::new();
        let row = marks.row(Part::Attributes(FileId { ino: 1, generation: 0 }));
        let before = marks.now();
        assert!(marks.is_unchanged(row, before, false));
        marks.mark(row);
        let within = marks.now();
        assert!(!marks.is_unchanged(row, within, false) && marks.is_unchanged(row, within, true));
        marks.mark(row);
        assert!(!marks.is_unchanged(row, within, true), "somebody else changes it, too");
        marks.unmark(&[row]);
        marks.unmark(&[row]);
        for began in [before, within] {
            assert!(!marks.is_unchanged(row, began, false), "it may have seen half of the change");
        }
        assert!(marks.is_unchanged(row, marks.now(), false));
        let before = marks.now();
        marks.all_changed();
        assert!(!marks.is_unchanged(row, before, false), "anything may have changed");
        assert!(marks.is_unchanged(row, marks.now(), false));
    }
}
