//! The near thread of a pool: it makes short calls on the CPU of their caller.
//!
//! A call that is handed over wakes a thread, and its end wakes the caller. A thread without a CPU is woken on one that
//! is idle. To wake an idle CPU, twice, costs several times what a short call takes. The caller of a lone call has
//! nothing else to do meanwhile, and its CPU is free.

use std::sync::{Arc, MutexGuard};

use super::{IDLE_TIME, Inner, Job, NoThread, Share, State, run_caught};
use crate::cpus::{CpuSet, current_cpu, this_thread};
use crate::executor::is_nothing_else_ready;

/// What the pool knows of its near thread.
#[derive(Default)]
pub(super) struct NearThread {
    is_started: bool,
    /// The number of the thread, once it runs.
    tid: Option<libc::pid_t>,
    /// The CPU that it is pinned to.
    cpu: Option<usize>,
    /// The thread waits for a call.
    is_idle: bool,
    given: Option<(Share, Job)>,
}

impl NearThread {
    /// Whether it can take a call.
    fn is_free(&self) -> bool {
        !self.is_started || self.is_idle && self.given.is_none()
    }
}

impl Inner {
    /// Gives the call that was queued to the near thread, which is to be woken then. That is done if the pool has no other
    /// call, and the caller's executor nothing else to run. False: another thread has to come to it.
    pub(super) fn give_near(self: &Arc<Inner>, state: &mut State) -> bool {
        let is_lone = state.idle == state.threads && state.queue.len() == 1;
        if !is_lone || !state.near.is_free() || !is_nothing_else_ready() {
            return false;
        }
        let Some(cpu) = current_cpu() else { return false };
        if !state.near.is_started {
            let (inner, name) = (self.clone(), self.name.clone());
            let started =
                std::thread::Builder::new().name(name).spawn(move || inner.work_near(cpu));
            if started.is_err() {
                return false;
            }
            (state.near.is_started, state.near.cpu) = (true, Some(cpu));
        }
        state.near.given = state.queue.pop();
        let near = &mut state.near;
        if near.cpu != Some(cpu)
            && let Some(tid) = near.tid
        {
            // It sleeps. Where it cannot be moved it is woken where it was, which is slower at worst.
            let moved = CpuSet::only(cpu).pin_thread(tid).is_ok();
            near.cpu = moved.then_some(cpu);
        }
        true
    }

    fn work_near(self: &Arc<Inner>, cpu: usize) {
        let _ = CpuSet::only(cpu).pin(); // as above
        let mut state = self.lock();
        state.near.tid = Some(this_thread());
        loop {
            if let Some((share, job)) = state.near.given.take() {
                drop(state);
                run_caught(job);
                state = self.lock();
                state.queue.done(share);
                // Calls that came meanwhile are for the other threads, unless there are none.
                if state.queue.has_next() {
                    match self.find_thread(&mut state) {
                        Ok(found) => self.wake(found),
                        Err(NoThread) => state.near.given = state.queue.pop(),
                    }
                }
                continue;
            }
            if state.closed {
                break;
            }
            let is_over;
            (state, is_over) = self.wait_near(state);
            if is_over {
                break;
            }
        }
        state.near = NearThread::default();
    }

    /// Waits for a call. Answers whether none has come for long.
    fn wait_near<'a>(&'a self, mut state: MutexGuard<'a, State>) -> (MutexGuard<'a, State>, bool) {
        state.near.is_idle = true;
        let waited = self.near_work.wait_timeout(state, IDLE_TIME);
        let (mut state, result) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        state.near.is_idle = false;
        let is_over = result.timed_out() && state.near.given.is_none();
        (state, is_over)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::super::{Pool, Share};
    use super::*;
    use crate::{DriverKind, Executor, spawn_join};

    const SHARE: Share = Share { client: 1, thing: None };

    fn on_cpu(cpu: usize, task: impl Future<Output = ()> + Send + 'static) {
        let thread = std::thread::spawn(move || {
            CpuSet::only(cpu).pin().unwrap();
            Executor::new(DriverKind::Epoll).unwrap().block_on(task);
        });
        thread.join().unwrap();
    }

    /// A lone short call was made on whatever CPU was idle, and waking that took longer than the call.
    #[test]
    fn a_lone_short_call_runs_on_the_cpu_of_its_caller() {
        let pool = Arc::new(Pool::new("test", 2, 10));
        let cpus: Vec<usize> = CpuSet::allowed().unwrap().iter().take(2).collect();
        for cpu in cpus.iter().chain(&cpus).copied() {
            let pool = pool.clone();
            on_cpu(cpu, async move {
                for _ in 0..100 {
                    let ran = pool.run_short_for(SHARE, || CpuSet::allowed().unwrap()).await;
                    assert_eq!(ran.unwrap().iter().collect::<Vec<_>>(), [cpu]);
                    crate::yield_now().await; // the thread has noted the end of the call by then, or soon
                    while !pool.inner.lock().near.is_free() {
                        std::thread::yield_now();
                    }
                }
            });
        }
    }

    /// Calls beside one that blocks run on other threads, wherever they may.
    #[test]
    fn what_comes_beside_a_call_runs_anywhere() {
        let allowed = CpuSet::allowed().unwrap();
        let pool = Arc::new(Pool::new("test", 2, 10));
        let (thaw, frozen) = channel::<()>();
        let first = allowed.iter().next().unwrap();
        on_cpu(first, async move {
            let theirs = pool.clone();
            let blocked = spawn_join(async move {
                theirs.run_short_for(SHARE, move || frozen.recv().unwrap_or_default()).await
            });
            crate::yield_now().await;
            for _ in 0..10 {
                let ran = pool.run_short_for(SHARE, || CpuSet::allowed().unwrap()).await;
                assert_eq!(ran, Ok(allowed.clone()));
            }
            drop(thaw);
            assert_eq!(blocked.await.unwrap(), Ok(()));
        });
    }

    /// What a client may not begin beside its blocked call is begun after it.
    #[test]
    fn calls_behind_the_near_thread_are_made_when_it_has_ended() {
        let pool = Arc::new(Pool::shared("test", 1, 10, (1, 1)));
        let (thaw, frozen) = channel::<()>();
        Executor::new(DriverKind::Epoll).unwrap().block_on(async move {
            let theirs = pool.clone();
            let mut calls = vec![spawn_join(async move {
                theirs.run_short_for(SHARE, move || frozen.recv().map_or(0, |()| 1)).await
            })];
            for number in 1..5 {
                let theirs = pool.clone();
                calls.push(spawn_join(async move { theirs.run_for(SHARE, move || number).await }));
            }
            while pool.waiting() < 4 {
                crate::yield_now().await;
            }
            drop(thaw);
            for (number, call) in calls.into_iter().enumerate() {
                assert_eq!(call.await.unwrap(), Ok(number));
            }
            assert_eq!(pool.waiting(), 0);
        });
    }

    /// The thread ended with the call, and nobody came to the next one.
    #[test]
    fn a_short_call_that_panics_takes_no_thread_with_it() {
        let pool = Pool::new("test", 1, 1);
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            for number in 0..3 {
                let failed = pool.run_short_for(SHARE, || panic!("on purpose")).await;
                assert_eq!(failed, Err::<(), _>(NoThread));
                assert_eq!(pool.run_short_for(SHARE, move || number).await, Ok(number));
            }
        });
    }

    #[test]
    fn the_near_thread_ends_with_its_pool() {
        let inner = {
            let pool = Pool::new("test", 1, 1);
            let run = pool.run_short_for(SHARE, || 1);
            assert_eq!(Executor::new(DriverKind::Epoll).unwrap().block_on(run), Ok(1));
            Arc::downgrade(&pool.inner)
        };
        while inner.strong_count() > 0 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}
