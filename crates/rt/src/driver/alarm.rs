//! The clock of an executor that waits for descriptors.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use crate::time::{Instant, real_now};

/// A timerfd(2) that goes off when the first timer is due, or before.
///
/// The alarm is set when a time is wanted that is earlier than its own. To give every wait its end
/// costs the setting and the taking back of a timer in the kernel each time. That is about a
/// microsecond, and most waits end before. So it may go off for a timer that is there no more,
/// once. An alarm that is far ahead is taken back, now and then, for the sake of processes without
/// work: they sleep.
pub(crate) struct Alarm {
    fd: OwnedFd,
    set_to: Option<Instant>,
    /// The time when the alarm was last taken back.
    taken_back: Option<Instant>,
}

/// Far ahead, and now and then.
const FAR: Duration = Duration::from_millis(100);

impl Alarm {
    /// Errors: those of timerfd_create(2).
    pub(crate) fn new() -> io::Result<Alarm> {
        let flags = libc::TFD_NONBLOCK | libc::TFD_CLOEXEC;
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, owned by nobody else.
        Ok(Alarm { fd: unsafe { OwnedFd::from_raw_fd(fd) }, set_to: None, taken_back: None })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Sees to it that it goes off at `next`, if not before.
    pub(crate) fn set(&mut self, next: Option<Instant>) {
        match (self.set_to, next) {
            (None, None) => {}
            (Some(at), Some(next)) if at == next => {}
            (Some(at), next) if next.is_none_or(|next| at < next) => {
                if self.is_worth_taking_back(at) {
                    self.program(next);
                }
            }
            _ => self.program(next),
        }
    }

    /// Whether it goes off for nobody, not soon, and that is not said all the time.
    fn is_worth_taking_back(&mut self, at: Instant) -> bool {
        let now = real_now();
        let worth = at > now + FAR && self.taken_back.is_none_or(|last| now > last + FAR);
        if worth {
            self.taken_back = Some(now);
        }
        worth
    }

    /// Sets the alarm; none: it does not go off.
    fn program(&mut self, next: Option<Instant>) {
        // All zero switches it off.
        let nanos = next.map_or(0, |next| next.as_nanos().max(1));
        let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let value = libc::timespec {
            tv_sec: i64::try_from(nanos / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (nanos % 1_000_000_000) as i64,
        };
        let spec = libc::itimerspec { it_interval: zero, it_value: value };
        let flags = libc::TFD_TIMER_ABSTIME;
        // SAFETY: `spec` is read during the call; nothing is written.
        let set = unsafe { libc::timerfd_settime(self.fd(), flags, &spec, std::ptr::null_mut()) };
        assert!(set == 0, "timerfd_settime(2) refused a time: {}", io::Error::last_os_error());
        self.set_to = next;
    }

    /// The alarm went off. The next setting takes back that it can be read.
    pub(crate) fn went_off(&mut self) {
        self.set_to = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Time until it goes off; none: it does not.
    fn left(alarm: &Alarm) -> Option<Duration> {
        // SAFETY: all zero is valid, and the kernel writes to it during the call.
        let mut spec: libc::itimerspec = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        assert_eq!(unsafe { libc::timerfd_gettime(alarm.fd(), &mut spec) }, 0);
        let left = spec.it_value;
        let left = Duration::new(left.tv_sec as u64, left.tv_nsec as u32);
        (!left.is_zero()).then_some(left)
    }

    #[test]
    fn an_alarm_for_nobody_is_taken_back_now_and_then() {
        let (mut alarm, second) = (Alarm::new().unwrap(), Duration::from_secs(1));
        let later = real_now() + 1000 * second;
        alarm.set(Some(later));
        alarm.set(None);
        assert_eq!(left(&alarm), None);
        alarm.set(Some(later));
        alarm.taken_back = Some(later); // just now, however long we have been held up since
        alarm.set(None);
        assert!(left(&alarm).is_some(), "not all the time");
        alarm.taken_back = None; // long ago
        alarm.set(Some(later + 1000 * second));
        assert!(left(&alarm).is_some_and(|left| left > 1001 * second));
        alarm.set(Some(later));
        assert!(left(&alarm).is_some_and(|left| left < 1001 * second), "an earlier one at once");
    }

    #[test]
    fn one_that_is_near_goes_off_for_nobody() {
        let (mut alarm, second) = (Alarm::new().unwrap(), Duration::from_secs(1));
        alarm.set(Some(real_now() + 1000 * second));
        alarm.set_to = Some(real_now() + FAR / 2);
        alarm.set(None);
        assert!(left(&alarm).is_some());
    }
}
