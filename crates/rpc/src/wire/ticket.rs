//! A sealed statement of a server, which a later server epoch believes.

use crate::wire::codec::{Input, Malformed, Wire};

/// A statement that only a server can have made. It says which file a client opened and for what,
/// or up to which stamp something is on media. The receiver knows which of them by the answer that
/// the ticket came in. The receiver keeps the ticket and shows it to a server that has forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(pub [u8; Ticket::BYTES]);

impl Ticket {
    /// Encoded, bytes.
    pub const BYTES: usize = 16;
    /// The first byte of a ticket of an open file: it may be read.
    pub const READ: u8 = 1;
    /// The file may be written.
    pub const WRITE: u8 = 2;

    /// The access that an open file's ticket proves: bits of [`Ticket::READ`] and
    /// [`Ticket::WRITE`].
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
