//! Looks after callers whose end the kernel does not tell of, so that nobody stays unkillable
//! while the server is away (docs/adr/0003-blocking-locks.md and 0021-ends-of-state.md).

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dray_core::Pid;
use dray_rt::{now, sleep, spawn};

use crate::front::Worker;
use crate::worker::caller::{Outlook, outlook, process_ends, sleeps_deeply};
use crate::worker::flight::{InterruptOutcome, LookFor, WatchedCaller};

/// How often the caller of an interrupted request is looked at: whether it is being killed.
const KILL_LOOK_TIME: Duration = Duration::from_millis(100);
/// How often all others are looked at whose requests take long, and so much more for each of them.
const ROUND_TIME: Duration = Duration::from_secs(1);
const ROUND_TIME_EACH: Duration = Duration::from_millis(1);
/// A caller that cannot be seen, and has been signalled or closes a file, is let go after this
/// time. Nobody knows whether it is being killed, and it could not be got rid of.
pub(crate) const UNSEEN_MAX: Duration = Duration::from_secs(10);

impl Worker {
    /// A caller was signalled. A lock request ends at once; anything else only if the
    /// signal kills the caller, which nobody tells: a later SIGKILL brings no message.
    pub(super) fn heed(&self, interrupted: InterruptOutcome) {
        let InterruptOutcome::Watch { unique, pid } = interrupted else { return };
        let shared = self.shared.clone();
        spawn(async move {
            let since = now();
            while shared.flights.under_way(unique) {
                let over = match outlook(pid).0 {
                    Outlook::Alive => false,
                    Outlook::Ends | Outlook::Gone => true,
                    Outlook::Unseen => since.elapsed() >= UNSEEN_MAX,
                };
                if over {
                    shared.flights.cancel(unique);
                    return;
                }
                sleep(KILL_LOOK_TIME).await;
            }
        });
    }

    /// Sees to it that callers are looked after as long as requests are under way. To be called
    /// with each of them.
    pub(super) fn look_after_callers(&self) {
        let shared = &self.shared;
        if shared.looks_after.load(Ordering::Relaxed)
            || shared.looks_after.swap(true, Ordering::SeqCst)
        {
            return;
        }
        let shared = shared.clone();
        spawn(async move {
            let (mut processes, mut pause) = (BTreeMap::new(), ROUND_TIME);
            loop {
                sleep(pause).await;
                if !shared.flights.any() {
                    shared.looks_after.store(false, Ordering::SeqCst);
                    // A request that began between the look and the store has started nothing.
                    if !shared.flights.any() || shared.looks_after.swap(true, Ordering::SeqCst) {
                        return;
                    }
                }
                let waiting = shared.flights.waiting(ROUND_TIME / 2);
                pause = ROUND_TIME + ROUND_TIME_EACH * waiting.len() as u32;
                for unique in over(&waiting, &mut processes) {
                    shared.flights.cancel(unique);
                }
            }
        });
    }
}

/// Requests that nobody waits for any more, of those that take long. `processes`: those of which
/// the callers are, as far as they have been seen.
fn over(waiting: &[WatchedCaller], processes: &mut BTreeMap<u64, Pid>) -> Vec<u64> {
    let before = std::mem::take(processes);
    let mut is_over = |one: &&WatchedCaller| {
        if one.look_for == LookFor::Signal {
            return sleeps_deeply(one.pid);
        }
        let (outlook, process) = outlook(one.pid);
        let process = process.or_else(|| before.get(&one.unique).copied());
        if let Some(process) = process {
            processes.insert(one.unique, process);
        }
        match outlook {
            Outlook::Alive => false,
            Outlook::Ends => true,
            // Another thread of the process may wait for what the thread began, and go on.
            Outlook::Gone => process.is_some_and(process_ends),
            Outlook::Unseen => one.look_for == LookFor::EndOfClose && one.age >= UNSEEN_MAX,
        }
    };
    waiting.iter().filter(|one| is_over(one)).map(|one| one.unique).collect()
}
