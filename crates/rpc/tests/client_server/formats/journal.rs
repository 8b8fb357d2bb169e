//! The journal's files: those of sessions, and small ones beside them.

use std::fs;

use dray_core::Op;
use dray_rpc::server::{FileJournal, Journal, PersistentRecord, SessionRecord, SlotRecord};

use super::written::Written;

fn session() -> SessionRecord {
    SessionRecord { id: 5, secret: [7; 16], node: 3, export: "data".into(), host: "node1".into() }
}

/// Bytes of the page in front of the slots, and of a slot.
const HEADER_BYTES: usize = 4096;
const SLOT_BYTES: usize = 1024;

/// The beginning of `part`, up to the last byte that is not zero.
fn begin_of(part: &[u8]) -> &[u8] {
    let used = part.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    &part[..used]
}

// proves: P137
#[test]
fn a_session_s_file_is_what_it_was() {
    let mut written = Written::in_file("session-1.txt");
    let dir = tempfile::tempdir().unwrap();
    let journal = FileJournal::open(dir.path()).unwrap();
    let log = journal.create(&session(), 4).unwrap();
    log.begin(0, 10, Op::Make, b"intent");
    log.begin(1, 11, Op::Remove, b"intent");
    log.done(1, 11, b"answer");
    log.done(2, 12, b"answer");
    log.set_locks(true);
    let name = "session-0000000000000005";
    let bytes = fs::read(dir.path().join(name)).unwrap();
    assert_eq!(bytes.len(), HEADER_BYTES + 4 * SLOT_BYTES);
    let (head, slots) = bytes.split_at(HEADER_BYTES);
    let mut then = written.same("header", begin_of(head));
    then.resize(HEADER_BYTES, 0);
    for (number, slot) in slots.chunks(SLOT_BYTES).enumerate() {
        then.extend(written.same(&format!("slot.{number}"), begin_of(slot)));
        then.resize(HEADER_BYTES + (number + 1) * SLOT_BYTES, 0);
    }
    written.end();

    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(name), then).unwrap();
    let loaded = FileJournal::open(dir.path()).unwrap().load();
    let [(record, log)] = &loaded[..] else { panic!("{} sessions", loaded.len()) };
    assert_eq!((record, log.had_locks(), log.count()), (&session(), true, 4));
    assert!(log.may_have_leases(), "where nothing is noted");
    let (intent, answer) = (b"intent".to_vec(), b"answer".to_vec());
    let begun = Some((Op::Remove, intent.clone()));
    let expected = [
        (0, SlotRecord::Intent { sequence: 10, op: Op::Make, intent }),
        (1, SlotRecord::Answer { sequence: 11, answer: answer.clone(), begun }),
        (2, SlotRecord::Answer { sequence: 12, answer, begun: None }),
    ];
    assert_eq!(log.records(), expected);
}

// proves: P137
#[test]
fn small_files_are_what_they_were() {
    let mut written = Written::in_file("kept-1.txt");
    let dir = tempfile::tempdir().unwrap();
    let journal = FileJournal::open(&dir.path().join("sessions")).unwrap();
    let all = [
        ("tickets", PersistentRecord::TicketKey),
        ("evicted", PersistentRecord::Evicted),
        ("stamps", PersistentRecord::StampsBound),
    ];
    for (name, what) in all {
        journal.keep(what, b"content").unwrap();
        let then = written.same(name, &fs::read(dir.path().join(name)).unwrap());
        fs::write(dir.path().join(name), then).unwrap();
        assert_eq!(journal.kept(what).unwrap().unwrap(), b"content");
    }
    written.end();
}
