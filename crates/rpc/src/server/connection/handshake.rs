//! The handshake: who the client is, which export it wants, which session it gets.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dray_core::{Errno, NodeId};
use dray_fabric::{Connection, Peer};
use dray_rt::random_bytes;

use super::{Beginning, ServerSink, Shared, Stage};
use crate::auth::{Key, Role, Transcript};
use crate::server::connection_limits::{HandshakeFault, HandshakePlace};
use crate::server::export::Export;
use crate::server::exports::not_open;
use crate::server::identities::CallerScope;
use crate::server::sabotage::Sabotage;
use crate::server::service::Inner;
use crate::server::session::ServerSession;
use crate::server::sessions::refused;
use crate::wire::{
    Auth, Challenge, FEATURE_CHANGED_FILES, FEATURE_LEASES, FEATURE_LEASES_ON, FEATURE_LOCK_LEASES,
    FEATURE_WRITE_LEASES, FEATURES, HandshakeError, Hello, LATE_WRITES, Malformed, ONE_USER, Proof,
    RECOVERING, Refused, SQUASHES, VERSION_MAX, VERSION_MIN, Welcome,
};

/// The newest version that both ends speak.
pub(super) fn agree((client_min, client_max): (u16, u16)) -> Result<u16, Refused> {
    let version = client_max.min(VERSION_MAX);
    if version >= VERSION_MIN.max(client_min) {
        return Ok(version);
    }
    Err(refused(
        Errno::EPROTONOSUPPORT,
        format!(
            "the client speaks protocol versions {client_min} to {client_max}, this server \
             {VERSION_MIN} to {VERSION_MAX}: bring both to neighbouring releases"
        ),
    ))
}

/// Without a key a machine vouches for its users by a port that ordinary ones may not use.
fn unprivileged(export: &str, peer: Peer) -> Refused {
    refused(
        Errno::EACCES,
        format!(
            "export `{export}` takes clients without a key from ports below 1024 only, which take \
             root, and not from {peer}: use a key at both ends (auth=psk:FILE; `dray key` makes \
             one), mount as root outside of containers and user namespaces, or have the server \
             export it `insecure`"
        ),
    )
}

/// The refusal of a client that places by another definition than `export`'s. The refusal gives the
/// definition.
fn misplaced(export: &Export, fingerprint: u64) -> Refused {
    let name = &export.name;
    let definition = export.definition.as_ref().map(|definition| definition.text.clone());
    let message = match (&definition, fingerprint) {
        (None, _) => format!(
            "export `{name}` is no projection any more, as which it was mounted: unmount, and mount \
             again"
        ),
        (Some(_), _) if export.definition_only && fingerprint == export.fingerprint() => format!(
            "projection `{name}` has failover, and this client does not know the slices of one: use a \
             newer dray to mount it"
        ),
        (Some(_), 0) => format!(
            "export `{name}` is a projection over several servers, whose definition this client does \
             not ask for: use a newer dray to mount it"
        ),
        (Some(_), _) => format!(
            "the definition of projection `{name}` has changed: unmount, and mount again; if it has \
             not, the servers have different definitions, and `dray status` shows the fingerprint \
             at each"
        ),
    };
    Refused { definition: definition.unwrap_or_default(), ..refused(Errno::EREMCHG, message) }
}

/// The export that the first message of a client asks for; none if the message is no greeting. The
/// message is unchecked. The name only selects the thread that serves the connection.
pub fn wanted_export(head: &[u8]) -> Option<String> {
    Hello::from_message(head).ok().map(|hello| hello.export)
}

/// A handshake half way.
pub(super) struct ChallengedPeer {
    hello: Hello,
    /// The hello as it came, which the proofs cover.
    message: Vec<u8>,
    nonce: [u8; 32],
    version: u16,
    features: u64,
    export: Arc<Export>,
}

impl ChallengedPeer {
    fn transcript<'a>(&'a self, wish: &'a [u8]) -> Transcript<'a> {
        Transcript {
            hello: &self.message,
            version: self.version,
            features: self.features,
            server_nonce: &self.nonce,
            wish,
        }
    }
}

impl ServerSink {
    pub(super) fn hello(&mut self, head: &[u8]) -> Result<(), HandshakeError> {
        let version = agree(Hello::versions(head)?).map_err(HandshakeError::Refused)?;
        let hello = Hello::from_message(head)?;
        if !self.has_place {
            return Err(HandshakeError::Refused(refused(
                Errno::EAGAIN,
                "the server has as many connections as it may, or as many of this address: come back \
                 later, or let it have more descriptors (LimitNOFILE, ulimit -n)",
            )));
        }
        let export = self.admit(&hello).map_err(HandshakeError::Refused)?;
        let mut nonce = [0; 32];
        random_bytes(&mut nonce);
        let recovering = export.recovery.running();
        let of_server = [
            (recovering, RECOVERING),
            (export.one_user, ONE_USER),
            (export.squashes, SQUASHES),
            (export.writes_late, LATE_WRITES),
        ];
        let of_server = of_server.iter().filter(|(is_so, _)| *is_so).map(|(_, bit)| bit);
        let of_leases = FEATURE_LEASES | FEATURE_CHANGED_FILES | FEATURE_LEASES_ON;
        let leases = if export.lease_table.is_some() { 0 } else { of_leases };
        let keeps = export.lease_table.as_ref().is_some_and(|table| table.leases_writes());
        let leases = leases | if keeps { 0 } else { FEATURE_WRITE_LEASES };
        let locks = export.lease_table.as_ref().is_some_and(|table| table.locks.are_given());
        let leases = leases | if locks { 0 } else { FEATURE_LOCK_LEASES };
        let features = of_server.fold(hello.features & FEATURES & !leases, |all, bit| all | bit);
        let message = head.to_vec();
        let challenged = ChallengedPeer { hello, message, nonce, version, features, export };
        let key = self.server.options.key.as_ref();
        let seen = challenged.transcript(&[]);
        let proof = key.map_or([0; 32], |key| key.prove(Role::Server, seen));
        self.say(&Challenge { version, features, nonce, proof }.message());
        self.stage = Stage::ChallengedPeer(Box::new(challenged));
        Ok(())
    }

    /// The export that a client asks for, if it may ask for it in this way.
    fn admit(&mut self, hello: &Hello) -> Result<Arc<Export>, Refused> {
        let wanted = if self.server.options.key.is_some() { Auth::Psk } else { Auth::None };
        if hello.auth != wanted {
            return Err(refused(
                Errno::EKEYREJECTED,
                match wanted {
                    Auth::Psk => {
                        "the server wants a shared key: mount with -o auth=psk:FILE, survey with \
                         --auth psk:FILE"
                    }
                    _ => {
                        "the server has no key, and the client wants proof of one: start the server \
                         with --auth psk:FILE, or say auth=none here"
                    }
                },
            ));
        }
        let forwarding = &self.server.options.forwarding;
        forwarding.check(&hello.export, hello.node)?;
        let export = self.server.exports.get(&hello.export).inspect_err(|refused| {
            if refused.errno == Errno::EAGAIN.raw() as u16 {
                forwarding.note_waiting(&hello.export, hello.node);
            }
        })?;
        if !export.allows(self.connection.peer()) {
            return Err(refused(
                Errno::EACCES,
                format!(
                    "export `{}` is not open to {}: its `allow` at the server says to whom",
                    hello.export,
                    self.connection.peer()
                ),
            ));
        }
        self.identities.speaks_for(match self.connection.peer() {
            peer if wanted == Auth::Psk || export.insecure || peer.is_privileged() => {
                CallerScope::Anybody
            }
            Peer::User(uid, gid) => CallerScope::only(uid, gid, self.connection.peer_groups()),
            peer => return Err(unprivileged(&hello.export, peer)),
        });
        Ok(export)
    }

    pub(super) fn proof(&mut self, head: &[u8]) -> Result<(), HandshakeError> {
        let proof = Proof::from_message(head)?;
        let Stage::ChallengedPeer(challenged) = &self.stage else {
            return Err(Malformed("a proof without a challenge").into());
        };
        let wish = proof.wish();
        let seen = challenged.transcript(&wish);
        if let Some(key) = &self.server.options.key
            && !key.verify(Role::Client, seen, &proof.proof)
        {
            return Err(HandshakeError::Refused(refused(
                Errno::EKEYREJECTED,
                "the client has another key than this server: compare the key files at both ends",
            )));
        }
        let ChallengedPeer { hello, export, .. } = &**challenged;
        let right = |secret: &[u8; 16]| {
            Key::of_session(secret).verify(Role::Session, seen, &proof.session_proof)
        };
        let known = self.server.resume(proof.session, export, right);
        let known = known.map_err(HandshakeError::Refused)?;
        if proof.definition != export.fingerprint() || export.definition_only {
            let refused = misplaced(export, proof.definition);
            // The client does not come back, and others need not wait for what it had.
            known.map(|session| self.server.end(session));
            self.only_asked = proof.definition == 0;
            return Err(HandshakeError::Refused(refused));
        }
        if known.is_none() && export.is_lost() {
            // The client has a session, which is taken over when the export is open again.
            return Err(HandshakeError::Refused(not_open(&export.name)));
        }
        let features = hello.features;
        let entrance = Entrance {
            server: self.server.clone(),
            connection: self.connection.clone(),
            number: self.number,
            shared: self.shared.clone(),
            handshake_place: self.handshake_place.take(),
        };
        let Some(session) = known else {
            let who = (hello.node, hello.host.clone(), features);
            let (export, beginning) = (export.clone(), Arc::<Beginning>::default());
            self.stage = Stage::Beginning(beginning.clone());
            dray_rt::spawn(entrance.begin(who, export, beginning));
            return Ok(());
        };
        self.server.count_session(&session, self.connection.peer());
        if !self.server.options.broken().is(Sabotage::ConnectionFence) {
            session.replace(proof.replaces);
        }
        session.set_features(features);
        if !session.keeps_writes() {
            session.export.kept_writes.finish(session.id); // it had kept nothing
        }
        entrance.welcome(&session, true);
        self.stage = Stage::Serving(session);
        Ok(())
    }

    pub(super) fn refuse(&mut self, error: HandshakeError) -> io::Error {
        match error {
            HandshakeError::Refused(refused) => {
                self.say(&Refused::refusal(&refused));
                self.refused = Some(refused.errno);
                io::Error::new(io::ErrorKind::PermissionDenied, refused.message)
            }
            HandshakeError::Malformed(malformed) => malformed.into(),
        }
    }
}

/// The things that a connection takes with it into a session.
struct Entrance {
    server: Arc<Inner>,
    connection: Arc<dyn Connection>,
    number: u64,
    shared: Arc<Shared>,
    /// The connection counts as one in its handshake until then.
    handshake_place: Option<HandshakePlace>,
}

impl Entrance {
    /// Begins a session. That waits for media, and so for nobody else's sake on this thread.
    async fn begin(
        self,
        (node, host, features): (NodeId, String, u64),
        export: Arc<Export>,
        beginning: Arc<Beginning>,
    ) {
        let peer = self.connection.peer();
        let session = match self.server.new_session(node, (&host, peer), export).await {
            Ok(session) => session,
            Err(refused) => {
                if self.server.limits.complains(peer, HandshakeFault::Challenged(refused.errno)) {
                    let why = &refused.message;
                    log::warn!("connection from {peer} ended in its handshake: {why}");
                }
                // A broken connection hears of nothing.
                let _ = self.connection.send(&Refused::refusal(&refused), None);
                return self.connection.close();
            }
        };
        if session.export.is_lost() {
            self.connection.close(); // it comes again
        }
        if beginning.gone.load(Ordering::SeqCst) || session.export.is_lost() {
            drop(self.server.end(session)); // its client never heard of it
            return;
        }
        session.set_features(features);
        let _ = beginning.session.set(session.clone()); // nobody else does
        self.welcome(&session, false);
    }

    fn welcome(self, session: &Arc<ServerSession>, resumed: bool) {
        session.connected(self.number, self.connection.clone());
        // Behind that: a session whose leases end meanwhile loses this connection, too.
        let holder = session.may_hold_leases();
        let lease_term = holder.and(session.export.lease_table.as_ref()).map(|table| table.term());
        let options = &self.server.options;
        let welcome = Welcome {
            session: session.id,
            secret: session.secret,
            resumed,
            connection: self.number,
            instance: session.export.instance,
            boot: if options.broken().is(Sabotage::PowerLossNotice) { 1 } else { options.boot },
            calls_max: options.calls_max,
            slots: session.slots.count(),
            lease_ms: options.lease.as_millis().min(u128::from(u32::MAX)) as u32,
            info: session.export.fs.info().clone(),
            lease_term_ms: lease_term.map_or(0, |term| term.as_millis() as u32),
            lease_epoch: holder.map_or(0, |holder| holder.epoch()),
        };
        let _ = self.connection.send(&welcome.message(), None); // a broken one ends by itself
        if let Some(holder) = holder {
            holder.resend(&*self.connection);
        }
        self.shared.lock().serving = true;
        drop(self.handshake_place);
    }
}
