//! Answers to calls, as they are put together.

use dray_core::{Buf, Errno, Error};
use dray_fabric::Charge;

use crate::wire::{Input, ReplyHead, Stamp, Ticket, Wire};

/// An answer, complete but for its tag.
pub(super) struct Reply {
    pub(super) message: Vec<u8>,
    pub(super) data: Option<Buf>,
}

impl Reply {
    pub(super) fn success<'a>(value: &impl Wire<'a>) -> Reply {
        let mut message = Vec::with_capacity(192); // an entry fits
        ReplyHead::success(0).put_message(&mut message);
        value.put(&mut message);
        Reply { message, data: None }
    }

    pub(super) fn with_data(data: Buf) -> Reply {
        Reply { data: Some(data), ..Reply::success(&()) }
    }

    /// It counts until it has been sent.
    pub(super) fn counted(self, charge: Charge) -> Reply {
        Reply { data: Some(charge.beside().freeze()), ..self }
    }

    /// With what its client can show to a later life of the server.
    pub(super) fn with_ticket(mut self, ticket: Option<Ticket>) -> Reply {
        if let Some(ticket) = ticket {
            ReplyHead::set_ticket(&mut self.message, ticket);
        }
        self
    }

    /// Of an opening, whose answer says that, too.
    pub(super) fn with_times_past(mut self, past: Option<bool>) -> Reply {
        if let Some(past) = past {
            ReplyHead::set_times_past(&mut self.message, past);
        }
        self
    }

    /// Whether the call was carried out.
    pub(super) fn is_success(&self) -> bool {
        let head = ReplyHead::get_message(&mut Input(&self.message));
        head.is_ok_and(|head| head.errno == 0)
    }

    /// Adds a stamp.
    pub(super) fn stamp(&mut self, stamp: Stamp) {
        ReplyHead::set_stamp(&mut self.message, stamp);
    }

    pub(super) fn failure(error: &Error) -> Reply {
        let mut message = Vec::new();
        ReplyHead::put_failure(0, error, &mut message);
        Reply { message, data: None }
    }

    /// The error that it carries.
    pub(super) fn error(&self) -> Option<Error> {
        ReplyHead::get_message(&mut Input(&self.message)).ok()?.error()
    }

    pub(super) fn replayed(message: Vec<u8>) -> Reply {
        Reply { message, data: None }
    }

    pub(super) fn unknown_handle() -> Reply {
        let head = ReplyHead {
            flags: ReplyHead::UNKNOWN_HANDLE,
            ..ReplyHead::failure(0, &Error::retry(Errno::EBADF))
        };
        let mut message = Vec::new();
        head.put_message(&mut message);
        Reply { message, data: None }
    }
}
