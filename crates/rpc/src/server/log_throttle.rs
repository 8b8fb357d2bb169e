//! Messages that clients can bring about any number of times are logged once a minute. So nobody
//! fills a server's log.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use dray_rt::Instant;

/// How long nothing is said again.
const QUIET: Duration = Duration::from_secs(60);

/// A message that is logged at most once a minute.
#[derive(Default)]
pub(crate) struct LogThrottle(Mutex<State>);

#[derive(Default)]
struct State {
    said: Option<Instant>,
    left_out: u64,
}

impl LogThrottle {
    /// Has `say` say it, if it has not been said for a while. The argument of `say` belongs to the
    /// end of the line: how often it was not said meanwhile.
    pub(crate) fn say(&self, say: impl FnOnce(&str)) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.said.is_some_and(|said| said.elapsed() < QUIET) {
            state.left_out += 1;
            return;
        }
        state.said = Some(dray_rt::now());
        let left_out = std::mem::take(&mut state.left_out);
        drop(state);
        match left_out {
            0 => say(""),
            times => say(&format!(" (and {times} times more since this was last said)")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: P63
    #[test]
    fn what_happens_often_is_said_once_a_minute_and_how_often() {
        let mut executor =
            dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 1 }).unwrap();
        executor.block_on(async {
            let (throttle, mut said) = (LogThrottle::default(), Vec::new());
            for _ in 0..3 {
                throttle.say(|more| said.push(more.to_owned()));
            }
            dray_rt::sleep(QUIET).await;
            throttle.say(|more| said.push(more.to_owned()));
            dray_rt::sleep(QUIET).await;
            throttle.say(|more| said.push(more.to_owned()));
            assert_eq!(said, ["", " (and 2 times more since this was last said)", ""]);
        });
    }
}
