//! What is whole behind a broken place of a segment.
//!
//! Each batch is preceded by the hash that its own hash covers: that of the batch before, or of the header. So a
//! batch can be checked without what is before it.

use std::fs::File;
use std::io;
use std::path::Path;

use super::segment::{
    BATCH_ANEW_MAGIC, BATCH_MAGIC, BatchHead, HASH_BYTES, HEAD_BYTES, Hash, chained, hash_at,
    read_up_to,
};

/// So much of a file is looked through at once, bytes.
const WINDOW_BYTES: usize = 256 << 10;
const MAGIC_BYTES: usize = 4;

/// A batch whose hash fits the one that stands before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WholeBatch {
    /// Where its head begins, bytes.
    pub(super) at: u64,
    pub(super) head: BatchHead,
    /// The hash before it.
    pub(super) before: Hash,
    pub(super) hash: Hash,
}

impl WholeBatch {
    /// The byte behind it.
    pub(super) fn end(&self) -> u64 {
        self.at + self.head.whole_bytes()
    }

    /// The number of the record behind it.
    pub(super) fn next_index(&self) -> u64 {
        self.head.first_index.saturating_add(u64::from(self.head.count))
    }
}

/// What a look for a whole batch has found.
pub(super) enum WholeSearch {
    /// The next one.
    Found(WholeBatch),
    /// None up to the end of the file. Who looks again, once more is written, begins at this byte.
    Nothing(u64),
}

/// Looks for the next whole batch from byte `from` on. Errors: the file cannot be read.
pub(super) fn next_whole(file: &File, from: u64) -> io::Result<WholeSearch> {
    let (mut at, mut unfinished) = (from, None);
    let mut window = vec![0; WINDOW_BYTES];
    loop {
        let read = read_up_to(file, &mut window, at)?;
        let heads = window[..read].windows(MAGIC_BYTES).enumerate().filter(|(_, bytes)| {
            **bytes == BATCH_MAGIC.to_le_bytes() || **bytes == BATCH_ANEW_MAGIC.to_le_bytes()
        });
        for (offset, _) in heads {
            let head_at = at + offset as u64;
            match whole_at(file, head_at)? {
                Candidate::Whole(batch) => return Ok(WholeSearch::Found(batch)),
                Candidate::Unfinished => unfinished = unfinished.or(Some(head_at)),
                Candidate::No => {}
            }
        }
        let behind = at + read.saturating_sub(MAGIC_BYTES - 1) as u64;
        if read < window.len() {
            return Ok(WholeSearch::Nothing(unfinished.unwrap_or(behind)));
        }
        at = behind;
    }
}

enum Candidate {
    Whole(WholeBatch),
    /// The file ends within it.
    Unfinished,
    No,
}

fn whole_at(file: &File, at: u64) -> io::Result<Candidate> {
    let Some(hash_before_at) = at.checked_sub(HASH_BYTES as u64) else { return Ok(Candidate::No) };
    let mut start = [0; HASH_BYTES + HEAD_BYTES];
    if read_up_to(file, &mut start, hash_before_at)? < start.len() {
        return Ok(Candidate::Unfinished);
    }
    let (before, head) = (hash_at(&start, 0), &start[HASH_BYTES..]);
    let mut encoded = [0; HEAD_BYTES];
    encoded.copy_from_slice(head);
    let Ok(head) = BatchHead::decode(&encoded) else { return Ok(Candidate::No) };
    let mut rest = vec![0; head.whole_bytes() as usize - HEAD_BYTES];
    if read_up_to(file, &mut rest, at + HEAD_BYTES as u64)? < rest.len() {
        return Ok(Candidate::Unfinished);
    }
    let (records, hash) = rest.split_at(rest.len() - HASH_BYTES);
    Ok(match chained(&before, &encoded, records) {
        found if found == hash => Candidate::Whole(WholeBatch { at, head, before, hash: found }),
        _ => Candidate::No,
    })
}

/// How many records are in whole batches of a file, whatever it begins with. Errors: it cannot be read.
pub(super) fn whole_records(path: &Path) -> io::Result<u64> {
    let (file, mut at, mut records) = (File::open(path)?, 0, 0);
    while let WholeSearch::Found(batch) = next_whole(&file, at)? {
        records += u64::from(batch.head.count);
        at = batch.end();
    }
    Ok(records)
}

/// Whether a file begins with a batch that is complete, but does not fit its hash. A torn write leaves none, for its
/// end is missing or zeros. Errors: it cannot be read.
pub(super) fn begins_changed(path: &Path) -> io::Result<bool> {
    let (file, mut head) = (File::open(path)?, [0; HEAD_BYTES]);
    if read_up_to(&file, &mut head, 0)? < HEAD_BYTES {
        return Ok(false);
    }
    let Ok(batch) = BatchHead::decode(&head) else { return Ok(false) };
    let mut hash = [0; HASH_BYTES];
    let hash_at = batch.whole_bytes() - HASH_BYTES as u64;
    let is_complete = read_up_to(&file, &mut hash, hash_at)? == HASH_BYTES;
    Ok(is_complete && hash != [0; HASH_BYTES])
}
