//! A call in hand: whether it is carried out, and once, from its arrival to its answer.

mod annotations;
mod body;
mod execution;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dray_core::{Buf, Context};

use super::Shared;
use crate::server::call_admission;
use crate::server::exactly_once::needs;
use crate::server::exactly_once::slots::{Reexecution, Route, Verdict};
use crate::server::execute;
use crate::server::open_ahead::PendingRightsChange;
use crate::server::reply::Reply;
use crate::server::sabotage::Sabotage;
use crate::server::service::Inner;
use crate::server::session::{ServerSession, SlottedChange};
use crate::wire::{Call, CallHead, CallRow, FileRef, Input, NO_SLOT, SessionChange};
pub(super) use body::CallBody;
use execution::Executed;

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
    pub(super) async fn carry_out(self, body: CallBody, data: Option<Buf>) {
        let call = match Call::get(self.head.op, &mut Input(&body)) {
            Ok(call) => TypedCall { row: call.row(), call },
            Err(_) => {
                return self.answer(&self.route, &mut Reply::malformed("malformed call")).await;
            }
        };
        // Noted before any wait: what its client asks for later is not opened ahead of it.
        let changing = self.changing(&call.row);
        let entered = match self.enter(&call).await {
            Ok(entered) => entered,
            Err(Refused::With(mut reply)) => return self.answer(&self.route, &mut reply).await,
            Err(Refused::Unheard) => return self.over(),
        };
        let Entered { again, _slotted } = entered;
        let mut outcome = Executed::new(again);
        let executed = self.execute(&call, data, changing.as_ref(), &mut outcome).await;
        let Executed { reply, grants, since, changed_files } = &mut outcome;
        if let Err(error) = executed {
            *reply = Reply::failure(&error);
        }
        if self.session.export.is_lost() {
            // The call ends as if the server had died now: whether it was made is found out at the
            // next opening.
            return self.over();
        }
        let said = self.said_above(reply);
        let CallHead { slot, sequence, .. } = self.head;
        let asked_last = match slot {
            NO_SLOT => None,
            _ => self.session.slots.done(slot, sequence, reply),
        };
        self.writing_ends(&call.call);
        // Behind that: an answer that is asked for again says nothing that may have changed since.
        if let Some(since) = since.take() {
            reply.add_changed_files(std::mem::take(changed_files));
            self.lease(&call.row, (since, said), grants.leases.as_deref(), reply);
        }
        grants.give_up();
        drop(changing);
        // A client that has given up on a change in a slot waits for the tag alone.
        self.answer(asked_last.as_ref().unwrap_or(&self.route), reply).await;
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
    pub(super) async fn open_replayed(&self, change: SessionChange, answer: &Reply) {
        let opening = match change {
            SessionChange::Opens(opening) | SessionChange::Reopens(opening) => opening,
            SessionChange::None | SessionChange::Closes(_) | SessionChange::Locks { .. } => return,
        };
        // The call's connection may go: the file must not be opened once it has been closed.
        let unslotted = self.session.unslotted(self.connection, None).await;
        let Some(_unslotted) = unslotted else { return };
        execute::open_replayed(&self.session, &self.cx, opening, answer).await;
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
}
