//! Keeps a channel connected: connects, shakes hands, goes on with the session.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use dray_core::{BufMut, Context, Errno, Error, FileId, FsInfo, Lock, NodeId, OpenHow};
use dray_fabric::{Connect, Connection, Sink};
use dray_rt::sync::oneshot;
use dray_rt::{Handle, random_bytes, random_u64, sleep, timeout};

use crate::auth::{Key, Role, Transcript};
use crate::client::channel::{Ask, Channel, Receiver, value_of};
use crate::client::closing::Closing;
use crate::client::files::OpenFiles;
use crate::client::held::{Held, HeldLock};
use crate::client::memory::SessionMemory;
use crate::client::outage::Outage;
use crate::client::recovery::Recovery;
use crate::client::session::{ClientOptions, ConnectError, Session};
use crate::client::slots::Slots;
use crate::client::unsynced::Unsynced;
use crate::wire::{
    Auth, Call, Challenge, FEATURE_STAMPS, FEATURES, HandshakeError, Hello, Input, Kind, Malformed,
    NotifyHead, Proof, RECOVERING, VERSION_MAX, VERSION_MIN, Welcome, peek_kind,
};

/// First wait before connecting anew; doubled each time up to the last. What is waited is
/// between half of it and all of it, by chance, so that the clients of a server that
/// comes back do not come all at once.
const BACKOFF_FIRST: Duration = Duration::from_millis(20);
const BACKOFF_LAST: Duration = Duration::from_millis(500);
/// Files that are opened again at once.
const REOPENED_AT_ONCE: usize = 16;
/// A handshake that takes longer has failed.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// As much of what a server says is passed on to people.
const MESSAGE_MAX_CHARS: usize = 1000;

/// Marks numbers of our own; those of front ends do not reach this far.
const OWN_NUMBER: u64 = 1 << 63;

/// What all channels of a session share about its server.
pub(crate) struct Link {
    pub(crate) options: ClientOptions,
    pub(crate) connector: Arc<dyn Connect>,
    pub(crate) slots: Arc<Slots>,
    memory: Arc<SessionMemory>,
    pub(crate) held: Held,
    pub(crate) closing: Arc<Closing>,
    pub(crate) files: OpenFiles,
    /// The instance of the server that we have come back to wholly.
    returned: AtomicU64,
    pub(crate) unsynced: Unsynced,
    requests: AtomicU64,
    pub(crate) node: NodeId,
    known: Mutex<Known>,
    /// The session has been ended by us: it is not to be begun anew.
    pub(crate) leaving: AtomicBool,
    /// The session has been ended by the server's administrator.
    evicted: AtomicBool,
    outage: Outage,
    home: Handle,
}

/// What the server told us last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    pub(crate) session: u64,
    secret: [u8; 16],
    pub(crate) instance: u64,
    /// Whether answers to changes have stamps.
    pub(crate) stamps: bool,
    /// Times that the server had forgotten us.
    pub(crate) lost: u64,
}

/// How a connection that served ended.
struct Ended {
    error: io::Error,
    of_use: bool,
}

/// What a welcome tells.
struct News {
    /// The server has lost what it kept in memory for us.
    forgotten: bool,
    /// So has its machine, and what was not on media.
    power_lost: bool,
}

/// How a handshake ended.
type Outcome = Result<FsInfo, ConnectError>;

impl Link {
    pub(crate) fn new(
        connector: Arc<dyn Connect>,
        options: ClientOptions,
        memory: SessionMemory,
    ) -> Link {
        let memory = Arc::new(memory);
        let node = memory.node();
        let (mut known, replay_bytes) = (Known::default(), options.replay_bytes);
        let inherited = memory.session().is_some();
        if let Some((session, secret, instance)) = memory.session() {
            known = Known { session, secret, instance, ..known };
        }
        Link {
            options,
            connector,
            slots: Arc::new(Slots::new(memory.clone())),
            closing: Arc::new(Closing::new(memory.clone())),
            held: Held::new(memory.clone()),
            memory,
            files: OpenFiles::default(),
            returned: AtomicU64::new(0),
            unsynced: Unsynced::new(replay_bytes, inherited),
            requests: AtomicU64::new(1),
            node,
            known: Mutex::new(known),
            leaving: AtomicBool::new(false),
            evicted: AtomicBool::new(false),
            outage: Outage::default(),
            home: Handle::current(),
        }
    }

    pub(crate) fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects `channel` for the first time and keeps it connected if that went well.
    pub(crate) async fn start(self: &Arc<Link>, channel: Arc<Channel>) -> Outcome {
        let (tell, told) = oneshot::channel();
        let link = self.clone();
        dray_rt::spawn(async move {
            // A process before us may have left connections on which things still arrive.
            let mut replaces = Proof::REPLACES_ALL;
            let ended = link.connect_once(&channel, &mut replaces, Some(tell)).await;
            if ended.is_ok() {
                link.keep(channel, replaces).await;
            }
        });
        told.await
            .unwrap_or_else(|_| Err(ConnectError::Protocol("the connection was given up".into())))
    }

    /// Connects a further channel and keeps it connected.
    pub(crate) fn go_on(self: &Arc<Link>, channel: Arc<Channel>) {
        dray_rt::spawn(self.clone().keep(channel, 0));
    }

    async fn keep(self: Arc<Link>, channel: Arc<Channel>, mut replaces: u64) {
        let mut backoff = BACKOFF_FIRST;
        loop {
            if self.leaving.load(Ordering::Relaxed) {
                return channel.shut();
            }
            if self.evicted.load(Ordering::Relaxed) {
                return channel.evict();
            }
            match self.connect_once(&channel, &mut replaces, None).await {
                // One of its own for a recovery that is over.
                Ok(_) if channel.is_shut() => return,
                Ok(Ended { error, of_use }) => {
                    let target = self.connector.target();
                    if self.is_wanted() && self.outage.lost(key_of(&channel)) {
                        log::warn!("lost the connection to {target}: {error}; connecting anew");
                    }
                    // One that a server drops as soon as it has it is no better than none.
                    if of_use {
                        backoff = BACKOFF_FIRST;
                    }
                }
                Err(error) if self.is_wanted() && self.outage.failed() => {
                    log::warn!("{error}; trying again until it works");
                }
                Err(_) => {}
            }
            channel.expire();
            let wait = backoff.mul_f64(0.5 + random_u64() as f64 / u64::MAX as f64 / 2.0);
            let ended = timeout(wait, std::future::poll_fn(|task| channel.poll_shut(task))).await;
            if ended.is_ok() {
                return;
            }
            channel.expire();
            backoff = (backoff * 2).min(BACKOFF_LAST);
        }
    }

    /// Whether connections are to be made: neither we nor the server have ended the session.
    fn is_wanted(&self) -> bool {
        !self.leaving.load(Ordering::Relaxed) && !self.evicted.load(Ordering::Relaxed)
    }

    /// The server's administrator has ended the session. It is not begun anew by itself:
    /// programs would go on as if their locks and open files were still theirs.
    fn heed_eviction(&self) {
        if !self.evicted.swap(true, Ordering::Relaxed) {
            log::error!(
                "{}: the server's administrator evicted this mount: locks and open files are \
                 gone, and every call fails with ESHUTDOWN; unmount, and mount again",
                self.connector.target()
            );
        }
    }

    /// One connection from its making to its end. `Err`: why it never served. Tells `tell` how the handshake went.
    async fn connect_once(
        self: &Arc<Link>,
        channel: &Arc<Channel>,
        replaces: &mut u64,
        tell: Option<oneshot::Sender<Outcome>>,
    ) -> Result<Ended, String> {
        let connection = match timeout(HANDSHAKE_MAX, self.connector.connect()).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(error)) => return Err(self.unreachable(error, tell)),
            Err(_) => {
                return Err(self.unreachable(io::Error::from_raw_os_error(libc::ETIMEDOUT), tell));
            }
        };
        let mut sink = LinkSink {
            link: self.clone(),
            channel: channel.clone(),
            connection: connection.clone(),
            stage: Stage::Begin,
            hello: Vec::new(),
            features: 0,
            number: *replaces,
            failure: None,
            of_use: false,
            tell,
            receiver: Receiver(channel.clone()),
        };
        let error = match sink.say_hello() {
            Ok(()) => {
                let watched = (Arc::downgrade(&connection), Arc::downgrade(channel));
                dray_rt::spawn(watch_handshake(watched.0, watched.1));
                connection.run(&mut sink).await
            }
            Err(error) => error,
        };
        channel.down();
        *replaces = sink.number;
        match (sink.stage, sink.failure.take()) {
            (Stage::Serving, _) => Ok(Ended { error, of_use: sink.of_use }),
            (_, failure) => {
                if matches!(failure, Some(ConnectError::Refused { errno: Errno::ESHUTDOWN, .. })) {
                    self.heed_eviction();
                }
                let failure = failure.unwrap_or(ConnectError::Unreachable {
                    target: self.connector.target(),
                    error,
                });
                let text = failure.to_string();
                if let Some(tell) = sink.tell.take() {
                    let _ = tell.send(Err(failure)); // whoever asked may have gone
                }
                Err(text)
            }
        }
    }

    fn unreachable(&self, error: io::Error, tell: Option<oneshot::Sender<Outcome>>) -> String {
        let failure = ConnectError::Unreachable { target: self.connector.target(), error };
        let text = failure.to_string();
        if let Some(tell) = tell {
            let _ = tell.send(Err(failure)); // whoever asked may have gone
        }
        text
    }

    /// The number of a request: its front end's, by which it will be known again if it is
    /// repeated by another process, else 0.
    pub(crate) fn request_of(&self, cx: &Context) -> u64 {
        if cx.node == self.node { cx.request.0 } else { 0 }
    }

    /// A number for a file that the request of `cx` opens. A request opens one file, so
    /// it can be told by the request, also by a later process.
    pub(crate) fn handle_of(&self, cx: &Context) -> u64 {
        match self.request_of(cx) {
            0 => self.own_handle(),
            request => request,
        }
    }

    /// A number for a file that we open for ourselves.
    pub(crate) fn own_handle(&self) -> u64 {
        self.requests.fetch_add(1, Ordering::Relaxed) | OWN_NUMBER
    }

    /// Takes note of a welcome.
    fn welcomed(&self, welcome: &Welcome, stamps: bool) -> News {
        let mut known = self.known();
        let first = known.session == 0;
        let forgotten = known.instance != welcome.instance || known.session != welcome.session;
        if known.session == 0 {
            self.slots.grant(welcome.slots);
        } else if known.session != welcome.session {
            known.lost += 1;
            self.slots.begin_anew(welcome.slots);
            log::warn!(
                "{} had forgotten this mount: open files are opened again, locks are lost, \
                 and changes that were under way end with an error",
                self.connector.target()
            );
        }
        self.memory.set_session(welcome.session, &welcome.secret, welcome.instance);
        known.session = welcome.session;
        known.secret = welcome.secret;
        known.instance = welcome.instance;
        known.stamps = stamps;
        let (before, boot) = (self.memory.boot(), fold(welcome.boot));
        self.memory.set_boot(boot);
        // While it is noted nobody else can come to another conclusion.
        let power_lost = !first && before != 0 && boot != 0 && before != boot;
        if power_lost {
            self.unsynced.power_lost();
        }
        News { forgotten: forgotten && !first, power_lost }
    }

    /// Has again from a server that lost its state what the one before it gave us: locks,
    /// open files, answers.
    async fn come_back(
        self: Arc<Link>,
        channel: Arc<Channel>,
        locks: Vec<HeldLock>,
        instance: u64,
    ) {
        let answered = self.slots.await_answers(&channel);
        let done = self.claim(&channel, locks, instance).await;
        self.held.settled();
        if done && self.known().instance == instance {
            channel.notify(NotifyHead::RECLAIMED, 0);
        }
        self.open_all(&channel, instance).await;
        answered.await;
        if self.known().instance == instance {
            self.returned.store(instance, Ordering::SeqCst);
            channel.notify(NotifyHead::RETURNED, 0);
        }
    }

    /// Opens again everything that is open, some files at once.
    async fn open_all(self: &Arc<Link>, channel: &Arc<Channel>, instance: u64) {
        let left = Arc::new(Mutex::new(self.files.handles()));
        let open = |_| {
            let (link, channel, left) = (self.clone(), channel.clone(), left.clone());
            dray_rt::spawn_join(async move {
                loop {
                    let next = left.lock().unwrap_or_else(PoisonError::into_inner).pop();
                    let Some(handle) = next.filter(|_| link.known().instance == instance) else {
                        return;
                    };
                    link.open_again(&channel, handle).await;
                }
            })
        };
        for task in (0..REOPENED_AT_ONCE).map(open).collect::<Vec<_>>() {
            let _ = task.await; // ended with the executor: nobody needs the files
        }
    }

    async fn open_again(&self, channel: &Channel, handle: u64) {
        let Some(file) = self.files.open_again(handle) else { return };
        let (cx, id) = (Context::system(), file.id);
        let call = Call::Open { id, how: file.how, handle, again: true };
        let (data, into, to) = (None, None, None);
        let ask = Ask { cx: &cx, call: &call, slot: None, request: 0, data, into, to };
        // What an open answers besides is of no interest.
        let opened = channel.call(ask, |_| Ok(())).await;
        if let Err(error) = value_of(opened) {
            // Whoever uses it is told.
            log::error!("{}: cannot open file {id} again: {error}", self.connector.target());
        }
    }

    /// Claims them one after the other. False if that server, too, has gone meanwhile.
    async fn claim(&self, channel: &Channel, locks: Vec<HeldLock>, instance: u64) -> bool {
        let cx = Context::system();
        // Where that server dies too, it is begun anew: the next one must not be told that
        // all is claimed when only the rest has been.
        for held in locks {
            let HeldLock { handle, id, how, lock } = held;
            let how = OpenHow::new(how.flags & !libc::O_TRUNC);
            let open = Call::Open { id, how, handle, again: true };
            let claim = Call::Lock { handle, lock, wait: false, reclaim: true };
            for call in [open, claim] {
                if self.known().instance != instance {
                    return false;
                }
                if !self.held.holds(&held) {
                    break; // closed or given back meanwhile
                }
                let request = 0;
                let (data, into, to) = (None, None, None);
                let ask = Ask { cx: &cx, call: &call, slot: None, request, data, into, to };
                // What an open answers besides is of no interest.
                let outcome = channel.call(ask, |_| Ok(())).await;
                if self.known().instance != instance {
                    return false; // whatever the answer says, it is not that server's
                }
                if let Err(error) = value_of(outcome) {
                    log::error!("{}: lost a lock on file {id}: {error}", self.connector.target());
                    self.held.lost(&held);
                    break;
                }
            }
        }
        true
    }

    /// Starts a task that outlives whoever asks for it.
    pub(crate) fn spawn_home(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.home.spawn(work);
    }

    /// The wait for a lock was given up while the server could not be asked: it may have
    /// been granted. Once the server is back, its owner has what it knows to have.
    pub(crate) fn undo_lock(
        self: &Arc<Link>,
        session: &Arc<Session>,
        handle: u64,
        (id, lock): (FileId, Lock),
    ) {
        self.held.undo(handle);
        let (link, session) = (self.clone(), Arc::downgrade(session));
        self.home.spawn(async move {
            while let Some(channel) = session.upgrade().and_then(|session| session.channel().ok()) {
                match link.hold_only_known(&channel, handle, (id, lock)).await {
                    Err(error) if error.errno() == Errno::EHOSTDOWN => sleep(BACKOFF_LAST).await,
                    _ => break, // also where the server lost everything
                }
            }
            link.held.undone(handle);
        });
    }

    async fn hold_only_known(
        &self,
        channel: &Channel,
        handle: u64,
        (id, lock): (FileId, Lock),
    ) -> Result<(), Error> {
        let cx = Context::system();
        for lock in self.held.known(id, lock) {
            let call = Call::Lock { handle, lock, wait: false, reclaim: false };
            let (data, into, to) = (None, None, None);
            let ask = Ask { cx: &cx, call: &call, slot: None, request: 0, data, into, to };
            value_of::<()>(channel.call(ask, |bytes| Input::whole(bytes)).await)?;
        }
        Ok(())
    }

    /// Closes a file that nobody has any more, as soon as the server can be asked.
    pub(crate) fn close_later(&self, session: &Arc<Session>, handle: u64) {
        let Ok(channel) = session.channel() else { return };
        if !self.held.concerns(handle) && self.files.forget(handle) && channel.close(handle) {
            return;
        }
        let link = session.link.clone();
        self.home.spawn(async move {
            let (cx, call) = (Context::system(), Call::Close { handle });
            let _ = link.held.check(&cx, handle).await; // as for a close that is asked for
            link.held.closed(handle);
            link.files.closing(handle).await;
            let (data, into, to) = (None, None, None);
            let ask = Ask { cx: &cx, call: &call, slot: None, request: 0, data, into, to };
            let _ = channel.call(ask, |bytes| Input::whole::<()>(bytes)).await; // nobody asks
        });
    }
}

/// A boot id in one word; 0 stays 0.
fn fold(boot: u128) -> u64 {
    match (boot >> 64) as u64 ^ boot as u64 {
        0 if boot != 0 => 1,
        folded => folded,
    }
}

/// Ends a connection on which no handshake comes to an end. It keeps none that has ended.
async fn watch_handshake(connection: Weak<dyn Connection>, channel: Weak<Channel>) {
    sleep(HANDSHAKE_MAX).await;
    if let (Some(connection), Some(channel)) = (connection.upgrade(), channel.upgrade())
        && !channel.stats().up
    {
        connection.close();
    }
}

/// Tells the channels of a link apart.
fn key_of(channel: &Arc<Channel>) -> usize {
    Arc::as_ptr(channel) as usize
}

/// What the other end says, as text and no more: a terminal or a log shall not obey it.
fn shown(message: &str) -> String {
    let plain = |letter: char| if letter.is_control() { '?' } else { letter };
    message.chars().take(MESSAGE_MAX_CHARS).map(plain).collect()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Begin,
    Challenged,
    Serving,
}

/// Receives on one connection: the handshake first, then the channel's answers.
struct LinkSink {
    link: Arc<Link>,
    channel: Arc<Channel>,
    connection: Arc<dyn Connection>,
    stage: Stage,
    features: u64,
    /// What was said first; the proofs cover it.
    hello: Vec<u8>,
    /// Of this connection at the server; before it is known, of the one that it replaces.
    number: u64,
    failure: Option<ConnectError>,
    /// A call was answered.
    of_use: bool,
    tell: Option<oneshot::Sender<Outcome>>,
    receiver: Receiver,
}

impl LinkSink {
    fn say_hello(&mut self) -> io::Result<()> {
        let mut nonce = [0; 32];
        random_bytes(&mut nonce);
        let options = &self.link.options;
        let hello = Hello {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            features: FEATURES,
            auth: if options.key.is_some() { Auth::Psk } else { Auth::None },
            nonce,
            export: options.export.clone(),
            node: self.link.node,
            host: options.host.clone(),
            software: env!("CARGO_PKG_VERSION").to_owned(),
        };
        self.hello = hello.message();
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
            return Err(Malformed("the server does not know the key").into());
        }
        // Only now: what is proven here is not for somebody who merely listens there.
        let known = self.link.known().clone();
        let mut proof = Proof {
            proof: [0; 32],
            session: known.session,
            session_proof: [0; 32],
            replaces: self.number,
        };
        let wish = proof.wish();
        let seen = Transcript { wish: &wish, ..seen };
        if let Some(key) = key {
            proof.proof = key.prove(Role::Client, seen);
        }
        if known.session != 0 {
            proof.session_proof = Key::of_session(&known.secret).prove(Role::Session, seen);
        }
        self.features = challenge.features;
        self.stage = Stage::Challenged;
        let _ = self.connection.send(&proof.message(), None); // a broken connection shows by itself
        Ok(())
    }

    fn welcomed(&mut self, head: &[u8]) -> Result<(), HandshakeError> {
        let welcome = Welcome::from_message(head)?;
        if welcome.session == 0 || welcome.slots == 0 || welcome.calls_max == 0 {
            return Err(Malformed("a welcome that allows nothing").into());
        }
        let stamps = self.features & FEATURE_STAMPS != 0;
        let News { forgotten, power_lost } = self.link.welcomed(&welcome, stamps);
        // Before anything is sent again: a lock may be somebody else's by now.
        let held = forgotten.then(|| self.link.held.doubt_all());
        self.number = welcome.connection;
        self.stage = Stage::Serving;
        if let Some(lasted) = self.link.outage.back(key_of(&self.channel)) {
            let target = self.link.connector.target();
            log::warn!("connected to {target} again after {:.1} s", lasted.as_secs_f64());
        }
        let epoch = self.link.unsynced.epoch();
        let granted = (welcome.calls_max, welcome.slots);
        self.channel.up(self.connection.clone(), (welcome.session, epoch), granted);
        self.channel.notify_idle(&self.link.slots.idle());
        if forgotten && stamps && self.features & RECOVERING != 0 {
            dray_rt::spawn(Recovery::run(self.link.clone(), welcome.instance));
        } else if power_lost {
            self.link.unsynced.recovery_ends(Some("the server did not wait for it"));
        }
        if let Some(held) = held {
            let (link, channel) = (self.link.clone(), self.channel.clone());
            dray_rt::spawn(link.come_back(channel, held, welcome.instance));
        } else if self.link.returned.load(Ordering::SeqCst) == welcome.instance {
            // Said before, perhaps to a connection that broke.
            self.channel.notify(NotifyHead::RETURNED, 0);
        }
        if let Some(tell) = self.tell.take() {
            let _ = tell.send(Ok(welcome.info)); // whoever asked may have gone
        }
        Ok(())
    }

    fn serving(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()> {
        if peek_kind(head)? != Kind::Notify {
            self.of_use = true;
            return self.receiver.frame(head, data);
        }
        let mut input = Input(head);
        match NotifyHead::get_message(&mut input)?.what {
            NotifyHead::EVICTED => {
                self.link.heed_eviction();
                self.channel.evict();
            }
            NotifyHead::STABLE => self.link.unsynced.stable(input.get()?, false),
            _ => {} // a later version's advice
        }
        Ok(())
    }

    fn failed(&mut self, error: HandshakeError) -> io::Error {
        let target = self.link.connector.target();
        self.failure = Some(match error {
            HandshakeError::Refused(refused) => ConnectError::Refused {
                errno: Errno::new(i32::from(refused.errno)),
                message: format!("{target}: {}", shown(&refused.message)),
            },
            HandshakeError::Malformed(Malformed(what)) => ConnectError::Protocol(format!(
                "{target}: {what}; is it a dray server of a version near ours?"
            )),
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

    fn frame(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()> {
        let step = match self.stage {
            Stage::Serving => return self.serving(head, data),
            Stage::Begin => self.challenged(head),
            Stage::Challenged => self.welcomed(head),
        };
        step.map_err(|error| self.failed(error))
    }
}
