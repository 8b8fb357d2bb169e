//! Records between the calls that made them and the segments: a ring in a mapped file.
//!
//! A call copies its record in before it is answered. The pages belong to the file, so a killed server
//! leaves all of them, and the next server writes them into the log. Nothing here makes a system call.
//!
//! ```text
//! 0    8  magic and version         a record, at a multiple of 8:
//! 8    8  bytes behind the header   0  4  length, or PAD: the rest up to the end is unused
//!                                   4  4  check of number and bytes
//! 64   8  head: read up to here     8  8  its number in the ring
//! 128  8  tail: written up to here  16    bytes
//! 136  8  number of the next record; 0: a former version has written none
//! ```
//! Head and tail only grow; a place is what is left of them modulo the size.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::raw::RAW_MAX_BYTES;
use crate::aggregate::Map;

const MAGIC: u64 = u64::from_le_bytes(*b"drayrng\x01");
const HEADER_BYTES: usize = 4096;
const HEAD_AT: usize = 64;
const TAIL_AT: usize = 128;
const NEXT_AT: usize = 136;
const RECORD_BYTES: usize = 16;
const PAD: u32 = u32::MAX;

/// A ring, of which one process is the writer and the reader.
pub(super) struct RecordRing {
    map: Map,
    size: usize,
    write: Mutex<WriteEnd>,
    _locked: File,
}

struct WriteEnd {
    tail: u64,
    next: u64,
}

/// A record in the ring.
pub(super) struct Taken {
    pub(super) number: u64,
    pub(super) bytes: Vec<u8>,
}

fn check_of(number: u64, bytes: &[u8]) -> u32 {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ bytes.len() as u64;
    let mut mix = |word: u64| {
        let product = u128::from(state ^ word) * u128::from(0xa076_1d64_78bd_642f_u64);
        state = product as u64 ^ (product >> 64) as u64 ^ 0xe703_7ed1_a0b4_28db;
    };
    let (words, rest) = bytes.as_chunks::<8>();
    words.iter().for_each(|word| mix(u64::from_le_bytes(*word)));
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    mix(u64::from_le_bytes(last));
    (state ^ state >> 32) as u32
}

impl RecordRing {
    /// Opens the ring at `path`, or makes one of `size` bytes. Records that a killed server has left
    /// stay in it. `next`: the number of the first record of a new ring; an old one has its own
    /// where it is larger. Errors: those of the file; `EAGAIN`: another process has it.
    pub(super) fn open(path: &Path, size: usize, next: u64) -> io::Result<RecordRing> {
        assert!(size.is_multiple_of(8) && size >= 4 * RAW_MAX_BYTES);
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).read(true).write(true).mode(0o600);
        let file = file.open(path)?;
        // SAFETY: no memory is passed; the descriptor is open.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let len_bytes = (HEADER_BYTES + size) as u64;
        if file.metadata()?.len() != len_bytes {
            file.set_len(0)?; // of another size, or never finished
            // SAFETY: as above. The pages exist from now on: a full disk cannot take them away.
            match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len_bytes as i64) } {
                0 => {}
                errno => return Err(io::Error::from_raw_os_error(errno)),
            }
        }
        let map = Map::new(&file)?;
        let ring =
            RecordRing { map, size, write: Mutex::new(WriteEnd { tail: 0, next }), _locked: file };
        ring.begin(next);
        Ok(ring)
    }

    /// Takes over what is in it, up to the first record that is not whole.
    fn begin(&self, next: u64) {
        let (head, tail) =
            (self.head().load(Ordering::Acquire), self.tail().load(Ordering::Acquire));
        let is_sound = self.map.word(0).load(Ordering::Acquire) == MAGIC
            && self.map.word(8).load(Ordering::Acquire) == self.size as u64
            && tail >= head
            && tail - head <= self.size as u64
            && head.is_multiple_of(8);
        let mut end = WriteEnd { tail: 0, next };
        if is_sound {
            let noted = self.map.word(NEXT_AT).load(Ordering::Acquire);
            (end.tail, end.next) = (head, next.max(noted));
            while end.tail < tail {
                let Some((record, behind)) = self.whole(end.tail, tail) else { break };
                if let Some(record) = record {
                    end.next = end.next.max(record.number + 1);
                }
                end.tail = behind;
            }
        } else {
            self.head().store(0, Ordering::Release);
        }
        self.tail().store(end.tail, Ordering::Release);
        self.map.word(NEXT_AT).store(end.next, Ordering::Release);
        self.map.word(8).store(self.size as u64, Ordering::Release);
        self.map.word(0).store(MAGIC, Ordering::Release);
        *self.write.lock().unwrap_or_else(PoisonError::into_inner) = end;
    }

    /// The number of the oldest record that is in it; none: there is none.
    pub(super) fn oldest(&self) -> Option<u64> {
        let (mut at, tail) = (self.begin_at(), self.tail().load(Ordering::Acquire));
        while at < tail {
            match self.whole(at, tail)? {
                (Some(record), _) => return Some(record.number),
                (None, behind) => at = behind,
            }
        }
        None
    }

    /// The number of the first record that is in it, or of the next one.
    pub(super) fn first(&self) -> u64 {
        let next = self.write.lock().unwrap_or_else(PoisonError::into_inner).next;
        self.oldest().unwrap_or(next)
    }

    /// No record from now on has a smaller number.
    pub(super) fn at_least(&self, next: u64) {
        let mut end = self.write.lock().unwrap_or_else(PoisonError::into_inner);
        end.next = end.next.max(next);
    }

    fn head(&self) -> &AtomicU64 {
        self.map.word(HEAD_AT)
    }

    fn tail(&self) -> &AtomicU64 {
        self.map.word(TAIL_AT)
    }

    /// How much of it is in use, bytes.
    pub(super) fn used_bytes(&self) -> usize {
        let head = self.head().load(Ordering::Relaxed);
        (self.tail().load(Ordering::Relaxed).saturating_sub(head)) as usize
    }

    pub(super) fn size_bytes(&self) -> usize {
        self.size
    }

    /// Puts a record in. False: there is no room.
    pub(super) fn push(&self, bytes: &[u8]) -> bool {
        assert!(bytes.len() <= RAW_MAX_BYTES);
        let len_bytes = RECORD_BYTES + bytes.len().next_multiple_of(8);
        let mut end = self.write.lock().unwrap_or_else(PoisonError::into_inner);
        let place = (end.tail % self.size as u64) as usize;
        let left = self.size - place;
        let skipped = if left < len_bytes { left } else { 0 };
        let behind = end.tail + (skipped + len_bytes) as u64;
        if behind - self.head().load(Ordering::Acquire) > self.size as u64 {
            return false;
        }
        if skipped > 0 {
            self.map.write(HEADER_BYTES + place, &PAD.to_le_bytes());
        }
        let at = HEADER_BYTES + if skipped > 0 { 0 } else { place };
        let mut head = [0; RECORD_BYTES];
        head[..4].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
        head[4..8].copy_from_slice(&check_of(end.next, bytes).to_le_bytes());
        head[8..].copy_from_slice(&end.next.to_le_bytes());
        self.map.write(at, &head);
        self.map.write(at + RECORD_BYTES, bytes);
        (end.tail, end.next) = (behind, end.next + 1);
        self.tail().store(behind, Ordering::Release);
        // Not before: a number that no record has would count as one that is lost.
        self.map.word(NEXT_AT).store(end.next, Ordering::Release);
        true
    }

    /// The record at `from`, and what is behind it; no record where the rest up to the end is
    /// unused. None: there is no whole one.
    fn whole(&self, from: u64, tail: u64) -> Option<(Option<Taken>, u64)> {
        let place = (from % self.size as u64) as usize;
        let at = HEADER_BYTES + place;
        let len_bytes = self.map.half_word(at).load(Ordering::Relaxed);
        if len_bytes == PAD {
            let behind = from + (self.size - place) as u64;
            return (behind <= tail).then_some((None, behind));
        }
        let len_bytes = len_bytes as usize;
        let whole_bytes = RECORD_BYTES + len_bytes.next_multiple_of(8);
        let behind = from + whole_bytes as u64;
        if len_bytes > RAW_MAX_BYTES || place + whole_bytes > self.size || behind > tail {
            return None;
        }
        let number = self.map.word(at + 8).load(Ordering::Relaxed);
        let bytes = self.map.copied(at + RECORD_BYTES, len_bytes);
        let check = self.map.half_word(at + 4).load(Ordering::Relaxed);
        (check == check_of(number, &bytes) && number < u64::MAX)
            .then_some((Some(Taken { number, bytes }), behind))
    }

    /// The records from `from` on, at most so many bytes, and where they end. They stay in the ring
    /// until [`RecordRing::release`].
    pub(super) fn read(&self, from: u64, max_bytes: usize, mut each: impl FnMut(Taken)) -> u64 {
        let tail = self.tail().load(Ordering::Acquire);
        let mut at = from;
        while at < tail && (at - from) < max_bytes as u64 {
            let Some((record, behind)) = self.whole(at, tail) else {
                return tail; // our own memory was changed under us: what is behind it is lost
            };
            record.into_iter().for_each(&mut each);
            at = behind;
        }
        at
    }

    /// Where the next record to be read is.
    pub(super) fn begin_at(&self) -> u64 {
        self.head().load(Ordering::Acquire)
    }

    /// Gives the place of what is before `to` back.
    pub(super) fn release(&self, to: u64) {
        self.head().store(to, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 64 << 10;

    fn drain(ring: &RecordRing) -> Vec<(u64, Vec<u8>)> {
        let mut all = Vec::new();
        let end = ring.read(ring.begin_at(), usize::MAX, |one| all.push((one.number, one.bytes)));
        ring.release(end);
        all
    }

    #[test]
    fn records_come_out_as_they_went_in_however_often_it_wraps() {
        let dir = tempfile::tempdir().unwrap();
        let ring = RecordRing::open(&dir.path().join("ring"), SIZE, 7).unwrap();
        let mut expected = 7;
        for round in 0..2000usize {
            let bytes: Vec<u8> = (0..round * 37 % 1500).map(|byte| byte as u8).collect();
            assert!(ring.push(&bytes));
            if round % 20 == 19 {
                for (number, bytes) in drain(&ring) {
                    assert_eq!(number, expected);
                    let len_bytes = (number as usize - 7) * 37 % 1500;
                    assert!(bytes.iter().enumerate().all(|(at, byte)| at as u8 == *byte));
                    assert_eq!(bytes.len(), len_bytes);
                    expected += 1;
                }
            }
        }
        assert_eq!(expected, 2007);
    }

    // proves: P178
    #[test]
    fn what_a_killed_server_left_is_found_and_what_is_torn_ends_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ring");
        let ring = RecordRing::open(&path, SIZE, 0).unwrap();
        (0..100u8).for_each(|one| assert!(ring.push(&[one; 50])));
        assert!(RecordRing::open(&path, SIZE, 0).is_err(), "it is in use");
        let end = ring.read(0, 500, |_| {});
        ring.release(end);
        drop(ring);
        let ring = RecordRing::open(&path, SIZE, 0).unwrap();
        assert!(ring.push(b"next"));
        let left = drain(&ring);
        assert_eq!(left.last().unwrap(), &(100, b"next".to_vec()));
        assert_eq!((left.len(), left[0].1[0]), (94, 7));
        // A loss of power leaves anything.
        (0..10u8).for_each(|one| assert!(ring.push(&[one; 50])));
        let third = ring.begin_at() + 2 * 72;
        let at = HEADER_BYTES + (third % SIZE as u64) as usize + RECORD_BYTES;
        ring.map.write(at, b"!");
        drop(ring);
        let ring = RecordRing::open(&path, SIZE, 0).unwrap();
        let left: Vec<u64> = drain(&ring).iter().map(|one| one.0).collect();
        assert_eq!(left, [101, 102]);
    }

    #[test]
    fn a_full_ring_takes_no_more_until_there_is_room() {
        let dir = tempfile::tempdir().unwrap();
        let ring = RecordRing::open(&dir.path().join("ring"), SIZE, 0).unwrap();
        let count = (0..).take_while(|_| ring.push(&[1; 1000])).count();
        assert!(count > 60 && ring.used_bytes() > SIZE - 2048);
        assert_eq!(drain(&ring).len(), count);
        assert!(ring.push(&[1; 1000]));
    }
}
