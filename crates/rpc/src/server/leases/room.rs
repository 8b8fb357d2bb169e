//! Room for new leases. A session that has as many as it may gives some back, and so does a full export: those that
//! were leased the longest ago. The server recalls them, as if they were to be changed.
//!
//! What the client uses all the time is asked for again at once, and is young then. A lease that is asked back is not
//! leased anew before its recall has ended. So the client's answer takes nothing that it has got since.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use dray_core::{FileId, IdHash, RecallItem};

use super::holder::{LeaseHolder, RecallNumber};
use super::table::LeaseTable;
use crate::wire::RECALL_ITEMS_MAX;

/// The files of which a session has leases, in the order in which it got them.
#[derive(Default)]
pub(super) struct HeldFiles {
    files: HashSet<FileId, IdHash>,
    /// Also files that were given back since, or have come again.
    order: VecDeque<FileId>,
}

impl HeldFiles {
    pub(super) fn len(&self) -> usize {
        self.files.len()
    }

    pub(super) fn insert(&mut self, file: FileId) {
        if !self.files.insert(file) {
            return;
        }
        if self.order.len() >= 2 * self.files.len() + RECALL_ITEMS_MAX {
            let mut seen = HashSet::with_hasher(IdHash::default());
            self.order.retain(|one| self.files.contains(one) && *one != file && seen.insert(*one));
        }
        self.order.push_back(file);
    }

    pub(super) fn remove(&mut self, file: FileId) {
        self.files.remove(&file);
    }

    /// So many of the oldest. They count as young from now on: what becomes of them is decided elsewhere.
    fn oldest(&mut self, count: usize) -> Vec<FileId> {
        let mut oldest = Vec::with_capacity(count.min(self.files.len()));
        for _ in 0..self.order.len() {
            let Some(file) = self.order.pop_front() else { break };
            if self.files.contains(&file) {
                oldest.push(file);
                self.order.push_back(file);
            }
            if oldest.len() == count {
                break;
            }
        }
        oldest
    }

    pub(super) fn into_files(self) -> HashSet<FileId, IdHash> {
        self.files
    }
}

impl LeaseTable {
    /// Asks `who` to give back its oldest leases, unless it has been asked already.
    pub(super) fn make_room(&self, who: &Arc<LeaseHolder>) {
        let Some((number, oldest)) = who.begin_to_give_back() else { return };
        let asked = |id: FileId| -> Option<RecallItem> {
            let kinds = self.ask_back(who, id, number)?;
            Some(RecallItem { id, kinds, name: None })
        };
        let items: Vec<RecallItem> = oldest.into_iter().filter_map(asked).collect();
        match items.is_empty() {
            true => who.nothing_to_give_back(number),
            false => who.recall(number.number, items),
        }
    }
}

impl LeaseHolder {
    /// The number of the recall, and what it may ask back. None: one is under way.
    fn begin_to_give_back(&self) -> Option<(RecallNumber, Vec<FileId>)> {
        let number = self.begin_recall();
        let mut state = self.state();
        let is_under_way = state.giving_back.is_some_and(|last| state.pending.contains_key(&last));
        if is_under_way || state.ended {
            state.pending.remove(&number.number);
            return None;
        }
        state.giving_back = Some(number.number);
        // An eighth at most: the rest stays, however few there may be.
        let count = state.held.len().div_ceil(8).min(RECALL_ITEMS_MAX);
        Some((number, state.held.oldest(count)))
    }

    /// The number of a recall of all that it has, as far as one message takes it.
    pub(super) fn begin_to_take(&self) -> (RecallNumber, Vec<FileId>) {
        let number = self.begin_recall();
        (number, self.state().held.oldest(RECALL_ITEMS_MAX))
    }

    pub(super) fn nothing_to_give_back(&self, number: RecallNumber) {
        self.state().pending.remove(&number.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(ino: u64) -> FileId {
        FileId { ino, generation: 0 }
    }

    #[test]
    fn the_oldest_go_first_and_the_order_is_bounded() {
        let mut held = HeldFiles::default();
        (0..10).for_each(|ino| held.insert(id(ino)));
        held.insert(id(0)); // it has that one
        held.remove(id(1));
        assert_eq!(held.oldest(3), [0, 2, 3].map(id));
        held.insert(id(1));
        assert_eq!(held.oldest(7), [4, 5, 6, 7, 8, 9, 0].map(id), "once each");
        for _ in 0..10_000 {
            held.remove(id(1));
            held.insert(id(1));
        }
        assert!(held.order.len() <= 2 * held.len() + RECALL_ITEMS_MAX + 1);
        let all = held.oldest(usize::MAX);
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), held.len());
    }
}
