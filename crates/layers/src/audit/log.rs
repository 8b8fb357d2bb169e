//! The segments of a log: which there are, and where it goes on after a death.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::segment::{EXTENSION, HASH_BYTES, Hash};
use super::segment_reader::{ReadError, ReadStep, SegmentReader};

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
    /// Where its last segment is broken, in words. It stays as it is.
    pub(super) broken: Option<String>,
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

/// Finds the end of the log in these directories. What is torn there is cut off and kept beside it. A segment with
/// whole batches behind a broken place stays as it is. Errors: the files cannot be read or written.
pub(super) fn find_end(dirs: &[PathBuf]) -> io::Result<LogEnd> {
    let mut torn = None;
    let mut all = segments(dirs)?;
    while let Some(last) = all.pop() {
        let (mut reader, header_is) = match SegmentReader::open(&last.path) {
            Ok(reader) => (reader, None),
            Err(ReadError::Io(error)) => return Err(error),
            Err(ReadError::Corruption(_, why)) => {
                (SegmentReader::open_broken(&last.path, 0, last.first_index)?, Some(why))
            }
        };
        let tail = read_to_tail(&mut reader)?;
        if let Some(why) = header_is.filter(|_| reader.at_bytes() == 0 && !reader.has_unreadable())
        {
            let aside = last.path.with_extension("torn");
            fs::rename(&last.path, &aside)?;
            torn = Some(format!("{}: {why}", aside.display()));
            continue;
        }
        let mut broken = tail.broken_at;
        match tail.torn {
            Some(_) if reader.has_unreadable() => broken = broken.or(Some(reader.at_bytes())),
            Some(why) => {
                let cut = cut_off(&last.path, reader.at_bytes())?;
                torn = Some(format!("{cut} bytes of {} were cut off: {why}", last.path.display()));
            }
            None => {}
        }
        let (chain, next_index, ring_end) = reader.known_end();
        let before = all.last();
        // A segment without batches says nothing of the ring.
        let ring_end = match (ring_end, before) {
            (0, Some(before)) => ring_end_of(&before.path),
            (end, _) => end,
        };
        let log = match header_is {
            None => reader.header.log,
            Some(_) => all.iter().rev().find_map(log_of).unwrap_or_else(new_log),
        };
        let broken = broken.map(|at| format!("{} is broken at byte {at}", last.path.display()));
        return Ok(LogEnd { log, next_index, chain, ring_end, torn, broken, lost: 0 });
    }
    let (chain, ring_end, broken) = ([0; HASH_BYTES], 0, None);
    Ok(LogEnd { log: new_log(), next_index: 1, chain, ring_end, torn, broken, lost: 0 })
}

fn new_log() -> u128 {
    u128::from(dray_rt::random_u64()) << 64 | u128::from(dray_rt::random_u64())
}

fn log_of(segment: &SegmentFile) -> Option<u128> {
    SegmentReader::open(&segment.path).ok().map(|reader| reader.header.log)
}

/// What is at the end of a segment.
struct SegmentTail {
    /// Why the end cannot be read; none: all was read to the last byte.
    torn: Option<String>,
    /// The first broken byte that readable batches follow.
    broken_at: Option<u64>,
}

/// Reads a segment to its end, also behind broken places.
fn read_to_tail(reader: &mut SegmentReader) -> io::Result<SegmentTail> {
    let mut broken_at = None;
    loop {
        let torn = match reader.step() {
            Ok(ReadStep::Batch(_)) => continue,
            Ok(ReadStep::End) => None,
            Ok(ReadStep::Torn) => Some("it ends within a batch".to_owned()),
            Err(ReadError::Io(error)) => return Err(error),
            Err(ReadError::Corruption(at, why)) => {
                if reader.go_on_behind()? {
                    broken_at = broken_at.or(Some(at));
                    continue;
                }
                Some(why.to_string())
            }
        };
        return Ok(SegmentTail { torn, broken_at });
    }
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

impl SegmentFile {
    /// Whether its writer found an end of the log with this hash. A gap record in it counts what was lost there.
    pub(super) fn is_behind(&self, chain: &Hash) -> bool {
        SegmentReader::open(&self.path).is_ok_and(|next| next.header.before == *chain)
    }

    pub(super) fn len_now(&self) -> Option<u64> {
        fs::metadata(&self.path).ok().map(|meta| meta.len())
    }
}
