//! What this mount has changed lately, or was notified that others have. Data that were read before,
//! and reach the kernel later, must not undo there what the kernel knows by now.
//!
//! A table without keys: files that fall together are taken for changed with each other, which costs a
//! lookup.

use std::sync::atomic::{AtomicU64, Ordering};

use dray_core::FileId;

/// Rows of the table.
const ROWS: usize = 1024;

/// The number of the last change of each file or directory.
pub(crate) struct RecentChanges {
    last: AtomicU64,
    rows: Box<[AtomicU64]>,
}

/// A moment in the order of changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangeNumber(u64);

impl Default for RecentChanges {
    fn default() -> RecentChanges {
        RecentChanges {
            last: AtomicU64::new(0),
            rows: (0..ROWS).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

impl RecentChanges {
    fn row(&self, id: FileId) -> &AtomicU64 {
        // Fibonacci hashing (Knuth 6.4): inode numbers come in runs.
        let mixed = (id.ino ^ id.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48;
        &self.rows[mixed as usize % ROWS]
    }

    /// To be asked before what may change is read.
    pub(crate) fn now(&self) -> ChangeNumber {
        ChangeNumber(self.last.load(Ordering::SeqCst))
    }

    /// `id` was changed, or may have been. Before the kernel hears of it.
    pub(crate) fn note(&self, id: FileId) {
        let number = self.last.fetch_add(1, Ordering::SeqCst) + 1;
        self.row(id).fetch_max(number, Ordering::SeqCst);
    }

    /// Whether `id` may have been changed since.
    pub(crate) fn since(&self, ChangeNumber(then): ChangeNumber, id: FileId) -> bool {
        self.row(id).load(Ordering::SeqCst) > then
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_changed_since_is_known() {
        let (changes, id) = (RecentChanges::default(), |ino| FileId { ino, generation: 0 });
        changes.note(id(7));
        let then = changes.now();
        assert!(!changes.since(then, id(7)));
        changes.note(id(8));
        assert!(changes.since(then, id(8)) && !changes.since(then, id(7)));
        assert!(!changes.since(changes.now(), id(8)));
    }
}
