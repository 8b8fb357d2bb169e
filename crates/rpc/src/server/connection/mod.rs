//! A connection at the server, from the handshake over the calls to its end.

mod answer;
mod audit;
mod call;
mod handshake;
mod kept_writes;
mod receive;
mod replica;

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use dray_core::{Buf, BufMut, Cancel};
use dray_fabric::{Connection, Peer, Sink};
use dray_rt::sleep;

use crate::server::connection_limits::{ConnectionPlace, HandshakeFault, HandshakePlace, Overload};
use crate::server::counted::{CALL_BYTES, CALLS_FREE, HEAD_FREE_BYTES};
use crate::server::identities::Identities;
use crate::server::service::Inner;
use crate::server::session::ServerSession;
use crate::wire::{Call, CallHead, Input, Malformed, OpRow, peek_unknown_op};

pub use audit::{AuditExport, AuditPort, AuditReader, wanted_audit};
use handshake::ChallengedPeer;
pub use handshake::wanted_export;
pub use replica::{ReplicaPort, ReplicaTerms, wanted_slice};

/// A handshake that takes longer is given up.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// A connection that was let in. As long as there is one it counts.
pub struct Admission {
    connection_place: Option<ConnectionPlace>,
    handshake_place: HandshakePlace,
}

/// Lets a connection in, if there are not too many.
pub(in crate::server) fn admit(server: &Inner, peer: Peer) -> Option<Admission> {
    let crowd = match server.limits.enter(peer) {
        Ok((connection_place, handshake_place)) => {
            return Some(Admission { connection_place, handshake_place });
        }
        Err(crowd) => crowd,
    };
    if server.limits.complains_of(crowd, peer) {
        let others = if crowd == Overload::Everybody { " and others are" } else { " is" };
        log::warn!("too many connections are in their handshake: {peer}{others} turned away");
    }
    None
}

/// Serves a connection until it ends.
pub(in crate::server) async fn serve(
    server: Arc<Inner>,
    connection: Arc<dyn Connection>,
    admission: Admission,
) {
    let peer = connection.peer();
    let Admission { connection_place, handshake_place } = admission;
    let shared = Arc::new(Shared::default());
    let mut sink = ServerSink {
        number: server.new_connection(),
        peer,
        server,
        connection: connection.clone(),
        stage: Stage::Hello,
        has_place: connection_place.is_some(),
        handshake_place: Some(handshake_place),
        identities: Identities::default(),
        refused: None,
        only_asked: false,
        shared: shared.clone(),
    };
    dray_rt::spawn(watch_handshake(Arc::downgrade(&connection), Arc::downgrade(&shared)));
    let error = connection.run(&mut sink).await;
    shared.lock().cancels.values().for_each(|cancel| cancel.set());
    if let Stage::Beginning(beginning) = &sink.stage {
        beginning.gone.store(true, Ordering::SeqCst);
    }
    sink.look();
    match &sink.stage {
        Stage::Serving(session) => {
            log::debug!("connection of {} from {peer} ended: {error}", session.host);
            session.disconnected(sink.number);
            session.buffers.gave_up(); // perhaps it waited for one
        }
        // A look whether somebody is there, as monitoring makes it.
        Stage::Hello if error.kind() == io::ErrorKind::UnexpectedEof => {
            log::debug!("connection from {peer} ended before it said anything");
        }
        _ if sink.only_asked => {
            log::debug!("connection from {peer} has asked for the definition of a projection");
        }
        stage if sink.server.limits.complains(peer, sink.fault()) => {
            // A client with another key sees the mismatch first, and leaves without a message.
            let went = matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
            );
            let has_key = sink.server.options.key.is_some();
            let why = match stage {
                Stage::ChallengedPeer(_) if went && has_key => {
                    "the client went when it had seen the proof of this server's key; perhaps its \
                     key is another one"
                        .to_owned()
                }
                _ => error.to_string(),
            };
            log::warn!("connection from {peer} ended in its handshake: {why}");
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

/// The same of a connection that is no client's.
async fn watch_welcome(connection: Weak<dyn Connection>, welcomed: Arc<AtomicBool>) {
    sleep(HANDSHAKE_MAX).await;
    if let Some(connection) = connection.upgrade()
        && !welcomed.load(Ordering::SeqCst)
    {
        connection.close();
    }
}

/// The state that a connection's calls share with its receiver.
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

    fn under_way(&self) -> u32 {
        self.in_flight.load(Ordering::Relaxed) + self.one_way.load(Ordering::Relaxed)
    }

    fn serving(&self) -> bool {
        self.lock().serving
    }
}

enum Stage {
    Hello,
    /// The client's proof is awaited.
    ChallengedPeer(Box<ChallengedPeer>),
    /// A new session is being noted, on media, which can take its time.
    Beginning(Arc<Beginning>),
    Serving(Arc<ServerSession>),
}

/// A new session of a connection.
#[derive(Default)]
struct Beginning {
    /// Once it has begun.
    session: OnceLock<Arc<ServerSession>>,
    /// The connection has ended meanwhile.
    gone: AtomicBool,
}

struct ServerSink {
    server: Arc<Inner>,
    connection: Arc<dyn Connection>,
    number: u64,
    peer: Peer,
    stage: Stage,
    /// Else there are as many connections as there may be.
    has_place: bool,
    /// While it is in its handshake.
    handshake_place: Option<HandshakePlace>,
    identities: Identities,
    /// The error number with which it was turned away.
    refused: Option<u16>,
    /// The client had no definition of the projection, and was given one: so a mount begins.
    only_asked: bool,
    shared: Arc<Shared>,
}

impl Sink for ServerSink {
    fn poll_place(
        &mut self,
        cx: &mut TaskContext<'_>,
        head: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        let session = self.session_for_data(head)?;
        session.buffers.poll_get(cx, data_bytes).map(Ok)
    }

    /// As they are: they count as this session's for as long as it has them.
    fn poll_shared(
        &mut self,
        cx: &mut TaskContext<'_>,
        head: &[u8],
        data: &Buf,
    ) -> Poll<io::Result<()>> {
        let session = self.session_for_data(head)?.clone();
        session.buffers.poll_charge(cx, data.len()).map(|charge| {
            let data = data.clone().kept_with(charge);
            self.message(&session, head, Some(data))
        })
    }

    fn poll_head(
        &mut self,
        cx: &mut TaskContext<'_>,
        head: &[u8],
    ) -> Poll<io::Result<Option<BufMut>>> {
        self.look();
        let Stage::Serving(session) = &self.stage else { return Poll::Ready(Ok(None)) };
        let many = self.shared.under_way() >= CALLS_FREE;
        if head.len() <= HEAD_FREE_BYTES && !many {
            return Poll::Ready(Ok(None)); // nearly always
        }
        let bytes = head.len() + if many { CALL_BYTES } else { 0 };
        session.buffers.poll_charge(cx, bytes).map(|charge| Ok(Some(charge.beside())))
    }

    fn is_for_a_file(&self, head: &[u8]) -> bool {
        let mut input = Input(head);
        let call =
            CallHead::get_message(&mut input).and_then(|call| Call::get(call.op, &mut input));
        call.is_ok_and(|call| call.row().takes_pages)
    }

    fn frame(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()> {
        self.look();
        match &self.stage {
            Stage::Serving(session) => {
                let session = session.clone();
                self.message(&session, head, data.map(BufMut::freeze))
            }
            Stage::Hello => self.hello(head).map_err(|error| self.refuse(error)),
            Stage::ChallengedPeer { .. } => self.proof(head).map_err(|error| self.refuse(error)),
            Stage::Beginning(_) => Err(Malformed("a message before the welcome").into()),
        }
    }
}

impl ServerSink {
    /// The session that the data behind this head belong to. Errors: no data belong behind this
    /// head.
    fn session_for_data(&mut self, head: &[u8]) -> io::Result<&Arc<ServerSession>> {
        self.look();
        let Stage::Serving(session) = &self.stage else {
            return Err(Malformed("data in a handshake").into());
        };
        let call = CallHead::get_message(&mut Input(head));
        let takes_data = match &call {
            Ok(call) => OpRow::of(call.op).takes_data,
            Err(_) => peek_unknown_op(head).is_some(), // a later version's; it is refused
        };
        match takes_data {
            true => Ok(session),
            false => Err(Malformed("data where none belongs").into()),
        }
    }

    /// Whether its new session has begun.
    fn look(&mut self) {
        if let Stage::Beginning(beginning) = &self.stage
            && let Some(session) = beginning.session.get()
        {
            self.stage = Stage::Serving(session.clone());
        }
    }

    /// Why its handshake came to nothing.
    fn fault(&self) -> HandshakeFault {
        let errno = self.refused.unwrap_or(0);
        match self.stage {
            Stage::Hello if self.refused.is_none() => HandshakeFault::Greeting,
            Stage::Hello => HandshakeFault::Greeted(errno),
            _ => HandshakeFault::Challenged(errno),
        }
    }

    fn say(&self, message: &[u8]) {
        let _ = self.connection.send(message, None); // a broken connection ends `run`
    }
}
