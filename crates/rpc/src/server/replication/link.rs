//! The way to the other server of a slice, over the wire.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use dray_core::{Buf, BufMut, Fut};
use dray_fabric::{Connect, Connection, Sink};
use dray_rt::Instant;
use dray_rt::sync::oneshot;

use super::replica::ReplicaRefusal;
use super::slice::ReplicaLink;
use crate::auth::{Role, Transcript};
use crate::server::connection::ReplicaTerms;
use crate::wire::{
    Auth, BatchHead, BatchOutcome, BatchReply, Challenge, HandshakeError, Malformed, Proof,
    ReplicaHello, ReplicaWelcome, VERSION_MAX, VERSION_MIN,
};

/// First pause before another connection is tried; doubled each time up to the last.
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const BACKOFF_LAST: Duration = Duration::from_secs(1);
/// Batches on their way at a time.
const UNDER_WAY_MAX: usize = 16;

/// Ships batches to the other server of a slice, by one connection after the other. The first batch after
/// a failure makes the next connection.
pub struct WireLink {
    slice: String,
    connector: Arc<dyn Connect>,
    terms: ReplicaTerms,
    state: Mutex<LinkState>,
}

struct LinkState {
    channel: Option<Arc<BatchChannel>>,
    /// No connection is tried before.
    not_before: Instant,
    backoff: Duration,
}

impl WireLink {
    /// To the other server of the slice with this name, which `connector` leads to.
    pub fn new(slice: &str, connector: Arc<dyn Connect>, terms: ReplicaTerms) -> WireLink {
        let state = LinkState { channel: None, not_before: dray_rt::now(), backoff: BACKOFF_FIRST };
        WireLink { slice: slice.to_owned(), connector, terms, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn channel(&self) -> io::Result<Arc<BatchChannel>> {
        {
            let mut state = self.lock();
            if let Some(channel) = state.channel.as_ref().filter(|channel| !channel.is_over()) {
                return Ok(channel.clone());
            }
            state.channel = None;
            if dray_rt::now() < state.not_before {
                return Err(io::ErrorKind::NotConnected.into());
            }
            // Before the try: its caller may give it up.
            state.not_before = dray_rt::now() + state.backoff;
            state.backoff = (state.backoff * 2).min(BACKOFF_LAST);
        }
        let channel = self.connect().await?;
        let mut state = self.lock();
        (state.not_before, state.backoff) = (dray_rt::now(), BACKOFF_FIRST);
        state.channel = Some(channel.clone());
        Ok(channel)
    }

    async fn connect(&self) -> io::Result<Arc<BatchChannel>> {
        let connection = self.connector.connect().await?;
        let channel = Arc::new(BatchChannel {
            connection: connection.clone(),
            waiting: Mutex::new(Some(BTreeMap::new())),
        });
        let unless_welcomed = CloseOnDrop(Some(connection.clone()));
        let (tell, welcomed) = oneshot::channel();
        let mut sink = LinkSink {
            target: self.connector.target(),
            terms: self.terms.clone(),
            channel: channel.clone(),
            hello: self.hello(),
            stage: LinkStage::Begun,
            tell: Some(tell),
        };
        connection.send(&sink.hello, None)?;
        dray_rt::spawn(async move {
            let error = connection.run(&mut sink).await;
            sink.channel.end();
            sink.tell(Err(error));
        });
        let gone = |_| Err(io::ErrorKind::ConnectionAborted.into());
        welcomed.await.unwrap_or_else(gone)?;
        unless_welcomed.keep();
        Ok(channel)
    }

    fn hello(&self) -> Vec<u8> {
        let mut nonce = [0; 32];
        dray_rt::random_bytes(&mut nonce);
        let hello = ReplicaHello {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            features: 0,
            auth: if self.terms.key.is_some() { Auth::Psk } else { Auth::None },
            nonce,
            slice: self.slice.clone(),
            software: env!("CARGO_PKG_VERSION").to_owned(),
        };
        hello.message()
    }
}

impl WireLink {
    /// As [`ReplicaLink::ship`], with what the other server answers.
    pub async fn ask(
        &self,
        epoch: u64,
        number: u64,
        batch: Vec<u8>,
    ) -> Result<Vec<u8>, ReplicaRefusal> {
        let channel = self.channel().await?;
        channel.ship(BatchHead { epoch, number }, batch).await
    }
}

impl ReplicaLink for WireLink {
    fn ship<'a>(
        &'a self,
        epoch: u64,
        number: u64,
        batch: Vec<u8>,
    ) -> Fut<'a, Result<(), ReplicaRefusal>> {
        Box::pin(async move { self.ask(epoch, number, batch).await.map(drop) })
    }
}

/// Closes a connection if the task that makes it does not finish.
struct CloseOnDrop(Option<Arc<dyn Connection>>);

impl CloseOnDrop {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.iter().for_each(|connection| connection.close());
    }
}

/// Who waits for the answer to which batch.
type Waiting = BTreeMap<(u64, u64), oneshot::Sender<Result<Vec<u8>, ReplicaRefusal>>>;

/// One connection to the other server.
struct BatchChannel {
    connection: Arc<dyn Connection>,
    /// None: the connection is over.
    waiting: Mutex<Option<Waiting>>,
}

impl BatchChannel {
    fn waiting(&self) -> MutexGuard<'_, Option<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.waiting().is_none()
    }

    /// Callers that still wait have no answer.
    fn end(&self) {
        drop(self.waiting().take());
    }

    async fn ship(&self, head: BatchHead, batch: Vec<u8>) -> Result<Vec<u8>, ReplicaRefusal> {
        let (tell, answer) = oneshot::channel();
        match &mut *self.waiting() {
            None => return Err(io::Error::from(io::ErrorKind::NotConnected).into()),
            Some(waiting) if waiting.len() >= UNDER_WAY_MAX => {
                return Err(io::Error::from(io::ErrorKind::WouldBlock).into());
            }
            Some(waiting) => drop(waiting.insert((head.epoch, head.number), tell)),
        }
        // An answer that came after this was given up would be nobody's.
        let unless_answered = CloseOnDrop(Some(self.connection.clone()));
        let mut message = Vec::new();
        head.put_message(&mut message);
        let data = (!batch.is_empty()).then(|| Buf::from(batch));
        self.connection.send(&message, data)?;
        let gone = |_| Err(io::Error::from(io::ErrorKind::ConnectionAborted).into());
        let outcome = answer.await.unwrap_or_else(gone);
        unless_answered.keep();
        outcome
    }

    fn answered(&self, reply: &BatchReply, data: Option<BufMut>) -> Result<(), Malformed> {
        let mut waiting = self.waiting();
        let waiting = waiting.as_mut().and_then(|all| all.remove(&(reply.epoch, reply.number)));
        let tell = waiting.ok_or(Malformed("the answer to a batch that was not sent"))?;
        let answer = || data.map_or(Vec::new(), |data| data.filled().to_vec());
        let _ = tell.send(outcome_of(reply).map(|()| answer())); // or nobody waits any more
        Ok(())
    }
}

fn outcome_of(reply: &BatchReply) -> Result<(), ReplicaRefusal> {
    match reply.outcome {
        BatchOutcome::Taken => Ok(()),
        BatchOutcome::Deposed => Err(ReplicaRefusal::Deposed),
        BatchOutcome::Incomplete => Err(ReplicaRefusal::Incomplete),
        BatchOutcome::Malformed => {
            Err(Malformed("the other server did not understand a batch").into())
        }
        BatchOutcome::Unkept => Err(io::Error::from_raw_os_error(i32::from(reply.errno)).into()),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LinkStage {
    Begun,
    Proven,
    Welcomed,
}

/// Receives on one connection.
struct LinkSink {
    target: String,
    terms: ReplicaTerms,
    channel: Arc<BatchChannel>,
    /// The first message; the proofs cover it.
    hello: Vec<u8>,
    stage: LinkStage,
    tell: Option<oneshot::Sender<io::Result<()>>>,
}

impl LinkSink {
    fn tell(&mut self, outcome: io::Result<()>) {
        if let Some(tell) = self.tell.take() {
            let _ = tell.send(outcome); // or nobody waits any more
        }
    }

    /// Proves that this is a server of the projection, but only to one that has proven the same: the
    /// notes have the secrets of sessions.
    fn challenged(&mut self, head: &[u8]) -> Result<(), HandshakeError> {
        let challenge = Challenge::from_message(head)?;
        if !(VERSION_MIN..=VERSION_MAX).contains(&challenge.version) {
            return Err(Malformed("a protocol version that was not offered").into());
        }
        let seen = Transcript {
            hello: &self.hello,
            version: challenge.version,
            features: challenge.features,
            server_nonce: &challenge.nonce,
            wish: &[],
        };
        let mut proof = Proof {
            proof: [0; 32],
            session: 0,
            session_proof: [0; 32],
            replaces: 0,
            definition: self.terms.definition,
        };
        if let Some(key) = &self.terms.key {
            if !key.verify(Role::Server, seen, &challenge.proof) {
                return Err(Malformed("the other server does not know the key").into());
            }
            let wish = proof.wish();
            proof.proof = key.prove(Role::Client, Transcript { wish: &wish, ..seen });
        }
        self.stage = LinkStage::Proven;
        let _ = self.channel.connection.send(&proof.message(), None); // a broken one ends by itself
        Ok(())
    }

    fn welcomed(&mut self, head: &[u8]) -> Result<(), HandshakeError> {
        ReplicaWelcome::from_message(head)?;
        self.stage = LinkStage::Welcomed;
        self.tell(Ok(()));
        Ok(())
    }

    fn failed(&mut self, error: HandshakeError) -> io::Error {
        let what = match error {
            HandshakeError::Refused(refused) => refused.shown(),
            HandshakeError::Malformed(Malformed(what)) => what.to_owned(),
        };
        self.tell(Err(io::Error::other(format!("{}: {what}", self.target))));
        io::Error::from_raw_os_error(libc::EPROTO)
    }
}

impl Sink for LinkSink {
    fn poll_place(
        &mut self,
        _: &mut TaskContext<'_>,
        head: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(match self.stage {
            // The frame's limit is the answer's.
            LinkStage::Welcomed => BatchReply::get_message(head)
                .map(|_| BufMut::heap(data_bytes))
                .map_err(io::Error::from),
            LinkStage::Begun | LinkStage::Proven => Err(Malformed("data in a handshake").into()),
        })
    }

    fn frame(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()> {
        let step = match self.stage {
            LinkStage::Begun => self.challenged(head),
            LinkStage::Proven => self.welcomed(head),
            LinkStage::Welcomed => {
                return Ok(self.channel.answered(&BatchReply::get_message(head)?, data)?);
            }
        };
        step.map_err(|error| self.failed(error))
    }
}
