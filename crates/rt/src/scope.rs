//! Groups of tasks that can be ended together: a simulated node that crashes, a
//! connection that is torn down.

use std::cell::RefCell;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use crate::executor::ExecutorHandle;
use crate::task::Runnable;

/// Tasks started inside a scope, and by those tasks, belong to it.
#[derive(Clone)]
pub struct Scope(Arc<ScopeInner>);

pub(crate) struct ScopeInner {
    members: Mutex<Members>,
    /// What its clock counts in a second of a simulation, seconds.
    clock: f64,
}

#[derive(Default)]
struct Members {
    killed: bool,
    tasks: Vec<Arc<dyn Runnable>>,
}

/// Finished members are swept out when the list has doubled to at least this.
const SWEEP_AT: usize = 64;

thread_local! {
    static ENTERED: RefCell<Option<Arc<ScopeInner>>> = const { RefCell::new(None) };
}

/// What the clock of the current scope counts in a second of a simulation, seconds.
pub(crate) fn clock() -> f64 {
    ENTERED.with_borrow(|scope| scope.as_ref().map_or(1.0, |scope| scope.clock))
}

pub(crate) fn entered() -> Option<Arc<ScopeInner>> {
    ENTERED.with_borrow(Clone::clone)
}

/// Makes `scope` the current one until the answer is dropped.
pub(crate) fn enter(scope: Option<Arc<ScopeInner>>) -> ScopeGuard {
    ScopeGuard(ENTERED.replace(scope))
}

pub(crate) struct ScopeGuard(Option<Arc<ScopeInner>>);

impl Drop for ScopeGuard {
    fn drop(&mut self) {
        ENTERED.set(self.0.take());
    }
}

impl ScopeInner {
    fn lock(&self) -> std::sync::MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False if the scope was killed.
    pub(crate) fn adopt(&self, task: Arc<dyn Runnable>) -> bool {
        let mut members = self.lock();
        if members.killed {
            return false;
        }
        if members.tasks.len() >= SWEEP_AT && members.tasks.len().is_power_of_two() {
            members.tasks.retain(|task| !task.finished());
        }
        members.tasks.push(task);
        true
    }
}

impl Default for Scope {
    fn default() -> Scope {
        Scope::new()
    }
}

impl Scope {
    /// An empty scope.
    pub fn new() -> Scope {
        Scope::with_clock(1.0)
    }

    /// An empty scope of a machine whose clock drifts: in a simulated second [`now_with_sleeps`](crate::now_with_sleeps)
    /// counts `clock` seconds there. Outside of a simulation it means nothing.
    pub fn with_clock(clock: f64) -> Scope {
        Scope(Arc::new(ScopeInner { members: Mutex::default(), clock }))
    }

    /// Starts a task in this scope on `handle`'s executor.
    pub fn spawn_on(
        &self,
        handle: &ExecutorHandle,
        future: impl Future<Output = ()> + Send + 'static,
    ) {
        let _entered = enter(Some(self.0.clone()));
        handle.spawn(future);
    }

    /// Makes a task a member; false if the scope was killed.
    pub(crate) fn adopt(&self, task: Arc<dyn Runnable>) -> bool {
        self.0.adopt(task)
    }

    /// Drops every task of the scope where it stands, and every task that would still be
    /// started in it. To be called on the executor's own thread, not from a member.
    pub fn kill(&self) {
        let tasks = {
            let mut members = self.0.lock();
            members.killed = true;
            std::mem::take(&mut members.tasks)
        };
        tasks.iter().for_each(|task| task.abort());
    }
}
