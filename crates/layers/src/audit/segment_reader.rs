//! Reading a segment, and checking it meanwhile.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;

use super::codec::Codec;
use super::record::AuditRecord;
use super::salvage::{WholeSearch, next_whole};
use super::segment::{
    BatchHead, Corruption, HASH_BYTES, HEAD_BYTES, HEADER_MAX_BYTES, Hash, SegmentHeader, chained,
    read_up_to,
};
use super::varint::RecordInput;

/// What a reader found next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadStep {
    /// A batch; its records are at hand.
    Batch(BatchHead),
    /// The file ends here.
    End,
    /// The file ends within a batch, which is being written or was cut.
    Torn,
}

/// Why a segment cannot be read on.
#[derive(Debug)]
pub enum ReadError {
    /// The file cannot be read.
    Io(io::Error),
    /// Nobody has written this, at this byte.
    Corruption(u64, Corruption),
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReadError::Io(error) => error.fmt(f),
            ReadError::Corruption(at, broken) => write!(f, "at byte {at}: {broken}"),
        }
    }
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> ReadError {
        ReadError::Io(error)
    }
}

/// Reads a segment, and checks it meanwhile.
pub struct SegmentReader {
    file: File,
    /// What its header says.
    pub header: SegmentHeader,
    /// The hash up to here.
    pub chain: Hash,
    /// The number of the next record.
    pub next_index: u64,
    /// The ring's records up to this number are in what was read.
    pub ring_end: u64,
    at: u64,
    codec: Codec,
    buffer: Vec<u8>,
    /// Records could not be decoded, and with them those up to a batch that can be read without them.
    needs_anew: bool,
    /// What was found behind a broken place.
    behind: Behind,
}

/// What was found behind a broken place, by looking for whole batches.
#[derive(Clone, Copy, Debug, Default)]
struct Behind {
    /// A look for more begins at this byte.
    looked_to: u64,
    /// Behind the last whole batch: the hash, the number of the next record, and the end of the ring's records.
    end: Option<(Hash, u64, u64)>,
    /// Behind the records of the broken batch, as far as its head can be read; else 0.
    claimed_index: u64,
}

impl SegmentReader {
    /// Opens a segment. Errors: it is none, or its header is broken.
    pub fn open(path: &Path) -> Result<SegmentReader, ReadError> {
        let file = File::open(path)?;
        let mut bytes = vec![0; HEADER_MAX_BYTES as usize];
        let read = read_up_to(&file, &mut bytes, 0)?;
        let broken = |broken| ReadError::Corruption(0, broken);
        let (header, len_bytes, chain) = SegmentHeader::decode(&bytes[..read]).map_err(broken)?;
        Ok(SegmentReader {
            file,
            next_index: header.first_index,
            header,
            chain,
            ring_end: 0,
            at: len_bytes as u64,
            codec: Codec::new(),
            buffer: Vec::new(),
            needs_anew: false,
            behind: Behind::default(),
        })
    }

    /// Opens a segment of the log `log` whose header is broken, and whose name says the number of its first record.
    /// It is broken from its first byte on. Errors: it cannot be opened.
    pub(super) fn open_broken(
        path: &Path,
        log: u128,
        first_index: u64,
    ) -> io::Result<SegmentReader> {
        let (made_us, before, export) = (0, [0; HASH_BYTES], String::new());
        Ok(SegmentReader {
            file: File::open(path)?,
            header: SegmentHeader { log, first_index, made_us, before, export },
            chain: [0; HASH_BYTES],
            next_index: first_index,
            ring_end: 0,
            at: 0,
            codec: Codec::new(),
            buffer: Vec::new(),
            needs_anew: false,
            behind: Behind::default(),
        })
    }

    /// Goes on behind a broken place, at the next batch that can be read without those before it. False: there is none
    /// yet; [`SegmentReader::known_end`] knows of whole batches that cannot be read. Errors: the file cannot be read.
    pub(super) fn go_on_behind(&mut self) -> io::Result<bool> {
        let mut from = self.behind.looked_to.max(self.at);
        loop {
            let batch = match next_whole(&self.file, from)? {
                WholeSearch::Found(batch) => batch,
                WholeSearch::Nothing(looked_to) => {
                    self.behind.looked_to = looked_to;
                    return Ok(false);
                }
            };
            from = batch.end();
            let known = self.behind.end.map_or(self.next_index, |(_, known, _)| known);
            if batch.head.first_index < known {
                continue; // numbers only grow: this belongs elsewhere
            }
            if batch.head.is_anew {
                (self.at, self.chain) = (batch.at, batch.before);
                (self.next_index, self.ring_end) = (batch.head.first_index, 0);
                (self.codec, self.behind) = (Codec::new(), Behind::default());
                self.needs_anew = false;
                return Ok(true);
            }
            self.behind.looked_to = from;
            self.behind.end = Some((batch.hash, batch.next_index(), batch.head.ring_end));
        }
    }

    /// Hash, number of the next record, and end of the ring's records: behind all whole batches that were found.
    pub(super) fn known_end(&self) -> (Hash, u64, u64) {
        self.behind.end.unwrap_or((self.chain, self.next_index, self.ring_end))
    }

    /// Whether whole batches were found that cannot be read without what is broken.
    pub(super) fn has_unreadable(&self) -> bool {
        self.behind.end.is_some()
    }

    /// The number of the record behind the broken batch, as its head has it; 0: that cannot be read.
    pub(super) fn claimed_index(&self) -> u64 {
        self.behind.claimed_index
    }

    /// Reads all there is, also behind broken places, and says the number of the record behind it. Errors: the
    /// file cannot be read.
    pub fn end_index(&mut self) -> io::Result<u64> {
        loop {
            match self.step() {
                Ok(ReadStep::Batch(_)) => {}
                Ok(ReadStep::End | ReadStep::Torn) => break,
                Err(ReadError::Io(error)) => return Err(error),
                Err(ReadError::Corruption(..)) if self.go_on_behind()? => {}
                Err(ReadError::Corruption(..)) => break,
            }
        }
        Ok(self.known_end().1)
    }

    /// How far it has been read, bytes.
    pub fn at_bytes(&self) -> u64 {
        self.at
    }

    /// Reads and checks the next batch. Errors: it was changed, does not follow what is before it,
    /// or cannot be read.
    pub fn step(&mut self) -> Result<ReadStep, ReadError> {
        let at = self.at;
        let broken = |why| ReadError::Corruption(at, Corruption(why));
        let mut head = [0; HEAD_BYTES];
        match read_up_to(&self.file, &mut head, self.at)? {
            0 => return Ok(ReadStep::End),
            HEAD_BYTES => {}
            _ => return Ok(ReadStep::Torn),
        }
        let batch = BatchHead::decode(&head).map_err(|why| ReadError::Corruption(self.at, why))?;
        let len_bytes = batch.len_bytes as usize;
        self.buffer.resize(len_bytes + HASH_BYTES, 0);
        let read = read_up_to(&self.file, &mut self.buffer, self.at + HEAD_BYTES as u64)?;
        if read < self.buffer.len() {
            return Ok(ReadStep::Torn);
        }
        let hash = chained(&self.chain, &head, &self.buffer[..len_bytes]);
        if hash != self.buffer[len_bytes..] {
            self.behind.claimed_index = batch.first_index.saturating_add(u64::from(batch.count));
            return Err(broken("a record here or before it has been changed, or is torn"));
        }
        if batch.first_index != self.next_index || batch.ring_end < self.ring_end {
            return Err(broken("records are missing"));
        }
        if self.needs_anew && !batch.is_anew {
            return Err(broken("records before it cannot be decoded"));
        }
        self.chain = hash;
        self.next_index = self.next_index.saturating_add(u64::from(batch.count));
        self.ring_end = batch.ring_end;
        self.at += (HEAD_BYTES + len_bytes + HASH_BYTES) as u64;
        Ok(ReadStep::Batch(batch))
    }

    /// Decodes the records of the batch that was read last. Each batch has to be decoded, in order.
    /// Errors: no writer has written that.
    pub fn records(
        &mut self,
        batch: &BatchHead,
        mut each: impl FnMut(AuditRecord),
    ) -> Result<(), ReadError> {
        if batch.is_anew {
            self.codec = Codec::new();
        }
        self.needs_anew = true;
        let len_bytes = batch.len_bytes as usize;
        let mut input = RecordInput(self.buffer.get(..len_bytes).unwrap_or_default());
        let broken = |why| ReadError::Corruption(self.at, why);
        for number in 0..u64::from(batch.count) {
            let index = batch.first_index.saturating_add(number);
            each(self.codec.get(index, &mut input).map_err(broken)?);
        }
        if !input.0.is_empty() {
            return Err(broken(Corruption("there are bytes behind the records")));
        }
        self.needs_anew = false;
        Ok(())
    }
}
