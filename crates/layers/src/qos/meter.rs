//! What a node of the tree used of late, and whether its limits held it up.

use super::bucket::Nanos;

/// Rates below this count as none.
const LEAST_PER_S: f64 = 0.5;

/// What a node used, bytes and calls, and what its limits on them did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Units a second.
    pub per_s: [u64; 2],
    /// Calls waited for the limit for most of the time.
    pub is_held_up: [bool; 2],
}

impl Usage {
    /// Neither used nor wanted.
    pub fn is_nothing(&self) -> bool {
        *self == Usage::default()
    }
}

/// Counts for one node.
#[derive(Clone, Debug, Default)]
pub(super) struct Meter {
    /// Somebody will read it.
    pub is_listed: bool,
    used: [u64; 2],
    held: [Nanos; 2],
    held_since: Option<(Nanos, usize)>,
    per_s: [f64; 2],
}

impl Meter {
    pub fn take(&mut self, units: [u64; 2]) {
        for (used, units) in self.used.iter_mut().zip(units) {
            *used = used.saturating_add(units);
        }
    }

    /// From now on the limit with this number holds calls up; none: no limit does.
    pub fn held_by(&mut self, now: Nanos, limit: Option<usize>) {
        if let Some((since, former)) = self.held_since.take() {
            self.held[former] += now.saturating_sub(since);
        }
        self.held_since = limit.map(|limit| (now, limit));
    }

    /// What it was since the last time, `period` ago. A rate counts half that of before, so that single large
    /// calls do not make it jump. The sum over time stays what it is.
    pub fn read(&mut self, now: Nanos, period: Nanos) -> Usage {
        let limit = self.held_since.map(|(_, limit)| limit);
        self.held_by(now, limit);
        let seconds = period.max(1) as f64 / 1e9;
        let mut usage = Usage::default();
        for index in 0..2 {
            let rate = (self.per_s[index] + self.used[index] as f64 / seconds) / 2.0;
            self.per_s[index] = if rate < LEAST_PER_S { 0.0 } else { rate };
            usage.per_s[index] = self.per_s[index] as u64;
            usage.is_held_up[index] = self.held[index] > period / 2;
        }
        (self.used, self.held) = ([0; 2], [0; 2]);
        usage
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Nanos = 100_000_000;

    #[test]
    fn a_rate_follows_within_a_few_periods_and_ends() {
        let mut meter = Meter::default();
        let mut now = 0;
        let mut sum = 0;
        for round in 0..40 {
            meter.take([if round < 10 { 1000 } else { 0 }, 0]);
            now += PERIOD;
            sum += meter.read(now, PERIOD).per_s[0] / 10;
        }
        assert!((9_900..=10_000).contains(&sum), "{sum}");
        assert!(meter.read(now + PERIOD, PERIOD).is_nothing());
    }

    #[test]
    fn who_is_held_up_for_most_of_the_time_counts_as_held_up() {
        let mut meter = Meter::default();
        meter.held_by(0, Some(1));
        assert_eq!(meter.read(PERIOD, PERIOD).is_held_up, [false, true]);
        meter.held_by(PERIOD + PERIOD / 4, None);
        assert_eq!(meter.read(2 * PERIOD, PERIOD).is_held_up, [false, false]);
    }
}
