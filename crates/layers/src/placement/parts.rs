//! The parts of a request that several servers carry out: buffers for them, and the answer that they make.
//!
//! A connection that broke can have taken the buffer of a part with it. Then the part comes back in another
//! one, which may even have no room. So the length that was asked for says whether a part is short, and
//! not the room that is left in its buffer.

use dray_core::{BufMut, Result};

/// One buffer for each part, in their order, out of an empty one that has room for all.
pub(super) fn split(mut into: BufMut, lens_bytes: &[usize]) -> Vec<BufMut> {
    let mut parts = Vec::with_capacity(lens_bytes.len());
    for len_bytes in lens_bytes {
        let rest = into.split_off(*len_bytes);
        parts.push(std::mem::replace(&mut into, rest));
    }
    parts
}

/// The same part with room for all of it.
pub(super) fn with_room(part: BufMut, len_bytes: usize) -> BufMut {
    if part.capacity() >= len_bytes {
        return part;
    }
    let mut whole = BufMut::heap(len_bytes);
    whole.put(part.filled());
    whole
}

/// What was read: all parts up to the first one that is short, in a buffer with room for all.
pub(super) fn together(parts: Vec<BufMut>, lens_bytes: &[usize]) -> BufMut {
    if parts.windows(2).all(|two| two[0].is_followed_by(&two[1])) {
        let joined = parts.into_iter().rev().reduce(|behind, mut part| {
            part.rejoin(behind); // behind a part that is not full nothing counts
            part
        });
        return joined.unwrap_or_else(|| BufMut::heap(0));
    }
    let mut whole = BufMut::heap(lens_bytes.iter().sum());
    for (part, len_bytes) in parts.iter().zip(lens_bytes) {
        whole.put(part.filled());
        if part.len() < *len_bytes {
            break;
        }
    }
    whole
}

/// How many bytes of a request were written without a gap. Errors: that of the first part, if nothing was.
pub(super) fn written(parts: Vec<Result<usize>>, lens_bytes: &[usize]) -> Result<usize> {
    let mut written = 0;
    for (part, len_bytes) in parts.into_iter().zip(lens_bytes) {
        let count = match part {
            Err(error) if written == 0 => return Err(error),
            part => part.unwrap_or(0),
        };
        written += count;
        if count < *len_bytes {
            break;
        }
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use dray_core::{Errno, Error};

    use super::*;

    const LENS: [usize; 3] = [2, 3, 4];

    /// Parts of a buffer of nine bytes with these contents; those in `lost` come in another buffer.
    fn parts(contents: [&[u8]; 3], lost: &[usize]) -> Vec<BufMut> {
        let mut parts = split(BufMut::heap(9), &LENS);
        for (number, (part, content)) in parts.iter_mut().zip(contents).enumerate() {
            if lost.contains(&number) {
                *part = BufMut::heap(content.len()); // without any room that is left
            }
            part.put(content);
        }
        parts
    }

    #[test]
    fn an_answer_ends_at_its_first_short_part_whatever_buffers_it_came_in() {
        for lost in [&[][..], &[0], &[1], &[2], &[0, 1, 2]] {
            for (contents, wanted) in [
                ([&b"ab"[..], b"cde", b"fghi"], &b"abcdefghi"[..]),
                ([b"ab", b"cde", b"f"], b"abcdef"),
                ([b"ab", b"c", b"fghi"], b"abc"),
                ([b"ab", b"", b"fghi"], b"ab"),
                ([b"", b"cde", b"fghi"], b""),
            ] {
                let whole = together(parts(contents, lost), &LENS);
                assert_eq!(whole.filled(), wanted, "{contents:?}, lost {lost:?}");
                assert_eq!(whole.capacity(), 9, "{contents:?}, lost {lost:?}");
            }
        }
    }

    #[test]
    fn a_part_whose_buffer_was_lost_gets_room_again() {
        let part = with_room(parts([b"ab", b"c", b""], &[1]).remove(1), 3);
        assert_eq!((part.filled(), part.room()), (&b"c"[..], 2));
    }

    #[test]
    fn only_what_was_written_without_a_gap_counts() {
        let failed = || Err(Error::new(Errno::ENOSPC));
        for (parts, wanted) in [
            (vec![Ok(2), Ok(3), Ok(4)], Ok(9)),
            (vec![Ok(2), Ok(1), Ok(4)], Ok(3)),
            (vec![Ok(2), failed(), Ok(4)], Ok(2)),
            (vec![Ok(0), failed(), Ok(4)], Ok(0)),
            (vec![failed(), Ok(3), Ok(4)], Err(Errno::ENOSPC)),
        ] {
            assert_eq!(written(parts, &LENS).map_err(|error| error.errno()), wanted);
        }
    }
}
