//! Replay slots: what keeps a change from being applied twice.
//!
//! A client numbers the changes that it sends in a slot and uses the slot again only
//! when it has its answer. So of each slot the last number and its answer are all that
//! has to be remembered (after NFSv4.1 sessions, RFC 8881 section 2.10.6).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{FileSystem, Op};
use dray_fabric::Connection;

use crate::server::intent::{self, Settled};
use crate::server::journal::{SlotLog, SlotRecord};
use crate::server::service::Sabotage;

/// Whether calls of this kind come in a slot: changes with a short answer. The answer of
/// any other would not fit what is remembered of a slot.
pub(crate) fn holds(op: Op) -> bool {
    use Op::*;
    match op {
        Setattr | Make | Remove | Rename | Link | Open | Create | Tmpfile | Setxattr
        | Removexattr | Write | Allocate | CopyRange | SetFlags => true,
        Lookup | Parent | Getattr | Readlink | Access | Statfs | Getxattr | Listxattr | Read
        | Readdir | Flush | Sync | Seek | Lock | TestLock | GetFlags | Close | SyncAll
        | Recover | Redo => false,
    }
}

/// The slots of a session.
pub(crate) struct ReplaySlots {
    slots: Mutex<Vec<Slot>>,
    log: Arc<dyn SlotLog>,
    sabotage: Option<Sabotage>,
}

#[derive(Default)]
struct Slot {
    sequence: u32,
    state: State,
    /// The last answer; kept for the next one's sake.
    answer: Vec<u8>,
}

#[derive(Default)]
enum State {
    #[default]
    Unused,
    /// Being applied; the answer goes where the client asked last.
    Running(Route),
    Done,
    /// An append that the server's death cut short: its place in the file.
    AppendAt(u64),
}

/// Where an answer goes.
#[derive(Clone)]
pub(crate) struct Route {
    pub(crate) connection: Arc<dyn Connection>,
    pub(crate) tag: u32,
}

/// What to do with a change that came in.
pub(crate) enum Verdict {
    /// Apply it.
    Fresh,
    /// Apply it, at this offset instead of at the end of the file.
    FreshAt(u64),
    /// It was applied: this was the answer, complete but for the tag.
    Replay(Vec<u8>),
    /// It is being applied; the answer will go to the connection that asked last.
    Running,
    /// Older than what the slot has seen: a leftover of a connection long gone.
    Stale,
    /// There is no such slot.
    Unknown,
}

impl ReplaySlots {
    pub(crate) fn new(
        count: u32,
        log: Arc<dyn SlotLog>,
        sabotage: Option<Sabotage>,
    ) -> ReplaySlots {
        let slots = Mutex::new((0..count).map(|_| Slot::default()).collect());
        ReplaySlots { slots, log, sabotage }
    }

    /// Takes over what a server before us had noted.
    /// After a loss of the machine (`lost`) an answer is no proof that its change is there.
    pub(crate) async fn restore(&self, fs: &dyn FileSystem, lost: bool) {
        for (number, record) in self.log.records() {
            let slot = match record {
                SlotRecord::Answer { sequence, answer, begun } if lost => {
                    match intent::settle_answered(fs, answer, begun).await {
                        Settled::Done(answer) => Slot { sequence, state: State::Done, answer },
                        Settled::AppendAt(at) => {
                            Slot { sequence, state: State::AppendAt(at), ..Slot::default() }
                        }
                        Settled::Undone => {
                            Slot { sequence: sequence.wrapping_sub(1), ..Slot::default() }
                        }
                    }
                }
                SlotRecord::Answer { sequence, answer, .. } => {
                    Slot { sequence, state: State::Done, answer }
                }
                SlotRecord::Intent { sequence, .. } if self.sabotage == Some(Sabotage::Intents) => {
                    Slot { sequence: sequence.wrapping_sub(1), ..Slot::default() }
                }
                SlotRecord::Intent { sequence, op, intent } => {
                    match intent::settle(fs, op, &intent).await {
                        Settled::Undone => {
                            // The intent must go: a later life would settle it by what
                            // others have changed since.
                            let sequence = sequence.wrapping_sub(1);
                            self.log.done(number, sequence, &[]);
                            Slot { sequence, ..Slot::default() }
                        }
                        Settled::Done(answer) => {
                            self.log.done(number, sequence, &answer);
                            Slot { sequence, state: State::Done, answer }
                        }
                        Settled::AppendAt(at) => {
                            Slot { sequence, state: State::AppendAt(at), ..Slot::default() }
                        }
                    }
                }
            };
            if let Some(place) = self.lock().get_mut(number as usize) {
                *place = slot;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn begin(&self, slot: u32, sequence: u32, route: &Route) -> Verdict {
        let mut slots = self.lock();
        let Some(slot) = slots.get_mut(slot as usize) else { return Verdict::Unknown };
        if sequence == slot.sequence {
            return match &mut slot.state {
                State::Unused => Verdict::Stale,
                State::AppendAt(at) => {
                    let at = *at;
                    slot.state = State::Running(route.clone());
                    Verdict::FreshAt(at)
                }
                State::Running(old) => {
                    *old = route.clone();
                    Verdict::Running
                }
                State::Done if self.sabotage == Some(Sabotage::ReplyCache) => {
                    slot.state = State::Running(route.clone());
                    Verdict::Fresh
                }
                State::Done => Verdict::Replay(slot.answer.clone()),
            };
        }
        // Numbers wrap: half of them lie ahead.
        if sequence.wrapping_sub(slot.sequence) > u32::MAX / 2 {
            return Verdict::Stale;
        }
        slot.sequence = sequence;
        slot.state = State::Running(route.clone());
        Verdict::Fresh
    }

    /// Notes what is about to be done, unless its client has given up on it and used the
    /// slot again: then the later change is the one to remember.
    pub(crate) fn intend(&self, number: u32, sequence: u32, op: Op, intent: &[u8]) {
        let slots = self.lock();
        if slots.get(number as usize).is_some_and(|slot| slot.sequence == sequence) {
            self.log.begin(number, sequence, op, intent);
        }
    }

    /// Notes whether the session holds locks.
    pub(crate) fn set_locks(&self, held: bool) {
        self.log.set_locks(held);
    }

    /// Whether the session held locks in its last life.
    pub(crate) fn had_locks(&self) -> bool {
        self.log.had_locks()
    }

    /// Remembers the answer and says where it goes; none if the client has since used
    /// the slot for something else, having given up on this.
    pub(crate) fn done(&self, number: u32, sequence: u32, answer: &[u8]) -> Option<Route> {
        let mut slots = self.lock();
        let slot = slots.get_mut(number as usize)?;
        if slot.sequence != sequence {
            return None;
        }
        self.log.done(number, sequence, answer);
        slot.answer.clear();
        slot.answer.extend_from_slice(answer);
        match std::mem::replace(&mut slot.state, State::Done) {
            State::Running(route) => Some(route),
            _ => None,
        }
    }
}
