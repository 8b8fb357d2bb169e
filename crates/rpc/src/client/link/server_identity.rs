//! The server's statements about itself and about the session, and the effects when they change.

use std::sync::atomic::Ordering;
use std::time::Duration;

use dray_core::Op;

use super::Link;
use crate::client::holdings::locks::HeldLock;
use crate::client::leases::LeaseWish;
use crate::wire::{
    FEATURE_LEASES, FEATURE_LEASES_ON, FEATURE_LOCK_LEASES, FEATURE_LOOKUP_OPEN, FEATURE_ONE_WAY,
    FEATURE_SPLIT_READS, FEATURE_STAMPS, FEATURE_TICKETS, LATE_WRITES, ONE_USER, SQUASHES, Welcome,
    feature_of,
};

/// The features that opening at a lookup takes.
const OPEN_AHEAD: u64 = FEATURE_LOOKUP_OPEN | FEATURE_ONE_WAY;

/// The server's last statement about itself and about the session.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServerIdentity {
    pub(crate) session: u64,
    pub(super) secret: [u8; 16],
    pub(crate) instance: u64,
    /// The start of the server's machine, folded to one word; 0: unknown.
    pub(super) boot: u64,
    /// Whether answers to changes have stamps.
    pub(crate) stamps: bool,
    /// Whether the server gives tickets, and believes its own.
    pub(crate) tickets: bool,
    /// Whether the server opens at a lookup, and takes closes without an answer.
    pub(crate) opens_ahead: bool,
    /// Whether it says the versions of the parts of split reads.
    pub(crate) split_reads: bool,
    /// The server's features beside those that every server has.
    pub(super) features: u64,
    /// Whether all callers are one user at the server.
    pub(crate) one_user: bool,
    /// Whether some callers are other users there.
    pub(crate) squashes: bool,
    /// Whether it carries out writes after it has answered them.
    pub(crate) writes_late: bool,
    /// Times that the server had forgotten us.
    pub(crate) lost: u64,
}

impl ServerIdentity {
    /// Whether the server has an operation.
    pub(crate) fn has(&self, op: Op) -> bool {
        let feature = feature_of(op);
        self.features & feature == feature
    }

    /// The session state that a handshake begins with.
    pub(crate) fn session_state(&self) -> SessionState {
        SessionState { session: self.session, instance: self.instance }
    }
}

/// A session with one epoch of its server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SessionState {
    pub(crate) session: u64,
    pub(crate) instance: u64,
}

impl SessionState {
    pub(super) fn of(welcome: &Welcome) -> SessionState {
        SessionState { session: welcome.session, instance: welcome.instance }
    }
}

/// The changes that a welcome makes.
pub(super) struct WelcomeNews {
    /// The server has lost its memory of this session: the locks to reclaim.
    pub(super) forgotten: Option<Vec<HeldLock>>,
    /// The server's machine has lost its memory, too, and all changes that were not on media.
    pub(super) power_lost: bool,
    /// How often that has happened: of changes that this connection answers.
    pub(super) power_epoch: u64,
}

impl Link {
    /// Takes note of a welcome to a handshake that was begun with `asked`. None if another
    /// connection has been welcomed meanwhile and was offered something else. This connection would
    /// then lead to a server that is gone, or to a second session of this mount. Such a session has
    /// other locks and open files. The next handshake begins with what that one was offered.
    pub(super) fn welcomed(
        &self,
        welcome: &Welcome,
        features: u64,
        asked: SessionState,
    ) -> Option<WelcomeNews> {
        let mut known = self.server();
        let offered = SessionState::of(welcome);
        if known.session_state() != asked && known.session_state() != offered {
            return None;
        }
        let first = known.session == 0;
        // Of a process before us it counts where everything was reopened, not whom it has met.
        let forgotten = known.instance != welcome.instance || known.session != welcome.session;
        let reclaimed = known.session == welcome.session
            && self.reclaimed.load(Ordering::SeqCst) == welcome.instance;
        if known.session == 0 {
            self.slots.grant(welcome.slots);
        } else if known.session != welcome.session {
            known.lost += 1;
            self.slots.begin_anew(welcome.slots);
            log::warn!(
                "{} had forgotten this mount: open files are opened again, locks are lost, \
                 and changes that were under way end with an error",
                self.addresses.target()
            );
        }
        self.memory.set_export(&welcome.info);
        self.memory.set_session(welcome.session, &welcome.secret, welcome.instance);
        known.session = welcome.session;
        known.secret = welcome.secret;
        known.instance = welcome.instance;
        known.stamps = features & FEATURE_STAMPS != 0;
        known.tickets = features & FEATURE_TICKETS != 0;
        known.opens_ahead = features & OPEN_AHEAD == OPEN_AHEAD;
        known.split_reads = features & FEATURE_SPLIT_READS != 0;
        known.features = features;
        known.one_user = features & ONE_USER != 0;
        known.squashes = features & SQUASHES != 0;
        known.writes_late = features & LATE_WRITES != 0;
        self.met.send_replace(true);
        // First: until when it is believed is known as long as the former server is.
        let until = self.leases.believed_until();
        let term = term_of_leases(welcome, features, self.options.leases);
        if self.leases.welcomed(offered, welcome.lease_epoch, term) {
            self.kept.all_end(until);
        }
        self.held.lock_leases_are_given(features & FEATURE_LOCK_LEASES != 0);
        if first {
            self.memory.set_reestablished(welcome.instance);
        }
        let (before, boot) = (known.boot, fold(welcome.boot));
        known.boot = boot;
        // While the lock is held no other connection can come to another conclusion.
        let power_lost = !first && before != 0 && boot != 0 && before != boot;
        match power_lost {
            true => self.unsynced.server_lost_power(),
            // A process before us may have met this one, and have died before its replay was over.
            false if before != boot => self.memory.set_boot(boot),
            false => {}
        }
        // Before any connection sends again: a lock may be another client's by now.
        self.files.begin(offered);
        let forgotten = match forgotten && !first {
            true if reclaimed => {
                self.held.begin(offered);
                Some(Vec::new())
            }
            true => Some(self.held.suspend_all(offered)),
            false => {
                self.held.begin(offered);
                None
            }
        };
        // Later it may be that of a connection which has met the next server meanwhile.
        let power_epoch = self.unsynced.power_epoch();
        Some(WelcomeNews { forgotten, power_lost, power_epoch })
    }
}

impl Link {
    /// Nothing is to be replayed any more of what was sent before the server's machine was started.
    pub(crate) fn note_replayed(&self) {
        let known = self.server();
        self.memory.set_boot(known.boot);
    }
}

/// How long leases are valid without a further call; zero if the server leases nothing. Where writes
/// are carried out after they were answered, attributes change by themselves.
fn term_of_leases(welcome: &Welcome, features: u64, wish: LeaseWish) -> Duration {
    let needed = match wish {
        LeaseWish::No | LeaseWish::Yes { .. } => FEATURE_LEASES,
        LeaseWish::LeasedOn => FEATURE_LEASES | FEATURE_LEASES_ON,
    };
    let leases = features & needed == needed && features & LATE_WRITES == 0;
    Duration::from_millis(if leases { welcome.lease_term_ms.into() } else { 0 })
}

/// A boot id in one word; 0 stays 0.
fn fold(boot: u128) -> u64 {
    match (boot >> 64) as u64 ^ boot as u64 {
        0 if boot != 0 => 1,
        folded => folded,
    }
}
