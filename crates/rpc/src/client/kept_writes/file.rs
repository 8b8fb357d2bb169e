//! One file whose writes may be kept.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{Buf, Context, Error, FileId, Origin, RequestId, Result, Write};
use dray_rt::sync::Semaphore;
use dray_rt::{Instant, sleep};

use super::store::{KeptFilePlace, KeptStore};
use super::unsent::UnsentWrites;
use super::{FILE_MAX_BYTES, KeptSum};
use crate::client::dirty_log::FoundFile;
use crate::client::file::RemoteFile;
use crate::client::leases::LeasedAnswers;
use crate::client::memory::{InheritedKept, KeptRecord, NotedFile};
use crate::wire::WriteBase;

/// A file for which the session has the write lease, or had it and has not sent everything.
pub(crate) struct KeptFile {
    pub(super) id: FileId,
    leases: LeasedAnswers,
    pub(super) sum: Arc<KeptSum>,
    pub(super) store: Arc<KeptStore>,
    /// What is kept is sent by one task at a time, in order.
    pub(super) sending: Semaphore,
    state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    /// The number of the lease. None: nothing more is kept.
    pub(super) lease: Option<u64>,
    /// The number that it has, or had.
    pub(super) number: u64,
    /// The state of the file behind the last answer.
    pub(super) base: WriteBase,
    /// The file was changed past that by this session.
    pub(super) base_is_old: bool,
    pub(super) unsent: UnsentWrites,
    /// Through which file it goes, and who wrote it. There is one as long as anything is kept.
    pub(super) writer: Option<(Arc<RemoteFile>, Context)>,
    /// Others may go on without what is kept from then on, if the lease ended by itself.
    pub(super) until: Option<Instant>,
    pub(super) has_timer: bool,
    pub(super) failure: Option<Error>,
    /// Where it is noted for a process that follows this one.
    pub(super) place: KeptFilePlace,
    pub(super) local: LocalState,
}

/// What else there is to know of a file whose writes are in a log.
#[derive(Default)]
pub(super) struct LocalState {
    /// The last program has closed it: the lease goes back with what is sent last.
    pub(super) is_closed: bool,
    /// A task sends the batches that are full.
    pub(super) has_sender: bool,
    /// A program has synced what is in the log. It leaves the log only when it is on media at the server.
    pub(super) is_synced: bool,
    /// Changes of the file are at the server, and nobody knows whether they are on media there.
    pub(super) is_unsynced_at_server: bool,
}

/// What becomes of a write.
pub(crate) enum Keep {
    /// The write is kept.
    Kept,
    /// The write is kept, and there is no room for more: all has to be sent now.
    Full,
    /// The write has to go to the server.
    No,
}

/// What is sent together.
pub(crate) struct KeptBatch {
    /// By which a process that follows this one sends it again.
    pub(crate) request: RequestId,
    pub(crate) lease: u64,
    pub(crate) base: WriteBase,
    pub(crate) kill_set_id: bool,
    pub(crate) ends: bool,
    /// As the message has them.
    pub(crate) extents: Vec<u8>,
    /// Where each piece goes, and how long it is.
    pub(crate) pieces: Vec<(u64, u32)>,
    pub(crate) data: Buf,
}

impl KeptFile {
    pub(super) fn new(
        id: FileId,
        leases: LeasedAnswers,
        (sum, store): (Arc<KeptSum>, Arc<KeptStore>),
    ) -> KeptFile {
        let (sending, state) = (Semaphore::new(1), Mutex::default());
        KeptFile { id, leases, sum, store, sending, state }
    }

    /// What a process before this one had kept, which goes through `file`. Nothing more is kept of it until that is
    /// sent.
    pub(super) fn inherits(&self, kept: &InheritedKept, writer: (Arc<RemoteFile>, Context)) {
        let mut state = self.state();
        let under_way = kept.under_way.map_or(0, |(_, first)| first);
        for (index, (at, kill_set_id, data)) in kept.writes.iter().enumerate() {
            if index > 0 && index == under_way {
                state.unsent.begin_batch();
            }
            let batch = state.unsent.open(data.len(), usize::MAX);
            batch.extents.write(*at, data);
            batch.kill_set_id |= kill_set_id;
        }
        let request = kept.under_way.map(|(request, _)| request);
        if let Some(first) = state.unsent.first() {
            first.request = request;
        }
        (state.number, state.base) = (kept.lease, kept.base);
        (state.place, state.writer) = (Some((kept.place, kept.handle)), Some(writer));
        self.sum.bytes.fetch_add(state.unsent.bytes(), Ordering::SeqCst);
    }

    /// The same of what is in a log.
    pub(super) fn inherits_logged(&self, found: &FoundFile, writer: (Arc<RemoteFile>, Context)) {
        let mut state = self.state();
        let batch_bytes = self.store.limits().batch_bytes;
        let last_under_way = found.under_way.map_or(0, |sending| sending.last);
        let mut was_under_way = false;
        for write in &found.writes {
            let is_under_way = write.record.number <= last_under_way;
            if was_under_way && !is_under_way {
                state.unsent.begin_batch();
            }
            was_under_way = is_under_way;
            // What was one batch stays one.
            let max_bytes = if is_under_way { usize::MAX } else { batch_bytes };
            state.unsent.open(write.data.len(), max_bytes).add(write);
        }
        let request = found.under_way.map(|sending| RequestId(sending.request));
        if let Some(first) = state.unsent.first() {
            first.request = request;
        }
        let number = found.writes.first().map_or(0, |write| write.record.lease);
        (state.number, state.base, state.writer) = (number, found.base, Some(writer));
        // A program may have synced it.
        (state.local.is_synced, state.local.is_closed) = (true, true);
        self.sum.bytes.fetch_add(state.unsent.bytes(), Ordering::SeqCst);
    }

    /// Whether a close has to be passed on: something is to be sent with it, or an error to be reported.
    pub(super) fn owes(&self) -> bool {
        let state = self.state();
        let is_sent_at_close = self.store.log().is_none() && state.writer.is_some();
        is_sent_at_close || state.failure.is_some()
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `is_new`: this session has just made the file, and nothing else has changed it.
    pub(super) fn granted(&self, number: u64, base: WriteBase, is_new: bool) {
        let mut state = self.state();
        // What is kept from before belongs to the former base.
        if state.writer.is_none() {
            (state.lease, state.number, state.base) = (Some(number), number, base);
            (state.base_is_old, state.until) = (false, None);
            (state.local.is_closed, state.local.is_unsynced_at_server) = (false, !is_new);
        }
    }

    /// Nothing more is kept. `until`: others go on from then on, whatever is kept.
    pub(super) fn lease_ends(&self, until: Option<Instant>) {
        let mut state = self.state();
        state.lease = None;
        state.until = state.until.or(until);
    }

    pub(super) fn has_ended(&self) -> bool {
        let state = self.state();
        state.lease.is_none() && state.writer.is_none() && state.failure.is_none()
    }

    /// What could not be written, once.
    pub(crate) fn failure(&self) -> Result<()> {
        self.state().failure.take().map_or(Ok(()), Err)
    }

    /// This session changes the file by another call.
    pub(crate) fn changed_past(&self) {
        let mut state = self.state();
        (state.base_is_old, state.local.is_unsynced_at_server) = (true, true);
    }

    /// Keeps a write through `file`, if that may be.
    pub(crate) fn keep(
        self: &Arc<Self>,
        (cx, file): (&Context, &RemoteFile),
        how: Write,
        data: &[u8],
    ) -> Keep {
        let Some(file) = file.me() else { return Keep::No };
        let limits = self.store.limits();
        let end = how.at.checked_add(data.len() as u64);
        let fits = !data.is_empty() && data.len() <= limits.write_bytes;
        if how.append || how.sync || !fits || end.is_none_or(|end| end > i64::MAX as u64) {
            return Keep::No;
        }
        let mut state = self.state();
        let is_mine = state.writer.as_ref().is_none_or(|(_, before)| before.who == cx.who);
        let all_bytes = self.sum.bytes.load(Ordering::SeqCst);
        if state.lease.is_none()
            || !is_mine
            || all_bytes + data.len() > limits.session_bytes
            || self.is_full(&state)
            || !self.leases.are_believed()
        {
            return Keep::No;
        }
        let Some(logged) = self.note((cx, &file), &mut state, how, data) else { return Keep::No };
        // Before it counts as written: what is remembered of the file is from before.
        self.leases.file_changes(self.id);
        let before = state.unsent.bytes();
        let batch = state.unsent.open(data.len(), limits.batch_bytes);
        batch.extents.write(how.at, data);
        batch.kill_set_id |= how.kill_set_id;
        if let Some((number, place)) = logged {
            batch.logged.add(number, place);
        }
        let more = state.unsent.bytes() - before;
        self.sum.bytes.fetch_add(more, Ordering::SeqCst);
        self.sum.kept.fetch_add(1, Ordering::Relaxed);
        if state.writer.is_none() {
            let cx = Context { cancel: None, pid: cx.pid, ..of_nobodys_request(cx) };
            state.writer = Some((file.clone(), cx));
        }
        state.local.is_closed = false;
        if state.base_is_old || self.is_full(&state) {
            return Keep::Full;
        }
        if !std::mem::replace(&mut state.has_timer, true) {
            self.send_later(&file);
        }
        if state.unsent.count() > 1
            && self.store.log().is_some()
            && !std::mem::replace(&mut state.local.has_sender, true)
        {
            self.send_full_ones(&file);
        }
        Keep::Kept
    }

    /// Whether one message takes no more than what is kept. With a log the next write begins another batch.
    fn is_full(&self, state: &State) -> bool {
        let open = state.unsent.last().filter(|last| last.request.is_none());
        let is_full = open.is_some_and(|open| {
            open.extents.bytes() >= FILE_MAX_BYTES || open.extents.is_scattered()
        });
        self.store.log().is_none() && is_full
    }

    /// Notes a write for a process that follows this one. None: there is no room for it.
    fn note(
        &self,
        (cx, file): (&Context, &RemoteFile),
        state: &mut State,
        how: Write,
        data: &[u8],
    ) -> Option<Option<(u64, (u64, u64))>> {
        // In a log the file of the first write stands for all.
        let first = state.writer.as_ref().filter(|_| self.store.log().is_some());
        let through = first.map_or(file, |(first, _)| first);
        let (handle, opened, session) = (through.handle(), through.how(), through.session.clone());
        let (who, pid, lease, base) = (&*cx.who, cx.pid, state.number, state.base);
        let noted = NotedFile { id: self.id, handle, how: opened, who, pid, lease, base };
        let request = RequestId(session.link.own_request_of(cx));
        let record = KeptRecord { at: how.at, kill_set_id: how.kill_set_id, request, data };
        self.store.note(&session, &mut state.place, (&noted, &record))
    }

    pub(super) fn send_later(self: &Arc<Self>, file: &RemoteFile) {
        let (kept, time) = (Arc::downgrade(self), self.store.limits().time);
        file.session.link.spawn_home(async move {
            sleep(time).await;
            let Some(kept) = kept.upgrade() else { return };
            kept.state().has_timer = false;
            kept.settle().await;
        });
    }

    /// Sends what no more is added to, behind the program that writes.
    fn send_full_ones(self: &Arc<Self>, file: &RemoteFile) {
        let kept = Arc::downgrade(self);
        file.session.link.spawn_home(async move {
            let Some(kept) = kept.upgrade() else { return };
            kept.settle_while(|unsent| unsent.count() > 1).await;
            kept.state().local.has_sender = false;
        });
    }
}

/// As the same caller, and by no request that a later process could repeat.
pub(super) fn of_nobodys_request(cx: &Context) -> Context {
    let node = cx.origin.node;
    let origin = Origin { node, request: RequestId(0) };
    Context { origin, steps: None, ..cx.clone() }
}
