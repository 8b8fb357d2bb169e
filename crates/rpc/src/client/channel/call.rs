//! One call, from its question to its answer.

use std::future::poll_fn;
use std::task::Poll;

use dray_core::{Buf, BufMut, Context, Errno, Error, Result};
use dray_rt::timeout;

use super::waiting::CallGuard;
use super::{Channel, Life, Phase};
use crate::client::file::RemoteFile;
use crate::client::link::Standing;
use crate::wire::{Call, CallHead, Input, ReplyHead, Stamp, Ticket};

/// Everything about one call but its result's type.
pub(crate) struct Ask<'a> {
    pub(crate) cx: &'a Context,
    pub(crate) call: &'a Call<'a>,
    /// Replay slot and sequence.
    pub(crate) slot: Option<(u32, u32)>,
    pub(crate) request: u64,
    pub(crate) data: Option<Buf>,
    pub(crate) into: Option<BufMut>,
    /// A second open file that the call names.
    pub(crate) to: Option<&'a RemoteFile>,
    /// Bits for [`CallHead`].
    pub(crate) flags: u16,
}

impl<'a> Ask<'a> {
    /// In no slot, without data, and of no request of the front end.
    pub(crate) fn of(cx: &'a Context, call: &'a Call<'a>) -> Ask<'a> {
        let (slot, data, into, to) = (None, None, None, None);
        Ask { cx, call, slot, request: 0, data, into, to, flags: 0 }
    }

    /// Whether the server may make others wait until it has got this: a change keeps its
    /// place among the changes, and reads wait behind one that was cut short; files that are
    /// opened again, closes and locks that are given back come before what waits for them.
    pub(super) fn is_needed(&self) -> bool {
        let call = matches!(
            self.call,
            Call::Open { again: true, .. } | Call::Close { .. } | Call::Lock { wait: false, .. }
        );
        call || self.slot.is_some()
    }
}

/// An answer: what it says, and the buffer given for data.
pub(crate) struct Answer<T> {
    pub(crate) value: T,
    pub(crate) data: Option<BufMut>,
    pub(crate) made: Made,
}

/// When a change was made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Made {
    /// Its stamp; 0 from a server that gives none.
    pub(crate) stamp: u64,
    /// Where a write went, where that is known.
    pub(crate) at: Option<u64>,
    /// In which life of the server's machine.
    pub(crate) epoch: u64,
    /// In which session with which process.
    pub(crate) standing: Standing,
    /// What can be shown to a later life of the server: of an opening the file, of a sync
    /// what is on media.
    pub(crate) ticket: Option<Ticket>,
}

/// What the server says of a call.
pub(crate) enum Failure {
    /// It failed.
    Error(Error),
    /// The server does not know the open file; the call was not applied.
    UnknownHandle,
}

impl Channel {
    /// Sends a call and waits for its answer; over reconnections, if need be. The
    /// buffer to read into comes back with a failure too.
    pub(crate) async fn call<T>(
        &self,
        ask: Ask<'_>,
        decode: impl FnOnce(&[u8]) -> std::result::Result<T, crate::wire::Malformed>,
    ) -> std::result::Result<Answer<T>, (Failure, Option<BufMut>)> {
        let cx = ask.cx;
        // A lock may be waited for as long as its holder likes.
        let waits = matches!(ask.call, Call::Lock { wait: true, .. });
        let tag = match self.begin(ask).await {
            Ok(tag) => tag,
            Err((error, into)) => return Err((Failure::Error(error), into)),
        };
        let mut guard = CallGuard::new(self, tag, waits);
        match self.timeout.filter(|_| !waits) {
            None => poll_fn(|task| guard.poll(cx, task)).await,
            // A server that is there but does not answer counts as away, too.
            Some(limit) => {
                if timeout(limit, poll_fn(|task| guard.poll(cx, task))).await.is_err() {
                    self.give_up(tag);
                }
            }
        }
        std::mem::forget(guard); // the tag may be another call's as soon as this one is done
        self.finish(tag, decode)
    }

    async fn begin(&self, ask: Ask<'_>) -> std::result::Result<u32, (Error, Option<BufMut>)> {
        let mut ask = Some(ask);
        poll_fn(|task| {
            let mut state = self.lock();
            let context = ask.as_ref().expect("given until it is ready").cx;
            if let Some(error) = state.refusal(self.timeout) {
                let into = ask.take().and_then(|ask| ask.into);
                return Poll::Ready(Err((error, into)));
            }
            let needed = ask.as_ref().is_some_and(Ask::is_needed);
            if let Some(tag) = state.take_tag(needed) {
                let mut ask = ask.take().expect("given until it is ready");
                ask.flags |= if self.recovery { CallHead::RECOVERY } else { 0 };
                let changing = ask.call.changes_rights().map(|_| self.rights.change());
                state.ask(tag, ask);
                state.calls[tag as usize].changing = changing;
                return Poll::Ready(Ok(tag));
            }
            state.wait_for_tag(needed, task.waker());
            drop(state);
            if context.cancel.as_ref().is_some_and(|cancel| cancel.poll_set(task)) {
                let into = ask.take().and_then(|ask| ask.into);
                return Poll::Ready(Err((Error::retry(Errno::EINTR), into)));
            }
            Poll::Pending
        })
        .await
    }

    /// The server has not answered for too long.
    fn give_up(&self, tag: u32) {
        let mut state = self.lock();
        if let Some(pending) = state.calls.get_mut(tag as usize)
            && pending.phase == Phase::Asked
        {
            pending.phase = Phase::TimedOut;
        }
    }

    fn finish<T>(
        &self,
        tag: u32,
        decode: impl FnOnce(&[u8]) -> std::result::Result<T, crate::wire::Malformed>,
    ) -> std::result::Result<Answer<T>, (Failure, Option<BufMut>)> {
        let mut state = self.lock();
        let Some(pending) = state.calls.get_mut(tag as usize) else {
            return Err((Failure::Error(Error::unknown(Errno::EIO)), None));
        };
        let into = pending.into.take();
        let outcome = match pending.phase {
            Phase::Answered => read_reply(&pending.reply, pending.answerer, decode),
            Phase::Failed(errno) => Err(Failure::Error(Error::unknown(errno))),
            // Interrupted: the answer may still come, and finds nobody.
            phase => {
                let late = phase == Phase::TimedOut;
                pending.phase = Phase::Abandoned;
                pending.data = None;
                let errno = if late { Errno::EHOSTDOWN } else { Errno::EINTR };
                return Err((Failure::Error(Error::unknown(errno)), into));
            }
        };
        state.release(tag);
        match outcome {
            Ok((value, made)) => Ok(Answer { value, data: into, made }),
            Err(failure) => Err((failure, into)),
        }
    }
}

fn read_reply<T>(
    message: &[u8],
    life: Life,
    decode: impl FnOnce(&[u8]) -> std::result::Result<T, crate::wire::Malformed>,
) -> std::result::Result<(T, Made), Failure> {
    let mut input = Input(message);
    let malformed = |_| Failure::Error(Error::unknown(Errno::EPROTO).because("malformed answer"));
    let head = ReplyHead::get_message(&mut input).map_err(malformed)?;
    if head.flags & ReplyHead::UNKNOWN_HANDLE != 0 {
        return Err(Failure::UnknownHandle);
    }
    if let Some(error) = head.error() {
        return Err(Failure::Error(error));
    }
    let mut made = Made { epoch: life.epoch, standing: life.standing, ..Made::default() };
    if head.flags & ReplyHead::STAMPED != 0 {
        let Stamp { number, at } = input.get().map_err(malformed)?;
        (made.stamp, made.at) = (number, (at != Stamp::NOWHERE).then_some(at));
    }
    if head.flags & ReplyHead::TICKET != 0 {
        made.ticket = Some(input.get().map_err(malformed)?);
    }
    decode(input.0).map(|value| (value, made)).map_err(malformed)
}

/// For callers that have no buffer to lose.
pub(crate) fn error_of((failure, _): (Failure, Option<BufMut>)) -> Error {
    match failure {
        Failure::Error(error) => error,
        Failure::UnknownHandle => Error::new(Errno::ESTALE).because("the server lost an open file"),
    }
}

/// Shorthand for results.
pub(crate) fn value_of<T>(
    result: std::result::Result<Answer<T>, (Failure, Option<BufMut>)>,
) -> Result<T> {
    result.map(|answer| answer.value).map_err(error_of)
}
