//! The driver of a simulation: nothing happens but what tasks and timers do.

use crate::executor::ExecutorShared;
use crate::time::Instant;

pub(crate) struct Sim;

impl Sim {
    /// Moves the clock to the next timer. Without one, and with nothing `ready`, nothing can
    /// ever happen.
    pub(crate) fn park(
        &mut self,
        shared: &ExecutorShared,
        next: Option<Instant>,
        ready: bool,
    ) -> bool {
        if ready {
            return true;
        }
        next.is_some_and(|next| {
            shared.jump_to(next); // nothing else can happen before
            shared.wake_due_timers();
            true
        })
    }
}
