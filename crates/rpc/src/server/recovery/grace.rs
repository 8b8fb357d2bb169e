//! The time after a start in which clients claim their locks again and nobody gets a
//! lock that somebody else may come back for.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use dray_core::{Context, Result};
use dray_rt::Instant;

/// Who is waited for.
#[derive(Default)]
pub(crate) struct Grace {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Sessions that held locks and have not claimed them again.
    awaited: BTreeSet<u64>,
    /// Everybody may claim: the server cannot know who held locks.
    anybody: bool,
    until: Option<Instant>,
    waiting: Vec<Waker>,
}

impl Grace {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins. With `anybody`, also clients that the server does not know may claim, and
    /// the time is not cut short.
    pub(crate) fn begin(&self, awaited: BTreeSet<u64>, anybody: bool, lasts: Duration) {
        if awaited.is_empty() && !anybody {
            return;
        }
        log::info!(
            "waiting up to {} s for {} clients to claim their locks again",
            lasts.as_secs(),
            if anybody { "all".to_owned() } else { awaited.len().to_string() }
        );
        let mut state = self.lock();
        state.awaited = awaited;
        state.anybody = anybody;
        state.until = Some(dray_rt::now() + lasts);
    }

    /// Whether `session` may claim locks again.
    pub(crate) fn allows(&self, session: u64) -> bool {
        let state = self.lock();
        let running = state.until.is_some_and(|until| dray_rt::now() < until);
        running && (state.anybody || state.awaited.contains(&session))
    }

    /// `session` has claimed what it wanted, or is gone.
    pub(crate) fn reclaimed(&self, session: u64) {
        let mut state = self.lock();
        state.awaited.remove(&session);
        if state.awaited.is_empty() && !state.anybody {
            state.until = None;
            let waiting = std::mem::take(&mut state.waiting);
            drop(state);
            waiting.into_iter().for_each(Waker::wake);
        }
    }

    /// Waits until locks can be given out. Errors: `EINTR` when cancelled.
    pub(crate) async fn wait(&self, cx: &Context) -> Result<()> {
        let Some(until) = self.lock().until else { return Ok(()) };
        let mut timer = std::pin::pin!(dray_rt::sleep_until(until));
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if state.until.is_none() || timer.as_mut().poll(task).is_ready() {
                return Poll::Ready(Ok(()));
            }
            state.waiting.push(task.waker().clone());
            drop(state);
            cx.poll_cancelled(task).map(Err)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Later somebody else may have had the lock, and given it back.
    #[test]
    fn locks_are_claimed_again_by_who_is_awaited_and_in_time_only() {
        let kind = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(kind).unwrap().block_on(async {
            let (grace, lasts) = (Grace::default(), Duration::from_secs(60));
            assert!(!grace.allows(1), "there was no restart");
            grace.begin(BTreeSet::from([1, 2]), false, lasts);
            assert!(grace.allows(1) && grace.allows(2) && !grace.allows(3));
            grace.reclaimed(1);
            assert!(!grace.allows(1) && grace.allows(2));
            dray_rt::sleep(lasts).await;
            assert!(!grace.allows(2));
            grace.begin(BTreeSet::new(), true, lasts);
            assert!(grace.allows(3), "nobody knows who held locks");
            dray_rt::sleep(lasts).await;
            assert!(!grace.allows(3));
        });
    }

    /// Else each restart would hold locks up for as long as a lease, whoever has come back.
    #[test]
    fn locks_are_given_out_as_soon_as_the_last_has_claimed() {
        let kind = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(kind).unwrap().block_on(async {
            let grace = std::sync::Arc::new(Grace::default());
            grace.begin(BTreeSet::from([1, 2]), false, Duration::from_secs(60));
            let (waits, begin) = (grace.clone(), dray_rt::now());
            let waiting = dray_rt::spawn_join(async move {
                waits.wait(&Context::system()).await.unwrap();
                begin.elapsed()
            });
            for session in [1, 2] {
                dray_rt::sleep(Duration::from_secs(1)).await;
                grace.reclaimed(session);
            }
            assert_eq!(waiting.await.unwrap().as_secs(), 2);
        });
    }
}
