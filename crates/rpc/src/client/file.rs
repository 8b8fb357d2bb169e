//! `OpenFile` at the client end. A file that the server has lost is opened again when it is used.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use dray_core::{
    Allocate, AtOpen, Attr, Buf, BufMut, Context, DirPage, Errno, Error, Fate, FileId, Fut, Io,
    LocalCopy, Lock, LockOwner, Op, OpenFile, OpenHow, Result, Seek, SetAttr, Write, Xflags,
};
use dray_rt::timeout;

use crate::client::channel::{CallAnswer, CallFailure, OutgoingCall, ReplyInfo, error_of};
use crate::client::durability::{Confirmation, FileChange, LoggedWriter, changes_of};
use crate::client::holdings::tickets::{ReopenRequest, reopen};
use crate::client::link::SessionState;
use crate::client::session::ClientSession;
use crate::client::slots::{ReplaySlot, SlotPurpose};
use crate::wire::{Call, CallHead, Change, Input, PAGE_MAX_BYTES, Ticket, Wire, get_page};

/// Tries within one epoch of the server. A server that loses a file between its opening and the
/// next call so often is not asked again.
const REOPEN_TRIES: usize = 64;

/// An open file at the server, by the number that we gave it.
pub(crate) struct RemoteFile {
    pub(super) session: Arc<ClientSession>,
    pub(super) id: FileId,
    pub(super) handle: u64,
    /// The options with which the file was first opened; for opening it again.
    pub(super) how: OpenHow,
    /// The ticket of its opening, and how many tickets had been renewed by then.
    ticket: (Option<Ticket>, u64),
    at_open: Option<Box<AtOpen>>,
    closed: AtomicBool,
    writer: LoggedWriter,
    /// Something was written through it.
    was_written: AtomicBool,
    /// Itself, if writes through it may be kept.
    me: OnceLock<Weak<RemoteFile>>,
}

impl RemoteFile {
    pub(crate) fn new(
        session: Arc<ClientSession>,
        id: FileId,
        handle: u64,
        how: OpenHow,
        (at_open, ticket): (Option<AtOpen>, Option<Ticket>),
    ) -> RemoteFile {
        let how = OpenHow { with_attr: false, ..how }; // once is enough
        session.link.files.opened(handle, id, how, ticket);
        let renewed = session.link.files.renewed();
        let ticket = (ticket.or_else(|| session.link.files.ticket(handle)), renewed);
        let (at_open, closed) = (at_open.map(Box::new), AtomicBool::new(false));
        let (writer, was_written) = (LoggedWriter::new(id), AtomicBool::new(false));
        let me = OnceLock::new();
        RemoteFile { session, id, handle, how, ticket, at_open, closed, writer, was_written, me }
    }

    /// The file was opened in `session_state`. Where another epoch of the server has been met
    /// before that was heard of, it is opened there before anybody uses it. Errors: those of
    /// opening.
    pub(crate) async fn confirmed(
        self,
        cx: &Context,
        session_state: SessionState,
    ) -> Result<RemoteFile> {
        let files = &self.session.link.files;
        if !files.is_at(session_state) {
            let (id, handle, how, ticket) = (self.id, self.handle, self.how, self.ticket());
            let again = ReopenRequest { id, how, handle, ticket };
            match reopen(&*self.session.channel()?, cx, again).await {
                Ok(ticket) => files.renew(handle, ticket),
                Err(error) => {
                    files.forget(handle);
                    return Err(error);
                }
            }
        }
        Ok(self)
    }

    /// Shared, so that writes through it may be kept.
    pub(crate) fn shared(self) -> Arc<RemoteFile> {
        let file = Arc::new(self);
        let _ = file.me.set(Arc::downgrade(&file)); // nobody else does
        file
    }

    /// The number that it has at the server.
    pub(crate) fn handle(&self) -> u64 {
        self.handle
    }

    /// How it was opened.
    pub(crate) fn how(&self) -> OpenHow {
        self.how
    }

    /// Itself. None: writes through it are not kept.
    pub(crate) fn me(&self) -> Option<Arc<RemoteFile>> {
        self.me.get()?.upgrade()
    }

    /// A file that a process before this one opened, and may have written.
    pub(crate) fn inherited(self) -> RemoteFile {
        if self.how.writes() {
            self.session.link.unsynced.writer_inherited(&self.writer);
        }
        self
    }

    /// The proof that the file was open, for a server that has forgotten the file.
    fn ticket(&self) -> Option<Ticket> {
        let (ticket, renewed) = self.ticket;
        let files = &self.session.link.files;
        match files.renewed() == renewed {
            true => ticket,
            false => files.ticket(self.handle).or(ticket),
        }
    }

    /// Notes a change of this file that was made through it.
    pub(crate) fn changed(
        &self,
        cx: &Context,
        made: ReplyInfo,
        change: Option<Change>,
        data: &[u8],
    ) {
        self.written(cx, made, (change, data), false);
    }

    /// As [`Self::changed`]. With `is_durable`, the change was synced as it was made.
    pub(super) fn written(
        &self,
        cx: &Context,
        made: ReplyInfo,
        (change, data): (Option<Change>, &[u8]),
        is_durable: bool,
    ) {
        let (file, who) = (self.id, &cx.who);
        let ticket = made.ticket.or_else(|| self.ticket());
        let confirmation = Confirmation { ticket, ..made.confirmation() };
        let new = FileChange { file, confirmation, change, data, who, is_durable };
        self.session.link.unsynced.change_answered(new, Some(&self.writer));
    }

    /// Fails if something that was written through it is lost, once for each loss.
    fn loss_to_report(&self, op: Op) -> Result<()> {
        self.session.link.unsynced.loss_to_report(&self.writer, op)
    }

    pub(super) async fn ask<T: for<'b> Wire<'b>>(&self, cx: &Context, call: Call<'_>) -> Result<T> {
        self.send(cx, &call, None, (None, None)).await.map(|(value, _)| value)
    }

    async fn change<T: for<'b> Wire<'b>>(
        &self,
        cx: &Context,
        call: Call<'_>,
        data: Option<Buf>,
    ) -> Result<(T, ReplyInfo)> {
        let purpose = if data.is_some() { SlotPurpose::Data } else { SlotPurpose::Names };
        let slot = self.session.take_slot(cx, purpose).await?;
        self.send(cx, &call, Some(&slot), (data, None)).await
    }

    pub(super) async fn send<T: for<'b> Wire<'b>>(
        &self,
        cx: &Context,
        call: &Call<'_>,
        slot: Option<&ReplaySlot>,
        about: (Option<Buf>, Option<&RemoteFile>),
    ) -> Result<(T, ReplyInfo)> {
        let answer = self.answer(cx, call, slot, about).await?;
        Ok((answer.value, answer.made))
    }

    /// `data`: of a write.
    pub(super) async fn answer<T: for<'b> Wire<'b>>(
        &self,
        cx: &Context,
        call: &Call<'_>,
        slot: Option<&ReplaySlot>,
        (data, to): (Option<Buf>, Option<&RemoteFile>),
    ) -> Result<CallAnswer<T>> {
        self.session.link.must_have(call.op())?;
        let request = self.session.link.request_of(cx);
        let (file, flags) = (Some(self.id), if data.is_some() { self.flags_of_write() } else { 0 });
        let ask = OutgoingCall { request, data, file, to, flags, ..OutgoingCall::of(cx, call) };
        let answer = self.call(&mut ask.in_slot(slot)).await;
        answer.map_err(|failure| error_of(failure).during(call.op()))
    }

    /// A small file is written once, and programs look at it then. Of a file that is written many times
    /// most attributes would be sent for nothing.
    fn flags_of_write(&self) -> u16 {
        match self.was_written.swap(true, Ordering::Relaxed) {
            true => 0,
            false => CallHead::WANTS_ATTRIBUTES,
        }
    }

    /// Waits for no longer than a call may. Errors: those of the wait, `EHOSTDOWN`.
    pub(super) async fn within_limit<T>(&self, wait: impl Future<Output = Result<T>>) -> Result<T> {
        let Some(limit) = self.session.link.options.timeout else { return wait.await };
        timeout(limit, wait).await.unwrap_or_else(|_| {
            let late = Error::retry(Errno::EHOSTDOWN);
            Err(late.because("the state of the locks was not known within the mount's timeout"))
        })
    }

    /// Calls, and if the server has lost the file, opens it again and repeats the call. Data and buffer are taken
    /// out of `ask`.
    pub(super) async fn call<T: for<'b> Wire<'b>>(
        &self,
        ask: &mut OutgoingCall<'_>,
    ) -> std::result::Result<CallAnswer<T>, (CallFailure, Option<BufMut>)> {
        ask.looked_at = true;
        let (mut tries, mut instance) = (0, self.session.link.server().instance);
        while tries < REOPEN_TRIES {
            let known = self.session.link.held.check(ask.cx, self.handle);
            if let Err(error) = self.within_limit(known).await {
                return Err((CallFailure::Error(error), ask.into.take()));
            }
            let channel = match self.session.channel() {
                Ok(channel) => channel,
                Err(error) => return Err((CallFailure::Error(error), ask.into.take())),
            };
            let data = ask.data.clone();
            let outcome = channel.call(ask, |bytes| Input::whole(bytes)).await;
            let Err((CallFailure::UnknownHandle, into)) = outcome else { return outcome };
            if let Err(error) = self.open_again(ask).await {
                return Err((CallFailure::Error(error), into));
            }
            (ask.data, ask.into) = (data, into);
            // A wait may outlast any number of servers.
            let now = self.session.link.server().instance;
            tries = if instance == now { tries + 1 } else { 0 };
            instance = now;
        }
        Err((CallFailure::UnknownHandle, ask.into.take()))
    }

    /// Reads by one call.
    pub(super) async fn read_whole(&self, cx: &Context, at: u64, into: BufMut) -> Io<BufMut> {
        let len_bytes = into.room().min(dray_core::IO_MAX_BYTES) as u32;
        let call = Call::Read { handle: self.handle, at, len_bytes };
        let mut ask = OutgoingCall {
            request: self.session.link.request_of(cx),
            into: Some(into),
            ..OutgoingCall::of(cx, &call)
        };
        let lost = || BufMut::heap(0);
        match self.call::<()>(&mut ask).await {
            Ok(answer) => {
                self.session.link.leases.was_read(self.id);
                Ok(answer.data.unwrap_or_else(lost))
            }
            Err((failure, into)) => {
                let error = match failure {
                    CallFailure::Error(error) => error,
                    CallFailure::UnknownHandle => Error::new(Errno::ESTALE),
                };
                Err((error.during(Op::Read), into.unwrap_or_else(lost)))
            }
        }
    }

    /// Reads behind what is in the buffer already.
    async fn read_behind(&self, cx: &Context, at: u64, mut into: BufMut) -> Io<BufMut> {
        let rest = into.split_off(into.len());
        let room = rest.room();
        match self.read(cx, at, rest).await {
            Ok(rest) => Ok(into.with_rest(rest, room)),
            Err((error, rest)) => Err((error, into.with_rest(rest, room))),
        }
    }

    /// Opens what the call names: this file, and where it copies to another, that too.
    async fn open_again(&self, lost: &OutgoingCall<'_>) -> Result<()> {
        for file in [Some(self), lost.to].into_iter().flatten() {
            let how = OpenHow::new(file.how.flags & !libc::O_TRUNC);
            let (id, handle, ticket) = (file.id, file.handle, file.ticket());
            let again = ReopenRequest { id, how, handle, ticket };
            let ticket = reopen(&*self.session.channel()?, lost.cx, again).await?;
            self.session.link.files.renew(handle, ticket);
        }
        Ok(())
    }
}

impl OpenFile for RemoteFile {
    fn id(&self) -> FileId {
        self.id
    }

    fn at_open(&self) -> Option<AtOpen> {
        self.at_open.as_deref().copied()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn local_copy<'a>(&'a self, _: &'a Context) -> Fut<'a, Option<Arc<dyn LocalCopy>>> {
        Box::pin(async { None })
    }

    fn read<'a>(&'a self, cx: &'a Context, at: u64, into: BufMut) -> Fut<'a, Io<BufMut>> {
        if let Some(kept) = self.session.link.kept.find(self.id) {
            return Box::pin(async move {
                kept.settle().await;
                match into.is_empty() {
                    true => self.read_whole(cx, at, into).await,
                    false => self.read_behind(cx, at, into).await,
                }
            });
        }
        if !into.is_empty() {
            return Box::pin(self.read_behind(cx, at, into));
        }
        if into.room() < self.session.link.options.split_min_bytes as usize {
            return Box::pin(self.read_whole(cx, at, into));
        }
        Box::pin(self.read_large(cx, at, into))
    }

    fn write<'a>(&'a self, cx: &'a Context, how: Write, from: Buf) -> Fut<'a, Result<usize>> {
        Box::pin(async move {
            if let Some(kept) = self.write_kept(cx, how, &from).await {
                return kept;
            }
            let call = Call::Write { handle: self.handle, how };
            let (written, made) = self.change::<u32>(cx, call, Some(from.clone())).await?;
            let written = believable(u64::from(written), from.len() as u64)? as usize;
            let at = if how.append { made.at } else { Some(how.at) };
            let change = at.map(|at| Change::Write { at });
            self.written(cx, made, (change, &from[..written]), how.sync);
            Ok(written)
        })
    }

    fn readdir<'a>(
        &'a self,
        cx: &'a Context,
        cookie: u64,
        max_bytes: usize,
        plus: bool,
    ) -> Fut<'a, Result<DirPage>> {
        let max_bytes = max_bytes.min(u32::MAX as usize) as u32;
        Box::pin(async move {
            let leases = &self.session.link.leases;
            if let Some(page) = leases.listing(self.id, (cookie, max_bytes as usize), plus) {
                return Ok(page);
            }
            self.session.link.kept.settle_all().await; // the page may show them
            let (held, asked) = (leases.held(self.id), leases.asking());
            // A page is larger than a head may be: it comes as data.
            let call = Call::Readdir { handle: self.handle, cookie, max_bytes, plus };
            let mut ask = OutgoingCall {
                request: self.session.link.request_of(cx),
                into: Some(BufMut::heap(PAGE_MAX_BYTES)),
                flags: if plus && leases.wants_absences() { CallHead::WANTS_ABSENCES } else { 0 },
                ..OutgoingCall::of(cx, &call)
            };
            let answer: CallAnswer<()> =
                self.call(&mut ask).await.map_err(crate::client::channel::error_of)?;
            let bytes = answer.data.unwrap_or_else(|| BufMut::heap(0));
            let (mut page, absent) = get_page(bytes.filled())
                .map_err(|_| Error::new(Errno::EPROTO).because("malformed directory page"))?;
            leases.listed(asked, (cx, self.id), &mut page);
            leases.listed_absences(asked, (&page, &absent));
            leases.listed_page(held, (cookie, plus), &page);
            leases.was_read(self.id);
            Ok(page)
        })
    }

    fn getattr<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Attr>> {
        Box::pin(async move {
            let link = &self.session.link;
            link.kept.settle(self.id).await;
            if let Some(attr) = link.leases.getattr(self.id)
                && !link.held.concerns(self.handle)
            {
                return Ok(attr);
            }
            let asked = link.leases.asking();
            let call = Call::Getattr { id: self.id, handle: Some(self.handle) };
            let attr = self.ask(cx, call).await?;
            Ok(link.leases.attributes(asked, self.id, attr))
        })
    }

    fn setattr<'a>(&'a self, cx: &'a Context, set: SetAttr) -> Fut<'a, Result<Attr>> {
        let call = Call::Setattr { id: self.id, handle: Some(self.handle), set };
        Box::pin(async move {
            self.changes_past_kept().await;
            let slot = self.session.take_slot(cx, SlotPurpose::Names).await?;
            let answer = self.answer(cx, &call, Some(&slot), (None, None)).await?;
            let CallAnswer::<Attr> { value: attr, made, change: own, .. } = answer;
            for change in changes_of(set, &attr) {
                self.changed(cx, made, Some(change), &[]);
            }
            Ok(self.session.link.leases.set(own, (self.id, attr)))
        })
    }

    fn flush<'a>(&'a self, cx: &'a Context, owner: LockOwner) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let link = &self.session.link;
            // Nearly all such closes are passed on for what was kept, and not for locks.
            let owed = link.kept.owes(self.id) || link.kept.has_log();
            let kept = link.kept.flush(self.id).await;
            let of_owner = (self.id, link.owner_of(cx, owner));
            let has_none = || link.held.owners().is_some_and(|held| !held.contains(&of_owner));
            let given_up = match owed && has_none() {
                true => Ok(()),
                false => self.give_up_locks(cx, owner).await,
            };
            kept?;
            // A loss is reported also where the server cannot be asked: the locks follow.
            self.loss_to_report(Op::Flush)?;
            given_up
        })
    }

    fn sync<'a>(&'a self, cx: &'a Context, data_only: bool) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let kept = self.session.link.kept.find(self.id);
            if let Some(kept) = &kept
                && kept.sync_in_log().await
            {
                return self.loss_to_report(Op::Sync);
            }
            self.settle_kept().await?;
            kept.iter().for_each(|kept| kept.syncs_at_server());
            let call = Call::Sync { handle: self.handle, data_only };
            let unsynced = &self.session.link.unsynced;
            let synced = self.send(cx, &call, None, (None, None)).await;
            if synced.is_err() {
                kept.iter().for_each(|kept| kept.is_unsynced_at_server());
            }
            if synced.as_ref().is_err_and(|error| error.fate() == Fate::Final) {
                unsynced.loss_reported_by_server(&self.writer);
            }
            let ((), made) = synced?;
            unsynced.sync_answered(self.id, made.confirmation());
            self.loss_to_report(Op::Sync)
        })
    }

    fn allocate<'a>(&'a self, cx: &'a Context, what: Allocate) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            self.changes_past_kept().await;
            let call = Call::Allocate { handle: self.handle, what };
            let ((), made) = self.change(cx, call, None).await?;
            let Allocate { flags, at, len_bytes } = what;
            let moves = libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_INSERT_RANGE;
            let change = Change::Allocate { flags, at, len_bytes };
            self.changed(cx, made, (flags & moves == 0).then_some(change), &[]);
            Ok(())
        })
    }

    fn seek<'a>(&'a self, cx: &'a Context, at: u64, what: Seek) -> Fut<'a, Result<u64>> {
        Box::pin(async move {
            self.session.link.kept.settle(self.id).await;
            self.ask(cx, Call::Seek { handle: self.handle, at, what }).await
        })
    }

    fn copy_range<'a>(
        &'a self,
        cx: &'a Context,
        at: u64,
        to: &'a dyn OpenFile,
        to_at: u64,
        len_bytes: u64,
    ) -> Fut<'a, Result<u64>> {
        Box::pin(async move {
            let to = to.as_any().downcast_ref::<RemoteFile>();
            let to = to.filter(|to| Arc::ptr_eq(&to.session, &self.session));
            let Some(to) = to else { return Err(Error::new(Errno::EXDEV).during(Op::CopyRange)) };
            self.session.link.kept.settle(self.id).await;
            to.changes_past_kept().await;
            let call = Call::CopyRange { handle: self.handle, at, to: to.handle, to_at, len_bytes };
            let slot = self.session.take_slot(cx, SlotPurpose::Data).await?;
            let (copied, made) = self.send(cx, &call, Some(&slot), (None, Some(to))).await?;
            to.changed(cx, made, None, &[]); // what was copied was never here
            believable(copied, len_bytes)
        })
    }

    fn lock<'a>(&'a self, cx: &'a Context, lock: Lock, wait: bool) -> Fut<'a, Result<()>> {
        Box::pin(self.take_lock(cx, lock, wait))
    }

    fn test_lock<'a>(&'a self, cx: &'a Context, lock: Lock) -> Fut<'a, Result<Option<Lock>>> {
        Box::pin(self.look_for_lock(cx, lock))
    }

    fn get_flags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<u32>> {
        Box::pin(self.ask(cx, Call::GetFlags { handle: self.handle }))
    }

    fn set_flags<'a>(&'a self, cx: &'a Context, flags: u32) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            self.changes_past_kept().await;
            let call = Call::SetFlags { handle: self.handle, flags };
            let ((), made) = self.change(cx, call, None).await?;
            self.changed(cx, made, None, &[]);
            Ok(())
        })
    }

    fn get_xflags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Xflags>> {
        Box::pin(self.ask(cx, Call::GetXflags { handle: self.handle }))
    }

    fn set_xflags<'a>(&'a self, cx: &'a Context, set: Xflags) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            self.changes_past_kept().await;
            let call = Call::SetXflags { handle: self.handle, set };
            let ((), made) = self.change(cx, call, None).await?;
            self.changed(cx, made, None, &[]);
            Ok(())
        })
    }

    fn close<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let link = &self.session.link;
            if link.kept.closes_later(self, link.held.concerns(self.handle)) {
                return self.loss_to_report(Op::Close); // it is closed when nobody has it any more
            }
            let kept = link.kept.close_file(self).await;
            let before = self.closed.swap(true, Ordering::Relaxed);
            let closed = match before || self.session.link.files.leave(self.handle) {
                true => self.close_at_server(cx).await,
                false => Ok(()),
            };
            // Data that were written through this file may be lost, and this is the last chance to
            // say so.
            let unsynced = &self.session.link.unsynced;
            let loss = match self.losses_known(cx).await {
                Ok(()) => self.loss_to_report(Op::Close),
                Err(error) => Err(error),
            };
            unsynced.writer_closed(&self.writer);
            kept.and(closed).and(loss)
        })
    }
}

impl RemoteFile {
    /// Waits until it is known what a loss of power has undone; like a call, no longer than the
    /// mount's timeout.
    async fn losses_known(&self, cx: &Context) -> Result<()> {
        let link = &self.session.link;
        let known = link.unsynced.losses_known(cx);
        let Some(limit) = link.options.timeout else { return known.await };
        let late = |_| {
            let error = Error::unknown(Errno::EHOSTDOWN);
            Err(error.because("the server lost power, and it is not known yet what was lost"))
        };
        dray_rt::timeout(limit, known).await.unwrap_or_else(late)
    }

    async fn close_at_server(&self, cx: &Context) -> Result<()> {
        let link = &self.session.link;
        let back = async { link.let_lock_lease_go(self.session.channel()?, self.handle).await };
        if self.within_limit(back).await.is_err() {
            link.close_later(&self.session, self.handle);
            return Ok(());
        }
        // A flush reports errors of writing: no caller needs the answer to the close.
        let one_way = !link.held.concerns(self.handle);
        let parted = async {
            match one_way {
                true => link.files.closing(self.handle).await,
                false => link.prepare_close(self.handle).await,
            }
            Ok(())
        };
        // A server that never says whether it has opened the file again.
        if self.within_limit(parted).await.is_err() {
            link.close_later(&self.session, self.handle);
            return Ok(());
        }
        if one_way && self.session.channel()?.close(self.handle) {
            return Ok(());
        }
        link.held.closed(self.handle);
        let closed = self.ask(cx, Call::Close { handle: self.handle }).await;
        // The limit is over, say: it is closed once the server can be reached.
        if closed.as_ref().is_err_and(|error| error.fate() != Fate::Final) {
            link.close_later(&self.session, self.handle);
            return Ok(());
        }
        closed
    }
}

/// The number of bytes that a server says that it moved, unless that is more than it was given.
fn believable(moved_bytes: u64, given_bytes: u64) -> Result<u64> {
    if moved_bytes <= given_bytes {
        return Ok(moved_bytes);
    }
    Err(Error::new(Errno::EPROTO)
        .because("the server says that it moved more bytes than it was given"))
}

impl Drop for RemoteFile {
    /// A file that was not closed is closed; no caller gets the outcome.
    fn drop(&mut self) {
        self.session.link.unsynced.writer_closed(&self.writer);
        let closed = self.closed.swap(true, Ordering::Relaxed);
        if !closed && self.session.link.files.leave(self.handle) {
            self.session.link.close_later(&self.session, self.handle);
        }
    }
}
