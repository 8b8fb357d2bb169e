//! Bringing everything to media, for whoever asks: one sync at a time serves all who asked
//! before it began.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::{Context, FileSystem, Result};

use crate::server::stamps::Stamps;

/// The syncs of one export.
#[derive(Default)]
pub(crate) struct Stable {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    running: bool,
    /// Syncs begun and done.
    begun: u64,
    done: u64,
    /// What came of the last: the stamp up to which everything is on media.
    last: Option<Result<u64>>,
    waiting: Vec<Waker>,
}

enum Turn {
    Run,
    Done(Result<u64>),
}

impl Stable {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Syncs everything and answers the stamp up to which it is on media. Errors: those of
    /// the file system below.
    pub(crate) async fn sync_all(
        &self,
        cx: &Context,
        fs: &dyn FileSystem,
        stamps: &Arc<Stamps>,
    ) -> Result<u64> {
        let wanted = self.lock().begun + 1;
        match self.turn(wanted).await {
            Turn::Done(outcome) => outcome,
            Turn::Run => {
                let upto = stamps.settled().await;
                let outcome = fs.sync_all(cx).await.map(|()| upto);
                let mut state = self.lock();
                state.running = false;
                state.done = state.begun;
                state.last = Some(outcome.clone());
                let waiting = std::mem::take(&mut state.waiting);
                drop(state);
                waiting.into_iter().for_each(Waker::wake);
                outcome
            }
        }
    }

    /// Waits for the end of a sync that began late enough, or for the turn to make one.
    async fn turn(&self, wanted: u64) -> Turn {
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if state.done >= wanted
                && let Some(outcome) = &state.last
            {
                return Poll::Ready(Turn::Done(outcome.clone()));
            }
            if state.running {
                state.waiting.push(task.waker().clone());
                return Poll::Pending;
            }
            state.running = true;
            state.begun += 1;
            Poll::Ready(Turn::Run)
        })
        .await
    }
}
