//! The cost of thousands of waiting requests, counted in looks at locks and requests.

use super::*;
use dray_core::{LockKind, LockOwner, LockRange, Pid};

const FILE: FileId = FileId { ino: 1, generation: 1 };
const MANY: u64 = 2500;
/// Looks that an operation may take, on an average. A waiter that gives up makes a logarithmic
/// number of others look again. Each of them takes some two looks for each level of a tree. Up to
/// 200 were seen, by chance. Half of all others, as it was, is more.
const LOOKS_MAX: u64 = 400;

fn owner(number: u64) -> Owner {
    Owner { holder: HolderId(number), owner: LockOwner::own(1) }
}

fn lock(kind: LockKind, (start, end): (u64, u64)) -> Lock {
    let range = LockRange { start, end };
    Lock { family: LockFamily::Posix, kind, range, owner: LockOwner::own(1), pid: Pid(1) }
}

fn mixed(number: u64) -> u64 {
    let mixed = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 20
}

/// The ranges that those who wait want, the first one's first.
type Ranges = fn(u64) -> (u64, u64);

const RANGES: [(&str, Ranges); 8] = [
    ("the same", |_| (0, 9)),
    ("staggered, each over its neighbour", |at| (10 * at, 10 * at + 14)),
    ("staggered, each over all others", |at| (at, at + MANY)),
    ("staggered backwards", |at| (MANY - at, 2 * MANY - at)),
    ("each within the former", |at| (at, 3 * MANY - at)),
    ("the whole file, then records", |at| match at < MANY / 2 {
        true => (0, u64::MAX),
        false => (10 * at, 10 * at + 9),
    }),
    ("records, then the whole file", |at| match at < MANY / 2 {
        true => (10 * at, 10 * at + 9),
        false => (0, u64::MAX),
    }),
    ("anywhere", |at| {
        let start = mixed(at) % MANY;
        (start, start + mixed(at + MANY) % MANY)
    }),
];

/// Puts those who give up into an order.
type Order = fn(&mut [u64]);

/// The orders in which they give up.
const ORDERS: [(&str, Order); 3] = [
    ("the first one first", |_| {}),
    ("the last one first", |numbers| numbers.reverse()),
    ("in any order", |numbers| numbers.sort_by_key(|number| mixed(*number))),
];

fn looks(table: &LockTable) -> u64 {
    let looks = table.files.look(FILE, |locks| locks.held.looks() + locks.queue.looks());
    looks.unwrap() as u64
}

/// Puts `MANY` behind a lock on all of the file; their numbers.
fn wait(table: &LockTable, ranges: Ranges, kind: LockKind) -> Vec<u64> {
    let all = lock(LockKind::Exclusive, (0, u64::MAX));
    table.ask(FILE, owner(MANY), all, false).unwrap();
    let waits = |at: u64| table.ask(FILE, owner(at), lock(kind, ranges(at)), true);
    (0..MANY).map(|at| waits(at).unwrap().expect("it waits")).collect()
}

fn give_up(table: &LockTable, number: u64, lock: Lock) {
    let owner = owner(number);
    let mut waiting = Waiting { table, file: FILE, owner, lock, number, done: false };
    assert_eq!(waiting.give_up().unwrap_err().errno(), Errno::EINTR);
}

/// Each that gave up had all the others looked at, each beside all before it. 5000 that gave up,
/// one after the other, took 20 s. A client that locked any file of the export waited for them.
// proves: P57
#[test]
fn a_waiter_that_gives_up_wakes_few() {
    for (what, ranges) in RANGES {
        for (how, order) in ORDERS {
            let table = LockTable::new(usize::MAX);
            let mut numbers = wait(&table, ranges, LockKind::Exclusive);
            let before = looks(&table);
            order(&mut numbers);
            numbers.iter().for_each(|number| {
                give_up(&table, *number, lock(LockKind::Exclusive, ranges(*number)));
            });
            let looks = looks(&table) - before;
            assert!(looks <= MANY * LOOKS_MAX, "{what}, {how}: {looks} looks to give up");
            assert_eq!(table.shares.used(), 1);
        }
    }
}

/// Only the first one is barred by the lock that is held, and each other one by the one before it.
/// Each was looked at beside all before it for each that gave up, a million looks for each of a
/// thousand.
// proves: P57
#[test]
fn in_a_chain_a_waiter_that_gives_up_wakes_few() {
    let wanted = |at: u64| lock(LockKind::Exclusive, (10 * at, 10 * at + 14));
    for (how, order) in ORDERS {
        let table = LockTable::new(usize::MAX);
        table.ask(FILE, owner(MANY), wanted(0), false).unwrap();
        let waits = |at: u64| table.ask(FILE, owner(at), wanted(at + 1), true).unwrap();
        let mut numbers: Vec<u64> = (0..MANY).map(|at| waits(at).expect("it waits")).collect();
        let before = looks(&table);
        assert!(before <= MANY * LOOKS_MAX, "{before} looks to wait");
        order(&mut numbers);
        for number in numbers {
            let (owner, lock) = (owner(number), wanted(number + 1));
            let mut waiting =
                Waiting { table: &table, file: FILE, owner, lock, number, done: false };
            // A waiter behind one that gave up may have got its lock.
            if waiting.give_up().is_ok() {
                table.release(FILE, LockFamily::Posix, owner);
            }
        }
        let looks = looks(&table) - before;
        assert!(looks <= MANY * LOOKS_MAX, "{how}: {looks} looks to give up");
        assert_eq!(table.shares.used(), 1);
    }
}

/// Waiters are granted one by one: each gets what the waiter before it gives back.
// proves: P57, P129
#[test]
fn an_unlock_wakes_few() {
    for (what, ranges) in RANGES {
        let table = LockTable::new(usize::MAX);
        let numbers = wait(&table, ranges, LockKind::Exclusive);
        let before = looks(&table);
        let unlock = |number| {
            let all = lock(LockKind::Unlock, (0, u64::MAX));
            table.ask(FILE, owner(number), all, false).unwrap();
        };
        // The last lock that is had keeps the count of looks.
        let byte = lock(LockKind::Shared, (u64::MAX, u64::MAX));
        let keep = Lock { family: LockFamily::Flock, ..byte };
        table.ask(FILE, owner(MANY + 1), keep, false).unwrap();
        unlock(MANY);
        for number in numbers {
            let granted = table.poll_ended(FILE, number, Waker::noop());
            assert_eq!(granted, Some(WaitOutcome::Granted), "{what}");
            unlock(number);
        }
        let looks = looks(&table) - before;
        assert!(looks <= MANY * LOOKS_MAX, "{what}: {looks} looks to give back");
    }
}

/// Owners that have locks elsewhere stand behind nobody, and each watches one of many holders.
#[test]
fn waiters_that_pass_all_others_look_again_rarely() {
    let table = LockTable::new(usize::MAX);
    let other = FileId { ino: 2, generation: 1 };
    let shared = lock(LockKind::Shared, (0, 9));
    for at in 0..MANY {
        let reader = owner(MANY + at);
        table.ask(FILE, reader, shared, false).unwrap();
        table.ask(other, owner(at), shared, false).unwrap();
    }
    for at in 0..MANY {
        let wanted = lock(LockKind::Exclusive, (0, 9));
        table.ask(FILE, owner(at), wanted, true).unwrap().expect("it waits");
    }
    let before = looks(&table);
    assert!(before <= MANY * LOOKS_MAX, "{before} looks to wait");
    for at in 1..MANY {
        let back = Lock { kind: LockKind::Unlock, ..shared };
        table.ask(FILE, owner(MANY + at), back, false).unwrap();
    }
    let looks = looks(&table) - before;
    assert!(looks <= MANY * LOOKS_MAX, "{looks} looks to give back");
}

/// All locks of an export had one mutex.
// proves: P57
#[test]
fn work_on_the_locks_of_a_file_blocks_no_other_file() {
    let table = LockTable::new(usize::MAX);
    let shared = lock(LockKind::Shared, (0, 9));
    table.files.with(FILE, |_| {
        for ino in 2..200 {
            let other = FileId { ino, generation: 1 };
            table.ask(other, owner(1), shared, true).unwrap();
            let wanted = lock(LockKind::Exclusive, (0, 9));
            let number = table.ask(other, owner(2), wanted, true).unwrap().unwrap();
            table.release(other, LockFamily::Posix, owner(1));
            assert_eq!(table.poll_ended(other, number, Waker::noop()), Some(WaitOutcome::Granted));
            table.release(other, LockFamily::Posix, owner(2));
        }
    });
    assert!(table.is_empty());
}
