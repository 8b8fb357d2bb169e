//! The replay slots, as the process before this one left them.

use std::sync::atomic::{AtomicU64, Ordering};

use dray_core::{NodeId, Origin, RequestId};

use super::SessionMemory;
use super::layout::{FIRST_NODE, FIRST_SLOT, SLOTS, SLOTS_MAX};

/// The stores that taking a slot makes, in this order. The slot's last request has got its answer,
/// and the new request is not to be taken for the last one.
pub(super) fn taking(number: u32, sequence: u32, request: u64) -> [(usize, u64); 3] {
    let at = FIRST_SLOT + 2 * number as usize;
    [(at + 1, 0), (at, u64::from(sequence) << 32 | IN_USE), (at + 1, request)]
}

/// Bits of a slot's first word.
pub(super) const IN_USE: u64 = 1;
pub(super) const LOST: u64 = 2;

/// A slot as the process before us left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotState {
    pub(crate) number: u32,
    pub(crate) sequence: u32,
    pub(crate) in_use: bool,
    /// The server has given up the session in which it was used last: the outcome of its request is
    /// unknown, unless that has been answered.
    pub(crate) lost: bool,
    /// Where its request began; of the client itself the node is [`NodeId::OWN`].
    pub(crate) origin: Origin,
}

impl SessionMemory {
    /// The slots of the process before us; none if there was none.
    pub(crate) fn slots(&self) -> Vec<SlotState> {
        let count = (self.get(SLOTS) as usize).min(SLOTS_MAX);
        (0..count as u32).map(|number| self.slot(number)).collect()
    }

    pub(super) fn slot(&self, number: u32) -> SlotState {
        let at = FIRST_SLOT + 2 * number as usize;
        let state = self.get(at);
        SlotState {
            number,
            sequence: (state >> 32) as u32,
            in_use: state & IN_USE != 0,
            lost: state & LOST != 0,
            origin: Origin { node: self.node_of(number), request: RequestId(self.get(at + 1)) },
        }
    }

    /// The node of a slot's request. Memory that nobody takes over has none.
    fn node_of(&self, number: u32) -> NodeId {
        if self.fd.is_some() { NodeId(self.get(FIRST_NODE + number as usize)) } else { NodeId::OWN }
    }

    pub(crate) fn set_slots(&self, count: u32) {
        self.set(SLOTS, u64::from(count));
    }

    /// Notes that a slot is in use, before anything is sent in it.
    pub(crate) fn take_slot(&self, number: u32, sequence: u32, origin: Origin) {
        let request = origin.request.0;
        if self.node_of(number) != origin.node && self.fd.is_some() {
            self.set(FIRST_SLOT + 2 * number as usize + 1, 0); // it is of neither in between
            self.set(FIRST_NODE + number as usize, origin.node.0);
        }
        taking(number, sequence, request).iter().for_each(|(index, word)| self.set(*index, *word));
    }

    /// The slot's change has been answered, or nobody waits for it.
    pub(crate) fn free_slot(&self, number: u32) {
        self.slot_word(number).fetch_and(!IN_USE, Ordering::AcqRel);
    }

    /// The session in which it was used is over.
    pub(crate) fn lose_slot(&self, number: u32) {
        self.slot_word(number).fetch_or(LOST, Ordering::AcqRel);
    }

    /// The slot's change is made in the session that there is now.
    pub(crate) fn keep_slot(&self, number: u32) {
        self.slot_word(number).fetch_and(!LOST, Ordering::AcqRel);
    }

    fn slot_word(&self, number: u32) -> &AtomicU64 {
        self.word(FIRST_SLOT + 2 * number as usize)
    }
}
