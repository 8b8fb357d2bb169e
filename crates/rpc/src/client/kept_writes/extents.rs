//! The bytes that were written to one file and are kept.

use std::collections::BTreeMap;

use crate::wire::EXTENTS_MAX;

/// Pieces of a file, by their offset. None meets or overlaps another.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct KeptExtents {
    pieces: BTreeMap<u64, Vec<u8>>,
    bytes: usize,
}

impl KeptExtents {
    /// Bytes that are kept.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether there are as many pieces as one message takes.
    pub(super) fn is_scattered(&self) -> bool {
        self.pieces.len() >= EXTENTS_MAX
    }

    /// Writes bytes over what is there, at this offset.
    pub(super) fn write(&mut self, at: u64, data: &[u8]) {
        let end = at + data.len() as u64;
        let ends = |(begin, piece): (&u64, &Vec<u8>)| begin + piece.len() as u64;
        let before = self.pieces.range_mut(..=at).next_back();
        // What goes on where the last write ended, or lies within it, is nearly all.
        if let Some((begin, piece)) = before {
            let (begin, len) = (*begin, piece.len() as u64);
            let next = self.pieces.range(at + 1..).next().map(|(next, _)| *next);
            if begin + len >= at && next.is_none_or(|next| end < next) {
                let piece = self.pieces.get_mut(&begin).expect("it was found");
                let from = (at - begin) as usize;
                let overlap = data.len().min(piece.len() - from);
                piece[from..from + overlap].copy_from_slice(&data[..overlap]);
                piece.extend_from_slice(&data[overlap..]);
                self.bytes += data.len() - overlap;
                return;
            }
        }
        let met: Vec<u64> = (self.pieces.range(..=end).rev())
            .take_while(|piece| ends((piece.0, piece.1)) >= at)
            .map(|(begin, _)| *begin)
            .collect();
        let begin = met.last().map_or(at, |first| at.min(*first));
        let mut joined = Vec::new();
        for old in met.iter().rev() {
            let piece = self.pieces.remove(old).expect("it was found");
            self.bytes -= piece.len();
            put(&mut joined, (old - begin) as usize, &piece);
        }
        put(&mut joined, (at - begin) as usize, data);
        self.bytes += joined.len();
        self.pieces.insert(begin, joined);
    }

    /// The pieces in the order of their offsets.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.pieces.iter().map(|(at, piece)| (*at, &piece[..]))
    }

    /// What was kept before `newer`, and is kept again.
    pub(super) fn under(mut self, newer: &KeptExtents) -> KeptExtents {
        newer.iter().for_each(|(at, piece)| self.write(at, piece));
        self
    }
}

/// Puts a piece at a place in memory, which grows to it.
fn put(joined: &mut Vec<u8>, from: usize, piece: &[u8]) {
    joined.resize(joined.len().max(from + piece.len()), 0);
    joined[from..from + piece.len()].copy_from_slice(piece);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_joined_with_what_it_meets() {
        let mut kept = KeptExtents::default();
        for (at, data) in [(10, "abc"), (13, "def"), (20, "x"), (11, "BC"), (5, "12345")] {
            kept.write(at, data.as_bytes());
        }
        let pieces: Vec<_> = kept.iter().collect();
        assert_eq!(pieces, [(5, &b"12345aBCdef"[..]), (20, b"x")]);
        assert_eq!(kept.bytes(), 12);
        kept.write(16, b"-----");
        assert_eq!(kept.iter().collect::<Vec<_>>(), [(5, &b"12345aBCdef-----"[..])]);
    }

    #[test]
    fn any_order_of_writes_leaves_what_a_file_would_have() {
        let mut random = 1u64;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        for _ in 0..200 {
            let (mut kept, mut file) = (KeptExtents::default(), vec![None; 80]);
            for value in 0..20u8 {
                let (at, len) = (draw(60), draw(20) as usize);
                let data = vec![value; len];
                if !data.is_empty() {
                    kept.write(at, &data);
                }
                file[at as usize..at as usize + len].fill(Some(value));
            }
            let mut found = vec![None; 80];
            let mut last_end = None;
            for (at, piece) in kept.iter() {
                assert!(last_end.is_none_or(|end| end < at), "pieces that meet are one");
                last_end = Some(at + piece.len() as u64);
                for (index, value) in piece.iter().enumerate() {
                    found[at as usize + index] = Some(*value);
                }
            }
            assert_eq!(found, file);
            assert_eq!(kept.bytes(), file.iter().flatten().count());
        }
    }
}
