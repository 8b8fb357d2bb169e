//! Which of two ways of doing the same is faster on this machine, now: both are measured, and
//! the better one is taken most of the time.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How a large read is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// One call.
    Whole,
    /// Two calls at the same time.
    Halves,
}

/// One in so many is made in the slower way, to see whether that still is so.
const TRY_EVERY: u64 = 32;
/// Halves cost more CPU: they must be faster by this much, percent, to be worth it.
const GAIN_MIN_PERCENT: u64 = 15;
/// The weight of the last measurement is one in this.
const WEIGHT: u64 = 8;

/// What was measured; times in units of 1/1024 ns for each byte.
#[derive(Default)]
pub(crate) struct Pace {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    chosen: u64,
    whole: Option<u64>,
    halves: Option<u64>,
}

impl State {
    fn faster(&self) -> Way {
        match (self.whole, self.halves) {
            (Some(whole), Some(halves))
                if halves.saturating_mul(100 + GAIN_MIN_PERCENT) > whole.saturating_mul(100) =>
            {
                Way::Whole
            }
            _ => Way::Halves,
        }
    }
}

impl Pace {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The way to go.
    pub(crate) fn choose(&self) -> Way {
        let mut state = self.lock();
        state.chosen += 1;
        match (state.faster(), state.chosen.is_multiple_of(TRY_EVERY)) {
            (Way::Whole, false) | (Way::Halves, true) => Way::Whole,
            (Way::Halves, false) | (Way::Whole, true) => Way::Halves,
        }
    }

    /// How long a read of `bytes` took.
    pub(crate) fn took(&self, way: Way, bytes: usize, elapsed: Duration) {
        let time = (elapsed.as_nanos() as u64).saturating_mul(1024) / bytes.max(1) as u64;
        let mut state = self.lock();
        let known = match way {
            Way::Whole => &mut state.whole,
            Way::Halves => &mut state.halves,
        };
        let before = known.unwrap_or(time);
        *known = Some(before - before / WEIGHT + time / WEIGHT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(pace: &Pace, reads: usize, whole_us: u64, halves_us: u64) -> usize {
        let one = |_| {
            let way = pace.choose();
            let us = if way == Way::Whole { whole_us } else { halves_us };
            pace.took(way, 1 << 20, Duration::from_micros(us));
            usize::from(way == Way::Halves)
        };
        (0..reads).map(one).sum()
    }

    #[test]
    fn the_faster_way_is_taken_and_the_other_tried() {
        let pace = Pace::default();
        assert_eq!(run(&pace, 320, 500, 300), 310);
        // Something else is on the second CPU now.
        let halves = run(&pace, 3200, 500, 900);
        assert!((100..200).contains(&halves), "{halves} of 3200");
        // It has gone: halves are found out to be better before long.
        assert!(run(&pace, 6400, 500, 300) > 4000);
        // A little faster is not worth it.
        assert!(run(&pace, 6400, 500, 480) < 1000);
    }
}
