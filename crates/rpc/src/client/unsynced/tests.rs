//! What is kept, what is only noted, and when memory goes back.

use super::*;
use dray_core::{Context, Errno, Op};

const LIMIT_BYTES: u64 = 8 << 20;

fn file(ino: u64) -> FileId {
    FileId { ino, generation: 1 }
}

fn write(unsynced: &Unsynced, ino: u64, stamp: u64, data: &[u8]) {
    let (made, who) = (Made { stamp, ..Made::default() }, Identity::system());
    let change = Some(Change::Write { at: stamp << 20 });
    let changed = Changed { file: file(ino), made, change, data, who: &who, on_media: false };
    unsynced.changed(changed, None);
}

#[test]
fn a_stream_leaves_room_and_is_noted_whole_until_a_sync() {
    let (unsynced, data) = (Unsynced::new(LIMIT_BYTES, false), vec![1; 1 << 20]);
    (1..=20).for_each(|stamp| write(&unsynced, 1, stamp, &data));
    let status = unsynced.status();
    assert!(status.kept_bytes < LIMIT_BYTES / 2 + (1 << 20), "{status:?}");
    assert!(status.kept_bytes >= LIMIT_BYTES / 2 - (2 << 20), "{status:?}");
    assert_eq!(status.kept_bytes >> 20 << 20, (20 << 20) - status.unkept_bytes);
    assert!(!unsynced.is_all_kept());
    let before_bytes = status.kept_bytes;
    write(&unsynced, 1, 21, b"of what has overflowed nothing more is kept");
    assert_eq!(unsynced.status().kept_bytes, before_bytes);
    write(&unsynced, 2, 22, &data);
    assert!(unsynced.status().kept_bytes > before_bytes + (1 << 20));
    let synced = Made { stamp: 22, ..Made::default() };
    unsynced.synced(file(2), synced);
    write(&unsynced, 1, 23, b"nor when others have made room");
    assert_eq!(unsynced.status().kept_bytes, before_bytes);
    unsynced.stable(23, None, true);
    assert!(unsynced.is_all_kept());
    write(&unsynced, 1, 24, b"a sync makes room");
    assert_eq!(unsynced.status().unkept_bytes, 0);
}

/// It would be made again over a later one that was not kept, or be told as lost though it is there.
#[test]
fn what_is_on_media_is_kept_while_there_is_room_and_never_told_as_lost() {
    let (unsynced, who) = (Unsynced::new(LIMIT_BYTES, false), Identity::system());
    let (data, writer) = (vec![1; 1 << 20], Writer::default());
    let write = |stamp, on_media| {
        let (made, change) = (Made { stamp, ..Made::default() }, Some(Change::Write { at: 0 }));
        let changed = Changed { file: file(1), made, change, data: &data, who: &who, on_media };
        unsynced.changed(changed, Some(&writer));
        unsynced.status()
    };
    assert!(write(1, true).kept_bytes > 1 << 20);
    let room = (2..100).find(|stamp| write(*stamp, true).kept_bytes == 0);
    assert!(room.is_some(), "with the first for which there is no room its elders go");
    assert_eq!(unsynced.status().unkept_bytes, 0);
    assert!(write(100, true).kept_bytes > 0, "there is room again");
    assert!(write(101, false).kept_bytes > 2 << 20);
    let noted = (102..200).find(|stamp| write(*stamp, true).unkept_bytes > 0);
    assert!(noted.is_some(), "what was not on media would be made again over it");
    assert!(!unsynced.is_all_kept());
    unsynced.stable(200, None, true);
    assert!(write(201, true).unkept_bytes == 0 && unsynced.is_all_kept());
    unsynced.power_lost();
    unsynced.recovery_begins();
    let (index, kept) = unsynced.next_to_send(file(1), 0).expect("it is sent again");
    unsynced.sent(file(1), index, &kept);
    unsynced.recovery_ends(None);
    assert_eq!(unsynced.status().losses, 0);
    let none = Unsynced::new(0, false);
    let (made, change) = (Made { stamp: 1, ..Made::default() }, Some(Change::Write { at: 0 }));
    let (file, on_media) = (file(1), true);
    none.changed(Changed { file, made, change, data: b"x", who: &who, on_media }, Some(&writer));
    assert!(none.is_clean());
}

/// Each open file through which it was written hears of it: at fsync once, at close until then.
#[test]
fn what_was_lost_is_told_through_each_file_that_it_was_written_through() {
    let (unsynced, who) = (Unsynced::new(0, false), Identity::system());
    let writers = [Writer::default(), Writer::default()];
    for (stamp, writer) in (1..).zip(&writers) {
        let (made, change) = (Made { stamp, ..Made::default() }, Some(Change::Write { at: 0 }));
        let changed =
            Changed { file: file(1), made, change, data: b"x", who: &who, on_media: false };
        unsynced.changed(changed, Some(writer));
    }
    let owed =
        |writer: &Writer, op| unsynced.owed(file(1), writer, op).map_err(|error| error.errno());
    assert_eq!(owed(&writers[0], Op::Sync), Ok(()));
    unsynced.power_lost();
    unsynced.recovery_begins();
    unsynced.recovery_ends(None);
    assert_eq!(owed(&writers[0], Op::Sync), Err(Errno::EIO));
    assert_eq!(owed(&writers[0], Op::Close), Ok(()), "it has been told");
    assert_eq!(owed(&writers[1], Op::Flush), Err(Errno::EIO));
    assert_eq!(owed(&writers[1], Op::Close), Err(Errno::EIO));
    // The matter ends with the last of them.
    unsynced.closed(file(1), &writers[0]);
    assert!(unsynced.owes(file(1)));
    unsynced.closed(file(1), &writers[1]);
    assert!(!unsynced.owes(file(1)) && unsynced.lock().files.is_empty());
}

/// The recovery begins in a task of its own, somewhat later than the loss is heard of.
#[test]
fn from_the_moment_of_a_loss_nobody_is_told_that_all_is_well() {
    let unsynced = Unsynced::new(0, false);
    write(&unsynced, 1, 1, b"x");
    let cx = Context::system();
    let waits = || {
        let mut decided = std::pin::pin!(unsynced.decided(&cx));
        let mut task = std::task::Context::from_waker(std::task::Waker::noop());
        decided.as_mut().poll(&mut task).is_pending()
    };
    assert!(!waits() && !unsynced.owes(file(1)));
    unsynced.power_lost();
    assert!(waits() && unsynced.owes(file(1)) && unsynced.status().recovering);
    unsynced.recovery_begins();
    assert!(waits());
    unsynced.recovery_ends(None);
    assert!(!waits() && !unsynced.status().recovering);
}

/// Nobody syncs what is lost: it would be told after each further loss of power, and the mount
/// would never be at rest.
#[test]
fn a_lost_name_is_told_once() {
    let unsynced = Unsynced::new(LIMIT_BYTES, false);
    let made = Made { stamp: 1, ..Made::default() };
    unsynced.named(file(1), b"name", made, Expect::Is(file(2)));
    unsynced.power_lost();
    unsynced.recovery_begins();
    assert_eq!(unsynced.names_to_check(), [(file(1), b"name".to_vec(), Expect::Is(file(2)))]);
    unsynced.name_lost(file(1), b"name", "it is gone");
    unsynced.recovery_ends(None);
    assert_eq!((unsynced.status().losses, unsynced.status().names), (1, 0));
    assert!(unsynced.is_clean());
}

/// What is heard of so late goes with nothing that is sent again: to keep it would be to send it
/// over newer data after the next loss.
#[test]
fn an_answer_from_before_a_loss_that_comes_after_the_recovery_is_a_loss() {
    let unsynced = Unsynced::new(LIMIT_BYTES, false);
    unsynced.power_lost();
    unsynced.recovery_begins();
    unsynced.recovery_ends(None);
    write(&unsynced, 1, 1, b"late");
    let status = unsynced.status();
    assert_eq!((status.losses, status.lost_bytes, status.kept_bytes), (1, 4, 0));
    assert!(unsynced.is_clean());
}

#[test]
fn what_lies_in_two_segments_is_sent_again_whole_and_in_order() {
    let unsynced = Unsynced::new(LIMIT_BYTES, false);
    let data: Vec<u8> = (0..700_000u32).map(|at| (at % 253) as u8).collect();
    (1..=3).for_each(|stamp| write(&unsynced, 1, stamp, &data));
    unsynced.power_lost();
    unsynced.recovery_begins();
    assert_eq!(unsynced.files_to_send(), [file(1)]);
    let (mut sent, mut from) = (Vec::new(), 0);
    while let Some((index, kept)) = unsynced.next_to_send(file(1), from) {
        let Change::Write { at } = kept.change else { panic!("not a write") };
        sent.push((kept.stamp, at, kept.data.clone().expect("data").to_vec()));
        unsynced.sent(file(1), index, &kept);
        from = index;
    }
    assert!(sent.len() > 3, "none was cut in two");
    assert!(unsynced.files_to_send().is_empty());
    for stamp in 1..=3u64 {
        let mut at = stamp << 20;
        let mut whole = Vec::new();
        for (_, begin, part) in sent.iter().filter(|(one, _, _)| *one == stamp) {
            assert_eq!(*begin, at);
            at += part.len() as u64;
            whole.extend_from_slice(part);
        }
        assert!(whole == data, "stamp {stamp}");
    }
}

#[test]
fn when_everything_is_on_media_memory_is_given_back() {
    let (unsynced, data) = (Unsynced::new(LIMIT_BYTES, false), vec![1; 1 << 20]);
    (1..=4).for_each(|stamp| write(&unsynced, stamp, stamp, &data));
    assert!(unsynced.status().memory_bytes >= 4 << 20);
    assert!(!unsynced.tender_ends());
    unsynced.stable(4, None, false);
    assert!(unsynced.tender_ends());
    assert_eq!(unsynced.status().memory_bytes, 0);
}

/// Own memory of this process, KiB.
#[cfg(target_env = "gnu")]
fn own_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Much more than all tests beside this one take and give together.
#[cfg(target_env = "gnu")]
#[test]
fn what_is_free_below_something_that_stays_is_given_back() {
    let mut blocks: Vec<Box<[u8]>> = (0..256 << 10).map(|_| vec![1; 1000].into()).collect();
    let stays = blocks.pop();
    drop(blocks);
    let before_kib = own_kib();
    trim_heap();
    let after_kib = own_kib();
    assert!(after_kib + (128 << 10) < before_kib, "{before_kib} KiB before, {after_kib} after");
    drop(stays);
}

/// An older word that comes late would let a recovery undo what somebody has synced since.
#[test]
fn what_is_known_to_be_on_media_is_not_forgotten() {
    let unsynced = Unsynced::new(LIMIT_BYTES, false);
    unsynced.stable(10, None, true);
    unsynced.stable(5, None, false);
    assert_eq!(unsynced.lock().stamps.floor.0, 10);
}

/// The kernel of the server tells of a failed sync once: the next success says nothing of what it
/// left out.
#[test]
fn what_a_failed_sync_left_out_is_kept_until_it_is_known() {
    let unsynced = Unsynced::new(LIMIT_BYTES, false);
    write(&unsynced, 1, 7, b"data");
    unsynced.lock().doubtful = true;
    unsynced.stable(10, None, true);
    let (status, floor) = (unsynced.status(), unsynced.lock().stamps.floor.0);
    assert!(status.kept_bytes > 0 && floor == 0, "{status:?}");
    unsynced.lock().doubtful = false;
    unsynced.stable(10, None, true);
    assert_eq!(unsynced.status().kept_bytes, 0);
}
