//! Recalls: what is not to be believed any more. They are noted, then what they name is forgotten
//! here, then above, and then the server hears of it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{HearRecalls, LeaseKinds, Recall, RecallDone, RecallItem};

use super::keys::AnswerKey;
use super::{Leased, LeasedAnswers};
use crate::client::link::SessionState;

/// Recalls that wait for the first listener. If there are more, the server waits until the leases of
/// this session end.
const WAITING_MAX: usize = 1024;

/// Where leases come from.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Lessor {
    session_state: SessionState,
    epoch: u32,
}

/// The listener for recalls, and what it has not heard yet.
pub(super) struct RecallListener {
    state: Mutex<State>,
    recalled: AtomicU64,
}

struct State {
    hear: Option<HearRecalls>,
    /// A process before this one had the session: its kernel may have what is recalled.
    inherited: bool,
    waiting: Vec<(Recall, RecallDone)>,
    lessor: Option<Lessor>,
}

impl RecallListener {
    pub(super) fn new(inherited: bool) -> RecallListener {
        let state = State { hear: None, inherited, waiting: Vec::new(), lessor: None };
        RecallListener { state: Mutex::new(state), recalled: AtomicU64::new(0) }
    }

    /// Leases that were recalled.
    pub(super) fn recalled(&self) -> u64 {
        self.recalled.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes a recall on. Without a listener it is done, unless one has to come.
    fn pass_on(&self, recall: Recall, done: RecallDone) {
        let mut state = self.lock();
        if let Some(hear) = state.hear.clone() {
            drop(state);
            return hear(recall, done);
        }
        if !state.inherited {
            return drop((state, done));
        }
        match state.waiting.len() < WAITING_MAX {
            true => state.waiting.push((recall, done)),
            false => done.forget(),
        }
    }
}

impl LeasedAnswers {
    /// The first one stays. What is returned tells it what has waited for it.
    pub(crate) fn hear_recalls_by(
        &self,
        hear: HearRecalls,
    ) -> Option<impl FnOnce() + Send + use<>> {
        let mut state = self.0.as_ref()?.listener.lock();
        let waiting = std::mem::take(&mut state.waiting);
        let hear = state.hear.get_or_insert(hear).clone();
        let tell = move || waiting.into_iter().for_each(|(recall, done)| hear(recall, done));
        Some(tell)
    }

    /// The server recalls these leases: they are not believed any more.
    pub(crate) fn recalled(&self, items: &[RecallItem]) {
        let Some(leased) = &self.0 else { return };
        let of_names = items.iter().any(|item| item.kinds.contains(LeaseKinds::NAMES));
        leased.changes.note_recall(of_names);
        items.iter().for_each(|item| leased.forget(item));
        leased.listener.recalled.fetch_add(items.len() as u64, Ordering::Relaxed);
    }

    /// Has what is above forget them, too. The server is notified when `done` is dropped.
    pub(crate) fn pass_on(&self, items: Vec<RecallItem>, done: RecallDone) {
        if let Some(leased) = &self.0 {
            leased.listener.pass_on(Recall::Items(items), done);
        }
    }

    /// A server has welcomed the session. To be said before any call is sent on that connection.
    /// `term`: of its leases; zero if it leases nothing. True: all leases of before have ended.
    pub(crate) fn welcomed(&self, session_state: SessionState, epoch: u32, term: Duration) -> bool {
        let Some(leased) = &self.0 else { return false };
        let lessor = Lessor { session_state, epoch };
        let mut state = leased.listener.lock();
        let before = state.lessor;
        let same = |before: Lessor| before.session_state == session_state;
        // A connection that was welcomed before all of them were ended is over.
        if before.is_some_and(|before| same(before) && before.epoch > epoch) {
            return false;
        }
        state.lessor = Some(lessor);
        let have_ended = before.is_some_and(|before| before != lessor);
        if have_ended {
            leased.forget_all();
            drop(state);
            leased.listener.pass_on(Recall::All, RecallDone::unawaited());
        }
        leased.contact.set_term(term);
        have_ended
    }

    /// The session has ended for good: nothing is answered any more.
    pub(crate) fn end(&self) {
        if let Some(leased) = &self.0 {
            // First: a server that leases on has leased nothing by the time when it may lease nothing.
            leased.listener.pass_on(Recall::All, RecallDone::unawaited());
            leased.contact.set_term(Duration::ZERO);
            leased.forget_all();
        }
    }
}

impl Leased {
    fn forget(&self, RecallItem { id, kinds, name }: &RecallItem) {
        if kinds.contains(LeaseKinds::ATTRIBUTES) {
            let key = AnswerKey::of_attributes(*id);
            self.changes.note(self.changes.row(key));
            self.attributes.forget(key);
            // Behind the attributes: a page on its way needs them to be remembered.
            self.listings.forget(key);
        }
        if kinds.contains(LeaseKinds::NAMES) {
            match name {
                Some(name) => {
                    let key = AnswerKey::of_name(*id, name.as_bytes());
                    self.changes.note(self.changes.row(key));
                    self.names.forget(key);
                }
                None => self.changes.note(self.changes.directory(*id)),
            }
        }
    }
}
