//! The tickets of open files: noted for a later process of this mount, and used to open files
//! again.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use dray_core::{AtOpen, Context, Errno, FileId, IdMap, OpenHow, Result};

use crate::client::channel::{Channel, OutgoingCall, error_of};
use crate::client::memory::SessionMemory;
use crate::wire::{Call, Input, Ticket};

/// A ticket and where it is noted, if there was room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoredTicket {
    pub(crate) ticket: Ticket,
    place: Option<u32>,
}

/// The places for tickets in a session's memory.
pub(crate) struct TicketMemory {
    memory: Arc<SessionMemory>,
    free: Mutex<Vec<u32>>,
    /// Places from here on have never been used.
    end: AtomicU32,
}

impl TicketMemory {
    /// With what is noted there, by the number of the open file.
    pub(crate) fn new(memory: Arc<SessionMemory>) -> (TicketMemory, IdMap<u64, StoredTicket>) {
        let (mut noted, mut free) = (IdMap::default(), Vec::new());
        let end = memory.tickets_end();
        for place in 0..end {
            match memory.ticket(place) {
                Some((handle, ticket)) => {
                    noted.insert(handle, StoredTicket { ticket, place: Some(place) });
                }
                None => free.push(place),
            }
        }
        (TicketMemory { memory, free: Mutex::new(free), end: AtomicU32::new(end) }, noted)
    }

    pub(crate) fn note(&self, handle: u64, ticket: Ticket) -> StoredTicket {
        let freed = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let max = self.memory.tickets_max();
        let next = || {
            self.end.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |end| {
                (end < max).then_some(end + 1)
            })
        };
        let place = freed.or_else(|| next().ok());
        if let Some(place) = place {
            self.memory.put_ticket(place, handle, ticket);
        }
        StoredTicket { ticket, place }
    }

    pub(crate) fn forget(&self, noted: StoredTicket) {
        if let Some(place) = noted.place {
            self.memory.remove_ticket(place);
            self.free.lock().unwrap_or_else(PoisonError::into_inner).push(place);
        }
    }
}

/// A file to be opened again.
pub(crate) struct ReopenRequest {
    pub(crate) id: FileId,
    pub(crate) how: OpenHow,
    pub(crate) handle: u64,
    pub(crate) ticket: Option<Ticket>,
}

/// Opens a file again at a server that has forgotten it, in the name of `cx`. The rights of `cx`
/// decide where there is no ticket to show, or where the ticket has run out. Answers a ticket for
/// the next time. Errors: those of opening.
pub(crate) async fn reopen(
    channel: &Channel,
    cx: &Context,
    file: ReopenRequest,
) -> Result<Option<Ticket>> {
    let ReopenRequest { id, how, handle, ticket } = file;
    if let Some(ticket) = ticket {
        let opened = ask(channel, cx, Call::Reopen { id, how, handle, ticket }).await;
        // An earlier version's server knows nothing of it.
        let of_no_use = |errno| matches!(errno, Errno::ENOTSUP | Errno::EACCES);
        if !opened.as_ref().is_err_and(|error| of_no_use(error.errno())) {
            return opened;
        }
    }
    ask(channel, cx, Call::Open { id, how, handle, again: true }).await
}

async fn ask(channel: &Channel, cx: &Context, call: Call<'_>) -> Result<Option<Ticket>> {
    let decode = |bytes: &[u8]| Input::whole::<Option<AtOpen>>(bytes).map(drop);
    let answer = channel.call(&mut OutgoingCall::of(cx, &call), decode).await;
    answer.map(|answer| answer.made.ticket).map_err(error_of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_finds_the_tickets_of_what_is_open() {
        let memory = Arc::new(SessionMemory::create_memfd().unwrap());
        let (tickets, noted) = TicketMemory::new(memory.clone());
        assert!(noted.is_empty());
        let ticket = |number: u8| Ticket([number; 16]);
        let all: Vec<_> = (1..=9).map(|one| tickets.note(u64::from(one), ticket(one))).collect();
        [0, 4].iter().for_each(|closed: &usize| tickets.forget(all[*closed]));
        tickets.note(20, ticket(20)); // where one was
        let (next, noted) = TicketMemory::new(memory);
        let mut handles: Vec<_> = noted.keys().copied().collect();
        handles.sort_unstable();
        assert_eq!(handles, [2, 3, 4, 6, 7, 8, 9, 20]);
        assert!(noted.iter().all(|(handle, noted)| noted.ticket == ticket(*handle as u8)));
        let places = [next.note(30, ticket(30)).place, next.note(31, ticket(31)).place];
        assert_eq!(places[1], Some(9), "behind all others");
        assert!(places[0].is_some_and(|place| place < 9), "where one was");
    }

    #[test]
    fn without_room_a_ticket_is_our_own() {
        let (tickets, _) = TicketMemory::new(Arc::new(SessionMemory::heap()));
        let noted = tickets.note(1, Ticket([1; 16]));
        assert_eq!((noted.ticket, noted.place), (Ticket([1; 16]), None));
    }
}
