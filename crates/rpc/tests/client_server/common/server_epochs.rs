//! A server that is killed and restarted, and hand-written clients of it.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dray_backends::posix;
use dray_core::{Entry, FileSystem, Gid, Identity, Op, Uid};
use dray_fabric::Address;
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::auth::{Key, Role, Transcript};
use dray_rpc::server::{
    Export, Journal, MemoryJournal, Server, ServerOptions, SlotRecord, StateLoss,
};
use dray_rpc::wire::{
    Call, CallHead, Challenge, FEATURES, Hello, Input, NO_SLOT, NotifyHead, Proof, ReplyHead,
    Welcome,
};

use super::raw::{
    NO_PROOF, PATIENCE, frame, handshake_as, head, hello, identity_of, message, read_frame,
    unauthenticated,
};

/// A file system and what its servers have noted.
pub struct ServerEpochs {
    fs: Arc<dyn FileSystem>,
    pub journal: MemoryJournal,
    dir: tempfile::TempDir,
    count: u32,
}

impl ServerEpochs {
    pub fn of(fs: Arc<dyn FileSystem>) -> ServerEpochs {
        let dir = tempfile::tempdir().unwrap();
        ServerEpochs { fs, journal: MemoryJournal::default(), dir, count: 0 }
    }

    /// Runs a server epoch in which calls have these faults. The server's process is killed when
    /// `clients` are done.
    pub fn run<T: Send + 'static>(
        &mut self,
        faults: Vec<Fault>,
        clients: impl FnOnce(&Path) -> T + Send + 'static,
    ) -> T {
        self.run_after(StateLoss::Nothing, faults, clients)
    }

    /// The same after such a loss.
    pub fn run_after<T: Send + 'static>(
        &mut self,
        loss: StateLoss,
        faults: Vec<Fault>,
        clients: impl FnOnce(&Path) -> T + Send + 'static,
    ) -> T {
        self.count += 1;
        let socket = self.dir.path().join(self.count.to_string());
        let fs = Observed::new(self.fs.clone(), Arc::new(Faults::new(faults)));
        let export = Export::new("data", Arc::new(fs), Vec::new());
        let options = ServerOptions { boot: u128::from(self.count), ..ServerOptions::default() };
        let server = Server::new(options, vec![export], Arc::new(self.journal.clone()));
        let thread = super::run(async {
            server.restore(loss).await;
            super::serve_sockets(&Address::Unix(socket.clone()), server).await;
            let thread = std::thread::spawn(move || clients(&socket));
            while !thread.is_finished() {
                dray_rt::sleep(Duration::from_millis(2)).await;
            }
            thread
        });
        posix::release().unwrap(); // this thread was some caller
        thread.join().unwrap()
    }
}

/// Holds a call up until its server is killed.
pub fn held_up(op: Op, nth: u64) -> Fault {
    let delay = Duration::from_secs(1 << 20);
    Fault { op: Some(op), when: When::Nth(nth), delay, error: None }
}

/// Waits until a change of this kind has been noted that is not answered.
pub fn wait_noted(journal: &MemoryJournal, op: Op) {
    let begin = Instant::now();
    let noted =
        |record: &SlotRecord| matches!(record, SlotRecord::Intent { op: of, .. } if *of == op);
    while !journal.load().iter().any(|(_, log)| log.records().iter().any(|(_, one)| noted(one))) {
        assert!(begin.elapsed() < PATIENCE, "it is not noted");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Users that a client speaks for, by the numbers of their identities.
pub const ROOT: u32 = 0;
pub const ANN: u32 = 1;
pub const BOB: u32 = 2;

/// The identity of the user with this number.
pub fn identity_of_user(user: u32) -> Identity {
    let id = [0, 1000, 1001][user as usize];
    Identity { uid: Uid(id), gid: Gid(id), ..Identity::default() }
}

/// A client with one session and one connection.
pub struct Hand {
    stream: UnixStream,
    /// To come back with.
    pub session: (u64, [u8; 16]),
    sequence: u32,
}

impl Hand {
    pub fn new(socket: &Path) -> Hand {
        let hello = Hello { features: FEATURES, ..hello("data") };
        let (stream, welcome) = handshake_as(socket, &hello, &NO_PROOF).unwrap();
        Hand::with(stream, &welcome)
    }

    fn with(mut stream: UnixStream, welcome: &Welcome) -> Hand {
        for user in [ANN, BOB] {
            stream.write_all(&frame(&identity_of(user, &identity_of_user(user)), b"")).unwrap();
        }
        Hand { stream, session: (welcome.session, welcome.secret), sequence: 0 }
    }

    /// Goes on with a session, by its secret.
    pub fn back(socket: &Path, session: (u64, [u8; 16])) -> Hand {
        let mut stream = unauthenticated(socket);
        let hello = Hello { features: FEATURES, ..hello("data") }.message();
        stream.write_all(&frame(&hello, b"")).unwrap();
        let challenge = Challenge::from_message(&read_frame(&mut stream).unwrap().0).unwrap();
        let mut proof = Proof { session: session.0, ..NO_PROOF };
        let seen = Transcript {
            hello: &hello,
            version: challenge.version,
            features: challenge.features,
            server_nonce: &challenge.nonce,
            wish: &proof.wish(),
        };
        proof.session_proof = Key::of_session(&session.1).prove(Role::Session, seen);
        stream.write_all(&frame(&proof.message(), b"")).unwrap();
        let welcome = Welcome::from_message(&read_frame(&mut stream).unwrap().0).unwrap();
        assert!(welcome.resumed);
        stream.write_all(&frame(&identity_of(ROOT, &identity_of_user(ROOT)), b"")).unwrap();
        Hand::with(stream, &welcome)
    }

    /// Says that nothing is to come back for.
    pub fn returned(&mut self) {
        let mut notice = Vec::new();
        NotifyHead { what: NotifyHead::RECOVERY_COMPLETE, flags: 0, tag: 0 }
            .put_message(&mut notice);
        self.stream.write_all(&frame(&notice, b"")).unwrap();
    }

    /// Sends a call.
    pub fn send(&mut self, head: CallHead, call: &Call<'_>, data: &[u8]) {
        self.stream.write_all(&frame(&message(&head, call), data)).unwrap();
    }

    /// The next answer.
    pub fn answer(&mut self) -> Answer {
        let (message, data) = read_frame(&mut self.stream).unwrap();
        let head = ReplyHead::get_message(&mut Input(&message)).unwrap();
        Answer { head, message, data }
    }

    /// Makes a call in no slot as this user.
    pub fn ask(&mut self, user: u32, call: &Call<'_>, data: &[u8]) -> Answer {
        let head = CallHead { identity: user, slot: NO_SLOT, ..head(call.op(), 7) };
        self.send(head, call, data);
        self.answer()
    }

    /// The head of a change: the first, or the one after the last.
    pub fn next(&mut self, user: u32, op: Op) -> CallHead {
        self.sequence += 1;
        CallHead { identity: user, slot: 0, sequence: self.sequence, ..head(op, 7) }
    }

    /// Makes a change as this user.
    pub fn change(&mut self, user: u32, call: &Call<'_>, data: &[u8]) -> Answer {
        let head = self.next(user, call.op());
        self.send(head, call, data);
        self.answer()
    }
}

/// The server's answer to a call.
pub struct Answer {
    pub head: ReplyHead,
    pub message: Vec<u8>,
    pub data: Vec<u8>,
}

impl Answer {
    /// 0, or why it failed.
    pub fn errno(&self) -> i32 {
        i32::from(self.head.errno)
    }

    /// The entry that a successful lookup or creation has found.
    pub fn entry(&self) -> Entry {
        assert_eq!(self.errno(), 0);
        let (_, results) = ReplyHead::split(&self.message).unwrap();
        Input(results).get().unwrap()
    }
}
