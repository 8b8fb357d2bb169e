//! Changes of the same thing, one after the other.
//!
//! Between the noting of an intent and the noting of its answer nobody else may change
//! what it is about: the names of a directory, some bytes of a file. Else nobody could
//! tell, after a death in between, whether it was applied, and making it again could undo
//! what somebody else did since.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use dray_core::{FileId, IdMap};
use dray_rt::random_u64;

use crate::server::claims::{Claims, Span};

/// Independent parts of the table, so that threads seldom meet.
const SHARDS: usize = 64;

/// The turns of one export.
pub(crate) struct Order {
    shards: Vec<Mutex<Shard>>,
    /// Turns of changes that a server's death cut short.
    cut: AtomicUsize,
}

struct Shard {
    next_ticket: u64,
    files: IdMap<FileId, Claims<Begun>>,
}

/// Who began a change that has its turn.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begun {
    ByUs,
    /// A server that died; reads wait for it, too.
    Before,
}

/// A turn, or a place in the queue for it; given back in the end.
pub(crate) struct Turn {
    order: Arc<Order>,
    file: FileId,
    ticket: u64,
    cut: bool,
}

impl Default for Order {
    fn default() -> Order {
        // A life of the server has other numbers than the one before it.
        let shard = || Shard { next_ticket: (random_u64() >> 1) | 1, files: IdMap::default() };
        let shards = (0..SHARDS).map(|_| Mutex::new(shard())).collect();
        Order { shards, cut: AtomicUsize::new(0) }
    }
}

impl Order {
    fn shard(&self, file: FileId) -> MutexGuard<'_, Shard> {
        // Fibonacci hashing (Knuth 6.4): inode numbers come in runs.
        let mixed = (file.ino ^ file.generation).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
        self.shards[mixed as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(
        self: &Arc<Order>,
        file: FileId,
        cut: bool,
        claim: impl FnOnce(&mut Claims<Begun>, u64),
    ) -> Turn {
        let mut shard = self.shard(file);
        let ticket = shard.next_ticket;
        shard.next_ticket += 1;
        claim(shard.files.entry(file).or_default(), ticket);
        Turn { order: self.clone(), file, ticket, cut }
    }

    /// Waits until nobody else changes any of the same. Who came first goes first.
    pub(crate) async fn turn(self: &Arc<Order>, file: FileId, span: Span) -> Turn {
        let turn = self.enter(file, false, |claims, ticket| claims.wait(ticket, span));
        std::future::poll_fn(|task| {
            let mut shard = self.shard(file);
            let Some(claims) = shard.files.get_mut(&file) else { return Poll::Ready(()) };
            match claims.try_turn(turn.ticket, span, task.waker(), || Begun::ByUs) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
        turn
    }

    /// The turns of two directories, in the same order for everybody.
    pub(crate) async fn turns(self: &Arc<Order>, one: FileId, two: FileId) -> (Turn, Option<Turn>) {
        self.turns_of((one, Span::ALL), (two, Span::ALL)).await
    }

    /// The turns of two files, in the same order for everybody. If both are one, that of the
    /// first alone.
    pub(crate) async fn turns_of(
        self: &Arc<Order>,
        one: (FileId, Span),
        two: (FileId, Span),
    ) -> (Turn, Option<Turn>) {
        let key = |(file, _): &(FileId, Span)| (file.ino, file.generation);
        let (first, second) = if key(&one) <= key(&two) { (one, two) } else { (two, one) };
        let turn = self.turn(first.0, first.1).await;
        if first.0 == second.0 {
            return (turn, None);
        }
        (turn, Some(self.turn(second.0, second.1).await))
    }

    /// The turn of a change that a server before us had begun. Nobody can be in the way:
    /// it had its turn when that server died.
    pub(crate) fn hold(self: &Arc<Order>, file: FileId, span: Span) -> Turn {
        self.cut.fetch_add(1, Ordering::SeqCst);
        self.enter(file, true, |claims, ticket| claims.have(ticket, span, Begun::Before))
    }

    /// Whether there is any such turn.
    pub(crate) fn has_cut(&self) -> bool {
        self.cut.load(Ordering::SeqCst) != 0
    }

    /// A number that is another as soon as anybody begins to change the file; none while
    /// somebody changes these bytes, or waits to. Two that are equal, one of before a read
    /// began and one of after it ended, say that there was no change in between. Changes of
    /// what shares the shard give other numbers, too.
    pub(crate) fn version(&self, file: FileId, span: Span) -> Option<u64> {
        let shard = self.shard(file);
        let changes = shard.files.get(&file);
        let quiet = changes.is_none_or(|claims| !claims.any_meets(span));
        quiet.then_some(shard.next_ticket)
    }

    /// Waits until no change of these bytes is cut short: they may be half written.
    pub(crate) async fn whole(self: &Arc<Order>, file: FileId, span: Span) {
        if !self.has_cut() {
            return; // as good as always
        }
        let is_cut = {
            let shard = self.shard(file);
            let claims = shard.files.get(&file);
            claims.is_some_and(|claims| claims.having(span).any(|begun| *begun == Begun::Before))
        };
        if is_cut {
            drop(self.turn(file, span).await);
        }
    }
}

impl Turn {
    /// Whose turn it is.
    pub(crate) fn file(&self) -> FileId {
        self.file
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.cut {
            self.order.cut.fetch_sub(1, Ordering::SeqCst);
        }
        let mut shard = self.order.shard(self.file);
        let Some(claims) = shard.files.get_mut(&self.file) else { return };
        let wakers = claims.remove(self.ticket);
        if claims.is_empty() {
            shard.files.remove(&self.file);
        }
        drop(shard);
        wakers.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn simulate(test: impl Future<Output = ()>) {
        dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 5 }).unwrap().block_on(test);
    }

    fn file(ino: u64) -> FileId {
        FileId { ino, generation: 0 }
    }

    fn is_free(order: &Arc<Order>, span: Span) -> bool {
        let mut turn = std::pin::pin!(order.turn(file(1), span));
        let mut task = std::task::Context::from_waker(Waker::noop());
        turn.as_mut().poll(&mut task).is_ready()
    }

    #[test]
    fn one_turn_at_a_time_and_no_deadlock_between_pairs() {
        simulate(async {
            let order = Arc::new(Order::default());
            let inside = Arc::new(Mutex::new(0));
            let tasks: Vec<_> = (0..50)
                .map(|n| {
                    let (order, inside) = (order.clone(), inside.clone());
                    let pair = if n % 2 == 0 { [1, 2] } else { [2, 1] };
                    dray_rt::spawn_join(async move {
                        let _turns = order.turns(file(pair[0]), file(pair[1])).await;
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
            assert!(order.shards.iter().all(|shard| shard.lock().unwrap().files.is_empty()));
        });
    }

    #[test]
    fn what_does_not_meet_goes_on_side_by_side() {
        simulate(async {
            let order = Arc::new(Order::default());
            let one = order.turn(file(1), Span::bytes(0, 10)).await;
            assert!(is_free(&order, Span::bytes(10, 10)));
            assert!(!is_free(&order, Span::bytes(9, 1)) && !is_free(&order, Span::ALL));
            // Who waits for everything is not passed by those that come later.
            let mut all = std::pin::pin!(order.turn(file(1), Span::ALL));
            let mut task = std::task::Context::from_waker(Waker::noop());
            assert!(all.as_mut().poll(&mut task).is_pending());
            assert!(!is_free(&order, Span::bytes(10, 10)));
            drop(one);
            assert!(all.as_mut().poll(&mut task).is_ready());
        });
    }

    #[test]
    fn a_change_cut_short_keeps_its_turn_and_readers_out() {
        simulate(async {
            let order = Arc::new(Order::default());
            order.whole(file(1), Span::ALL).await;
            let cut = order.hold(file(1), Span::bytes(5, 5));
            assert!(is_free(&order, Span::bytes(0, 5)) && !is_free(&order, Span::bytes(9, 2)));
            order.whole(file(1), Span::bytes(0, 5)).await;
            let read = Arc::new(AtomicUsize::new(0));
            let reader = dray_rt::spawn_join({
                let (order, read) = (order.clone(), read.clone());
                async move {
                    order.whole(file(1), Span::bytes(8, 1)).await;
                    read.store(1, Ordering::SeqCst);
                }
            });
            dray_rt::yield_now().await;
            assert!(!is_free(&order, Span::bytes(8, 1)));
            assert_eq!(read.load(Ordering::SeqCst), 0, "it may be half written");
            drop(cut);
            reader.await.unwrap();
            assert!(is_free(&order, Span::ALL));
        });
    }

    /// Who waits takes no further number when it begins, and may be over by the second look.
    #[test]
    fn there_is_no_version_while_somebody_waits_to_change_it() {
        simulate(async {
            let order = Arc::new(Order::default());
            let (before, read) = (Span::bytes(0, 10), Span::bytes(12, 2));
            let first = order.turn(file(1), before).await;
            assert!(order.version(file(1), read).is_some(), "nobody changes these bytes");
            let mut second = std::pin::pin!(order.turn(file(1), Span::bytes(5, 10)));
            let mut task = std::task::Context::from_waker(Waker::noop());
            assert!(second.as_mut().poll(&mut task).is_pending());
            assert_eq!(order.version(file(1), read), None);
            drop(first);
            let Poll::Ready(second) = second.as_mut().poll(&mut task) else { panic!("it waits") };
            assert_eq!(order.version(file(1), read), None);
            drop(second);
            assert!(order.version(file(1), read).is_some());
        });
    }
}
