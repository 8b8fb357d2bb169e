//! The log of the path table, so that ids outlive the server's process. It records the names that were
//! added and removed.
//!
//! Each change is one write(2), made before the answer that depends on it. So the log is complete
//! whenever the process is killed. A loss of power can remove its end: reading stops at the first
//! incomplete record. The log may therefore be behind the file system, as it is behind changes that were
//! made without the server. Each user of a record compares it with the file under that name.
//!
//! ```text
//! header 0  8  magic and version    record  0  8  checksum of the rest
//!        8 16  uuid of the export           8  1  1: entered, 2: left
//!       24  8  inode of its root            9  1  bytes of the name
//!       32  8  kind of file system         12  4  type, as in a mode
//!                                          16 16  id
//!                                          32 12  time of birth
//!                                          48 16  directory
//!                                          64  8  inode
//!                                          72     name
//! ```

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use dray_core::{FileId, FileType, FsUuid, Name, Timestamp};

use super::paths::PathEntryAt;
use super::siphash::siphash;

/// "drayplc" and, in the last byte, the version of the layout, 1.
const MAGIC: u64 = u64::from_le_bytes(*b"drayplc\x01");
const VERSION_AT: usize = 7;
const HEADER_BYTES: usize = 40;
const HEAD_BYTES: usize = 72;

/// Records beyond twice the places there are after which the log is written anew.
const SPARE_RECORDS: usize = 65_536;

/// Where the log of an export is, and of which file system: an inode number of another one is no
/// number of this one.
#[derive(Clone, Debug)]
pub(crate) struct LogIdentity {
    pub(crate) path: PathBuf,
    pub(crate) uuid: FsUuid,
    pub(crate) root_ino: u64,
    pub(crate) magic: i64,
}

/// What became of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameEvent {
    /// This file has it.
    Entered { id: FileId, ino: u64, kind: FileType, btime: Timestamp },
    /// No known file has it.
    Left,
}

/// A log that is being written.
pub(crate) struct PathLog {
    file: File,
    /// The next log, which is about to replace this one. Records go into both.
    next: Option<File>,
    pending: Vec<u8>,
    records: usize,
    len_bytes: u64,
}

impl LogIdentity {
    fn header(&self) -> [u8; HEADER_BYTES] {
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&MAGIC.to_le_bytes());
        header[8..24].copy_from_slice(&self.uuid.0.to_le_bytes());
        header[24..32].copy_from_slice(&self.root_ino.to_le_bytes());
        header[32..].copy_from_slice(&self.magic.to_le_bytes());
        header
    }

    /// Tells `apply` what was noted, in that order. A log that is not there, or is of another
    /// file system or version, says nothing. Errors: those of reading.
    pub(crate) fn read(&self, mut apply: impl FnMut(NameEvent, PathEntryAt)) -> io::Result<()> {
        let file = match File::open(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            file => file?,
        };
        let mut input = BufReader::with_capacity(1 << 20, file);
        let mut header = [0; HEADER_BYTES];
        if !fill(&mut input, &mut header)? || header != self.header() {
            if is_newer(&header) {
                let (shown, version) = (self.path.display(), header[VERSION_AT]);
                log::warn!(
                    "{shown}: of a newer dray (layout {version}), and begun anew: the files that \
                     clients know become stale"
                );
            }
            return Ok(());
        }
        let mut record = Vec::with_capacity(HEAD_BYTES + 255);
        loop {
            record.resize(HEAD_BYTES, 0);
            if !fill(&mut input, &mut record)? {
                return Ok(());
            }
            record.resize(HEAD_BYTES + usize::from(record[9]), 0);
            if !fill(&mut input, &mut record[HEAD_BYTES..])? {
                return Ok(());
            }
            match decode(&record) {
                Some((event, place)) => apply(event, place),
                None => return Ok(()),
            }
        }
    }

    /// Where a log is written that will take the place of this one.
    pub(crate) fn next_path(&self) -> PathBuf {
        let mut name = OsString::from("new-");
        name.push(self.path.file_name().unwrap_or_default());
        self.path.with_file_name(name)
    }

    /// Begins a log that will replace this one. The file is the server's own, so the calling thread
    /// must have the identity of the server, not of a caller.
    pub(crate) fn begin_next(&self) -> io::Result<NextLog> {
        let path = self.next_path();
        match fs::remove_file(&path) {
            // A file that an earlier process left may belong to another user.
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut options = OpenOptions::new();
        let file = options.create_new(true).read(true).write(true).mode(0o600).open(&path)?;
        let mut output = BufWriter::with_capacity(1 << 20, file);
        output.write_all(&self.header())?;
        Ok(NextLog { output, records: 0, record: Vec::new(), len_bytes: HEADER_BYTES as u64 })
    }

    /// Begins the log anew with the names that there are, in one step: a process that dies
    /// meanwhile leaves the old one.
    pub(crate) fn begin<'a>(
        &self,
        known: impl Iterator<Item = (NameEvent, &'a PathEntryAt)>,
    ) -> io::Result<PathLog> {
        let mut next = self.begin_next()?;
        for (event, place) in known {
            next.note(event, place)?;
        }
        let (records, len_bytes) = (next.records, next.len_bytes);
        let file = next.output.into_inner().map_err(io::IntoInnerError::into_error)?;
        fs::rename(self.next_path(), &self.path)?;
        Ok(PathLog { file, next: None, pending: Vec::new(), records, len_bytes })
    }
}

/// A log that is not in its place yet.
pub(crate) struct NextLog {
    output: BufWriter<File>,
    record: Vec<u8>,
    pub(crate) records: usize,
    len_bytes: u64,
}

impl NextLog {
    pub(crate) fn note(&mut self, event: NameEvent, place: &PathEntryAt) -> io::Result<()> {
        self.record.clear();
        encode(event, place, &mut self.record);
        self.records += 1;
        self.len_bytes += self.record.len() as u64;
        self.output.write_all(&self.record)
    }

    /// Adds records that another log has.
    pub(crate) fn add(&mut self, records: &[u8]) -> io::Result<()> {
        self.len_bytes += records.len() as u64;
        self.output.write_all(records)
    }

    /// Another descriptor of it, at its end.
    pub(crate) fn flushed(&mut self) -> io::Result<File> {
        self.output.flush()?;
        self.output.get_ref().try_clone()
    }
}

impl PathLog {
    /// Notes it with the next [`PathLog::commit`].
    pub(crate) fn note(&mut self, event: NameEvent, place: &PathEntryAt) {
        encode(event, place, &mut self.pending);
        self.records += 1;
    }

    /// Writes what was noted. Errors: those of write(2); the log is of no use any more then.
    pub(crate) fn commit(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.file.write_all(&self.pending)?;
        self.len_bytes += self.pending.len() as u64;
        if let Some(next) = &mut self.next
            && let Err(error) = next.write_all(&self.pending)
        {
            log::warn!("the next log of paths: {error}; it is given up");
            self.next = None;
        }
        self.pending.clear();
        Ok(())
    }

    /// Bytes and records so far.
    pub(crate) fn size(&self) -> (u64, usize) {
        (self.len_bytes, self.records)
    }

    /// From now on `next` gets what is noted, too.
    pub(crate) fn write_both(&mut self, next: File) {
        self.next = Some(next);
    }

    /// The next log has taken the place of this one, with `records`. The former file; none if the
    /// next one has not got all.
    pub(crate) fn switch(&mut self, records: usize) -> Option<File> {
        let next = self.next.take()?;
        self.records = records;
        Some(std::mem::replace(&mut self.file, next))
    }

    /// There will be no next log, and no other try before as much again was noted.
    pub(crate) fn go_on(&mut self) {
        (self.next, self.records) = (None, 0);
    }

    /// Whether it had better be begun anew, with so many places.
    pub(crate) fn is_long(&self, places: usize) -> bool {
        self.records > 2 * places + SPARE_RECORDS
    }
}

/// Whether it is a log of a later version of the layout.
fn is_newer(header: &[u8; HEADER_BYTES]) -> bool {
    let ours = MAGIC.to_le_bytes();
    header[..VERSION_AT] == ours[..VERSION_AT] && header[VERSION_AT] > ours[VERSION_AT]
}

/// Fills `into`; false where the file ends before.
fn fill(input: &mut impl Read, into: &mut [u8]) -> io::Result<bool> {
    match input.read_exact(into) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

fn put_id(id: FileId, into: &mut Vec<u8>) {
    into.extend_from_slice(&id.ino.to_le_bytes());
    into.extend_from_slice(&id.generation.to_le_bytes());
}

fn encode(event: NameEvent, (dir, name): &PathEntryAt, into: &mut Vec<u8>) {
    let (word, id, ino, kind, btime) = match event {
        NameEvent::Entered { id, ino, kind, btime } => (1, id, ino, kind.mode_bits(), btime),
        NameEvent::Left => (2, FileId { ino: 0, generation: 0 }, 0, 0, Timestamp::default()),
    };
    let name = name.as_bytes();
    let begin = into.len();
    into.extend_from_slice(&[0; 8]);
    into.extend_from_slice(&[word, name.len() as u8, 0, 0]); // a name has 255 bytes at most
    into.extend_from_slice(&kind.to_le_bytes());
    put_id(id, into);
    into.extend_from_slice(&btime.sec.to_le_bytes());
    into.extend_from_slice(&btime.nsec.to_le_bytes());
    into.extend_from_slice(&[0; 4]);
    put_id(*dir, into);
    into.extend_from_slice(&ino.to_le_bytes());
    into.extend_from_slice(name);
    let sum = checksum(&into[begin + 8..]);
    into[begin..begin + 8].copy_from_slice(&sum.to_le_bytes());
}

fn decode(record: &[u8]) -> Option<(NameEvent, PathEntryAt)> {
    let word = |at: usize| Some(u64::from_le_bytes(record.get(at..at + 8)?.try_into().ok()?));
    let half = |at: usize| Some(u32::from_le_bytes(record.get(at..at + 4)?.try_into().ok()?));
    let id = |at: usize| Some(FileId { ino: word(at)?, generation: word(at + 8)? });
    if word(0)? != checksum(record.get(8..)?) {
        return None;
    }
    let event = match record.get(8)? {
        1 => NameEvent::Entered {
            id: id(16)?,
            ino: word(64)?,
            kind: FileType::from_mode(half(12)?)?,
            btime: Timestamp { sec: word(32)? as i64, nsec: half(40)? },
        },
        2 => NameEvent::Left,
        _ => return None,
    };
    let name = Name::new(record.get(HEAD_BYTES..)?).ok()?;
    Some((event, (id(48)?, name.to_owned())))
}

/// Detects half-written records, not attacks: the file is the server's own.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(bytes.len() as u64, |sum, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        siphash(0, [sum, u64::from_le_bytes(word)])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(name: &str) -> PathEntryAt {
        (FileId { ino: 1, generation: 1 }, Name::new(name.as_bytes()).unwrap().to_owned())
    }

    fn entered(ino: u64) -> NameEvent {
        let btime = Timestamp { sec: -5, nsec: 7 };
        NameEvent::Entered { id: FileId { ino, generation: 9 }, ino, kind: FileType::Fifo, btime }
    }

    fn identity(label: &str) -> LogIdentity {
        let name = format!("dray-path-log-{label}-{:x}", dray_rt::random_u64());
        LogIdentity {
            path: std::env::temp_dir().join(name),
            uuid: FsUuid(3),
            root_ino: 1,
            magic: 2,
        }
    }

    fn read(identity: &LogIdentity) -> Vec<(NameEvent, PathEntryAt)> {
        let mut read = Vec::new();
        identity.read(|event, place| read.push((event, place))).unwrap();
        read
    }

    // proves: P40
    #[test]
    fn what_was_noted_is_read_up_to_what_is_not_whole() {
        let identity = identity("whole");
        let long = "n".repeat(255);
        let events = [
            (entered(5), place("a")),
            (NameEvent::Left, place("a")),
            (entered(6), place(&long)),
            (entered(7), place("b")),
        ];
        let mut log = identity.begin(events[..1].iter().map(|(event, at)| (*event, at))).unwrap();
        for (event, place) in &events[1..] {
            log.note(*event, place);
            log.commit().unwrap();
        }
        assert_eq!(read(&identity), events);
        let whole = fs::read(&identity.path).unwrap();
        let mut broken = whole.clone();
        broken.truncate(whole.len() - 1);
        fs::write(&identity.path, &broken).unwrap();
        assert_eq!(read(&identity), events[..3]);
        broken[HEADER_BYTES + HEAD_BYTES + 1 + 30] ^= 1; // in the second record
        fs::write(&identity.path, &broken).unwrap();
        assert_eq!(read(&identity), events[..1]);
        fs::remove_file(&identity.path).unwrap();
        assert_eq!(read(&identity), []);
    }

    /// What one version noted, the next one reads.
    // proves: P137
    #[test]
    fn a_log_is_what_it_was() {
        const HEADER: &str = "64726179706c6301030000000000000000000000000000000100000000000000\
            0200000000000000";
        const ENTERED: &str = "0efe4db9278c3f0d010100000010000005000000000000000900000000000000\
            fbffffffffffffff070000000000000001000000000000000100000000000000\
            050000000000000061";
        const LEFT: &str = "e36d58abaffc0521020100000000000000000000000000000000000000000000\
            0000000000000000000000000000000001000000000000000100000000000000\
            000000000000000061";
        let identity = identity("format");
        let mut log = identity.begin([(entered(5), &place("a"))].into_iter()).unwrap();
        log.note(NameEvent::Left, &place("a"));
        log.commit().unwrap();
        let bytes = fs::read(&identity.path).unwrap();
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        fs::remove_file(&identity.path).unwrap();
        assert_eq!(digits, [HEADER, ENTERED, LEFT].concat());
    }

    #[test]
    fn the_log_of_another_file_system_or_version_says_nothing() {
        let one = identity("other");
        one.begin([(entered(5), &place("a"))].into_iter()).unwrap();
        assert_eq!(read(&one).len(), 1);
        assert_eq!(read(&LogIdentity { uuid: FsUuid(4), ..one.clone() }), []);
        assert_eq!(read(&LogIdentity { root_ino: 2, ..one.clone() }), []);
        assert_eq!(read(&LogIdentity { magic: 3, ..one.clone() }), []);
        let header = |version| {
            let mut header = one.header();
            header[VERSION_AT] = version;
            header
        };
        assert!(is_newer(&header(2)) && !is_newer(&header(1)) && !is_newer(&[2; HEADER_BYTES]));
        let mut newer = fs::read(&one.path).unwrap();
        newer[7] = 2;
        fs::write(&one.path, newer).unwrap();
        assert_eq!(read(&one), []);
        fs::remove_file(&one.path).unwrap();
    }
}
