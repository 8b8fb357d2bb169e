//! One note of a journal, as it travels to a backup.

use dray_core::Op;

use crate::server::journal::{PersistentRecord, SessionRecord};
use crate::wire::{Input, Malformed, Wire};

/// A note. Byte strings are bounded by the frame that they travel in.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum JournalEntry<'a> {
    /// A full copy begins: what the backup has is forgotten.
    CopyBegins,
    /// A session of `slots` replay slots has begun.
    SessionBegun { session: SessionRecord, slots: u32 },
    /// A session is over.
    SessionEnded { session: u64 },
    /// A change begins.
    ChangeBegun { slot: SlotName, op: Op, intent: &'a [u8] },
    /// A change was answered.
    ChangeAnswered { slot: SlotName, answer: &'a [u8] },
    /// Whether a session holds locks.
    Locks { session: u64, held: bool },
    /// What is kept beside sessions.
    Kept { what: PersistentRecord, bytes: &'a [u8] },
}

/// A change: a replay slot of a session, and the change's number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotName {
    pub(super) session: u64,
    pub(super) slot: u32,
    pub(super) sequence: u32,
}

const COPY_BEGINS: u8 = 0;
const SESSION_BEGUN: u8 = 1;
const SESSION_ENDED: u8 = 2;
const CHANGE_BEGUN: u8 = 3;
const CHANGE_ANSWERED: u8 = 4;
const LOCKS: u8 = 5;
const KEPT: u8 = 6;

impl PersistentRecord {
    const ALL: [PersistentRecord; 3] =
        [PersistentRecord::TicketKey, PersistentRecord::Evicted, PersistentRecord::StampsBound];

    /// Everything that may be kept.
    pub(super) fn all() -> impl Iterator<Item = PersistentRecord> {
        PersistentRecord::ALL.into_iter()
    }

    fn number(self) -> u8 {
        match self {
            PersistentRecord::TicketKey => 0,
            PersistentRecord::Evicted => 1,
            PersistentRecord::StampsBound => 2,
        }
    }
}

impl<'a> Wire<'a> for SlotName {
    fn put(&self, out: &mut Vec<u8>) {
        self.session.put(out);
        self.slot.put(out);
        self.sequence.put(out);
    }

    fn get(input: &mut Input<'a>) -> Result<SlotName, Malformed> {
        Ok(SlotName { session: input.get()?, slot: input.get()?, sequence: input.get()? })
    }
}

impl<'a> Wire<'a> for JournalEntry<'a> {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            JournalEntry::CopyBegins => COPY_BEGINS.put(out),
            JournalEntry::SessionBegun { session, slots } => {
                SESSION_BEGUN.put(out);
                session.id.put(out);
                session.secret.put(out);
                session.node.put(out);
                session.export.put(out);
                session.host.put(out);
                slots.put(out);
            }
            JournalEntry::SessionEnded { session } => {
                SESSION_ENDED.put(out);
                session.put(out);
            }
            JournalEntry::ChangeBegun { slot, op, intent } => {
                CHANGE_BEGUN.put(out);
                slot.put(out);
                (*op as u8).put(out);
                intent.put(out);
            }
            JournalEntry::ChangeAnswered { slot, answer } => {
                CHANGE_ANSWERED.put(out);
                slot.put(out);
                answer.put(out);
            }
            JournalEntry::Locks { session, held } => {
                LOCKS.put(out);
                session.put(out);
                held.put(out);
            }
            JournalEntry::Kept { what, bytes } => {
                KEPT.put(out);
                what.number().put(out);
                bytes.put(out);
            }
        }
    }

    fn get(input: &mut Input<'a>) -> Result<JournalEntry<'a>, Malformed> {
        Ok(match input.get::<u8>()? {
            COPY_BEGINS => JournalEntry::CopyBegins,
            SESSION_BEGUN => JournalEntry::SessionBegun {
                session: SessionRecord {
                    id: input.get()?,
                    secret: input.get()?,
                    node: input.get()?,
                    export: input.get()?,
                    host: input.get()?,
                },
                slots: input.get()?,
            },
            SESSION_ENDED => JournalEntry::SessionEnded { session: input.get()? },
            CHANGE_BEGUN => JournalEntry::ChangeBegun {
                slot: input.get()?,
                op: operation(input.get()?)?,
                intent: input.get()?,
            },
            CHANGE_ANSWERED => {
                JournalEntry::ChangeAnswered { slot: input.get()?, answer: input.get()? }
            }
            LOCKS => JournalEntry::Locks { session: input.get()?, held: input.get()? },
            KEPT => JournalEntry::Kept { what: kept(input.get()?)?, bytes: input.get()? },
            _ => return Err(Malformed("no such note of a journal")),
        })
    }
}

fn operation(number: u8) -> Result<Op, Malformed> {
    Op::ALL.get(usize::from(number)).copied().ok_or(Malformed("no such operation"))
}

fn kept(number: u8) -> Result<PersistentRecord, Malformed> {
    let of_number = |what: &PersistentRecord| what.number() == number;
    PersistentRecord::all().find(of_number).ok_or(Malformed("nothing of this number is kept"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_arrive_as_they_were_sent_and_parts_of_them_do_not() {
        let session =
            SessionRecord { id: 7, secret: [3; 16], node: 9, export: "x".into(), host: "h".into() };
        let slot = SlotName { session: 7, slot: 63, sequence: u32::MAX };
        let entries = [
            JournalEntry::CopyBegins,
            JournalEntry::SessionBegun { session, slots: 64 },
            JournalEntry::ChangeBegun { slot, op: Op::Rename, intent: b"from here to there" },
            JournalEntry::ChangeAnswered { slot, answer: b"made" },
            JournalEntry::Locks { session: 7, held: true },
            JournalEntry::SessionEnded { session: 7 },
        ];
        let kept = PersistentRecord::all().map(|what| JournalEntry::Kept { what, bytes: b"abc" });
        for entry in entries.into_iter().chain(kept) {
            let mut bytes = Vec::new();
            entry.put(&mut bytes);
            assert_eq!(Input::whole::<JournalEntry<'_>>(&bytes), Ok(entry));
            for len in 0..bytes.len() {
                assert!(Input::whole::<JournalEntry<'_>>(&bytes[..len]).is_err());
            }
        }
    }
}
