//! Clocks and timers.

use std::fmt;
use std::future::Future;
use std::ops::{Add, Sub};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::executor::{ExecutorShared, current, with_current};

/// A point on the monotonic clock, nanoseconds. In the simulator it starts at 1 s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// From nanoseconds of the monotonic clock.
    pub fn from_nanos(nanos: u64) -> Instant {
        Instant(nanos)
    }

    /// Nanoseconds of the monotonic clock.
    pub fn as_nanos(self) -> u64 {
        self.0
    }

    /// Time since then, zero if it lies ahead.
    pub fn elapsed(self) -> Duration {
        now() - self
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;
    fn add(self, wait: Duration) -> Instant {
        Instant(self.0.saturating_add(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub for Instant {
    type Output = Duration;
    fn sub(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// The monotonic clock; the simulated one inside a simulation.
pub fn now() -> Instant {
    with_current(|shared| shared.map_or_else(real_now, ExecutorShared::now))
}

/// As [`now`], by a clock that goes on while the machine sleeps (`CLOCK_BOOTTIME`): for what ends at
/// another machine meanwhile. Not to be compared with [`now`].
pub fn now_with_sleeps() -> Instant {
    with_current(|shared| match shared.filter(|shared| shared.simulated()) {
        // Machines may drift apart there: see `Scope::with_clock`.
        Some(simulated) => match crate::scope::clock() {
            1.0 => simulated.now(),
            clock => Instant((simulated.now().0 as f64 * clock) as u64),
        },
        None => Instant(read(libc::CLOCK_BOOTTIME).as_nanos() as u64),
    })
}

/// Time since 1970; follows the simulated clock inside a simulation.
pub fn wall_clock() -> Duration {
    match current() {
        Some(shared) if shared.simulated() => {
            Duration::from_secs(1_000_000_000) + Duration::from_nanos(shared.now().0)
        }
        _ => std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or(Duration::ZERO),
    }
}

/// As [`wall_clock`], at the last tick. That is the time that Linux gives files (`current_time` in
/// fs/inode.c). Since 6.13 Linux may give some files times from a finer clock, which are later.
pub fn coarse_wall_clock() -> Duration {
    match current() {
        Some(shared) if shared.simulated() => wall_clock(),
        _ => read(libc::CLOCK_REALTIME_COARSE),
    }
}

pub(crate) fn real_now() -> Instant {
    Instant(read(libc::CLOCK_MONOTONIC).as_nanos() as u64)
}

/// The time of a clock that every kernel has and shows no time before its beginning.
fn read(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes to `time`, which outlives the call. It cannot fail for
    // these clocks.
    unsafe { libc::clock_gettime(clock, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Waits for `wait`.
pub fn sleep(wait: Duration) -> Sleep {
    sleep_until(now() + wait)
}

/// Waits until `deadline`.
pub fn sleep_until(deadline: Instant) -> Sleep {
    Sleep { deadline, registered: None }
}

/// A timer; removes itself when dropped.
pub struct Sleep {
    deadline: Instant,
    registered: Option<(Arc<ExecutorShared>, u64)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let deadline = self.deadline;
        if let Some((shared, key)) = &self.registered {
            if shared.now() >= deadline {
                return Poll::Ready(());
            }
            shared.update_timer(deadline, *key, cx.waker());
            return Poll::Pending;
        }
        let shared = current().expect("timers are for tasks of an executor");
        if shared.now() >= deadline {
            return Poll::Ready(());
        }
        let key = shared.add_timer(deadline, cx.waker().clone());
        self.registered = Some((shared, key));
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some((shared, key)) = self.registered.take() {
            shared.remove_timer(self.deadline, key);
        }
    }
}

/// Marks a place where much can go wrong in between. In a simulation it sometimes waits
/// there, so that others run and processes die at that very place; elsewhere it is free.
pub async fn step() {
    let Some(shared) = current().filter(|shared| shared.simulated()) else { return };
    let choice = shared.simulated_random();
    if choice.is_multiple_of(4) {
        // Sometimes long, so that what happens once in a while happens just then.
        let longest_nanos = if choice.is_multiple_of(32) { 5_000_000 } else { 100_000 };
        sleep(Duration::from_nanos(shared.simulated_random() % longest_nanos)).await;
    }
}

/// The time given to [`timeout`] went by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elapsed;

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the time allowed went by")
    }
}

impl std::error::Error for Elapsed {}

/// Waits for `future` at most `wait`, then drops it.
pub async fn timeout<F: Future>(wait: Duration, future: F) -> Result<F::Output, Elapsed> {
    let mut future = pin!(future);
    let mut timer = pin!(sleep(wait));
    std::future::poll_fn(|cx| {
        if let Poll::Ready(value) = future.as_mut().poll(cx) {
            return Poll::Ready(Ok(value));
        }
        timer.as_mut().poll(cx).map(|()| Err(Elapsed))
    })
    .await
}

/// The timers of one executor, in order of time.
#[derive(Default)]
pub(crate) struct Timers {
    waiting: std::collections::BTreeMap<(Instant, u64), Waker>,
    next_key: u64,
}

impl Timers {
    pub(crate) fn add(&mut self, deadline: Instant, waker: Waker) -> u64 {
        let key = self.next_key;
        self.next_key += 1;
        self.waiting.insert((deadline, key), waker);
        key
    }

    pub(crate) fn update(&mut self, deadline: Instant, key: u64, waker: &Waker) {
        if let Some(old) = self.waiting.get_mut(&(deadline, key)) {
            old.clone_from(waker);
        }
    }

    /// Takes one out. Its waker is to be dropped when the timers are unlocked.
    pub(crate) fn remove(&mut self, deadline: Instant, key: u64) -> Option<Waker> {
        self.waiting.remove(&(deadline, key))
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|((deadline, _), _)| *deadline)
    }

    /// Takes one timer that is due.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<Waker> {
        let entry = self.waiting.first_entry()?;
        (entry.key().0 <= now).then(|| entry.remove())
    }
}
