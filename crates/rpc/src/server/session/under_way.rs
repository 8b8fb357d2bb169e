//! Changes of a session while they are under way. A change from a connection that is gone must not
//! undo what its client asked for on the next one.

use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};

use super::ServerSession;

/// A call in no slot that changes something, while it is under way.
pub(crate) struct UnslottedCall<'a> {
    session: &'a ServerSession,
    connection: u64,
}

/// A change in a slot, while it is under way.
pub(crate) struct SlottedChange<'a> {
    session: &'a ServerSession,
    /// The number of the file that it opens.
    opens: Option<u64>,
}

/// In [`ServerSession::carried`]: the session is over.
const OVER: u64 = 1 << 63;

/// A change while it is carried out: before its end nothing is given back of what its session had.
pub(crate) struct ChangeExecution<'a>(&'a ServerSession);

impl Drop for ChangeExecution<'_> {
    fn drop(&mut self) {
        if self.0.carried.fetch_sub(1, Ordering::SeqCst) == OVER + 1 {
            let waiting = std::mem::take(&mut self.0.state().waiting);
            waiting.into_iter().for_each(Waker::wake);
        }
    }
}

impl Drop for SlottedChange<'_> {
    fn drop(&mut self) {
        let Some(handle) = self.opens else { return };
        let mut state = self.session.state();
        if let Some(count) = state.opening.get_mut(&handle) {
            *count -= 1;
            if *count == 0 {
                state.opening.remove(&handle);
            }
        }
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl Drop for UnslottedCall<'_> {
    fn drop(&mut self) {
        let mut state = self.session.state();
        if let Some(count) = state.unslotted.get_mut(&self.connection) {
            *count -= 1;
            if *count == 0 {
                state.unslotted.remove(&self.connection);
            }
        }
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl ServerSession {
    /// Begins to carry out a change. None: the session is over, and others may have its locks.
    pub(crate) fn carry(&self) -> Option<ChangeExecution<'_>> {
        let before = self.carried.fetch_add(1, Ordering::SeqCst);
        let carried = ChangeExecution(self);
        (before & OVER == 0).then_some(carried)
    }

    /// No change is carried out any more that has not been begun. Ends when the changes that are
    /// under way have ended. No change of an evicted client may come behind what others do under
    /// the locks that the client had.
    pub(crate) async fn carried_out(&self) {
        std::future::poll_fn(|task| {
            let mut state = self.state();
            if self.carried.load(Ordering::SeqCst) == OVER {
                return Poll::Ready(());
            }
            state.waiting.push(task.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// See [`ServerSession::carried_out`].
    pub(super) fn carries_no_more(&self) {
        self.carried.fetch_or(OVER, Ordering::SeqCst);
    }

    /// Waits until no call without a slot, such as an unlock, is under way from a connection that
    /// is gone. Its client has asked again on this connection, and the first call must not undo
    /// what comes after. Ends with the answer. None: this connection is gone itself, and whatever
    /// had come by it and was not begun must not be.
    ///
    /// A call that `closes` an open file waits for calls that still open it, too. Such calls came
    /// by a connection that is gone, and nobody waits for them any more.
    pub(crate) async fn unslotted(
        &self,
        connection: u64,
        closes: Option<u64>,
    ) -> Option<UnslottedCall<'_>> {
        let is_current = std::future::poll_fn(|task| {
            let mut state = self.state();
            let gone =
                |number: &u64| *number != connection && !state.connections.contains_key(number);
            let opening = closes.is_some_and(|handle| state.opening.contains_key(&handle));
            if opening || state.unslotted.keys().any(gone) {
                state.waiting.push(task.waker().clone());
                return Poll::Pending;
            }
            let is_current = state.connections.contains_key(&connection);
            if is_current {
                *state.unslotted.entry(connection).or_default() += 1;
            }
            Poll::Ready(is_current)
        });
        is_current.await.then_some(UnslottedCall { session: self, connection })
    }

    /// Begins a change in a slot that came by this connection, and `opens` a file under this
    /// number. None: the connection is gone, and the change has been asked for again, or nobody
    /// wants it any more.
    pub(crate) fn slotted(&self, connection: u64, opens: Option<u64>) -> Option<SlottedChange<'_>> {
        let mut state = self.state();
        if !state.connections.contains_key(&connection) {
            return None;
        }
        if let Some(handle) = opens {
            *state.opening.entry(handle).or_default() += 1;
        }
        Some(SlottedChange { session: self, opens })
    }
}
