//! A sealed statement of a server, which a later server epoch believes.

use crate::wire::codec::{Input, Malformed, Wire};

/// A statement of a server that only it can have made: which file a client opened and for
/// what, or up to which stamp something is on media. What exactly, its receiver knows by the
/// answer that it came in; it keeps the ticket and shows it to a server that has forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(pub [u8; Ticket::BYTES]);

impl Ticket {
    /// Encoded, bytes.
    pub const BYTES: usize = 16;
    /// The first byte of a ticket of an open file: it may be read.
    pub const READ: u8 = 1;
    /// It may be written.
    pub const WRITE: u8 = 2;

    /// What an open file's ticket is good for: bits of [`Ticket::READ`] and [`Ticket::WRITE`].
    pub fn access(self) -> u8 {
        self.0[0]
    }
}

impl<'a> Wire<'a> for Ticket {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn get(input: &mut Input<'a>) -> Result<Ticket, Malformed> {
        input.get().map(Ticket)
    }
}
