//! How calls wait for a tag and for an answer, and what happens when the caller gives up.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use dray_core::Context;
use dray_fabric::Connection;
use dray_rt::{Sleep, sleep};

use super::pending::PendingCall;
use super::tags::TagClass;
use super::{Channel, Phase};
use crate::wire::NotifyHead;

/// How long a server may take to answer a lock call that was cancelled. A server that takes longer
/// has a file system that hangs.
const GIVE_UP_MAX: Duration = Duration::from_secs(2);

/// The place of a call that waits for a tag; free for the next when it is dropped.
pub(super) struct TagWait<'a> {
    pub(super) channel: &'a Channel,
    pub(super) class: TagClass,
    /// The call's number in the queue; none: the call is not in it.
    pub(super) number: Option<u64>,
}

impl Drop for TagWait<'_> {
    fn drop(&mut self) {
        if self.number.is_some() {
            self.channel.lock().tags.leave(self.class, &mut self.number);
        }
    }
}

/// A lock is waited for at the server, until this is dropped.
pub(crate) struct LockWait(Arc<Channel>);

impl Channel {
    /// Whether another lock may be waited for at the server: not if that took the calls that
    /// the locks' holders have to make.
    pub(crate) fn begin_lock_wait(self: Arc<Channel>) -> Option<LockWait> {
        let begins = self.lock().tags.lock_wait_begins();
        begins.then(|| LockWait(self))
    }
}

impl Channel {
    /// Waits until no abandoned lock call through `handle` is under way. Then the server has
    /// answered the call, or never begins it: another connection has taken the place of the call's
    /// own.
    pub(crate) async fn locks_settled(&self, handle: u64) {
        poll_fn(|task| {
            let mut state = self.lock();
            let left = |call: &PendingCall| call.locks == handle && call.phase == Phase::Abandoned;
            if state.ended.is_some() || !state.calls.iter().any(left) {
                return Poll::Ready(());
            }
            state.unsettled.push(task.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Drop for LockWait {
    fn drop(&mut self) {
        self.0.lock().tags.lock_wait_ends();
    }
}

/// Waits for an answer. If it is dropped before, the tag stays out of use until there is
/// one.
pub(super) struct CallGuard<'a> {
    channel: &'a Channel,
    tag: u32,
    /// The connection, counted, over which the server was notified that the caller gives up,
    /// and until when its answer is awaited.
    notified: Option<(u64, Pin<Box<Sleep>>)>,
    /// The call waits for a lock.
    waits: bool,
    /// The wait is over, and the tag in others' hands.
    over: bool,
}

impl<'a> CallGuard<'a> {
    pub(super) fn new(channel: &'a Channel, tag: u32, waits: bool) -> CallGuard<'a> {
        CallGuard { channel, tag, notified: None, waits, over: false }
    }

    /// The wait is over: the tag may be another call's as soon as this one is done with it.
    pub(super) fn end(mut self) {
        self.over = true;
    }

    pub(super) fn poll(&mut self, cx: &Context, task: &mut TaskContext<'_>) -> Poll<()> {
        let mut state = self.channel.lock();
        let asked_as = state.calls[self.tag as usize].number;
        let connection = state.connection.clone().filter(|_| !state.waits_for_closes(asked_as));
        let number = state.stats.connections;
        let pending = &mut state.calls[self.tag as usize];
        if pending.phase != Phase::Asked {
            return Poll::Ready(());
        }
        match &mut pending.waker {
            Some(waker) => waker.clone_from(task.waker()),
            none => *none = Some(task.waker().clone()),
        }
        drop(state);
        if !cx.cancel.as_ref().is_some_and(|cancel| cancel.poll_set(task)) {
            return Poll::Pending;
        }
        // The caller gives up. The answer to a lock is awaited all the same, since only the server
        // knows whether the lock was granted. Other callers are being killed, and need not know.
        match connection.filter(|_| self.waits) {
            Some(connection) => self.poll_given_up(&*connection, number, task),
            None => Poll::Ready(()),
        }
    }

    /// Notifies the server, once on each connection, that the caller gives up, and waits for its
    /// answer; not for ever. `number`: the connection's, counted.
    fn poll_given_up(
        &mut self,
        connection: &dyn Connection,
        number: u64,
        task: &mut TaskContext<'_>,
    ) -> Poll<()> {
        if self.notified.as_ref().is_none_or(|(notified, _)| *notified != number) {
            let mut message = Vec::new();
            NotifyHead { what: NotifyHead::CANCEL, flags: 0, tag: self.tag }
                .put_message(&mut message);
            let _ = connection.send(&message, None);
            self.notified = Some((number, Box::pin(sleep(GIVE_UP_MAX))));
        }
        let late =
            self.notified.as_mut().is_some_and(|(_, until)| until.as_mut().poll(task).is_ready());
        if late {
            // The end of the connection is the first thing that such a server hears of when it goes
            // on. The server then gives up all waits of that connection. Everything else that was
            // asked for here is asked for again on the next one.
            connection.close();
        }
        if late { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let mut state = self.channel.lock();
        let pending = &mut state.calls[self.tag as usize];
        match pending.phase {
            Phase::Asked => {
                pending.abandon();
                pending.waker = None;
                pending.data = None;
                pending.into = None;
            }
            Phase::Answered | Phase::Failed(_) | Phase::Unsent => state.release(self.tag),
            Phase::Free | Phase::Abandoned => {}
        }
    }
}
