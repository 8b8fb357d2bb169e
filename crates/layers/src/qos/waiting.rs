//! A call that waits for its turn.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

use dray_core::{Context, Grant, Result};

use super::gate::Gate;
use super::tree::WaiterNumber;

/// A call that waits.
pub(super) struct Waiting {
    pub(super) gate: Arc<Gate>,
    /// None: it has its grant.
    pub(super) ticket: Option<WaiterNumber>,
    pub(super) cx: Context,
}

impl Future for Waiting {
    type Output = Result<Grant>;

    fn poll(mut self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<Result<Grant>> {
        let Some(ticket) = self.ticket else { return Poll::Ready(Ok(Grant::NONE)) };
        let mut state = self.gate.lock();
        let Some(call) = &mut state.waiting[ticket as usize] else {
            return Poll::Ready(Ok(Grant::NONE));
        };
        if let Some(grant) = call.grant {
            state.remove(ticket);
            drop(state);
            self.ticket = None;
            return Poll::Ready(Ok(grant));
        }
        match &mut call.waker {
            Some(waker) => waker.clone_from(task.waker()),
            none => *none = Some(task.waker().clone()),
        }
        drop(state);
        self.cx.poll_cancelled(task).map(Err) // it gives up when it is dropped
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.gate.give_up(ticket);
        }
    }
}
