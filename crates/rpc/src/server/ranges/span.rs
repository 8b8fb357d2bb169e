//! A part of a file or directory.

use crate::wire::{Input, Malformed, Wire};

/// Bytes of a file, or all of a file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// First byte.
    start: u64,
    /// The byte after the last.
    end: u64,
}

impl Span {
    /// Everything: attributes, size, names.
    pub(crate) const ALL: Span = Span { start: 0, end: u64::MAX };

    /// `len_bytes` from `at` on; of no bytes the one at `at`.
    pub(crate) fn bytes(at: u64, len_bytes: u64) -> Span {
        Span { start: at, end: at.saturating_add(len_bytes.max(1)) }
    }

    /// All bytes from `at` on.
    pub(crate) fn from(at: u64) -> Span {
        Span { start: at, end: u64::MAX }
    }

    pub(super) fn meets(self, other: Span) -> bool {
        self.start < other.end && other.start < self.end
    }

    pub(super) fn covers(self, other: Span) -> bool {
        self.start <= other.start && other.end <= self.end
    }
}

impl<'a> Wire<'a> for Span {
    fn put(&self, out: &mut Vec<u8>) {
        (self.start, self.end).put(out);
    }
    fn get(input: &mut Input<'a>) -> Result<Span, Malformed> {
        let (start, end) = input.get()?;
        Ok(Span { start, end })
    }
}
