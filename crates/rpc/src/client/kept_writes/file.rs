//! One file whose writes may be kept.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{
    Buf, BufMut, Context, Errno, Error, Fate, FileId, Op, Origin, RequestId, Result, Write,
};
use dray_rt::sync::Semaphore;
use dray_rt::{Instant, now_with_sleeps, sleep};

use super::aside::{self, LostWrites};
use super::extents::KeptExtents;
use super::{FILE_MAX_BYTES, KEPT_MAX_TIME, KeptSum, SESSION_MAX_BYTES, WRITE_MAX_BYTES};
use crate::client::file::RemoteFile;
use crate::client::leases::LeasedAnswers;
use crate::client::memory::{InheritedKept, KeptPlace, KeptPlaces, KeptRecord, NotedFile};
use crate::wire::{WriteBase, put_extents};

/// A file for which the session has the write lease, or had it and has not sent everything.
pub(crate) struct KeptFile {
    id: FileId,
    leases: LeasedAnswers,
    sum: Arc<KeptSum>,
    places: Arc<KeptPlaces>,
    /// What is kept is sent by one task at a time, in order.
    sending: Semaphore,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The number of the lease. None: nothing more is kept.
    lease: Option<u64>,
    /// The number that it has, or had.
    number: u64,
    /// The state of the file behind the last answer.
    base: WriteBase,
    /// The file was changed past that by this session.
    base_is_old: bool,
    extents: KeptExtents,
    kill_set_id: bool,
    /// Through which file it goes, and who wrote it.
    writer: Option<(Arc<RemoteFile>, Context)>,
    /// Others may go on without what is kept from then on, if the lease ended by itself.
    until: Option<Instant>,
    has_timer: bool,
    failure: Option<Error>,
    /// Where it is noted for a process that follows this one, and the number of the open file there.
    place: Option<(KeptPlace, u64)>,
    is_sending: bool,
    /// Of what a process before this one was sending: its request. It is sent as it was, and what that process had
    /// kept besides is sent then.
    under_way: Option<RequestId>,
    later: KeptExtents,
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
        (sum, places): (Arc<KeptSum>, Arc<KeptPlaces>),
    ) -> KeptFile {
        let (sending, state) = (Semaphore::new(1), Mutex::default());
        KeptFile { id, leases, sum, places, sending, state }
    }

    /// What a process before this one had kept, which goes through `file`. Nothing more is kept of it until that is
    /// sent.
    pub(super) fn inherits(&self, kept: &InheritedKept, writer: (Arc<RemoteFile>, Context)) {
        let mut state = self.state();
        let first = kept.under_way.map_or(kept.writes.len(), |(_, first)| first);
        for (index, (at, kill_set_id, data)) in kept.writes.iter().enumerate() {
            let extents = if index < first { &mut state.extents } else { &mut state.later };
            extents.write(*at, data);
            state.kill_set_id |= kill_set_id;
        }
        let bytes = state.extents.bytes() + state.later.bytes();
        self.sum.bytes.fetch_add(bytes, Ordering::SeqCst);
        (state.number, state.base) = (kept.lease, kept.base);
        (state.place, state.writer) = (Some((kept.place, kept.handle)), Some(writer));
        state.under_way = kept.under_way.map(|(request, _)| request);
    }

    /// Whether a close has to be passed on: something is to be sent with it, or an error to be reported.
    pub(super) fn owes(&self) -> bool {
        let state = self.state();
        state.is_sending || state.writer.is_some() || state.failure.is_some()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn granted(&self, number: u64, base: WriteBase) {
        let mut state = self.state();
        // What is kept from before belongs to the former base.
        if state.extents.bytes() == 0 && state.writer.is_none() && !state.is_sending {
            (state.lease, state.number, state.base) = (Some(number), number, base);
            (state.base_is_old, state.until) = (false, None);
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
        let is_kept = state.extents.bytes() > 0 || state.is_sending || state.writer.is_some();
        state.lease.is_none() && !is_kept && state.failure.is_none()
    }

    /// What could not be written, once.
    pub(crate) fn failure(&self) -> Result<()> {
        self.state().failure.take().map_or(Ok(()), Err)
    }

    /// This session changes the file by another call.
    pub(crate) fn changed_past(&self) {
        self.state().base_is_old = true;
    }

    /// Keeps a write through `file`, if that may be.
    pub(crate) fn keep(
        self: &Arc<Self>,
        (cx, file): (&Context, &RemoteFile),
        how: Write,
        data: &[u8],
    ) -> Keep {
        let Some(file) = file.me() else { return Keep::No };
        let end = how.at.checked_add(data.len() as u64);
        let fits = !data.is_empty() && data.len() <= WRITE_MAX_BYTES;
        if how.append || how.sync || !fits || end.is_none_or(|end| end > i64::MAX as u64) {
            return Keep::No;
        }
        let mut state = self.state();
        let is_mine = state.writer.as_ref().is_none_or(|(_, before)| before.who == cx.who);
        let all_bytes = self.sum.bytes.load(Ordering::SeqCst);
        if state.lease.is_none()
            || !is_mine
            || all_bytes + data.len() > SESSION_MAX_BYTES
            || !self.leases.are_believed()
        {
            return Keep::No;
        }
        if self.places.are_needed() && !self.note((cx, &file), &mut state, how, data) {
            return Keep::No;
        }
        // Before it counts as written: what is remembered of the file is from before.
        self.leases.file_changes(self.id);
        let before = state.extents.bytes();
        state.extents.write(how.at, data);
        let more = state.extents.bytes() - before;
        self.sum.bytes.fetch_add(more, Ordering::SeqCst);
        self.sum.kept.fetch_add(1, Ordering::Relaxed);
        state.kill_set_id |= how.kill_set_id;
        if state.writer.is_none() {
            let cx = Context { cancel: None, pid: cx.pid, ..of_nobodys_request(cx) };
            state.writer = Some((file.clone(), cx));
        }
        if state.base_is_old
            || state.extents.bytes() >= FILE_MAX_BYTES
            || state.extents.is_scattered()
        {
            return Keep::Full;
        }
        if !std::mem::replace(&mut state.has_timer, true) {
            self.send_later(&file);
        }
        Keep::Kept
    }

    /// Notes a write for a process that follows this one. False: there is no room for it.
    fn note(
        &self,
        (cx, file): (&Context, &RemoteFile),
        state: &mut State,
        how: Write,
        data: &[u8],
    ) -> bool {
        let (who, pid, lease, base) = (&*cx.who, cx.pid, state.number, state.base);
        let (handle, opened) = (file.handle(), file.how());
        let placed = NotedFile { id: self.id, handle, how: opened, who, pid, lease, base };
        let begin = || Some((self.places.begin(&placed)?, handle));
        state.place = state.place.or_else(begin);
        let request = RequestId(file.session.link.own_request_of(cx));
        let record = KeptRecord { at: how.at, kill_set_id: how.kill_set_id, request, data };
        let place = state.place.filter(|(_, by)| *by == handle);
        place.is_some_and(|(place, _)| self.places.note(place, &record))
    }

    fn send_later(self: &Arc<Self>, file: &RemoteFile) {
        let kept = Arc::downgrade(self);
        file.session.link.spawn_home(async move {
            sleep(KEPT_MAX_TIME).await;
            let Some(kept) = kept.upgrade() else { return };
            kept.state().has_timer = false;
            kept.settle().await;
        });
    }

    /// Sends what is kept. Nobody is there whom an error could be reported: the next who writes or closes hears it.
    pub(crate) async fn settle(self: &Arc<Self>) {
        let _in_order = self.sending.acquire().await; // nobody closes it
        if let Err(error) = self.send_all(false).await
            && error.fate() != Fate::Retry
        {
            // Before anybody goes on who waited for this.
            self.state().failure.get_or_insert(error);
        }
    }

    /// Sends what is kept, and waits for what is being sent. With `ends`, the lease goes back with it. Errors: it is
    /// lost, or the server is away and it is still kept.
    pub(crate) async fn write_back(self: &Arc<Self>, ends: bool) -> Result<()> {
        let _in_order = self.sending.acquire().await; // nobody closes it
        self.send_all(ends).await
    }

    async fn send_all(self: &Arc<Self>, ends: bool) -> Result<()> {
        while self.send_one(ends).await? {}
        Ok(())
    }

    /// Sends one batch. True: there is another one, which a process before this one has left.
    async fn send_one(self: &Arc<Self>, ends: bool) -> Result<bool> {
        let (write_back, extents, (file, cx)) = {
            let mut state = self.state();
            let Some(writer) = state.writer.take() else {
                // The server asks it back when somebody wants the file.
                state.lease.take_if(|_| ends);
                return Ok(false);
            };
            let extents = std::mem::take(&mut state.extents);
            state.lease.take_if(|_| ends);
            state.is_sending = true;
            let before = state.under_way.take();
            let own = || RequestId(writer.0.session.link.own_handle());
            let request = before.unwrap_or_else(own);
            if let Some((place, _)) = state.place.filter(|_| before.is_none()) {
                self.places.is_sending(place, request);
            }
            let ends = ends && state.later.bytes() == 0;
            (state.message(&extents, (request, ends)), extents, writer)
        };
        let sent = file.write_back(&cx, write_back).await;
        let mut state = self.state();
        state.is_sending = false;
        match sent {
            Ok(base) => {
                self.sum.bytes.fetch_sub(extents.bytes(), Ordering::SeqCst);
                (state.base, state.base_is_old) = (base, false);
                if state.until.is_some_and(|until| until < now_with_sleeps()) {
                    self.sum.late.fetch_add(1, Ordering::SeqCst);
                }
                let sent = (state.number, base);
                state.place.take_if(|(place, _)| self.places.is_sent(*place, sent));
                let later = std::mem::take(&mut state.later);
                if later.bytes() == 0 {
                    return Ok(false);
                }
                (state.extents, state.writer) = (later, Some((file.clone(), cx)));
                Ok(true)
            }
            Err(error) if error.fate() == Fate::Retry => {
                let before = extents.bytes() + state.extents.bytes();
                let newer = std::mem::take(&mut state.extents);
                state.extents = extents.under(&newer);
                self.sum.bytes.fetch_sub(before - state.extents.bytes(), Ordering::SeqCst);
                state.writer.get_or_insert((file.clone(), cx));
                if let Some((place, _)) = state.place {
                    self.places.is_not_sent(place);
                }
                if !std::mem::replace(&mut state.has_timer, true) {
                    self.send_later(&file);
                }
                Err(error)
            }
            Err(error) => {
                let later = std::mem::take(&mut state.later);
                let later_bytes = later.bytes();
                self.sum.bytes.fetch_sub(extents.bytes() + later_bytes, Ordering::SeqCst);
                self.sum.lost.fetch_add(1, Ordering::SeqCst);
                state.lease = None;
                let error = self.lost(error, (&file, &cx), &extents.under(&later));
                let sent = (state.number, state.base);
                state.place.take_if(|(place, _)| match later_bytes > 0 {
                    true => {
                        self.places.clear(*place);
                        true
                    }
                    false => self.places.is_sent(*place, sent),
                });
                Err(error)
            }
        }
    }

    /// What cannot be written any more is kept aside, if there is a directory for that.
    fn lost(
        &self,
        error: Error,
        (file, cx): (&RemoteFile, &Context),
        extents: &KeptExtents,
    ) -> Error {
        // The file system has no room: a program hears of that at any time.
        if [Errno::ENOSPC, Errno::EDQUOT, Errno::EFBIG].contains(&error.errno()) {
            return error.during(Op::Write);
        }
        let lost = LostWrites { id: self.id, who: &cx.who, extents, why: &error };
        let kept = aside::keep(file.session.link.options.aside.as_deref(), &lost);
        self.sum.aside.fetch_add(u64::from(kept.is_some()), Ordering::SeqCst);
        if error.errno() != Errno::EREMCHG {
            return error.during(Op::Write);
        }
        let what = "others have changed the file since, and what was written is not in it";
        Error::new(Errno::EIO).because(what).during(Op::Write)
    }
}

impl State {
    fn message(&mut self, extents: &KeptExtents, (request, ends): (RequestId, bool)) -> KeptBatch {
        let pieces: Vec<(u64, u32)> =
            extents.iter().map(|(at, piece)| (at, piece.len() as u32)).collect();
        let mut data = BufMut::heap(extents.bytes());
        extents.iter().for_each(|(_, piece)| _ = data.put(piece));
        let mut encoded = Vec::new();
        put_extents(pieces.iter().copied(), &mut encoded);
        KeptBatch {
            request,
            lease: self.number,
            base: self.base,
            kill_set_id: std::mem::take(&mut self.kill_set_id),
            ends,
            extents: encoded,
            pieces,
            data: data.freeze(),
        }
    }
}

/// As the same caller, and by no request that a later process could repeat.
fn of_nobodys_request(cx: &Context) -> Context {
    let node = cx.origin.node;
    let origin = Origin { node, request: RequestId(0) };
    Context { origin, steps: None, ..cx.clone() }
}
