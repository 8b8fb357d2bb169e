//! Tickets: what the server says and can believe again when it has forgotten it.
//!
//! After a restart clients say what they had open, and after a loss of power what is on media. A
//! hostile one may say anything. So the server seals a statement when it is true, with a key of its
//! own that outlives the server. Later the server believes a statement that has its seal. It keeps
//! no list of what it sealed (docs/adr/0017-tickets.md).

use hmac::{Hmac, Mac};
use sha2::Sha256;

use dray_core::{FileId, FsUuid, NodeId, OpenHow};

use crate::server::recovery::keys::TicketKeys;
use crate::wire::Ticket;

/// Bytes of HMAC-SHA-256 that a ticket holds: 120 bits, and each wrong guess is a round trip. NIST
/// SP 800-107, 5.3.3 asks for 32 bits or more.
const SEAL_BYTES: usize = Ticket::BYTES - 1;

/// The first byte of a ticket that is of no open file.
const ON_MEDIA: u8 = 0x80;
/// Stands for all files; it is the id of none.
const EVERY_FILE: FileId = FileId { ino: 0, generation: 0 };

/// Makes and checks the tickets of one export. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Tickets {
    /// An HMAC that has key and export in it, for all tickets to begin with.
    begun: Hmac<Sha256>,
    /// The same with the key before, whose tickets are believed.
    before: Option<Hmac<Sha256>>,
}

impl Tickets {
    pub(crate) fn new(keys: &TicketKeys, export: FsUuid) -> Tickets {
        let before = keys.previous.as_ref().map(|key| begin(key, export));
        Tickets { begun: begin(&keys.current, export), before }
    }

    /// For an export that belongs to no server.
    pub(crate) fn without_key(export: FsUuid) -> Tickets {
        Tickets { begun: begin(&[0; 32], export), before: None }
    }

    /// Seals a first byte and what else it is about.
    fn seal(&self, first: u8, about: [u64; 3]) -> Ticket {
        let mut mac = self.begun.clone();
        mac.update(&[first]);
        about.iter().for_each(|word| mac.update(&word.to_le_bytes()));
        let seal = mac.finalize().into_bytes();
        let mut ticket = [first; Ticket::BYTES];
        ticket[1..].copy_from_slice(&seal[..SEAL_BYTES]);
        Ticket(ticket)
    }

    /// In constant time.
    fn holds(&self, ticket: Ticket, about: [u64; 3]) -> bool {
        let sealed = |begun: &Hmac<Sha256>| {
            let mut mac = begun.clone();
            mac.update(&ticket.0[..1]);
            about.iter().for_each(|word| mac.update(&word.to_le_bytes()));
            mac.verify_truncated_left(&ticket.0[1..]).is_ok()
        };
        sealed(&self.begun) || self.before.as_ref().is_some_and(sealed)
    }

    /// `node` has opened `file` for `access`, bits of [`Ticket::READ`] and [`Ticket::WRITE`].
    pub(crate) fn opened(&self, node: NodeId, file: FileId, access: u8) -> Ticket {
        self.seal(access, [node.0, file.ino, file.generation])
    }

    /// Whether `node` once opened `file` for all that `how` wants.
    pub(crate) fn may_open(
        &self,
        ticket: Ticket,
        node: NodeId,
        file: FileId,
        how: OpenHow,
    ) -> bool {
        let enough = ticket.access() & ON_MEDIA == 0 && access_of(how) & !ticket.access() == 0;
        enough && self.holds(ticket, [node.0, file.ino, file.generation])
    }

    /// Everything up to `stamp` is on media: of `file`, or of all files.
    pub(crate) fn on_media(&self, file: Option<FileId>, stamp: u64) -> Ticket {
        let file = file.unwrap_or(EVERY_FILE);
        self.seal(ON_MEDIA, [file.ino, file.generation, stamp])
    }

    /// Whether the server once said so.
    pub(crate) fn was_on_media(&self, ticket: Ticket, file: Option<FileId>, stamp: u64) -> bool {
        let file = file.unwrap_or(EVERY_FILE);
        ticket.access() == ON_MEDIA && self.holds(ticket, [file.ino, file.generation, stamp])
    }
}

fn begin(key: &[u8; 32], export: FsUuid) -> Hmac<Sha256> {
    let mut begun = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    begun.update(b"dray ticket 1");
    begun.update(&export.0.to_le_bytes());
    begun
}

/// The access that an opening asks for, as bits of [`Ticket::READ`] and [`Ticket::WRITE`].
pub(crate) fn access_of(how: OpenHow) -> u8 {
    match how.flags & libc::O_ACCMODE {
        libc::O_RDONLY => Ticket::READ,
        libc::O_WRONLY => Ticket::WRITE,
        _ => Ticket::READ | Ticket::WRITE,
    }
}

/// As a file is opened again: nothing is made or cut.
pub(crate) fn again(how: OpenHow) -> OpenHow {
    OpenHow::new(how.flags & !(libc::O_TRUNC | libc::O_CREAT | libc::O_EXCL))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId { ino: 7, generation: 3 };

    fn tickets(current: u8, previous: Option<u8>, export: u128) -> Tickets {
        let begin = |key: u8| begin(&[key; 32], FsUuid(export));
        Tickets { begun: begin(current), before: previous.map(begin) }
    }

    /// Another server, of another version of dray, is to believe the tickets.
    // proves: P137
    #[test]
    fn a_ticket_is_what_it_was() {
        let tickets = tickets(1, None, 5);
        let digits = |ticket: Ticket| format!("{:032x}", u128::from_be_bytes(ticket.0));
        let opened = tickets.opened(NodeId(9), FILE, Ticket::READ);
        assert_eq!(digits(opened), "01f13fb8756cf9cfba92f37d734e3bde");
        let of_file = tickets.on_media(Some(FILE), 77);
        assert_eq!(digits(of_file), "80576a757c3c65651d3eda158570f952");
        let of_all = tickets.on_media(None, 77);
        assert_eq!(digits(of_all), "8038ec4647560b7b49b1f48fdfd4924f");
    }

    // proves: P123
    #[test]
    fn a_ticket_is_good_over_one_change_of_the_key() {
        let ticket = tickets(1, None, 5).opened(NodeId(9), FILE, Ticket::READ);
        let good = |tickets: Tickets| tickets.may_open(ticket, NodeId(9), FILE, OpenHow::READ);
        assert!(good(tickets(2, Some(1), 5)) && !good(tickets(2, Some(1), 6)));
        assert!(!good(tickets(3, Some(2), 5)));
        let fresh = tickets(2, Some(1), 5).opened(NodeId(9), FILE, Ticket::READ);
        assert!(tickets(3, Some(2), 5).may_open(fresh, NodeId(9), FILE, OpenHow::READ));
    }

    // proves: P123
    #[test]
    fn a_ticket_is_good_for_what_it_was_given_for_only() {
        let tickets = tickets(1, None, 5);
        let (node, how) = (NodeId(9), OpenHow::new);
        let ticket = tickets.opened(node, FILE, Ticket::READ);
        assert!(tickets.may_open(ticket, node, FILE, how(libc::O_RDONLY)));
        for more in [libc::O_WRONLY, libc::O_RDWR, libc::O_ACCMODE] {
            assert!(!tickets.may_open(ticket, node, FILE, how(more)));
        }
        assert!(!tickets.may_open(ticket, NodeId(8), FILE, OpenHow::READ));
        let other = FileId { ino: 8, ..FILE };
        assert!(!tickets.may_open(ticket, node, other, OpenHow::READ));
        for bit in 0..Ticket::BYTES * 8 {
            let mut forged = ticket;
            forged.0[bit / 8] ^= 1 << (bit % 8);
            assert!(!tickets.may_open(forged, node, FILE, OpenHow::READ), "bit {bit}");
        }
        for others in [self::tickets(2, None, 5), self::tickets(1, None, 6)] {
            assert!(!others.may_open(ticket, node, FILE, OpenHow::READ));
        }
        let both = tickets.opened(node, FILE, Ticket::READ | Ticket::WRITE);
        for less in [libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR | libc::O_APPEND] {
            assert!(tickets.may_open(both, node, FILE, how(less)));
        }
    }

    #[test]
    fn what_is_on_media_is_no_open_file_and_no_other_stamp() {
        let tickets = tickets(1, None, 5);
        let ticket = tickets.on_media(Some(FILE), 77);
        assert!(tickets.was_on_media(ticket, Some(FILE), 77));
        assert!(!tickets.was_on_media(ticket, Some(FILE), 78));
        assert!(!tickets.was_on_media(ticket, None, 77));
        assert!(!tickets.may_open(
            ticket,
            NodeId(7),
            FileId { ino: 3, generation: 77 },
            OpenHow::READ
        ));
        let opened = tickets.opened(NodeId(7), FileId { ino: 3, generation: 77 }, Ticket::READ);
        assert!(!tickets.was_on_media(opened, Some(FILE), 77));
        assert!(tickets.was_on_media(tickets.on_media(None, 5), None, 5));
    }
}
