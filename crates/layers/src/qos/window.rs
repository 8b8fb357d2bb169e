//! How much data may be under way in the file system below, whose rate nobody knows.
//!
//! A queue that nobody schedules forms below once more is under way than the file system can use.
//! Then calls take longer there. So the window follows their duration. It shrinks when calls take more
//! than twice as long as alone, and grows while it is what holds calls up. This is the control of
//! TCP Vegas (Brakmo, Peterson, IEEE JSAC 13(8), 1995), for calls. How long they take alone is
//! measured for a moment every ten seconds, with a small window (as BBR does: ACM Queue 14(5), 2016).
//! A window that holds nobody up is not measured: the measurement itself would hold calls up.

use super::bucket::Nanos;

/// How often the window is looked at.
const PERIOD: Nanos = 50_000_000;
/// Looks from one measurement to the next.
const BASE_PERIODS: u32 = 200;
/// Looks that one takes; calls of before end in the first.
const MEASURED_PERIODS: u32 = 3;
const MIN_BYTES: u64 = 2 << 20;
const MAX_BYTES: u64 = 256 << 20;
const FIRST_BYTES: u64 = 16 << 20;

/// The window of one export.
#[derive(Debug)]
pub struct Window {
    bytes: u64,
    is_fixed: bool,
    ends: Nanos,
    /// Of the calls of this period: their bytes, and how long they took.
    sum_bytes: u64,
    sum: Nanos,
    /// Calls waited for room in this period.
    was_full: bool,
    /// Calls waited for room since the last measurement.
    holds_up: bool,
    /// How long calls took with a small window, time for each MiB; none: nobody knows.
    base: Option<Nanos>,
    is_measuring: bool,
    /// Looks since the last measurement began.
    periods: u32,
    /// The window before it.
    kept_bytes: u64,
}

impl Window {
    /// `fixed_bytes`: as large; none: it adapts.
    pub fn new(fixed_bytes: Option<u64>) -> Window {
        Window {
            bytes: fixed_bytes.unwrap_or(FIRST_BYTES),
            is_fixed: fixed_bytes.is_some(),
            ends: 0,
            sum_bytes: 0,
            sum: 0,
            was_full: false,
            holds_up: false,
            base: None,
            is_measuring: false,
            periods: 0,
            kept_bytes: FIRST_BYTES,
        }
    }

    /// Bytes that may be under way.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A call waits for room.
    pub fn is_full(&mut self) {
        self.was_full = true;
    }

    /// A call with so many bytes of data has taken so long below.
    pub fn ended(&mut self, now: Nanos, bytes: u64, lasted: Nanos) {
        if self.is_fixed {
            return;
        }
        self.sum_bytes += bytes;
        self.sum += lasted;
        if now >= self.ends {
            self.look(now);
        }
    }

    fn look(&mut self, now: Nanos) {
        // Per MiB, so that a change of the size of calls is no change of speed.
        let each = (u128::from(self.sum) << 20) / u128::from(self.sum_bytes.max(1));
        let each = Nanos::try_from(each).unwrap_or(Nanos::MAX).max(1);
        self.periods += 1;
        self.holds_up |= self.was_full;
        match self.base {
            _ if self.is_measuring && self.periods < MEASURED_PERIODS => {}
            _ if self.is_measuring => {
                (self.base, self.is_measuring, self.holds_up) = (Some(each), false, false);
                self.bytes = self.kept_bytes;
            }
            base if self.holds_up && (base.is_none() || self.periods >= BASE_PERIODS) => {
                (self.is_measuring, self.periods) = (true, 0);
                self.kept_bytes = std::mem::replace(&mut self.bytes, MIN_BYTES);
            }
            Some(base) if each > base.saturating_mul(2) => {
                self.bytes = (self.bytes * 4 / 5).max(MIN_BYTES);
            }
            Some(_) if self.was_full => self.bytes = (self.bytes * 5 / 4).min(MAX_BYTES),
            Some(_) | None => {}
        }
        (self.ends, self.was_full) = (now + PERIOD, false);
        (self.sum_bytes, self.sum) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file system that serves `rate` bytes a second, whatever is under way: the window ends where
    /// calls take about twice as long as alone.
    fn settled(rate: u64, alone: Nanos) -> u64 {
        let mut window = Window::new(None);
        let (mut now, call) = (0, 1 << 20);
        for _ in 0..18_000 {
            window.is_full();
            // Calls of now wait behind what is under way.
            let queued = window.bytes() as u128 * 1_000_000_000 / u128::from(rate);
            window.ended(now, call, alone.max(queued as u64));
            now += 1_000_000;
        }
        window.bytes()
    }

    #[test]
    fn the_window_follows_what_the_file_system_can_use() {
        let slow = settled(100 << 20, 20_000_000); // 2 MiB are enough
        let fast = settled(4 << 30, 10_000_000); // 40 MiB are
        assert!(slow <= 16 << 20, "{slow}");
        assert!((32 << 20..=160 << 20).contains(&fast), "{fast}");
        assert_eq!(Window::new(Some(7)).bytes(), 7);
    }

    /// One user alone lost the time of each measurement.
    #[test]
    fn a_window_that_holds_nobody_up_is_not_made_small_to_measure() {
        let mut window = Window::new(None);
        for ms in 0..30_000 {
            window.ended(ms * 1_000_000, 1 << 20, 3_000_000);
            assert_eq!(window.bytes(), FIRST_BYTES, "{ms} ms");
        }
    }
}
