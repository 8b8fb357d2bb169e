//! A connection by which one server brings batches to another one. They are notes of a slice's journal, or
//! what the server uses of limits that both keep.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context as TaskContext, Poll};

use dray_core::{Buf, BufMut, Errno};
use dray_fabric::{Connection, DATA_MAX_BYTES, Peer, Sink};
use dray_rt::random_bytes;

use super::handshake::agree;
use super::{Admission, watch_welcome};
use crate::auth::{Key, Role, Transcript};
use crate::server::connection_limits::HandshakePlace;
use crate::server::export::Allow;
use crate::server::log_throttle::LogThrottle;
use crate::server::replication::{BatchTaker, ReplicaRefusal};
use crate::server::sessions::refused;
use crate::wire::{
    Auth, BatchHead, BatchOutcome, BatchReply, Challenge, HandshakeError, Malformed, Proof,
    Refused, ReplicaHello, ReplicaWelcome,
};

/// Answers that the other server has not read. It waits for each before it sends more.
const UNREAD_MAX: usize = 16;

/// What the servers of a slice demand of each other.
#[derive(Clone, Debug, Default)]
pub struct ReplicaTerms {
    /// Both ends prove that they know it.
    pub key: Option<Key>,
    /// Where there is no key: from where the other server may come, and then from a privileged port
    /// only. Empty: from everywhere.
    pub allow: Vec<Allow>,
    /// The fingerprint of the definition that both must have.
    pub definition: u64,
}

/// The slice that the first message of another server is about; none if the message is no such
/// greeting. It is unchecked, as [`wanted_export`](super::wanted_export) is.
pub fn wanted_slice(head: &[u8]) -> Option<String> {
    ReplicaHello::from_message(head).ok().map(|hello| hello.slice)
}

/// Where the notes of one slice arrive.
pub struct ReplicaPort {
    slice: String,
    terms: ReplicaTerms,
    /// The newest connection that was welcomed. It takes the place of the one before it, so that the
    /// memory for batches is that of one.
    newest: Mutex<Option<Weak<dyn Connection>>>,
    turned_away: LogThrottle,
}

impl ReplicaPort {
    /// For the slice with this name.
    pub fn new(slice: &str, terms: ReplicaTerms) -> ReplicaPort {
        ReplicaPort {
            slice: slice.to_owned(),
            terms,
            newest: Mutex::default(),
            turned_away: LogThrottle::default(),
        }
    }

    /// Serves a connection of the slice's other server until it ends; a task of the executor that the
    /// connection was made on. `taker` takes the batches, which may wait for a disk.
    pub async fn serve(
        &self,
        taker: &dyn BatchTaker,
        connection: Arc<dyn Connection>,
        admission: Admission,
    ) {
        let welcomed = Arc::new(AtomicBool::new(false));
        dray_rt::spawn(watch_welcome(Arc::downgrade(&connection), welcomed.clone()));
        let mut sink = ReplicaSink {
            port: self,
            taker,
            connection: connection.clone(),
            stage: Stage::Hello,
            has_place: admission.connection_place.is_some(),
            handshake_place: Some(admission.handshake_place),
            welcomed,
        };
        let error = connection.run(&mut sink).await;
        let (slice, peer) = (&self.slice, connection.peer());
        match sink.stage {
            Stage::Serving => log::debug!("slice {slice}: connection of {peer} ended: {error}"),
            Stage::Hello | Stage::Challenged(_) => self.turned_away.say(|more| {
                log::warn!("{slice}: {peer} is not its other server: {error}{more}");
            }),
        }
    }

    /// Errors: somebody at `peer` may not be the other server, without a proof.
    fn admit_without_key(&self, peer: Peer) -> Result<(), Refused> {
        let slice = &self.slice;
        let is_allowed = match peer {
            Peer::Local | Peer::User(..) => true,
            Peer::Ip(address) => {
                let mut allow = self.terms.allow.iter();
                self.terms.allow.is_empty() || allow.any(|net| net.contains(address.ip()))
            }
        };
        if is_allowed && peer.is_privileged() {
            return Ok(());
        }
        Err(refused(
            Errno::EACCES,
            format!(
                "{slice} takes nothing from {peer}: without a key its servers have to be in \
                 `allow`, and to come from ports below 1024"
            ),
        ))
    }

    fn welcomes(&self, connection: &Arc<dyn Connection>) {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let former = newest.replace(Arc::downgrade(connection));
        drop(newest);
        former.and_then(|former| former.upgrade()).into_iter().for_each(|one| one.close());
    }
}

enum Stage {
    Hello,
    Challenged(Box<Challenged>),
    Serving,
}

/// A handshake half way.
struct Challenged {
    /// The hello as it came, which the proofs cover.
    hello: Vec<u8>,
    version: u16,
    nonce: [u8; 32],
}

impl Challenged {
    fn transcript<'a>(&'a self, wish: &'a [u8]) -> Transcript<'a> {
        let Challenged { hello, version, nonce } = self;
        Transcript { hello, version: *version, features: 0, server_nonce: nonce, wish }
    }
}

struct ReplicaSink<'a> {
    port: &'a ReplicaPort,
    taker: &'a dyn BatchTaker,
    connection: Arc<dyn Connection>,
    stage: Stage,
    /// Else there are as many connections as there may be.
    has_place: bool,
    handshake_place: Option<HandshakePlace>,
    welcomed: Arc<AtomicBool>,
}

impl ReplicaSink<'_> {
    fn hello(&mut self, head: &[u8]) -> Result<(), HandshakeError> {
        let version = agree(ReplicaHello::versions(head)?).map_err(HandshakeError::Refused)?;
        let hello = ReplicaHello::from_message(head)?;
        self.admit(&hello).map_err(HandshakeError::Refused)?;
        let mut nonce = [0; 32];
        random_bytes(&mut nonce);
        let challenged = Challenged { hello: head.to_vec(), version, nonce };
        let key = self.port.terms.key.as_ref();
        let proof = key.map_or([0; 32], |key| key.prove(Role::Server, challenged.transcript(&[])));
        self.say(&Challenge { version, features: 0, nonce, proof }.message());
        self.stage = Stage::Challenged(Box::new(challenged));
        Ok(())
    }

    fn admit(&self, hello: &ReplicaHello) -> Result<(), Refused> {
        let slice = &self.port.slice;
        if !self.has_place {
            return Err(refused(Errno::EAGAIN, "the server has as many connections as it may"));
        }
        if hello.slice != *slice {
            return Err(refused(Errno::ENOENT, format!("this is slice {slice}")));
        }
        match (&self.port.terms.key, hello.auth) {
            (Some(_), Auth::Psk) => Ok(()),
            (None, Auth::None) => self.port.admit_without_key(self.connection.peer()),
            (Some(_), Auth::None | Auth::Other(_)) | (None, Auth::Psk | Auth::Other(_)) => {
                Err(refused(
                    Errno::EKEYREJECTED,
                    "of the servers of the projection some have a key and some have none: start all \
                     with the same --auth",
                ))
            }
        }
    }

    fn proof(&mut self, head: &[u8]) -> Result<(), HandshakeError> {
        let proof = Proof::from_message(head)?;
        let Stage::Challenged(challenged) = &self.stage else {
            return Err(Malformed("a proof without a challenge").into());
        };
        let wish = proof.wish();
        let terms = &self.port.terms;
        if let Some(key) = &terms.key
            && !key.verify(Role::Client, challenged.transcript(&wish), &proof.proof)
        {
            return Err(HandshakeError::Refused(refused(
                Errno::EKEYREJECTED,
                "the servers of the projection have different keys: compare the key files",
            )));
        }
        if proof.definition != terms.definition {
            return Err(HandshakeError::Refused(refused(
                Errno::EREMCHG,
                "the servers have different definitions of the projection: give them the same file",
            )));
        }
        self.stage = Stage::Serving;
        self.welcomed.store(true, Ordering::SeqCst);
        self.handshake_place = None;
        self.port.welcomes(&self.connection);
        self.say(&ReplicaWelcome { batch_max_bytes: DATA_MAX_BYTES as u32 }.message());
        Ok(())
    }

    /// Takes a batch, and answers what became of it. Errors: it is no batch, or the other server does
    /// not read the answers.
    fn batch(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()> {
        let BatchHead { epoch, number } = BatchHead::get_message(head)?;
        if self.connection.queued_frames() >= UNREAD_MAX {
            return Err(Malformed("more batches at once than were allowed").into());
        }
        let notes = data.as_ref().map_or(&[][..], BufMut::filled);
        let taken = self.taker.take(epoch, number, notes);
        let (outcome, errno) = outcome_of(&taken);
        let answer = taken.ok().filter(|answer| !answer.is_empty());
        debug_assert!(answer.as_ref().is_none_or(|answer| answer.len() <= DATA_MAX_BYTES));
        let mut reply = Vec::new();
        BatchReply { epoch, number, outcome, errno }.put_message(&mut reply);
        let _ = self.connection.send(&reply, answer.map(Buf::from)); // as in `say`
        Ok(())
    }

    fn refuse(&self, error: HandshakeError) -> io::Error {
        match error {
            HandshakeError::Refused(refused) => {
                self.say(&refused.refusal());
                io::Error::new(io::ErrorKind::PermissionDenied, refused.message)
            }
            HandshakeError::Malformed(malformed) => malformed.into(),
        }
    }

    fn say(&self, message: &[u8]) {
        let _ = self.connection.send(message, None); // a broken connection ends `run`
    }
}

fn outcome_of<T>(taken: &Result<T, ReplicaRefusal>) -> (BatchOutcome, u16) {
    match taken {
        Ok(_) => (BatchOutcome::Taken, 0),
        Err(ReplicaRefusal::Deposed) => (BatchOutcome::Deposed, 0),
        Err(ReplicaRefusal::Incomplete) => (BatchOutcome::Incomplete, 0),
        Err(ReplicaRefusal::Malformed(_)) => (BatchOutcome::Malformed, 0),
        Err(ReplicaRefusal::Io(error)) => {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            (BatchOutcome::Unkept, u16::try_from(errno).unwrap_or(libc::EIO as u16))
        }
    }
}

impl Sink for ReplicaSink<'_> {
    fn poll_place(
        &mut self,
        _: &mut TaskContext<'_>,
        head: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(match self.stage {
            // One at a time: nothing more is read before it has been taken.
            Stage::Serving => BatchHead::get_message(head)
                .map(|_| BufMut::heap(data_bytes))
                .map_err(io::Error::from),
            Stage::Hello | Stage::Challenged(_) => Err(Malformed("data in a handshake").into()),
        })
    }

    fn frame(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()> {
        let step = match &self.stage {
            Stage::Hello => self.hello(head),
            Stage::Challenged(_) => self.proof(head),
            Stage::Serving => return self.batch(head, data),
        };
        step.map_err(|error| self.refuse(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_core::{Gid, Uid};

    // proves: P147
    #[test]
    fn without_a_key_a_server_comes_from_an_allowed_address_and_a_privileged_port() {
        let port = |allow: &[&str]| {
            let allow = allow.iter().map(|range| range.parse().unwrap()).collect();
            ReplicaPort::new("x/0.1", ReplicaTerms { key: None, allow, definition: 5 })
        };
        let at = |last: u8, port: u16| Peer::Ip(([10, 0, 0, last], port).into());
        for (allow, peer, is_admitted) in [
            (&[][..], at(1, 700), true),
            (&[], at(1, 7000), false),
            (&[], Peer::Local, true),
            (&[], Peer::User(Uid(7), Gid(7)), false),
            (&["10.0.0.1"], at(1, 700), true),
            (&["10.0.0.1"], at(2, 700), false),
        ] {
            let admitted = port(allow).admit_without_key(peer);
            assert_eq!(admitted.is_ok(), is_admitted, "{allow:?} {peer:?} {admitted:?}");
        }
    }
}
