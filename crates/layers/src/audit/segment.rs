//! A segment: a file of batches of records, each chained to what is before it.
//!
//! ```text
//! header   0    8  "drayaud" and version          batch    0   4  magic
//!          8    4  length of the header                    4   4  length of the records
//!         12    4  length of the export's name             8   4  number of records
//!         16   16  the log                                12   4  check of this head
//!         32    8  number of the first record             16   8  number of the first record
//!         40    8  made, microseconds since 1970          24   8  end of the ring's records in it
//!         48   32  hash of the segment before             32      records
//!         80       name of the export                         32  hash
//!             32  hash of the header
//! ```
//! Numbers are little endian. The hash of a batch is BLAKE3 of the hash before it, its head and its records.
//! So a record that is changed, removed or put in changes all hashes behind it. The last hash of a
//! segment stands in the header of the next one.
//!
//! The magic of a batch is `Abat`, or `Aban` where the tables of the encoding begin anew with it. A reader goes on at
//! such a one behind a broken place.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use dray_core::fnv1a;
use dray_rt::Instant;

use super::codec::Codec;

const MAGIC: &[u8; 8] = b"drayaud\x01";
pub(super) const BATCH_MAGIC: u32 = u32::from_le_bytes(*b"Abat");
/// Of a batch that can be read without those before it.
pub(super) const BATCH_ANEW_MAGIC: u32 = u32::from_le_bytes(*b"Aban");
/// The tables of the encoding begin anew behind so many bytes of records. What is broken hides hardly more.
const ANEW_BYTES: u64 = 16 << 10;
/// Tables also begin anew after so long, so that records of a quiet server can be read soon behind a broken place.
const ANEW_TIME: Duration = Duration::from_secs(1);
const FIXED_BYTES: usize = 80;
/// Bytes of a hash.
pub const HASH_BYTES: usize = 32;
pub(super) const HEAD_BYTES: usize = 32;
const NAME_MAX_BYTES: usize = 255;
/// The longest header, bytes.
pub(super) const HEADER_MAX_BYTES: u64 = (FIXED_BYTES + NAME_MAX_BYTES + HASH_BYTES) as u64;
/// Most bytes of the records of a batch.
pub(super) const BATCH_MAX_BYTES: usize = 1 << 20;
/// Behind the number of the first record.
pub const EXTENSION: &str = "audit";

/// A hash of the chain.
pub type Hash = [u8; HASH_BYTES];

/// Bytes that no writer has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corruption(pub &'static str);

impl fmt::Display for Corruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// What the header of a segment says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The log that it belongs to.
    pub log: u128,
    /// The number of its first record.
    pub first_index: u64,
    /// When it was made, microseconds since 1970.
    pub made_us: u64,
    /// The last hash of the segment before; zeros of the first one.
    pub before: Hash,
    /// The export.
    pub export: String,
}

impl SegmentHeader {
    fn encoded(&self) -> (Vec<u8>, Hash) {
        let name = &self.export.as_bytes()[..self.export.len().min(NAME_MAX_BYTES)];
        let len_bytes = FIXED_BYTES + name.len() + HASH_BYTES;
        let mut bytes = Vec::with_capacity(len_bytes);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&(len_bytes as u32).to_le_bytes());
        bytes.extend_from_slice(&(name.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&self.log.to_le_bytes());
        bytes.extend_from_slice(&self.first_index.to_le_bytes());
        bytes.extend_from_slice(&self.made_us.to_le_bytes());
        bytes.extend_from_slice(&self.before);
        bytes.extend_from_slice(name);
        let hash = *blake3::hash(&bytes).as_bytes();
        bytes.extend_from_slice(&hash);
        (bytes, hash)
    }

    /// Decodes the header that `bytes` begin with, its length, and the hash that the chain begins with.
    pub(super) fn decode(bytes: &[u8]) -> Result<(SegmentHeader, usize, Hash), Corruption> {
        if bytes.len() < FIXED_BYTES || bytes[..8] != *MAGIC {
            return Err(Corruption("it is no segment of an audit log"));
        }
        let half = |at: usize| le_u32(bytes, at) as usize;
        let (len_bytes, name_bytes) = (half(8), half(12));
        let is_sound = name_bytes <= NAME_MAX_BYTES
            && len_bytes == FIXED_BYTES + name_bytes + HASH_BYTES
            && bytes.len() >= len_bytes;
        if !is_sound {
            return Err(Corruption("its header is cut"));
        }
        let hash = *blake3::hash(&bytes[..len_bytes - HASH_BYTES]).as_bytes();
        if hash != bytes[len_bytes - HASH_BYTES..len_bytes] {
            return Err(Corruption("its header has been changed"));
        }
        let name = &bytes[FIXED_BYTES..FIXED_BYTES + name_bytes];
        let header = SegmentHeader {
            log: u128::from(le_u64(bytes, 16)) | u128::from(le_u64(bytes, 24)) << 64,
            first_index: le_u64(bytes, 32),
            made_us: le_u64(bytes, 40),
            before: hash_at(bytes, 48),
            export: String::from_utf8_lossy(name).into_owned(),
        };
        Ok((header, len_bytes, hash))
    }
}

fn le_u32(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte))
}

fn le_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from(le_u32(bytes, at)) | u64::from(le_u32(bytes, at + 4)) << 32
}

pub(super) fn hash_at(bytes: &[u8], at: usize) -> Hash {
    let mut hash = [0; HASH_BYTES];
    hash.copy_from_slice(&bytes[at..at + HASH_BYTES]);
    hash
}

/// The head of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchHead {
    pub(super) len_bytes: u32,
    /// How many records it has.
    pub count: u32,
    /// The number of the first of them.
    pub first_index: u64,
    /// Records of the ring up to this number are in it or before it.
    pub ring_end: u64,
    /// The batch can be read without the batches before it.
    pub is_anew: bool,
}

impl BatchHead {
    /// Bytes of the batch with its head and hash.
    pub(super) fn whole_bytes(&self) -> u64 {
        u64::from(self.len_bytes) + (HEAD_BYTES + HASH_BYTES) as u64
    }

    fn encoded(&self) -> [u8; HEAD_BYTES] {
        let mut head = [0; HEAD_BYTES];
        let magic = if self.is_anew { BATCH_ANEW_MAGIC } else { BATCH_MAGIC };
        head[..4].copy_from_slice(&magic.to_le_bytes());
        head[4..8].copy_from_slice(&self.len_bytes.to_le_bytes());
        head[8..12].copy_from_slice(&self.count.to_le_bytes());
        head[16..24].copy_from_slice(&self.first_index.to_le_bytes());
        head[24..].copy_from_slice(&self.ring_end.to_le_bytes());
        let check = check_of(&head);
        head[12..16].copy_from_slice(&check.to_le_bytes());
        head
    }

    pub(super) fn decode(head: &[u8; HEAD_BYTES]) -> Result<BatchHead, Corruption> {
        let mut unchecked = *head;
        unchecked[12..16].fill(0);
        let is_anew = le_u32(head, 0) == BATCH_ANEW_MAGIC;
        let is_batch = is_anew || le_u32(head, 0) == BATCH_MAGIC;
        if !is_batch || le_u32(head, 12) != check_of(&unchecked) {
            return Err(Corruption("the head of a batch has been changed or torn"));
        }
        let (len_bytes, count) = (le_u32(head, 4), le_u32(head, 8));
        // A record has five bytes at least.
        if len_bytes as usize > BATCH_MAX_BYTES || count == 0 || count > len_bytes {
            return Err(Corruption("the head of a batch makes no sense"));
        }
        let (first_index, ring_end) = (le_u64(head, 16), le_u64(head, 24));
        Ok(BatchHead { len_bytes, count, first_index, ring_end, is_anew })
    }
}

fn check_of(head: &[u8; HEAD_BYTES]) -> u32 {
    let hash = fnv1a(head);
    (hash ^ hash >> 32) as u32
}

pub(super) fn chained(before: &Hash, head: &[u8], records: &[u8]) -> Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(before).update(head).update(records);
    *hasher.finalize().as_bytes()
}

/// The file name of a segment.
pub fn file_name(first_index: u64) -> String {
    format!("{first_index:020}.{EXTENSION}")
}

/// The segment that is being written.
pub(super) struct SegmentWriter {
    file: File,
    path: PathBuf,
    pub(super) chain: Hash,
    /// What it has now, bytes.
    pub(super) bytes: u64,
    codec: Codec,
    /// The next batch can be read without those before it.
    is_anew: bool,
    /// Where the tables began anew at last, bytes, and when.
    anew: (u64, Instant),
    buffer: Vec<u8>,
}

impl SegmentWriter {
    /// Makes a segment in `dir`. Errors: those of the file; then nothing is left.
    pub(super) fn create(dir: &Path, header: &SegmentHeader) -> io::Result<SegmentWriter> {
        let path = dir.join(file_name(header.first_index));
        let mut options = OpenOptions::new();
        options.create(true).truncate(true).read(true).write(true).mode(0o600);
        let file = options.open(&path)?;
        let (bytes, chain) = header.encoded();
        let written = file.write_all_at(&bytes, 0).and_then(|()| file.sync_data());
        if let Err(error) = written.and_then(|()| File::open(dir)?.sync_all()) {
            let _ = std::fs::remove_file(&path);
            return Err(error);
        }
        let (bytes, codec, buffer) = (bytes.len() as u64, Codec::new(), Vec::new());
        let anew = (bytes, dray_rt::now());
        Ok(SegmentWriter { file, path, chain, bytes, codec, is_anew: true, anew, buffer })
    }

    /// The encoding of the records of the next batch.
    pub(super) fn next_codec(&mut self) -> &mut Codec {
        let (from, since) = self.anew;
        if !self.is_anew && (self.bytes - from >= ANEW_BYTES || since.elapsed() >= ANEW_TIME) {
            (self.codec, self.is_anew) = (Codec::new(), true);
            self.anew = (self.bytes, dray_rt::now());
        }
        &mut self.codec
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a batch of `count` encoded records. Errors: those of the file; then the batch is not
    /// in it.
    pub(super) fn append(
        &mut self,
        (count, first_index, ring_end): (u32, u64, u64),
        records: &[u8],
    ) -> io::Result<()> {
        let (len_bytes, is_anew) = (records.len() as u32, std::mem::take(&mut self.is_anew));
        let head = BatchHead { len_bytes, count, first_index, ring_end, is_anew };
        let head = head.encoded();
        let hash = chained(&self.chain, &head, records);
        self.buffer.clear();
        self.buffer.extend_from_slice(&head);
        self.buffer.extend_from_slice(records);
        self.buffer.extend_from_slice(&hash);
        if let Err(error) = self.file.write_all_at(&self.buffer, self.bytes) {
            let _ = self.file.set_len(self.bytes); // what is left of it is torn, and known as such
            return Err(error);
        }
        self.bytes += self.buffer.len() as u64;
        self.chain = hash;
        Ok(())
    }

    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// Reads as much as there is.
pub(super) fn read_up_to(file: &File, into: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < into.len() {
        match file.read_at(&mut into[done..], at + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}
