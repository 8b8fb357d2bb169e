//! The slots of a session after a restart of the server: what became of the changes that the
//! server before us had noted.

use std::sync::Arc;

use dray_core::Op;

use super::{AnsweredChange, Reexecution, ReplaySlots, Slot, State};
use crate::server::exactly_once::settle::{self, CutShortChange, Settlement};
use crate::server::export::Export;
use crate::server::journal::SlotRecord;
use crate::server::options::StateLoss;
use crate::server::ranges::RangeTable;
use crate::server::reply::Reply;
use crate::server::sabotage::Sabotage;
use crate::wire::{OpRow, Trace};

/// A change as it was noted: its slot and its number.
#[derive(Clone, Copy)]
struct NotedChange {
    slot: u32,
    sequence: u32,
}

impl ReplaySlots {
    /// Takes over what a server before us had noted. After a loss of the machine an answer is no proof
    /// that its change is there. After one of what was written, the answer to a change of data is none.
    /// False: the export was lost meanwhile, and what could not be found out is noted as it was.
    pub(crate) async fn restore(&self, export: &Export, loss: StateLoss) -> bool {
        for (number, record) in self.log.records() {
            let slot = self.restored(export, loss, (number, record)).await;
            let Some(slot) = slot else { return false };
            if let Some(place) = self.lock().get_mut(number as usize) {
                *place = slot;
            }
        }
        true
    }

    async fn restored(
        &self,
        export: &Export,
        loss: StateLoss,
        (slot, record): (u32, SlotRecord),
    ) -> Option<Slot> {
        let lost = match loss {
            StateLoss::Nothing | StateLoss::Written => false,
            StateLoss::Unsynced | StateLoss::SessionsToo => true,
        };
        Some(match record {
            SlotRecord::Answer { sequence, answer, .. } if answer.is_empty() => {
                Slot::over(sequence)
            }
            SlotRecord::Answer { sequence, answer, begun } if lost => {
                let noted = NotedChange { slot, sequence };
                return self.look_again(export, noted, (answer, begun)).await;
            }
            SlotRecord::Answer { sequence, answer, begun: Some(begun) }
                if loss == StateLoss::Written
                    && settle::changes_data(&begun)
                    && !self.broken.is(Sabotage::AnsweredData) =>
            {
                let noted = NotedChange { slot, sequence };
                return self.answered_data(export, noted, (answer, begun)).await;
            }
            SlotRecord::Answer { sequence, answer, .. } => Slot::done(sequence, answer),
            SlotRecord::Intent { sequence, op, .. } if self.broken.forgets_intents(op) => {
                Slot::over(sequence.wrapping_sub(1))
            }
            SlotRecord::Intent { sequence, op, intent } => {
                let noted = NotedChange { slot, sequence };
                return self.find_out(export, lost, noted, (op, intent)).await;
            }
        })
    }

    /// The slot of a change that was answered before the machine was lost. None: the export was
    /// lost, and what its file system has said says nothing.
    async fn look_again(
        &self,
        export: &Export,
        noted: NotedChange,
        (answer, begun): (Vec<u8>, Option<(Op, Vec<u8>)>),
    ) -> Option<Slot> {
        let answered = Reply::remembered(&answer);
        let settled = settle::settle_answered(&*export.fs, answered, begun.clone()).await;
        if export.is_lost() {
            return None;
        }
        Some(match settled {
            Settlement::Undone => self.undone(noted.slot, noted.sequence),
            Settlement::Done(_) => Slot::done(noted.sequence, answer),
            Settlement::Cut(cut) => {
                // The noted answer is void: a later server epoch would send it.
                let Some((op, begun)) = begun else {
                    return Some(self.unknown(noted.slot, noted.sequence));
                };
                let intent = settle::of_answered(op, begun, cut.amend);
                self.log.begin(noted.slot, noted.sequence, op, &intent);
                self.cut((noted.sequence, op), cut, &export.ranges)
            }
            Settlement::Unreadable => self.unknown(noted.slot, noted.sequence),
        })
    }

    /// The slot of a change of data that was answered, by a server with whose machine the data may have
    /// gone. Its client keeps the change and sends it again, if it has the answer. If it has not, it asks
    /// for the change again. Then the change is made again by its stamp. None: as above.
    async fn answered_data(
        &self,
        export: &Export,
        noted: NotedChange,
        (answer, (op, begun)): (Vec<u8>, (Op, Vec<u8>)),
    ) -> Option<Slot> {
        let reply = Reply::remembered(&answer);
        let Some(stamp) = reply.stamped().map(|stamp| stamp.number) else {
            return Some(Slot::done(noted.sequence, answer)); // it is not kept either
        };
        let answered = Reply::remembered(&answer);
        let settled = settle::settle_answered(&*export.fs, reply, Some((op, begun))).await;
        if export.is_lost() {
            return None;
        }
        let Settlement::Cut(cut) = settled else {
            return Some(Slot::done(noted.sequence, answer));
        };
        let changed = cut.held.first().map(|(file, _)| *file).or_else(|| answered.file());
        let mut slot = self.cut((noted.sequence, op), cut, &export.ranges);
        // A copy is made again as it was asked for: what it took is not known by its stamp.
        if let State::Cut(again) = &mut slot.state
            && let Some(changed) = changed
            && OpRow::of(op).trace != Trace::Copied
        {
            let is_broken = self.broken.is(Sabotage::AwaitedStamps);
            let stamp = if is_broken { u64::MAX - stamp } else { stamp }; // later than any
            let awaited = export.replayed.await_repetition(stamp, changed);
            again.answered = Some(Box::new(AnsweredChange { answer: answered, awaited }));
        }
        Some(slot)
    }

    /// The slot of a change that was begun and not answered. None: as above.
    async fn find_out(
        &self,
        export: &Export,
        lost: bool,
        noted: NotedChange,
        (op, intent): (Op, Vec<u8>),
    ) -> Option<Slot> {
        let settled = settle::settle(&*export.fs, op, &intent, lost).await;
        if export.is_lost() {
            return None;
        }
        Some(match settled {
            Settlement::Undone => self.undone(noted.slot, noted.sequence),
            Settlement::Done(answer) => self.found_out(noted.slot, noted.sequence, &answer),
            Settlement::Cut(cut) => {
                // The next server epoch must not look again: it could find another file.
                if let Some(intent) = cut.amend.and_then(|amend| amend.intent(&intent)) {
                    self.log.begin(noted.slot, noted.sequence, op, &intent);
                }
                self.cut((noted.sequence, op), cut, &export.ranges)
            }
            Settlement::Unreadable => self.unknown(noted.slot, noted.sequence),
        })
    }

    /// The slot of a change that keeps its grants until it comes again.
    fn cut(
        &self,
        (sequence, op): (u32, Op),
        cut: CutShortChange,
        ranges: &Arc<RangeTable>,
    ) -> Slot {
        let CutShortChange { held, amend } = cut;
        let held = if self.broken.is(Sabotage::CutShortGrants) { Vec::new() } else { held };
        let grants =
            held.into_iter().map(|(file, span)| ranges.change_cut_short(file, span)).collect();
        Slot {
            sequence,
            state: State::Cut(Box::new(Reexecution { op, grants, amend, answered: None })),
            answer: Vec::new(),
        }
    }

    /// The slot of a change that was not applied. The intent must go: a later server epoch would
    /// settle it by later changes of other clients.
    pub(super) fn undone(&self, slot: u32, sequence: u32) -> Slot {
        let before = sequence.wrapping_sub(1);
        self.log.done(slot, before, &[]);
        Slot::over(before)
    }

    /// The slot of a change of which nobody can know any more whether it was made.
    pub(super) fn unknown(&self, slot: u32, sequence: u32) -> Slot {
        self.found_out(slot, sequence, &settle::unknown())
    }

    /// The slot of a change whose answer is known only now.
    fn found_out(&self, slot: u32, sequence: u32, answer: &Reply) -> Slot {
        let mut encoded = Vec::new();
        answer.put(&mut encoded);
        self.log.done(slot, sequence, &encoded);
        Slot::done(sequence, encoded)
    }
}

impl Slot {
    fn done(sequence: u32, answer: Vec<u8>) -> Slot {
        Slot { sequence, state: State::Restored, answer }
    }
}
