//! Ticks of a thread's event loop: each begins with the poll of a task. Whatever a task did in
//! one tick without waiting has been done once that tick is over, as other threads can see.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// A thread's ticks, counted, on a cache line of its own.
#[repr(align(64))]
struct Counter(AtomicU64);

/// Counters of threads that have ended, to be used again: one is never freed.
static UNUSED: Mutex<Vec<&'static Counter>> = Mutex::new(Vec::new());

/// Gives the counter of a thread back at its end.
struct Lease(&'static Counter);

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.0.fetch_add(1, Ordering::Release);
        UNUSED.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
    }
}

thread_local! {
    static HERE: Cell<Option<&'static Counter>> = const { Cell::new(None) };
    static LEASE: RefCell<Option<Lease>> = const { RefCell::new(None) };
}

/// A tick of one thread.
#[derive(Clone, Copy)]
pub struct Tick {
    counter: &'static Counter,
    number: u64,
}

impl Tick {
    /// The one that the calling thread is in; none if it runs no executor.
    pub fn here() -> Option<Tick> {
        let counter = HERE.get()?;
        Some(Tick { counter, number: counter.0.load(Ordering::Relaxed) })
    }

    /// Whether its thread has ended it.
    pub fn is_over(&self) -> bool {
        self.counter.0.load(Ordering::Acquire) != self.number
    }
}

/// The calling thread's executor ends a tick, and begins one or rests.
pub(crate) fn next() {
    let counter = HERE.get().unwrap_or_else(begin);
    let number = counter.0.load(Ordering::Relaxed); // nobody else writes it
    counter.0.store(number + 1, Ordering::Release);
}

#[cold]
fn begin() -> &'static Counter {
    let unused = UNUSED.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let counter = unused.unwrap_or_else(|| Box::leak(Box::new(Counter(AtomicU64::new(0)))));
    LEASE.with_borrow_mut(|lease| *lease = Some(Lease(counter)));
    HERE.set(Some(counter));
    counter
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DriverKind, Executor, spawn_join, yield_now};

    #[test]
    fn a_tick_is_over_when_its_thread_goes_on_rests_or_ends() {
        assert!(std::thread::spawn(Tick::here).join().unwrap().is_none());
        let (send, receive) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let mut executor = Executor::new(DriverKind::Epoll).unwrap();
            executor.block_on(async {
                let first = Tick::here().unwrap();
                assert!(!first.is_over());
                yield_now().await;
                assert!(first.is_over());
                let other = spawn_join(async { Tick::here().unwrap() }).await.unwrap();
                assert!(other.is_over());
                send.send(Tick::here().unwrap()).unwrap();
            });
        });
        let last = receive.recv().unwrap();
        thread.join().unwrap();
        assert!(last.is_over());
    }
}
