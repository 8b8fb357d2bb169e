//! Batch jobs of callers whose calls are under way: the server asks their clients for them when its
//! status is requested. With each call they would cost every caller a look at its environment.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dray_core::{CallersJob, Pid};
use dray_rt::sync::oneshot;
use dray_rt::{Instant, timeout};

use crate::server::session::ServerSession;
use crate::wire::{CALLERS_MAX, NotifyHead, put_callers};

/// How long clients are waited for, all of them together.
const PATIENCE: Duration = Duration::from_millis(500);
/// Clients asked for one look at the server.
const CLIENTS_MAX: usize = 256;
/// Questions that one client may leave unanswered; then the oldest is forgotten.
const QUESTIONS_MAX: usize = 8;

/// The questions that one client was asked and has not answered.
#[derive(Default)]
pub(crate) struct Questions(Mutex<Open>);

#[derive(Default)]
struct Open {
    last: u32,
    waiting: BTreeMap<u32, oneshot::Sender<Vec<CallersJob>>>,
}

impl Questions {
    fn open(&self) -> std::sync::MutexGuard<'_, Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self) -> (u32, oneshot::Receiver<Vec<CallersJob>>) {
        let (tell, receiver) = oneshot::channel();
        let mut open = self.open();
        open.last = open.last.wrapping_add(1);
        while open.waiting.len() >= QUESTIONS_MAX {
            open.waiting.pop_first();
        }
        let number = open.last;
        open.waiting.insert(number, tell);
        (number, receiver)
    }

    /// An answer; to nothing that was asked it is none.
    pub(crate) fn answered(&self, number: u32, jobs: Vec<CallersJob>) {
        let asked = self.open().waiting.remove(&number);
        asked.into_iter().for_each(|tell| drop(tell.send(jobs.clone()))); // it may wait no more
    }
}

/// Jobs by session and caller.
pub(crate) type Jobs = HashMap<(u64, Pid), Box<str>>;

/// Callers by session.
pub(crate) type Callers = BTreeMap<u64, (Arc<ServerSession>, BTreeSet<Pid>)>;

/// Clients that have been asked.
pub(crate) struct JobQuery {
    since: Instant,
    answers: Vec<(u64, oneshot::Receiver<Vec<CallersJob>>)>,
}

/// Asks each of `sessions` for the jobs of these callers; does not wait.
pub(crate) fn ask(sessions: &Callers) -> JobQuery {
    let answers = sessions.values().take(CLIENTS_MAX).filter_map(|(session, callers)| {
        let connection = session.connections().into_iter().next()?;
        let callers: Vec<Pid> = callers.iter().copied().take(CALLERS_MAX).collect();
        let (number, receiver) = session.questions.ask();
        let mut message = Vec::new();
        NotifyHead { what: NotifyHead::JOB_QUERY, flags: 0, tag: number }.put_message(&mut message);
        put_callers(&callers, &mut message);
        connection.notify(&message).ok()?;
        connection.flush();
        Some((session.id, receiver))
    });
    JobQuery { since: dray_rt::now(), answers: answers.collect() }
}

impl JobQuery {
    /// The jobs that clients have answered in time.
    pub(crate) async fn jobs(self) -> Jobs {
        let mut jobs = Jobs::new();
        for (session, receiver) in self.answers {
            let left = PATIENCE.saturating_sub(self.since.elapsed());
            let Ok(Ok(answer)) = timeout(left, receiver).await else { continue };
            jobs.extend(answer.into_iter().map(|(caller, job)| ((session, caller), job)));
        }
        jobs
    }
}
