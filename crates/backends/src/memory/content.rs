//! The content of a regular file: sparse chunks.

use std::collections::BTreeMap;
use std::sync::Arc;

use dray_core::BufMut;

/// Unit in which memory is taken and in which unsynced data survive a crash or not.
pub(super) const CHUNK_BYTES: u64 = 4096;

pub(super) type Chunk = Arc<[u8; CHUNK_BYTES as usize]>;

/// Data of a file. Invariant: every byte at or behind `size` that a chunk holds is zero,
/// so that growing the file never shows old data. Chunks are shared between the volatile
/// and the durable side of a [`super::MemoryDisk`] and copied when one side writes.
#[derive(Clone, Debug, Default)]
pub(super) struct Content {
    chunks: BTreeMap<u64, Chunk>,
    size: u64,
}

/// The parts of chunks that `at..at + len` covers: chunk number, and range within it.
fn pieces(at: u64, len: u64) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
    let end = at + len;
    let mut next = at;
    std::iter::from_fn(move || {
        if next >= end {
            return None;
        }
        let number = next / CHUNK_BYTES;
        let stop = end.min((number + 1) * CHUNK_BYTES);
        let from = (next % CHUNK_BYTES) as usize;
        let piece = (number, from..from + (stop - next) as usize);
        next = stop;
        Some(piece)
    })
}

fn zero_chunk() -> Chunk {
    Arc::new([0; CHUNK_BYTES as usize])
}

/// Numbers of the chunks that `at..at + len` touches, as a half-open range.
pub(super) fn chunk_range(at: u64, len: u64) -> std::ops::Range<u64> {
    if len == 0 {
        return 0..0;
    }
    at / CHUNK_BYTES..(at + len).div_ceil(CHUNK_BYTES)
}

impl Content {
    /// Size, bytes.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Chunks held.
    pub(super) fn chunk_count(&self) -> u64 {
        self.chunks.len() as u64
    }

    /// Chunks that writing `at..at + len` would have to take.
    pub(super) fn missing(&self, at: u64, len: u64) -> u64 {
        let range = chunk_range(at, len);
        (range.end - range.start) - self.chunks.range(range).count() as u64
    }

    /// Appends to `into` what is at `at`, up to its room or the end of the file.
    pub(super) fn read(&self, at: u64, into: &mut BufMut) {
        let len = self.size.saturating_sub(at).min(into.room() as u64);
        for (number, range) in pieces(at, len) {
            match self.chunks.get(&number) {
                Some(chunk) => into.put(&chunk[range]),
                None => into.put_zeros(range.len()),
            };
        }
    }

    /// Puts `bytes` at `at`, growing the file as needed.
    pub(super) fn write(&mut self, at: u64, bytes: &[u8]) {
        let mut done = 0;
        for (number, range) in pieces(at, bytes.len() as u64) {
            let chunk = self.chunks.entry(number).or_insert_with(zero_chunk);
            let count = range.len();
            Arc::make_mut(chunk)[range].copy_from_slice(&bytes[done..done + count]);
            done += count;
        }
        if !bytes.is_empty() {
            self.size = self.size.max(at + bytes.len() as u64);
        }
    }

    /// Cuts or grows. Chunks allocated beyond the end go, as truncate(2) does.
    pub(super) fn set_size(&mut self, size: u64) {
        drop(self.chunks.split_off(&size.div_ceil(CHUNK_BYTES)));
        if size < self.size {
            let tail = CHUNK_BYTES - size % CHUNK_BYTES;
            if tail < CHUNK_BYTES {
                self.zero_within(size, tail);
            }
        }
        self.size = size;
    }

    fn zero_within(&mut self, at: u64, len: u64) {
        for (number, range) in pieces(at, len) {
            if let Some(chunk) = self.chunks.get_mut(&number) {
                Arc::make_mut(chunk)[range].fill(0);
            }
        }
    }

    /// Makes `at..at + len` a hole; the size stays.
    pub(super) fn punch(&mut self, at: u64, len: u64) {
        let end = at + len;
        let (first_whole, last_whole) = (at.div_ceil(CHUNK_BYTES), end / CHUNK_BYTES);
        if first_whole < last_whole {
            let gone: Vec<u64> =
                self.chunks.range(first_whole..last_whole).map(|(&number, _)| number).collect();
            gone.iter().for_each(|number| drop(self.chunks.remove(number)));
        }
        let head = end.min(first_whole * CHUNK_BYTES);
        self.zero_within(at, head - at);
        let tail = (last_whole * CHUNK_BYTES).max(head);
        self.zero_within(tail, end - tail);
    }

    /// Takes chunks for `at..at + len`, zero where there were none; the size stays.
    pub(super) fn allocate(&mut self, at: u64, len: u64) {
        let zero = zero_chunk();
        for number in chunk_range(at, len) {
            self.chunks.entry(number).or_insert_with(|| zero.clone());
        }
    }

    /// Removes `len` bytes at `at` and moves what follows down. Both are whole chunks.
    pub(super) fn collapse(&mut self, at: u64, len: u64) {
        let (first, count) = (at / CHUNK_BYTES, len / CHUNK_BYTES);
        let behind = self.chunks.split_off(&first);
        let moved = behind.into_iter().filter(|(number, _)| *number >= first + count);
        self.chunks.extend(moved.map(|(number, chunk)| (number - count, chunk)));
        self.size -= len;
    }

    /// Moves what is behind `at` up by `len`, leaving a hole. Both are whole chunks.
    pub(super) fn insert(&mut self, at: u64, len: u64) {
        let (first, count) = (at / CHUNK_BYTES, len / CHUNK_BYTES);
        let behind = self.chunks.split_off(&first);
        self.chunks.extend(behind.into_iter().map(|(number, chunk)| (number + count, chunk)));
        self.size += len;
    }

    /// The next byte in a chunk at or behind `at`, none if only a hole follows.
    pub(super) fn next_data(&self, at: u64) -> Option<u64> {
        let number = self.chunks.range(at / CHUNK_BYTES..).next().map(|(&number, _)| number)?;
        let found = at.max(number * CHUNK_BYTES);
        (found < self.size).then_some(found)
    }

    /// The next byte in no chunk at or behind `at`; the end of the file is a hole.
    pub(super) fn next_hole(&self, at: u64) -> u64 {
        let mut number = at / CHUNK_BYTES;
        for (&taken, _) in self.chunks.range(number..) {
            if taken != number {
                break;
            }
            number += 1;
        }
        at.max(number * CHUNK_BYTES).min(self.size)
    }

    /// Chunk `number`, none for a hole.
    pub(super) fn chunk(&self, number: u64) -> Option<Chunk> {
        self.chunks.get(&number).cloned()
    }

    /// Replaces chunk `number` as it stands on the other side of a disk, cut at our size.
    pub(super) fn set_chunk(&mut self, number: u64, chunk: Option<Chunk>) {
        let start = number * CHUNK_BYTES;
        match chunk {
            Some(chunk) if start < self.size => {
                self.chunks.insert(number, chunk);
                let tail = (start + CHUNK_BYTES).saturating_sub(self.size);
                self.zero_within(self.size, tail);
            }
            _ => drop(self.chunks.remove(&number)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(content: &Content) -> Vec<u8> {
        let mut buf = BufMut::heap(content.size() as usize);
        content.read(0, &mut buf);
        buf.freeze().to_vec()
    }

    #[test]
    fn what_was_cut_off_never_comes_back() {
        let mut content = Content::default();
        content.write(0, &[7; 10_000]);
        content.set_size(5000);
        content.set_size(10_000);
        let mut want = vec![7; 5000];
        want.resize(10_000, 0);
        assert_eq!(all(&content), want);
    }

    #[test]
    fn a_punched_hole_reads_as_zeros_and_gives_chunks_back() {
        for (at, len) in
            [(0, 4096), (100, 200), (4000, 200), (1000, 11_000), (4096, 1), (0, 20_000)]
        {
            let mut content = Content::default();
            content.write(0, &[7; 16_384]);
            content.punch(at, len);
            let mut want = vec![7; 16_384];
            let end = (at + len).min(16_384) as usize;
            want[at as usize..end].fill(0);
            assert_eq!(all(&content), want, "{at} {len}");
        }
        let mut content = Content::default();
        content.write(0, &[7; 16_384]);
        content.punch(1000, 11_000);
        assert_eq!(content.chunk_count(), 3);
    }

    #[test]
    fn holes_and_data_are_found() {
        let mut content = Content::default();
        content.write(8192, b"x");
        assert_eq!(content.next_data(0), Some(8192));
        assert_eq!(content.next_hole(0), 0);
        assert_eq!(content.next_hole(8192), 8193);
        assert_eq!(content.next_data(8193), None);
    }

    #[test]
    fn collapse_and_insert_undo_each_other() {
        let mut content = Content::default();
        let bytes: Vec<u8> = (0..12_500u32).map(|byte| byte as u8).collect();
        content.write(0, &bytes);
        content.insert(4096, 8192);
        assert_eq!(content.size(), 12_500 + 8192);
        content.collapse(4096, 8192);
        assert_eq!(all(&content), bytes);
    }
}
