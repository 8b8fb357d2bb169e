//! A connection by which a command on another machine reads the audit of an export.
//!
//! The reader asks, and the server answers; nothing is sent that was not asked for. So a slow reader
//! costs one answer of memory, and holds up nobody but itself. The log is read on threads of a pool of
//! its own: a thread that serves connections does not wait for a disk.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use dray_core::{Buf, BufMut, Errno};
use dray_fabric::{Connection, Peer, Sink};
use dray_rt::{Pool, random_bytes, sleep};

use super::handshake::agree;
use super::{Admission, watch_welcome};
use crate::auth::{Key, Role, Transcript};
use crate::server::connection_limits::HandshakePlace;
use crate::server::export::Allow;
use crate::server::log_throttle::LogThrottle;
use crate::server::sessions::refused;
use crate::wire::{
    AuditCall, AuditHello, AuditReply, AuditWelcome, Auth, Challenge, HandshakeError, Malformed,
    Proof, Refused,
};

/// Readers of all exports together.
const READERS_MAX: usize = 64;
/// Threads that read logs for them.
const THREADS_MAX: usize = 2;
/// Answers that a reader has not read. It asks one thing at a time.
const UNREAD_MAX: usize = 2;
/// The longest wait for records that one question can ask for.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// How often the log is looked at meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Answers the questions of one reader. A call may wait for a disk.
pub trait AuditReader: Send {
    /// The answer, and the records that go with it. The caller waits for records.
    fn answer(&mut self, call: &AuditCall) -> (AuditReply, Vec<u8>);
}

/// Who may read the audit of an export, and how.
pub struct AuditExport {
    /// Addresses that may use the export; empty: all.
    pub allow: Vec<Allow>,
    /// Root of a client is root at the export: then it may read the audit, too.
    pub trusts_root: bool,
    /// Addresses of machines whose root may read the audit, whatever the export makes of root.
    pub readers: Vec<Allow>,
    /// Makes what answers one reader.
    pub open: Box<dyn Fn() -> Box<dyn AuditReader> + Send + Sync>,
}

/// The export whose audit the first message of a connection asks for; none if the message is no such
/// greeting. It is unchecked, as [`wanted_export`](super::wanted_export) is.
pub fn wanted_audit(head: &[u8]) -> Option<String> {
    AuditHello::from_message(head).ok().map(|hello| hello.export)
}

/// Where readers of audits arrive.
pub struct AuditPort {
    key: Option<Key>,
    exports: BTreeMap<String, AuditExport>,
    pool: Pool,
    readers: AtomicUsize,
    turned_away: LogThrottle,
}

impl AuditPort {
    /// For the audits of these exports. With a `key` readers prove that they have it.
    pub fn new(key: Option<Key>, exports: BTreeMap<String, AuditExport>) -> AuditPort {
        AuditPort {
            key,
            exports,
            pool: Pool::new("dray-log", THREADS_MAX, READERS_MAX),
            readers: AtomicUsize::new(0),
            turned_away: LogThrottle::default(),
        }
    }

    /// Serves a connection until it ends; a task of the executor that the connection was made on.
    pub async fn serve(self: Arc<Self>, connection: Arc<dyn Connection>, admission: Admission) {
        let welcomed = Arc::new(AtomicBool::new(false));
        dray_rt::spawn(watch_welcome(Arc::downgrade(&connection), welcomed.clone()));
        let mut sink = AuditSink {
            port: self.clone(),
            connection: connection.clone(),
            stage: AuditStage::Hello,
            has_place: admission.connection_place.is_some(),
            handshake_place: Some(admission.handshake_place),
            welcomed,
        };
        let error = connection.run(&mut sink).await;
        let peer = connection.peer();
        match &sink.stage {
            AuditStage::Serving(reader) => {
                reader.gone.store(true, Ordering::SeqCst);
                log::debug!("{peer} has read the audit of export {}: {error}", reader.export);
            }
            AuditStage::Hello | AuditStage::Challenged(_) => self.turned_away.say(|more| {
                log::warn!("{peer} reads no audit: {error}{more}");
            }),
        }
    }

    /// Errors: a reader at `peer` may not read the audit of this export, or not without a proof.
    fn admit(&self, hello: &AuditHello, peer: Peer) -> Result<(), Refused> {
        let name = &hello.export;
        let Some(export) = self.exports.get(name) else {
            let message = format!("no export `{name}` of this server has an audit");
            return Err(refused(Errno::ENOENT, message));
        };
        let may = match peer {
            Peer::Local => true,
            Peer::User(..) => false,
            Peer::Ip(address) => {
                let within = |ranges: &[Allow]| ranges.iter().any(|net| net.contains(address.ip()));
                let may_use = export.allow.is_empty() || within(&export.allow);
                may_use && (export.trusts_root || within(&export.readers))
            }
        };
        if !may {
            let message = format!(
                "the audit of export `{name}` is not open to {peer}: `audit_readers` of the export names \
                 the machines that may read it, and `squash=none` lets the root of each client do so"
            );
            return Err(refused(Errno::EACCES, message));
        }
        match (&self.key, hello.auth) {
            (Some(_), Auth::Psk) => Ok(()),
            (None, Auth::None) if peer == Peer::Local => Ok(()),
            (None, Auth::None) => Err(refused(
                Errno::EACCES,
                "an audit is read over the network with a key only, and the server has none: read it on \
                 the server's machine, or start the server with --auth psk:FILE",
            )),
            (Some(_), Auth::None | Auth::Other(_)) => Err(refused(
                Errno::EKEYREJECTED,
                "the server wants a shared key: say --auth psk:FILE",
            )),
            (None, Auth::Psk | Auth::Other(_)) => Err(refused(
                Errno::EKEYREJECTED,
                "the server has no key, and the reader wants proof of one: say --auth none",
            )),
        }
    }

    /// A place for one more reader. Errors: there are as many as there may be.
    fn enter(self: &Arc<Self>, export: &str) -> Result<Arc<ReaderState>, Refused> {
        let before = self.readers.fetch_add(1, Ordering::SeqCst);
        let place = ReaderPlace(self.clone());
        let known = self.exports.get(export).filter(|_| before < READERS_MAX);
        let known = known.ok_or_else(|| {
            refused(Errno::EAGAIN, "as many read audits of this server as may: come back later")
        })?;
        Ok(Arc::new(ReaderState {
            export: export.to_owned(),
            reader: Mutex::new(Some((known.open)())),
            gone: AtomicBool::new(false),
            place,
        }))
    }
}

/// A reader counts as long as there is one of these.
struct ReaderPlace(Arc<AuditPort>);

impl Drop for ReaderPlace {
    fn drop(&mut self) {
        self.0.readers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A reader that was welcomed.
struct ReaderState {
    export: String,
    /// None while a question is answered.
    reader: Mutex<Option<Box<dyn AuditReader>>>,
    gone: AtomicBool,
    place: ReaderPlace,
}

impl ReaderState {
    fn reader(&self) -> std::sync::MutexGuard<'_, Option<Box<dyn AuditReader>>> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers a question, once there is something or its time is over.
    async fn answer(
        self: Arc<Self>,
        call: AuditCall,
        mut reader: Box<dyn AuditReader>,
        connection: Arc<dyn Connection>,
    ) {
        let begun = dray_rt::now();
        let wait = wait_of(&call);
        let call = Arc::new(call);
        loop {
            let asked = call.clone();
            let answered = self.place.0.pool.run(move || {
                let answer = reader.answer(&asked);
                (reader, answer)
            });
            let Ok((again, (reply, data))) = answered.await else {
                return connection.close(); // there is no thread; the reader comes again
            };
            reader = again;
            let found = Found::of(&call, &reply, &data);
            let has_time = begun.elapsed() < wait && !self.gone.load(Ordering::SeqCst);
            match found {
                Found::Nothing if has_time => {
                    sleep(LOOK_AGAIN).await;
                    continue;
                }
                // Else a reader of few records would ask for each batch of others.
                Found::Unwanted if has_time => sleep(LOOK_AGAIN).await,
                Found::Nothing | Found::Unwanted | Found::Answer => {}
            }
            // Before the answer: the next question may come at once.
            *self.reader() = Some(reader);
            return send(&*connection, &reply, data);
        }
    }
}

/// What an answer is worth a reader.
enum Found {
    /// The log has no more records.
    Nothing,
    /// The log has more records, of which none is wanted.
    Unwanted,
    Answer,
}

impl Found {
    fn of(call: &AuditCall, reply: &AuditReply, data: &[u8]) -> Found {
        if let AuditCall::Read { from, .. } = call
            && let AuditReply::Part(part) = reply
            && !part.more
            && data.is_empty()
        {
            return if part.next_index == *from { Found::Nothing } else { Found::Unwanted };
        }
        Found::Answer
    }
}

fn wait_of(call: &AuditCall) -> Duration {
    match call {
        AuditCall::Read { wait_ms, .. } => Duration::from_millis(u64::from(*wait_ms)).min(WAIT_MAX),
        AuditCall::Summary
        | AuditCall::Register { .. }
        | AuditCall::Deregister { .. }
        | AuditCall::Advance { .. } => Duration::ZERO,
    }
}

fn send(connection: &dyn Connection, reply: &AuditReply, data: Vec<u8>) {
    let mut head = Vec::new();
    reply.put_message(&mut head);
    let sent = connection.send(&head, (!data.is_empty()).then(|| Buf::from(data)));
    if sent.is_err_and(|error| error.raw_os_error() == Some(libc::EMSGSIZE)) {
        let (errno, message) = (Errno::EOVERFLOW.raw() as u16, "the answer is too long".to_owned());
        let mut head = Vec::new();
        AuditReply::Failed { errno, message }.put_message(&mut head);
        let _ = connection.send(&head, None); // a broken connection ends `run`
    }
}

enum AuditStage {
    Hello,
    Challenged(Box<ChallengedReader>),
    Serving(Arc<ReaderState>),
}

/// A handshake half way.
struct ChallengedReader {
    /// The hello as it came, which the proofs cover.
    hello: Vec<u8>,
    export: String,
    version: u16,
    nonce: [u8; 32],
}

impl ChallengedReader {
    fn transcript<'a>(&'a self, wish: &'a [u8]) -> Transcript<'a> {
        let ChallengedReader { hello, version, nonce, .. } = self;
        Transcript { hello, version: *version, features: 0, server_nonce: nonce, wish }
    }
}

struct AuditSink {
    port: Arc<AuditPort>,
    connection: Arc<dyn Connection>,
    stage: AuditStage,
    /// Else there are as many connections as there may be.
    has_place: bool,
    handshake_place: Option<HandshakePlace>,
    welcomed: Arc<AtomicBool>,
}

impl AuditSink {
    fn hello(&mut self, head: &[u8]) -> Result<(), HandshakeError> {
        let version = agree(AuditHello::versions(head)?).map_err(HandshakeError::Refused)?;
        let hello = AuditHello::from_message(head)?;
        if !self.has_place {
            let message = "the server has as many connections as it may";
            return Err(HandshakeError::Refused(refused(Errno::EAGAIN, message)));
        }
        self.port.admit(&hello, self.connection.peer()).map_err(HandshakeError::Refused)?;
        let mut nonce = [0; 32];
        random_bytes(&mut nonce);
        let export = hello.export;
        let challenged = ChallengedReader { hello: head.to_vec(), export, version, nonce };
        let key = self.port.key.as_ref();
        let proof = key.map_or([0; 32], |key| key.prove(Role::Server, challenged.transcript(&[])));
        self.say(&Challenge { version, features: 0, nonce, proof }.message());
        self.stage = AuditStage::Challenged(Box::new(challenged));
        Ok(())
    }

    fn proof(&mut self, head: &[u8]) -> Result<(), HandshakeError> {
        let proof = Proof::from_message(head)?;
        let AuditStage::Challenged(challenged) = &self.stage else {
            return Err(Malformed("a proof without a challenge").into());
        };
        let wish = proof.wish();
        if let Some(key) = &self.port.key
            && !key.verify(Role::Client, challenged.transcript(&wish), &proof.proof)
        {
            return Err(HandshakeError::Refused(refused(
                Errno::EKEYREJECTED,
                "the reader has another key than this server: compare the key files at both ends",
            )));
        }
        let entered = self.port.enter(&challenged.export).map_err(HandshakeError::Refused)?;
        log::info!("{} reads the audit of export {}", self.connection.peer(), entered.export);
        self.stage = AuditStage::Serving(entered);
        self.welcomed.store(true, Ordering::SeqCst);
        self.handshake_place = None;
        self.say(&AuditWelcome { features: 0 }.message());
        Ok(())
    }

    /// Has a question answered. Errors: it is none, or comes before the answer to the last one.
    fn call(&self, state: &Arc<ReaderState>, head: &[u8]) -> io::Result<()> {
        let call = AuditCall::get_message(head)?;
        let unread = self.connection.queued_frames();
        let reader = state.reader().take();
        let reader = reader.filter(|_| unread < UNREAD_MAX);
        let reader = reader.ok_or(Malformed("a question before the answer to the last one"))?;
        dray_rt::spawn(state.clone().answer(call, reader, self.connection.clone()));
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

impl Sink for AuditSink {
    fn poll_place(
        &mut self,
        _: &mut TaskContext<'_>,
        _: &[u8],
        _: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(Err(Malformed("data where none belongs").into()))
    }

    fn frame(&mut self, head: &[u8], _: Option<BufMut>) -> io::Result<()> {
        let step = match &self.stage {
            AuditStage::Hello => self.hello(head),
            AuditStage::Challenged(_) => self.proof(head),
            AuditStage::Serving(state) => return self.call(state, head),
        };
        step.map_err(|error| self.refuse(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{VERSION_MAX, VERSION_MIN};
    use dray_core::{Gid, Uid};

    struct Nothing;

    impl AuditReader for Nothing {
        fn answer(&mut self, _: &AuditCall) -> (AuditReply, Vec<u8>) {
            (AuditReply::Done { bookmark: 0 }, Vec::new())
        }
    }

    fn ranges(texts: &[&str]) -> Vec<Allow> {
        texts.iter().map(|range| range.parse().unwrap()).collect()
    }

    fn port(key: bool, trusts_root: bool, allow: &[&str], readers: &[&str]) -> Arc<AuditPort> {
        let (allow, readers) = (ranges(allow), ranges(readers));
        let export =
            AuditExport { allow, trusts_root, readers, open: Box::new(|| Box::new(Nothing)) };
        let key = key.then(|| Key::new(b"0123456789abcdef").unwrap());
        Arc::new(AuditPort::new(key, BTreeMap::from([("home".to_owned(), export)])))
    }

    fn hello(export: &str, auth: Auth) -> AuditHello {
        AuditHello {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            features: 0,
            auth,
            nonce: [0; 32],
            export: export.to_owned(),
            software: String::new(),
        }
    }

    // proves: P207
    #[test]
    fn an_audit_is_read_by_root_that_counts_as_root_and_by_named_machines() {
        let at = |last: u8, port: u16| Peer::Ip(([10, 0, 0, last], port).into());
        type Case<'a> = (bool, bool, &'a [&'a str], &'a [&'a str], Auth, Peer, Option<Errno>);
        let cases: [Case<'_>; 12] = [
            (true, false, &[], &["10.0.0.1"], Auth::Psk, at(1, 7000), None),
            (true, false, &[], &["10.0.0.1"], Auth::Psk, at(2, 7000), Some(Errno::EACCES)),
            (true, false, &[], &[], Auth::Psk, at(1, 700), Some(Errno::EACCES)),
            (true, true, &[], &[], Auth::Psk, at(1, 7000), None),
            (true, true, &["10.0.0.2"], &[], Auth::Psk, at(1, 700), Some(Errno::EACCES)),
            (true, true, &[], &[], Auth::None, at(1, 700), Some(Errno::EKEYREJECTED)),
            (false, true, &[], &[], Auth::Psk, at(1, 700), Some(Errno::EKEYREJECTED)),
            (false, true, &[], &["10.0.0.1"], Auth::None, at(1, 700), Some(Errno::EACCES)),
            (false, false, &[], &[], Auth::None, Peer::Local, None),
            (false, true, &[], &[], Auth::None, Peer::User(Uid(7), Gid(7)), Some(Errno::EACCES)),
            (true, false, &[], &[], Auth::Psk, Peer::Local, None),
            (true, true, &[], &[], Auth::Psk, Peer::User(Uid(7), Gid(7)), Some(Errno::EACCES)),
        ];
        for (key, trusts_root, allow, readers, auth, peer, refused) in cases {
            let admitted = port(key, trusts_root, allow, readers).admit(&hello("home", auth), peer);
            let errno = admitted.as_ref().err().map(|refused| refused.errno);
            let wanted = refused.map(|errno| errno.raw() as u16);
            assert_eq!(errno, wanted, "{key} {trusts_root} {allow:?} {readers:?} {peer:?}");
        }
        let unknown = port(true, true, &[], &[]).admit(&hello("work", Auth::Psk), Peer::Local);
        assert_eq!(unknown.unwrap_err().errno, Errno::ENOENT.raw() as u16);
    }

    #[test]
    fn there_is_a_limit_of_readers_and_one_that_leaves_makes_room() {
        let port = port(true, true, &[], &[]);
        let mut all: Vec<_> = (0..READERS_MAX).map(|_| port.enter("home").unwrap()).collect();
        assert!(port.enter("home").is_err());
        all.pop();
        assert!(port.enter("home").is_ok());
    }
}
