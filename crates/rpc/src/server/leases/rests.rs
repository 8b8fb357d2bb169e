//! What is fought over is not leased for a while: the recalls would cost more than the leases save.

use std::time::Duration;

use dray_rt::Instant;

/// The first rest, and the longest.
const REST_MIN: Duration = Duration::from_millis(250);
const REST_MAX: Duration = Duration::from_secs(16);
/// A recall that takes longer is a slow one.
const SLOW: Duration = Duration::from_millis(50);
/// So many recalls of single names within this time, and the directory rests.
const NAMES_RECALLED_MAX: u8 = 4;
const NAMES_TIME: Duration = Duration::from_secs(1);

/// The rests of all things with one place in an array.
#[derive(Clone, Copy, Default)]
pub(super) struct Rest {
    until: Option<Instant>,
    time: Duration,
    /// Recalls of single names, and since when they are counted.
    names: u8,
    names_since: Option<Instant>,
}

impl Rest {
    /// Whether nothing is leased now.
    pub(super) fn rests(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// When the last rest ends, or has ended; none: there was none.
    pub(super) fn ends(&self) -> Option<Instant> {
        self.until
    }

    /// A lease is recalled. A recall that comes soon after a rest makes the next rest longer.
    pub(super) fn begin(&mut self, now: Instant) {
        let soon = self.until.is_some_and(|until| now < until + self.time);
        self.time = if soon { (self.time * 2).min(REST_MAX) } else { REST_MIN };
        self.until = Some(now + self.time);
    }

    /// A recall took so long. What is leased anew is recalled again, perhaps as slowly: a rest ten times as
    /// long keeps the loss at a tenth.
    pub(super) fn recall_took(&mut self, now: Instant, took: Duration) {
        if took < SLOW {
            return;
        }
        let time = (took * 10).clamp(REST_MIN, REST_MAX);
        if self.until.is_none_or(|until| until < now + time) {
            (self.until, self.time) = (Some(now + time), time);
        }
    }

    /// A single name of a directory is recalled. True: there are so many that all names are to be.
    pub(super) fn name_recalled(&mut self, now: Instant) -> bool {
        if self.names_since.is_none_or(|since| now - since > NAMES_TIME) {
            (self.names, self.names_since) = (0, Some(now));
        }
        self.names += 1;
        if self.names < NAMES_RECALLED_MAX {
            return false;
        }
        self.names_since = None;
        self.begin(now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    #[test]
    fn rests_double_while_it_is_fought_over_and_begin_anew_later() {
        let mut rest = Rest::default();
        let (mut now, mut times) = (1000, Vec::new());
        for _ in 0..9 {
            rest.begin(at(now));
            let ends = (now..).find(|millis| !rest.rests(at(*millis))).unwrap();
            times.push(ends - now);
            now = ends;
        }
        assert_eq!(times, [250, 500, 1000, 2000, 4000, 8000, 16_000, 16_000, 16_000]);
        now += 16_000;
        rest.begin(at(now));
        assert!(rest.rests(at(now + 249)) && !rest.rests(at(now + 250)));
    }

    #[test]
    fn a_slow_recall_is_followed_by_a_long_rest() {
        let mut rest = Rest::default();
        rest.recall_took(at(1000), Duration::from_millis(49));
        assert!(!rest.rests(at(1001)));
        rest.recall_took(at(1000), Duration::from_millis(1250));
        assert!(rest.rests(at(13_499)) && !rest.rests(at(13_500)));
        rest.recall_took(at(1000), Duration::from_millis(60));
        assert!(rest.rests(at(13_499)), "it gets no shorter");
        rest.recall_took(at(1000), Duration::from_secs(60));
        assert!(rest.rests(at(16_999)) && !rest.rests(at(17_000)));
    }

    #[test]
    fn a_directory_rests_after_four_names_within_a_second() {
        let mut rest = Rest::default();
        let slow = [0, 500, 900, 1500, 2000, 2400, 3000].map(|now| rest.name_recalled(at(now)));
        assert!(!slow.contains(&true));
        let fast = [5000, 5100, 5200, 5300].map(|now| rest.name_recalled(at(now)));
        assert_eq!(fast, [false, false, false, true]);
        assert!(rest.rests(at(5400)) && !rest.rests(at(5600)));
    }
}
