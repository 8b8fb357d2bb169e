//! The state that outlives the server process: sessions, their replay slots, and the intents of
//! changes that were under way.
//!
//! A journal survives the death of the process, not necessarily that of the machine: it
//! is memory that somebody else keeps (a mapped file). Slots are never synced; that there is
//! a session is, so that after a loss of power it is known whom to wait for.

pub(crate) mod file;
pub(crate) mod records;
#[cfg(test)]
pub(crate) mod watched;

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{Fut, Op};

/// Longest intent: two names and four ids with room to spare, bytes.
pub const INTENT_MAX_BYTES: usize = 704;
/// Longest answer to a change, bytes.
pub const ANSWER_MAX_BYTES: usize = 272;

/// The client that a session belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionRecord {
    /// The session's number.
    pub id: u64,
    /// The session's secret.
    pub secret: [u8; 16],
    /// The client's node.
    pub node: u64,
    /// The export's name.
    pub export: String,
    /// The client's host name.
    pub host: String,
}

/// The last note about a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlotRecord {
    /// A change was begun; whether it was applied is to be found out.
    Intent {
        /// The number of the change in the slot.
        sequence: u32,
        /// Which operation.
        op: Op,
        /// The intent of the change, noted before it.
        intent: Vec<u8>,
    },
    /// A change was answered.
    Answer {
        /// The number of the change in the slot.
        sequence: u32,
        /// The answer.
        answer: Vec<u8>,
        /// The note before the answer, if there was one: operation and intent.
        begun: Option<(Op, Vec<u8>)>,
    },
}

/// Notes on the slots of one session.
pub trait SlotLog: Send + Sync + 'static {
    /// A change begins. `intent` is at most [`INTENT_MAX_BYTES`].
    fn begin(&self, slot: u32, sequence: u32, op: Op, intent: &[u8]);

    /// The change was answered. The `answer` is at most [`ANSWER_MAX_BYTES`].
    fn done(&self, slot: u32, sequence: u32, answer: &[u8]);

    /// Slots that there are.
    fn count(&self) -> u32;

    /// Everything noted, by slot.
    fn records(&self) -> Vec<(u32, SlotRecord)>;

    /// Notes that the session holds locks, or that it no longer does.
    fn set_locks(&self, held: bool);

    /// Whether it held locks.
    fn had_locks(&self) -> bool;

    /// Notes whether the client may have leases from now on. Until it is noted it may.
    fn set_leases(&self, may: bool);

    /// Whether the client may have had leases when the process died. After a loss of power this says nothing.
    fn may_have_leases(&self) -> bool;

    /// Waits until what was noted outlives this server's machine. The answer is false where it cannot
    /// any more, and what was noted must not be carried out. None: there is nothing to wait for.
    fn settled(&self) -> Option<Fut<'_, bool>>;
}

/// Where sessions are kept.
pub trait Journal: Send + Sync + 'static {
    /// Begins notes on a new session of `slots` slots.
    fn create(&self, session: &SessionRecord, slots: u32) -> io::Result<Arc<dyn SlotLog>>;

    /// Forgets a session.
    fn remove(&self, session: u64);

    /// The sessions of the last server epoch.
    fn load(&self) -> Vec<(SessionRecord, Arc<dyn SlotLog>)>;

    /// The record that was kept as `what`; none if nothing was.
    fn kept(&self, what: PersistentRecord) -> io::Result<Option<Vec<u8>>>;

    /// Keeps it, over a loss of power too.
    fn keep(&self, what: PersistentRecord, bytes: &[u8]) -> io::Result<()>;

    /// As [`SlotLog::settled`], of everything that was noted in all of it.
    fn settled(&self) -> Option<Fut<'_, bool>>;
}

/// The records that a server keeps beside sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PersistentRecord {
    /// The key of its tickets.
    TicketKey,
    /// Sessions that were evicted.
    Evicted,
    /// A stamp above which it has given none.
    StampsBound,
}

/// A journal in memory: for simulations, in which it outlives the simulated process, and
/// for servers without a state directory, in which it outlives nothing.
#[derive(Clone, Default)]
pub struct MemoryJournal {
    sessions: Arc<Mutex<Sessions>>,
    kept: Arc<Mutex<BTreeMap<PersistentRecord, Vec<u8>>>>,
}

type Sessions = BTreeMap<u64, (SessionRecord, Arc<MemoryLog>)>;

impl MemoryJournal {
    /// Forgets all sessions, as a loss of power does. What is kept beside them stays.
    pub fn forget(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Journal for MemoryJournal {
    fn create(&self, session: &SessionRecord, slots: u32) -> io::Result<Arc<dyn SlotLog>> {
        let no_leases = AtomicBool::new(false);
        let log = Arc::new(MemoryLog { slots, state: Mutex::default(), no_leases });
        self.lock().insert(session.id, (session.clone(), log.clone()));
        Ok(log)
    }

    fn remove(&self, session: u64) {
        self.lock().remove(&session);
    }

    fn load(&self) -> Vec<(SessionRecord, Arc<dyn SlotLog>)> {
        let keep = |(record, log): &(SessionRecord, Arc<MemoryLog>)| {
            (record.clone(), log.clone() as Arc<dyn SlotLog>)
        };
        self.lock().values().map(keep).collect()
    }

    fn kept(&self, what: PersistentRecord) -> io::Result<Option<Vec<u8>>> {
        Ok(self.kept.lock().unwrap_or_else(PoisonError::into_inner).get(&what).cloned())
    }

    fn keep(&self, what: PersistentRecord, bytes: &[u8]) -> io::Result<()> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.insert(what, bytes.to_vec());
        Ok(())
    }

    fn settled(&self) -> Option<Fut<'_, bool>> {
        None
    }
}

struct MemoryLog {
    slots: u32,
    state: Mutex<(BTreeMap<u32, SlotRecord>, bool)>,
    no_leases: AtomicBool,
}

impl MemoryLog {
    fn lock(&self) -> MutexGuard<'_, (BTreeMap<u32, SlotRecord>, bool)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SlotLog for MemoryLog {
    fn begin(&self, slot: u32, sequence: u32, op: Op, intent: &[u8]) {
        assert!(intent.len() <= INTENT_MAX_BYTES);
        let record = SlotRecord::Intent { sequence, op, intent: intent.to_vec() };
        self.lock().0.insert(slot, record);
    }

    fn done(&self, slot: u32, sequence: u32, answer: &[u8]) {
        assert!(answer.len() <= ANSWER_MAX_BYTES);
        let slots = &mut self.lock().0;
        let begun = match slots.get(&slot) {
            Some(SlotRecord::Intent { sequence: begun, op, intent }) if *begun == sequence => {
                Some((*op, intent.clone()))
            }
            // A change that was made again by its answer: the next loss may take it once more.
            Some(SlotRecord::Answer { sequence: answered, begun, .. }) if *answered == sequence => {
                begun.clone()
            }
            _ => None,
        };
        slots.insert(slot, SlotRecord::Answer { sequence, answer: answer.to_vec(), begun });
    }

    fn count(&self) -> u32 {
        self.slots
    }

    fn records(&self) -> Vec<(u32, SlotRecord)> {
        self.lock().0.iter().map(|(slot, record)| (*slot, record.clone())).collect()
    }

    fn set_locks(&self, held: bool) {
        self.lock().1 = held;
    }

    fn had_locks(&self) -> bool {
        self.lock().1
    }

    fn set_leases(&self, may: bool) {
        self.no_leases.store(!may, Ordering::SeqCst);
    }

    fn may_have_leases(&self) -> bool {
        !self.no_leases.load(Ordering::SeqCst)
    }

    fn settled(&self) -> Option<Fut<'_, bool>> {
        None
    }
}
