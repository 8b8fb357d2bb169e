//! The segments of a log: which there are, where it goes on after a death, and reading all of it.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::record::AuditRecord;
use super::segment::{EXTENSION, HASH_BYTES, Hash, ReadError, ReadStep, SegmentReader};

/// A segment as it lies there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentFile {
    /// Where.
    pub path: PathBuf,
    /// The number of its first record.
    pub first_index: u64,
    /// Size, bytes.
    pub bytes: u64,
}

/// The segments in these directories, by their records. A directory that is not there has none.
pub fn segments(dirs: &[PathBuf]) -> io::Result<Vec<SegmentFile>> {
    let mut all = Vec::new();
    for dir in dirs {
        let entries = match fs::read_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let path = entry?.path();
            let is_one = path.extension().is_some_and(|one| one == EXTENSION);
            let stem = path.file_stem().and_then(|stem| stem.to_str());
            let index = stem.filter(|_| is_one).and_then(|stem| stem.parse().ok());
            let (Some(first_index), Ok(meta)) = (index, fs::metadata(&path)) else { continue };
            all.push(SegmentFile { path, first_index, bytes: meta.len() });
        }
    }
    all.sort_by_key(|segment| segment.first_index);
    all.dedup_by_key(|segment| segment.first_index); // one that is being moved is in both
    Ok(all)
}

/// Where a log goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LogEnd {
    pub(super) log: u128,
    pub(super) next_index: u64,
    pub(super) chain: Hash,
    pub(super) ring_end: u64,
    /// What was cut off, in words.
    pub(super) torn: Option<String>,
    /// Records that were in the log, or seen by a consumer, and are gone.
    pub(super) lost: u64,
}

/// No log has so many records. A number beyond is no number of a record.
const INDEX_MAX: u64 = 1 << 62;

impl LogEnd {
    /// Leaves out the numbers of records that are gone: they were given, and consumers that have seen them ask
    /// for what is behind. `ring_first`: the first record that the ring has, or will have. `seen`: the records
    /// before this one have been seen by a consumer.
    pub(super) fn leave_out_lost(&mut self, ring_first: u64, seen: u64) {
        // A log that knows nothing of the ring's numbers has lost none of them.
        let from_ring = match self.ring_end {
            0 => 0,
            end => ring_first.saturating_sub(end),
        };
        let known = [self.next_index.saturating_add(from_ring), seen].into_iter();
        let next = known.filter(|next| *next < INDEX_MAX).max().unwrap_or(0).max(self.next_index);
        self.lost = next - self.next_index;
        self.next_index = next;
        self.ring_end += from_ring;
    }
}

/// Finds the end of the log in these directories. What is torn there is cut off and kept beside it.
/// Errors: the files cannot be read or written.
pub(super) fn find_end(dirs: &[PathBuf]) -> io::Result<LogEnd> {
    let mut torn = None;
    let mut all = segments(dirs)?;
    while let Some(last) = all.pop() {
        let mut reader = match SegmentReader::open(&last.path) {
            Ok(reader) => reader,
            Err(ReadError::Io(error)) => return Err(error),
            Err(ReadError::Corruption(_, why)) => {
                let aside = last.path.with_extension("torn");
                fs::rename(&last.path, &aside)?;
                torn = Some(format!("{}: {why}", aside.display()));
                continue;
            }
        };
        let why = loop {
            match reader.step() {
                Ok(ReadStep::Batch(_)) => {}
                Ok(ReadStep::End) => break None,
                Ok(ReadStep::Torn) => break Some("it ends within a batch".to_owned()),
                Err(ReadError::Corruption(_, why)) => break Some(why.to_string()),
                Err(ReadError::Io(error)) => return Err(error),
            }
        };
        if let Some(why) = why {
            let cut = cut_off(&last.path, reader.at_bytes())?;
            torn = Some(format!("{cut} bytes of {} were cut off: {why}", last.path.display()));
        }
        // A segment without batches says nothing of the ring.
        let ring_end = match (reader.ring_end, all.last()) {
            (0, Some(before)) => ring_end_of(&before.path),
            (end, _) => end,
        };
        let (log, next_index, chain) = (reader.header.log, reader.next_index, reader.chain);
        return Ok(LogEnd { log, next_index, chain, ring_end, torn, lost: 0 });
    }
    let log = u128::from(dray_rt::random_u64()) << 64 | u128::from(dray_rt::random_u64());
    Ok(LogEnd { log, next_index: 1, chain: [0; HASH_BYTES], ring_end: 0, torn, lost: 0 })
}

fn ring_end_of(path: &Path) -> u64 {
    let Ok(mut reader) = SegmentReader::open(path) else { return 0 };
    while let Ok(ReadStep::Batch(_)) = reader.step() {}
    reader.ring_end
}

/// Moves what is behind byte `at` of a segment to a file beside it. Answers how many bytes.
fn cut_off(path: &Path, at: u64) -> io::Result<u64> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let cut = file.metadata()?.len().saturating_sub(at);
    let mut bytes = vec![0; usize::try_from(cut).map_err(io::Error::other)?];
    file.read_exact_at(&mut bytes, at)?;
    fs::write(path.with_extension("torn"), &bytes)?;
    file.set_len(at)?;
    file.sync_all()?;
    Ok(cut)
}

/// Why a log cannot be read on.
#[derive(Debug)]
pub enum LogError {
    /// A file cannot be read.
    Io(io::Error),
    /// The end of the log is broken.
    Corruption(PathBuf, String),
}

impl fmt::Display for LogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LogError::Io(error) => error.fmt(f),
            LogError::Corruption(path, why) => write!(f, "{}: {why}", path.display()),
        }
    }
}

impl From<io::Error> for LogError {
    fn from(error: io::Error) -> LogError {
        LogError::Io(error)
    }
}

/// Reads a log from a record on, over all segments, and goes on where more has been written.
pub struct LogReader {
    dirs: Vec<PathBuf>,
    current: Option<(SegmentFile, SegmentReader)>,
    next: u64,
    /// How much has been read, bytes.
    pub bytes: u64,
}

impl LogReader {
    /// Reads the log in these directories from this record on.
    pub fn new(dirs: Vec<PathBuf>, from: u64) -> LogReader {
        LogReader { dirs, current: None, next: from, bytes: 0 }
    }

    /// The number of the next record.
    pub fn next_index(&self) -> u64 {
        self.next
    }

    /// The log that is read, once something was.
    pub fn log(&self) -> Option<u128> {
        self.current.as_ref().map(|(_, reader)| reader.header.log)
    }

    /// Hands on the records of the next batch. Records that are gone, or cannot be read, become a
    /// record that says so. False: there is no more now. Errors: the files cannot be read, or the
    /// last segment is broken.
    pub fn advance(&mut self, each: &mut dyn FnMut(AuditRecord)) -> Result<bool, LogError> {
        let Some((segment, mut reader)) = self.current.take() else {
            return self.enter(each);
        };
        let before = reader.at_bytes();
        let found = reader.step().and_then(|step| match step {
            ReadStep::Batch(batch) => {
                let next = self.next;
                reader.records(&batch, |record| {
                    if record.index >= next {
                        each(record);
                    }
                })?;
                Ok(true)
            }
            ReadStep::End | ReadStep::Torn => Ok(false),
        });
        match found {
            Ok(true) => {
                self.next = self.next.max(reader.next_index);
                self.bytes += reader.at_bytes() - before;
                self.current = Some((segment, reader));
                Ok(true)
            }
            Ok(false) => {
                let is_behind = |one: &SegmentFile| one.first_index > segment.first_index;
                let go_on = segments(&self.dirs)?.iter().any(is_behind);
                // More may have been written to this one before the next one was made.
                let is_read = matches!(SegmentFile::len_now(&segment), Some(len) if len <= before);
                match go_on && (is_read || !segment.path.exists()) {
                    true => self.enter_behind(&segment, &reader, each),
                    false => {
                        self.current = Some((segment, reader));
                        Ok(go_on && !is_read)
                    }
                }
            }
            Err(ReadError::Io(error)) => Err(error.into()),
            Err(error) => self.skip(&segment, &error.to_string(), each),
        }
    }

    /// Goes on with the segment that has the next record.
    fn enter(&mut self, each: &mut dyn FnMut(AuditRecord)) -> Result<bool, LogError> {
        let all = segments(&self.dirs)?;
        let at = all.iter().rposition(|one| one.first_index <= self.next);
        let Some(segment) = all.get(at.unwrap_or(0)).cloned() else { return Ok(false) };
        if segment.first_index > self.next {
            let missing = segment.first_index - self.next;
            self.say(missing, "they have been removed from the log", each);
            self.next = segment.first_index;
        }
        self.open(segment, each)
    }

    fn enter_behind(
        &mut self,
        segment: &SegmentFile,
        reader: &SegmentReader,
        each: &mut dyn FnMut(AuditRecord),
    ) -> Result<bool, LogError> {
        let all = segments(&self.dirs)?;
        let next = all.into_iter().find(|one| one.first_index > segment.first_index);
        let Some(next) = next else { return Ok(false) };
        let known = reader.next_index.max(self.next);
        if next.first_index > known && !next.is_behind(reader) {
            self.say(next.first_index - known, "a segment is missing", each);
        }
        self.next = self.next.max(next.first_index);
        self.open(next, each)
    }

    fn open(
        &mut self,
        segment: SegmentFile,
        each: &mut dyn FnMut(AuditRecord),
    ) -> Result<bool, LogError> {
        match SegmentReader::open(&segment.path) {
            Ok(reader) => {
                self.bytes += reader.at_bytes();
                self.current = Some((segment, reader));
                Ok(true)
            }
            Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(true), // moved
            Err(ReadError::Io(error)) => Err(error.into()),
            Err(error) => self.skip(&segment, &error.to_string(), each),
        }
    }

    /// Leaves out the rest of a broken segment.
    fn skip(
        &mut self,
        segment: &SegmentFile,
        why: &str,
        each: &mut dyn FnMut(AuditRecord),
    ) -> Result<bool, LogError> {
        let all = segments(&self.dirs)?;
        let next = all.into_iter().find(|one| one.first_index > segment.first_index);
        let Some(next) = next else {
            return Err(LogError::Corruption(segment.path.clone(), why.to_owned()));
        };
        let missing = next.first_index.saturating_sub(self.next);
        self.say(missing, &format!("{} is broken: {why}", segment.path.display()), each);
        self.next = self.next.max(next.first_index);
        self.open(next, each)
    }

    fn say(&self, missing: u64, why: &str, each: &mut dyn FnMut(AuditRecord)) {
        let now_us = dray_rt::wall_clock().as_micros() as u64;
        each(AuditRecord { index: self.next, ..AuditRecord::gap(now_us, missing, why) });
    }
}

impl SegmentFile {
    /// Whether its writer found this end of the log. A gap record in it counts what was lost there.
    fn is_behind(&self, end: &SegmentReader) -> bool {
        SegmentReader::open(&self.path).is_ok_and(|next| next.header.before == end.chain)
    }

    fn len_now(&self) -> Option<u64> {
        fs::metadata(&self.path).ok().map(|meta| meta.len())
    }
}

/// What was found in a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Segments that were read.
    pub segments: usize,
    /// Records in them.
    pub records: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// The first record that there is.
    pub first_index: u64,
    /// The number that the next record will have.
    pub next_index: u64,
    /// The hash of all, to be kept elsewhere and compared later.
    pub hash: Hash,
    /// Records that were lost at the end of the log, as by a loss of power. A gap record has each.
    pub lost: u64,
    /// The last segment ends within a batch: it is being written, or its server was killed.
    pub ends_torn: bool,
    /// What is wrong: cut, changed, exchanged or removed.
    pub problems: Vec<String>,
}

/// Checks the whole log in these directories. `progress` learns how many bytes were read, after each
/// segment. `anchor`: the hash that the log must have before this record. Errors: files cannot be read.
pub fn verify(
    dirs: &[PathBuf],
    anchor: Option<(u64, Hash)>,
    mut progress: impl FnMut(u64),
) -> io::Result<Verified> {
    let all = segments(dirs)?;
    let mut found = Verified { next_index: 1, ..Verified::default() };
    let mut before: Option<(u64, Hash, u128)> = None;
    let mut anchored = anchor.is_none();
    for (number, segment) in all.iter().enumerate() {
        let shown = segment.path.display();
        let mut reader = match SegmentReader::open(&segment.path) {
            Ok(reader) => reader,
            Err(ReadError::Io(error)) => return Err(error),
            Err(error) => {
                found.problems.push(format!("{shown}: {error}"));
                continue;
            }
        };
        let header = reader.header.clone();
        let name_fits = header.first_index == segment.first_index;
        match before {
            None => found.first_index = header.first_index,
            Some((next, hash, log)) => {
                let follows = header.before == hash && header.log == log;
                // Its writer has left out the numbers of records that it did not find.
                if follows && header.first_index >= next {
                    found.lost += header.first_index - next;
                } else {
                    found.problems.push(format!(
                        "{shown}: it does not follow the segment before it, which ends before record {next}"
                    ));
                }
            }
        }
        if !name_fits {
            found.problems.push(format!("{shown}: it has the name of another segment"));
        }
        loop {
            if anchor
                .is_some_and(|(index, hash)| index == reader.next_index && hash == reader.chain)
            {
                anchored = true;
            }
            match reader.step() {
                Ok(ReadStep::Batch(batch)) => found.records += u64::from(batch.count),
                Ok(ReadStep::End) => break,
                Ok(ReadStep::Torn) if number + 1 == all.len() => {
                    found.ends_torn = true;
                    break;
                }
                Ok(ReadStep::Torn) => {
                    found.problems.push(format!("{shown}: it has been cut"));
                    break;
                }
                Err(ReadError::Io(error)) => return Err(error),
                Err(error) => {
                    found.problems.push(format!("{shown}: {error}"));
                    break;
                }
            }
        }
        before = Some((reader.next_index, reader.chain, header.log));
        (found.next_index, found.hash) = (reader.next_index, reader.chain);
        found.segments += 1;
        found.bytes += reader.at_bytes();
        progress(found.bytes);
    }
    if let Some((index, _)) = anchor.filter(|_| !anchored) {
        found
            .problems
            .push(format!("the log before record {index} is not the one of the given hash"));
    }
    Ok(found)
}
