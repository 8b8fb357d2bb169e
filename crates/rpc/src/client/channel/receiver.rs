//! Hands answers of the server to the calls that wait for them.

use std::io;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Waker};

use dray_core::BufMut;
use dray_fabric::Sink;

use super::{Channel, Phase};
use crate::wire::{Kind, ReplyHead, peek_tag};

/// Receives for a channel.
pub(crate) struct ReplyReceiver(pub(crate) Arc<Channel>);

impl Sink for ReplyReceiver {
    fn poll_place(
        &mut self,
        cx: &mut TaskContext<'_>,
        head: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        let tag = match peek_tag(head) {
            Ok(tag) => tag,
            Err(malformed) => return Poll::Ready(Err(malformed.into())),
        };
        let mut state = self.0.lock();
        state.hear(); // much data takes its time
        let pending = state.calls.get_mut(tag as usize);
        let into = pending.and_then(|pending| match pending.phase {
            Phase::Asked => {
                pending.receiver = Some(cx.waker().clone());
                pending.into.take()
            }
            _ => None,
        });
        match into {
            Some(into) if into.room() >= data_bytes => Poll::Ready(Ok(into)),
            // No caller waits for the data any more: they are dropped.
            None => Poll::Ready(Ok(BufMut::heap(data_bytes))),
            Some(_) => Poll::Ready(Err(io::Error::from_raw_os_error(libc::EMSGSIZE))),
        }
    }

    fn is_awaited(&self, head: &[u8]) -> bool {
        let Ok(tag) = peek_tag(head) else { return false };
        let state = self.0.lock();
        state.calls.get(tag as usize).is_some_and(|pending| pending.phase == Phase::Asked)
    }

    fn frame(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()> {
        match crate::wire::peek_kind(head)? {
            Kind::Reply => {}
            _ => return Err(crate::wire::Malformed("a message that only a client sends").into()),
        }
        let tag = peek_tag(head)?;
        let (mut reply_head, results) = ReplyHead::split(head).ok().unzip();
        let changed_files = reply_head.as_mut().map(|head| std::mem::take(&mut head.changed_files));
        let settled = reply_head.as_ref().is_some_and(|head| head.settled);
        let mut guard = self.0.lock();
        let state = &mut *guard;
        state.hear();
        let epoch = state.epoch;
        let Some(pending) = state.calls.get_mut(tag as usize) else {
            return Err(crate::wire::Malformed("an answer to a call that was not made").into());
        };
        if settled && matches!(pending.phase, Phase::Asked | Phase::Abandoned) {
            state.closes.settle(pending.number, &self.0.closing);
        }
        if let Some(sent) = pending.sent.take() {
            self.0.notes.leases.answered(sent);
        }
        // What the answer leases is taken in before the change is over.
        if let Some(change) = &pending.change {
            self.0.notes.leases.changed_files(change, changed_files.unwrap_or_default());
        }
        if !pending.leases_change || pending.phase != Phase::Asked {
            drop(pending.change.take());
        }
        match pending.phase {
            Phase::Asked => {
                pending.results.clear();
                pending.results.extend_from_slice(results.unwrap_or_default());
                pending.reply_head = reply_head;
                if data.is_some() {
                    (pending.into, pending.receiver) = (data, None);
                }
                pending.phase = Phase::Answered;
                pending.answerer = epoch;
                let waker = pending.waker.take();
                drop(guard);
                waker.into_iter().for_each(Waker::wake);
                Ok(())
            }
            Phase::Abandoned => {
                let (closed, unwanted) = (pending.closes, pending.take_unwanted());
                state.release(tag);
                let mut left = vec![];
                if closed != 0 {
                    state.closes.settle_one(closed, &self.0.closing);
                    left = state.close_was_answered();
                }
                drop(guard);
                left.into_iter().chain([unwanted]).for_each(|one| self.0.close_unwanted(one));
                Ok(())
            }
            _ => Err(crate::wire::Malformed("a second answer to a call").into()),
        }
    }
}
