//! Connections: how many there may be, and how many of them may be without a finished handshake.
//! The module also limits how often the log says that a handshake failed.
//!
//! Each takes a descriptor, which the files of the exports need as well. Anybody who gets to the
//! port can make a connection. So connections in their handshake have bounds of their own, in all
//! and for each address. A scan of ports does not fill the log. Connections are counted from their
//! beginning on, before anything is read. A client that finds all places taken gets a refusal in
//! its handshake. The number of such handshakes is bounded, too.
//!
//! An address may have as many connections and sessions as are left for all others. So no machine
//! can take the last ([`dray_core::Shares`]).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::ClientAddress;
use dray_fabric::Peer;
use dray_rt::Instant;

use crate::server::refusals::Refusals;

/// Connections in their handshake at a time, where there may be many connections; else a
/// quarter of these.
const HANDSHAKES_MAX: usize = 1024;
/// The part of them that one address may have.
const PARTS: usize = 8;
/// However few there may be, so many of one address: what one mount makes.
const OF_ONE_MIN: usize = 4;
/// Failures of one kind from one address are logged once in this time.
const QUIET: Duration = Duration::from_secs(60);
/// Failures remembered as having been complained of.
const COMPLAINTS_MAX: usize = 1024;

pub(crate) struct ConnectionLimits {
    connections_max: usize,
    sessions_max: usize,
    state: Mutex<State>,
    pub(crate) refused_connections: Refusals,
    pub(crate) refused_sessions: Refusals,
}

#[derive(Default)]
struct State {
    connections: usize,
    /// The same by address.
    connections_of: BTreeMap<ClientAddress, usize>,
    handshakes: BTreeMap<ClientAddress, usize>,
    handshakes_all: usize,
    /// Sessions.
    sessions_of: BTreeMap<ClientAddress, usize>,
    sessions_all: usize,
    complaints: BTreeMap<(ClientAddress, HandshakeFault), Instant>,
    /// The time when the log last said that there are too many connections in all.
    crowded: Option<Instant>,
}

/// The peer that has too many connections in their handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overload {
    /// All together.
    Everybody,
    /// The address of the newest one.
    OneAddress,
}

/// The fault of a connection. A message about one fault does not hide another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum HandshakeFault {
    /// The connection's address has too many connections.
    Overload,
    /// The connection is no client's, or says nothing.
    Greeting,
    /// The peer was refused at its greeting, with this error number.
    Greeted(u16),
    /// The peer was refused, with this error number, or gave up after the server's proof.
    Challenged(u16),
}

/// A connection, as it is counted.
pub(crate) struct ConnectionPlace {
    limits: Arc<ConnectionLimits>,
    who: ClientAddress,
}

/// A connection in its handshake, as it is counted.
pub(crate) struct HandshakePlace {
    limits: Arc<ConnectionLimits>,
    who: ClientAddress,
}

/// A session, as it is counted among those of its address.
pub(crate) struct SessionPlace {
    limits: Arc<ConnectionLimits>,
    who: ClientAddress,
}

impl SessionPlace {
    pub(crate) fn address(&self) -> ClientAddress {
        self.who
    }
}

impl ConnectionLimits {
    /// Lets in `connections_max` at a time, which have `sessions_max` sessions.
    pub(crate) fn new(connections_max: usize, sessions_max: usize) -> ConnectionLimits {
        ConnectionLimits {
            connections_max,
            sessions_max,
            state: Mutex::default(),
            refused_connections: Refusals::default(),
            refused_sessions: Refusals::default(),
        }
    }

    fn handshakes_max(&self) -> usize {
        HANDSHAKES_MAX.min(self.connections_max / 4)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a connection begin its handshake, if there are not too many. Without a place for
    /// its connection_place it is to be refused there.
    pub(crate) fn enter(
        self: &Arc<ConnectionLimits>,
        peer: Peer,
    ) -> Result<(Option<ConnectionPlace>, HandshakePlace), Overload> {
        let (who, handshakes_max) = (peer.address(), self.handshakes_max());
        let mut state = self.lock();
        let of_this = state.handshakes.get(&who).copied().unwrap_or(0);
        if state.handshakes_all >= handshakes_max {
            return Err(Overload::Everybody);
        }
        if of_this >= (handshakes_max / PARTS).max(OF_ONE_MIN) {
            return Err(Overload::OneAddress);
        }
        let connections_of = state.connections_of.get(&who).copied().unwrap_or(0);
        let free = self.connections_max.saturating_sub(state.connections);
        let connection_place = (free > 0 && connections_of < free.max(OF_ONE_MIN)).then(|| {
            state.connections += 1;
            state.connections_of.insert(who, connections_of + 1);
            ConnectionPlace { limits: self.clone(), who }
        });
        if connection_place.is_none() {
            self.refused_connections.counts();
        }
        state.handshakes_all += 1;
        state.handshakes.insert(who, of_this + 1);
        Ok((connection_place, HandshakePlace { limits: self.clone(), who }))
    }

    /// Counts a session of `peer`, unless there are `of_one_max` of its address, or as many as
    /// there are left for others. The `known` sessions are those that there are, also of clients
    /// that have not come back yet. Errors: how many its address has.
    pub(crate) fn settle(
        self: &Arc<ConnectionLimits>,
        peer: Peer,
        (of_one_max, known): (usize, usize),
    ) -> Result<SessionPlace, usize> {
        let who = peer.address();
        let mut state = self.lock();
        let of_this = state.sessions_of.get(&who).copied().unwrap_or(0);
        let free = self.sessions_max.saturating_sub(known.max(state.sessions_all));
        if of_this >= of_one_max.min(free.max(1)) {
            self.refused_sessions.counts();
            return Err(of_this);
        }
        Ok(self.moves_in(&mut state, who))
    }

    /// Counts a session of `peer` that there is already.
    pub(crate) fn count_session(self: &Arc<ConnectionLimits>, peer: Peer) -> SessionPlace {
        self.moves_in(&mut self.lock(), peer.address())
    }

    fn moves_in(
        self: &Arc<ConnectionLimits>,
        state: &mut State,
        who: ClientAddress,
    ) -> SessionPlace {
        *state.sessions_of.entry(who).or_default() += 1;
        state.sessions_all += 1;
        SessionPlace { limits: self.clone(), who }
    }

    /// Whether it is worth a line for people that `peer` was turned away. Of thousands that come at
    /// once it is not worth one each.
    pub(crate) fn complains_of(&self, crowd: Overload, peer: Peer) -> bool {
        match crowd {
            Overload::OneAddress => self.complains(peer, HandshakeFault::Overload),
            Overload::Everybody => {
                let mut state = self.lock();
                let tells = state.crowded.is_none_or(|last| last.elapsed() >= QUIET);
                if tells {
                    state.crowded = Some(dray_rt::now());
                }
                tells
            }
        }
    }

    /// Whether a failure of `peer` is worth a line for people: the first of its kind in a while is.
    pub(crate) fn complains(&self, peer: Peer, fault: HandshakeFault) -> bool {
        let (key, now) = ((peer.address(), fault), dray_rt::now());
        let mut state = self.lock();
        if state.complaints.get(&key).is_some_and(|last| last.elapsed() < QUIET) {
            return false;
        }
        if state.complaints.len() >= COMPLAINTS_MAX {
            state.complaints.retain(|_, last| last.elapsed() < QUIET);
        }
        if state.complaints.len() >= COMPLAINTS_MAX {
            return false; // a thousand addresses in a minute: one line more says nothing new
        }
        state.complaints.insert(key, now);
        true
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        let mut state = self.limits.lock();
        state.connections = state.connections.saturating_sub(1);
        give_back(&mut state.connections_of, self.who);
    }
}

impl Drop for SessionPlace {
    fn drop(&mut self) {
        let mut state = self.limits.lock();
        state.sessions_all = state.sessions_all.saturating_sub(1);
        give_back(&mut state.sessions_of, self.who);
    }
}

/// Counts one connection less of `who`.
fn give_back(counts: &mut BTreeMap<ClientAddress, usize>, who: ClientAddress) {
    if let Some(count) = counts.get_mut(&who) {
        *count = count.saturating_sub(1);
        if *count == 0 {
            counts.remove(&who);
        }
    }
}

impl Drop for HandshakePlace {
    fn drop(&mut self) {
        let mut state = self.limits.lock();
        state.handshakes_all = state.handshakes_all.saturating_sub(1);
        give_back(&mut state.handshakes, self.who);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(last: u8) -> Peer {
        Peer::Ip(([10, 0, 0, last], 700).into())
    }

    // proves: P126
    #[test]
    fn one_address_does_not_keep_the_others_out() {
        let limits = Arc::new(ConnectionLimits::new(100_000, 10));
        let crowd: Vec<_> = std::iter::from_fn(|| limits.enter(peer(1)).ok()).collect();
        assert_eq!(crowd.len(), HANDSHAKES_MAX / PARTS);
        assert_eq!(limits.enter(peer(1)).err(), Some(Overload::OneAddress));
        assert!(limits.enter(peer(2)).is_ok() && limits.enter(Peer::Local).is_ok());
        drop(crowd);
        assert!(limits.enter(peer(1)).is_ok());
        let all: Vec<_> =
            (0..=255).cycle().map_while(|last| limits.enter(peer(last)).ok()).collect();
        assert_eq!(all.len(), HANDSHAKES_MAX);
        assert_eq!(limits.enter(peer(1)).err(), Some(Overload::Everybody));
        drop(all);
        assert!(limits.lock().handshakes.is_empty() && limits.lock().connections == 0);
    }

    // proves: P126
    #[test]
    fn one_address_has_so_many_sessions_and_no_more() {
        let limits = Arc::new(ConnectionLimits::new(100, 100));
        let settle = |peer| limits.settle(peer, (3, 0));
        let first: Vec<_> = std::iter::from_fn(|| settle(peer(1)).ok()).collect();
        assert_eq!((first.len(), settle(peer(1)).err()), (3, Some(3)));
        assert!(settle(peer(2)).is_ok() && settle(Peer::Local).is_ok());
        drop(limits.count_session(peer(1))); // it was there before a restart
        drop(first);
        assert!(settle(peer(1)).is_ok());
        assert!(limits.lock().sessions_of.is_empty() && limits.lock().sessions_all == 0);
    }

    /// Sixteen addresses filled the server, and one host has any number of those of IPv6.
    // proves: P127
    #[test]
    fn no_address_and_no_network_of_a_host_takes_the_last_session_or_connection() {
        let host = |network: u16, host: u16| {
            let address = std::net::Ipv6Addr::from([0xfd00, 0, 0, network, 0, 0, 0, host]);
            Peer::Ip((address, 700).into())
        };
        let limits = Arc::new(ConnectionLimits::new(100, 100));
        let mut hosts = 0..;
        let mut all_of = |network| -> Vec<_> {
            let next = |host_of| limits.settle(host(network, host_of), (1000, 0)).ok();
            hosts.by_ref().map_while(next).collect()
        };
        let (one, other) = (all_of(1), all_of(2));
        assert_eq!((one.len(), other.len()), (50, 25));
        assert!(limits.settle(peer(1), (1000, 0)).is_ok());
        assert_eq!(
            limits.settle(peer(1), (1000, 99)).map(drop),
            Ok(()),
            "the last is a newcomer's"
        );
        let mut connections_of = Vec::new();
        while let Ok((Some(connection_place), _)) = limits.enter(host(1, 1)) {
            connections_of.push(connection_place);
        }
        assert_eq!(connections_of.len(), 50);
        assert!(limits.enter(host(2, 1)).unwrap().0.is_some());
        assert_eq!((limits.refused_sessions.count(), limits.refused_connections.count()), (2, 1));
    }

    // proves: P126
    #[test]
    fn there_are_as_many_connections_as_there_may_be() {
        let limits = Arc::new(ConnectionLimits::new(100, 100));
        // Each shakes hands at once, so that it is a handshake_place no more.
        let enter = |last| limits.enter(peer(last)).unwrap().0;
        let mut connections_of: Vec<_> = (1..=100).map_while(enter).collect();
        assert_eq!(connections_of.len(), 100);
        // Clients without a place get a refusal; their number is bounded.
        let turned_away: Vec<_> = std::iter::from_fn(|| limits.enter(peer(1)).ok()).collect();
        assert_eq!(turned_away.len(), OF_ONE_MIN);
        assert!(turned_away.iter().all(|(connection_place, _)| connection_place.is_none()));
        drop(turned_away);
        connections_of.pop();
        assert!(limits.enter(peer(1)).unwrap().0.is_some());
    }

    // proves: P63
    #[test]
    fn failures_of_one_address_are_said_once_a_minute() {
        let mut executor =
            dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 1 }).unwrap();
        executor.block_on(async {
            let limits = ConnectionLimits::new(10, 10);
            let refused = |last, fault| limits.complains(peer(last), fault);
            assert!(
                refused(1, HandshakeFault::Greeted(1)) && !refused(1, HandshakeFault::Greeted(1))
            );
            assert!(refused(2, HandshakeFault::Greeted(1)));
            // A later fault for another reason was not logged: a wrong key behind none.
            assert!(
                refused(1, HandshakeFault::Challenged(1)) && refused(1, HandshakeFault::Greeted(2))
            );
            let crowds =
                (0..=255).filter(|last| limits.complains_of(Overload::Everybody, peer(*last)));
            assert_eq!(crowds.count(), 1, "one line for all of them");
            dray_rt::sleep(QUIET).await;
            assert!(
                refused(1, HandshakeFault::Overload)
                    && limits.complains_of(Overload::Everybody, peer(1))
            );
            assert!(!limits.complains_of(Overload::OneAddress, peer(1)));
            for last in 0..=255 {
                (0..8).for_each(|errno| _ = refused(last, HandshakeFault::Greeted(errno)));
            }
            assert!(limits.lock().complaints.len() <= COMPLAINTS_MAX);
        });
    }
}
