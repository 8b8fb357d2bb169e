//! The backup's copy of a primary's journal.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::entry::{JournalEntry, SlotName};
use crate::server::journal::{ANSWER_MAX_BYTES, INTENT_MAX_BYTES, Journal, SessionRecord, SlotLog};
use crate::server::sabotage::{BrokenPromises, Sabotage};
use crate::wire::{Input, Malformed};

/// Replay slots that a session of another server may have at most.
const SLOTS_MAX: u32 = 4096;

/// Why notes are not taken.
#[derive(Debug)]
pub enum ReplicaRefusal {
    /// The notes are of a primary that is none any more.
    Deposed,
    /// Notes before them are missing: a copy has to come first.
    Incomplete,
    /// The bytes are no notes.
    Malformed(Malformed),
    /// The notes cannot be kept here.
    Io(io::Error),
}

impl fmt::Display for ReplicaRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReplicaRefusal::Deposed => f.write_str("another server has taken the slice over"),
            ReplicaRefusal::Incomplete => f.write_str("notes are missing before these"),
            ReplicaRefusal::Malformed(why) => why.fmt(f),
            ReplicaRefusal::Io(error) => write!(f, "cannot keep the notes of the primary: {error}"),
        }
    }
}

impl From<Malformed> for ReplicaRefusal {
    fn from(why: Malformed) -> ReplicaRefusal {
        ReplicaRefusal::Malformed(why)
    }
}

impl From<io::Error> for ReplicaRefusal {
    fn from(error: io::Error) -> ReplicaRefusal {
        ReplicaRefusal::Io(error)
    }
}

/// Takes what another server brings.
pub trait BatchTaker: Send + Sync {
    /// Takes batch `number` of the sender's `epoch`. What it answers goes back with the receipt; empty: the
    /// receipt says it all. Errors: it is not taken.
    fn take(&self, epoch: u64, number: u64, batch: &[u8]) -> Result<Vec<u8>, ReplicaRefusal>;
}

impl BatchTaker for JournalReplica {
    fn take(&self, epoch: u64, number: u64, batch: &[u8]) -> Result<Vec<u8>, ReplicaRefusal> {
        JournalReplica::take(self, epoch, number, batch).map(|()| Vec::new())
    }
}

/// The backup's copy.
pub struct JournalReplica {
    journal: Arc<dyn Journal>,
    broken: BrokenPromises,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Of the primary whose notes are taken; those of earlier ones are not.
    epoch: u64,
    /// The epoch of the primary is not known yet.
    awaits_primary: bool,
    /// A copy has begun in this epoch: what follows it can be applied.
    has_copy: bool,
    /// The membership says that this server has everything. So no copy is under way.
    is_in_step: bool,
    /// The number of the next batch of this epoch.
    next: u64,
    sessions: BTreeMap<u64, Arc<dyn SlotLog>>,
}

impl JournalReplica {
    /// Keeps notes in `journal`; what is in there counts for nothing before a copy has come.
    pub fn new(journal: Arc<dyn Journal>) -> JournalReplica {
        JournalReplica { journal, broken: BrokenPromises::default(), state: Mutex::default() }
    }

    /// With a protection left out.
    pub(super) fn that_is(self, broken: BrokenPromises) -> JournalReplica {
        JournalReplica { broken, ..self }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes batch `number` of the primary of `epoch`. One that came before is not applied again. It may
    /// wait for a disk. Errors: it is not taken; notes of it may have been applied.
    pub fn take(&self, epoch: u64, number: u64, batch: &[u8]) -> Result<(), ReplicaRefusal> {
        let mut state = self.lock();
        let epoch = if self.broken.is(Sabotage::Epochs) { state.epoch } else { epoch };
        if epoch < state.epoch {
            return Err(ReplicaRefusal::Deposed);
        }
        if state.awaits_primary && !self.broken.is(Sabotage::Epochs) {
            return Err(ReplicaRefusal::Incomplete);
        }
        if epoch > state.epoch {
            *state = State { epoch, ..State::default() };
        }
        let mut input = Input(batch);
        let mut entries = Vec::new();
        while !input.0.is_empty() {
            entries.push(input.get::<JournalEntry<'_>>()?);
        }
        let begins_copy = matches!(entries.first(), Some(JournalEntry::CopyBegins));
        if number < state.next {
            return Ok(()); // its acknowledgement was lost, or it was under way for long
        }
        if !begins_copy && (!state.has_copy || number > state.next) {
            return Err(ReplicaRefusal::Incomplete);
        }
        // A copy that this process has not seen the end of, and that was for the process before it. It would
        // replace the journal that this server takes over with.
        if begins_copy && state.is_in_step && !state.has_copy {
            return Err(ReplicaRefusal::Incomplete);
        }
        for entry in entries {
            self.apply(&mut state, entry)?;
        }
        state.next = number + 1;
        Ok(())
    }

    /// Takes nothing more without another copy: this server is about to take over. The server that copies has
    /// said in the membership before that this server is not in step, and then cannot be taken over.
    pub fn close(&self) {
        self.lock().has_copy = false;
    }

    /// Takes nothing before it is known of which epoch the primary is. A batch of an earlier one can be
    /// under way for long. To a process that has begun anew it looks like one of its primary. The copy
    /// in it would replace the journal that this server goes on from.
    pub(super) fn that_awaits_its_primary(self) -> JournalReplica {
        self.lock().awaits_primary = true;
        self
    }

    /// Takes notes of the primary of `epoch`, or a later one. `in_step`: the membership says that this
    /// server has everything that clients rely on. The primary takes that back before it copies anew.
    pub(super) fn open_from(&self, epoch: u64, in_step: bool) {
        self.close_before(epoch);
        let mut state = self.lock();
        state.awaits_primary = false;
        if epoch == state.epoch {
            state.is_in_step = in_step;
        }
    }

    /// Takes nothing any more from primaries before `epoch`.
    pub fn close_before(&self, epoch: u64) {
        let mut state = self.lock();
        if epoch > state.epoch && !self.broken.is(Sabotage::Epochs) {
            *state = State { epoch, ..State::default() };
        }
    }

    fn apply(&self, state: &mut State, entry: JournalEntry<'_>) -> Result<(), ReplicaRefusal> {
        match entry {
            JournalEntry::CopyBegins => {
                for (record, _) in self.journal.load() {
                    self.journal.remove(record.id);
                }
                state.sessions.clear();
                state.has_copy = true;
            }
            JournalEntry::SessionBegun { session, slots } => {
                if slots > SLOTS_MAX {
                    return Err(Malformed("a session of too many replay slots").into());
                }
                self.begin_session(state, &session, slots)?;
            }
            JournalEntry::SessionEnded { session } => {
                if state.sessions.remove(&session).is_some() {
                    self.journal.remove(session);
                }
            }
            JournalEntry::ChangeBegun { slot, op, intent } => {
                must_fit(intent, INTENT_MAX_BYTES)?;
                with_slot(state, slot, |log| log.begin(slot.slot, slot.sequence, op, intent));
            }
            JournalEntry::ChangeAnswered { slot, answer } => {
                must_fit(answer, ANSWER_MAX_BYTES)?;
                with_slot(state, slot, |log| log.done(slot.slot, slot.sequence, answer));
            }
            JournalEntry::Locks { session, held } => {
                if let Some(log) = state.sessions.get(&session) {
                    log.set_locks(held);
                }
            }
            JournalEntry::Kept { what, bytes } => self.journal.keep(what, bytes)?,
        }
        Ok(())
    }

    /// One that is in the copy and in the notes behind it begins once.
    fn begin_session(
        &self,
        state: &mut State,
        session: &SessionRecord,
        slots: u32,
    ) -> Result<(), ReplicaRefusal> {
        if let Entry::Vacant(place) = state.sessions.entry(session.id) {
            place.insert(self.journal.create(session, slots)?);
        }
        Ok(())
    }
}

/// Of a session that ended while the copy was made nothing is noted any more.
fn with_slot(state: &State, slot: SlotName, note: impl FnOnce(&dyn SlotLog)) {
    let log = state.sessions.get(&slot.session);
    if let Some(log) = log.filter(|log| slot.slot < log.count()) {
        note(&**log);
    }
}

fn must_fit(bytes: &[u8], most: usize) -> Result<(), Malformed> {
    if bytes.len() <= most { Ok(()) } else { Err(Malformed("a note that is too long")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::journal::{MemoryJournal, SlotRecord};
    use crate::wire::Wire;
    use dray_core::Op;

    fn batch(entries: &[JournalEntry<'_>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        entries.iter().for_each(|entry| entry.put(&mut bytes));
        bytes
    }

    fn session(id: u64) -> SessionRecord {
        SessionRecord { id, secret: [0; 16], node: 1, export: "x/0.1".into(), host: "h".into() }
    }

    fn slot(sequence: u32) -> SlotName {
        SlotName { session: 1, slot: 0, sequence }
    }

    fn begun(sequence: u32) -> JournalEntry<'static> {
        JournalEntry::ChangeBegun { slot: slot(sequence), op: Op::Make, intent: b"intent" }
    }

    fn copy() -> Vec<u8> {
        let session = JournalEntry::SessionBegun { session: session(1), slots: 2 };
        batch(&[JournalEntry::CopyBegins, session])
    }

    #[test]
    fn notes_count_behind_a_copy_and_in_their_order_and_once() {
        let journal = MemoryJournal::default();
        let replica = JournalReplica::new(Arc::new(journal.clone()));
        let note = batch(&[begun(7)]);
        assert!(matches!(replica.take(1, 0, &note), Err(ReplicaRefusal::Incomplete)));
        replica.take(1, 5, &copy()).unwrap();
        assert!(matches!(replica.take(1, 7, &note), Err(ReplicaRefusal::Incomplete)));
        replica.take(1, 6, &note).unwrap();
        let answered = JournalEntry::ChangeAnswered { slot: slot(7), answer: b"made" };
        replica.take(1, 7, &batch(&[answered])).unwrap();
        replica.take(1, 6, &note).unwrap();
        let records = journal.load()[0].1.records();
        let answer = SlotRecord::Answer {
            sequence: 7,
            answer: b"made".to_vec(),
            begun: Some((Op::Make, b"intent".to_vec())),
        };
        assert_eq!(records, [(0, answer)]);
    }

    #[test]
    fn a_primary_that_was_deposed_is_not_heard() {
        let journal = MemoryJournal::default();
        let replica = JournalReplica::new(Arc::new(journal.clone()));
        replica.take(3, 0, &copy()).unwrap();
        replica.close();
        assert!(matches!(replica.take(3, 1, &batch(&[begun(1)])), Err(ReplicaRefusal::Incomplete)));
        replica.close_before(4);
        assert!(matches!(replica.take(3, 1, &batch(&[begun(1)])), Err(ReplicaRefusal::Deposed)));
        assert!(matches!(replica.take(3, 1, &copy()), Err(ReplicaRefusal::Deposed)));
        assert!(matches!(replica.take(4, 1, &batch(&[begun(1)])), Err(ReplicaRefusal::Incomplete)));
        assert_eq!(journal.load()[0].1.records(), []);
        replica.take(5, 0, &copy()).unwrap();
    }

    /// The copy of a primary of long ago was under way when the process of its successor began anew, and
    /// replaced the journal of that.
    // proves: P200
    #[test]
    fn a_process_that_does_not_know_its_primary_takes_nothing() {
        let journal = MemoryJournal::default();
        journal.create(&session(7), 1).unwrap();
        let replica = JournalReplica::new(Arc::new(journal.clone())).that_awaits_its_primary();
        assert!(matches!(replica.take(1, 0, &copy()), Err(ReplicaRefusal::Incomplete)));
        assert_eq!(journal.load()[0].0.id, 7);
        replica.open_from(3, false);
        assert!(matches!(replica.take(1, 0, &copy()), Err(ReplicaRefusal::Deposed)));
        replica.take(3, 0, &copy()).unwrap();
        assert_eq!(journal.load()[0].0.id, 1);
    }

    /// The beginning of a copy that the process before had taken came again to the process after it. The
    /// journal was empty when that took over, and clients lost their sessions.
    // proves: P200
    #[test]
    fn a_process_that_is_in_step_takes_no_copy_before_that_is_taken_back() {
        let journal = MemoryJournal::default();
        journal.create(&session(7), 1).unwrap();
        let replica = JournalReplica::new(Arc::new(journal.clone())).that_awaits_its_primary();
        replica.open_from(3, true);
        assert!(matches!(replica.take(3, 0, &copy()), Err(ReplicaRefusal::Incomplete)));
        assert_eq!(journal.load()[0].0.id, 7);
        replica.open_from(3, false);
        replica.take(3, 4, &copy()).unwrap();
        replica.open_from(3, true);
        replica.take(3, 5, &copy()).unwrap(); // the membership may not have said it here yet
        assert_eq!(journal.load()[0].0.id, 1);
    }

    /// Bytes from a network: an error, whatever they are, and nothing panics.
    #[test]
    fn hostile_notes_are_refused() {
        let replica = JournalReplica::new(Arc::new(MemoryJournal::default()));
        replica.take(1, 0, &copy()).unwrap();
        let long = vec![0; INTENT_MAX_BYTES + 1];
        let too_long = JournalEntry::ChangeBegun { slot: slot(1), op: Op::Make, intent: &long };
        let answer = JournalEntry::ChangeAnswered { slot: slot(1), answer: &long };
        let slots = JournalEntry::SessionBegun { session: session(2), slots: u32::MAX };
        for entry in [too_long, answer, slots] {
            let refused = replica.take(1, 1, &batch(&[entry]));
            assert!(matches!(refused, Err(ReplicaRefusal::Malformed(_))));
        }
        let nowhere = SlotName { slot: 99, ..slot(1) };
        let nobody = SlotName { session: 99, ..slot(1) };
        for slot in [nowhere, nobody] {
            let entry = JournalEntry::ChangeBegun { slot, op: Op::Make, intent: b"" };
            let _ = replica.take(1, 1, &batch(&[entry]));
        }
        for byte in 0..=u8::MAX {
            let _ = replica.take(1, 9, &[byte]);
        }
    }
}
