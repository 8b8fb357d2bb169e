//! A rate as one number: the time at which all that was taken is paid for (the generic cell rate
//! algorithm, ITU-T I.371).

/// Nanoseconds of a clock that only goes forward.
pub type Nanos = u64;

const SECOND: u128 = 1_000_000_000;

/// A rate, what may be taken ahead of it, and how far it has been used.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    /// Units a second, at least 1.
    per_s: u64,
    /// What may be taken ahead, as time at this rate.
    burst: Nanos,
    /// Units that a large call takes at most.
    large: u64,
    /// What large calls may take ahead. Kept, since each call asks for it.
    ahead_of_large: Nanos,
    /// When all is paid for that was taken.
    paid_at: Nanos,
}

impl Bucket {
    /// Full at first. `per_s`: units a second; 0 is taken for 1. Large calls take `large` units at most.
    pub fn new(per_s: u64, burst: Nanos, large: u64) -> Bucket {
        let mut bucket = Bucket { per_s: 1, burst, large, ahead_of_large: 0, paid_at: 0 };
        bucket.set_rate(per_s);
        bucket
    }

    /// Another rate from now on. What has been taken ahead stays as much time as it was.
    pub fn set_rate(&mut self, per_s: u64) {
        self.per_s = per_s.max(1);
        let ahead = (self.burst - self.burst / 4).saturating_sub(self.time_of(self.large));
        self.ahead_of_large = ahead.max(self.burst / 8);
    }

    /// From when on a small call may take. It may then take any number of units, so that a call that is
    /// larger than the burst goes on, too.
    pub fn ready_at(&self) -> Nanos {
        self.paid_at.saturating_sub(self.burst)
    }

    /// The same for large calls. They leave the last quarter of the burst to
    /// small ones: also the call that comes last before that. Where the rate is so low that one call takes more
    /// than there is, an eighth of the burst may be taken ahead.
    pub fn ready_for_large_at(&self) -> Nanos {
        self.paid_at.saturating_sub(self.ahead_of_large)
    }

    /// What the rate gives in `time`.
    pub fn units_in(&self, time: Nanos) -> u64 {
        u64::try_from(u128::from(self.per_s) * u128::from(time) / SECOND).unwrap_or(u64::MAX)
    }

    fn time_of(&self, units: u64) -> Nanos {
        let time = u128::from(units) * SECOND / u128::from(self.per_s);
        u64::try_from(time).unwrap_or(u64::MAX)
    }

    /// Takes `units` at `now`. What was not used before is lost, but for that of the last `kept`.
    pub fn take(&mut self, now: Nanos, units: u64, kept: Nanos) {
        let from = self.paid_at.max(now.saturating_sub(kept));
        self.paid_at = from.saturating_add(self.time_of(units));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_its_rate_and_its_burst() {
        let mut bucket = Bucket::new(1000, 100_000_000, 1);
        let (mut now, mut taken) = (5_000_000_000, 0);
        let end = now + 1_000_000_000;
        while now < end {
            if bucket.ready_at() <= now {
                bucket.take(now, 10, 0);
                taken += 10;
            } else {
                now += 1_000_000;
            }
        }
        assert!((1100..=1110).contains(&taken), "{taken}");
    }

    /// A large call took what is for small ones, if the rate was low: they waited for most of its time.
    #[test]
    fn large_calls_leave_something_for_small_ones() {
        const LARGE: u64 = 1 << 20;
        for (rate, wait_max_ms) in [(200 << 20, 0), (20 << 20, 0), (10 << 20, 15), (5 << 20, 120)] {
            let mut bucket = Bucket::new(rate, 100_000_000, LARGE);
            let (begin, mut taken) = (5_000_000_000, 0);
            let mut now = begin;
            while now < begin + 10_000_000_000 {
                if bucket.ready_for_large_at() <= now {
                    bucket.take(now, LARGE, 0);
                    taken += LARGE;
                    let waits_ms = bucket.ready_at().saturating_sub(now) / 1_000_000;
                    assert!(waits_ms <= wait_max_ms, "{waits_ms} ms at {rate}");
                } else {
                    now += 1_000_000;
                }
            }
            assert!((rate * 99 / 10..rate * 103 / 10).contains(&taken), "{taken} at {rate}");
        }
    }
}
