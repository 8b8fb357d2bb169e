//! Which files were changed since they were opened, as far as this mount knows.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::FileId;

/// Files remembered. Beyond it all files that are open now are taken for changed, which costs round trips only.
const FILES_MAX: usize = 1 << 16;

/// The number of the last change of each file.
#[derive(Default)]
pub(crate) struct KnownChanges(Mutex<Numbers>);

#[derive(Default)]
struct Numbers {
    last: u64,
    /// All files opened before this number count as changed.
    forgotten: u64,
    files: HashMap<FileId, u64>,
}

/// A moment in the order of changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpeningMoment(u64);

impl KnownChanges {
    fn lock(&self) -> MutexGuard<'_, Numbers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be asked before a file is opened.
    pub(crate) fn now(&self) -> OpeningMoment {
        OpeningMoment(self.lock().last)
    }

    /// A file was changed, or may have been. To be noted before anybody is answered that it was.
    pub(crate) fn note(&self, id: FileId) {
        let mut numbers = self.lock();
        numbers.last += 1;
        let last = numbers.last;
        if numbers.files.len() >= FILES_MAX {
            numbers.files.clear();
            numbers.forgotten = last;
        }
        numbers.files.insert(id, last);
    }

    pub(crate) fn since(&self, OpeningMoment(then): OpeningMoment, id: FileId) -> bool {
        let numbers = self.lock();
        then < numbers.forgotten || numbers.files.get(&id).is_some_and(|number| *number > then)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_known_of_what_was_opened_before_it() {
        let (changes, id) = (KnownChanges::default(), |ino| FileId { ino, generation: 1 });
        let before = changes.now();
        changes.note(id(1));
        assert!(changes.since(before, id(1)) && !changes.since(before, id(2)));
        let after = changes.now();
        assert!(!changes.since(after, id(1)));
        (0..=FILES_MAX as u64).for_each(|ino| changes.note(id(10 + ino)));
        assert!(changes.since(after, id(2)), "what was forgotten counts as changed");
        assert!(!changes.since(changes.now(), id(1)));
    }
}
