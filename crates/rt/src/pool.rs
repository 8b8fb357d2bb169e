//! Threads for calls that block.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

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
    cpus: Option<libc::cpu_set_t>,
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
    closed: bool,
}

/// As many calls wait as the pool's queue may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolFull;

impl fmt::Display for PoolFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("as many calls wait for a thread as may wait")
    }
}

impl std::error::Error for PoolFull {}

/// A thread without work ends after this long.
const IDLE_TIME: std::time::Duration = std::time::Duration::from_secs(10);

impl Pool {
    /// A pool of at most `threads_max` threads called `name`, behind a queue of at most
    /// `queue_max` calls. They run on the CPUs that the calling thread may use now, also
    /// those that are started later by a thread that is pinned to one.
    pub fn new(name: &str, threads_max: usize, queue_max: usize) -> Pool {
        assert!(threads_max > 0);
        Pool {
            inner: Arc::new(Inner {
                name: name.to_owned(),
                threads_max,
                queue_max,
                cpus: own_cpus(),
                state: Mutex::default(),
                work: Condvar::new(),
            }),
        }
    }

    /// Runs `call` on a thread of the pool and waits for its result.
    pub async fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, PoolFull> {
        if in_simulation() {
            return Ok(call());
        }
        let (send, receive) = tokio::sync::oneshot::channel();
        self.submit(Box::new(move || {
            let _ = send.send(call()); // whoever asked may have gone
        }))?;
        receive.await.map_err(|_| PoolFull) // only when the pool closes under the call
    }

    /// Calls that wait for a thread now.
    pub fn waiting(&self) -> usize {
        self.inner.lock().queue.len()
    }

    fn submit(&self, job: Job) -> Result<(), PoolFull> {
        let mut state = self.inner.lock();
        if state.queue.len() >= self.inner.queue_max {
            return Err(PoolFull);
        }
        state.queue.push_back(job);
        if state.idle >= state.queue.len() || state.threads == self.inner.threads_max {
            self.inner.work.notify_one();
            return Ok(());
        }
        let inner = self.inner.clone();
        let started =
            std::thread::Builder::new().name(self.inner.name.clone()).spawn(move || inner.work());
        match started {
            Ok(_) => state.threads += 1,
            Err(_) if state.threads > 0 => {} // the ones there are will come to it
            Err(_) => {
                state.queue.pop_back();
                return Err(PoolFull);
            }
        }
        Ok(())
    }
}

/// CPUs that the calling thread may use.
fn own_cpus() -> Option<libc::cpu_set_t> {
    // SAFETY: a zeroed set is a valid one; the kernel writes at most its size.
    unsafe {
        let mut cpus: libc::cpu_set_t = std::mem::zeroed();
        let got = libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut cpus);
        (got == 0).then_some(cpus)
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

    fn work(&self) {
        if let Some(cpus) = &self.cpus {
            // SAFETY: the set outlives the call. Where it fails the thread runs where the
            // one that started it does, which is slower at worst.
            unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), cpus) };
        }
        let mut state = self.lock();
        loop {
            if let Some(job) = state.queue.pop_front() {
                drop(state);
                job();
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

    #[test]
    fn threads_run_where_the_pool_was_made_not_where_they_were_started() {
        let count = |cpus: libc::cpu_set_t| unsafe {
            // SAFETY: the set is initialised.
            libc::CPU_COUNT(&cpus)
        };
        let allowed = count(own_cpus().unwrap());
        let pool = Pool::new("test", 1, 1);
        let counted = std::thread::spawn(move || {
            // SAFETY: the sets are valid and outlive the calls.
            unsafe {
                let all = own_cpus().unwrap();
                let first = (0..libc::CPU_SETSIZE as usize)
                    .find(|cpu| libc::CPU_ISSET(*cpu, &all))
                    .unwrap();
                let mut one: libc::cpu_set_t = std::mem::zeroed();
                libc::CPU_SET(first, &mut one);
                libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &one);
            }
            let mut executor = Executor::new(DriverKind::Epoll).unwrap();
            executor.block_on(pool.run(|| own_cpus().unwrap())).unwrap()
        });
        assert_eq!(count(counted.join().unwrap()), allowed);
    }
}
