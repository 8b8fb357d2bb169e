//! Threads for calls that block.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::cpus::CpuSet;
use crate::executor::in_simulation;

type Job = Box<dyn FnOnce() + Send>;

/// A bounded pool of threads, started as they are needed. A simulation runs the calls
/// where they are made, since nothing may really block there.
pub struct Pool {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    threads_max: usize,
    queue_max: usize,
    /// Where the threads may run: where whoever made the pool could.
    cpus: Option<CpuSet>,
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    /// Who waits for a place in the queue, in the order of arrival.
    waiting: BTreeMap<u64, Waker>,
    next_ticket: u64,
    threads: usize,
    idle: usize,
    closed: bool,
}

/// There is no thread to run a call on, and none can be started; or the call has panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoThread;

impl fmt::Display for NoThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no thread can be started")
    }
}

impl std::error::Error for NoThread {}

/// Somebody who may wait for a place in the queue.
struct Asking<'a> {
    inner: &'a Arc<Inner>,
    /// Its place among those that wait.
    ticket: Option<u64>,
}

impl Asking<'_> {
    /// Puts the job in the queue once there is room, and those that came before have gone.
    fn poll_submit(
        &mut self,
        cx: &mut Context<'_>,
        job: &mut Option<Job>,
    ) -> Poll<Result<(), NoThread>> {
        let mut state = self.inner.lock();
        let turn =
            state.waiting.first_key_value().is_none_or(|(&first, _)| Some(first) == self.ticket);
        if !turn || state.queue.len() >= self.inner.queue_max {
            let ticket = *self.ticket.get_or_insert_with(|| {
                state.next_ticket += 1;
                state.next_ticket
            });
            state.waiting.insert(ticket, cx.waker().clone());
            return Poll::Pending;
        }
        if let Some(ticket) = self.ticket.take() {
            state.waiting.remove(&ticket);
        }
        state.queue.extend(job.take());
        let next = self.inner.next_waiting(&state);
        let started = self.inner.find_thread(&mut state);
        drop(state);
        next.into_iter().for_each(Waker::wake);
        Poll::Ready(started)
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut state = self.inner.lock();
        state.waiting.remove(&ticket);
        let next = self.inner.next_waiting(&state);
        drop(state);
        next.into_iter().for_each(Waker::wake);
    }
}

/// A thread without work ends after this long.
const IDLE_TIME: std::time::Duration = std::time::Duration::from_secs(10);

impl Pool {
    /// A pool of at most `threads_max` threads called `name`, behind a queue of at most
    /// `queue_max` calls; further ones wait for a place in it. The threads run on the CPUs that the calling thread may use now, also
    /// those that are started later by a thread that is pinned to one.
    pub fn new(name: &str, threads_max: usize, queue_max: usize) -> Pool {
        assert!(threads_max > 0 && queue_max > 0);
        Pool {
            inner: Arc::new(Inner {
                name: name.to_owned(),
                threads_max,
                queue_max,
                cpus: CpuSet::allowed().ok(),
                state: Mutex::default(),
                work: Condvar::new(),
            }),
        }
    }

    /// Runs `call` on a thread of the pool and waits for its result.
    pub async fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoThread> {
        if in_simulation() {
            return Ok(call());
        }
        let (send, receive) = tokio::sync::oneshot::channel();
        let mut job: Option<Job> = Some(Box::new(move || {
            let _ = send.send(call()); // whoever asked may have gone
        }));
        let mut asking = Asking { inner: &self.inner, ticket: None };
        std::future::poll_fn(|cx| asking.poll_submit(cx, &mut job)).await?;
        receive.await.map_err(|_| NoThread) // only when the call panics
    }

    /// Calls that wait for a thread now.
    pub fn waiting(&self) -> usize {
        let state = self.inner.lock();
        state.queue.len() + state.waiting.len()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.inner.lock().closed = true;
        self.inner.work.notify_all();
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whom to wake because there is room in the queue.
    fn next_waiting(&self, state: &State) -> Option<Waker> {
        let room = state.queue.len() < self.queue_max;
        let first = room.then(|| state.waiting.first_key_value()).flatten();
        first.map(|(_, waker)| waker.clone())
    }

    /// Sees to it that a thread comes to what was put into the queue last.
    fn find_thread(self: &Arc<Inner>, state: &mut State) -> Result<(), NoThread> {
        if state.idle >= state.queue.len() || state.threads == self.threads_max {
            self.work.notify_one();
            return Ok(());
        }
        let inner = self.clone();
        let started =
            std::thread::Builder::new().name(self.name.clone()).spawn(move || inner.work());
        match started {
            Ok(_) => state.threads += 1,
            Err(_) if state.threads > 0 => {} // the ones there are will come to it
            Err(_) => {
                state.queue.pop_back();
                return Err(NoThread);
            }
        }
        Ok(())
    }

    fn work(&self) {
        if let Some(cpus) = &self.cpus {
            // Where it fails the thread runs where the one that started it does, which is slower
            // at worst.
            let _ = cpus.pin();
        }
        let mut state = self.lock();
        loop {
            if let Some(job) = state.queue.pop_front() {
                let next = self.next_waiting(&state);
                drop(state);
                next.into_iter().for_each(Waker::wake);
                // It counts as one of the threads there may be: its death would leave the pool one
                // short. The panic has been told, and whoever waits for the call learns of it.
                let _ = catch_unwind(AssertUnwindSafe(job));
                state = self.lock();
                continue;
            }
            if state.closed {
                break;
            }
            state.idle += 1;
            let (woken, result) =
                self.work.wait_timeout(state, IDLE_TIME).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if result.timed_out() && state.queue.is_empty() {
                break;
            }
        }
        state.threads -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DriverKind, Executor};

    /// More calls than the queue takes were failed, and whoever had asked saw it.
    #[test]
    fn calls_that_find_no_place_wait_for_one() {
        let mut executor = Executor::new(DriverKind::Epoll).unwrap();
        executor.block_on(async {
            let pool = std::sync::Arc::new(Pool::new("test", 1, 1));
            let (thaw, frozen) = std::sync::mpsc::channel::<()>();
            let run = |work: Box<dyn FnOnce() -> u32 + Send>| {
                let pool = pool.clone();
                crate::spawn_join(async move { pool.run(work).await })
            };
            let mut calls = vec![run(Box::new(move || {
                frozen.recv().unwrap();
                0
            }))];
            calls.extend((1..20).map(|number| run(Box::new(move || number))));
            crate::yield_now().await;
            crate::yield_now().await;
            thaw.send(()).unwrap();
            for (number, call) in calls.into_iter().enumerate() {
                assert_eq!(call.await.unwrap(), Ok(number as u32));
            }
            assert_eq!(pool.waiting(), 0);
        });
    }

    /// The thread ended and was still counted: nobody came to any later call.
    #[test]
    fn a_call_that_panics_takes_no_thread_with_it() {
        let mut executor = Executor::new(DriverKind::Epoll).unwrap();
        executor.block_on(async {
            let pool = Pool::new("test", 1, 1);
            for number in 0..3 {
                assert_eq!(pool.run(|| panic!("on purpose")).await, Err::<(), _>(NoThread));
                let limit = std::time::Duration::from_secs(60);
                let next = crate::timeout(limit, pool.run(move || number)).await;
                assert_eq!(next.expect("nobody runs it"), Ok(number));
            }
        });
    }

    #[test]
    fn threads_run_where_the_pool_was_made_not_where_they_were_started() {
        let allowed = CpuSet::allowed().unwrap();
        let pool = Pool::new("test", 1, 1);
        let counted = std::thread::spawn(move || {
            let first = CpuSet::allowed().unwrap().iter().next().unwrap();
            CpuSet::only(first).pin().unwrap();
            let mut executor = Executor::new(DriverKind::Epoll).unwrap();
            executor.block_on(pool.run(|| CpuSet::allowed().unwrap())).unwrap()
        });
        assert_eq!(counted.join().unwrap(), allowed);
    }
}
