//! Threads for calls that block.

mod near;
mod queue;

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::cpus::CpuSet;
use crate::executor::in_simulation;

use near::NearThread;
use queue::ClientQueue;
pub use queue::Share;

type Job = Box<dyn FnOnce() + Send>;

/// A bounded pool of threads, started as they are needed. A simulation runs the calls
/// where they are made, since nothing may really block there.
pub struct Pool {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    threads_max: usize,
    /// The most calls of each client that wait.
    queue_max: usize,
    /// Where the threads may run: where the creator of the pool could.
    cpus: Option<CpuSet>,
    state: Mutex<State>,
    work: Condvar,
    near_work: Condvar,
}

struct State {
    queue: ClientQueue<Job>,
    /// The wakers of calls that wait for a place in the queue, by client and order of arrival.
    waiting: BTreeMap<(u64, u64), Waker>,
    next_ticket: u64,
    threads: usize,
    idle: usize,
    /// A thread beside `threads`.
    near: NearThread,
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

/// The thread that comes to a call.
enum Found {
    /// One that runs, and looks for what is next.
    Running,
    /// Any that sleeps.
    Sleeping,
    /// The near thread, which sleeps.
    Near,
}

/// A task that may wait for a place in the queue.
struct Asking<'a> {
    inner: &'a Arc<Inner>,
    share: Share,
    is_short: bool,
    /// The call's place among the waiting calls of its client.
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
        let client = self.share.client;
        let is_first = state.first_of(client).is_none_or(|(first, _)| Some(first) == self.ticket);
        if !is_first || state.queue.len_of(client) >= self.inner.queue_max {
            let ticket = *self.ticket.get_or_insert_with(|| {
                state.next_ticket += 1;
                state.next_ticket
            });
            state.waiting.insert((client, ticket), cx.waker().clone());
            return Poll::Pending;
        }
        if let Some(ticket) = self.ticket.take() {
            state.waiting.remove(&(client, ticket));
        }
        let found = match job.take() {
            Some(job) => self.inner.submit(&mut state, self.share, job, self.is_short),
            None => Ok(Found::Running),
        };
        let next = self.inner.next_waiting(&state, client);
        drop(state);
        next.into_iter().for_each(Waker::wake);
        Poll::Ready(found.map(|found| self.inner.wake(found)))
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut state = self.inner.lock();
        state.waiting.remove(&(self.share.client, ticket));
        let next = self.inner.next_waiting(&state, self.share.client);
        drop(state);
        next.into_iter().for_each(Waker::wake);
    }
}

/// A thread without work ends after this long.
const IDLE_TIME: std::time::Duration = std::time::Duration::from_secs(10);

impl Pool {
    /// A pool of at most `threads_max` threads called `name`, behind a queue of at most `queue_max`
    /// calls; further ones wait for a place in it. The threads run on the CPUs that the calling
    /// thread may use now. That also holds for threads that are started later by a thread that is
    /// pinned to one.
    pub fn new(name: &str, threads_max: usize, queue_max: usize) -> Pool {
        Pool::shared(name, threads_max, queue_max, (threads_max, threads_max))
    }

    /// A pool that clients share. Each client has a queue of its own, and at most `client_max` of
    /// the threads, of which calls about one thing have `thing_max`.
    pub fn shared(
        name: &str,
        threads_max: usize,
        queue_max: usize,
        (client_max, thing_max): (usize, usize),
    ) -> Pool {
        assert!(threads_max > 0 && queue_max > 0 && client_max > 0 && thing_max > 0);
        Pool {
            inner: Arc::new(Inner {
                name: name.to_owned(),
                threads_max,
                queue_max,
                cpus: CpuSet::allowed().ok(),
                state: Mutex::new(State {
                    queue: ClientQueue::new(client_max, thing_max),
                    waiting: BTreeMap::new(),
                    next_ticket: 0,
                    threads: 0,
                    idle: 0,
                    near: NearThread::default(),
                    closed: false,
                }),
                work: Condvar::new(),
                near_work: Condvar::new(),
            }),
        }
    }

    /// Runs `call` on a thread of the pool and waits for its result.
    pub async fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoThread> {
        self.run_for(Share { client: 0, thing: None }, call).await
    }

    /// As [`Pool::run`], when the client is next.
    pub async fn run_for<T: Send + 'static>(
        &self,
        share: Share,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoThread> {
        self.run_call(share, false, call).await
    }

    /// As [`Pool::run_for`], for a call that uses a CPU for some 20 microseconds at most, however long it waits. While
    /// the pool has no other call, and the running executor nothing else to do, it runs on this CPU. One thread more than
    /// the pool may have is for that.
    pub async fn run_short_for<T: Send + 'static>(
        &self,
        share: Share,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoThread> {
        self.run_call(share, true, call).await
    }

    async fn run_call<T: Send + 'static>(
        &self,
        share: Share,
        is_short: bool,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoThread> {
        if in_simulation() {
            return Ok(call());
        }
        let (send, receive) = tokio::sync::oneshot::channel();
        let mut job: Option<Job> = Some(Box::new(move || {
            // The caller may have gone. A call of his that was not begun is not to come behind what
            // others have done since.
            if !send.is_closed() {
                let _ = send.send(call());
            }
        }));
        let mut asking = Asking { inner: &self.inner, share, is_short, ticket: None };
        std::future::poll_fn(|cx| asking.poll_submit(cx, &mut job)).await?;
        receive.await.map_err(|_| NoThread) // only when the call panics
    }

    /// Has `call` run on a thread of the pool, whatever other caller waits for a place in the
    /// queue: the caller sees to a bound. Where there is no thread it is run here.
    pub fn spawn_for(&self, share: Share, call: impl FnOnce() + Send + 'static) {
        if in_simulation() {
            return call();
        }
        let waiting = Arc::new(Mutex::new(Some(call)));
        let take =
            |from: &Mutex<Option<_>>| from.lock().unwrap_or_else(PoisonError::into_inner).take();
        let theirs = waiting.clone();
        let job = Box::new(move || {
            let call = theirs.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(call) = call {
                call();
            }
        });
        let found = self.inner.submit(&mut self.inner.lock(), share, job, false);
        match found {
            Ok(found) => self.inner.wake(found),
            Err(NoThread) => take(&waiting).into_iter().for_each(|call| call()),
        }
    }

    /// Calls that wait for a thread now.
    pub fn waiting(&self) -> usize {
        let state = self.inner.lock();
        state.queue.len() + state.waiting.len()
    }
}

impl State {
    /// The call of a client that has waited longest for a place, and how to wake it.
    fn first_of(&self, client: u64) -> Option<(u64, &Waker)> {
        let mut waiting = self.waiting.range((client, 0)..=(client, u64::MAX));
        waiting.next().map(|((_, ticket), waker)| (*ticket, waker))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.inner.lock().closed = true;
        self.inner.work.notify_all();
        self.inner.near_work.notify_all();
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The call to wake because there is room in the queue of its client.
    fn next_waiting(&self, state: &State, client: u64) -> Option<Waker> {
        let room = state.queue.len_of(client) < self.queue_max;
        let first = room.then(|| state.first_of(client)).flatten();
        first.map(|(_, waker)| waker.clone())
    }

    /// Puts a call into the queue, and sees to it that a thread comes to it, once it is woken.
    fn submit(
        self: &Arc<Inner>,
        state: &mut State,
        share: Share,
        job: Job,
        is_short: bool,
    ) -> Result<Found, NoThread> {
        if !state.queue.push(share, job) {
            return Ok(Found::Running); // the thread in its way comes to it
        }
        if is_short && self.give_near(state) {
            return Ok(Found::Near);
        }
        let found = self.find_thread(state);
        if found.is_err() {
            state.queue.take_back(share);
        }
        found
    }

    /// Wakes a thread. Not with the state locked: it would wait for the lock at once, and be woken again.
    fn wake(&self, found: Found) {
        match found {
            Found::Running => {}
            Found::Sleeping => self.work.notify_one(),
            Found::Near => self.near_work.notify_one(),
        }
    }

    /// Finds or starts a thread that comes to what could begin, once it is woken.
    fn find_thread(self: &Arc<Inner>, state: &mut State) -> Result<Found, NoThread> {
        if state.idle >= state.queue.len() || state.threads == self.threads_max {
            return Ok(Found::Sleeping);
        }
        let inner = self.clone();
        let started =
            std::thread::Builder::new().name(self.name.clone()).spawn(move || inner.work());
        match started {
            Ok(_) => {
                state.threads += 1;
                Ok(Found::Running)
            }
            Err(_) if state.threads > 0 => Ok(Found::Sleeping), // they will come to it
            Err(_) => Err(NoThread),
        }
    }

    fn work(self: &Arc<Inner>) {
        if let Some(cpus) = &self.cpus {
            // Where it fails the thread runs where the one that started it does, which is slower
            // at worst.
            let _ = cpus.pin();
        }
        let mut state = self.lock();
        loop {
            if let Some((share, job)) = state.queue.pop() {
                let next = self.next_waiting(&state, share.client);
                drop(state);
                next.into_iter().for_each(Waker::wake);
                run_caught(job);
                state = self.lock();
                state.queue.done(share);
                // The end of a job may let two begin, and this thread takes one.
                if state.queue.len() > 1
                    && state.queue.has_next()
                    && let Ok(found) = self.find_thread(&mut state)
                {
                    self.wake(found); // else there is this one
                }
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
            if result.timed_out() && !state.queue.has_next() {
                break;
            }
        }
        state.threads -= 1;
    }
}

/// The thread counts as one of the threads there may be: its death would leave the pool one short. A panic has been
/// reported, and the waiting caller learns of it.
fn run_caught(job: Job) {
    let _ = catch_unwind(AssertUnwindSafe(job));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DriverKind, Executor};

    /// More calls than the queue takes were failed, and their callers saw it.
    // proves: P26
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

    /// A call in the queue was made long after the session that it was for had ended.
    #[test]
    fn what_nobody_waits_for_any_more_is_not_begun() {
        let mut executor = Executor::new(DriverKind::Epoll).unwrap();
        executor.block_on(async {
            let pool = Arc::new(Pool::new("test", 1, 10));
            let (thaw, frozen) = std::sync::mpsc::channel::<()>();
            let blocks = pool.clone();
            let blocked = crate::spawn_join(async move {
                blocks.run(move || frozen.recv().unwrap_or_default()).await
            });
            crate::yield_now().await;
            let made = Arc::new(std::sync::atomic::AtomicBool::new(false));
            let theirs = made.clone();
            let call = pool.run(move || theirs.store(true, std::sync::atomic::Ordering::SeqCst));
            let over = crate::timeout(std::time::Duration::from_millis(1), call).await;
            assert!(over.is_err());
            drop(thaw);
            assert_eq!(blocked.await.unwrap(), Ok(()));
            assert_eq!(pool.run(|| ()).await, Ok(()));
            assert!(!made.load(std::sync::atomic::Ordering::SeqCst));
        });
    }

    /// A client whose calls all block took all of the threads, and the next one waited for it.
    #[test]
    fn a_client_that_blocks_leaves_threads_to_others() {
        let mut executor = Executor::new(DriverKind::Epoll).unwrap();
        executor.block_on(async {
            let pool = Arc::new(Pool::shared("test", 4, 100, (2, 1)));
            let (thaw, frozen) = std::sync::mpsc::channel::<()>();
            let frozen = Arc::new(Mutex::new(frozen));
            let blocked: Vec<_> = (0..20)
                .map(|number| {
                    let (pool, frozen) = (pool.clone(), frozen.clone());
                    let share = Share { client: 1, thing: Some(number % 3) };
                    crate::spawn_join(async move {
                        let block = move || frozen.lock().unwrap().recv().unwrap_or_default();
                        pool.run_for(share, block).await
                    })
                })
                .collect();
            let limit = std::time::Duration::from_secs(60);
            for client in 2..10 {
                let share = Share { client, thing: None };
                let call = crate::timeout(limit, pool.run_for(share, move || client));
                assert_eq!(call.await.expect("no thread is left to it"), Ok(client));
            }
            drop(thaw);
            for call in blocked {
                assert_eq!(call.await.unwrap(), Ok(()));
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
