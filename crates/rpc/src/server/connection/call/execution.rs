//! The execution of a call that may be carried out: what it waits for, the intent that is noted, and the
//! change itself.

use std::future::Future;
use std::task::Poll;
use std::time::Duration;

use dray_core::{Attr, Buf, Context, Errno, Error, FileId};

use super::{CallInHand, TypedCall};
use crate::server::call_admission::{self, AtOnce, Grants};
use crate::server::exactly_once::bytes;
use crate::server::exactly_once::plan::{self, ChangeState, Plan};
use crate::server::exactly_once::settle::Amend;
use crate::server::exactly_once::slots::{AnsweredChange, Reexecution};
use crate::server::execute::{self, Files, ShownOperand};
use crate::server::leases::{LeaseChange, LeaseSince};
use crate::server::open_ahead::PendingRightsChange;
use crate::server::ranges::RangeGrant;
use crate::server::reply::Reply;
use crate::server::sabotage::Sabotage;
use crate::server::session::UnslottedCall;
use crate::server::status::RunningCall;
use crate::wire::{Breaks, Call, CallHead, CallRow, Changes, NO_SLOT, OpRow, SessionChange, Stamp};

/// The connection that a call came by has gone.
struct Gone;

/// What a call leaves behind. It is filled in place: an answer is large, and returned it would be copied
/// by each future on its way.
pub(super) struct Executed {
    pub(super) reply: Reply,
    /// The grants of a change, until the answer has been noted.
    pub(super) grants: RangeGrants,
    /// When it was carried out, if its answer may be leased.
    pub(super) since: Option<LeaseSince>,
    /// What the answer has beside its results, once it has been noted.
    pub(super) changed_files: Vec<(FileId, Attr)>,
}

/// The grants of a change.
pub(super) struct RangeGrants {
    plan: Option<Plan>,
    again: Option<Box<Reexecution>>,
    /// The grant of the bytes that a call writes, where it has no other grant of the file.
    lone: Option<RangeGrant>,
    pub(super) leases: Option<Box<LeaseChange>>,
}

impl Executed {
    /// Of a call that has not been carried out.
    pub(super) fn new(again: Option<Box<Reexecution>>) -> Executed {
        let grants = RangeGrants { plan: None, again, lone: None, leases: None };
        Executed { reply: Reply::success(()), grants, since: None, changed_files: Vec::new() }
    }
}

impl RangeGrants {
    pub(super) fn give_up(&mut self) {
        let RangeGrants { plan, again, lone, leases } = self;
        (*plan, *again, *lone, *leases) = (None, None, None, None);
    }
}

impl CallInHand {
    /// Calls that end at once, nearly all, are not worth a note; the others show in the
    /// status while they last. Errors: the answer.
    pub(super) async fn execute(
        &self,
        call: &TypedCall<'_>,
        data: Option<Buf>,
        changing: Option<&PendingRightsChange<'_>>,
        outcome: &mut Executed,
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
        outcome: &mut Executed,
    ) -> dray_core::Result<()> {
        let Executed { reply, grants, since, changed_files } = outcome;
        let RangeGrants { plan, again, lone, leases } = grants;
        let data_bytes = data.as_ref().map_or(0, Buf::len);
        let (_admitted, refused) = match self.admitted(call, data_bytes, again.is_some()).await {
            Ok(grants) => (grants, None),
            Err(error) => match row.session {
                SessionChange::Closes(_) => (None, Some(error)), // it is closed nevertheless
                SessionChange::None
                | SessionChange::Opens(_)
                | SessionChange::Reopens(_)
                | SessionChange::Locks { .. } => return Err(error),
            },
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
            named.for_each(|file| leases.named(file));
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
        let taking = self.taking_name(plan.as_ref());
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
        if let Call::Hold { number, .. } = *call
            && let Some(change) = leases.take()
        {
            self.hold(number, change)?;
        }
        let data_again = again.as_ref().map(|_| data.clone().unwrap_or_default());
        let too_early = server.options.broken().is(Sabotage::LeaseChangedFiles);
        if too_early {
            *changed_files = self.changed_files((row, &files), *since, leases.as_deref()).await;
        }
        let shown = table.filter(|table| table.leases_writes()).map(|table| table.shows());
        let of_call = (call, self.head.flags, state);
        let cx = taking.as_deref().unwrap_or(&self.cx);
        if let Err(error) = execute::run(server, session, cx, of_call, data, reply).await {
            *reply = Reply::failure(&error);
        }
        if let Some(shown) = shown {
            // In a box, so that other calls are no larger.
            Box::pin(self.show_anew(row, shown, since, reply)).await;
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
        if reply.is_success() && !too_early {
            *changed_files = self.changed_files((row, &files), *since, leases.as_deref()).await;
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
        if !row.changes.is_stamped() && row.changes != Changes::Leases {
            return None;
        }
        let leases_on =
            self.session.leases_on() && !self.server.options.broken().is(Sabotage::UpperNamed);
        let change = LeaseChange::new(table, self.session.lease_holder());
        let mut change = change.by_session_that_leases_on(leases_on);
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
        begun.for_each(|file| change.named(file));
        Some(change)
    }

    /// The context of a change that takes a name away, where observers are to know the file. It is a copy, so
    /// only where calls are asked for, and in a box: other calls are no larger.
    fn taking_name(&self, plan: Option<&Plan>) -> Option<Box<Context>> {
        let file = plan?.takes_name_of?;
        call_admission::is_on(&self.session).then(|| Box::new(self.cx.taking_name_of(file)))
    }

    /// Nothing of what is marked is leased until its client releases it.
    fn hold(&self, number: u64, change: Box<LeaseChange>) -> dray_core::Result<()> {
        let export = &self.session.export;
        let time = export.lease_table.as_ref().map_or(Duration::ZERO, |table| table.hold_time());
        if self.server.options.broken().is(Sabotage::LeaseHolds) {
            return Ok(());
        }
        export.lease_holds.keep((self.session.id, number), change, time)
    }

    /// Makes a change of data again that was answered so, and answers it.
    async fn make_answered(
        &self,
        (call, row, files, data): (&Call<'_>, &CallRow<'_>, &Files, Option<Buf>),
        answer: Reply,
    ) -> Reply {
        let file = match row.changes {
            Changes::Data(file, _) | Changes::Attributes(file) => files.id(file).ok(),
            Changes::DataOfReply
            | Changes::Names
            | Changes::Leases
            | Changes::Nothing
            | Changes::Redone => answer.file(),
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
}
