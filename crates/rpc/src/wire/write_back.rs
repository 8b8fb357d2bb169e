//! What a client that had a write lease writes later: where it goes, and upon what.

use dray_core::{Attr, Timestamp};

use crate::wire::codec::{Input, Malformed, Wire, wire_fields};

/// Pieces of one [`Call::WriteBack`](super::Call::WriteBack).
pub const EXTENTS_MAX: usize = 64;

/// The state of a file in which its writer got a write lease, or saw it last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteBase {
    /// Bytes.
    pub size: u64,
    /// When the content was changed last.
    pub mtime: Timestamp,
    /// When anything was changed last.
    pub ctime: Timestamp,
}

wire_fields!(WriteBase { size, mtime, ctime });

impl WriteBase {
    /// The state that these attributes show.
    pub fn of(attr: &Attr) -> WriteBase {
        WriteBase { size: attr.size, mtime: attr.mtime, ctime: attr.ctime }
    }
}

/// Appends pieces: the offset of each in the file and its length, bytes. Their data stand one behind the other.
pub fn put_extents(extents: impl IntoIterator<Item = (u64, u32)>, out: &mut Vec<u8>) {
    extents.into_iter().for_each(|extent| extent.put(out));
}

/// The pieces again. Errors: there are too many, they are not the `data_bytes` that came along, or one ends behind
/// all offsets.
pub fn get_extents(bytes: &[u8], data_bytes: usize) -> Result<Vec<(u64, u32)>, Malformed> {
    let (mut input, mut extents, mut sum) = (Input(bytes), Vec::new(), 0);
    while !input.0.is_empty() {
        let (at, len_bytes): (u64, u32) = input.get()?;
        if extents.len() == EXTENTS_MAX {
            return Err(Malformed("too many pieces to write"));
        }
        if at.checked_add(u64::from(len_bytes)).is_none_or(|end| end > i64::MAX as u64) {
            return Err(Malformed("a piece behind the largest offset"));
        }
        sum += u64::from(len_bytes);
        extents.push((at, len_bytes));
    }
    match sum == data_bytes as u64 {
        true => Ok(extents),
        false => Err(Malformed("pieces that are not the data")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_back_and_those_that_do_not_fit_are_refused() {
        let mut bytes = Vec::new();
        put_extents([(5, 3), (1 << 40, 4)], &mut bytes);
        assert_eq!(get_extents(&bytes, 7), Ok(vec![(5, 3), (1 << 40, 4)]));
        assert!(get_extents(&bytes, 8).is_err() && get_extents(&bytes[1..], 7).is_err());
        let encoded = |extents: Vec<(u64, u32)>| {
            let mut bytes = Vec::new();
            put_extents(extents, &mut bytes);
            bytes
        };
        assert!(get_extents(&encoded(vec![(0, 0); EXTENTS_MAX]), 0).is_ok());
        assert!(get_extents(&encoded(vec![(0, 0); EXTENTS_MAX + 1]), 0).is_err());
        for at in [u64::MAX, i64::MAX as u64] {
            assert!(get_extents(&encoded(vec![(at, 1)]), 1).is_err());
        }
    }
}
