//! The time after a loss of the machine in which clients send again what they kept, before
//! anybody does new work.
//!
//! First every client that had a session says what it knows to be on media; only then are
//! changes taken, because one that is older than what somebody else has synced since must
//! not undo that. When all have sent what they kept, or have been silent for a lease, new
//! work begins.

pub(crate) mod grace;
pub(crate) mod keys;
pub(crate) mod life;
pub(crate) mod redone;
pub(crate) mod returning;
pub(crate) mod stable;
pub(crate) mod stamps;
pub(crate) mod tally;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use dray_core::{Context, Errno, Error, Result};
use dray_rt::Instant;

use crate::server::recovery::tally::{RecoveryStatus, Tally};

/// Who is waited for, and for what.
#[derive(Default)]
pub(crate) struct Recovery {
    /// Spares a look at the rest.
    running: AtomicBool,
    pub(crate) tally: Tally,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Sessions that have not said what is on media.
    awaited: BTreeSet<u64>,
    /// Those that have, and send what they kept.
    sending: BTreeSet<u64>,
    /// There may be others, of whom the server does not know.
    anybody: bool,
    /// All that is awaited has been said.
    declared: bool,
    until: Option<Instant>,
    lasts: Duration,
    /// Changes being made again.
    active: u32,
    waiting: Vec<Waker>,
}

/// A change being made again; new work waits for its end.
pub(crate) struct Active<'a>(&'a Recovery);

impl Drop for Active<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.active -= 1;
        self.0.look(state);
    }
}

impl State {
    fn late(&self) -> bool {
        self.until.is_none_or(|until| dray_rt::now() >= until)
    }

    /// Goes from waiting for words to waiting for changes, where it is time.
    fn step(&mut self, tally: &Tally) {
        let said = self.awaited.is_empty() && !self.anybody;
        if !self.declared && (said || self.late()) {
            let missing = std::mem::take(&mut self.awaited).len();
            not_come_back(missing, tally);
            self.declared = true;
            self.until = Some(dray_rt::now() + self.lasts);
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

    /// Begins. `awaited`: sessions that may have kept changes; `anybody`: the server cannot
    /// know all of them. Each step lasts as long as somebody is awaited, or `lasts` without
    /// a sign of life.
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

    /// Ends it where it is over, and wakes whom it may concern.
    fn look(&self, mut state: MutexGuard<'_, State>) {
        state.step(&self.tally);
        if state.over() && self.running.swap(false, Ordering::SeqCst) {
            log::info!("recovery is over: new work goes on");
        }
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// For whoever watches over the server.
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
        if !self.running() || !state.declared || !state.sending.contains(&session) {
            return Err(too_late());
        }
        state.active += 1;
        state.until = Some(dray_rt::now() + state.lasts);
        Ok(Active(self))
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

    /// Waits until new work can be done. Errors: `EINTR` when cancelled.
    pub(crate) async fn wait(&self, cx: &Context) -> Result<()> {
        if !self.running() {
            return Ok(());
        }
        let over = self.wait_for(|_| !self.running());
        let mut over = std::pin::pin!(over);
        std::future::poll_fn(|task| match (over.as_mut().poll(task), &cx.cancel) {
            (Poll::Ready(()), _) => Poll::Ready(Ok(())),
            (Poll::Pending, Some(cancel)) if cancel.poll_set(task) => Poll::Ready(cx.check()),
            (Poll::Pending, _) => Poll::Pending,
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
            std::future::poll_fn(|task| {
                let rings =
                    timer.as_mut().is_some_and(|timer| timer.as_mut().poll(task).is_ready());
                let mut state = self.lock();
                let prolonged = until.is_some() && state.until != until;
                if rings || prolonged || arrived(&state) {
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

fn not_come_back(clients: usize, tally: &Tally) {
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
