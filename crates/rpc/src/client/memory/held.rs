//! The objects that a client holds, as its successor finds them. These are locks, tickets of open
//! files, files that lookups opened, and the requests by which open files are known.

use dray_core::{FileId, Lock, LockFamily, LockKind, LockOwner, LockRange, NodeId, OpenHow, Pid};

use super::*;
use crate::client::holdings::locks::HeldLock;
use crate::wire::Ticket;

/// In place of kind and family of a lock.
const LOCK_LEASE: u64 = 3;

impl SessionMemory {
    /// Notes a lock at this place, below [`LOCKS_MAX`].
    pub(crate) fn put_lock(&self, place: usize, held: &HeldLock) {
        let at = FIRST_LOCK + LOCK_WORDS * place;
        let HeldLock { handle, id, how, lock } = held;
        let words = [
            *handle,
            id.ino,
            id.generation,
            how.flags as u32 as u64,
            lock.range.start,
            lock.range.end,
            lock.owner.number,
            u64::from(lock.pid.0),
            lock.owner.node.0,
        ];
        self.set(at, 0);
        words.iter().enumerate().for_each(|(index, word)| self.set(at + 1 + index, *word));
        let kind = if lock.kind == LockKind::Shared { 1 } else { 2 };
        self.set(at, kind | u64::from(lock.family == LockFamily::Flock) << 8);
    }

    pub(crate) fn remove_lock(&self, place: usize) {
        self.set(FIRST_LOCK + LOCK_WORDS * place, 0);
    }

    /// The locks of the process before us, and their places.
    pub(crate) fn locks(&self) -> Vec<(usize, HeldLock)> {
        (0..LOCKS_MAX).filter_map(|place| Some((place, self.lock(place)?))).collect()
    }

    /// Notes, at a place for a lock, that the locks of a file may be leased, through an open file.
    pub(crate) fn put_lock_lease(&self, place: usize, handle: u64, id: FileId) {
        let at = FIRST_LOCK + LOCK_WORDS * place;
        self.set(at, 0);
        let words = [handle, id.ino, id.generation];
        words.iter().enumerate().for_each(|(index, word)| self.set(at + 1 + index, *word));
        self.set(at, LOCK_LEASE);
    }

    /// Places, open files and files of such leases of the process before us.
    pub(crate) fn lock_leases(&self) -> Vec<(usize, u64, FileId)> {
        let lease = |place: usize| {
            let at = FIRST_LOCK + LOCK_WORDS * place;
            let id = FileId { ino: self.get(at + 2), generation: self.get(at + 3) };
            (self.get(at) == LOCK_LEASE).then(|| (place, self.get(at + 1), id))
        };
        (0..LOCKS_MAX).filter_map(lease).collect()
    }

    fn lock(&self, place: usize) -> Option<HeldLock> {
        let at = FIRST_LOCK + LOCK_WORDS * place;
        let word = |index: usize| self.get(at + index);
        let kind = match word(0) & 0xff {
            1 => LockKind::Shared,
            2 => LockKind::Exclusive,
            _ => return None,
        };
        let lock = Lock {
            family: if word(0) >> 8 == 1 { LockFamily::Flock } else { LockFamily::Posix },
            kind,
            range: LockRange { start: word(5), end: word(6) },
            owner: LockOwner { node: NodeId(word(9)), number: word(7) },
            pid: Pid(word(8) as u32),
        };
        let id = FileId { ino: word(2), generation: word(3) };
        Some(HeldLock { handle: word(1), id, how: OpenHow::new(word(4) as u32 as i32), lock })
    }
}

impl SessionMemory {
    /// Tickets that there is room for.
    pub(crate) fn tickets_max(&self) -> u32 {
        if self.fd.is_some() { TICKETS_MAX as u32 } else { 0 }
    }

    /// Places below this one may hold tickets.
    pub(crate) fn tickets_end(&self) -> u32 {
        (self.get(TICKETS_END) as u32).min(self.tickets_max())
    }

    /// Notes the ticket of an open file at this place, below [`SessionMemory::tickets_max`].
    pub(crate) fn put_ticket(&self, place: u32, handle: u64, ticket: Ticket) {
        let at = FIRST_TICKET + TICKET_WORDS * place as usize;
        let half = |from| u64::from_le_bytes(std::array::from_fn(|index| ticket.0[from + index]));
        self.set(at, 0);
        self.set(at + 1, half(0));
        self.set(at + 2, half(8));
        self.set(at, handle);
        self.word(TICKETS_END).fetch_max(u64::from(place) + 1, Ordering::Release);
    }

    pub(crate) fn remove_ticket(&self, place: u32) {
        self.set(FIRST_TICKET + TICKET_WORDS * place as usize, 0);
    }

    /// The ticket at this place and the number of its open file.
    pub(crate) fn ticket(&self, place: u32) -> Option<(u64, Ticket)> {
        let at = FIRST_TICKET + TICKET_WORDS * place as usize;
        let handle = self.get(at);
        let mut ticket = [0; Ticket::BYTES];
        ticket[..8].copy_from_slice(&self.get(at + 1).to_le_bytes());
        ticket[8..].copy_from_slice(&self.get(at + 2).to_le_bytes());
        (handle != 0).then_some((handle, Ticket(ticket)))
    }
}

/// Memory that nobody takes over has none of these.
impl SessionMemory {
    /// A lookup may open a file under this number. `place`: below [`OPEN_AHEAD_MAX`].
    pub(crate) fn set_open_ahead(&self, place: u32, handle: u64) {
        if self.fd.is_some() {
            self.set(FIRST_OPEN_AHEAD + place as usize, handle);
        }
    }

    /// The handle that is noted at this place; 0: nothing.
    pub(crate) fn open_ahead_handle(&self, place: u32) -> u64 {
        if self.fd.is_some() { self.get(FIRST_OPEN_AHEAD + place as usize) } else { 0 }
    }

    /// The file is closed, or used. Something else may be noted there since.
    pub(crate) fn forget_open_ahead(&self, place: u32, handle: u64) {
        if self.fd.is_some() {
            let word = self.word(FIRST_OPEN_AHEAD + place as usize);
            let _ = word.compare_exchange(handle, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Open files with two numbers that there is room for; none: nobody needs to know.
    pub(crate) fn aliases_max(&self) -> Option<u32> {
        self.fd.is_some().then_some(ALIASES_MAX as u32)
    }

    /// Places below this one may hold them.
    pub(crate) fn aliases_end(&self) -> u32 {
        let max = self.aliases_max().unwrap_or(0);
        if max == 0 { 0 } else { (self.get(ALIASES_END) as u32).min(max) }
    }

    /// Notes at this place that what `request` opened has the number `handle`.
    pub(crate) fn put_alias(&self, place: u32, request: u64, handle: u64) {
        let at = FIRST_ALIAS + 2 * place as usize;
        self.set(at, 0);
        self.set(at + 1, handle);
        self.set(at, request);
        self.word(ALIASES_END).fetch_max(u64::from(place) + 1, Ordering::Release);
    }

    pub(crate) fn remove_alias(&self, place: u32) {
        self.set(FIRST_ALIAS + 2 * place as usize, 0);
    }

    /// The request and the number at this place.
    pub(crate) fn alias(&self, place: u32) -> Option<(u64, u64)> {
        let at = FIRST_ALIAS + 2 * place as usize;
        let request = self.get(at);
        (request != 0).then(|| (request, self.get(at + 1)))
    }
}
