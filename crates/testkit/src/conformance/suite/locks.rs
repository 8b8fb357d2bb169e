//! Advisory locks.

use std::sync::Arc;
use std::time::Duration;

use dray_core::{
    Cancel, Context, Errno, HolderId, Lock, LockFamily, LockKind, LockOwner, LockRange, NodeId,
    OpenFile, OpenHow, Pid,
};
use dray_rt::{sleep, spawn_join};

use super::place::{TestDirectory, close, errno, user};

/// Time after which a waiter surely waits.
const SETTLED: Duration = Duration::from_millis(20);

fn lock(family: LockFamily, kind: LockKind, range: (u64, u64), owner: u64) -> Lock {
    let range = LockRange { start: range.0, end: range.1 };
    Lock { family, kind, range, owner: LockOwner::own(owner), pid: Pid(owner as u32) }
}

fn posix(kind: LockKind, range: (u64, u64), owner: u64) -> Lock {
    lock(LockFamily::Posix, kind, range, owner)
}

fn flock(kind: LockKind, owner: u64) -> Lock {
    lock(LockFamily::Flock, kind, (0, u64::MAX), owner)
}

/// A caller on node `node`.
fn on(node: u64) -> Context {
    Context { holder: HolderId(node), ..user(0).on_behalf_of(NodeId(node)) }
}

/// The same file opened through two clients.
async fn opened_twice(place: &TestDirectory) -> [Arc<dyn OpenFile>; 2] {
    let (entry, first) = place.file("file").await;
    let second = place.client(1).open(&user(0), entry.id, OpenHow::READ_WRITE).await.unwrap();
    [first, second]
}

// proves: P53
pub(super) async fn exclusive_locks_exclude(place: &TestDirectory) {
    let [one, other] = opened_twice(place).await;
    for (mine, yours) in [
        (posix(LockKind::Exclusive, (0, 9), 1), posix(LockKind::Shared, (9, 20), 2)),
        (flock(LockKind::Exclusive, 1), flock(LockKind::Shared, 2)),
    ] {
        one.lock(&on(1), mine, false).await.unwrap();
        assert_eq!(errno(other.lock(&on(2), yours, false).await), Some(Errno::EAGAIN));
        if mine.family == LockFamily::Posix {
            let holder = other.test_lock(&on(2), yours).await.unwrap().expect("a lock in the way");
            assert_eq!((holder.kind, holder.range), (mine.kind, mine.range));
            assert_eq!(one.test_lock(&on(1), mine).await.unwrap(), None, "one's own never is");
        }
        one.lock(&on(1), Lock { kind: LockKind::Shared, ..mine }, false).await.unwrap();
        other.lock(&on(2), yours, false).await.unwrap();
        one.lock(&on(1), Lock { kind: LockKind::Unlock, ..mine }, false).await.unwrap();
        other.lock(&on(2), Lock { kind: LockKind::Unlock, ..yours }, false).await.unwrap();
    }
    close(one).await;
    close(other).await;
}

// proves: P53
pub(super) async fn ranges_are_locked_apart(place: &TestDirectory) {
    let [one, other] = opened_twice(place).await;
    one.lock(&on(1), posix(LockKind::Exclusive, (0, 99), 1), false).await.unwrap();
    other.lock(&on(2), posix(LockKind::Exclusive, (100, 199), 2), false).await.unwrap();
    // A hole in the middle of a range leaves both ends locked.
    one.lock(&on(1), posix(LockKind::Unlock, (40, 59), 1), false).await.unwrap();
    other.lock(&on(2), posix(LockKind::Exclusive, (40, 59), 2), false).await.unwrap();
    for at in [39, 60, 99] {
        let taken = other.lock(&on(2), posix(LockKind::Shared, (at, at), 2), false).await;
        assert_eq!(errno(taken), Some(Errno::EAGAIN), "byte {at}");
    }
    // The two families do not see each other.
    other.lock(&on(2), flock(LockKind::Exclusive, 2), false).await.unwrap();
    close(one).await;
    close(other).await;
}

pub(super) async fn a_waiting_lock_is_granted_and_can_be_interrupted(place: &TestDirectory) {
    let [one, other] = opened_twice(place).await;
    let (mine, yours) = (flock(LockKind::Exclusive, 1), flock(LockKind::Exclusive, 2));
    one.lock(&on(1), mine, false).await.unwrap();
    let cancel = Arc::new(Cancel::default());
    let waiting = {
        let (other, cx) = (other.clone(), Context { cancel: Some(cancel.clone()), ..on(2) });
        spawn_join(async move { other.lock(&cx, yours, true).await })
    };
    sleep(SETTLED).await;
    cancel.set();
    assert_eq!(errno(waiting.await.unwrap()), Some(Errno::EINTR));
    let waiting = {
        let other = other.clone();
        spawn_join(async move { other.lock(&on(2), yours, true).await })
    };
    sleep(SETTLED).await;
    one.lock(&on(1), Lock { kind: LockKind::Unlock, ..mine }, false).await.unwrap();
    waiting.await.unwrap().unwrap();
    assert_eq!(errno(one.lock(&on(1), mine, false).await), Some(Errno::EAGAIN));
    close(one).await;
    close(other).await;
}

pub(super) async fn locks_end_with_flush_and_close(place: &TestDirectory) {
    let [one, other] = opened_twice(place).await;
    one.lock(&on(1), posix(LockKind::Exclusive, (0, 9), 1), false).await.unwrap();
    let wanted = posix(LockKind::Exclusive, (0, 9), 2);
    one.flush(&on(1), LockOwner::own(77)).await.unwrap();
    let taken = other.lock(&on(2), wanted, false).await;
    assert_eq!(errno(taken), Some(Errno::EAGAIN), "another owner's close changes nothing");
    one.flush(&on(1), LockOwner::own(1)).await.unwrap();
    other.lock(&on(2), wanted, false).await.unwrap();
    one.lock(&on(1), flock(LockKind::Exclusive, 1), false).await.unwrap();
    one.close(&on(1)).await.unwrap();
    other.lock(&on(2), flock(LockKind::Exclusive, 2), false).await.unwrap();
    other.close(&on(2)).await.unwrap();
}
