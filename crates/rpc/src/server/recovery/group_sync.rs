//! Group sync: one sync of everything at a time serves all callers that asked before it began.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::{Context, Error, FileSystem, Result};

use crate::server::ranges::RangeTable;
use crate::server::recovery::awaited::AwaitedStamps;

/// The syncs of one export.
#[derive(Default)]
pub(crate) struct GroupSync {
    /// Everything up to this stamp is on media.
    durable_stamp: AtomicU64,
    /// The stamp up to which clients have been notified of it.
    reported: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    running: bool,
    /// Syncs begun and done.
    begun: u64,
    done: u64,
    /// The result of the last sync: the stamp up to which everything is on media.
    last: Option<Result<u64>>,
    /// The number of syncs that failed, and why the last one did.
    failures: Failures,
    why: Option<Error>,
    waiting: Vec<Waker>,
}

/// Syncs of everything that have failed, as the kernel counts errors of writing (errseq_t in
/// lib/errseq.c): the kernel reports each error once. The next sync then succeeds, although data of
/// the failed one are not on media. A client that has not heard of every failure must not trust the
/// next success.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Failures(u64);

enum SyncRole {
    Run,
    Done(Result<u64>),
}

/// A sync under way. If its caller gives up, the next waiting caller makes one.
struct Running<'a>(&'a GroupSync);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.running = false;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl GroupSync {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stamp up to which everything is on media, as far as is known.
    pub(crate) fn durable_stamp(&self) -> u64 {
        self.durable_stamp.load(Ordering::SeqCst)
    }

    /// Whether clients are to be notified that everything up to `stamp` is on media. True for one
    /// of the callers that waited for the same sync.
    pub(crate) fn is_news(&self, stamp: u64) -> bool {
        self.reported.fetch_max(stamp, Ordering::SeqCst) < stamp
    }

    /// The failures so far.
    pub(crate) fn failures(&self) -> Failures {
        self.lock().failures
    }

    /// Why the last one failed, unless a client that has `heard` of so many has heard of that one.
    pub(crate) fn failed_since(&self, heard: Failures) -> Option<(Failures, Error)> {
        let state = self.lock();
        let why = state.why.clone().filter(|_| state.failures != heard)?;
        Some((state.failures, why))
    }

    /// Syncs everything and answers the stamp up to which it is on media. That is before each change
    /// that is `awaited`. Errors: those of the file system below.
    pub(crate) async fn sync_all(
        &self,
        cx: &Context,
        fs: &dyn FileSystem,
        ranges: &RangeTable,
        awaited: &AwaitedStamps,
    ) -> Result<u64> {
        let wanted = self.lock().begun + 1;
        match self.await_role(wanted).await {
            SyncRole::Done(outcome) => outcome,
            SyncRole::Run => {
                let running = Running(self);
                let upto = awaited.bound(ranges.settled().await);
                let outcome = fs.sync_all(cx).await.map(|()| upto);
                if outcome.is_ok() {
                    self.durable_stamp.fetch_max(upto, Ordering::SeqCst);
                }
                let mut state = self.lock();
                if let Err(error) = &outcome {
                    state.failures.0 += 1;
                    state.why = Some(error.clone());
                }
                state.done = state.begun;
                state.last = Some(outcome.clone());
                drop(state);
                drop(running);
                outcome
            }
        }
    }

    /// Waits for the end of a sync that began late enough, or until this caller is the one to make
    /// it.
    async fn await_role(&self, wanted: u64) -> SyncRole {
        std::future::poll_fn(|task| {
            let mut state = self.lock();
            if state.done >= wanted
                && let Some(outcome) = &state.last
            {
                return Poll::Ready(SyncRole::Done(outcome.clone()));
            }
            if state.running {
                state.waiting.push(task.waker().clone());
                return Poll::Pending;
            }
            state.running = true;
            state.begun += 1;
            Poll::Ready(SyncRole::Run)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::server::ranges::Span;
    use dray_backends::memory::{MemoryFs, MemoryOptions};
    use dray_core::FileId;

    /// Data that are being written while everything is synced may be on media or not: no client is
    /// notified that they are.
    #[test]
    fn a_sync_speaks_of_what_was_over_before_it_began() {
        let kind = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(kind).unwrap().block_on(async {
            let (stable, ranges) =
                (Arc::new(GroupSync::default()), Arc::new(RangeTable::default()));
            let file = |ino| FileId { ino, generation: 1 };
            let running = ranges.write(file(1), Span::ALL).await;
            let over = ranges.write(file(2), Span::ALL).await.stamp().unwrap();
            let sync = dray_rt::spawn_join({
                let (stable, ranges) = (stable.clone(), ranges.clone());
                async move {
                    let fs = MemoryFs::new(MemoryOptions::default());
                    let awaited = AwaitedStamps::default();
                    stable.sync_all(&Context::system(), &fs, &ranges, &awaited).await.unwrap()
                }
            });
            dray_rt::sleep(std::time::Duration::from_secs(1)).await;
            let stamp = running.stamp().unwrap();
            assert!(stable.durable_stamp() < stamp, "{stamp} is being written");
            drop(running);
            assert_eq!(sync.await.unwrap(), over);
            assert_eq!(stable.durable_stamp(), over);
        });
    }
}
