//! The order of changes, and changes that are sent again.

use dray_core::{FileId, SetAttr};

use crate::wire::codec::{Input, Malformed, Wire, wire_struct};
use crate::wire::ticket::Ticket;

wire_struct! {
    /// When a change was made, in the server's order. Of two changes that touch the same
    /// bytes the later has the greater number; numbers grow over restarts of the machine.
    Stamp {
        /// The number; of a sync: every change up to this one is on media.
        number: u64,
        /// Where a write went, bytes; [`Stamp::NOWHERE`] for other changes.
        at: u64,
    }
}

impl Stamp {
    /// Encoded, bytes.
    pub const BYTES: usize = 16;
    /// A value of `at`: the change was no write.
    pub const NOWHERE: u64 = u64::MAX;
}

/// A change of one file that can be made again, in any order with others. Its stamp says over which
/// of the others it prevails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The data that come with it belong here.
    Write {
        /// Offset, bytes.
        at: u64,
    },
    /// The file was cut, or made longer by a hole, to this size.
    Size {
        /// Bytes.
        size: u64,
    },
    /// fallocate(2), but for what moves data.
    Allocate {
        /// Flags of fallocate(2).
        flags: i32,
        /// First byte.
        at: u64,
        /// Number of bytes.
        len_bytes: u64,
    },
    /// Attributes were set; the size is not among them.
    Attr(SetAttr),
}

impl<'a> Wire<'a> for Change {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Change::Write { at } => (0u8, *at).put(out),
            Change::Size { size } => (1u8, *size).put(out),
            Change::Allocate { flags, at, len_bytes } => {
                (2u8, (*flags, (*at, *len_bytes))).put(out);
            }
            Change::Attr(set) => (3u8, *set).put(out),
        }
    }
    fn get(input: &mut Input<'a>) -> Result<Change, Malformed> {
        Ok(match input.get::<u8>()? {
            0 => Change::Write { at: input.get()? },
            1 => Change::Size { size: input.get()? },
            2 => {
                let (flags, (at, len_bytes)) = input.get()?;
                Change::Allocate { flags, at, len_bytes }
            }
            3 => Change::Attr(input.get()?),
            _ => return Err(Malformed("an unknown change")),
        })
    }
}

wire_struct! {
    /// A file, the stamp up to which it is on media, and the ticket that says so.
    FileDurableStamp {
        /// The file.
        file: FileId,
        /// Every change of its data up to this one is on media.
        stamp: u64,
        /// Out of the answer to the sync.
        ticket: Ticket,
    }
}

/// Appends a durable_stamp.
pub fn put_durable_stamp(durable_stamp: &FileDurableStamp, out: &mut Vec<u8>) {
    durable_stamp.put(out);
}

/// The stamps that [`put_durable_stamp`] appended.
pub fn get_durable_stamps(bytes: &[u8]) -> Result<Vec<FileDurableStamp>, Malformed> {
    let mut input = Input(bytes);
    let mut durable_stamps = Vec::new();
    while !input.0.is_empty() {
        durable_stamps.push(input.get()?);
    }
    Ok(durable_stamps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_and_durable_stamps_come_back_as_they_went() {
        let set = SetAttr { mode: Some(0o640), ..SetAttr::default() };
        for change in [
            Change::Write { at: 1 << 40 },
            Change::Size { size: 3 },
            Change::Allocate { flags: 3, at: 4096, len_bytes: 8192 },
            Change::Attr(set),
        ] {
            let mut bytes = Vec::new();
            change.put(&mut bytes);
            assert_eq!(Input::whole::<Change>(&bytes), Ok(change));
            assert!(Input::whole::<Change>(&bytes[..bytes.len() - 1]).is_err());
        }
        let durable_stamps = [1, 2].map(|ino| FileDurableStamp {
            file: FileId { ino, generation: 7 },
            stamp: ino * 100,
            ticket: Ticket([ino as u8; 16]),
        });
        let mut bytes = Vec::new();
        durable_stamps
            .iter()
            .for_each(|durable_stamp| put_durable_stamp(durable_stamp, &mut bytes));
        assert_eq!(get_durable_stamps(&bytes).unwrap(), durable_stamps);
        assert!(get_durable_stamps(&bytes[1..]).is_err());
    }
}
