//! The log's lines about a server that is away, however many connections a mount has, and however
//! often it tries to connect. There is one line when the server goes, and one line why it cannot be
//! reached. There is one line why it refuses the mount, and one line when it is back.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_rt::Instant;

/// An outage that begins sooner than this after the last is not reported again. Otherwise a server
/// that takes connections and drops them would fill the log.
const QUIET: Duration = Duration::from_secs(60);

/// The state of the way to one server.
#[derive(Default)]
pub(crate) struct Outage {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Channels without a connection, that had one.
    down: BTreeSet<usize>,
    since: Option<Instant>,
    /// This outage was reported.
    reported: bool,
    complained: bool,
    last_reported: Option<Instant>,
    /// The same of a server that is there and does not take us.
    refused: bool,
    refusal_reported: Option<Instant>,
    /// Why the last try to connect failed, if none has gone well since.
    why: Option<String>,
}

impl Outage {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A channel lost its connection. True if that is to be reported.
    pub(crate) fn lost(&self, channel: usize) -> bool {
        let mut state = self.lock();
        state.down.insert(channel);
        if state.since.is_some() {
            return false;
        }
        state.since = Some(dray_rt::now());
        (state.complained, state.refused) = (false, false);
        state.reported = state.last_reported.is_none_or(|last| last.elapsed() >= QUIET);
        if state.reported {
            state.last_reported = state.since;
        }
        state.reported
    }

    /// A connection could not be made. True if that is to be reported.
    pub(crate) fn failed(&self) -> bool {
        let mut state = self.lock();
        let quiet = state.since.is_some() && !state.reported;
        !std::mem::replace(&mut state.complained, true) && !quiet
    }

    /// A server that can be reached does not take us, and waiting alone is no help against it. True
    /// if the outage is to be reported. A server that is upgraded is away before it is another one,
    /// so that this is more than what [`Outage::failed`] said.
    pub(crate) fn refused(&self) -> bool {
        let mut state = self.lock();
        let quiet = state.refusal_reported.is_some_and(|reported| reported.elapsed() < QUIET);
        if quiet || std::mem::replace(&mut state.refused, true) {
            return false;
        }
        state.refusal_reported = Some(dray_rt::now());
        true
    }

    /// Notes why a try to connect failed.
    pub(crate) fn failed_for(&self, why: &str) {
        self.lock().why = Some(why.to_owned());
    }

    /// Why the last try to connect failed; none if one has gone well since.
    pub(crate) fn why(&self) -> Option<String> {
        self.lock().why.clone()
    }

    /// The server has welcomed a channel. As [`Outage::back`].
    pub(crate) fn welcomed(&self, channel: usize) -> Option<Duration> {
        self.lock().why = None;
        self.back(channel)
    }

    /// A channel has a connection. How long the outage was, if this is its end and it is to
    /// be reported.
    fn back(&self, channel: usize) -> Option<Duration> {
        let mut state = self.lock();
        state.down.remove(&channel);
        if !state.down.is_empty() {
            return None;
        }
        (state.complained, state.refused) = (false, false);
        let since = state.since.take()?;
        state.reported.then(|| since.elapsed())
    }
}

impl Outage {
    /// A channel has ended: it will have no connection any more, and waits for none. As
    /// [`Outage::back`] where the others have theirs.
    pub(crate) fn ended(&self, channel: usize) -> Option<Duration> {
        if !self.lock().down.contains(&channel) {
            return None;
        }
        self.back(channel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: P63
    #[test]
    fn an_outage_is_three_lines_whatever_the_number_of_channels_and_tries() {
        let mut executor =
            dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 1 }).unwrap();
        executor.block_on(async {
            let outage = Outage::default();
            assert_eq!(outage.back(1), None, "the first connection ends no outage");
            let reported = [1, 2, 3].map(|channel| outage.lost(channel));
            assert_eq!(reported, [true, false, false]);
            assert_eq!([(); 3].map(|()| outage.failed()), [true, false, false]);
            dray_rt::sleep(Duration::from_secs(5)).await;
            assert_eq!([1, 2].map(|channel| outage.back(channel)), [None, None]);
            assert!(outage.back(3).is_some_and(|lasted| lasted.as_secs() == 5));
            // Again at once: not reported, neither its beginning nor its end.
            assert!(!outage.lost(1) && !outage.failed() && outage.back(1).is_none());
            dray_rt::sleep(QUIET).await;
            assert!(outage.lost(1) && outage.failed() && outage.back(1).is_some());
            assert!(outage.ended(1).is_none(), "it was not down");
            // A connection that was made for a recovery breaks with the others, and is not needed
            // again.
            dray_rt::sleep(QUIET).await;
            assert!(outage.lost(1) && !outage.lost(4));
            assert!(outage.back(1).is_none() && outage.ended(4).is_some());
            dray_rt::sleep(QUIET).await;
            assert!(outage.lost(1) && outage.ended(4).is_none());
        });
    }

    /// `dray status` said that the server was away, and nothing of what was wrong with it.
    #[test]
    fn why_a_server_cannot_be_had_is_known_until_it_can() {
        let mut executor =
            dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 1 }).unwrap();
        executor.block_on(async {
            let outage = Outage::default();
            assert!(outage.lost(1) && !outage.lost(2) && outage.why().is_none());
            ["nobody is there", "another key"].iter().for_each(|why| outage.failed_for(why));
            assert_eq!(outage.ended(2), None);
            assert_eq!(outage.why().as_deref(), Some("another key"));
            assert!(outage.welcomed(1).is_some());
            assert_eq!(outage.why(), None);
        });
    }

    /// After an upgrade of the server the log did not say why it was gone for good. The log said
    /// only that the server had been away before.
    #[test]
    fn a_refusal_after_an_outage_is_reported_once() {
        let mut executor =
            dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 1 }).unwrap();
        executor.block_on(async {
            let outage = Outage::default();
            assert!(outage.lost(1) && outage.failed());
            assert_eq!([(); 3].map(|()| outage.refused()), [true, false, false]);
            dray_rt::sleep(2 * QUIET).await;
            assert!(!outage.refused(), "it is one outage");
            assert!(outage.back(1).is_some());
            // Soon again, and for long.
            assert!(outage.lost(1) && outage.refused() && outage.back(1).is_some());
            assert!(!outage.lost(1) && !outage.refused());
            dray_rt::sleep(QUIET).await;
            assert_eq!([(); 2].map(|()| outage.refused()), [true, false]);
        });
    }
}
