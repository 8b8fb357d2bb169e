//! A server that is connected and says nothing. Its process is stopped, or the network loses
//! everything and the connection has not broken yet.
//!
//! Each call has its limit (`timeout=`). But while the connection counts as good, the next call
//! waits as long again. A path of several components would wait for many times the limit. So would
//! processes whose lookups of one name the kernel makes one after the other. Therefore the first
//! late call during which nothing was received ends the connection. A live server welcomes the next
//! connection. If none does, the server is away.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use dray_core::{Context, Fut, Lock};
use dray_fabric::Connection;
use dray_rt::{Instant, now, sleep};

use super::waiting::CallGuard;
use super::{Channel, OutgoingCall, State};
use crate::wire::{Call, NotifyHead};

/// How long a server has to welcome the connection after one on which it was silent, before
/// calls fail without waiting.
const WELCOME_MAX: Duration = Duration::from_secs(1);

/// The state of a channel's receiving when a call was sent.
#[derive(Clone, Copy)]
pub(super) struct ReceiveMark {
    heard: u64,
    at: Instant,
}

impl State {
    /// Something has come from the server.
    pub(super) fn hear(&mut self) {
        self.heard = self.heard.wrapping_add(1);
    }

    fn is_on(&self, connection: &Weak<dyn Connection>) -> bool {
        self.connection
            .as_ref()
            .is_some_and(|on| std::ptr::addr_eq(Arc::as_ptr(on), connection.as_ptr()))
    }

    /// Since when the server is away, now that the connection has gone.
    pub(super) fn away_since(&mut self) -> Instant {
        self.silent_since.take().unwrap_or_else(now)
    }
}

/// For a server whose part another one may take over: whether it is there, whatever it is asked for.
impl Channel {
    /// Waits until a call is to be answered on `connection`. False: that is not the channel's any more.
    pub(crate) async fn is_awaited_on(&self, connection: &Weak<dyn Connection>) -> bool {
        poll_fn(|task| {
            let mut state = self.lock();
            if !state.is_on(connection) {
                return Poll::Ready(false);
            }
            if !state.tags.are_all_free() {
                return Poll::Ready(true);
            }
            state.watcher = Some(task.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Whether the channel has this connection still.
    pub(crate) fn is_on(&self, connection: &Weak<dyn Connection>) -> bool {
        self.lock().is_on(connection)
    }

    /// How often something has come from the server.
    pub(crate) fn heard(&self) -> u64 {
        self.lock().heard
    }

    /// Something has come that answers no call.
    pub(crate) fn hear(&self) {
        self.lock().hear();
    }

    /// Asks the server whether it is there: that is [heard](Channel::heard).
    pub(crate) fn probe(&self, connection: &Weak<dyn Connection>) {
        let Some(connection) = connection.upgrade() else { return };
        let mut message = Vec::new();
        NotifyHead { what: NotifyHead::PROBE, flags: 0, tag: 0 }.put_message(&mut message);
        let _ = connection.notify(&message); // one that does not read is silent, too
        connection.flush();
    }

    /// Ends a connection whose server has been silent `since` then.
    pub(crate) fn end_silent(&self, connection: &Weak<dyn Connection>, since: Instant) {
        let mut state = self.lock();
        if state.is_on(connection) {
            state.silent_since = Some(since);
            drop(state);
            connection.upgrade().into_iter().for_each(|connection| connection.close());
        }
    }
}

impl Channel {
    pub(super) fn mark(&self) -> ReceiveMark {
        ReceiveMark { heard: self.lock().heard, at: now() }
    }

    /// A call that was sent at `mark` is late: ends the connection if nothing has been heard on it
    /// since. A call that spent most of its time in the queue says nothing about the server.
    pub(super) fn end_if_silent(&self, mark: ReceiveMark, limit: Duration) {
        let mut state = self.lock();
        if state.heard != mark.heard || mark.at.elapsed() < limit / 2 {
            return;
        }
        let Some(connection) = state.connection.clone() else { return };
        // The time spent counts as if the server had gone when so much of the limit was left.
        let spent = limit.saturating_sub(WELCOME_MAX).as_nanos() as u64;
        state.silent_since = Some(Instant::from_nanos(now().as_nanos().saturating_sub(spent)));
        let (home, channel) = (state.home.clone(), self.me.clone());
        drop(state);
        connection.close();
        let unwelcome = async move {
            sleep(WELCOME_MAX).await;
            if let Some(channel) = channel.upgrade() {
                channel.expire();
            }
        };
        if let Some(home) = home {
            home.spawn(unwelcome);
        }
    }

    /// Waits for a lock as long as its holder likes, at a server that answers: it is asked
    /// something else each `limit`. True if it is away.
    pub(super) async fn is_away_before(
        &self,
        answered: &mut CallGuard<'_>,
        cx: &Context,
        (handle, lock): (u64, Lock),
        limit: Duration,
    ) -> bool {
        let mut next = pin!(sleep(limit));
        let mut probe: Option<Fut<'_, bool>> = None;
        poll_fn(|task| {
            if answered.poll(cx, task).is_ready() {
                return Poll::Ready(false);
            }
            loop {
                let Some(asked) = &mut probe else {
                    if next.as_mut().poll(task).is_pending() {
                        return Poll::Pending;
                    }
                    if self.lock().refusal(self.timeout).is_some() {
                        return Poll::Ready(true);
                    }
                    probe = Some(self.answers(handle, lock));
                    continue;
                };
                let Poll::Ready(answers) = asked.as_mut().poll(task) else {
                    return Poll::Pending;
                };
                probe = None;
                next.set(sleep(if answers { limit } else { limit.min(WELCOME_MAX) }));
            }
        })
        .await
    }

    /// Whether the server answers anything, within a call's limit.
    fn answers(&self, handle: u64, lock: Lock) -> Fut<'_, bool> {
        Box::pin(async move {
            let (cx, call) = (Context::system(), Call::TestLock { handle, lock });
            let mark = self.mark();
            let asked = self.call(&mut OutgoingCall::of(&cx, &call), |_| Ok(())).await;
            asked.is_ok() || self.lock().heard != mark.heard
        })
    }
}
