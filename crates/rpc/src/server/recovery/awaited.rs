//! Answered changes that may be asked for again after a loss of what was written.
//!
//! Such a change was answered by a server with whose machine it may have gone. A client that has
//! not heard the answer asks for the change again. Then the change is made by its old stamp, among
//! later ones. Until then nobody may say that everything up to a later stamp is on media. Clients
//! would forget the change, and the next recovery would leave it out.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::FileId;

/// The stamps of these changes, each with its file.
#[derive(Default)]
pub(crate) struct AwaitedStamps(Mutex<BTreeSet<(u64, FileId)>>);

/// One of these changes. It is dropped once the change has been made again, or when nobody asks for
/// it any more.
pub(crate) struct AwaitedRepetition {
    all: Arc<AwaitedStamps>,
    stamp: u64,
    file: FileId,
}

impl AwaitedStamps {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<(u64, FileId)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// The stamp up to which a sync that begins now brings everything to media. `settled`: every
    /// change up to that one is over, as far as it has been asked for.
    pub(crate) fn bound(&self, settled: u64) -> u64 {
        let first = self.lock().first().map(|(stamp, _)| *stamp);
        bounded(settled, first)
    }

    /// The same of one file. Its id may be another one than in the server epoch that noted it.
    pub(crate) fn bound_in(&self, file: FileId, settled: u64) -> u64 {
        let first = self.lock().iter().find(|(_, of)| of.ino == file.ino).map(|(stamp, _)| *stamp);
        bounded(settled, first)
    }
}

fn bounded(settled: u64, first: Option<u64>) -> u64 {
    first.map_or(settled, |first| settled.min(first.saturating_sub(1)))
}

impl AwaitedRepetition {
    pub(super) fn begin(all: &Arc<AwaitedStamps>, stamp: u64, file: FileId) -> AwaitedRepetition {
        all.lock().insert((stamp, file));
        AwaitedRepetition { all: all.clone(), stamp, file }
    }
}

impl Drop for AwaitedRepetition {
    fn drop(&mut self) {
        self.all.lock().remove(&(self.stamp, self.file));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: P142
    #[test]
    fn nothing_from_an_awaited_change_on_counts_as_on_media() {
        let (all, file) = (Arc::new(AwaitedStamps::default()), |ino| FileId { ino, generation: 1 });
        assert_eq!(all.bound(500), 500);
        let later = AwaitedRepetition::begin(&all, 200, file(7));
        let first = AwaitedRepetition::begin(&all, 100, file(8));
        assert_eq!((all.bound(500), all.bound(50)), (99, 50));
        assert_eq!((all.bound_in(file(7), 500), all.bound_in(file(9), 500)), (199, 500));
        drop(first);
        assert_eq!(all.bound(500), 199);
        drop(later);
        assert!(all.is_empty());
        assert_eq!(all.bound(500), 500);
    }
}
