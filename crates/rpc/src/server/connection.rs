//! One connection at the server: handshake, then calls.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use dray_core::{Buf, BufMut, Cancel, Context, Errno, Error, Op};
use dray_fabric::{Connection, Sink};
use dray_rt::{random_bytes, sleep};

use crate::auth::{Key, Role, Transcript};
use crate::server::door::Guest;
use crate::server::execute::{self, Reply};
use crate::server::export::Export;
use crate::server::identities::Identities;
use crate::server::intent::{self, Amend, Plan, Standing};
use crate::server::service::{Inner, Sabotage, refused};
use crate::server::session::Session;
use crate::server::slots::{self, Again, Route, Verdict};
use crate::server::stamps::{self, Stamped};
use crate::server::status::Running;
use crate::wire::{
    Auth, Call, CallHead, Challenge, FEATURE_STAMPS, FEATURES, HandshakeError, Hello, Input, Kind,
    Malformed, NO_SLOT, NotifyHead, Proof, RECOVERING, Refused, ReplyHead, Stamp, VERSION_MAX,
    VERSION_MIN, Welcome, peek_kind, peek_unknown_op,
};

/// A handshake that takes longer is given up.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// Serves a connection until it ends.
pub(crate) async fn serve(server: Arc<Inner>, connection: Arc<dyn Connection>) {
    let peer = connection.peer();
    let Some((_visit, guest)) = server.door.enter(peer) else {
        if server.door.complains(peer) {
            log::warn!("too many connections: {peer} is turned away");
        }
        return connection.close();
    };
    let shared = Arc::new(Shared::default());
    let mut sink = ServerSink {
        number: server.new_connection(),
        server,
        connection: connection.clone(),
        stage: Stage::Hello,
        guest: Some(guest),
        identities: Identities::default(),
        shared: shared.clone(),
    };
    dray_rt::spawn(watch_handshake(Arc::downgrade(&connection), Arc::downgrade(&shared)));
    let error = connection.run(&mut sink).await;
    shared.lock().cancels.values().for_each(|cancel| cancel.set());
    match &sink.stage {
        Stage::Serving(session) => {
            log::debug!("connection of {} from {peer} ended: {error}", session.host);
            session.disconnected(sink.number);
        }
        // A look whether somebody is there, as monitoring makes it.
        Stage::Hello if error.kind() == io::ErrorKind::UnexpectedEof => {
            log::debug!("connection from {peer} ended before it said anything");
        }
        _ if sink.server.door.complains(peer) => {
            log::warn!("connection from {peer} ended in its handshake: {error}");
        }
        _ => log::debug!("connection from {peer} ended in its handshake: {error}"),
    }
}

/// Ends a connection on which no handshake comes to an end. It does not keep one that has
/// ended by itself: its descriptor is free at once.
async fn watch_handshake(connection: Weak<dyn Connection>, shared: Weak<Shared>) {
    sleep(HANDSHAKE_MAX).await;
    if let (Some(connection), Some(shared)) = (connection.upgrade(), shared.upgrade())
        && !shared.serving()
    {
        connection.close();
    }
}

/// The newest version that both ends speak.
fn agree((client_min, client_max): (u16, u16)) -> Result<u16, Refused> {
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

/// The export that a client wants whose first message is this; none if it is no greeting.
/// Nothing has been checked: it says who is to serve the connection, no more.
pub fn wanted_export(head: &[u8]) -> Option<String> {
    Hello::from_message(head).ok().map(|hello| hello.export)
}

/// What a connection's calls share with its receiver.
#[derive(Default)]
struct Shared {
    in_flight: AtomicU32,
    /// Calls under way that nobody waits for.
    one_way: AtomicU32,
    state: Mutex<Waits>,
}

#[derive(Default)]
struct Waits {
    serving: bool,
    /// Calls that can be cancelled, by tag.
    cancels: BTreeMap<u32, Arc<Cancel>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Waits> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counter(&self, one_way: bool) -> &AtomicU32 {
        if one_way { &self.one_way } else { &self.in_flight }
    }

    fn serving(&self) -> bool {
        self.lock().serving
    }
}

enum Stage {
    Hello,
    /// The client's proof is awaited.
    Challenged(Box<Challenged>),
    Serving(Arc<Session>),
}

/// A handshake half way.
struct Challenged {
    hello: Hello,
    /// The hello as it came, which the proofs cover.
    message: Vec<u8>,
    nonce: [u8; 32],
    version: u16,
    features: u64,
    export: Arc<Export>,
}

impl Challenged {
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

struct ServerSink {
    server: Arc<Inner>,
    connection: Arc<dyn Connection>,
    number: u64,
    stage: Stage,
    /// While it is in its handshake.
    guest: Option<Guest>,
    identities: Identities,
    shared: Arc<Shared>,
}

impl Sink for ServerSink {
    fn poll_place(
        &mut self,
        cx: &mut TaskContext<'_>,
        head: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        let Stage::Serving(session) = &self.stage else {
            return Poll::Ready(Err(Malformed("data in a handshake").into()));
        };
        let call = CallHead::get_message(&mut Input(head));
        let takes_data = match &call {
            Ok(call) => matches!(call.op, Op::Write | Op::Put | Op::Redo),
            Err(_) => peek_unknown_op(head).is_some(), // a later version's; it is refused
        };
        if !takes_data {
            return Poll::Ready(Err(Malformed("data where none belongs").into()));
        }
        session.buffers.poll_get(cx, data_bytes).map(Ok)
    }

    fn frame(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()> {
        match &self.stage {
            Stage::Serving(session) => {
                let session = session.clone();
                self.message(&session, head, data)
            }
            Stage::Hello => self.hello(head).map_err(|error| self.refuse(error)),
            Stage::Challenged { .. } => self.proof(head).map_err(|error| self.refuse(error)),
        }
    }
}

impl ServerSink {
    fn hello(&mut self, head: &[u8]) -> Result<(), HandshakeError> {
        let version = agree(Hello::versions(head)?).map_err(HandshakeError::Refused)?;
        let hello = Hello::from_message(head)?;
        let export = self.admit(&hello).map_err(HandshakeError::Refused)?;
        let mut nonce = [0; 32];
        random_bytes(&mut nonce);
        let recovering = self.server.recovery.running();
        let features = hello.features & FEATURES | if recovering { RECOVERING } else { 0 };
        let message = head.to_vec();
        let challenged = Challenged { hello, message, nonce, version, features, export };
        let key = self.server.options.key.as_ref();
        let seen = challenged.transcript(&[]);
        let proof = key.map_or([0; 32], |key| key.prove(Role::Server, seen));
        self.say(&Challenge { version, features, nonce, proof }.message());
        self.stage = Stage::Challenged(Box::new(challenged));
        Ok(())
    }

    /// The export that a client asks for, if it may ask for it in this way.
    fn admit(&self, hello: &Hello) -> Result<Arc<Export>, Refused> {
        let wanted = if self.server.options.key.is_some() { Auth::Psk } else { Auth::None };
        if hello.auth != wanted {
            return Err(refused(
                Errno::EKEYREJECTED,
                match wanted {
                    Auth::Psk => "the server wants a shared key: mount with -o auth=psk:FILE",
                    _ => "the server has no key, but the client wants proof of one",
                },
            ));
        }
        let export = self.server.export(&hello.export)?;
        if !export.allows(self.connection.peer()) {
            return Err(refused(
                Errno::EACCES,
                format!("export `{}` is not open to {}", hello.export, self.connection.peer()),
            ));
        }
        Ok(export)
    }

    fn proof(&mut self, head: &[u8]) -> Result<(), HandshakeError> {
        let proof = Proof::from_message(head)?;
        let Stage::Challenged(challenged) = &self.stage else {
            return Err(Malformed("a proof without a challenge").into());
        };
        let wish = proof.wish();
        let seen = challenged.transcript(&wish);
        if let Some(key) = &self.server.options.key
            && !key.verify(Role::Client, seen, &proof.proof)
        {
            return Err(HandshakeError::Refused(refused(
                Errno::EKEYREJECTED,
                "the client does not know this server's key",
            )));
        }
        let Challenged { hello, export, .. } = &**challenged;
        let right = |secret: &[u8; 16]| {
            Key::of_session(secret).verify(Role::Session, seen, &proof.session_proof)
        };
        let known = self.server.resume(proof.session, export, right);
        let known = known.map_err(HandshakeError::Refused)?;
        let resumed = known.is_some();
        let session = match known {
            Some(session) => session,
            None => self
                .server
                .new_session(hello.node, &hello.host, export.clone())
                .map_err(HandshakeError::Refused)?,
        };
        if self.server.options.sabotage != Some(Sabotage::Fence) {
            session.replace(proof.replaces);
        }
        session.set_stamps(challenged.hello.features & FEATURE_STAMPS != 0);
        self.welcome(session, resumed);
        Ok(())
    }

    fn welcome(&mut self, session: Arc<Session>, resumed: bool) {
        session.connected(self.number, self.connection.clone());
        let options = &self.server.options;
        let welcome = Welcome {
            session: session.id,
            secret: session.secret,
            resumed,
            connection: self.number,
            instance: self.server.instance,
            boot: options.boot,
            calls_max: options.calls_max,
            slots: session.slots.count(),
            lease_ms: options.lease.as_millis().min(u128::from(u32::MAX)) as u32,
            info: session.export.fs.info().clone(),
        };
        self.say(&welcome.message());
        self.stage = Stage::Serving(session);
        self.guest = None;
        self.shared.lock().serving = true;
    }

    fn say(&self, message: &[u8]) {
        let _ = self.connection.send(message, None); // a broken connection ends `run`
    }

    fn refuse(&mut self, error: HandshakeError) -> io::Error {
        match error {
            HandshakeError::Refused(refused) => {
                self.say(&Refused::refusal(&refused));
                io::Error::new(io::ErrorKind::PermissionDenied, refused.message)
            }
            HandshakeError::Malformed(malformed) => malformed.into(),
        }
    }

    fn message(
        &mut self,
        session: &Arc<Session>,
        head: &[u8],
        data: Option<BufMut>,
    ) -> io::Result<()> {
        if session.is_ended() {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the session has ended"));
        }
        let mut input = Input(head);
        match peek_kind(head)? {
            Kind::Call => {
                if let Some(tag) = peek_unknown_op(head) {
                    let error = Error::new(Errno::ENOTSUP);
                    let mut message = Reply::failure(&error).message;
                    ReplyHead::address(&mut message, tag, false);
                    self.say(&message);
                    return self.room_for_answers(0);
                }
                let call = CallHead::get_message(&mut input)?;
                self.call(session, call, input.0, data)
            }
            Kind::Identity => {
                input.get::<Kind>()?;
                Ok(self.identities.define(input)?)
            }
            Kind::Notify => {
                let head = NotifyHead::get_message(&mut input)?;
                self.notified(session, head, input)
            }
            _ => Err(Malformed("a client does not send that").into()),
        }
    }

    fn notified(
        &mut self,
        session: &Arc<Session>,
        head: NotifyHead,
        mut input: Input<'_>,
    ) -> io::Result<()> {
        match head.what {
            NotifyHead::CANCEL => {
                let cancel = self.shared.lock().cancels.get(&head.tag).cloned();
                if let Some(cancel) = cancel {
                    cancel.set();
                }
            }
            NotifyHead::RECLAIMED => {
                session.locks_claimed();
                self.server.grace.reclaimed(session.id);
            }
            NotifyHead::IDLE => {
                for _ in 0..head.tag.min(session.slots.count()) {
                    session.slots.idle(input.get()?);
                }
            }
            NotifyHead::RETURNED => session.export.returning.returned(session.id),
            NotifyHead::GOODBYE => {
                drop(self.server.end(session.clone())); // nobody waits for it
            }
            _ => {} // from a newer version: advice, not a request
        }
        Ok(())
    }

    /// Whether a client that has so many calls under way may make another. Answers that it
    /// has not read count: to the client those calls are under way.
    fn room_for_answers(&self, under_way: u32) -> io::Result<()> {
        let unread = self.connection.queued_frames();
        match under_way as usize + unread >= self.server.options.calls_max as usize {
            true => Err(Malformed("more calls at once than were allowed").into()),
            false => Ok(()),
        }
    }

    fn call(
        &mut self,
        session: &Arc<Session>,
        head: CallHead,
        body: &[u8],
        data: Option<BufMut>,
    ) -> io::Result<()> {
        let who = self.identities.get(head.identity);
        let who = who.ok_or(Malformed("an identity that was not defined"))?;
        let one_way = head.flags & CallHead::ONE_WAY != 0;
        if one_way && head.op != Op::Close {
            return Err(Malformed("a call that must be answered and is not to be").into());
        }
        let under_way = self.shared.counter(one_way).fetch_add(1, Ordering::SeqCst);
        match one_way {
            true if under_way >= CallHead::ONE_WAY_MAX as u32 => {
                return Err(Malformed("more one-way calls at once than were allowed").into());
            }
            true => {}
            false => self.room_for_answers(under_way)?,
        }
        let route = Route { connection: self.connection.clone(), tag: head.tag };
        let mut cx = Context::new(session.node, head.request, who, head.pid);
        cx.umask = head.umask;
        if head.op == Op::Lock {
            let cancel = Arc::new(Cancel::default());
            self.shared.lock().cancels.insert(head.tag, cancel.clone());
            cx.cancel = Some(cancel);
        }
        session.calls.fetch_add(1, Ordering::Relaxed);
        let call = CallInHand {
            server: self.server.clone(),
            session: session.clone(),
            shared: self.shared.clone(),
            route,
            connection: self.number,
            head,
            cx,
        };
        let mut bytes = Vec::with_capacity(body.len());
        bytes.extend_from_slice(body);
        dray_rt::poll_once_then_spawn(Box::pin(call.carry_out(bytes, data)));
        Ok(())
    }
}

/// What came of a call. It keeps its turns until the answer has been noted.
struct Executed {
    reply: Reply,
    plan: Option<Plan>,
    again: Option<Again>,
    stamped: Option<Stamped>,
}

impl Executed {
    fn only(reply: Reply) -> Executed {
        Executed { reply, plan: None, again: None, stamped: None }
    }
}

/// A call from its arrival to its answer.
struct CallInHand {
    server: Arc<Inner>,
    session: Arc<Session>,
    shared: Arc<Shared>,
    route: Route,
    connection: u64,
    head: CallHead,
    cx: Context,
}

impl CallInHand {
    async fn carry_out(self, body: Vec<u8>, data: Option<BufMut>) {
        let (slot, sequence) = (self.head.slot, self.head.sequence);
        if self.server.recovery.running() && self.waits_for_recovery(&body) {
            let waited = self.server.recovery.wait(&self.cx).await;
            if let Err(error) = waited {
                return self.answer(&self.route, Reply::failure(&error));
            }
            // It has been asked for again on a later connection, where the answer must go.
            if !self.session.has_connection(self.connection) {
                return self.over();
            }
        }
        if let Err(unknown_handle) = execute::check_handles(&self.session, self.head.op, &body) {
            // Nothing was applied, so the slot stays as it was: the client opens the
            // file again and repeats the call under the same number.
            return self.answer(&self.route, unknown_handle);
        }
        let mut again = None;
        if slot != NO_SLOT && !slots::holds(self.head.op) {
            let error = Error::new(Errno::EPROTO).because("not a change, but in a replay slot");
            return self.answer(&self.route, Reply::failure(&error));
        }
        if slot != NO_SLOT {
            match self.session.slots.begin(slot, sequence, &self.route) {
                Verdict::Fresh => {}
                Verdict::Again(cut) => again = Some(cut),
                Verdict::Replay(message) => {
                    self.open_replayed(&body, &message).await;
                    return self.answer(&self.route, Reply::replayed(message));
                }
                Verdict::Running => return self.over(),
                Verdict::Stale => return self.over(),
                Verdict::Unknown => {
                    let error = Error::new(Errno::EPROTO).because("no such replay slot");
                    return self.answer(&self.route, Reply::failure(&error));
                }
            }
        }
        let data = data.map(BufMut::freeze);
        let Executed { reply, plan, again, stamped } = self.execute(&body, data, again).await;
        let route = match slot {
            NO_SLOT => Some(self.route.clone()),
            _ => self.session.slots.done(slot, sequence, &reply.message),
        };
        drop((plan, again, stamped));
        match route {
            Some(route) => self.answer(&route, reply),
            // Its client has given up on it, and waits for the tag alone.
            None => self.answer(&self.route, reply),
        }
    }

    /// Before an opening is answered again.
    async fn open_replayed(&self, body: &[u8], answer: &[u8]) {
        if !matches!(self.head.op, Op::Create | Op::Tmpfile | Op::Open) {
            return;
        }
        // Its connection may go: the file must not be opened once it has been closed.
        let _unslotted = self.session.unslotted(self.connection).await;
        execute::open_replayed(&self.session, &self.cx, self.head.op, body, answer).await;
    }

    /// Calls that end at once, nearly all, are not worth a note; the others show in the
    /// status while they last.
    async fn execute(&self, body: &[u8], data: Option<Buf>, again: Option<Again>) -> Executed {
        let mut call = std::pin::pin!(self.execute_noted(body, data, again));
        let first = std::future::poll_fn(|task| Poll::Ready(call.as_mut().poll(task))).await;
        if let Poll::Ready(executed) = first {
            return executed;
        }
        let number = self.server.running(Running {
            op: self.head.op,
            session: self.session.id,
            cx: self.cx.clone(),
            since: dray_rt::now(),
            body: body.to_vec(),
        });
        let executed = call.await;
        self.server.finished(number);
        executed
    }

    /// With the intent noted where the change must not be applied twice.
    async fn execute_noted(
        &self,
        body: &[u8],
        data: Option<Buf>,
        again: Option<Again>,
    ) -> Executed {
        let (op, slot) = (self.head.op, self.head.slot);
        let changes = matches!(op, Op::Lock | Op::Flush | Op::Open | Op::Close);
        let _unslotted = match changes && slot == NO_SLOT {
            true => Some(self.session.unslotted(self.connection).await),
            false => None,
        };
        if op == Op::Lock && self.cx.check().is_err() {
            // Its connection went while it waited: it has been asked for again.
            return Executed::only(Reply::failure(&self.cx.cancelled()));
        }
        let amend = again.as_ref().and_then(|again| again.amend);
        let data_bytes = data.as_deref().map_or(0, <[u8]>::len);
        let call = Call::get(op, &mut Input(body)).ok();
        let mut plan = None;
        if slot != NO_SLOT
            && again.is_none()
            && let Some(call) = &call
        {
            plan = intent::plan(&self.session, &self.cx, call, data_bytes).await;
            if let Some(plan) = &plan {
                self.session.slots.intend(slot, self.head.sequence, op, &plan.intent);
                dray_rt::step().await;
            }
        }
        let (server, session) = (&self.server, &self.session);
        // Behind the turn: one that was kept over a kill waits for its call to come again,
        // which takes a stamp then.
        let stamped = match &call {
            Some(call) => self.stamped(call, data_bytes).await,
            None => None,
        };
        let standing = Standing { plan: plan.as_mut(), amend };
        let reply = execute::execute(server, session, &self.cx, op, body, data, standing);
        let mut reply = reply.await;
        let amended_at = match amend {
            Some(Amend::AppendAt(at)) => Some(at),
            _ => None,
        };
        let at = amended_at.or(plan.as_ref().and_then(|plan| plan.append_at));
        let changes = op.writes() && !matches!(op, Op::Lock | Op::Close | Op::Redo);
        if changes || stamped.is_some() {
            self.stamp(&mut reply, stamped.as_ref(), body, at);
        }
        dray_rt::step().await;
        Executed { reply, plan, again, stamped }
    }

    /// New work does; what belongs to the recovery does not, nor does giving back.
    fn waits_for_recovery(&self, body: &[u8]) -> bool {
        let belongs = match self.head.op {
            Op::Close | Op::Lock => true,
            // For what is opened again.
            op @ Op::Open => {
                matches!(Call::get(op, &mut Input(body)), Ok(Call::Open { again: true, .. }))
            }
            _ => self.head.flags & CallHead::RECOVERY != 0,
        };
        !belongs && self.server.options.sabotage != Some(Sabotage::RedoGate)
    }

    /// The stamp of a change of data, once nobody else changes the same bytes.
    async fn stamped(&self, call: &Call<'_>, data_bytes: usize) -> Option<Stamped> {
        let (file, range) = stamps::bytes_changed(&self.session, call, data_bytes)?;
        Some(self.session.export.stamps.take(file, range).await)
    }

    /// Puts the stamp of a change that was made into its answer.
    fn stamp(&self, reply: &mut Reply, stamped: Option<&Stamped>, body: &[u8], at: Option<u64>) {
        if !self.session.stamps() || !reply.is_success() {
            return;
        }
        let number =
            stamped.map_or_else(|| self.session.export.stamps.next(), |stamped| stamped.number);
        let at = at.or_else(|| match Call::get(self.head.op, &mut Input(body)) {
            Ok(Call::Write { how, .. }) if !how.append => Some(how.at),
            _ => None,
        });
        reply.stamp(Stamp { number, at: at.unwrap_or(Stamp::NOWHERE) });
    }

    fn answer(&self, route: &Route, mut reply: Reply) {
        if self.one_way() {
            if let Some(error) = reply.error() {
                log::warn!("{}: closing a file failed: {error}", self.session.host);
            }
            return self.over();
        }
        // What goes to another connection than it came from says nothing of that one's closes.
        let settled = Arc::ptr_eq(&route.connection, &self.route.connection)
            && self.shared.counter(true).load(Ordering::SeqCst) == 0;
        ReplyHead::address(&mut reply.message, route.tag, settled);
        let sent = route.connection.send(&reply.message, reply.data);
        // Whatever else went wrong ends the connection, and it is asked for again.
        if sent.is_err_and(|error| error.raw_os_error() == Some(libc::EMSGSIZE)) {
            let error = Error::new(Errno::EOVERFLOW).because("an answer longer than a message");
            let mut message = Reply::failure(&error).message;
            ReplyHead::address(&mut message, route.tag, settled);
            let _ = route.connection.send(&message, None); // as above
        }
        self.over();
    }

    fn one_way(&self) -> bool {
        self.head.flags & CallHead::ONE_WAY != 0
    }

    fn over(&self) {
        self.shared.counter(self.one_way()).fetch_sub(1, Ordering::SeqCst);
        if self.head.op == Op::Lock {
            self.shared.lock().cancels.remove(&self.head.tag);
        }
    }
}
