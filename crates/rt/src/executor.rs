//! The executor: one thread, one ready queue, one driver.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

use crate::driver::{Driver, Kick, Registry, epoll, sim, uring};
use crate::random::SplitMix64;
use crate::scope::Scope;
use crate::task::{Runnable, spawn_on};
use crate::tick;
use crate::time::{Instant, Timers, real_now};

/// Tasks that run between two looks at the driver, so that a busy ready queue cannot
/// keep the network waiting.
const TASKS_PER_LOOK: usize = 64;

/// The kind of driver that waits for events under an executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverKind {
    /// epoll(7): everywhere.
    Epoll,
    /// io_uring with 128-byte submissions; needed for FUSE over io_uring.
    Uring,
    /// Simulated clock, choices from this seed, no file descriptors.
    Simulated {
        /// Two runs with the same seed are the same run.
        seed: u64,
    },
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<ExecutorShared>>> = const { RefCell::new(None) };
}

pub(crate) fn current() -> Option<Arc<ExecutorShared>> {
    CURRENT.with_borrow(Clone::clone)
}

/// As [`current`], for frequent looks: without counting another user.
pub(crate) fn with_current<T>(look: impl FnOnce(Option<&ExecutorShared>) -> T) -> T {
    CURRENT.with_borrow(|shared| look(shared.as_deref()))
}

pub(crate) fn is_current(shared: &Arc<ExecutorShared>) -> bool {
    CURRENT.with_borrow(|current| current.as_ref().is_some_and(|here| Arc::ptr_eq(here, shared)))
}

/// Whether the running task is part of a simulation.
pub fn in_simulation() -> bool {
    with_current(|shared| shared.is_some_and(ExecutorShared::simulated))
}

/// Whether the running executor has no other task to run now.
pub(crate) fn is_nothing_else_ready() -> bool {
    with_current(|shared| shared.is_none_or(|shared| lock(&shared.queue).ready.is_empty()))
}

/// The state that an executor's thread shares with wakers, timers and other threads.
pub(crate) struct ExecutorShared {
    queue: Mutex<TaskQueue>,
    timers: Mutex<Timers>,
    /// When the first timer is due, nanoseconds; [`NEVER`]: there is none. Written under the lock of `timers`,
    /// and read without it in each tick.
    first_due: AtomicU64,
    /// The looks at the driver so far.
    looks: AtomicU64,
    /// The thread waits in the driver, or is about to: wake-ups must kick it.
    parked: AtomicBool,
    kick: Kick,
    pub(crate) registry: Registry,
    simulation: Option<Simulation>,
}

/// The tasks that have something to do. A tick looks at all of it under one lock.
#[derive(Default)]
struct TaskQueue {
    ready: VecDeque<Arc<dyn Runnable>>,
    /// Who waits for the next look at the driver ([`crate::yield_to_io`]).
    yielded: Vec<Waker>,
}

/// No timer is due at this time.
const NEVER: u64 = u64::MAX;

struct Simulation {
    now_nanos: AtomicU64,
    random: Mutex<SplitMix64>,
    /// All tasks: they end with the executor. Tasks that wait for each other, or for a timer, would
    /// keep each other and the executor's memory. Simulations are run by the million.
    tasks: Scope,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ExecutorShared {
    /// Notes a task that starts; false if the executor has come to its end.
    pub(crate) fn adopt(&self, task: &Arc<impl Runnable + 'static>) -> bool {
        self.simulation.as_ref().is_none_or(|simulation| simulation.tasks.adopt(task.clone()))
    }

    pub(crate) fn push(&self, task: Arc<dyn Runnable>) {
        lock(&self.queue).ready.push_back(task);
        self.kick_if_parked();
    }

    /// The driver's wait is over. A task that is woken from here on is looked at in the next tick
    /// anyway. So waking it needs no kick, which would cost three system calls. Who does not see this
    /// soon kicks in vain, so that it needs no order.
    pub(crate) fn unpark(&self) {
        self.parked.store(false, Ordering::Relaxed);
    }

    pub(crate) fn kick_if_parked(&self) {
        // Pairs with the store before the last look at the queues in `tick`.
        if self.parked.swap(false, Ordering::SeqCst) {
            self.kick.kick();
        }
    }

    pub(crate) fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }

    /// Wakes after the next look at the driver.
    pub(crate) fn wake_after_look(&self, waker: Waker) {
        lock(&self.queue).yielded.push(waker);
    }

    pub(crate) fn simulated(&self) -> bool {
        self.simulation.is_some()
    }

    pub(crate) fn now(&self) -> Instant {
        match &self.simulation {
            Some(simulation) => Instant::from_nanos(simulation.now_nanos.load(Ordering::Relaxed)),
            None => real_now(),
        }
    }

    pub(crate) fn jump_to(&self, to: Instant) {
        if let Some(simulation) = &self.simulation {
            simulation.now_nanos.fetch_max(to.as_nanos(), Ordering::Relaxed);
        }
    }

    pub(crate) fn simulated_random(&self) -> u64 {
        self.simulation.as_ref().map_or(0, |simulation| lock(&simulation.random).next())
    }

    pub(crate) fn add_timer(&self, deadline: Instant, waker: Waker) -> u64 {
        let key = self.with_timers(|timers| timers.add(deadline, waker));
        self.kick_if_parked(); // it may be due before the driver would return
        key
    }

    pub(crate) fn update_timer(&self, deadline: Instant, key: u64, waker: &Waker) {
        lock(&self.timers).update(deadline, key, waker);
    }

    pub(crate) fn remove_timer(&self, deadline: Instant, key: u64) {
        drop(self.with_timers(|timers| timers.remove(deadline, key)));
    }

    fn with_timers<T>(&self, change: impl FnOnce(&mut Timers) -> T) -> T {
        let mut timers = lock(&self.timers);
        let result = change(&mut timers);
        let first = timers.next().map_or(NEVER, Instant::as_nanos);
        // Pairs with the look in `tick`, behind the store by which this thread counts as parked.
        self.first_due.store(first, Ordering::SeqCst);
        result
    }

    fn first_due(&self) -> Option<Instant> {
        let first = self.first_due.load(Ordering::SeqCst);
        (first != NEVER).then(|| Instant::from_nanos(first))
    }

    /// The next task: the longest-waiting one, or in a simulation any of those ready.
    fn pop(&self) -> Option<Arc<dyn Runnable>> {
        let ready = &mut lock(&self.queue).ready;
        match &self.simulation {
            Some(simulation) if ready.len() > 1 => {
                let choice = lock(&simulation.random).next() as usize % ready.len();
                ready.swap_remove_back(choice)
            }
            _ => ready.pop_front(),
        }
    }

    pub(crate) fn wake_due_timers(&self) {
        let now = self.now();
        loop {
            let due = self.with_timers(|timers| timers.pop_due(now));
            match due {
                Some(waker) => waker.wake(),
                None => return,
            }
        }
    }
}

/// Starts tasks on an executor from any thread.
#[derive(Clone)]
pub struct ExecutorHandle {
    pub(crate) shared: Arc<ExecutorShared>,
}

impl ExecutorHandle {
    /// The executor that the running task belongs to.
    ///
    /// # Panics
    /// Outside of an executor.
    pub fn current() -> ExecutorHandle {
        ExecutorHandle { shared: current().expect("only a task has a current executor") }
    }

    /// Whether the running task belongs to this executor.
    pub fn is_current(&self) -> bool {
        current().is_some_and(|here| Arc::ptr_eq(&here, &self.shared))
    }

    /// Starts a task there.
    pub fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        spawn_on(&self.shared, future);
    }
}

/// An executor, to be run by one thread.
pub struct Executor {
    shared: Arc<ExecutorShared>,
    driver: Driver,
    /// Who waits for the look at the driver that is made now. Empty otherwise, and kept for its memory.
    yielded: Vec<Waker>,
}

impl Executor {
    /// Makes one. Errors: those of epoll_create1(2), eventfd(2) or io_uring_setup(2), such
    /// as `ENOSYS` or `EPERM` where io_uring is switched off.
    pub fn new(kind: DriverKind) -> io::Result<Executor> {
        let (driver, kick, simulation) = match kind {
            DriverKind::Epoll => {
                let (epoll, kick) = epoll::Epoll::new()?;
                (Driver::Epoll(epoll), kick, None)
            }
            DriverKind::Uring => {
                let (uring, kick) = uring::Uring::new()?;
                (Driver::Uring(Box::new(uring)), kick, None)
            }
            DriverKind::Simulated { seed } => {
                let simulation = Simulation {
                    now_nanos: AtomicU64::new(1_000_000_000),
                    random: Mutex::new(SplitMix64(seed)),
                    tasks: Scope::new(),
                };
                (Driver::Sim(sim::Sim), Kick::Nobody, Some(simulation))
            }
        };
        let registry = driver.registry();
        let shared = Arc::new(ExecutorShared {
            queue: Mutex::default(),
            timers: Mutex::default(),
            first_due: AtomicU64::new(NEVER),
            looks: AtomicU64::new(0),
            parked: AtomicBool::new(false),
            kick,
            registry,
            simulation,
        });
        Ok(Executor { shared, driver, yielded: Vec::new() })
    }

    /// The handle by which others start tasks on the executor.
    pub fn handle(&self) -> ExecutorHandle {
        ExecutorHandle { shared: self.shared.clone() }
    }

    /// Runs `main` and everything it starts until `main` is done. In a simulation that
    /// has come to a stand-still (nothing ready, no timer) it answers none.
    pub fn try_block_on<T>(&mut self, main: impl Future<Output = T>) -> Option<T> {
        let _entered = EnteredExecutor::enter(self.shared.clone());
        let mut main = pin!(main);
        let root =
            Arc::new(RootWaker { woken: AtomicBool::new(true), shared: self.shared.clone() });
        let waker = Waker::from(root.clone());
        loop {
            tick::next();
            if root.woken.swap(false, Ordering::SeqCst)
                && let Poll::Ready(value) = main.as_mut().poll(&mut Context::from_waker(&waker))
            {
                return Some(value);
            }
            if !self.tick(&root) {
                return None;
            }
        }
    }

    /// As [`Executor::try_block_on`], for real drivers.
    ///
    /// # Panics
    /// In a simulation that comes to a stand-still.
    pub fn block_on<T>(&mut self, main: impl Future<Output = T>) -> T {
        self.try_block_on(main).expect("the simulation stands still")
    }

    /// Runs what is ready, then looks at timers and the driver. False if nothing can
    /// ever happen again.
    fn tick(&mut self, root: &RootWaker) -> bool {
        for _ in 0..TASKS_PER_LOOK {
            let Some(task) = self.shared.pop() else { break };
            tick::next();
            task.run();
            if root.woken.load(Ordering::SeqCst) {
                break;
            }
        }
        tick::next();
        self.shared.parked.store(true, Ordering::SeqCst);
        let nothing_ready = {
            let mut queue = lock(&self.shared.queue);
            std::mem::swap(&mut queue.yielded, &mut self.yielded);
            queue.ready.is_empty()
        };
        let ready = root.woken.load(Ordering::SeqCst) || !nothing_ready || !self.yielded.is_empty();
        let alive = self.driver.park(&self.shared, self.shared.first_due(), ready);
        self.shared.unpark();
        let looks = &self.shared.looks;
        looks.store(looks.load(Ordering::Relaxed) + 1, Ordering::Relaxed); // nobody else writes it
        self.yielded.drain(..).for_each(Waker::wake); // behind those that have something to do now
        alive
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        let Some(simulation) = &self.shared.simulation else { return };
        // A future that is dropped may look at the clock, or want to start something.
        let _entered = EnteredExecutor::enter(self.shared.clone());
        simulation.tasks.kill();
        let queue = std::mem::take(&mut *lock(&self.shared.queue));
        drop(queue); // it is unlocked
    }
}

struct EnteredExecutor(Option<Arc<ExecutorShared>>);

impl EnteredExecutor {
    fn enter(shared: Arc<ExecutorShared>) -> EnteredExecutor {
        EnteredExecutor(CURRENT.replace(Some(shared)))
    }
}

impl Drop for EnteredExecutor {
    fn drop(&mut self) {
        tick::next();
        CURRENT.set(self.0.take());
    }
}

struct RootWaker {
    woken: AtomicBool,
    shared: Arc<ExecutorShared>,
}

impl Wake for RootWaker {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        self.shared.kick_if_parked();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::sync::oneshot;
    use crate::{Scope, now, sleep, spawn, spawn_join, timeout, yield_now};

    fn every_driver() -> Vec<Executor> {
        [DriverKind::Epoll, DriverKind::Uring, DriverKind::Simulated { seed: 7 }]
            .into_iter()
            .filter_map(|kind| Executor::new(kind).ok())
            .collect()
    }

    #[test]
    fn tasks_run_and_answer() {
        for mut executor in every_driver() {
            let sum = executor.block_on(async {
                let parts = [spawn_join(async { 20 }), spawn_join(async { 22 })];
                let mut sum = 0;
                for part in parts {
                    yield_now().await;
                    sum += part.await.unwrap();
                }
                sum
            });
            assert_eq!(sum, 42);
        }
    }

    #[test]
    fn timers_fire_in_order_and_not_early() {
        for mut executor in every_driver() {
            executor.block_on(async {
                let begin = now();
                let late = spawn_join(async {
                    sleep(Duration::from_millis(20)).await;
                    now()
                });
                sleep(Duration::from_millis(5)).await;
                let early = now();
                let late = late.await.unwrap();
                assert!(early - begin >= Duration::from_millis(5));
                assert!(late - begin >= Duration::from_millis(20));
                assert!(late > early);
                let slow = timeout(Duration::from_millis(2), std::future::pending::<()>()).await;
                assert!(slow.is_err());
            });
        }
    }

    #[test]
    fn a_timer_that_comes_after_a_later_one_is_not_late() {
        for mut executor in every_driver() {
            executor.block_on(async {
                let scope = Scope::new();
                scope.spawn_on(&ExecutorHandle::current(), sleep(Duration::from_secs(600)));
                sleep(Duration::from_millis(30)).await; // the alarm is set by now
                let begin = now();
                timeout(Duration::from_secs(60), sleep(Duration::from_millis(3))).await.unwrap();
                assert!(begin.elapsed() >= Duration::from_millis(3));
                scope.kill();
                sleep(Duration::from_millis(3)).await; // though the alarm stands later
            });
        }
    }

    #[test]
    fn a_wake_up_from_another_thread_ends_the_wait() {
        for kind in [DriverKind::Epoll, DriverKind::Uring] {
            let Ok(mut executor) = Executor::new(kind) else { continue };
            let (send, receive) = oneshot::channel();
            let thread = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(20));
                send.send(5).unwrap();
            });
            assert_eq!(executor.block_on(receive), Ok(5));
            thread.join().unwrap();
        }
    }

    #[test]
    fn a_simulation_without_anything_to_do_says_so() {
        let mut executor = Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
        assert_eq!(executor.try_block_on(std::future::pending::<()>()), None);
    }

    #[test]
    fn a_simulated_year_takes_no_time_and_repeats_by_seed() {
        let run = |seed| {
            let mut executor = Executor::new(DriverKind::Simulated { seed }).unwrap();
            executor.block_on(async {
                let (send, mut receive) = crate::sync::mpsc::unbounded_channel();
                for id in 0..20 {
                    let send = send.clone();
                    spawn(async move {
                        sleep(Duration::from_secs(365 * 24 * 3600)).await;
                        let _ = send.send(id);
                    });
                }
                drop(send);
                let mut order = Vec::new();
                while let Some(id) = receive.recv().await {
                    order.push(id);
                }
                order
            })
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    #[test]
    fn tasks_of_a_simulation_end_with_it() {
        let mut executor = Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
        let (kept, shared) = (Arc::new(()), Arc::downgrade(&executor.shared));
        executor.block_on(async {
            let (ask, asked) = tokio::sync::oneshot::channel::<()>();
            let (sender, receiver) = tokio::sync::oneshot::channel::<()>();
            let (mine, its, sleeper_s) = (kept.clone(), kept.clone(), kept.clone());
            spawn(async move {
                let _ = (asked.await, sender, mine);
            });
            spawn(async move {
                let _ = (receiver.await, ask, its);
            });
            Scope::new().spawn_on(&ExecutorHandle::current(), async move {
                sleep(Duration::from_secs(600)).await;
                drop(sleeper_s);
            });
            Scope::new().spawn_on(&ExecutorHandle::current(), async {}); // done, and of a scope
            yield_now().await;
        });
        assert_eq!(Arc::strong_count(&kept), 4);
        drop(executor);
        assert_eq!(Arc::strong_count(&kept), 1);
        assert_eq!(shared.strong_count(), 0, "they and their executor keep each other");
    }

    #[test]
    fn a_killed_scope_drops_its_tasks_and_starts_no_more() {
        struct DropNotifier(Option<oneshot::Sender<()>>);
        impl Drop for DropNotifier {
            fn drop(&mut self) {
                let _ = self.0.take().unwrap().send(());
            }
        }
        for mut executor in every_driver() {
            executor.block_on(async {
                let scope = Scope::new();
                let (send, receive) = oneshot::channel();
                let receiver = DropNotifier(Some(send));
                scope.spawn_on(&ExecutorHandle::current(), async move {
                    let _notifier = receiver;
                    std::future::pending::<()>().await;
                });
                yield_now().await;
                scope.kill();
                receive.await.unwrap();
                scope.spawn_on(&ExecutorHandle::current(), async {
                    unreachable!("the scope is dead")
                });
                yield_now().await;
            });
        }
    }
}
