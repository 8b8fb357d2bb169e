//! The time after a loss of the machine in which clients send again what they kept, before
//! anybody does new work.
//!
//! First every client that had a session says what it knows to be on media. Only then are changes
//! taken, because an older change must not undo what somebody else has synced since. When all have
//! sent what they kept, or have been silent for a lease, new work begins.

pub(crate) mod awaited;
pub(crate) mod epoch;
pub(crate) mod grace;
pub(crate) mod group_sync;
pub(crate) mod keys;
pub(crate) mod replayed;
pub(crate) mod tally;
pub(crate) mod window;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use dray_core::{Context, Errno, Error, Result};
use dray_rt::Instant;

use crate::server::recovery::tally::{RecoveryCounts, RecoveryStatus};

/// How long changes are taken, in times of a lease. Without this limit one client that never comes
/// to its end could keep all others from new work.
const SENDING_LEASES_MAX: u32 = 10;
/// A change that takes this part of a lease is slow: not its client holds others up then, but the
/// file system below.
const SLOW_PART: u32 = 10;

/// The sessions that the recovery waits for, and the step that each has to reach.
#[derive(Default)]
pub(crate) struct Recovery {
    /// Spares a look at the rest.
    running: AtomicBool,
    pub(crate) tally: RecoveryCounts,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Sessions that have not said what is on media.
    awaited: BTreeSet<u64>,
    /// The sessions that have said it, and send the changes that they kept.
    sending: BTreeSet<u64>,
    /// There may be others, of whom the server does not know.
    anybody: bool,
    /// All that is awaited has been said.
    declared: bool,
    until: Option<Instant>,
    /// Beyond this no change prolongs it; known once changes are taken.
    latest: Option<Instant>,
    lasts: Duration,
    /// Changes being made again.
    active: u32,
    /// The time of the recovery was up, and the recovery goes on: callers that wait have to look
    /// how long.
    revived: bool,
    waiting: Vec<Waker>,
}

/// A change being made again; new work waits for its end.
pub(crate) struct Active<'a> {
    recovery: &'a Recovery,
    begun: Instant,
}

impl Drop for Active<'_> {
    fn drop(&mut self) {
        let mut state = self.recovery.lock();
        state.active -= 1;
        if self.begun.elapsed() >= state.lasts / SLOW_PART {
            // Other clients had to wait with theirs.
            state.latest = state.latest.max(Some(dray_rt::now() + state.lasts));
            state.prolong();
        }
        self.recovery.look(state);
    }
}

impl State {
    fn late(&self) -> bool {
        self.until.is_none_or(|until| dray_rt::now() >= until)
    }

    /// A client has shown that it is there, or could not.
    fn prolong(&mut self) {
        let next = dray_rt::now() + self.lasts;
        self.revived |= self.late();
        self.until = Some(self.latest.map_or(next, |latest| latest.min(next)));
    }

    /// Changes to replay are refused from every client.
    fn is_at_its_end(&self) -> bool {
        self.latest.is_some_and(|latest| dray_rt::now() >= latest)
    }

    /// Goes from waiting for words to waiting for changes, where it is time.
    fn step(&mut self, tally: &RecoveryCounts) {
        let said = self.awaited.is_empty() && !self.anybody;
        if !self.declared && (said || self.late()) {
            let missing = std::mem::take(&mut self.awaited).len();
            not_come_back(missing, tally);
            self.declared = true;
            self.latest = Some(dray_rt::now() + self.lasts * SENDING_LEASES_MAX);
            self.prolong();
        }
    }

    fn over(&self) -> bool {
        self.declared && self.active == 0 && (self.sending.is_empty() || self.late())
    }
}

impl Recovery {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins. `awaited`: sessions that may have kept changes; `anybody`: the server cannot know
    /// all of them. Each step lasts while a client is awaited, up to `lasts` without any message. A
    /// client that still sends changes after [`SENDING_LEASES_MAX`] times that is not awaited any
    /// more, unless the file system below takes so long for each.
    pub(crate) fn begin(&self, awaited: BTreeSet<u64>, anybody: bool, lasts: Duration) {
        if awaited.is_empty() && !anybody {
            return;
        }
        log::warn!(
            "the machine has been restarted: waiting up to {} s for {} to send again what was not \
             synced; new work waits",
            lasts.as_secs(),
            if anybody { "all clients".to_owned() } else { format!("{} clients", awaited.len()) }
        );
        let mut state = self.lock();
        let until = Some(dray_rt::now() + lasts);
        *state = State { awaited, anybody, until, lasts, ..State::default() };
        self.running.store(true, Ordering::SeqCst);
    }

    /// Ends the recovery where it is over, and wakes the callers that it may concern: all, if there
    /// is news for them. Each client's word and each change come by here, and thousands may wait.
    fn look(&self, mut state: MutexGuard<'_, State>) {
        let was_declared = state.declared;
        state.step(&self.tally);
        let over = state.over() && self.running.swap(false, Ordering::SeqCst);
        if over {
            log::info!("recovery is over: new work goes on");
        }
        let news = over || state.declared != was_declared || std::mem::take(&mut state.revived);
        let waiting = if news { std::mem::take(&mut state.waiting) } else { Vec::new() };
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// For the administrator's status.
    pub(crate) fn status(&self) -> RecoveryStatus {
        self.tally.status(self.running())
    }

    /// Whether new work has to wait.
    pub(crate) fn running(&self) -> bool {
        self.running.load(Ordering::SeqCst)
    }

    /// `session` has said everything that it knows to be on media. Waits until the others
    /// have, too. Errors: `ETIMEDOUT`, it is too late for that.
    pub(crate) async fn declare(&self, session: u64) -> Result<()> {
        self.admit(session)?;
        {
            let mut state = self.lock();
            state.awaited.remove(&session);
            state.sending.insert(session);
            self.look(state);
        }
        self.wait_for(|state| state.declared).await;
        Ok(())
    }

    /// Whether `session` may say what it knows to be on media. Errors: `ETIMEDOUT`.
    pub(crate) fn admit(&self, session: u64) -> Result<()> {
        let state = self.lock();
        let known = state.awaited.contains(&session) || state.sending.contains(&session);
        let open = !state.declared && state.anybody;
        if self.running() && (known || open) { Ok(()) } else { Err(too_late()) }
    }

    /// `session` sends a change. Errors: `ETIMEDOUT`, new work may have been done since.
    pub(crate) fn enter(&self, session: u64) -> Result<Active<'_>> {
        let mut state = self.lock();
        let sends = state.declared && state.sending.contains(&session);
        if !self.running() || !sends || state.is_at_its_end() {
            return Err(too_late());
        }
        state.active += 1;
        state.prolong();
        Ok(Active { recovery: self, begun: dray_rt::now() })
    }

    /// `session` has nothing more to send, or is gone.
    pub(crate) fn done(&self, session: u64) {
        if !self.running() {
            return;
        }
        let mut state = self.lock();
        let missing = usize::from(state.awaited.remove(&session));
        not_come_back(missing, &self.tally); // its lease ended, or it was evicted
        state.sending.remove(&session);
        self.look(state);
    }

    /// The export is withdrawn: nobody waits for anybody any more. It begins anew with the next
    /// opening.
    pub(crate) fn abandon(&self) {
        let mut state = self.lock();
        state.declared = true;
        self.running.store(false, Ordering::SeqCst);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Waits until new work can be done. Errors: `EINTR` when cancelled.
    pub(crate) async fn wait(&self, cx: &Context) -> Result<()> {
        if !self.running() {
            return Ok(());
        }
        let over = self.wait_for(|_| !self.running());
        let mut over = std::pin::pin!(over);
        std::future::poll_fn(|task| match over.as_mut().poll(task) {
            Poll::Ready(()) => Poll::Ready(Ok(())),
            Poll::Pending => cx.poll_cancelled(task).map(Err),
        })
        .await
    }

    async fn wait_for(&self, arrived: impl Fn(&State) -> bool) {
        loop {
            // Beyond the time it ends with the last change that is being made.
            let until = match self.lock() {
                state if arrived(&state) => return,
                state => state.until.filter(|_| !state.late()),
            };
            let mut timer = until.map(|until| Box::pin(dray_rt::sleep_until(until)));
            let mut woken = false;
            std::future::poll_fn(|task| {
                let rings =
                    timer.as_mut().is_some_and(|timer| timer.as_mut().poll(task).is_ready());
                let mut state = self.lock();
                // There is news; what was prolonged before the time is up shows when it is.
                if rings || std::mem::replace(&mut woken, true) || arrived(&state) {
                    return Poll::Ready(());
                }
                state.waiting.push(task.waker().clone());
                Poll::Pending
            })
            .await;
            match self.lock() {
                state if state.late() => self.look(state),
                _ => {}
            }
        }
    }
}

fn not_come_back(clients: usize, tally: &RecoveryCounts) {
    if clients > 0 {
        log::warn!(
            "{clients} clients have not come back after the loss of power: what they wrote and \
             did not sync may be lost"
        );
        tally.missing(clients);
    }
}

fn too_late() -> Error {
    Error::new(Errno::ETIMEDOUT)
        .because("the server takes no changes from before the loss of power any more")
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_rt::{DriverKind, Executor, now, sleep, spawn_join, timeout};
    use std::future::poll_fn;
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    const LASTS: Duration = Duration::from_secs(60);

    /// A recovery in which session 1 has said what it knows, and may send.
    async fn sending() -> Arc<Recovery> {
        let recovery = Arc::new(Recovery::default());
        recovery.begin(BTreeSet::from([1]), false, LASTS);
        recovery.declare(1).await.unwrap();
        recovery
    }

    fn simulated(test: impl Future<Output = ()>) {
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(test);
    }

    /// A client that never said that it was done kept all others from new work for ever. It sent a
    /// change every now and then, or one after the other.
    // proves: P106
    #[test]
    fn a_client_that_never_ends_does_not_hold_up_the_others_for_ever() {
        simulated(async {
            for pause in [Duration::ZERO, LASTS / 2] {
                let (recovery, begin) = (sending().await, now());
                let mut endless = Vec::new();
                for number in 0..2 {
                    let recovery = recovery.clone();
                    endless.push(spawn_join(async move {
                        sleep(Duration::from_secs(number)).await;
                        while let Ok(_active) = recovery.enter(1) {
                            sleep(Duration::from_secs(2)).await;
                            drop(_active);
                            sleep(pause).await;
                        }
                    }));
                }
                let cx = Context::system();
                let over = timeout(LASTS * (SENDING_LEASES_MAX + 2), recovery.wait(&cx)).await;
                over.expect("it lasts for ever").unwrap();
                assert!(begin.elapsed() >= LASTS * (SENDING_LEASES_MAX - 1));
                for task in endless {
                    task.await.unwrap();
                }
            }
        });
    }

    /// Each change that was made again woke everybody, and each word of each client all the others.
    // proves: P129
    #[test]
    fn clients_in_recovery_are_woken_only_by_news_for_them() {
        const WAITING: u64 = 200;
        simulated(async {
            let recovery = Arc::new(Recovery::default());
            recovery.begin((0..WAITING).collect(), false, LASTS);
            let polls = Arc::new(AtomicUsize::new(0));
            let mut waiting = Vec::new();
            for session in 0..WAITING {
                let (recovery, polls) = (recovery.clone(), polls.clone());
                waiting.push(spawn_join(async move {
                    let mut declares = pin!(recovery.declare(session));
                    poll_fn(|task| {
                        polls.fetch_add(1, Ordering::SeqCst);
                        declares.as_mut().poll(task)
                    })
                    .await
                    .unwrap();
                    let cx = Context::system();
                    let mut over = pin!(recovery.wait(&cx));
                    poll_fn(|task| {
                        polls.fetch_add(1, Ordering::SeqCst);
                        over.as_mut().poll(task)
                    })
                    .await
                    .unwrap();
                }));
            }
            sleep(Duration::from_secs(1)).await;
            for _ in 0..100 {
                drop(recovery.enter(7).unwrap());
                sleep(Duration::from_millis(1)).await;
            }
            (0..WAITING).for_each(|session| recovery.done(session));
            for task in waiting {
                task.await.unwrap();
            }
            let polls = polls.load(Ordering::SeqCst) as u64;
            assert!(polls <= 6 * WAITING, "{polls} looks of {WAITING}");
        });
    }

    /// A delay by a file system is no delay by a client.
    // proves: P106
    #[test]
    fn a_hanging_file_system_costs_a_client_none_of_its_time() {
        simulated(async {
            let recovery = sending().await;
            let active = recovery.enter(1).unwrap();
            sleep(LASTS * SENDING_LEASES_MAX * 2).await;
            drop(active);
            sleep(LASTS / 2).await;
            drop(recovery.enter(1).expect("it has had no chance"));
            recovery.done(1);
            assert!(!recovery.running());
        });
    }
}
