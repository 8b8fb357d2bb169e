//! Nodes that the kernel has forgotten and that still lead to their files, for handles: the oldest of
//! too many are let go.

use std::collections::VecDeque;

use dray_core::IdMap;

/// How many: 32 bytes each in the table of nodes, some 90 on the heap.
#[cfg(not(test))]
const KEPT_MAX: usize = 1 << 18;
#[cfg(test)]
pub(super) const KEPT_MAX: usize = 8;

/// Slots of the node table.
#[derive(Default)]
pub(super) struct ForgottenNodes {
    /// When each came in.
    positions: IdMap<u64, u64>,
    /// In that order; and some that have been taken since, or came in again.
    order: VecDeque<(u64, u64)>,
    last_position: u64,
}

impl ForgottenNodes {
    pub(super) fn add(&mut self, slot: u64) {
        self.last_position += 1;
        self.positions.insert(slot, self.last_position);
        self.order.push_back((self.last_position, slot));
        if self.order.len() > 2 * self.positions.len() + 64 {
            let positions = &self.positions;
            self.order.retain(|(position, slot)| positions.get(slot) == Some(position));
        }
    }

    /// The kernel knows it again.
    pub(super) fn take(&mut self, slot: u64) {
        self.positions.remove(&slot);
    }

    /// Takes the one that has been here longest.
    pub(super) fn oldest(&mut self) -> Option<u64> {
        while let Some((position, slot)) = self.order.pop_front() {
            if self.positions.get(&slot) == Some(&position) {
                self.positions.remove(&slot);
                return Some(slot);
            }
        }
        None
    }

    /// Whether there are more than there should be.
    pub(super) fn is_full(&self) -> bool {
        self.positions.len() > KEPT_MAX
    }

    pub(super) fn len(&self) -> usize {
        self.positions.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = u64> {
        self.positions.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_goes_first_however_often_others_come_and_go() {
        let mut kept = ForgottenNodes::default();
        for slot in 1..=4 {
            kept.add(slot);
        }
        for _ in 0..1000 {
            kept.take(2);
            kept.add(2);
        }
        assert!(kept.order.len() <= 2 * 4 + 64 + 1);
        kept.take(3);
        assert_eq!(kept.iter().count(), kept.len());
        let left: Vec<u64> = std::iter::from_fn(|| kept.oldest()).collect();
        assert_eq!((left, kept.len()), (vec![1, 4, 2], 0));
    }
}
