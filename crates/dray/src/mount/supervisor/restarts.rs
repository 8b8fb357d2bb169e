//! Decides when a daemon that died is started again, and when the supervisor gives up.

use std::collections::VecDeque;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use crate::error::{EXIT_SHORT, is_shortage};

/// Deaths are counted over this time.
pub const PERIOD: Duration = Duration::from_secs(60);
/// Daemons that end by themselves (a crash, an error) within [`PERIOD`]: the last of them
/// ends the mount.
pub const FAILURES_MAX: usize = 5;
/// Daemons that are killed from outside within [`PERIOD`], likewise. Much more is borne,
/// since each of them may have served well; it bounds a machine that is out of memory.
pub const KILLS_MAX: usize = 500;
/// Daemons in a row that were killed before they were ready, or that the machine had no room for,
/// likewise: half a minute.
pub const UNREADY_MAX: u32 = 20;
/// Wait after the second daemon in a row that did not get ready; doubled each time. The
/// first is followed at once.
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_LAST: Duration = Duration::from_secs(2);

/// How a daemon ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// By SIGKILL, which no daemon sends to itself.
    Killed,
    /// By any other signal or with an error.
    Failed,
    /// The daemon never lived, or not for long: the machine was short of processes, threads, memory
    /// or descriptors, which may pass.
    Unborn,
}

impl Death {
    /// Of a daemon that `error` kept from being started.
    pub fn of_unborn(error: &io::Error) -> Death {
        if is_shortage(error) { Death::Unborn } else { Death::Failed }
    }

    /// Of one that ended so.
    pub fn of(status: ExitStatus) -> Death {
        match (status.signal(), status.code()) {
            (Some(libc::SIGKILL), _) => Death::Killed,
            (_, Some(code)) if code == i32::from(EXIT_SHORT) => Death::Unborn,
            _ => Death::Failed,
        }
    }
}

/// What follows a death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartDecision {
    /// A new daemon, after this time.
    Restart(Duration),
    /// The mount is ended, for this reason.
    GiveUp(&'static str),
}

/// The deaths of a mount's daemons.
#[derive(Default)]
pub struct Restarts {
    failures: VecDeque<Instant>,
    kills: VecDeque<Instant>,
    unready: u32,
}

impl Restarts {
    /// A daemon serves.
    pub fn ready(&mut self) {
        self.unready = 0;
    }

    /// A daemon died; [`Restarts::ready`] has been called for it if it ever served.
    pub fn died(&mut self, now: Instant, death: Death) -> RestartDecision {
        let counted = match death {
            Death::Failed => Some((&mut self.failures, FAILURES_MAX, "it failed too often")),
            Death::Killed => Some((&mut self.kills, KILLS_MAX, "it was killed too often")),
            Death::Unborn => None,
        };
        if let Some((deaths, max, why)) = counted {
            deaths.push_back(now);
            while deaths.front().is_some_and(|first| now.duration_since(*first) > PERIOD) {
                deaths.pop_front();
            }
            if deaths.len() >= max {
                return RestartDecision::GiveUp(why);
            }
        }
        self.unready += 1; // none has been ready since: that sets it to zero
        if self.unready > UNREADY_MAX {
            return RestartDecision::GiveUp("every new daemon ended before it served requests");
        }
        let doublings = self.unready.checked_sub(2);
        let wait = doublings.map_or(Duration::ZERO, |n| BACKOFF_FIRST * 2u32.pow(n.min(10)));
        RestartDecision::Restart(wait.min(BACKOFF_LAST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_served_is_followed_at_once() {
        let mut restarts = Restarts::default();
        let now = Instant::now();
        for death in 1..KILLS_MAX {
            restarts.ready();
            let next = restarts.died(now, Death::Killed);
            assert_eq!(next, RestartDecision::Restart(Duration::ZERO), "{death}");
        }
        assert!(matches!(restarts.died(now, Death::Killed), RestartDecision::GiveUp(_)));
    }

    #[test]
    fn failures_are_given_up_unless_they_are_rare() {
        let mut restarts = Restarts::default();
        let mut now = Instant::now();
        for _ in 1..FAILURES_MAX {
            assert!(matches!(restarts.died(now, Death::Failed), RestartDecision::Restart(_)));
        }
        assert!(matches!(restarts.died(now, Death::Failed), RestartDecision::GiveUp(_)));
        let mut restarts = Restarts::default();
        for _ in 0..10 * FAILURES_MAX {
            restarts.ready();
            assert_eq!(restarts.died(now, Death::Failed), RestartDecision::Restart(Duration::ZERO));
            now += PERIOD / 3;
        }
    }

    #[test]
    fn waits_grow_to_a_limit_while_none_gets_ready() {
        let mut restarts = Restarts::default();
        let now = Instant::now();
        let mut waits = Vec::new();
        while let RestartDecision::Restart(wait) = restarts.died(now, Death::Killed) {
            waits.push(wait);
        }
        assert_eq!(waits.len(), UNREADY_MAX as usize);
        assert_eq!(waits[..3], [Duration::ZERO, BACKOFF_FIRST, BACKOFF_FIRST * 2]);
        assert_eq!(waits.last(), Some(&BACKOFF_LAST));
    }

    #[test]
    fn a_daemon_without_room_to_begin_is_no_failure() {
        for (status, death) in [
            (libc::SIGKILL, Death::Killed),
            (libc::SIGABRT, Death::Failed),
            (1 << 8, Death::Failed),
            (76 << 8, Death::Unborn), // as other versions write and read it
        ] {
            assert_eq!(Death::of(ExitStatus::from_raw(status)), death);
        }
    }

    /// Five tries within a second ended the mount.
    // proves: P98
    #[test]
    fn what_the_machine_is_short_of_may_come_back() {
        let mut restarts = Restarts::default();
        let (now, mut waited) = (Instant::now(), Duration::ZERO);
        while let RestartDecision::Restart(wait) = restarts.died(now + waited, Death::Unborn) {
            waited += wait;
        }
        assert!(waited > PERIOD / 2 && waited < PERIOD, "{waited:?}");
    }
}
