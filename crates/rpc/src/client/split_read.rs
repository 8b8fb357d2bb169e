//! Split reads: a large read in two parts, each on a connection of its own. Two threads at each end
//! move and copy the data at the same time (docs/adr/0023-split-reads.md).
//!
//! The server says of which version of the file it read each part. If both are of one version, a
//! single read would have seen the same. If not, the file is read again in one piece.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use dray_core::{BufMut, Context, Error, Fate, Io, Op};

use crate::client::adaptive_choice::ReadMode;
use crate::client::channel::{CallAnswer, CallFailure, Channel, OutgoingCall};
use crate::client::file::RemoteFile;
use crate::wire::{Call, CallHead, Input};

/// Parts begin at a page of the file and of the buffer, if there are as many bytes.
const ALIGN_BYTES: usize = 4096;

/// The outcome of a split read.
pub(crate) enum SplitRead {
    /// The data, as if read at once.
    Read(BufMut),
    /// The range has to be read in one piece, into this.
    ToRead(BufMut),
}

type Outcome = std::result::Result<CallAnswer<()>, (CallFailure, Option<BufMut>)>;

impl RemoteFile {
    /// Reads in the way that has been faster lately, if the mount does nothing else.
    pub(super) async fn read_large(&self, cx: &Context, at: u64, into: BufMut) -> Io<BufMut> {
        let session = &self.session;
        let other = session.link.server().split_reads.then(|| session.resting_channel());
        let Some(other) = other.flatten() else { return self.read_whole(cx, at, into).await };
        let (way, began) = (session.read_choice.choose(), dray_rt::now());
        let read = match way {
            ReadMode::Whole => self.read_whole(cx, at, into).await,
            ReadMode::Split => match self.read_split(cx, at, into, &other).await? {
                SplitRead::Read(read) => {
                    session.link.leases.was_read(self.id);
                    Ok(read)
                }
                SplitRead::ToRead(into) => self.read_whole(cx, at, into).await,
            },
        };
        if let Ok(read) = &read
            && read.len() >= session.link.options.split_min_bytes as usize
        {
            session.read_choice.took(way, read.len(), began.elapsed());
        }
        read
    }

    async fn read_split(
        &self,
        cx: &Context,
        at: u64,
        mut into: BufMut,
        other: &Channel,
    ) -> std::result::Result<SplitRead, (Error, BufMut)> {
        let room = into.room().min(dray_core::IO_MAX_BYTES);
        let half = if room >= 2 * ALIGN_BYTES { (room / 2) & !(ALIGN_BYTES - 1) } else { room / 2 };
        let mut rest = into.split_off(half);
        let beyond = rest.split_off(room - half);
        let handle = self.handle;
        let call = |at, len_bytes: usize| Call::Read { handle, at, len_bytes: len_bytes as u32 };
        let (first, second) = (call(at, half), call(at.saturating_add(half as u64), room - half));
        let (first, second) = both(
            self.call(&mut self.half(cx, &first, into, 0)),
            other.call(&mut self.half(cx, &second, rest, CallHead::REST), |bytes| {
                Input::whole(bytes)
            }),
        )
        .await;
        join(first, second, (half, room), beyond)
    }

    fn half<'a>(
        &self,
        cx: &'a Context,
        call: &'a Call<'a>,
        into: BufMut,
        which: u16,
    ) -> OutgoingCall<'a> {
        let (request, flags) = (self.session.link.request_of(cx), CallHead::SPLIT_READ | which);
        OutgoingCall {
            request,
            into: Some(into),
            flags,
            looked_at: true,
            ..OutgoingCall::of(cx, call)
        }
    }
}

/// Joins the two parts, the first of `half` bytes, both of `room`.
fn join(
    first: Outcome,
    second: Outcome,
    (half, room): (usize, usize),
    beyond: BufMut,
) -> std::result::Result<SplitRead, (Error, BufMut)> {
    let version = |outcome: &Outcome| outcome.as_ref().ok().map(|answer| answer.made.stamp);
    let versions = (version(&first), version(&second));
    let (left, failed) = taken_apart(first);
    let (right, failed_right) = taken_apart(second);
    // An error that the file system below gives for one half, it gives for the whole, too, or the
    // whole has less to read. A failure of the calls is a failure of the read.
    let fatal = |error: &Error| error.fate() != Fate::Final;
    let failed = failed.into_iter().chain(failed_right).find(fatal);
    let fits =
        |left: &BufMut, right: &BufMut| left.is_followed_by(right) && right.is_followed_by(&beyond);
    let (mut left, mut right) = match (left, right) {
        (Some(left), Some(right)) if fits(&left, &right) => (left, right),
        // A connection broke while data came, and took that part of the buffer with it.
        _ => {
            return match failed {
                Some(error) => Err((error.during(Op::Read), BufMut::heap(0))),
                None => Ok(SplitRead::ToRead(BufMut::heap(room))),
            };
        }
    };
    let counts = (left.filled().len(), right.filled().len());
    let agree = versions.0.is_some_and(|version| version != 0)
        && versions.0 == versions.1
        && (counts.0 == half || counts.1 == 0);
    if !agree {
        left.clear();
    }
    right.rejoin(beyond);
    left.rejoin(right);
    match failed {
        Some(error) => Err((error.during(Op::Read), left)),
        None if agree => Ok(SplitRead::Read(left)),
        None => Ok(SplitRead::ToRead(left)),
    }
}

/// The buffer, and why it is not filled. That the server has lost the file is no failure:
/// the read in one piece opens it again.
fn taken_apart(outcome: Outcome) -> (Option<BufMut>, Option<Error>) {
    match outcome {
        Ok(answer) => (answer.data, None),
        Err((CallFailure::Error(error), into)) => (into, Some(error)),
        Err((CallFailure::UnknownHandle, into)) => (into, None),
    }
}

/// Waits for both; the second is begun first, because another thread works at it.
async fn both<A, B>(first: impl Future<Output = A>, second: impl Future<Output = B>) -> (A, B) {
    let (mut first, mut second) = (pin!(first), pin!(second));
    let (mut one, mut two) = (None, None);
    poll_fn(|task| {
        if two.is_none()
            && let Poll::Ready(value) = second.as_mut().poll(task)
        {
            two = Some(value);
        }
        if one.is_none()
            && let Poll::Ready(value) = first.as_mut().poll(task)
        {
            one = Some(value);
        }
        match (one.take(), two.take()) {
            (Some(value), Some(other)) => Poll::Ready((value, other)),
            (value, other) => {
                (one, two) = (value, other);
                Poll::Pending
            }
        }
    })
    .await
}
