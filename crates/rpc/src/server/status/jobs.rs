//! Batch jobs of callers whose calls are under way: the server asks their clients for them when its
//! status is requested. With each call they would cost every caller a look at its environment.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dray_core::{CallersJob, Pid};
use dray_rt::sync::oneshot;
use dray_rt::{Instant, timeout};

use crate::server::service::{Inner, lock};
use crate::server::session::ServerSession;
use crate::wire::{CALLERS_MAX, NotifyHead, put_callers};

/// How long clients are waited for, all of them together.
const PATIENCE: Duration = Duration::from_millis(500);
/// The same where a server above waits as long as that for the answer.
const PATIENCE_BELOW: Duration = Duration::from_millis(300);
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
    patience: Duration,
    answers: Vec<(u64, oneshot::Receiver<Vec<CallersJob>>)>,
}

/// Asks each of `sessions` for the jobs of these callers; does not wait.
pub(crate) fn ask(sessions: &Callers) -> JobQuery {
    ask_within(sessions, PATIENCE)
}

fn ask_within(sessions: &Callers, patience: Duration) -> JobQuery {
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
    JobQuery { since: dray_rt::now(), patience, answers: answers.collect() }
}

impl JobQuery {
    /// The jobs that clients have answered in time.
    pub(crate) async fn jobs(self) -> Jobs {
        let mut jobs = Jobs::new();
        for (session, receiver) in self.answers {
            let left = self.patience.saturating_sub(self.since.elapsed());
            let Ok(Ok(answer)) = timeout(left, receiver).await else { continue };
            jobs.extend(answer.into_iter().map(|(caller, job)| ((session, caller), job)));
        }
        jobs
    }
}

/// What is known of the jobs of each caller; none: of a call with this caller it is not known.
type KnownJobs = BTreeMap<Pid, BTreeSet<Option<Box<str>>>>;

impl Inner {
    /// The jobs of those of `callers` that have calls to `export` under way, for the server that it is forwarded to.
    /// There a caller is a number alone. Two clients may have the same number: both have to say the same.
    pub(in crate::server) async fn jobs_of_forwarded(
        &self,
        export: &str,
        callers: &[Pid],
    ) -> Vec<CallersJob> {
        let (mut jobs, unknown) = self.callers_under_way(export, callers);
        let answered = ask_within(&unknown, PATIENCE_BELOW).jobs().await;
        for (session, (_, asked)) in &unknown {
            for caller in asked {
                let job = answered.get(&(*session, *caller)).cloned();
                jobs.entry(*caller).or_default().insert(job);
            }
        }
        let only = |(caller, mut jobs): (Pid, BTreeSet<Option<Box<str>>>)| {
            let job = jobs.pop_first().filter(|_| jobs.is_empty())??;
            Some((caller, job))
        };
        jobs.into_iter().filter_map(only).collect()
    }

    /// The jobs that came with calls, and the callers whose clients are to be asked.
    fn callers_under_way(&self, export: &str, callers: &[Pid]) -> (KnownJobs, Callers) {
        let callers: BTreeSet<Pid> = callers.iter().copied().collect();
        let sessions = lock(&self.sessions).clone();
        let (mut known, mut unknown) = (KnownJobs::new(), Callers::new());
        for call in lock(&self.running).values().filter(|call| callers.contains(&call.cx.pid)) {
            let of_export = |session: &&Arc<ServerSession>| session.export.name == export;
            let Some(session) = sessions.get(&call.session).filter(of_export) else { continue };
            let job = &call.cx.who.job;
            if job.is_empty() && session.knows_jobs() {
                let of = unknown.entry(session.id);
                of.or_insert_with(|| (session.clone(), BTreeSet::new())).1.insert(call.cx.pid);
            } else {
                let job = (!job.is_empty()).then(|| job.clone());
                known.entry(call.cx.pid).or_default().insert(job);
            }
        }
        (known, unknown)
    }
}
