//! Reads the audit of an export at its server, over the wire.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context as TaskContext, Poll};

use dray_core::BufMut;
use dray_fabric::{Connect, Connection, Sink};
use dray_rt::sync::oneshot;

use crate::auth::{Key, Role, Transcript};
use crate::wire::{
    AuditCall, AuditHello, AuditReply, AuditWelcome, Auth, Challenge, HandshakeError, Malformed,
    Proof, VERSION_MAX, VERSION_MIN,
};

/// Longest answer with records that is taken, bytes.
const RECORDS_MAX_BYTES: usize = 1 << 20;

/// Why an audit cannot be read.
#[derive(Debug)]
pub enum AuditError {
    /// The server refused, or does not speak the protocol. To try again is of no use.
    Refused(String),
    /// The server cannot be reached, or the connection broke.
    Away(io::Error),
}

impl fmt::Display for AuditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AuditError::Refused(why) => f.write_str(why),
            AuditError::Away(error) => error.fmt(f),
        }
    }
}

impl From<io::Error> for AuditError {
    fn from(error: io::Error) -> AuditError {
        AuditError::Away(error)
    }
}

type Answered = Result<(AuditReply, Vec<u8>), AuditError>;

/// Who waits for what comes next.
enum Awaited {
    Welcome(oneshot::Sender<Result<(), AuditError>>),
    Answer(oneshot::Sender<Answered>),
    Nothing,
    /// The connection is over.
    Over,
}

/// One connection, by which one question is asked at a time. It ends when this is dropped.
pub struct AuditLink {
    connection: Arc<dyn Connection>,
    awaited: Arc<Mutex<Awaited>>,
}

impl Drop for AuditLink {
    fn drop(&mut self) {
        self.connection.close();
    }
}

fn lock(awaited: &Mutex<Awaited>) -> MutexGuard<'_, Awaited> {
    awaited.lock().unwrap_or_else(PoisonError::into_inner)
}

fn gone() -> AuditError {
    AuditError::Away(io::ErrorKind::ConnectionAborted.into())
}

impl AuditLink {
    /// Connects for the audit of an export, on the executor of the calling task. Errors: the server
    /// is away or refuses.
    pub async fn connect(
        connector: &dyn Connect,
        export: &str,
        key: Option<Key>,
    ) -> Result<AuditLink, AuditError> {
        let connection = connector.connect().await?;
        let (tell, welcomed) = oneshot::channel();
        let awaited = Arc::new(Mutex::new(Awaited::Welcome(tell)));
        let link = AuditLink { connection: connection.clone(), awaited: awaited.clone() };
        let hello = hello(export, key.is_some());
        let mut sink = AuditSink {
            connection: connection.clone(),
            key,
            hello,
            stage: AuditStage::Begun,
            awaited,
        };
        connection.send(&sink.hello, None)?;
        dray_rt::spawn(async move {
            let error = connection.run(&mut sink).await;
            sink.tell_error(AuditError::Away(error), Awaited::Over);
        });
        welcomed.await.unwrap_or_else(|_| Err(gone()))?;
        Ok(link)
    }

    /// Asks, and waits for the answer with the records that come with it. Errors: the connection is
    /// over, and a new one is needed. A call that is given up ends it, too.
    pub async fn ask(&mut self, call: &AuditCall) -> Answered {
        let (tell, answer) = oneshot::channel();
        {
            let mut awaited = lock(&self.awaited);
            if !matches!(*awaited, Awaited::Nothing) {
                return Err(gone());
            }
            *awaited = Awaited::Answer(tell);
        }
        let mut head = Vec::new();
        call.put_message(&mut head);
        self.connection.send(&head, None)?;
        answer.await.unwrap_or_else(|_| Err(gone()))
    }
}

fn hello(export: &str, has_key: bool) -> Vec<u8> {
    let mut nonce = [0; 32];
    dray_rt::random_bytes(&mut nonce);
    let hello = AuditHello {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        features: 0,
        auth: if has_key { Auth::Psk } else { Auth::None },
        nonce,
        export: export.to_owned(),
        software: env!("CARGO_PKG_VERSION").to_owned(),
    };
    hello.message()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AuditStage {
    Begun,
    Proven,
    Welcomed,
}

/// Receives on one connection.
struct AuditSink {
    connection: Arc<dyn Connection>,
    key: Option<Key>,
    /// The first message; the proofs cover it.
    hello: Vec<u8>,
    stage: AuditStage,
    awaited: Arc<Mutex<Awaited>>,
}

impl AuditSink {
    /// Notifies the caller that waits. `next` is the state from then on.
    fn tell_error(&self, error: AuditError, next: Awaited) {
        // Nobody may wait any more.
        match std::mem::replace(&mut *lock(&self.awaited), next) {
            Awaited::Welcome(tell) => drop(tell.send(Err(error))),
            Awaited::Answer(tell) => drop(tell.send(Err(error))),
            Awaited::Nothing | Awaited::Over => {}
        }
    }

    /// Proves that this end has the key, but only to a server that has proven the same.
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
            definition: 0,
        };
        if let Some(key) = &self.key {
            if !key.verify(Role::Server, seen, &challenge.proof) {
                return Err(Malformed("the server has another key: compare the key files").into());
            }
            let wish = proof.wish();
            proof.proof = key.prove(Role::Client, Transcript { wish: &wish, ..seen });
        }
        self.stage = AuditStage::Proven;
        let _ = self.connection.send(&proof.message(), None); // a broken one ends by itself
        Ok(())
    }

    fn welcomed(&mut self, head: &[u8]) -> Result<(), HandshakeError> {
        AuditWelcome::from_message(head)?;
        self.stage = AuditStage::Welcomed;
        if let Awaited::Welcome(tell) =
            std::mem::replace(&mut *lock(&self.awaited), Awaited::Nothing)
        {
            let _ = tell.send(Ok(())); // or nobody waits any more
        }
        Ok(())
    }

    fn answered(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()> {
        let reply = AuditReply::get_message(head)?;
        let data = data.map_or_else(Vec::new, |data| data.filled().to_vec());
        match std::mem::replace(&mut *lock(&self.awaited), Awaited::Nothing) {
            Awaited::Answer(tell) => drop(tell.send(Ok((reply, data)))), // as above
            Awaited::Welcome(_) | Awaited::Nothing | Awaited::Over => {
                return Err(Malformed("an answer to a question that was not asked").into());
            }
        }
        Ok(())
    }

    fn failed(&mut self, error: HandshakeError) -> io::Error {
        let why = match error {
            HandshakeError::Refused(refused) => refused.shown(),
            HandshakeError::Malformed(Malformed(what)) => what.to_owned(),
        };
        self.tell_error(AuditError::Refused(why), Awaited::Over);
        io::Error::from_raw_os_error(libc::EPROTO)
    }
}

impl Sink for AuditSink {
    fn poll_place(
        &mut self,
        _: &mut TaskContext<'_>,
        _: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(match self.stage {
            AuditStage::Welcomed if data_bytes <= RECORDS_MAX_BYTES => Ok(BufMut::heap(data_bytes)),
            AuditStage::Begun | AuditStage::Proven | AuditStage::Welcomed => {
                Err(Malformed("data where none belongs").into())
            }
        })
    }

    fn frame(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()> {
        let step = match self.stage {
            AuditStage::Begun => self.challenged(head),
            AuditStage::Proven => self.welcomed(head),
            AuditStage::Welcomed => return self.answered(head, data),
        };
        step.map_err(|error| self.failed(error))
    }
}
