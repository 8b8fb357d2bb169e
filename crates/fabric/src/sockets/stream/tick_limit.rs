//! How long frames are taken before other tasks of the thread run.

use dray_rt::{Instant, now};

use crate::connection::TICK_MAX;

/// The end of a tick. Most ticks have one frame, and no look at the clock: the time counts from the first
/// look, which is behind the first frame.
#[derive(Default)]
pub(super) struct TickLimit {
    until: Option<Instant>,
}

impl TickLimit {
    /// Whether the time is up.
    pub(super) fn is_over(&mut self) -> bool {
        let now = now();
        now >= *self.until.get_or_insert(now + TICK_MAX)
    }
}
