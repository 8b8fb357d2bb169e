//! For fuzzing: logs of hostile records, and logs that were written and are read back.

use std::collections::BTreeMap;

use dray_core::{FileId, FsUuid, Identity};

use super::record::{
    DirtyLogIdentity, LogRecord, SendingRecord, SentRecord, WriteRecord, decode, put,
};
use super::scan::Reading;
use super::seed_of;
use crate::wire::WriteBase;

/// Reads bytes as a segment of a log, and then as bodies of records whose checksums are right. Each body begins with its
/// length, one byte.
///
/// # Panics
/// If the reader finds a write that is in none of the records.
pub fn read_any_log(bytes: &[u8]) {
    let mut reading = Reading::default();
    reading.segment(0, bytes);
    drop(reading.found());
    let (mut segment, mut writes, mut rest) = (Vec::new(), Vec::new(), bytes);
    while let Some((len_bytes, tail)) = rest.split_first() {
        let (body, tail) = tail.split_at(usize::from(*len_bytes).min(tail.len()));
        rest = tail;
        let Ok(record) = decode(body) else { continue };
        let data = if matches!(record, LogRecord::Write(_)) { body } else { &[] };
        assert!(put(seed_of(1), &record, data, &mut segment), "it is no longer than its body");
        if let LogRecord::Write(write) = record {
            writes.push((write, data));
        }
    }
    let mut reading = Reading::default();
    reading.segment(1, &segment);
    for found in reading.found().files.iter().flat_map(|file| &file.writes) {
        let is_it = |(write, data): &(WriteRecord, &[u8])| {
            *write == found.record && *data == &found.data[..]
        };
        assert!(writes.iter().any(is_it), "nobody wrote {found:?}");
    }
}

/// Writes a log as `script` says, with four bytes for each record, and reads it back.
///
/// # Panics
/// If something that is not sent is not found as it was written, or if something is found that is sent.
pub fn read_written_log(script: &[u8]) {
    let identity = DirtyLogIdentity {
        uuid: FsUuid(1),
        root: FileId { ino: 1, generation: 0 },
        export: "data".into(),
    };
    let mut segments = vec![Vec::new()];
    let mut kept: BTreeMap<u64, Vec<(u64, u64, Vec<u8>)>> = BTreeMap::new();
    let mut next = 0;
    let begin = |number: usize, next: u64, segment: &mut Vec<u8>| {
        put(seed_of(number as u64), &LogRecord::Head(identity.clone(), next), &[], segment)
    };
    assert!(begin(0, next, &mut segments[0]));
    for step in script.as_chunks::<4>().0 {
        let [what, file, at, len_bytes] = *step;
        let id = FileId { ino: u64::from(file % 4), generation: 1 };
        let last = kept.get(&id.ino).and_then(|kept| kept.get(usize::from(at))).map(|one| one.0);
        let number = segments.len() - 1;
        let (record, data) = match (what % 4, last) {
            (0, Some(last)) => {
                kept.entry(id.ino).or_default().retain(|(number, ..)| *number > last);
                (LogRecord::Sent(SentRecord { id, last, base: WriteBase::default() }), vec![])
            }
            (1, Some(last)) => {
                (LogRecord::Sending(SendingRecord { id, last, request: next }), vec![])
            }
            (2, _) if what > 200 => {
                segments.push(Vec::new());
                assert!(begin(number + 1, next, &mut segments[number + 1]));
                continue;
            }
            _ => {
                let (at, data) = (u64::from(at), vec![what; usize::from(len_bytes)]);
                kept.entry(id.ino).or_default().push((next, at, data.clone()));
                next += 1;
                (LogRecord::Write(write(next - 1, id, at)), data)
            }
        };
        assert!(put(seed_of(number as u64), &record, &data, &mut segments[number]));
    }
    let mut reading = Reading::default();
    segments.iter().enumerate().for_each(|(number, bytes)| reading.segment(number as u64, bytes));
    let found = reading.found();
    assert_eq!((found.torn_bytes, found.next), (0, next));
    let writes = found.files.iter().map(|file| {
        let writes = file.writes.iter();
        let all = writes.map(|one| (one.record.number, one.record.at, one.data.clone()));
        (file.id.ino, all.collect())
    });
    kept.retain(|_, writes| !writes.is_empty());
    assert_eq!(writes.collect::<BTreeMap<u64, Vec<_>>>(), kept);
}

fn write(number: u64, id: FileId, at: u64) -> WriteRecord {
    WriteRecord {
        number,
        id,
        handle: 1,
        flags: libc::O_RDWR,
        pid: 1,
        lease: 1,
        base: WriteBase::default(),
        at,
        kill_set_id: false,
        request: number + 1,
        who: (*Identity::system()).clone(),
    }
}
