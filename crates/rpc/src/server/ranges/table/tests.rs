use super::*;
use std::pin::{Pin, pin};
use std::task::Context;

fn simulate(test: impl Future<Output = ()>) {
    dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 5 }).unwrap().block_on(test);
}

fn file(ino: u64) -> FileId {
    FileId { ino, generation: 0 }
}

/// The result of a future at its first poll, if it has ended.
fn poll<T>(future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => Some(done),
        Poll::Pending => None,
    }
}

fn try_write(table: &Arc<RangeTable>, span: Span) -> Option<RangeGrant> {
    poll(pin!(table.write(file(1), span)))
}

fn can_change(table: &Arc<RangeTable>, span: Span) -> bool {
    poll(pin!(table.change(file(1), span))).is_some()
}

fn can_read(table: &RangeTable, span: Span) -> bool {
    poll(pin!(table.read(file(1), span))).is_some()
}

fn is_unused(table: &RangeTable) -> bool {
    table.shards.iter().all(|shard| {
        let files = &lock(shard).files;
        files.len() <= 1 && files.values().all(FileRanges::is_unused)
    })
}

#[test]
fn one_change_at_a_time_and_no_deadlock_between_pairs() {
    simulate(async {
        let table = Arc::new(RangeTable::default());
        let inside = Arc::new(Mutex::new(0));
        let tasks: Vec<_> = (0..50)
            .map(|n| {
                let (table, inside) = (table.clone(), inside.clone());
                let [one, two] = if n % 2 == 0 { [1, 2] } else { [2, 1] };
                dray_rt::spawn_join(async move {
                    let (one, two) = ((file(one), Span::ALL), (file(two), Span::ALL));
                    let _both = table.change_both(one, two).await;
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
        assert!(is_unused(&table));
    });
}

#[test]
fn what_does_not_meet_goes_on_side_by_side() {
    simulate(async {
        let table = Arc::new(RangeTable::default());
        let one = table.change(file(1), Span::bytes(0, 10)).await;
        assert!(can_change(&table, Span::bytes(10, 10)));
        assert!(!can_change(&table, Span::bytes(9, 1)) && !can_change(&table, Span::ALL));
        // Later requests do not overtake one for everything.
        let mut all = pin!(table.change(file(1), Span::ALL));
        assert!(poll(all.as_mut()).is_none());
        assert!(!can_change(&table, Span::bytes(10, 10)));
        drop(one);
        assert!(poll(all.as_mut()).is_some());
    });
}

#[test]
fn a_change_excludes_readers_while_it_writes_and_not_before() {
    simulate(async {
        let table = Arc::new(RangeTable::default());
        let mut change = table.change(file(1), Span::ALL).await;
        // Others wait to be under way: that is nothing to those who read.
        let mut next = pin!(table.change(file(1), Span::ALL));
        assert!(poll(next.as_mut()).is_none());
        let read = table.read(file(1), Span::bytes(0, 20)).await;
        assert_eq!(change.stamp(), None);
        {
            let mut writes = pin!(change.write(Span::bytes(10, 10)));
            assert!(poll(writes.as_mut()).is_none(), "somebody reads it");
            assert!(can_read(&table, Span::bytes(0, 10)));
            assert!(!can_read(&table, Span::bytes(5, 10)), "it would pass a writer that waits");
            drop(read);
            assert!(poll(writes.as_mut()).is_some());
        }
        assert_eq!(change.stamp(), Some(table.stamps.newest()));
        assert!(can_read(&table, Span::bytes(0, 10)) && !can_read(&table, Span::bytes(19, 1)));
        assert!(table.is_changing(file(1)) && !table.is_changing(file(2)));
        drop(change);
        assert!(can_read(&table, Span::ALL));
        drop(poll(next.as_mut()).expect("the first is over"));
        assert!(is_unused(&table));
    });
}

/// As where the executor of a server ends.
#[test]
fn an_abandoned_request_blocks_no_other() {
    let table = Arc::new(RangeTable::default());
    let reading = poll(pin!(table.read(file(1), Span::ALL))).unwrap();
    {
        let mut change = poll(pin!(table.change(file(1), Span::ALL))).unwrap();
        assert!(poll(pin!(change.write(Span::ALL))).is_none());
        assert!(!can_read(&table, Span::ALL) && !can_change(&table, Span::ALL));
    }
    assert!(can_read(&table, Span::ALL) && can_change(&table, Span::ALL));
    drop(reading);
    assert!(is_unused(&table));
}

#[test]
fn a_change_cut_short_keeps_its_range_and_readers_out() {
    simulate(async {
        let table = Arc::new(RangeTable::default());
        table.whole(file(1), Span::ALL).await;
        let cut = table.change_cut_short(file(1), Span::bytes(5, 5));
        assert!(can_change(&table, Span::bytes(0, 5)) && !can_change(&table, Span::bytes(9, 2)));
        table.whole(file(1), Span::bytes(0, 5)).await;
        let read = Arc::new(AtomicUsize::new(0));
        let reader = dray_rt::spawn_join({
            let (table, read) = (table.clone(), read.clone());
            async move {
                table.whole(file(1), Span::bytes(8, 1)).await;
                read.store(1, Ordering::SeqCst);
            }
        });
        dray_rt::yield_now().await;
        assert!(!can_change(&table, Span::bytes(8, 1)));
        assert_eq!(read.load(Ordering::SeqCst), 0, "it may be half written");
        // A change that is sent again after a loss of power, or a sync, does not wait for it.
        assert!(try_write(&table, Span::ALL).is_some());
        table.settled_in(file(1)).await;
        assert!(table.has_cut());
        drop(cut);
        reader.await.unwrap();
        assert!(can_change(&table, Span::ALL) && !table.has_cut());
    });
}

/// A waiting request takes no further number when it begins, and may be over by the second look.
// proves: P17
#[test]
fn a_file_has_no_version_while_a_change_of_it_waits() {
    simulate(async {
        let table = Arc::new(RangeTable::default());
        let (before, read) = (Span::bytes(0, 10), Span::bytes(12, 2));
        let first = table.change(file(1), before).await;
        let version = table.version(file(1), read);
        assert!(version.is_some(), "nobody changes these bytes");
        drop(table.read(file(1), read).await);
        assert_eq!(table.version(file(1), read), version, "a read is no change");
        let mut second = pin!(table.change(file(1), Span::bytes(5, 10)));
        assert!(poll(second.as_mut()).is_none());
        assert_eq!(table.version(file(1), read), None);
        drop(first);
        let second = poll(second.as_mut()).expect("the first is over");
        assert_eq!(table.version(file(1), read), None);
        drop(second);
        assert!(table.version(file(1), read).is_some_and(|later| Some(later) > version));
    });
}

#[test]
fn overlapping_writes_wait_and_a_settled_stamp_covers_no_running_one() {
    let table = Arc::new(RangeTable::default());
    let first = try_write(&table, Span::bytes(0, 10)).expect("nobody is there");
    let apart = try_write(&table, Span::bytes(10, 10)).expect("they do not touch");
    assert!(first.stamp() < apart.stamp());
    assert!(try_write(&table, Span::bytes(5, 10)).is_none());
    let (mut all, mut of_file) = (pin!(table.settled()), pin!(table.settled_in(file(1))));
    assert!(poll(all.as_mut()).is_none() && poll(of_file.as_mut()).is_none());
    let newest = apart.stamp();
    drop(first);
    assert!(poll(all.as_mut()).is_none(), "the newest is not over");
    // A later one is not waited for.
    let _later = try_write(&table, Span::bytes(0, 10)).expect("the first is over");
    drop(apart);
    assert_eq!((poll(all.as_mut()), poll(of_file.as_mut())), (newest, newest));
}

/// A change that has the newest stamp and is not over is not on media either.
#[test]
fn a_settled_stamp_waits_for_the_newest_change_too() {
    let table = Arc::new(RangeTable::default());
    let only = try_write(&table, Span::ALL).expect("nobody is there");
    assert!(poll(pin!(table.settled())).is_none());
    let stamp = only.stamp();
    drop(only);
    assert_eq!(poll(pin!(table.settled())), stamp);
}

/// Calls that sync wake once, when the writes that they wait for are over, however much is written
/// meanwhile.
#[test]
fn a_sync_is_woken_when_what_it_waits_for_is_over() {
    simulate(async {
        let table = Arc::new(RangeTable::default());
        let [first, second] =
            [0, 10].map(|at| try_write(&table, Span::bytes(at, 10)).expect("nobody is there"));
        let sync = dray_rt::spawn_join({
            let table = table.clone();
            async move { table.settled_in(file(1)).await }
        });
        let all = dray_rt::spawn_join({
            let table = table.clone();
            async move { table.settled().await }
        });
        dray_rt::sleep(std::time::Duration::from_secs(1)).await; // both wait
        let newest = second.stamp().unwrap();
        let later = try_write(&table, Span::bytes(20, 10)).expect("nobody is there");
        drop(second);
        assert_eq!(table.shard(file(1)).files[&file(1)].settling.len(), 2);
        drop(first);
        assert_eq!((sync.await.unwrap(), all.await.unwrap()), (newest, newest));
        drop(later);
        assert!(is_unused(&table));
    });
}

/// A sync of a file waited as long as there was always some write to it under way.
// proves: P26
#[test]
fn later_requests_do_not_overtake_one_for_the_whole_file() {
    let table = Arc::new(RangeTable::default());
    let first = try_write(&table, Span::bytes(0, 10)).expect("nobody is there");
    let mut all = pin!(table.write(file(1), Span::ALL));
    assert!(poll(all.as_mut()).is_none());
    assert!(try_write(&table, Span::bytes(20, 10)).is_none(), "it came later");
    let other = FileId { ino: 1, generation: 2 };
    assert!(poll(pin!(table.write(other, Span::bytes(20, 10)))).is_some());
    drop(first);
    assert!(poll(all.as_mut()).is_some());
}

/// Reads of a file that is read all the time took memory for each.
#[test]
fn what_a_file_needed_is_kept_for_the_next() {
    let table = Arc::new(RangeTable::default());
    for _ in 0..3 {
        let reads = [(); 3].map(|()| poll(pin!(table.read(file(1), Span::ALL))).unwrap());
        assert!(!is_unused(&table));
        drop(reads);
        assert!(is_unused(&table));
        assert!(table.shard(file(1)).files[&file(1)].data.capacity() > 0);
    }
}

/// Each file that was used once would stay.
#[test]
fn of_the_files_that_nobody_uses_the_last_alone_is_remembered() {
    let table = RangeTable::default();
    let alike: Vec<FileId> = (0..10_000).map(file).filter(|id| same_shard(&table, *id)).collect();
    assert!(alike.len() > 2 * SPARE_MAX);
    let held = poll(pin!(table.read(alike[0], Span::ALL)));
    for id in &alike[1..] {
        drop(poll(pin!(table.read(*id, Span::ALL))));
        let shard = table.shard(*id);
        assert!(shard.files.len() == 2 && shard.spare.len() <= 1, "one is in use, one was");
    }
    drop(held);
    assert_eq!(table.shard(alike[0]).files.len(), 1);
}

fn same_shard(table: &RangeTable, id: FileId) -> bool {
    let at = |id| std::ptr::from_ref(&*table.shard(id)).addr();
    at(id) == at(file(0))
}
