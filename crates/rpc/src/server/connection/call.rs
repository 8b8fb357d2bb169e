//! A call in hand: whether it is carried out, once, and what that takes.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use dray_core::{Buf, Context, Errno, Error, FileId, Op};

use super::Shared;
use crate::server::call_admission::{self, AtOnce, Grants};
use crate::server::exactly_once::plan::{self, ChangeState, Plan};
use crate::server::exactly_once::settle::Amend;
use crate::server::exactly_once::slots::{AnsweredChange, Reexecution, Route, Verdict};
use crate::server::exactly_once::{bytes, needs};
use crate::server::execute::{self, Files, ShownOperand};
use crate::server::leases::{LeaseChange, LeaseGrants, LeaseSince};
use crate::server::open_ahead::PendingRightsChange;
use crate::server::ranges::{RangeGrant, Span};
use crate::server::reply::Reply;
use crate::server::sabotage::Sabotage;
use crate::server::service::Inner;
use crate::server::session::{ServerSession, SlottedChange, UnslottedCall};
use crate::server::status::RunningCall;
use crate::wire::{
    Breaks, Call, CallHead, CallRow, Changes, FileRef, Input, NO_SLOT, OpRow, SessionChange, Stamp,
};

/// A call from its arrival to its answer.
pub(super) struct CallInHand {
    pub(super) server: Arc<Inner>,
    pub(super) session: Arc<ServerSession>,
    pub(super) shared: Arc<Shared>,
    pub(super) route: Route,
    pub(super) connection: u64,
    pub(super) head: CallHead,
    pub(super) cx: Context,
}

/// A call as its client meant it: decoded once, with its row of the table.
struct TypedCall<'a> {
    call: Call<'a>,
    row: CallRow<'a>,
}

/// A call that may be carried out.
struct Entered<'a> {
    again: Option<Box<Reexecution>>,
    /// Held until the call is answered.
    _slotted: Option<SlottedChange<'a>>,
}

/// The connection that a call came by has gone.
struct Gone;

/// What a call leaves behind. It is filled in place: an answer is large, and returned it would be copied
/// by each future on its way.
struct Outcome {
    reply: Reply,
    /// The grants of a change, until the answer has been noted.
    grants: RangeGrants,
    /// When it was carried out, if its answer may be leased.
    since: Option<LeaseSince>,
}

/// The grants of a change.
struct RangeGrants {
    plan: Option<Plan>,
    again: Option<Box<Reexecution>>,
    /// The grant of the bytes that a call writes, where it has no other grant of the file.
    lone: Option<RangeGrant>,
    leases: Option<Box<LeaseChange>>,
}

impl Outcome {
    /// Of a call that has not been carried out.
    fn new(again: Option<Box<Reexecution>>) -> Outcome {
        let grants = RangeGrants { plan: None, again, lone: None, leases: None };
        Outcome { reply: Reply::success(()), grants, since: None }
    }
}

impl RangeGrants {
    fn give_up(&mut self) {
        let RangeGrants { plan, again, lone, leases } = self;
        (*plan, *again, *lone, *leases) = (None, None, None, None);
    }
}

/// The file whose data or attributes a call has changed.
fn changed_file((row, files): (&CallRow<'_>, &Files), reply: &Reply) -> Option<FileId> {
    match row.changes {
        Changes::Attributes(file) | Changes::Data(file, _) => files.id(file).ok(),
        // The file that was changed by its name. If the file is new, nobody has it open.
        Changes::DataOfReply => reply.file(),
        Changes::Nothing | Changes::Names | Changes::Redone => None,
    }
}

/// The number of the file that a change in a slot opens.
fn opens(change: SessionChange) -> Option<u64> {
    match change {
        SessionChange::Opens(opening) | SessionChange::Reopens(opening) => Some(opening.handle),
        SessionChange::None | SessionChange::Closes(_) | SessionChange::Locks { .. } => None,
    }
}

/// Why a call is not carried out.
enum Refused {
    /// This is its answer.
    With(Box<Reply>),
    /// The call is answered elsewhere, or nobody waits for it.
    Unheard,
}

impl Refused {
    fn with(reply: Reply) -> Refused {
        Refused::With(Box::new(reply))
    }
}

impl CallInHand {
    pub(super) async fn carry_out(self, body: Box<[u8]>, data: Option<Buf>) {
        let call = match Call::get(self.head.op, &mut Input(&body)) {
            Ok(call) => TypedCall { row: call.row(), call },
            Err(_) => return self.answer(&self.route, &mut Reply::malformed("malformed call")),
        };
        // Noted before any wait: what its client asks for later is not opened ahead of it.
        let changing = self.changing(&call.row);
        let entered = match self.enter(&call).await {
            Ok(entered) => entered,
            Err(Refused::With(mut reply)) => return self.answer(&self.route, &mut reply),
            Err(Refused::Unheard) => return self.over(),
        };
        let Entered { again, _slotted } = entered;
        let mut outcome = Outcome::new(again);
        let executed = self.execute(&call, data, changing.as_ref(), &mut outcome).await;
        let Outcome { reply, grants, since } = &mut outcome;
        if let Err(error) = executed {
            *reply = Reply::failure(&error);
        }
        if self.session.export.is_lost() {
            // The call ends as if the server had died now: whether it was made is found out at the
            // next opening.
            return self.over();
        }
        let CallHead { slot, sequence, .. } = self.head;
        let asked_last = match slot {
            NO_SLOT => None,
            _ => self.session.slots.done(slot, sequence, reply),
        };
        self.writing_ends(&call.call);
        // Behind that: an answer that is asked for again says nothing that may have changed since.
        if let Some(since) = since.take() {
            self.lease(&call.row, since, grants.leases.as_deref(), reply);
        }
        grants.give_up();
        drop(changing);
        // A client that has given up on a change in a slot waits for the tag alone.
        self.answer(asked_last.as_ref().unwrap_or(&self.route), reply);
    }

    /// Whether it may be carried out now: not before a recovery is over, not with files that the
    /// server does not know, and not twice.
    async fn enter(&self, call: &TypedCall<'_>) -> Result<Entered<'_>, Refused> {
        let (row, in_slot) = (&call.row, self.head.slot != NO_SLOT);
        if let Some(objection) = needs::objection(row.slot, in_slot) {
            return Err(Refused::with(Reply::malformed(objection)));
        }
        let recovery = &self.session.export.recovery;
        if recovery.running() && self.waits_for_recovery(row) {
            recovery.wait(&self.cx).await.map_err(|error| Refused::with(Reply::failure(&error)))?;
            // The call has been asked for again on a later connection, where the answer must go.
            if !self.session.has_connection(self.connection) {
                return Err(Refused::Unheard);
            }
        }
        if self.waits_for_kept_writes(row) {
            let kept = &self.session.export.kept_writes;
            kept.wait(&self.cx).await.map_err(|error| Refused::with(Reply::failure(&error)))?;
            if !self.session.has_connection(self.connection) {
                return Err(Refused::Unheard); // as above
            }
        }
        // Nothing was applied then, so the slot stays as it was: the client opens the file
        // again and repeats the call under the same number.
        execute::check_handles(&self.session, row).map_err(|why| Refused::with(why.reply()))?;
        if !in_slot {
            return Ok(Entered { again: None, _slotted: None });
        }
        let slotted = self.session.slotted(self.connection, opens(row.session));
        let slotted = slotted.ok_or(Refused::Unheard)?;
        let again = self.enter_slot(call).await?;
        Ok(Entered { again, _slotted: Some(slotted) })
    }

    /// The state in which the server before us left the change, if it was begun there.
    async fn enter_slot(&self, call: &TypedCall<'_>) -> Result<Option<Box<Reexecution>>, Refused> {
        let TypedCall { call, row } = call;
        let verdict = self.session.slots.begin(self.head.slot, self.head.sequence, &self.route);
        if verdict.is_repeated() {
            self.server.repeated.fetch_add(1, Ordering::Relaxed);
        }
        let broken = self.server.options.broken();
        match verdict {
            Verdict::Fresh => Ok(None),
            Verdict::Reexecute(cut) => Ok(Some(cut)),
            Verdict::Replay(_) | Verdict::Restored(_) if broken.forgets_answers(self.head.op) => {
                Ok(None)
            }
            Verdict::Restored(reply) => {
                call_admission::settled(&self.session, &self.cx, call, &reply);
                self.open_replayed(row.session, &reply).await;
                Err(Refused::With(reply))
            }
            Verdict::Replay(reply) => {
                self.open_replayed(row.session, &reply).await;
                Err(Refused::With(reply))
            }
            Verdict::Running | Verdict::Stale => Err(Refused::Unheard),
            Verdict::Unknown => Err(Refused::with(Reply::malformed("no such replay slot"))),
        }
    }

    /// Before an opening is answered again.
    async fn open_replayed(&self, change: SessionChange, answer: &Reply) {
        let opening = match change {
            SessionChange::Opens(opening) | SessionChange::Reopens(opening) => opening,
            SessionChange::None | SessionChange::Closes(_) | SessionChange::Locks { .. } => return,
        };
        // The call's connection may go: the file must not be opened once it has been closed.
        let unslotted = self.session.unslotted(self.connection, None).await;
        let Some(_unslotted) = unslotted else { return };
        execute::open_replayed(&self.session, &self.cx, opening, answer).await;
    }

    /// Calls that end at once, nearly all, are not worth a note; the others show in the
    /// status while they last. Errors: the answer.
    async fn execute(
        &self,
        call: &TypedCall<'_>,
        data: Option<Buf>,
        changing: Option<&PendingRightsChange<'_>>,
        outcome: &mut Outcome,
    ) -> dray_core::Result<()> {
        let mut executed = std::pin::pin!(self.execute_noted(call, data, changing, outcome));
        let first = std::future::poll_fn(|task| Poll::Ready(executed.as_mut().poll(task))).await;
        if let Poll::Ready(executed) = first {
            return executed;
        }
        let number = self.server.running(RunningCall {
            op: self.head.op,
            session: self.session.id,
            cx: self.cx.clone(),
            since: dray_rt::now(),
            operands: call.row.operands.map(|operand| operand.map(ShownOperand::of)),
        });
        let executed = executed.await;
        self.server.finished(number);
        executed
    }

    /// With the intent noted where the change must not be applied twice. Errors: the answer.
    async fn execute_noted(
        &self,
        TypedCall { call, row }: &TypedCall<'_>,
        data: Option<Buf>,
        changing: Option<&PendingRightsChange<'_>>,
        outcome: &mut Outcome,
    ) -> dray_core::Result<()> {
        let Outcome { reply, grants: RangeGrants { plan, again, lone, leases }, since } = outcome;
        let data_bytes = data.as_ref().map_or(0, Buf::len);
        let (_admitted, refused) = match self.admitted(call, data_bytes, again.is_some()).await {
            Ok(grants) => (grants, None),
            Err(error) if self.head.op == Op::Close => (None, Some(error)),
            Err(error) => return Err(error),
        };
        let Ok(_unslotted) = self.unslotted(row.session).await else {
            // The call's connection has gone: the call has been asked for again.
            return Err(self.cx.cancelled());
        };
        let in_slot = self.head.slot != NO_SLOT;
        let files = if in_slot { Files::of(&self.session, row)? } else { Files::default() };
        let cut = self.cut_file(row).await;
        *leases = self.breaking(row, (&files, cut), again.as_deref());
        if let Some(waits) = leases.as_mut().and_then(|leases| leases.recall()) {
            Box::pin(waits.wait()).await;
        }
        if let Some(waits) = self.recall_writes(row) {
            Box::pin(waits.wait()).await;
        }
        again.take_if(|again| !self.asks_again(again, row, &files));
        if let Some(answered) = again.as_mut().and_then(|again| again.answered.take()) {
            let (of_call, AnsweredChange { answer, awaited }) =
                ((call, row, &files, data), *answered);
            *reply = self.make_answered(of_call, answer).await;
            drop(awaited); // now a sync covers it
            return Ok(());
        }
        let amend = again.as_ref().and_then(|again| again.amend);
        if execute::is_to_be_made(&self.session, &self.cx, amend).await {
            *again = None;
        }
        let sabotaged = self.server.options.broken().is(Sabotage::OpenByName);
        if again.is_none() && !sabotaged {
            execute::check_name(&self.session, &self.cx, call).await?;
        }
        let amend = again.as_ref().and_then(|again| again.amend);
        if in_slot && again.is_none() {
            *plan = self.intend((call, row, &files), data_bytes).await?;
        }
        if let Some(leases) = leases {
            let named = plan.iter().flat_map(|plan| plan.named).flatten();
            named.for_each(|file| leases.attributes(file));
            if let Some(waits) = leases.recall() {
                Box::pin(waits.wait()).await;
            }
        }
        let (server, session) = (&self.server, &self.session);
        if let Some(changing) = changing {
            changing.wait(session.id).await;
        }
        let plans = (plan.as_ref(), amend);
        let written = bytes::written(session, &self.cx, (row, &files), data_bytes, plans).await;
        if let Some(written) = written {
            // The last of all waits: readers of the same range wait from now on.
            *lone = bytes::take(session, written, plan.as_mut(), again.as_deref_mut()).await;
        }
        let version = self.split_read_version(call);
        let state = ChangeState { files: &files, plan: plan.as_mut(), amend };
        // The checks come behind all waits: the things that the client had may be somebody else's by
        // now. A process that was stopped meanwhile may have been succeeded, and its intent be settled.
        let changes = row.changes != Changes::Nothing;
        let carried = if changes && !session.export.is_lost() { session.carry() } else { None };
        if changes && carried.is_none() {
            return Err(self.cx.cancelled());
        }
        let table = session.export.lease_table.as_ref();
        *since = table.zip(session.lease_holder()).map(|(table, holder)| table.since(holder));
        let shown = table.filter(|table| table.leases_writes()).map(|table| table.shows());
        let data_again = again.as_ref().map(|_| data.clone().unwrap_or_default());
        *reply = match execute::run(server, session, &self.cx, (call, state), data).await {
            Ok(reply) => reply,
            Err(error) => Reply::failure(&error),
        };
        if let Some(shown) = shown {
            self.show_anew(row, shown, since, reply).await;
        }
        drop(carried);
        if amend.is_some_and(|amend| amend.made().is_some() || amend.put().is_some()) {
            call_admission::settled(&self.session, &self.cx, call, reply);
        }
        let appended_at = plan.as_ref().and_then(|plan| plan.append_at);
        let at = amend.and_then(Amend::append_at).or(appended_at);
        if row.changes.is_stamped() {
            let stamp = bytes::stamp(plan.as_ref(), again.as_deref(), lone.as_ref());
            self.stamp(reply, stamp, (row, &files), at);
        }
        if let Some(data) = data_again {
            self.note_made_again(call, data, (row, &files), reply);
        }
        if let Some(version) = version {
            let unchanged = self.split_read_version(call) == Some(version);
            if unchanged || server.options.broken().is(Sabotage::SplitReads) {
                reply.stamp(Stamp { number: version, at: Stamp::NOWHERE });
            }
        }
        if let Some(error) = refused {
            *reply = Reply::failure(&error); // of a file that is closed nevertheless
        }
        dray_rt::step().await;
        Ok(())
    }

    /// Marks what a change breaks of others' leases, as far as it is known before the change is
    /// planned. Names are among it: nobody waits for a recall of names with a grant of ranges.
    fn breaking(
        &self,
        row: &CallRow<'_>,
        (files, cut): (&Files, Option<FileId>),
        again: Option<&Reexecution>,
    ) -> Option<Box<LeaseChange>> {
        let table = self.session.export.lease_table.as_ref()?;
        if !row.changes.is_stamped() {
            return None;
        }
        let mut change = LeaseChange::new(table, self.session.lease_holder());
        let Breaks { names, attributes, rights } = row.breaks();
        names.into_iter().flatten().for_each(|name| change.name(name));
        if let Some(file) = rights.and_then(|file| files.id(file).ok()) {
            change.rights(file);
        } else if let Some(file) = attributes.and_then(|file| files.id(file).ok()) {
            change.content(file);
        }
        if let Some(file) = cut {
            change.content(file);
        }
        // What a server before us has begun is not planned again.
        let begun = again.into_iter().flat_map(|again| again.files());
        begun.for_each(|file| change.attributes(file));
        Some(change)
    }

    /// Says in an answer what is leased with it.
    fn lease(
        &self,
        row: &CallRow<'_>,
        since: LeaseSince,
        change: Option<&LeaseChange>,
        reply: &mut Reply,
    ) {
        let export = &self.session.export;
        let table = export.lease_table.as_ref().filter(|_| !export.recovery.running());
        if let Some((table, holder)) = table.zip(self.session.lease_holder()) {
            let grants = LeaseGrants::new(table, holder, since, change);
            grants.answer(&self.session, (OpRow::of(self.head.op), row), reply);
        }
    }

    /// Makes a change of data again that was answered so, and answers it.
    async fn make_answered(
        &self,
        (call, row, files, data): (&Call<'_>, &CallRow<'_>, &Files, Option<Buf>),
        answer: Reply,
    ) -> Reply {
        let file = match row.changes {
            Changes::Data(file, _) | Changes::Attributes(file) => files.id(file).ok(),
            Changes::DataOfReply | Changes::Names | Changes::Nothing | Changes::Redone => {
                answer.file()
            }
        };
        let is_served = !self.session.export.is_lost();
        let carried = if is_served { self.session.carry() } else { None };
        if carried.is_none() {
            return Reply::failure(&self.cx.cancelled());
        }
        if let Some(file) = file {
            let of_call = (call, data);
            let made = execute::make_answered(&self.session, &self.cx, of_call, (file, &answer));
            if let Err(error) = made.await {
                return Reply::failure(&error);
            }
            // A sync that was before it has not brought it to media, though its stamp is an old one.
            self.session.changed(self.session.export.ranges.stamps.next());
        }
        drop(carried);
        self.open_replayed(row.session, &answer).await;
        answer
    }

    /// Waits until the admission of the export lets this call go on. `cut_short`: the server before us
    /// began it, and others wait for it. Errors: it is refused.
    async fn admitted(
        &self,
        call: &Call<'_>,
        data_bytes: usize,
        cut_short: bool,
    ) -> dray_core::Result<Option<Grants<'_>>> {
        let restores = cut_short || self.head.flags & CallHead::RECOVERY != 0;
        if restores || self.session.export.admission.is_none() {
            return Ok(None);
        }
        match call_admission::ask_at_once(&self.session, &self.cx, call, data_bytes) {
            AtOnce::Now(grants) => Ok(grants),
            // In a box, so that other calls are no larger.
            AtOnce::Later(grants, first) => {
                let (asked, rest) = ((call, data_bytes), (grants, first));
                let asked = call_admission::ask(&self.session, &self.cx, asked, rest);
                let grants = Box::pin(asked).await?;
                // It may have waited for long. Whatever is answered then, nobody hears.
                match self.session.export.is_lost() {
                    true => {
                        let why = "this server serves the export no more";
                        Err(Error::new(Errno::EAGAIN).because(why))
                    }
                    false => Ok(Some(grants)),
                }
            }
        }
    }

    /// Whether this call asks for the change that was cut short. A call that asks for something else
    /// is a new change.
    fn asks_again(&self, again: &Reexecution, row: &CallRow<'_>, files: &Files) -> bool {
        let Ok(about) = files.repeated(row.intent) else { return false };
        again.is_of(self.head.op, about.into_iter().flatten())
    }

    /// Orders a call that changes a session, and is in no slot, behind the calls of the session's
    /// former connections. Errors: this connection has gone, too.
    async fn unslotted(&self, change: SessionChange) -> Result<Option<UnslottedCall<'_>>, Gone> {
        let closes = match change {
            SessionChange::None => return Ok(None),
            SessionChange::Closes(handle) => Some(handle),
            SessionChange::Opens(_) | SessionChange::Reopens(_) | SessionChange::Locks { .. } => {
                None
            }
        };
        if self.head.slot != NO_SLOT {
            return Ok(None);
        }
        let unslotted = self.session.unslotted(self.connection, closes).await.ok_or(Gone)?;
        if self.cx.check().is_err() {
            return Err(Gone);
        }
        Ok(Some(unslotted))
    }

    /// Waits until no other change of the same is under way, and notes what this one is going to
    /// do.
    async fn intend(
        &self,
        (call, row, files): (&Call<'_>, &CallRow<'_>, &Files),
        data_bytes: usize,
    ) -> dray_core::Result<Option<Plan>> {
        let CallHead { slot, sequence, op, .. } = self.head;
        let plan = plan::plan(&self.session, &self.cx, (row.intent, files), data_bytes).await?;
        self.may_write_back(call, files).await?;
        if let Some(plan) = &plan {
            // The change before it may have ended without an answer when the export was lost, and is
            // settled at the next opening. An intent beside that one would say that this began as well.
            if self.session.export.is_lost() {
                return Err(self.cx.cancelled());
            }
            self.session.slots.intend(slot, sequence, OpRow::of(op).noted_as, &plan.intent);
            // No client hears that the change was not carried out: the next server finds out.
            if !self.is_settled().await {
                return Err(self.cx.cancelled());
            }
            dray_rt::step().await;
        }
        Ok(plan)
    }

    /// Waits until the intent is where a successor of this server finds it. False: this server has been
    /// succeeded, and its export is lost.
    async fn is_settled(&self) -> bool {
        match self.session.slots.settled() {
            Some(settled) if !self.server.options.broken().is(Sabotage::Shipping) => settled.await,
            Some(_) | None => true,
        }
    }

    /// The note of a change of rights.
    fn changing(&self, row: &CallRow<'_>) -> Option<PendingRightsChange<'_>> {
        let file = match row.takes_rights? {
            FileRef::Id(id) => id,
            FileRef::Handle(handle) => self.session.file(handle)?.id(),
        };
        let sabotaged = self.server.options.broken().is(Sabotage::OpenAhead);
        (!sabotaged).then(|| self.server.open_ahead.changes(file))
    }

    /// New work does; what belongs to the recovery does not, nor does giving back.
    fn waits_for_recovery(&self, row: &CallRow<'_>) -> bool {
        let belongs = row.is_recovery || self.head.flags & CallHead::RECOVERY != 0;
        !belongs && !self.server.options.broken().is(Sabotage::ReplayGate)
    }

    /// The version of the file that one part of a split read sees, as long as nobody changes the file.
    fn split_read_version(&self, call: &Call<'_>) -> Option<u64> {
        if self.head.flags & CallHead::SPLIT_READ == 0 {
            return None; // nearly always: before anything is looked for
        }
        let Call::Read { handle, at, len_bytes } = *call else { return None };
        let file = self.session.file(handle)?;
        let span = Span::bytes(at, u64::from(len_bytes));
        if self.server.options.broken().is(Sabotage::SplitReads) {
            return Some(1);
        }
        self.session.export.ranges.version(file.id(), span)
    }

    /// The file whose data or attributes this has changed, if a session watches any file.
    fn watched_file(&self, (row, files): (&CallRow<'_>, &Files), reply: &Reply) -> Option<FileId> {
        if self.session.export.watchers.is_empty() {
            return None;
        }
        changed_file((row, files), reply)
    }

    /// Notes a change that was made again as it was begun, while it has its bytes. It had not to wait for
    /// others that a server before us began.
    fn note_made_again(
        &self,
        call: &Call<'_>,
        data: Buf,
        about: (&CallRow<'_>, &Files),
        reply: &Reply,
    ) {
        let Some(stamp) = reply.stamped().cloned().filter(|_| reply.is_success()) else { return };
        if let Some(file) = changed_file(about, reply) {
            execute::note_made_again(&self.session, call, data, (file, stamp));
        }
    }

    /// Puts the stamp of a change that was made into its answer. `at`: where an append went, bytes.
    fn stamp(
        &self,
        reply: &mut Reply,
        stamp: Option<u64>,
        (row, files): (&CallRow<'_>, &Files),
        at: Option<u64>,
    ) {
        if !reply.is_success() {
            return;
        }
        let number = stamp.unwrap_or_else(|| self.session.export.ranges.stamps.next());
        self.session.changed(number);
        if let Some(file) = self.watched_file((row, files), reply) {
            self.server.notify_change(&self.session, file);
        }
        if !self.session.stamps() {
            return;
        }
        let at = at.or(row.changes.written_at()).unwrap_or(Stamp::NOWHERE);
        reply.stamp(Stamp { number, at });
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Mutex;
    use std::task::Waker;

    use dray_backends::memory::{MemoryFs, MemoryOptions};
    use dray_core::{CreateHow, FileId, FileSystem, Make, Name, OpenHow, RemoveKind, Write};
    use dray_fabric::sim::Network;

    use super::*;
    use crate::client::{
        ClientOptions, ClientSession as Mount, LeaseWish, RemoteFs, SessionMemory,
    };
    use crate::server::journal::watched::{Watch, WatchedJournal};
    use crate::server::ranges::RangeTable;
    use crate::server::{Export, Server, ServerOptions};

    /// The files that the changes are about, and the state of the grant when an answer is noted.
    #[derive(Default)]
    struct Seen {
        about: Option<(Arc<RangeTable>, FileId)>,
        held: Vec<bool>,
    }

    impl Watch for Mutex<Seen> {
        fn answers(&self) {
            let mut seen = self.lock().unwrap();
            if let Some((ranges, file)) = seen.about.clone() {
                let mut task = std::task::Context::from_waker(Waker::noop());
                let other = pin!(ranges.change(file, Span::ALL)).poll(&mut task);
                seen.held.push(other.is_pending());
            }
        }
    }

    async fn mount(network: &Network, server: &Server) -> RemoteFs {
        let (mut incoming, server) = (network.listen("s"), server.clone());
        dray_rt::spawn(async move {
            while let Some(connection) = incoming.recv().await {
                let server = server.clone();
                dray_rt::spawn(async move { server.serve(Arc::new(connection)).await });
            }
        });
        let options = ClientOptions {
            export: "data".into(),
            key: None,
            timeout: None,
            host: "host".into(),
            replay_bytes: 0,
            split_min_bytes: ClientOptions::SPLIT_MIN_BYTES,
            caches: false,
            counts_on_one_user: false,
            leases: LeaseWish::No,
            definition: 0,
            group: None,
        };
        let mounted = Mount::connect(network.connector("s"), options, SessionMemory::heap()).await;
        RemoteFs::new(mounted.unwrap())
    }

    /// If the server died before the answer is noted, a change of the same file in between could be
    /// taken for this one. Or this one could undo it.
    // proves: P80
    #[test]
    fn a_grant_lasts_until_the_answer_is_noted() {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(async {
            let network = Network::new();
            let below = Arc::new(MemoryFs::new(MemoryOptions::default()));
            let journal = Arc::new(WatchedJournal::<Mutex<Seen>>::default());
            let seen = journal.1.clone();
            let export = Export::new("data", below, Vec::new());
            let server = Server::new(ServerOptions::default(), vec![export], journal);
            let fs = mount(&network, &server).await;
            let ranges = server.inner.exports.get("data").ok().unwrap().ranges.clone();
            let watch = |file| seen.lock().unwrap().about = Some((ranges.clone(), file));
            let (cx, root) = (Context::system(), fs.info().root);
            let [file, dir] = [b"f", b"d"].map(|name| Name::new(name).unwrap());
            watch(root);
            let (how, mode) = (OpenHow::READ_WRITE, 0o644);
            let new = CreateHow { open: how, mode, exclusive: true };
            let (entry, open) = fs.create(&cx, root, file, new).await.unwrap();
            fs.make(&cx, root, dir, Make::Directory { mode: 0o755 }).await.unwrap();
            fs.remove(&cx, root, dir, RemoveKind::Directory).await.unwrap();
            watch(entry.id);
            let append = Write { append: true, ..Write::at(0) };
            for how in [append, Write::at(0)] {
                open.write(&cx, how, Buf::from(&b"data"[..])).await.unwrap();
            }
            assert_eq!(seen.lock().unwrap().held, [true; 5]);
        });
    }
}
