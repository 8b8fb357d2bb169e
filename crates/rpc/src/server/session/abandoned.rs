//! Changes that the death of a server cut short, and that their client does not ask for again.
//!
//! Reads and changes of the same ranges wait for them. A client that has come back asks at once, or
//! says that it has nothing under way. A client that does neither must not keep the others waiting.

use std::time::Duration;

use super::ServerSession;

impl ServerSession {
    /// Gives up what was cut short and has not been asked for again a `lease` after its client has
    /// come back. Answers how many changes that were.
    pub(crate) fn give_up_unasked(&self, lease: Duration) -> usize {
        if !self.export.ranges.has_cut() {
            return 0; // as good as always
        }
        let since = {
            let mut state = self.state();
            if self.export.recovery.running() {
                // A call that is asked for again waits as well.
                state.came_back = state.came_back.map(|_| dray_rt::now());
            }
            state.came_back
        };
        match since {
            Some(since) if since.elapsed() >= lease => self.slots.give_up_cut(),
            _ => 0, // one that stays away loses its session
        }
    }
}
