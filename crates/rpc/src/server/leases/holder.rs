//! A session that holds leases: when its client was heard of last, and what is asked back of it.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use dray_core::{FileId, LeaseKinds, RecallItem};
use dray_fabric::Connection;
use dray_rt::{Instant, now, sleep, sleep_until, timeout};

use super::counts::{LeaseStatus, RecallCounts};
use super::room::HeldFiles;
use super::table::LeaseTable;
use crate::server::session::ServerSession;
use crate::wire::{Proof, RecallMessage};

/// Until the next try to send a recall that a full connection did not take.
const UNREAD_TIME: Duration = Duration::from_millis(20);

/// The leases of a session, from the session's side. The table has it as long as there are any,
/// also when the session is over.
pub(crate) struct LeaseHolder {
    /// The table has the holder as long as there are leases.
    table: Weak<LeaseTable>,
    /// How long others wait for a lease: see [`LeaseTable::wait`].
    wait: Duration,
    never_fences: bool,
    never_ends_recalls: bool,
    leases_max: usize,
    /// For its connections.
    session: Weak<ServerSession>,
    /// Which session, for people.
    host: String,
    /// When the last call arrived: nanoseconds of the clock.
    contact: AtomicU64,
    /// Counted up when all leases have ended.
    epoch: AtomicU32,
    next_recall: AtomicU64,
    counts: RecallCounts,
    /// Files of which the session has the write lease.
    pub(super) written: AtomicUsize,
    /// A task sends what a full connection did not take.
    resending: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    /// The files of which it has leases of this epoch.
    pub(super) held: HeldFiles,
    pub(super) pending: BTreeMap<u64, PendingRecall>,
    /// The last recall that makes room.
    pub(super) giving_back: Option<u64>,
    /// The leases of earlier epochs have ended then.
    void_at: Option<Instant>,
    /// The session is over.
    pub(super) ended: bool,
}

#[derive(Default)]
pub(super) struct PendingRecall {
    /// None as long as the change that recalls collects them.
    items: Vec<RecallItem>,
    waiting: Vec<Waker>,
}

/// A recall that a change waits for.
#[derive(Clone, Copy)]
pub(super) struct RecallNumber {
    pub(super) number: u64,
    pub(super) epoch: u32,
}

/// How a recall ended.
enum End {
    Acknowledged,
    Fenced,
}

impl LeaseHolder {
    /// Of a session of the host with this name.
    pub(crate) fn new(
        table: &Arc<LeaseTable>,
        session: Weak<ServerSession>,
        host: &str,
    ) -> LeaseHolder {
        LeaseHolder {
            table: Arc::downgrade(table),
            wait: table.wait(),
            never_fences: table.never_fences,
            never_ends_recalls: table.never_ends_recalls,
            leases_max: table.session_leases_max,
            session,
            host: host.to_owned(),
            contact: AtomicU64::new(now().as_nanos()),
            epoch: AtomicU32::new(1),
            next_recall: AtomicU64::new(1),
            counts: RecallCounts::default(),
            written: AtomicUsize::new(0),
            resending: AtomicBool::new(false),
            state: Mutex::default(),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// A call has arrived.
    pub(crate) fn heard(&self) {
        self.contact.store(now().as_nanos(), Ordering::Relaxed);
    }

    /// From then on the client believes nothing any more, if it is not heard of.
    fn believes_until(&self) -> Instant {
        Instant::from_nanos(self.contact.load(Ordering::Relaxed)) + self.wait
    }

    /// The leases and recalls of the session.
    pub(crate) fn status(&self) -> LeaseStatus {
        let written = self.written.load(Ordering::Relaxed);
        self.counts.with(self.state().held.len(), (written, 0))
    }

    /// Counts `more` of something, here and for the export.
    fn count(&self, what: impl Fn(&RecallCounts) -> &AtomicU64, more: u64) {
        what(&self.counts).fetch_add(more, Ordering::Relaxed);
        if let Some(table) = self.table.upgrade() {
            what(&table.counts).fetch_add(more, Ordering::Relaxed);
        }
    }

    /// Notes a file of which it gets its first lease. False: it has as many as it may, or its leases
    /// of this epoch have ended.
    pub(super) fn hold(&self, file: FileId, epoch: u32) -> bool {
        let mut state = self.state();
        let may = !state.ended && self.epoch() == epoch && state.held.len() < self.leases_max;
        if may {
            state.held.insert(file);
        }
        may
    }

    /// Whether it has as many leases as it may.
    pub(super) fn is_full(&self) -> bool {
        self.state().held.len() >= self.leases_max
    }

    /// The session has no lease of the file any more.
    pub(super) fn let_go(&self, file: FileId) {
        self.state().held.remove(file);
    }

    /// The number of a recall that is going to be sent. It counts as pending from now on.
    pub(super) fn begin_recall(&self) -> RecallNumber {
        let number = self.next_recall.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state();
        state.pending.insert(number, PendingRecall::default());
        RecallNumber { number, epoch: self.epoch() }
    }

    /// Whether a recall is still to be answered.
    pub(super) fn is_pending(&self, recall: RecallNumber) -> bool {
        self.epoch() == recall.epoch && self.state().pending.contains_key(&recall.number)
    }

    /// Whether the session has the lease on the locks of a file.
    pub(crate) fn has_lock_lease(self: &Arc<Self>, file: FileId) -> bool {
        self.table.upgrade().is_some_and(|table| table.locks.is_held_by(self, file))
    }

    /// Sends a recall. A client that is away gets it when it comes back.
    pub(super) fn recall(self: &Arc<Self>, number: u64, items: Vec<RecallItem>) {
        self.count(|counts| &counts.sent, 1);
        let recall = RecallMessage { number, items };
        let mut state = self.state();
        // It is gone where all leases have ended meanwhile.
        let Some(pending) = state.pending.get_mut(&number) else { return };
        pending.items.clone_from(&recall.items);
        drop(state);
        let Some(session) = self.session.upgrade() else { return };
        let Some(connection) = session.connections().into_iter().next() else { return };
        if !send(&*connection, &recall) {
            self.resend_later();
        }
    }

    /// Sends what is pending to a client that has come back.
    pub(crate) fn resend(self: &Arc<Self>, connection: &dyn Connection) {
        if !self.pending().iter().all(|recall| send(connection, recall)) {
            self.resend_later();
        }
    }

    fn pending(&self) -> Vec<RecallMessage> {
        let state = self.state();
        let sent = state.pending.iter().filter(|(_, pending)| !pending.items.is_empty());
        let recall = |(number, pending): (&u64, &PendingRecall)| RecallMessage {
            number: *number,
            items: pending.items.clone(),
        };
        sent.map(recall).collect()
    }

    /// A client that reads slowly has as many notices waiting as it may. It gets what is pending once
    /// more: to drop something twice is no harm.
    fn resend_later(self: &Arc<Self>) {
        if self.resending.swap(true, Ordering::SeqCst) {
            return;
        }
        let holder = self.clone();
        dray_rt::spawn(async move {
            sleep(UNREAD_TIME).await;
            holder.resending.store(false, Ordering::SeqCst);
            let Some(session) = holder.session.upgrade() else { return };
            if let Some(connection) = session.connections().into_iter().next() {
                holder.resend(&*connection);
            }
        });
    }

    /// The client has dropped what this recall asked back.
    pub(crate) fn acknowledged(self: &Arc<Self>, number: u64) {
        if self.never_ends_recalls && dray_rt::random_u64().is_multiple_of(64) {
            return;
        }
        let (items, epoch) = {
            let mut state = self.state();
            let Some(pending) = state.pending.get_mut(&number) else { return };
            (std::mem::take(&mut pending.items), self.epoch())
        };
        // Before the change goes on: what is leased behind it stays.
        let Some(table) = self.table.upgrade() else { return };
        for item in items.iter().filter(|item| item.name.is_none()) {
            table.take_back(self, (item.id, item.kinds), epoch, number);
        }
        for item in items.iter().filter(|item| item.kinds.contains(LeaseKinds::LOCKS)) {
            if table.locks.acknowledged(self, item.id, number)
                && let Some(session) = self.session.upgrade()
            {
                session.forget_lock_lease(item.id);
            }
        }
        self.count(|counts| &counts.acknowledged, 1);
        let ended = self.state().pending.remove(&number);
        ended.into_iter().flat_map(|pending| pending.waiting).for_each(Waker::wake);
    }

    /// Waits until a recall has ended, which the client answers, or which ends with the time in which
    /// the client can believe the lease.
    pub(super) async fn recalled(self: &Arc<Self>, recall: RecallNumber, begun: Instant) {
        if self.never_ends_recalls {
            self.ended(recall).await;
        }
        loop {
            let left = self.answers_until(begun) - now();
            match timeout(left, self.ended(recall)).await {
                Ok(End::Acknowledged) => return,
                Ok(End::Fenced) => break,
                Err(_) if now() < self.answers_until(begun) => {} // it was heard of meanwhile
                Err(_) if self.never_fences => {
                    self.state().pending.remove(&recall.number);
                    return;
                }
                Err(_) => {
                    self.fence(recall.epoch);
                    break;
                }
            }
        }
        self.void().await;
    }

    /// Waits until the leases of earlier epochs have ended.
    pub(super) async fn void(&self) {
        while let Some(until) = self.void_at() {
            sleep_until(until).await;
        }
    }

    fn void_at(&self) -> Option<Instant> {
        self.state().void_at.filter(|until| now() < *until)
    }

    /// How long an answer is waited for. A client that rests can believe nothing before its next
    /// call. That call would make its leases valid again, so it has some time to answer all the same.
    fn answers_until(&self, begun: Instant) -> Instant {
        let (contact, wait) = (self.believes_until(), self.wait);
        let session = self.session.upgrade();
        if session.is_none_or(|session| session.connections().is_empty()) {
            return contact.min(begun + wait);
        }
        contact.clamp(begun + wait / 2, begun + wait)
    }

    async fn ended(&self, recall: RecallNumber) -> End {
        std::future::poll_fn(|task| {
            let mut state = self.state();
            if self.epoch() != recall.epoch {
                return Poll::Ready(End::Fenced);
            }
            let Some(pending) = state.pending.get_mut(&recall.number) else {
                return Poll::Ready(End::Acknowledged);
            };
            pending.waiting.push(task.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Ends all leases of an epoch, if they have not ended yet. The client learns it by the next
    /// welcome. Until then it may believe them for as long as it was in contact.
    fn fence(self: &Arc<Self>, epoch: u32) {
        if !self.end_epoch(epoch, now() + self.wait) {
            return;
        }
        self.count(|counts| &counts.fences, 1);
        let host = &self.host;
        if let Some(table) = self.table.upgrade() {
            table.fenced.say(|more| {
                log::warn!(
                    "client {host} has not given back what was leased to it: its leases have ended, \
                     and its connections{more}"
                );
            });
        }
        if let Some(session) = self.session.upgrade() {
            session.replace(Proof::REPLACES_ALL);
        }
        // No call of before arrives any more.
        self.state().void_at = Some(self.believes_until());
    }

    /// Whether the client may believe anything.
    pub(crate) fn holds_any(&self) -> bool {
        self.state().held.len() > 0
    }

    /// All leases of the session have ended where they came from. Its client has to come back, and learns that then.
    pub(super) fn lose_all(self: &Arc<Self>) {
        let epoch = self.epoch();
        if !self.holds_any() || !self.end_epoch(epoch, now() + self.wait) {
            return;
        }
        if let Some(session) = self.session.upgrade() {
            session.replace(Proof::REPLACES_ALL);
        }
        self.state().void_at = Some(self.believes_until()); // as for a fence
    }

    /// The session is over. `left`: its client is gone, and believes nothing.
    pub(crate) fn end(self: &Arc<Self>, left: bool) {
        if std::mem::replace(&mut self.state().ended, true) {
            return; // a client that says goodbye believes nothing, whatever comes behind that
        }
        let until = if left { now() } else { self.believes_until() };
        self.end_epoch(self.epoch(), until);
    }

    #[cfg(test)]
    pub(super) fn end_epoch_for_tests(self: &Arc<Self>) {
        self.end_epoch(self.epoch(), self.believes_until());
    }

    /// Counts the epoch up. Its leases have ended at `void_at`. False: others have done it.
    fn end_epoch(self: &Arc<Self>, epoch: u32, void_at: Instant) -> bool {
        let mut state = self.state();
        if self.epoch() != epoch {
            return false;
        }
        state.void_at = state.void_at.max(Some(void_at));
        self.epoch.store(epoch + 1, Ordering::SeqCst);
        let held = std::mem::take(&mut state.held);
        let pending = std::mem::take(&mut state.pending);
        drop(state);
        self.count(|counts| &counts.expired, pending.len() as u64);
        pending.into_values().flat_map(|pending| pending.waiting).for_each(Waker::wake);
        let held = held.into_files();
        if !held.is_empty() {
            let holder = self.clone();
            dray_rt::spawn(async move {
                holder.void().await;
                if let Some(table) = holder.table.upgrade() {
                    table.forget(&holder, held, epoch).await;
                }
            });
        }
        true
    }
}

/// False: the connection has as many notices waiting as it may.
fn send(connection: &dyn Connection, recall: &RecallMessage) -> bool {
    let mut message = Vec::new();
    recall.put_message(&mut message);
    match connection.notify(&message) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => false,
        // It may belong to another thread, whose tick may not end soon. A broken one ends by itself.
        _ => {
            connection.flush();
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use dray_rt::{DriverKind, Executor};

    use super::*;
    use crate::server::options::ServerOptions;

    /// A tenth of the term is for clocks that drift, and no part of it for how time is noted.
    // proves: P295
    #[test]
    fn a_client_believes_until_a_term_and_a_tenth_after_its_last_call_and_not_a_moment_less() {
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let table = Arc::new(LeaseTable::new(&ServerOptions::default(), false));
            let holder = LeaseHolder::new(&table, Weak::new(), "host");
            sleep(Duration::from_nanos(1_999_999)).await;
            holder.heard();
            assert_eq!(holder.believes_until() - now(), Duration::from_millis(5_500));
        });
    }
}
