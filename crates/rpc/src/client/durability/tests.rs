//! Tests of which changes are kept, which are only noted, and when memory goes back.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dray_core::{Context, Errno, Op};

use super::segments::SEGMENT_BYTES;
use super::sync_requests::trim_heap;
use super::*;

const LIMIT_BYTES: u64 = 8 << 20;

fn file(ino: u64) -> FileId {
    FileId { ino, generation: 1 }
}

fn log(limit_bytes: u64) -> UnsyncedLog {
    UnsyncedLog::new(limit_bytes, Box::new(MappedSegments::default()), false)
}

fn confirmed(number: u64) -> Confirmation {
    Confirmation { stamp: ChangeStamp { number, power_epoch: 0 }, ticket: None }
}

/// A write of file 1 at its beginning.
fn write_through(
    log: &UnsyncedLog,
    writer: &LoggedWriter,
    stamp: u64,
    data: &[u8],
    is_durable: bool,
) {
    let (change, who) = (Some(Change::Write { at: 0 }), &Identity::system());
    let (file, confirmation) = (file(1), confirmed(stamp));
    let new = FileChange { file, confirmation, change, data, who, is_durable };
    log.change_answered(new, Some(writer));
}

fn write(log: &UnsyncedLog, ino: u64, stamp: u64, data: &[u8]) {
    let (change, who) = (Some(Change::Write { at: stamp << 20 }), &Identity::system());
    let (file, confirmation) = (file(ino), confirmed(stamp));
    let new = FileChange { file, confirmation, change, data, who, is_durable: false };
    log.change_answered(new, None);
}

// proves: P103
#[test]
fn a_stream_leaves_room_and_is_noted_whole_until_a_sync() {
    let (log, data) = (log(LIMIT_BYTES), vec![1; 1 << 20]);
    (1..=20).for_each(|stamp| write(&log, 1, stamp, &data));
    let status = log.status();
    assert!(status.kept_bytes < LIMIT_BYTES / 2 + (1 << 20), "{status:?}");
    assert!(status.kept_bytes >= LIMIT_BYTES / 2 - (2 << 20), "{status:?}");
    assert_eq!(status.kept_bytes >> 20 << 20, (20 << 20) - status.unkept_bytes);
    assert!(!log.is_all_kept());
    let before_bytes = status.kept_bytes;
    write(&log, 1, 21, b"of what has overflowed nothing more is kept");
    assert_eq!(log.status().kept_bytes, before_bytes);
    write(&log, 2, 22, &data);
    assert!(log.status().kept_bytes > before_bytes + (1 << 20));
    log.sync_answered(file(2), confirmed(22));
    write(&log, 1, 23, b"nor when others have made room");
    assert_eq!(log.status().kept_bytes, before_bytes);
    log.durable_up_to(23, None, SyncedFor::ThisClient);
    assert!(log.is_all_kept());
    write(&log, 1, 24, b"a sync makes room");
    assert_eq!(log.status().unkept_bytes, 0);
}

/// A replay would repeat an earlier change over this one, or a loss of this one would be reported
/// although it is on media.
// proves: P101
#[test]
fn a_durable_change_is_kept_while_there_is_room_and_is_no_loss() {
    let (log, data, writer) = (log(LIMIT_BYTES), vec![1; 1 << 20], LoggedWriter::new(file(1)));
    let write = |stamp, is_durable| {
        write_through(&log, &writer, stamp, &data, is_durable);
        log.status()
    };
    assert!(write(1, true).kept_bytes > 1 << 20);
    let room = (2..100).find(|stamp| write(*stamp, true).kept_bytes == 0);
    assert!(room.is_some(), "with the first for which there is no room the older ones go");
    assert_eq!(log.status().unkept_bytes, 0);
    assert!(write(100, true).kept_bytes > 0, "there is room again");
    assert!(write(101, false).kept_bytes > 2 << 20);
    let noted = (102..200).find(|stamp| write(*stamp, true).unkept_bytes > 0);
    assert!(noted.is_some(), "a replay would repeat what is not on media over it");
    assert!(!log.is_all_kept());
    log.durable_up_to(200, None, SyncedFor::ThisClient);
    assert!(write(201, true).unkept_bytes == 0 && log.is_all_kept());
    log.server_lost_power();
    log.replay_begins();
    let (index, kept) = log.next_to_replay(file(1), 0).expect("it is sent again");
    log.replayed(file(1), index, &kept);
    log.replay_ends(None);
    assert_eq!(log.status().losses, 0);
}

#[test]
fn without_room_at_all_a_durable_change_is_not_even_noted() {
    let (log, writer) = (log(0), LoggedWriter::new(file(1)));
    write_through(&log, &writer, 1, b"x", true);
    assert!(log.is_clean());
}

// proves: P102
#[test]
fn each_open_file_reports_a_loss_once_at_a_sync_and_at_closes_until_then() {
    let (log, writers) = (log(0), [LoggedWriter::new(file(1)), LoggedWriter::new(file(1))]);
    for (stamp, writer) in (1..).zip(&writers) {
        write_through(&log, writer, stamp, b"x", false);
    }
    let report =
        |writer: &LoggedWriter, op| log.loss_to_report(writer, op).map_err(|error| error.errno());
    assert_eq!(report(&writers[0], Op::Sync), Ok(()));
    log.server_lost_power();
    log.replay_begins();
    log.replay_ends(None);
    assert_eq!(report(&writers[0], Op::Sync), Err(Errno::EIO));
    assert_eq!(report(&writers[0], Op::Close), Ok(()), "it has been reported");
    assert_eq!(report(&writers[1], Op::Flush), Err(Errno::EIO));
    assert_eq!(report(&writers[1], Op::Close), Err(Errno::EIO));
    // The loss is forgotten with the last of them.
    log.writer_closed(&writers[0]);
    assert!(log.may_report_loss(file(1)));
    log.writer_closed(&writers[1]);
    assert!(!log.may_report_loss(file(1)) && log.lock().files.is_empty());
}

/// How often a log has asked for a scheduler.
fn scheduler_starts(log: &UnsyncedLog) -> Arc<AtomicU64> {
    let starts = Arc::new(AtomicU64::new(0));
    let counted = starts.clone();
    log.schedule_syncs_by(Box::new(move || _ = counted.fetch_add(1, Ordering::SeqCst)));
    starts
}

/// The end of a replay passed for the start of a scheduler. Later changes were never synced, until
/// the room was used up and nothing more was kept.
#[test]
fn after_a_loss_of_power_at_rest_changes_are_synced() {
    let log = log(LIMIT_BYTES);
    let starts = scheduler_starts(&log);
    log.server_lost_power();
    log.replay_begins();
    log.replay_ends(None);
    assert_eq!(starts.load(Ordering::SeqCst), 0, "there is nothing to sync");
    (1..=2).for_each(|stamp| write(&log, 1, stamp, b"x"));
    assert_eq!(starts.load(Ordering::SeqCst), 1);
    log.durable_up_to(2, None, SyncedFor::ThisClient);
    assert!(log.scheduler_may_end());
    write(&log, 1, 3, b"x");
    assert_eq!(starts.load(Ordering::SeqCst), 2);
}

/// The log takes part in the first handshake, before there is a session to start anything.
#[test]
fn a_sync_that_is_wanted_early_is_asked_for_when_somebody_can() {
    let log = UnsyncedLog::new(LIMIT_BYTES, Box::new(MappedSegments::default()), true);
    log.sync_inherited();
    let starts = scheduler_starts(&log);
    assert_eq!(starts.load(Ordering::SeqCst), 1);
    log.sync_inherited();
    assert_eq!(starts.load(Ordering::SeqCst), 1, "it is running");
}

/// The replay begins in a task of its own, somewhat later than the client learns of the loss.
#[test]
fn from_a_loss_of_power_on_closes_wait_for_the_replay() {
    let log = log(0);
    write(&log, 1, 1, b"x");
    let cx = Context::system();
    let waits = || {
        let mut known = std::pin::pin!(log.losses_known(&cx));
        let mut task = std::task::Context::from_waker(std::task::Waker::noop());
        known.as_mut().poll(&mut task).is_pending()
    };
    assert!(!waits() && !log.may_report_loss(file(1)));
    log.server_lost_power();
    assert!(waits() && log.may_report_loss(file(1)) && log.status().recovering);
    log.replay_begins();
    assert!(waits());
    log.replay_ends(None);
    assert!(!waits() && !log.status().recovering);
}

/// No sync forgets what is lost: it would be reported after each further loss of power, and the
/// mount would never be at rest.
#[test]
fn a_lost_name_is_reported_once() {
    let log = log(LIMIT_BYTES);
    let (stamp, expected) = (confirmed(1).stamp, ExpectedName::File(file(2)));
    log.name_answered(NameChange { dir: file(1), name: b"name", stamp, expected });
    log.server_lost_power();
    log.replay_begins();
    assert_eq!(log.names_to_verify(), [(file(1), b"name".to_vec(), expected)]);
    log.name_lost(file(1), b"name", "it is gone");
    log.replay_ends(None);
    assert_eq!((log.status().losses, log.status().names), (1, 0));
    assert!(log.is_clean());
}

/// The answer is too late for the replay. To keep it would be to send it over newer data after the
/// next loss.
#[test]
fn an_answer_from_before_a_loss_that_comes_after_the_recovery_is_a_loss() {
    let log = log(LIMIT_BYTES);
    log.server_lost_power();
    log.replay_begins();
    log.replay_ends(None);
    write(&log, 1, 1, b"late");
    let status = log.status();
    assert_eq!((status.losses, status.lost_bytes, status.kept_bytes), (1, 4, 0));
    assert!(log.is_clean());
}

#[test]
fn what_lies_in_two_segments_is_sent_again_whole_and_in_order() {
    let log = log(LIMIT_BYTES);
    let data: Vec<u8> = (0..700_000u32).map(|at| (at % 253) as u8).collect();
    (1..=3).for_each(|stamp| write(&log, 1, stamp, &data));
    log.server_lost_power();
    log.replay_begins();
    assert_eq!(log.files_to_replay(), [file(1)]);
    let (mut sent, mut from) = (Vec::new(), 0);
    while let Some((index, kept)) = log.next_to_replay(file(1), from) {
        let Change::Write { at } = kept.change else { panic!("not a write") };
        sent.push((kept.number(), at, kept.data.clone().expect("data").to_vec()));
        log.replayed(file(1), index, &kept);
        from = index;
    }
    assert!(sent.len() > 3, "none was cut in two");
    assert!(log.files_to_replay().is_empty());
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

// proves: P103
#[test]
fn when_everything_is_on_media_memory_is_given_back() {
    let (log, data) = (log(LIMIT_BYTES), vec![1; 1 << 20]);
    (1..=4).for_each(|stamp| write(&log, stamp, stamp, &data));
    assert!(log.status().memory_bytes >= 4 << 20);
    assert!(!log.scheduler_may_end());
    log.durable_up_to(4, None, SyncedFor::OtherClients);
    assert!(log.scheduler_may_end());
    assert_eq!(log.status().memory_bytes, 0);
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

/// With an older stamp that comes late a replay could undo what another client has synced since.
#[test]
fn what_is_known_to_be_on_media_is_not_forgotten() {
    let log = log(LIMIT_BYTES);
    log.durable_up_to(10, None, SyncedFor::ThisClient);
    log.durable_up_to(5, None, SyncedFor::OtherClients);
    assert_eq!(log.lock().durable.all.number, 10);
}

/// The server's kernel reports a failed sync once. The next success says nothing of what that
/// left out.
#[test]
fn what_a_failed_sync_left_out_is_kept_until_it_is_known() {
    let log = log(LIMIT_BYTES);
    write(&log, 1, 7, b"data");
    log.lock().sync_failed = true;
    log.durable_up_to(10, None, SyncedFor::ThisClient);
    let (status, durable) = (log.status(), log.lock().durable.all.number);
    assert!(status.kept_bytes > 0 && durable == 0, "{status:?}");
    log.lock().sync_failed = false;
    log.durable_up_to(10, None, SyncedFor::ThisClient);
    assert_eq!(log.status().kept_bytes, 0);
}

/// A mount of a projection with failover kept 64 MiB for each slice that it used.
// proves: P205
#[test]
fn logs_that_share_memory_keep_as_much_as_one() {
    let limit = Arc::new(SegmentLimit::of(SEGMENT_BYTES as u64));
    let source = || LimitedSegments::new(limit.clone());
    let (one, other) = (source(), source());
    let first = one.segment(true).expect("there is memory");
    assert!(!one.is_scarce() && !other.is_scarce());
    let second = other.segment(true).expect("there is a second one for what is unused");
    assert!(one.is_scarce() && other.is_scarce());
    assert!(one.segment(false).is_none() && other.segment(false).is_none());
    drop(first);
    let third = other.segment(false).expect("it was given back");
    drop((second, third));
    assert!(!one.is_scarce());
}
