//! Tasks: futures that an executor polls.

use std::fmt;
use std::future::Future;
use std::mem::ManuallyDrop;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use crate::executor::{ExecutorShared, current};
use crate::scope;
use crate::task_memory::TaskBox;

/// Something in the ready queue.
pub(crate) trait Runnable: Send + Sync {
    fn run(self: Arc<Self>);
    /// Drops the future, so that the task never runs again.
    fn abort(&self);
    fn finished(&self) -> bool;
}

const IDLE: u8 = 0;
const QUEUED: u8 = 1;
const RUNNING: u8 = 2;
/// Woken while running: to be queued again afterwards.
const RUNNING_WOKEN: u8 = 3;
const DONE: u8 = 4;

/// A task and its future in one allocation.
struct TaskCell<F> {
    state: AtomicU8,
    shared: Arc<ExecutorShared>,
    work: Mutex<Option<Work<F>>>,
}

/// The parts of a task that it has until it ends.
struct Work<F> {
    future: F,
    /// The scope goes with the future. The scope keeps its tasks, so that finished tasks that still
    /// keep the scope would stay for good.
    scope: Option<Arc<scope::ScopeInner>>,
}

impl<F> TaskCell<F> {
    fn work(&self) -> MutexGuard<'_, Option<Work<F>>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<F: Future<Output = ()> + Send + 'static> Runnable for TaskCell<F> {
    fn run(self: Arc<Self>) {
        // An aborted task may still be in the queue: its state stays DONE.
        if self
            .state
            .compare_exchange(QUEUED, RUNNING, Ordering::AcqRel, Ordering::Acquire)
            .is_err()
        {
            return;
        }
        // SAFETY: the waker stands for `self`, which outlives it, and is never dropped: so no user of the
        // task is counted for it. Clones of it are counted.
        let waker = ManuallyDrop::new(Waker::from(unsafe { Arc::from_raw(Arc::as_ptr(&self)) }));
        let mut slot = self.work();
        let Some(work) = slot.as_mut() else {
            self.state.store(DONE, Ordering::Release);
            return;
        };
        let _scope = scope::enter(work.scope.clone());
        // SAFETY: the future is in the task's allocation, which never moves, and is
        // dropped in place when the slot is cleared.
        let future = unsafe { Pin::new_unchecked(&mut work.future) };
        if future.poll(&mut Context::from_waker(&waker)).is_ready() {
            *slot = None;
            self.state.store(DONE, Ordering::Release);
            return;
        }
        drop(slot);
        let woken = self.state.compare_exchange(RUNNING, IDLE, Ordering::AcqRel, Ordering::Acquire);
        if woken == Err(RUNNING_WOKEN) {
            self.state.store(QUEUED, Ordering::Release);
            self.shared.clone().push(self);
        }
    }

    fn abort(&self) {
        self.state.store(DONE, Ordering::Release);
        *self.work() = None; // in place: it is pinned
    }

    fn finished(&self) -> bool {
        self.state.load(Ordering::Acquire) == DONE
    }
}

impl<F: Future<Output = ()> + Send + 'static> Wake for TaskCell<F> {
    fn wake(self: Arc<Self>) {
        loop {
            let (from, to) = match self.state.load(Ordering::Acquire) {
                IDLE => (IDLE, QUEUED),
                RUNNING => (RUNNING, RUNNING_WOKEN),
                _ => return,
            };
            if self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                if to == QUEUED {
                    self.shared.clone().push(self);
                }
                return;
            }
        }
    }
}

/// Starts `future` on `shared`'s executor, from any thread.
pub(crate) fn spawn_on(
    shared: &Arc<ExecutorShared>,
    future: impl Future<Output = ()> + Send + 'static,
) {
    let scope = scope::entered();
    let task = Arc::new(TaskCell {
        state: AtomicU8::new(QUEUED),
        shared: shared.clone(),
        work: Mutex::new(Some(Work { future, scope: scope.clone() })),
    });
    if !shared.adopt(&task) {
        return;
    }
    if let Some(scope) = scope
        && !scope.adopt(task.clone())
    {
        return; // the scope has been killed: so is everything it would start
    }
    shared.push(task);
}

/// Starts a task on this thread's executor. It goes on by itself; nobody waits for it.
///
/// # Panics
/// Outside of an executor.
pub fn spawn(future: impl Future<Output = ()> + Send + 'static) {
    let shared = current().expect("spawn is for tasks of an executor");
    spawn_on(&shared, future);
}

/// Starts a task whose result can be waited for.
pub fn spawn_join<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> Join<T> {
    let (send, receive) = tokio::sync::oneshot::channel();
    spawn(async move {
        let _ = send.send(future.await); // nobody has to wait for it
    });
    Join(receive)
}

/// Polls `future` once, here and now; if it is not ready, goes on with it as a task.
/// For requests that usually need no wait: those cost no task.
/// Its memory is kept for the next one.
#[inline]
pub fn poll_once_then_spawn(future: impl Future<Output = ()> + Send + 'static) {
    poll_once(TaskBox::pin(future));
}

fn poll_once(mut future: Pin<TaskBox>) {
    let mut nobody = Context::from_waker(Waker::noop());
    if future.as_mut().poll(&mut nobody).is_pending() {
        spawn(future); // polled again at once, now with a waker that leads somewhere
    }
}

/// The result of a task, in time.
pub struct Join<T>(tokio::sync::oneshot::Receiver<T>);

impl<T> Future for Join<T> {
    type Output = Result<T, Aborted>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T, Aborted>> {
        Pin::new(&mut self.0).poll(cx).map_err(|_| Aborted)
    }
}

/// The task was ended before it had a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aborted;

impl fmt::Display for Aborted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the task was ended before it had a result")
    }
}

impl std::error::Error for Aborted {}
