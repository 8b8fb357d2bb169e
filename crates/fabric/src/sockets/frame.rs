//! How frames follow each other on a byte stream.
//!
//! ```text
//! 0   4   magic "dray"
//! 4   4   bytes of head, little-endian, 1..=HEAD_MAX_BYTES
//! 8   4   bytes of data, 0..=DATA_MAX_BYTES
//! 12  4   zero, room for a checksum
//! 16      head
//! ..      if there are data: zeros up to a multiple of DATA_ALIGN_BYTES, then data
//! ```
//!
//! A socket copies what it is given into memory that begins at a page, mostly, and what it
//! gives out of it. Where data begin in the middle of a cache line both copies cost a
//! sixth more (docs/adr/0015-large-transfers.md).

use std::io;

use crate::connection::check_bounds;
use crate::{DATA_MAX_BYTES, HEAD_MAX_BYTES};

pub(crate) const PREFIX_BYTES: usize = 16;
/// Where data begin in a frame: at a multiple of a cache line.
const DATA_ALIGN_BYTES: usize = 64;
const MAGIC: [u8; 4] = *b"dray";

/// Sizes of a frame's two parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prefix {
    pub(crate) head_bytes: usize,
    pub(crate) data_bytes: usize,
}

impl Prefix {
    /// Checks the bounds of a frame to be sent.
    pub(crate) fn of(head: &[u8], data_bytes: usize) -> io::Result<Prefix> {
        check_bounds(head, data_bytes)?;
        Ok(Prefix { head_bytes: head.len(), data_bytes })
    }

    /// Where the head ends and what stands behind it begins: data, or the next frame.
    pub(crate) fn body_at(self) -> usize {
        let head_end = PREFIX_BYTES + self.head_bytes;
        if self.data_bytes == 0 { head_end } else { head_end.next_multiple_of(DATA_ALIGN_BYTES) }
    }

    pub(crate) fn encode(self) -> [u8; PREFIX_BYTES] {
        let mut bytes = [0; PREFIX_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&(self.head_bytes as u32).to_le_bytes());
        bytes[8..12].copy_from_slice(&(self.data_bytes as u32).to_le_bytes());
        bytes
    }

    /// Reads what arrived. Errors: `EPROTO` for anything that `encode` cannot make.
    pub(crate) fn decode(bytes: &[u8; PREFIX_BYTES]) -> io::Result<Prefix> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]) as usize
        };
        let prefix = Prefix { head_bytes: word(4), data_bytes: word(8) };
        let sound = bytes[..4] == MAGIC
            && (1..=HEAD_MAX_BYTES).contains(&prefix.head_bytes)
            && prefix.data_bytes <= DATA_MAX_BYTES
            && word(12) == 0;
        if sound { Ok(prefix) } else { Err(io::Error::from_raw_os_error(libc::EPROTO)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_begin_at_a_cache_line() {
        let body_at = |head_bytes, data_bytes| Prefix { head_bytes, data_bytes }.body_at();
        assert_eq!(
            (body_at(10, 0), body_at(10, 1), body_at(48, 1), body_at(49, 1)),
            (26, 64, 64, 128)
        );
    }

    // proves: P121
    #[test]
    fn what_is_encoded_is_decoded_and_nothing_else_is() {
        let prefix = Prefix { head_bytes: 40, data_bytes: DATA_MAX_BYTES };
        let bytes = prefix.encode();
        assert_eq!(Prefix::decode(&bytes).unwrap(), prefix);
        for (at, value) in [(0, b'x'), (7, 1), (11, 1), (12, 1)] {
            let mut bad = bytes;
            bad[at] = value;
            assert!(Prefix::decode(&bad).is_err(), "byte {at}");
        }
        let empty = Prefix { head_bytes: 0, data_bytes: 0 };
        assert!(Prefix::decode(&empty.encode()).is_err());
    }
}
