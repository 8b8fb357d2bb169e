use std::sync::Arc;

use dray_core::{Cancel, Identity, LockOwner, LockRange, NodeId, Pid, RequestId};
use dray_rt::{DriverKind, Executor, Join, spawn_join, yield_now};

use super::*;

const FILE: FileId = FileId { ino: 1, generation: 1 };
const OTHER: FileId = FileId { ino: 2, generation: 1 };

fn cx(holder: u64) -> Context {
    let who = Arc::new(Identity::default());
    let cx = Context::new(NodeId::OWN, RequestId(0), who, Pid(1));
    Context { holder: HolderId(holder), ..cx }
}

fn posix(owner: u64, kind: LockKind, start: u64, end: u64) -> Lock {
    let range = LockRange { start, end };
    Lock {
        family: LockFamily::Posix,
        kind,
        range,
        owner: LockOwner::own(owner),
        pid: Pid(owner as u32),
    }
}

fn flock(owner: u64, kind: LockKind) -> Lock {
    let lock = posix(owner, kind, 0, u64::MAX);
    Lock { family: LockFamily::Flock, ..lock }
}

fn errno(result: Result<()>) -> Errno {
    result.unwrap_err().errno()
}

/// Runs a test in the simulator, where a wait that never ends is a failure.
fn run<F: Future<Output = ()> + Send + 'static>(test: impl FnOnce(Arc<LockTable>) -> F) {
    let table = Arc::new(LockTable::new(100));
    let mut executor = Executor::new(DriverKind::Simulated { seed: 3 }).unwrap();
    executor.block_on(test(table.clone()));
    let waiting = table.list(usize::MAX).iter().filter(|locked| locked.waiting).count();
    assert_eq!((waiting, table.shares.used()), (0, table.len()), "each lock is counted once");
    table.files.look_at_each(|_, locks| {
        assert!(locks.held.len() + locks.queue.len() > 0, "an end that nobody has looked at");
        true
    });
    assert_eq!(table.owners.is_empty(), table.is_empty());
}

fn waits(table: &Arc<LockTable>, holder: u64, file: FileId, lock: Lock) -> Join<Result<()>> {
    let table = table.clone();
    spawn_join(async move { table.lock(&cx(holder), file, lock, true).await })
}

async fn settle() {
    for _ in 0..20 {
        yield_now().await;
    }
}

// proves: P53
#[test]
fn of_several_conflicting_locks_the_first_in_the_file_is_reported() {
    run(async |table: Arc<LockTable>| {
        let lock = async |owner, start, end| {
            let lock = posix(owner, LockKind::Exclusive, start, end);
            table.lock(&cx(owner), FILE, lock, false).await.unwrap();
        };
        lock(1, 50, 54).await;
        lock(2, 10, 19).await;
        lock(1, 30, 39).await;
        let first_conflict = |start, end| {
            table.test(&cx(3), FILE, posix(3, LockKind::Shared, start, end)).map(|lock| lock.range)
        };
        assert_eq!(first_conflict(0, u64::MAX), Some(LockRange { start: 10, end: 19 }));
        assert_eq!(first_conflict(20, 60), Some(LockRange { start: 30, end: 39 }));
        assert_eq!(first_conflict(20, 29), None);
    });
}

// proves: P53
#[test]
fn owners_exclude_each_other_by_node_and_number() {
    run(async |table: Arc<LockTable>| {
        table.lock(&cx(1), FILE, posix(1, LockKind::Shared, 0, 9), false).await.unwrap();
        table.lock(&cx(2), FILE, posix(1, LockKind::Shared, 5, 14), false).await.unwrap();
        let wanted = posix(1, LockKind::Exclusive, 9, 9);
        assert_eq!(errno(table.lock(&cx(2), FILE, wanted, false).await), Errno::EAGAIN);
        assert_eq!(table.test(&cx(2), FILE, wanted).unwrap().range.end, 9);
        table.lock(&cx(2), FILE, posix(1, LockKind::Exclusive, 10, 14), false).await.unwrap();
        table.lock(&cx(3), OTHER, wanted, false).await.unwrap();
        table.lock(&cx(3), FILE, flock(1, LockKind::Exclusive), false).await.unwrap();
        assert_eq!(table.list(100).len(), 5);
        table.release(
            FILE,
            LockFamily::Posix,
            Owner { holder: HolderId(2), owner: LockOwner::own(1) },
        );
        assert!(table.test(&cx(4), FILE, posix(1, LockKind::Exclusive, 10, 14)).is_none());
    });
}

// proves: P54
#[test]
fn waiters_are_served_in_order_of_arrival() {
    run(async |table: Arc<LockTable>| {
        table.lock(&cx(1), FILE, posix(1, LockKind::Shared, 0, 9), false).await.unwrap();
        let writer = waits(&table, 2, FILE, posix(2, LockKind::Exclusive, 0, 9));
        settle().await;
        let reader = waits(&table, 3, FILE, posix(3, LockKind::Shared, 0, 9));
        settle().await;
        assert_eq!(table.list(100).iter().filter(|locked| locked.waiting).count(), 2);
        table.lock(&cx(1), FILE, posix(1, LockKind::Unlock, 0, 9), false).await.unwrap();
        writer.await.unwrap().unwrap();
        assert_eq!(table.test(&cx(9), FILE, posix(9, LockKind::Shared, 0, 0)).unwrap().pid.0, 2);
        table.lock(&cx(2), FILE, posix(2, LockKind::Unlock, 0, 9), false).await.unwrap();
        reader.await.unwrap().unwrap();
    });
}

// proves: P56
#[test]
fn a_cycle_of_waits_is_refused() {
    run(async |table: Arc<LockTable>| {
        for owner in 1..=3 {
            let own = posix(owner, LockKind::Exclusive, owner, owner);
            table.lock(&cx(owner), FILE, own, false).await.unwrap();
        }
        let first = waits(&table, 1, FILE, posix(1, LockKind::Exclusive, 2, 2));
        let second = waits(&table, 2, FILE, posix(2, LockKind::Exclusive, 3, 3));
        settle().await;
        let third = posix(3, LockKind::Exclusive, 1, 1);
        assert_eq!(errno(table.lock(&cx(3), FILE, third, true).await), Errno::EDEADLK);
        table.release_holder(HolderId(3));
        second.await.unwrap().unwrap();
        table.release_holder(HolderId(2));
        first.await.unwrap().unwrap();
    });
}

#[test]
fn two_that_upgrade_are_a_cycle_for_fcntl_and_none_for_flock() {
    run(async |table: Arc<LockTable>| {
        for owner in 1..=2 {
            let shared = posix(owner, LockKind::Shared, 0, 0);
            table.lock(&cx(owner), FILE, shared, false).await.unwrap();
            table.lock(&cx(owner), FILE, flock(owner, LockKind::Shared), false).await.unwrap();
        }
        let first = waits(&table, 1, FILE, posix(1, LockKind::Exclusive, 0, 0));
        settle().await;
        let second = posix(2, LockKind::Exclusive, 0, 0);
        assert_eq!(errno(table.lock(&cx(2), FILE, second, true).await), Errno::EDEADLK);
        table.lock(&cx(2), FILE, posix(2, LockKind::Unlock, 0, 0), false).await.unwrap();
        first.await.unwrap().unwrap();

        let first = waits(&table, 1, FILE, flock(1, LockKind::Exclusive));
        settle().await;
        // The first has none any more, and the second nobody in its way.
        table.lock(&cx(2), FILE, flock(2, LockKind::Exclusive), true).await.unwrap();
        table.release(
            FILE,
            LockFamily::Flock,
            Owner { holder: HolderId(2), owner: LockOwner::own(2) },
        );
        first.await.unwrap().unwrap();
    });
}

/// Linux gives the old lock back and takes the new one in one step, past those that wait. Here the
/// lock went to who waited for it, and its former owner waited behind: its unlock found nothing.
// proves: P54
#[test]
fn an_owner_that_changes_the_kind_of_its_flock_precedes_waiters() {
    use LockKind::{Exclusive, Shared, Unlock};
    run(async |table: Arc<LockTable>| {
        for (kind, next) in [(Exclusive, Shared), (Shared, Exclusive)] {
            table.lock(&cx(1), FILE, flock(1, kind), true).await.unwrap();
            let waiting = waits(&table, 2, FILE, flock(2, Exclusive));
            settle().await;
            table.lock(&cx(1), FILE, flock(1, next), true).await.unwrap();
            table.lock(&cx(1), FILE, flock(1, Unlock), false).await.unwrap();
            waiting.await.unwrap().unwrap();
            table.lock(&cx(2), FILE, flock(2, Unlock), false).await.unwrap();
        }
    });
}

#[test]
fn a_cancelled_wait_ends_and_lets_others_pass() {
    run(async |table: Arc<LockTable>| {
        table.lock(&cx(1), FILE, posix(1, LockKind::Shared, 0, 9), false).await.unwrap();
        let mut cancelled = cx(2);
        let cancel = Arc::new(Cancel::default());
        cancelled.cancel = Some(cancel.clone());
        let their_table = table.clone();
        let writer = spawn_join(async move {
            let wanted = posix(2, LockKind::Exclusive, 0, 9);
            their_table.lock(&cancelled, FILE, wanted, true).await
        });
        settle().await;
        let reader = waits(&table, 3, FILE, posix(3, LockKind::Shared, 0, 9));
        settle().await;
        cancel.set();
        assert_eq!(errno(writer.await.unwrap()), Errno::EINTR);
        reader.await.unwrap().unwrap();
    });
}

#[test]
fn who_gives_up_what_was_granted_in_that_instant_has_it_and_loses_nothing() {
    run(async |table: Arc<LockTable>| {
        let [first, second] = [1, 2].map(|number| posix(number, LockKind::Shared, 0, 9));
        table.lock(&cx(1), FILE, first, false).await.unwrap();
        table.lock(&cx(2), FILE, second, false).await.unwrap();
        let owner = Owner { holder: HolderId(2), owner: LockOwner::own(2) };
        let lock = Lock { kind: LockKind::Exclusive, ..second };
        let number = table.try_lock(&cx(2), (FILE, owner), lock, true).unwrap().expect("it waits");
        table.lock(&cx(1), FILE, Lock { kind: LockKind::Unlock, ..first }, false).await.unwrap();
        let mut waiting = Waiting { table: &table, file: FILE, owner, lock, number, done: false };
        waiting.give_up().unwrap();
        drop(waiting);
        let held: Vec<_> = table.list(9).iter().map(|held| held.lock.kind).collect();
        assert_eq!(held, [LockKind::Exclusive]);
    });
}

#[test]
fn a_node_that_goes_takes_its_locks_and_waits_along() {
    run(async |table: Arc<LockTable>| {
        table.lock(&cx(1), FILE, posix(1, LockKind::Exclusive, 0, 9), false).await.unwrap();
        table.lock(&cx(1), OTHER, flock(1, LockKind::Exclusive), false).await.unwrap();
        let theirs = waits(&table, 2, FILE, posix(2, LockKind::Exclusive, 0, 9));
        settle().await;
        assert_eq!(table.release_holder(HolderId(2)), 0);
        assert_eq!(errno(theirs.await.unwrap()), Errno::EINTR);
        assert_eq!(table.release_holder(HolderId(1)), 2);
        assert!(table.is_empty() && table.list(1).is_empty());
    });
}

/// A process that locked every other byte of a file of its own took all locks of the export.
// proves: P127
#[test]
fn a_node_that_takes_all_it_can_leaves_locks_to_others() {
    run(async |table: Arc<LockTable>| {
        let every_other = async |holder: u64, address: u64| {
            let cx = Context { address: ClientAddress(address), ..cx(holder) };
            let mut held = 0;
            loop {
                let lock = posix(holder, LockKind::Shared, 2 * held, 2 * held);
                match table.lock(&cx, FILE, lock, false).await {
                    Ok(()) => held += 1,
                    Err(error) => return (held, error.to_string()),
                }
            }
        };
        let (first, why) = every_other(1, 1).await;
        assert!(first == 50 && why.contains("this client has reached its share"), "{first}: {why}");
        assert_eq!(every_other(2, 2).await.0, 25, "half of what is left");
        let (sibling, why) = every_other(3, 1).await;
        assert!((5..15).contains(&sibling) && why.contains("of this address"), "{sibling}: {why}");
        let more = posix(1, LockKind::Exclusive, 1000, 1000);
        assert_eq!(errno(table.lock(&cx(1), FILE, more, true).await), Errno::ENOLCK);
        // What takes no further place it may do, and with less it may take more again.
        let change = |kind, byte| posix(1, kind, byte, byte);
        table.lock(&cx(1), OTHER, posix(4, LockKind::Shared, 0, 9), false).await.unwrap_err();
        table.release_holder(HolderId(2));
        table.release_holder(HolderId(3));
        table.lock(&cx(1), FILE, change(LockKind::Exclusive, 0), false).await.unwrap();
        for byte in 0..5 {
            table.lock(&cx(1), FILE, change(LockKind::Unlock, 2 * byte), false).await.unwrap();
        }
        table.lock(&cx(1), FILE, more, false).await.unwrap();
        table.release(
            FILE,
            LockFamily::Posix,
            Owner { holder: HolderId(1), owner: LockOwner::own(1) },
        );
        assert_eq!(table.shares.used(), 0);
    });
}

/// Waiting requests take up room as well, and leave it.
#[test]
fn waits_are_counted_as_locks_are() {
    run(async |table: Arc<LockTable>| {
        table.lock(&cx(1), FILE, posix(1, LockKind::Exclusive, 0, 9), false).await.unwrap();
        let wait = |owner| waits(&table, 2, FILE, posix(owner, LockKind::Exclusive, 0, 9));
        let all: Vec<_> = (10..80).map(wait).collect();
        for _ in 0..5 {
            settle().await;
        }
        assert_eq!((table.shares.held(2), table.shares.used()), (50, 51));
        table.lock(&cx(1), FILE, posix(1, LockKind::Unlock, 0, 9), false).await.unwrap();
        assert_eq!(table.shares.held(2), 50, "one has it, the others wait");
        table.release_holder(HolderId(2));
        for one in all {
            let _ = one.await; // some had it, some were refused, most were dropped
        }
        assert_eq!(table.shares.used(), 0);
    });
}

/// However many wait: each in turn, and nobody looks in vain.
// proves: P129
#[test]
fn a_lock_that_is_given_back_wakes_the_next_and_no_other() {
    const WAITING: u64 = 70;
    run(async |table: Arc<LockTable>| {
        let lock = |owner, kind| posix(owner, kind, 0, 9);
        table.lock(&cx(0), FILE, lock(0, LockKind::Exclusive), false).await.unwrap();
        let looks = Arc::new(AtomicUsize::new(0));
        let mut waiting = Vec::new();
        for holder in 1..=WAITING {
            let (table, looks, lock) =
                (table.clone(), looks.clone(), lock(holder, LockKind::Exclusive));
            waiting.push(spawn_join(async move {
                let cx = cx(holder);
                let mut waits = std::pin::pin!(table.lock(&cx, FILE, lock, true));
                let looked = poll_fn(|task| {
                    looks.fetch_add(1, Ordering::Relaxed);
                    waits.as_mut().poll(task)
                });
                looked.await.unwrap();
            }));
            settle().await;
        }
        for (holder, next) in waiting.into_iter().enumerate() {
            let before = looks.load(Ordering::Relaxed);
            let held = lock(holder as u64, LockKind::Unlock);
            table.lock(&cx(holder as u64), FILE, held, false).await.unwrap();
            next.await.unwrap();
            settle().await;
            assert_eq!(looks.load(Ordering::Relaxed), before + 1);
        }
        table.release_holder(HolderId(WAITING));
    });
}

#[test]
fn backwards_ranges_are_refused() {
    run(async |table: Arc<LockTable>| {
        let lock = posix(1, LockKind::Exclusive, 5, 4);
        assert_eq!(errno(table.lock(&cx(1), FILE, lock, true).await), Errno::EINVAL);
    });
}

/// The one that has what the first in the queue waits for stood behind it, and both waited for
/// ever. No lock that is held made a circle of it.
// proves: P56
#[test]
fn the_queue_makes_nobody_wait_for_itself() {
    run(async |table: Arc<LockTable>| {
        table.lock(&cx(1), FILE, posix(1, LockKind::Exclusive, 0, 9), false).await.unwrap();
        table.lock(&cx(2), FILE, posix(2, LockKind::Exclusive, 10, 19), false).await.unwrap();
        let both = waits(&table, 3, FILE, posix(3, LockKind::Exclusive, 0, 19));
        settle().await;
        let more = waits(&table, 1, FILE, posix(1, LockKind::Exclusive, 10, 19));
        settle().await;
        table.lock(&cx(2), FILE, posix(2, LockKind::Unlock, 10, 19), false).await.unwrap();
        more.await.unwrap().unwrap();
        table.lock(&cx(1), FILE, posix(1, LockKind::Unlock, 0, 19), false).await.unwrap();
        both.await.unwrap().unwrap();
    });
}

/// Each byte that is given back in the middle leaves one lock more: any number of them.
#[test]
fn giving_back_is_bounded_as_taking_is() {
    run(async |table: Arc<LockTable>| {
        let all = posix(1, LockKind::Exclusive, 0, u64::MAX);
        table.lock(&cx(1), FILE, all, false).await.unwrap();
        let give_back = |byte| posix(1, LockKind::Unlock, byte, byte);
        for byte in 1..50 {
            table.lock(&cx(1), FILE, give_back(2 * byte), false).await.unwrap();
        }
        assert_eq!(table.len(), 50, "half of what there may be");
        assert_eq!(errno(table.lock(&cx(1), FILE, give_back(500), false).await), Errno::ENOLCK);
        table.lock(&cx(1), FILE, give_back(3), false).await.unwrap(); // all of a lock
        let rest = posix(1, LockKind::Unlock, 50, u64::MAX);
        table.lock(&cx(1), FILE, rest, false).await.unwrap();
        assert!(table.len() < 50);
        table.release_holder(HolderId(1));
    });
}
