//! A call, from the sending of its request to the decoding of its answer.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use dray_core::{Buf, BufMut, Context, Errno, Error, FileId, Result};
use dray_rt::{Instant, now, timeout};

use super::tags::TagClass;
use super::unresponsive::ReceiveMark;
use super::waiting::{CallGuard, TagWait};
use super::{ChangeNotes, Channel, ConnectionEpoch, Phase, State};
use crate::client::durability::{ChangeStamp, Confirmation};
use crate::client::file::RemoteFile;
use crate::client::leases::OwnChange;
use crate::client::link::SessionState;
use crate::client::slots::ReplaySlot;
use crate::wire::{
    Call, CallHead, Changes, Malformed, NameLease, OpRow, ReplyHead, SessionChange, Stamp, Ticket,
};

/// Everything about one call but its result's type.
pub(crate) struct OutgoingCall<'a> {
    pub(crate) cx: &'a Context,
    pub(crate) call: &'a Call<'a>,
    /// The properties of the call in the table of operations.
    pub(crate) traits: CallTraits,
    /// Replay slot and sequence.
    pub(crate) slot: Option<(u32, u32)>,
    pub(crate) request: u64,
    pub(crate) data: Option<Buf>,
    pub(crate) into: Option<BufMut>,
    /// The open file that the call names.
    pub(crate) file: Option<FileId>,
    /// A second open file that the call names.
    pub(crate) to: Option<&'a RemoteFile>,
    /// Bits for [`CallHead`].
    pub(crate) flags: u16,
    /// Since when its caller waits, if that is longer than for the call alone.
    pub(crate) began: Option<Instant>,
    /// The call uses an open file, and its locks were checked. If the session ends before the call
    /// is sent, they have to be checked again, and the call fails as one of an unknown handle.
    pub(crate) looked_at: bool,
    /// No caller waits for the call: it has no limit while the server is there.
    pub(crate) patient: bool,
}

/// The part of the row of a call ([`Call::row`]) that a channel needs.
#[derive(Clone, Copy)]
pub(crate) struct CallTraits {
    pub(super) session: SessionChange,
    pub(super) takes_rights: bool,
    pub(super) changes: bool,
    pub(super) sets: bool,
    /// The answer leases the name that the call makes, or the file that it changes.
    pub(super) leases_change: bool,
}

impl<'a> OutgoingCall<'a> {
    /// In no slot, without data, and of no request of the front end.
    pub(crate) fn of(cx: &'a Context, call: &'a Call<'a>) -> OutgoingCall<'a> {
        let (slot, data, into, file, to) = (None, None, None, None, None);
        let (began, looked_at, patient) = (None, false, false);
        let (row, op) = (call.row(), OpRow::of(call.op()));
        let traits = CallTraits {
            session: row.session,
            takes_rights: row.takes_rights.is_some(),
            changes: row.changes != Changes::Nothing,
            sets: row.sets,
            leases_change: op.leases_name == NameLease::Found || op.leases_changed,
        };
        let (request, flags) = (0, 0);
        OutgoingCall {
            cx,
            call,
            traits,
            slot,
            request,
            data,
            into,
            file,
            to,
            flags,
            began,
            looked_at,
            patient,
        }
    }

    /// The same as a change in `slot`.
    pub(crate) fn in_slot(self, slot: Option<&ReplaySlot>) -> OutgoingCall<'a> {
        let began = slot.map(|slot| slot.wanted);
        OutgoingCall { slot: slot.map(|slot| (slot.number, slot.sequence)), began, ..self }
    }

    /// A call is needed if the server may make others wait until it comes. A change keeps its place
    /// among the changes, and reads wait behind a change that was cut short. Reopened files,
    /// closes, and locks that are given back come before the calls that wait for them.
    pub(super) fn class(&self) -> TagClass {
        let needed = match self.traits.session {
            SessionChange::Reopens(_) | SessionChange::Closes(_) => true,
            SessionChange::Locks { waits_for, .. } => waits_for.is_none(),
            SessionChange::None | SessionChange::Opens(_) => false,
        };
        match needed || self.slot.is_some() {
            true => TagClass::Needed,
            false if self.cx.internal => TagClass::Plain,
            false if self.into.is_some() => TagClass::ReadOf(self.cx.who.uid),
            false => TagClass::PlainOf(self.cx.who.uid),
        }
    }
}

/// An answer: what it says, and the buffer given for data.
pub(crate) struct CallAnswer<T> {
    pub(crate) value: T,
    pub(crate) data: Option<BufMut>,
    pub(crate) made: ReplyInfo,
    /// The call as a change of what is leased, if its answer may be remembered. The change lasts until
    /// this is dropped.
    pub(crate) change: Option<Box<OwnChange>>,
}

/// The body of an answer is decoded; this is the rest.
struct AnswerRest {
    made: ReplyInfo,
    data: Option<BufMut>,
    change: Option<Box<OwnChange>>,
}

/// The facts that the head of an answer gives beside its value.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReplyInfo {
    /// The stamp of the change; 0 from a server that gives none.
    pub(crate) stamp: u64,
    /// Where a write went, where that is known.
    pub(crate) at: Option<u64>,
    /// How often the server's machine had lost power.
    pub(crate) power_epoch: u64,
    /// In which session, with which process of the server.
    pub(crate) session_state: SessionState,
    /// A ticket for a later epoch of the server. The ticket of an opening names the file. The
    /// ticket of a sync says what is on media.
    pub(crate) ticket: Option<Ticket>,
    /// The field [`ReplyHead::times_past`](field@ReplyHead::times_past) of the answer to an
    /// opening.
    pub(crate) times_past: Option<bool>,
    /// The number of the write lease that the answer to an opening gives.
    pub(crate) write_lease: Option<u64>,
}

impl ReplyInfo {
    pub(crate) fn change_stamp(&self) -> ChangeStamp {
        ChangeStamp { number: self.stamp, power_epoch: self.power_epoch }
    }

    /// For the unsynced log.
    pub(crate) fn confirmation(&self) -> Confirmation {
        Confirmation { stamp: self.change_stamp(), ticket: self.ticket }
    }
}

/// How the wait for an answer ended.
struct WaitOutcome {
    tag: u32,
    /// If the call was not answered in time: the state of receiving when it was sent, and its
    /// limit.
    late: Option<(ReceiveMark, Duration)>,
}

/// Takes what it wants from the body of an answer.
type DecodeBody<'a> = &'a mut dyn FnMut(&[u8]) -> std::result::Result<(), Malformed>;

/// The failure of a call, as the server answers it.
pub(crate) enum CallFailure {
    /// The call failed.
    Error(Error),
    /// The server does not know the open file; the call was not applied.
    UnknownHandle,
}

impl Channel {
    /// Sends a call and waits for its answer; over reconnections, if need be. Its data and buffer are taken
    /// out of `ask`. The buffer to read into comes back with a failure too.
    pub(crate) async fn call<T>(
        &self,
        ask: &mut OutgoingCall<'_>,
        decode: impl Fn(&[u8]) -> std::result::Result<T, Malformed>,
    ) -> std::result::Result<CallAnswer<T>, (CallFailure, Option<BufMut>)> {
        let waited = self.wait(ask).await?;
        let mut value = None;
        let AnswerRest { made, data, change } = self.finish(waited, &mut |body| {
            value = Some(decode(body)?);
            Ok(())
        })?;
        Ok(CallAnswer { value: value.expect("decoded, or it failed"), data, made, change })
    }

    /// Sends a call and waits for what comes of it. All of a call that its result's type has no
    /// part in is here and in [`Channel::finish`], so that it is compiled once.
    async fn wait(
        &self,
        ask: &mut OutgoingCall<'_>,
    ) -> std::result::Result<WaitOutcome, (CallFailure, Option<BufMut>)> {
        let cx = ask.cx;
        let limit = self.limit_of(ask);
        let began = limit.map(|limit| (limit, ask.began.unwrap_or_else(now)));
        let lock = match ask.traits.session {
            SessionChange::Locks { handle, waits_for } => waits_for.map(|lock| (handle, lock)),
            SessionChange::None
            | SessionChange::Opens(_)
            | SessionChange::Reopens(_)
            | SessionChange::Closes(_) => None,
        };
        let tag = match self.begin(ask, limit).await {
            Ok(tag) => tag,
            Err(error) => return Err((CallFailure::Error(error), ask.into.take())),
        };
        let mark = began.map(|(limit, _)| (self.mark(), limit));
        let mut guard = CallGuard::new(self, tag, lock.is_some());
        let late = match (began, lock) {
            (None, _) => {
                poll_fn(|task| guard.poll(cx, task)).await;
                false
            }
            (Some((limit, _)), Some(lock)) => {
                self.is_away_before(&mut guard, cx, lock, limit).await
            }
            // A server that is there but does not answer counts as away, too.
            (Some((limit, began)), None) => {
                let answered = poll_fn(|task| guard.poll(cx, task));
                timeout(limit.saturating_sub(began.elapsed()), answered).await.is_err()
            }
        };
        guard.end();
        Ok(WaitOutcome { tag, late: mark.filter(|_| late) })
    }

    /// How long a call may take at a server that is there.
    fn limit_of(&self, ask: &OutgoingCall<'_>) -> Option<Duration> {
        self.timeout.filter(|_| !ask.patient)
    }

    /// Sends the call once there is a tag for it. Tags of calls that nobody answers are not
    /// free again, so that this has its limit, too.
    async fn begin(&self, ask: &mut OutgoingCall<'_>, limit: Option<Duration>) -> Result<u32> {
        let (cx, class, waited) =
            (ask.cx, ask.class(), ask.began.map_or(Duration::ZERO, |began| began.elapsed()));
        let mut session = None;
        let mut place = TagWait { channel: self, class, number: None };
        let begun = poll_fn(|task| {
            let mut state = self.lock();
            if let Some(error) = state.refusal(self.timeout) {
                return Poll::Ready(Err(error));
            }
            let session = *session.get_or_insert(state.session);
            if let Some(tag) = state.take_tag(class, &mut place.number) {
                self.send_first(&mut state, tag, ask, session);
                return Poll::Ready(Ok(tag));
            }
            state.tags.wait(class, &mut place.number, task.waker());
            drop(state);
            if cx.cancel.as_ref().is_some_and(|cancel| cancel.poll_set(task)) {
                return Poll::Ready(Err(Error::retry(Errno::EINTR)));
            }
            Poll::Pending
        });
        match limit {
            None => begun.await,
            Some(limit) => {
                timeout(limit.saturating_sub(waited), begun).await.unwrap_or_else(|_| {
                    let late = Error::retry(Errno::EHOSTDOWN);
                    Err(late.because("the server did not answer within the mount's timeout"))
                })
            }
        }
    }

    /// `session`: the one in which it was begun.
    fn send_first(&self, state: &mut State, tag: u32, ask: &mut OutgoingCall<'_>, session: u64) {
        ask.flags |= if self.replays { CallHead::RECOVERY } else { 0 };
        let ChangeNotes { rights, leases } = &self.notes;
        let changing = ask.traits.takes_rights.then(|| rights.change());
        let files = [ask.file, ask.to.map(|to| to.id)];
        let change = ask.traits.changes.then(|| leases.own_change(ask.call, files)).flatten();
        let sent = leases.sent();
        let leases_change = ask.traits.leases_change;
        state.ask(tag, ask, session);
        let pending = &mut state.calls[tag as usize];
        (pending.changing, pending.change, pending.sent) = (changing, change, sent);
        pending.leases_change = leases_change;
    }

    /// The outcome of the call. The body of its answer is given to `decode`.
    fn finish(
        &self,
        waited: WaitOutcome,
        decode: DecodeBody<'_>,
    ) -> std::result::Result<AnswerRest, (CallFailure, Option<BufMut>)> {
        let outcome = self.take_answer(waited.tag, waited.late.is_some(), decode);
        if let Some((mark, limit)) = waited.late {
            self.end_if_silent(mark, limit);
        }
        outcome
    }

    /// Gives the tag back, too, unless an answer may still come. `late`: its time is up.
    fn take_answer(
        &self,
        tag: u32,
        late: bool,
        decode: DecodeBody<'_>,
    ) -> std::result::Result<AnswerRest, (CallFailure, Option<BufMut>)> {
        let mut state = self.lock();
        let Some(pending) = state.calls.get_mut(tag as usize) else {
            return Err((CallFailure::Error(Error::unknown(Errno::EIO)), None));
        };
        let into = pending.into.take();
        let outcome = match pending.phase {
            Phase::Answered => {
                let head = pending.reply_head.take();
                read_reply(head, &pending.results, pending.answerer, decode)
            }
            Phase::Unsent => Err(CallFailure::UnknownHandle),
            Phase::Failed(errno) => Err(CallFailure::Error(Error::unknown(errno))),
            // Interrupted, or too late: the answer may still come, and finds nobody.
            Phase::Free | Phase::Asked | Phase::Abandoned => {
                pending.abandon();
                if pending.opens != 0 {
                    pending.noted = self.closing.note_unwanted(pending.opens);
                }
                // A server that does not read must not keep a killed caller's memory.
                let data = pending.data.take();
                if let Some((connection, data)) = state.connection.as_ref().zip(data) {
                    connection.let_go(&data);
                }
                let errno = if late { Errno::EHOSTDOWN } else { Errno::EINTR };
                return Err((CallFailure::Error(Error::unknown(errno)), into));
            }
        };
        let is_answered = pending.phase == Phase::Answered;
        let change = pending.change.take_if(|_| is_answered).map(Box::new);
        state.let_go(tag);
        let unwanted = state.opened_in_vain(tag);
        state.release(tag);
        drop(state);
        if unwanted.handle != 0
            && let Some(channel) = self.me.upgrade()
        {
            channel.close_unwanted(unwanted);
        }
        match outcome {
            Ok(made) => Ok(AnswerRest { made, data: into, change }),
            Err(failure) => Err((failure, into)),
        }
    }
}

/// `head`: none that was understood.
fn read_reply(
    head: Option<ReplyHead>,
    results: &[u8],
    epoch: ConnectionEpoch,
    decode: DecodeBody<'_>,
) -> std::result::Result<ReplyInfo, CallFailure> {
    let malformed =
        || CallFailure::Error(Error::unknown(Errno::EPROTO).because("malformed answer"));
    let head = head.ok_or_else(malformed)?;
    if head.unknown_handle {
        return Err(CallFailure::UnknownHandle);
    }
    if let Some(error) = head.error() {
        return Err(CallFailure::Error(error));
    }
    decode(results).map_err(|_| malformed())?;
    let ReplyHead { times_past, ticket, stamp, write_lease, .. } = head;
    let ConnectionEpoch { power_epoch, session_state, .. } = epoch;
    let made = ReplyInfo {
        power_epoch,
        session_state,
        times_past,
        ticket,
        write_lease,
        ..ReplyInfo::default()
    };
    Ok(match stamp {
        Some(Stamp { number, at }) => {
            ReplyInfo { stamp: number, at: (at != Stamp::NOWHERE).then_some(at), ..made }
        }
        None => made,
    })
}

/// For callers that have no buffer to lose.
pub(crate) fn error_of((failure, _): (CallFailure, Option<BufMut>)) -> Error {
    match failure {
        CallFailure::Error(error) => error,
        CallFailure::UnknownHandle => {
            Error::new(Errno::ESTALE).because("the server lost an open file")
        }
    }
}

/// Shorthand for results.
pub(crate) fn value_of<T>(
    result: std::result::Result<CallAnswer<T>, (CallFailure, Option<BufMut>)>,
) -> Result<T> {
    result.map(|answer| answer.value).map_err(error_of)
}

#[cfg(test)]
mod tests {
    use dray_core::OpenHow;

    use super::*;

    /// A write that found its file closed after a death of the server. The server holds reads until
    /// the write has come, so the file must be opened again before those reads.
    // proves: P86
    #[test]
    fn opening_again_does_not_wait_behind_reads() {
        let (cx, id, how) = (Context::system(), FileId { ino: 1, generation: 1 }, OpenHow::READ);
        let class = |call: Call<'_>| OutgoingCall::of(&cx, &call).class();
        let ticket = Ticket([0; Ticket::BYTES]);
        assert_eq!(class(Call::Reopen { id, how, handle: 1, ticket }), TagClass::Needed);
        assert_eq!(class(Call::Open { id, how, handle: 1, again: true }), TagClass::Needed);
        assert_eq!(class(Call::Open { id, how, handle: 1, again: false }), TagClass::Plain);
        assert_eq!(class(Call::Read { handle: 1, at: 0, len_bytes: 1 }), TagClass::Plain);
    }
}
