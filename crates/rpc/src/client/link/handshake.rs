//! The messages that one connection receives: the handshake, then the answers to calls.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context as TaskContext, Poll};

use dray_core::{BufMut, Errno, FsInfo};
use dray_fabric::{Connection, Sink};
use dray_rt::random_bytes;
use dray_rt::sync::oneshot;

use super::addresses::AddressIndex;
use super::connecting::key_of;
use super::reestablish::Reestablish;
use super::server_identity::{ServerIdentity, SessionState, WelcomeNews};
use super::{Link, ServerEnd};
use crate::auth::{Key, Role, Transcript};
use crate::client::channel::{Channel, ConnectionEpoch, ReplyReceiver};
use crate::client::connect_error::ConnectError;
use crate::client::durability::SyncedFor;
use crate::client::leases::LeaseWish;
use crate::client::replay::Replay;
use crate::client::session::ClientOptions;
use crate::wire::{
    Auth, Challenge, FEATURE_CHANGED_FILES, FEATURE_CHANGES, FEATURE_LEASES, FEATURE_LEASES_ON,
    FEATURE_LOCK_LEASES, FEATURE_ONE_WAY, FEATURE_PROBES, FEATURE_STAMPS, FEATURE_WRITE_LEASES,
    FEATURES, HandshakeError, Hello, Input, Kind, Malformed, NotifyHead, ONE_USER, Proof,
    RECOVERING, Refused, VERSION_MAX, VERSION_MIN, Welcome, peek_kind,
};

/// How a handshake ended.
pub(super) type HandshakeOutcome = Result<FsInfo, ConnectError>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Begin,
    Challenged,
    Serving,
    /// We did not take what was offered, and wait for the end.
    Declined,
}

/// Receives on one connection: the handshake first, then the channel's answers.
pub(super) struct LinkSink {
    link: Arc<Link>,
    channel: Arc<Channel>,
    connection: Arc<dyn Connection>,
    /// Which of the session's servers it leads to.
    address: AddressIndex,
    stage: Stage,
    features: u64,
    /// The state of server and session, as we knew it when we asked for the session.
    asked: SessionState,
    /// The first message; the proofs cover it.
    hello: Vec<u8>,
    /// The number of this connection at the server. Before it is known, that of the connection that
    /// it replaces.
    pub(super) number: u64,
    /// Dropped when the handshake has come to an end: then its watcher ends, too.
    settled: Option<oneshot::Sender<()>>,
    pub(super) failure: Option<ConnectError>,
    /// A call was answered.
    pub(super) useful: bool,
    /// How often the server's machine had lost power when the connection was welcomed.
    power_epoch: u64,
    pub(super) tell: Option<oneshot::Sender<HandshakeOutcome>>,
    receiver: ReplyReceiver,
}

impl Link {
    /// The first message on a connection.
    pub(super) fn hello(&self, nonce: [u8; 32]) -> Hello {
        let options = &self.options;
        Hello {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            features: FEATURES & !unwanted(options),
            auth: if options.key.is_some() { Auth::Psk } else { Auth::None },
            nonce,
            export: options.export.clone(),
            node: self.node,
            host: options.host.clone(),
            software: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

impl LinkSink {
    /// `replaces`: the number of the connection before it at the server.
    pub(super) fn new(
        link: Arc<Link>,
        channel: Arc<Channel>,
        (connection, address): (Arc<dyn Connection>, AddressIndex),
        replaces: u64,
        tell: Option<oneshot::Sender<HandshakeOutcome>>,
    ) -> LinkSink {
        LinkSink {
            link,
            receiver: ReplyReceiver(channel.clone()),
            channel,
            connection,
            address,
            stage: Stage::Begin,
            features: 0,
            asked: SessionState::default(),
            hello: Vec::new(),
            number: replaces,
            settled: None,
            failure: None,
            useful: false,
            power_epoch: 0,
            tell,
        }
    }

    /// Whether the handshake came to a good end.
    pub(super) fn is_serving(&self) -> bool {
        self.stage == Stage::Serving
    }

    /// Whether the other end has said nothing.
    pub(super) fn has_heard_nothing(&self) -> bool {
        self.stage == Stage::Begin && self.failure.is_none()
    }

    /// Whether the server's welcome was not taken.
    pub(super) fn is_declined(&self) -> bool {
        self.stage == Stage::Declined
    }

    /// Ends when the handshake has come to an end, or the connection.
    pub(super) fn settled(&mut self) -> oneshot::Receiver<()> {
        let (settled, watch) = oneshot::channel();
        self.settled = Some(settled);
        watch
    }

    pub(super) fn say_hello(&mut self) -> io::Result<()> {
        let mut nonce = [0; 32];
        random_bytes(&mut nonce);
        self.hello = self.link.hello(nonce).message();
        self.connection.send(&self.hello, None)
    }

    fn challenged(&mut self, head: &[u8]) -> Result<(), HandshakeError> {
        let challenge = Challenge::from_message(head)?;
        if !(VERSION_MIN..=VERSION_MAX).contains(&challenge.version) {
            return Err(Malformed("a protocol version that was not offered").into());
        }
        let key = self.link.options.key.as_ref();
        let seen = Transcript {
            hello: &self.hello,
            version: challenge.version,
            features: challenge.features,
            server_nonce: &challenge.nonce,
            wish: &[],
        };
        if key.is_some_and(|key| !key.verify(Role::Server, seen, &challenge.proof)) {
            return Err(Malformed(KEYS_DIFFER).into());
        }
        if self.link.options.counts_on_one_user && challenge.features & ONE_USER == 0 {
            return Err(HandshakeError::Refused(Refused {
                errno: Errno::EACCES.raw() as u16,
                message:
                    "the export has no squash=all any more, or an older server serves it: unmount, \
                          and mount again"
                        .to_owned(),
                definition: String::new(),
            }));
        }
        let known = self.link.server().clone();
        let proof = self.proof(&known, seen);
        self.asked = known.session_state();
        self.features = challenge.features;
        self.stage = Stage::Challenged;
        let _ = self.connection.send(&proof.message(), None); // a broken connection shows by itself
        Ok(())
    }

    /// Proves who this client is. It is only for a server that has proven the same, not for any
    /// process that listens there.
    fn proof(&self, known: &ServerIdentity, seen: Transcript<'_>) -> Proof {
        let mut proof = Proof {
            proof: [0; 32],
            session: known.session,
            session_proof: [0; 32],
            replaces: self.number,
            definition: self.link.options.definition,
        };
        let wish = proof.wish();
        let seen = Transcript { wish: &wish, ..seen };
        if let Some(key) = &self.link.options.key {
            proof.proof = key.prove(Role::Client, seen);
        }
        if known.session != 0 {
            proof.session_proof = Key::of_session(&known.secret).prove(Role::Session, seen);
        }
        proof
    }

    fn welcomed(&mut self, head: &[u8]) -> Result<(), HandshakeError> {
        let welcome = Welcome::from_message(head)?;
        if welcome.session == 0 || welcome.slots == 0 || welcome.calls_max == 0 {
            return Err(Malformed("a welcome that allows no call").into());
        }
        if self.link.leaving.load(Ordering::Relaxed) {
            self.decline(&welcome);
            return Ok(());
        }
        let stamps = self.features & FEATURE_STAMPS != 0;
        if let Some(Err(root)) =
            self.link.options.group.as_ref().map(|group| group.must_have(&welcome.info))
        {
            self.decline(&welcome);
            self.stage = Stage::Challenged; // the failure is reported
            return Err(HandshakeError::Refused(Refused {
                errno: Errno::ESTALE.raw() as u16,
                message: format!(
                    "it serves another directory than other servers of the projection (its root is {}, there \
                     it is {root}): is the shared file system mounted there?",
                    welcome.info.root
                ),
                definition: String::new(),
            }));
        }
        let news = self.link.welcomed(&welcome, self.features, self.asked);
        let Some(WelcomeNews { forgotten, power_lost, power_epoch }) = news else {
            self.decline(&welcome);
            return Ok(());
        };
        if self.link.addresses.welcomed(self.address) {
            self.link.alarm_all(); // the server before may have served other sessions, too
        }
        self.number = welcome.connection;
        self.power_epoch = power_epoch;
        self.stage = Stage::Serving;
        self.settled = None;
        if self.link.addresses.are_several() && self.features & FEATURE_PROBES != 0 {
            let (link, channel) = (self.link.clone(), self.channel.clone());
            let connection = Arc::downgrade(&self.connection);
            dray_rt::spawn(link.watch(channel, connection, self.address));
        }
        self.link.log_reconnected(self.link.outage.welcomed(key_of(&self.channel)));
        self.link.reached.notify_waiters();
        let epoch = ConnectionEpoch { power_epoch, session_state: SessionState::of(&welcome) };
        let granted = (welcome.calls_max, welcome.slots);
        let one_way = self.features & FEATURE_ONE_WAY != 0;
        self.link.end_former_replay(); // before this channel, or any other, sends its calls again
        self.channel.up(self.connection.clone(), (welcome.session, epoch), granted, one_way);
        self.channel.notify_idle(&self.link.slots.idle());
        if forgotten.is_some() && stamps && self.features & RECOVERING != 0 {
            let recovery = Replay::begin(&self.link, SessionState::of(&welcome));
            recovery.into_iter().for_each(|recovery| dray_rt::spawn(recovery.run()));
        } else if power_lost {
            self.link.unsynced.replay_ends(Some("the server did not wait for it"));
            self.link.note_replayed();
        }
        if let Some(locks) = forgotten {
            let (channel, instance) = (self.link.lasting(&self.channel), welcome.instance);
            self.link.begin_reestablish(Reestablish { channel, locks, instance });
        } else {
            self.link.repeat_notices(&self.channel, welcome.instance);
        }
        if let Some(tell) = self.tell.take() {
            let _ = tell.send(Ok(welcome.info)); // the receiver may be gone
        }
        Ok(())
    }

    /// Does not go on with what a welcome offers. A session that was begun for us is given back, or
    /// the server would wait for its client after a restart. The server ends the connection with
    /// the session.
    fn decline(&mut self, welcome: &Welcome) {
        self.stage = Stage::Declined;
        if welcome.resumed {
            return self.connection.close();
        }
        let mut message = Vec::new();
        NotifyHead { what: NotifyHead::GOODBYE, flags: 0, tag: 0 }.put_message(&mut message);
        let _ = self.connection.send(&message, None); // else its lease ends it
        self.connection.flush();
    }

    fn serving(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()> {
        if peek_kind(head)? != Kind::Notify {
            // An answer that was under way for long. The change may be gone, and the replay be over: the next
            // server knows what became of it.
            if self.power_epoch != self.link.unsynced.power_epoch() {
                return Err(io::Error::from_raw_os_error(libc::ECONNRESET));
            }
            self.useful = true;
            return self.receiver.frame(head, data);
        }
        let mut input = Input(head);
        let head = NotifyHead::get_message(&mut input)?;
        match head.what {
            NotifyHead::EVICTED => {
                self.link.note_end(ServerEnd::Evicted);
                self.channel.end_by_server(ServerEnd::Evicted);
            }
            NotifyHead::STABLE => {
                let stamp = input.get()?;
                let ticket = input.get().ok();
                self.link.unsynced.durable_up_to(stamp, ticket, SyncedFor::OtherClients);
            }
            NotifyHead::CHANGED => self.link.others_changed(head.tag, input)?,
            NotifyHead::PRESENT => self.channel.hear(),
            NotifyHead::SERVER_GONE => self.link.alarm_all(),
            NotifyHead::RECALL => self.link.recalled(&self.channel, head.tag, input)?,
            NotifyHead::JOB_QUERY => self.link.asked_for_jobs(&self.channel, head.tag, input)?,
            _ => {} // a later version's advice
        }
        Ok(())
    }

    fn failed(&mut self, error: HandshakeError) -> io::Error {
        let target = self.link.addresses.connector(self.address).target();
        self.failure = Some(match error {
            // Nothing is believed of a server that has not proven itself.
            HandshakeError::Refused(Refused { definition, .. })
                if self.stage == Stage::Challenged && !definition.is_empty() =>
            {
                ConnectError::Definition { text: definition }
            }
            HandshakeError::Refused(refused) => ConnectError::Refused {
                errno: Errno::new(i32::from(refused.errno)),
                message: format!("{target}: {}", refused.shown()),
            },
            HandshakeError::Malformed(Malformed(what)) => {
                let advice = match what {
                    KEYS_DIFFER => "compare the key files at both ends",
                    _ => "is it a dray server of a version near ours?",
                };
                ConnectError::Protocol(format!("{target}: {what}; {advice}"))
            }
        });
        io::Error::from_raw_os_error(libc::EPROTO)
    }
}

impl Sink for LinkSink {
    fn poll_place(
        &mut self,
        cx: &mut TaskContext<'_>,
        head: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        if self.stage != Stage::Serving {
            return Poll::Ready(Err(Malformed("data in a handshake").into()));
        }
        self.receiver.poll_place(cx, head, data_bytes)
    }

    fn is_awaited(&self, head: &[u8]) -> bool {
        self.receiver.is_awaited(head)
    }

    fn frame(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()> {
        let step = match self.stage {
            Stage::Serving => return self.serving(head, data),
            Stage::Begin => self.challenged(head),
            Stage::Challenged => self.welcomed(head),
            Stage::Declined => return Ok(()),
        };
        step.map_err(|error| self.failed(error))
    }
}

/// The features that a session with these options does not want.
fn unwanted(options: &ClientOptions) -> u64 {
    let changes = if options.caches { 0 } else { FEATURE_CHANGES };
    let of_files = FEATURE_LEASES | FEATURE_CHANGED_FILES | FEATURE_WRITE_LEASES;
    let none = of_files | FEATURE_LEASES_ON | FEATURE_LOCK_LEASES;
    let leases = match options.leases {
        LeaseWish::No => none,
        LeaseWish::Yes { keeps_writes: false, .. } => FEATURE_WRITE_LEASES | FEATURE_LEASES_ON,
        LeaseWish::Yes { keeps_writes: true, .. } => FEATURE_LEASES_ON,
        LeaseWish::LeasedOn => FEATURE_WRITE_LEASES | FEATURE_LOCK_LEASES,
    };
    changes | leases
}

/// The server proved another key than ours, or none.
const KEYS_DIFFER: &str = "the server does not know the key";
