//! The grace period after a start, in which clients reclaim their locks. No client gets a lock that
//! another one may still reclaim.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use dray_core::{Context, Result};
use dray_rt::Instant;

/// The sessions that the grace period waits for.
#[derive(Default)]
pub(crate) struct Grace {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Sessions that held locks and have not reclaimed them.
    awaited: BTreeSet<u64>,
    /// Every client may reclaim: the server does not know which clients held locks.
    anybody: bool,
    until: Option<Instant>,
    waiting: Vec<Waker>,
}

impl Grace {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins. With `anybody`, clients that the server does not know may reclaim locks, too, and
    /// the grace period lasts its full time.
    pub(crate) fn begin(&self, awaited: BTreeSet<u64>, anybody: bool, lasts: Duration) {
        if awaited.is_empty() && !anybody {
            return;
        }
        let mut state = self.lock();
        state.awaited = awaited;
        state.anybody = anybody;
        state.until = Some(dray_rt::now() + lasts);
    }

    /// Whether anybody has to wait.
    pub(crate) fn is_running(&self) -> bool {
        self.lock().until.is_some_and(|until| dray_rt::now() < until)
    }

    /// Whether `session` may reclaim locks.
    pub(crate) fn allows(&self, session: u64) -> bool {
        let state = self.lock();
        let running = state.until.is_some_and(|until| dray_rt::now() < until);
        running && (state.anybody || state.awaited.contains(&session))
    }

    /// `session` has finished its reclaim, or has ended.
    pub(crate) fn finish(&self, session: u64) {
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
    fn only_expected_sessions_reclaim_locks_and_only_in_time() {
        let kind = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(kind).unwrap().block_on(async {
            let (grace, lasts) = (Grace::default(), Duration::from_secs(60));
            assert!(!grace.allows(1), "there was no restart");
            grace.begin(BTreeSet::from([1, 2]), false, lasts);
            assert!(grace.allows(1) && grace.allows(2) && !grace.allows(3));
            grace.finish(1);
            assert!(!grace.allows(1) && grace.allows(2));
            dray_rt::sleep(lasts).await;
            assert!(!grace.allows(2));
            grace.begin(BTreeSet::new(), true, lasts);
            assert!(grace.allows(3), "the holders of locks are unknown");
            dray_rt::sleep(lasts).await;
            assert!(!grace.allows(3));
        });
    }

    /// Otherwise each restart would delay locks by a lease, even if all clients have returned.
    #[test]
    fn the_grace_period_ends_with_the_last_reclaim() {
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
                grace.finish(session);
            }
            assert_eq!(waiting.await.unwrap().as_secs(), 2);
        });
    }
}
