//! A journal whose notes are shipped to a backup.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{Fut, Op};

use super::entry::{JournalEntry, SlotName};
use super::stream::JournalStream;
use crate::server::journal::{Journal, PersistentRecord, SessionRecord, SlotLog, SlotRecord};
use crate::wire::Wire;

/// Notes in `own`, and then on the stream: what the backup has, the primary has, too.
pub struct ReplicatedJournal {
    own: Arc<dyn Journal>,
    stream: Arc<JournalStream>,
    sessions: Mutex<BTreeMap<u64, (SessionRecord, Arc<ReplicatedLog>)>>,
}

impl ReplicatedJournal {
    /// Over the primary's own journal, which may have sessions of an earlier server.
    pub fn new(own: Arc<dyn Journal>, stream: Arc<JournalStream>) -> ReplicatedJournal {
        let journal = ReplicatedJournal { own, stream, sessions: Mutex::default() };
        for (record, log) in journal.own.load() {
            journal.enter(record, log);
        }
        journal
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, (SessionRecord, Arc<ReplicatedLog>)>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, record: SessionRecord, own: Arc<dyn SlotLog>) -> Arc<ReplicatedLog> {
        let log = Arc::new(ReplicatedLog {
            session: record.id,
            // A server before us may have begun a change in any of them.
            begun: (0..own.count()).map(|_| AtomicBool::new(true)).collect(),
            own,
            stream: self.stream.clone(),
        });
        self.lock().insert(record.id, (record, log.clone()));
        log
    }

    /// Everything that has been noted, in batches, each made when it is asked for. What is noted
    /// meanwhile goes by the stream, behind the copy, and may be in the copy as well. In the end the
    /// backup has the newest. Errors: those of reading what is kept.
    pub(super) fn copy(&self) -> io::Result<impl Iterator<Item = Vec<u8>> + use<>> {
        let mut first = Vec::new();
        JournalEntry::CopyBegins.put(&mut first);
        for what in PersistentRecord::all() {
            if let Some(kept) = self.own.kept(what)? {
                JournalEntry::Kept { what, bytes: &kept }.put(&mut first);
            }
        }
        let sessions: Vec<_> = self.lock().values().cloned().collect();
        let batch = |(record, log): (SessionRecord, Arc<ReplicatedLog>)| {
            let mut bytes = Vec::new();
            log.put_copy(record, &mut bytes);
            bytes
        };
        Ok(std::iter::once(first).chain(sessions.into_iter().map(batch)))
    }
}

impl Journal for ReplicatedJournal {
    fn create(&self, session: &SessionRecord, slots: u32) -> io::Result<Arc<dyn SlotLog>> {
        let own = self.own.create(session, slots)?;
        let log = self.enter(session.clone(), own);
        self.stream.note(&JournalEntry::SessionBegun { session: session.clone(), slots });
        Ok(log)
    }

    fn remove(&self, session: u64) {
        self.lock().remove(&session);
        self.own.remove(session);
        self.stream.note(&JournalEntry::SessionEnded { session });
    }

    fn load(&self) -> Vec<(SessionRecord, Arc<dyn SlotLog>)> {
        let sessions = self.lock();
        let loaded = |(record, log): &(SessionRecord, Arc<ReplicatedLog>)| {
            (record.clone(), log.clone() as Arc<dyn SlotLog>)
        };
        sessions.values().map(loaded).collect()
    }

    fn kept(&self, what: PersistentRecord) -> io::Result<Option<Vec<u8>>> {
        self.own.kept(what)
    }

    fn keep(&self, what: PersistentRecord, bytes: &[u8]) -> io::Result<()> {
        self.own.keep(what, bytes)?;
        self.stream.note(&JournalEntry::Kept { what, bytes });
        Ok(())
    }

    fn settled(&self) -> Option<Fut<'_, bool>> {
        Some(Box::pin(self.stream.settled()))
    }
}

/// The notes on one session.
struct ReplicatedLog {
    session: u64,
    own: Arc<dyn SlotLog>,
    stream: Arc<JournalStream>,
    /// Slots in which a change has been noted that is not answered. The answers of other calls are not
    /// shipped, since a repetition of these calls is harmless. So what waits for the backup is bounded by
    /// the changes that wait for it.
    begun: Vec<AtomicBool>,
}

impl ReplicatedLog {
    fn name(&self, slot: u32, sequence: u32) -> SlotName {
        SlotName { session: self.session, slot, sequence }
    }

    /// Appends the session and its slots, as they are now.
    fn put_copy(&self, session: SessionRecord, out: &mut Vec<u8>) {
        JournalEntry::SessionBegun { session, slots: self.own.count() }.put(out);
        JournalEntry::Locks { session: self.session, held: self.own.had_locks() }.put(out);
        for (slot, record) in self.own.records() {
            match record {
                SlotRecord::Intent { sequence, op, intent } => {
                    let slot = self.name(slot, sequence);
                    JournalEntry::ChangeBegun { slot, op, intent: &intent }.put(out);
                }
                SlotRecord::Answer { sequence, answer, begun } => {
                    let slot = self.name(slot, sequence);
                    if let Some((op, intent)) = begun {
                        JournalEntry::ChangeBegun { slot, op, intent: &intent }.put(out);
                    }
                    JournalEntry::ChangeAnswered { slot, answer: &answer }.put(out);
                }
            }
        }
    }
}

impl SlotLog for ReplicatedLog {
    fn begin(&self, slot: u32, sequence: u32, op: Op, intent: &[u8]) {
        self.own.begin(slot, sequence, op, intent);
        if let Some(begun) = self.begun.get(slot as usize) {
            begun.store(true, Ordering::SeqCst);
        }
        let slot = self.name(slot, sequence);
        self.stream.note(&JournalEntry::ChangeBegun { slot, op, intent });
    }

    fn done(&self, slot: u32, sequence: u32, answer: &[u8]) {
        self.own.done(slot, sequence, answer);
        let begun = self.begun.get(slot as usize);
        if begun.is_some_and(|begun| begun.swap(false, Ordering::SeqCst)) {
            let slot = self.name(slot, sequence);
            self.stream.note(&JournalEntry::ChangeAnswered { slot, answer });
        }
    }

    fn count(&self) -> u32 {
        self.own.count()
    }

    fn records(&self) -> Vec<(u32, SlotRecord)> {
        self.own.records()
    }

    fn set_locks(&self, held: bool) {
        self.own.set_locks(held);
        self.stream.note(&JournalEntry::Locks { session: self.session, held });
    }

    fn had_locks(&self) -> bool {
        self.own.had_locks()
    }

    /// Not noted: who succeeds this server has another journal, and this one is old if the server comes back.
    fn set_leases(&self, _: bool) {}

    fn may_have_leases(&self) -> bool {
        true
    }

    fn settled(&self) -> Option<Fut<'_, bool>> {
        Some(Box::pin(self.stream.settled()))
    }
}
