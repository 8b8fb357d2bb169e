//! Records of a log of dirty data, as they lie on the disk.
//!
//! ```text
//! bytes of the body, 4 | bytes of the data, 4 | checksum, 8 | kind, 1, and body | data
//! ```
//! The checksum is of all the rest. It begins with a number of the segment's own: what an earlier file left in the
//! same blocks of the disk is no record.

use dray_core::{FileId, FsUuid, Identity};

use crate::wire::{Input, Malformed, Wire, WriteBase, wire_fields, wire_numbers};

/// Data of one record at most, bytes.
pub(crate) const RECORD_MAX_BYTES: usize = 1 << 20;
/// Longest body, bytes. A caller with more groups than fit is not written for.
const BODY_MAX_BYTES: usize = 8 << 10;
const FRAME_BYTES: usize = 16;

/// Which files a log is about. A log is never written to any other ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyLogIdentity {
    /// The file system of the export.
    pub uuid: FsUuid,
    /// The directory that is exported.
    pub root: FileId,
    /// The name of the export.
    pub export: String,
}

wire_fields!(DirtyLogIdentity { uuid, root, export });

/// One write that is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WriteRecord {
    /// Where it stands among all records of writes of the log.
    pub(crate) number: u64,
    pub(crate) id: FileId,
    /// The number of the open file.
    pub(crate) handle: u64,
    /// Flags of the opening.
    pub(crate) flags: i32,
    pub(crate) pid: u32,
    pub(crate) lease: u64,
    /// The state of the file as the server said it last before.
    pub(crate) base: WriteBase,
    pub(crate) at: u64,
    pub(crate) kill_set_id: bool,
    /// 0: nobody will repeat it.
    pub(crate) request: u64,
    pub(crate) who: Identity,
}

wire_fields!(WriteRecord {
    number,
    id,
    handle,
    flags,
    pid,
    lease,
    base,
    at,
    kill_set_id,
    request,
    who
});

/// The writes of a file up to the one with the number `last` are being sent, by this request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SendingRecord {
    pub(crate) id: FileId,
    pub(crate) last: u64,
    pub(crate) request: u64,
}

wire_fields!(SendingRecord { id, last, request });

/// The writes of a file up to the one with the number `last` are at the server, or beside. The file is like that
/// behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SentRecord {
    pub(crate) id: FileId,
    pub(crate) last: u64,
    pub(crate) base: WriteBase,
}

wire_fields!(SentRecord { id, last, base });

/// What a log has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LogRecord {
    /// The first record of each segment, with the number of its first write.
    Head(DirtyLogIdentity, u64),
    /// The data stand behind it.
    Write(WriteRecord),
    Sending(SendingRecord),
    Sent(SentRecord),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Head,
    Write,
    Sending,
    Sent,
}

wire_numbers!(Kind { Kind::Head = 1, Kind::Write = 2, Kind::Sending = 3, Kind::Sent = 4 });

/// Appends a record. False: it is too long to be one.
pub(super) fn put(seed: u64, record: &LogRecord, data: &[u8], out: &mut Vec<u8>) -> bool {
    let begin = out.len();
    out.extend([0; FRAME_BYTES]);
    match record {
        LogRecord::Head(identity, first) => {
            Kind::Head.put(out);
            identity.put(out);
            first.put(out);
        }
        LogRecord::Write(write) => {
            Kind::Write.put(out);
            write.put(out);
        }
        LogRecord::Sending(sending) => {
            Kind::Sending.put(out);
            sending.put(out);
        }
        LogRecord::Sent(sent) => {
            Kind::Sent.put(out);
            sent.put(out);
        }
    }
    let body_bytes = out.len() - begin - FRAME_BYTES;
    if body_bytes > BODY_MAX_BYTES || data.len() > RECORD_MAX_BYTES {
        out.truncate(begin);
        return false;
    }
    out.extend_from_slice(data);
    let frame = &mut out[begin..];
    frame[..4].copy_from_slice(&(body_bytes as u32).to_le_bytes());
    frame[4..8].copy_from_slice(&(data.len() as u32).to_le_bytes());
    let sum = checksum(seed, frame);
    frame[8..FRAME_BYTES].copy_from_slice(&sum.to_le_bytes());
    true
}

/// The record at the beginning of these bytes, where its data are, and how long all of it is. None: there is no whole
/// one.
pub(super) fn get(seed: u64, bytes: &[u8]) -> Option<(LogRecord, std::ops::Range<usize>)> {
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let (body_bytes, data_bytes) = (word(0)? as usize, word(4)? as usize);
    if body_bytes == 0 || body_bytes > BODY_MAX_BYTES || data_bytes > RECORD_MAX_BYTES {
        return None;
    }
    let data_at = FRAME_BYTES + body_bytes;
    let frame = bytes.get(..data_at + data_bytes)?;
    let sum = u64::from_le_bytes(frame[8..FRAME_BYTES].try_into().ok()?);
    if sum != checksum(seed, frame) {
        return None;
    }
    let record = decode(&frame[FRAME_BYTES..data_at]).ok()?;
    let has_data = matches!(record, LogRecord::Write(_));
    (has_data || data_bytes == 0).then_some((record, data_at..data_at + data_bytes))
}

pub(super) fn decode(body: &[u8]) -> Result<LogRecord, Malformed> {
    let mut input = Input(body);
    let record = match input.get()? {
        Kind::Head => LogRecord::Head(input.get()?, input.get()?),
        Kind::Write => LogRecord::Write(input.get()?),
        Kind::Sending => LogRecord::Sending(input.get()?),
        Kind::Sent => LogRecord::Sent(input.get()?),
    };
    match input.0.is_empty() {
        true => Ok(record),
        false => Err(Malformed("bytes behind a record")),
    }
}

/// Of a record without its checksum. Each step can be undone, so no other single word gives the same.
fn checksum(seed: u64, frame: &[u8]) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |sum: u64, word: u64| (sum ^ word).wrapping_mul(ODD).rotate_left(29);
    let [lengths, rest] = [&frame[..8], &frame[FRAME_BYTES..]];
    let (words, tail) = rest.as_chunks::<8>();
    let (lengths, _) = lengths.as_chunks::<8>();
    let words = lengths.iter().chain(words).map(|word| u64::from_le_bytes(*word));
    let mut last = [0; 8];
    last[..tail.len()].copy_from_slice(tail);
    mix(words.fold(mix(seed, 1), mix), u64::from_le_bytes(last))
}

#[cfg(test)]
pub(super) mod tests {
    use dray_core::{Gid, Timestamp, Uid};

    use super::*;

    pub(in super::super) fn write(number: u64) -> WriteRecord {
        let groups = [Gid(4), Gid(27)].into();
        let time = |sec| Timestamp { sec, nsec: 5 };
        WriteRecord {
            number,
            id: FileId { ino: 7, generation: 8 },
            handle: 9,
            flags: libc::O_RDWR,
            pid: 3,
            lease: 77,
            base: WriteBase { size: 10, mtime: time(-1), ctime: time(2) },
            at: 100,
            kill_set_id: true,
            request: 50,
            who: Identity { uid: Uid(1000), gid: Gid(100), groups, job: "job-7".into() },
        }
    }

    // proves: P312
    #[test]
    fn a_record_is_what_was_written_or_none() {
        let record = LogRecord::Write(write(1));
        let mut bytes = Vec::new();
        assert!(put(5, &record, b"hello, log", &mut bytes));
        let (found, data) = get(5, &bytes).unwrap();
        assert_eq!(
            (found, &bytes[data.clone()], data.end),
            (record, &b"hello, log"[..], bytes.len())
        );
        assert!(get(6, &bytes).is_none(), "of another segment");
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 1 << (at % 8);
            assert!(get(5, &wrong).is_none(), "byte {at}");
            assert!(get(5, &bytes[..at]).is_none(), "the first {at} bytes");
        }
    }

    #[test]
    fn records_of_all_kinds_come_back_and_those_that_are_too_long_are_refused() {
        let identity = DirtyLogIdentity {
            uuid: FsUuid(3),
            root: FileId { ino: 1, generation: 0 },
            export: "data".into(),
        };
        let id = FileId { ino: 7, generation: 8 };
        for record in [
            LogRecord::Head(identity, 4),
            LogRecord::Sending(SendingRecord { id, last: 5, request: 6 }),
            LogRecord::Sent(SentRecord { id, last: 5, base: write(1).base }),
        ] {
            let mut bytes = Vec::new();
            assert!(put(1, &record, &[], &mut bytes));
            assert_eq!(get(1, &bytes).unwrap().0, record);
            bytes.clear();
            assert!(put(1, &record, b"data", &mut bytes));
            assert!(get(1, &bytes).is_none(), "it has no data");
        }
        let mut bytes = Vec::new();
        assert!(!put(1, &LogRecord::Write(write(1)), &[0; RECORD_MAX_BYTES + 1], &mut bytes));
        let groups = (0..4000).map(Gid).collect();
        let many = WriteRecord { who: Identity { groups, ..write(1).who }, ..write(1) };
        assert!(!put(1, &LogRecord::Write(many), &[], &mut bytes) && bytes.is_empty());
    }
}
