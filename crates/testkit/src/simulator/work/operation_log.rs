//! The operations of several clients, and the two moments between which each of them happened.

use std::hash::Hash;
use std::sync::Mutex;

use dray_core::Error;

use super::lock;
use crate::simulator::history::{HistoryEvent, judge, linearizable_from};

/// Deeds, in the order in which they were asked for.
pub(super) struct OperationLog<D> {
    state: Mutex<(u64, Vec<HistoryEvent<D>>)>,
}

impl<D> Default for OperationLog<D> {
    fn default() -> OperationLog<D> {
        OperationLog { state: Mutex::new((0, Vec::new())) }
    }
}

impl<D> OperationLog<D> {
    /// A moment that no other is the same as.
    pub(super) fn tick(&self) -> u64 {
        let mut state = lock(&self.state);
        state.0 += 1;
        state.0
    }

    /// Does something that is all of `deeds`; until it is answered each of them may have
    /// happened or not. What was answered decides what they were.
    pub(super) async fn note<T>(
        &self,
        deeds: impl IntoIterator<Item = D>,
        work: impl Future<Output = Result<T, Error>>,
        learn: impl Fn(&mut D, &T),
    ) -> Result<T, Error> {
        let from = self.tick();
        let indices = {
            let events = &mut lock(&self.state).1;
            let first = events.len();
            let event = |kind| HistoryEvent { from, to: u64::MAX, kind, optional: true };
            events.extend(deeds.into_iter().map(event));
            first..events.len()
        };
        let answer = work.await?;
        let to = self.tick();
        for event in &mut lock(&self.state).1[indices] {
            (event.to, event.optional) = (to, false);
            learn(&mut event.kind, &answer);
        }
        Ok(answer)
    }

    /// Something was found out between the moment `from` and now.
    pub(super) fn found(&self, from: u64, deed: D) {
        let to = self.tick();
        lock(&self.state).1.push(HistoryEvent { from, to, kind: deed, optional: false });
    }

    /// Whether some order explains everything, with `first` at the beginning and `apply` as
    /// with [`linearizable_from`].
    pub(super) fn is_explained<S: Clone + Eq + Hash>(
        &self,
        first: S,
        apply: impl Fn(&S, &D) -> Option<S>,
    ) -> Result<(), String>
    where
        D: std::fmt::Debug,
    {
        let events = &lock(&self.state).1;
        judge(linearizable_from(first, events, apply), events)
    }
}
