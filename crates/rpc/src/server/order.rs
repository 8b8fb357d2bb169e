//! Changes in one directory, one after the other.
//!
//! Between the noting of an intent and the noting of its answer nobody else may change
//! the names that it is about; else looking could not tell, after a death in between,
//! whether it was applied.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::FileId;

/// Directories share this many queues.
const QUEUES: usize = 256;

/// The queues of one export.
pub(crate) struct Order {
    queues: Vec<Mutex<Queue>>,
}

#[derive(Default)]
struct Queue {
    taken: bool,
    waiting: Vec<Waker>,
}

/// Up to two queues held; let go in the end.
pub(crate) struct Turn {
    order: Arc<Order>,
    held: [Option<usize>; 2],
}

impl Default for Order {
    fn default() -> Order {
        Order { queues: (0..QUEUES).map(|_| Mutex::default()).collect() }
    }
}

impl Order {
    fn lock(&self, queue: usize) -> MutexGuard<'_, Queue> {
        self.queues[queue].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody else changes these files or directories.
    pub(crate) async fn turn(self: &Arc<Order>, first: FileId, second: Option<FileId>) -> Turn {
        let mut wanted = [Some(queue_of(first)), second.map(queue_of)];
        if wanted[1] == wanted[0] {
            wanted[1] = None;
        }
        wanted.sort_by_key(|queue| queue.unwrap_or(QUEUES)); // the same order for everybody
        let mut turn = Turn { order: self.clone(), held: [None, None] };
        for (place, queue) in wanted.into_iter().enumerate() {
            let Some(queue) = queue else { continue };
            std::future::poll_fn(|task| {
                let mut state = self.lock(queue);
                if !std::mem::replace(&mut state.taken, true) {
                    return Poll::Ready(());
                }
                state.waiting.push(task.waker().clone());
                Poll::Pending
            })
            .await;
            turn.held[place] = Some(queue);
        }
        turn
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        for queue in self.held.into_iter().flatten() {
            let mut state = self.order.lock(queue);
            state.taken = false;
            let waiting = std::mem::take(&mut state.waiting);
            drop(state);
            waiting.into_iter().for_each(Waker::wake);
        }
    }
}

fn queue_of(id: FileId) -> usize {
    // Fibonacci hashing (Knuth 6.4): inode numbers come in runs.
    ((id.ino ^ id.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as usize % QUEUES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_turn_at_a_time_and_no_deadlock_between_pairs() {
        let mut executor =
            dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 5 }).unwrap();
        executor.block_on(async {
            let order = Arc::new(Order::default());
            let inside = Arc::new(Mutex::new(0));
            let ids = [1, 2].map(|ino| FileId { ino, generation: 0 });
            let tasks: Vec<_> = (0..50)
                .map(|n| {
                    let (order, inside) = (order.clone(), inside.clone());
                    let pair = if n % 2 == 0 { [ids[0], ids[1]] } else { [ids[1], ids[0]] };
                    dray_rt::spawn_join(async move {
                        let _turn = order.turn(pair[0], Some(pair[1])).await;
                        *inside.lock().unwrap() += 1;
                        dray_rt::yield_now().await;
                        assert_eq!(*inside.lock().unwrap(), 1);
                        *inside.lock().unwrap() -= 1;
                    })
                })
                .collect();
            for task in tasks {
                task.await.unwrap();
            }
        });
    }
}
