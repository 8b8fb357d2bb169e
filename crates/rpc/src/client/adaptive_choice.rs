//! Which of two ways to do the same is faster on this machine now. Both are measured, and the
//! faster one is taken most of the time.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How a large read is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadMode {
    /// The read is one call.
    Whole,
    /// Two calls at the same time.
    Split,
}

/// One call in so many is made in the slower way, to see whether that way still is slower.
const TRY_EVERY: u64 = 32;
/// Split reads cost more CPU: they must be faster by this much, percent, to be worth it.
const GAIN_MIN_PERCENT: u64 = 15;
/// The weight of the last measurement is one in this.
const WEIGHT: u64 = 8;

/// The measurements; times in units of 1/1024 ns for each byte.
#[derive(Default)]
pub(crate) struct AdaptiveChoice {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    chosen: u64,
    whole: Option<u64>,
    split: Option<u64>,
}

impl State {
    fn faster(&self) -> ReadMode {
        match (self.whole, self.split) {
            (Some(whole), Some(split))
                if split.saturating_mul(100 + GAIN_MIN_PERCENT) > whole.saturating_mul(100) =>
            {
                ReadMode::Whole
            }
            _ => ReadMode::Split,
        }
    }
}

impl AdaptiveChoice {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The way to go.
    pub(crate) fn choose(&self) -> ReadMode {
        let mut state = self.lock();
        state.chosen += 1;
        match (state.faster(), state.chosen.is_multiple_of(TRY_EVERY)) {
            (ReadMode::Whole, false) | (ReadMode::Split, true) => ReadMode::Whole,
            (ReadMode::Split, false) | (ReadMode::Whole, true) => ReadMode::Split,
        }
    }

    /// How long a read of `bytes` took.
    pub(crate) fn took(&self, way: ReadMode, bytes: usize, elapsed: Duration) {
        let time = (elapsed.as_nanos() as u64).saturating_mul(1024) / bytes.max(1) as u64;
        let mut state = self.lock();
        let known = match way {
            ReadMode::Whole => &mut state.whole,
            ReadMode::Split => &mut state.split,
        };
        let before = known.unwrap_or(time);
        // A thread that was not let onto its CPU for a while says nothing about either way. If it
        // has become slower indeed, the next ones say so, too.
        let most = before.saturating_add(before / 2).max(2 * WEIGHT); // from nothing, too
        let time = time.min(most);
        *known = Some(before - before / WEIGHT + time / WEIGHT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(choice: &AdaptiveChoice, reads: usize, whole_us: u64, split_us: u64) -> usize {
        run_with_pauses(choice, reads, (whole_us, split_us), usize::MAX)
    }

    /// One read in so many takes 3 ms longer, whichever way it goes. Answers how many were split.
    fn run_with_pauses(
        choice: &AdaptiveChoice,
        reads: usize,
        of: (u64, u64),
        pause_every: usize,
    ) -> usize {
        let one = |number: usize| {
            let way = choice.choose();
            let us = if way == ReadMode::Whole { of.0 } else { of.1 };
            let us = if number % pause_every == pause_every - 1 { us + 3000 } else { us };
            choice.took(way, 1 << 20, Duration::from_micros(us));
            usize::from(way == ReadMode::Split)
        };
        (0..reads).map(one).sum()
    }

    #[test]
    fn the_faster_way_is_taken_and_the_other_tried() {
        let choice = AdaptiveChoice::default();
        assert_eq!(run(&choice, 320, 500, 300), 310);
        // Something else is on the second CPU now.
        let split = run(&choice, 3200, 500, 900);
        assert!((100..200).contains(&split), "{split} of 3200");
        // The pauses have gone: split reads are found out to be better before long.
        assert!(run(&choice, 6400, 500, 300) > 4000);
        // A little faster is not worth it.
        assert!(run(&choice, 6400, 500, 480) < 1000);
    }

    #[test]
    fn a_read_that_was_held_up_does_not_change_the_way() {
        for pause_every in [37, 75, 150] {
            let better = run_with_pauses(&AdaptiveChoice::default(), 6400, (500, 400), pause_every);
            assert!(better > 6000, "{better} of 6400 were split, 1 in {pause_every} held up");
            let worse = run_with_pauses(&AdaptiveChoice::default(), 6400, (500, 520), pause_every);
            assert!(worse < 400, "{worse} of 6400 were split, 1 in {pause_every} held up");
        }
    }
}
