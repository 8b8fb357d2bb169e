//! The refusals of clients that have, or whose address has, their share of something already.

use std::sync::atomic::{AtomicU64, Ordering};

use dray_core::{Errno, Error, Shortage};

use crate::server::log_throttle::LogThrottle;
use crate::server::session::ServerSession;

/// The refusals of one kind of thing.
#[derive(Default)]
pub(crate) struct Refusals {
    count: AtomicU64,
    said: LogThrottle,
}

impl Refusals {
    /// Counts one refusal more.
    pub(crate) fn counts(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// How many there have been.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Counts a call of `session` that was refused with `error`, and logs at intervals.
    pub(crate) fn of(&self, session: &ServerSession, error: &Error) {
        self.counts();
        let (host, id, export) = (&session.host, session.id, &session.export.name);
        self.said.say(|more| {
            log::warn!(
                "client {host} (session {id:x}) is refused by export `{export}`: {error}{more}"
            )
        });
    }
}

/// The error of an opening for which there is no room.
pub(crate) fn no_room_for_a_file(shortage: Shortage) -> Error {
    Error::new(Errno::ENFILE).because(match shortage {
        Shortage::None => "the export has as many open files as it may",
        Shortage::Share => "this client has its share of the files that may be open in the export",
        Shortage::AddressShare => {
            "the clients of this address have their share of the files that may be open in the export"
        }
    })
}

/// The error of a lock when there is no room for its owner.
pub(crate) fn no_room_for_an_owner(shortage: Shortage) -> Error {
    Error::new(Errno::ENOLCK).because(match shortage {
        Shortage::None => "the export has as many owners of locks as it may",
        Shortage::Share => "this client has its share of the owners of locks in the export",
        Shortage::AddressShare => {
            "the clients of this address have their share of the owners of locks in the export"
        }
    })
}
