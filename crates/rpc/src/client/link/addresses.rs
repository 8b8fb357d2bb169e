//! The servers that can serve a session: one, or with failover the two of a slice, one of which does so.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use dray_fabric::Connect;

/// A server that has not taken a connection by then is not waited for.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// The same where another server may serve the session.
const CONNECT_MAX_OF_SEVERAL: Duration = Duration::from_secs(1);
/// A handshake that takes longer has failed.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// The same where another server may serve the session. A server whose process is stopped takes
/// connections.
const HANDSHAKE_MAX_OF_SEVERAL: Duration = Duration::from_secs(2);

/// Which of the servers of a session: counted from 0, in the order of its connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AddressIndex(usize);

/// The servers of a session, and which one served it last.
pub(crate) struct ServerAddresses {
    connector: Arc<dyn Connect>,
    serving: AtomicUsize,
    /// The one that is tried first.
    first: AtomicUsize,
    /// One has served it.
    met: AtomicBool,
}

impl ServerAddresses {
    pub(super) fn new(connector: Arc<dyn Connect>) -> ServerAddresses {
        let (serving, first) = (AtomicUsize::new(0), AtomicUsize::new(0));
        ServerAddresses { connector, serving, first, met: AtomicBool::new(false) }
    }

    /// Whether more than one server may serve the session.
    pub(super) fn are_several(&self) -> bool {
        self.connector.in_turn().len() > 1
    }

    /// All, from the one on that served the session last, or has begun to serve it.
    pub(super) fn round(&self) -> impl Iterator<Item = AddressIndex> + use<> {
        let first = self.first.load(Ordering::Relaxed);
        let count = self.connector.in_turn().len().max(1);
        (0..count).map(move |step| AddressIndex((first + step) % count))
    }

    pub(super) fn connector(&self, AddressIndex(index): AddressIndex) -> &dyn Connect {
        self.connector.in_turn().get(index).map_or(&*self.connector, |one| &**one)
    }

    /// The server of this address serves the session. True: another one did before.
    pub(super) fn welcomed(&self, AddressIndex(index): AddressIndex) -> bool {
        let before = self.serving.swap(index, Ordering::Relaxed);
        self.first.store(index, Ordering::Relaxed);
        self.met.swap(true, Ordering::Relaxed) && before != index
    }

    /// The server of this address serves the session now, as it says.
    pub(super) fn prefer(&self, AddressIndex(index): AddressIndex) {
        self.first.store(index, Ordering::Relaxed);
    }

    fn serving(&self) -> usize {
        self.serving.load(Ordering::Relaxed)
    }

    /// The server that served the session last, for people; all if none has done so.
    pub(crate) fn target(&self) -> String {
        match self.met.load(Ordering::Relaxed) {
            true => self.connector(AddressIndex(self.serving())).target(),
            false => self.connector.target(),
        }
    }

    pub(super) fn connect_max(&self) -> Duration {
        if self.are_several() { CONNECT_MAX_OF_SEVERAL } else { CONNECT_MAX }
    }

    pub(super) fn handshake_max(&self) -> Duration {
        if self.are_several() { HANDSHAKE_MAX_OF_SEVERAL } else { HANDSHAKE_MAX }
    }
}
