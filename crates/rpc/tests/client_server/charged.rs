//! The memory that a server keeps for a client besides data counts within the client's share of the
//! buffers.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::raw::{PATIENCE, ask, frame, handshake, head, identity_of, message, read_frame};
use crate::common::{memory, run, serve_sockets};
use dray_core::{
    Context, CreateHow, FileId, FileSystem, GROUPS_MAX, Gid, Identity, Lock, LockFamily, LockKind,
    LockOwner, LockRange, Name, Op, OpenHow, Pid, XattrSet,
};
use dray_fabric::{Address, BufferPool};
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rpc::wire::{Call, CallHead, LockPurpose};

const BUFFERS_BYTES: usize = 4 << 20;
/// The most that one client has, if it is alone: half, and half of a page that is being made.
const SHARE_BYTES: usize = BUFFERS_BYTES / 2 + (200 << 10);

struct Served {
    socket: PathBuf,
    server: Server,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

impl Served {
    fn new(fs: Arc<dyn FileSystem>) -> Served {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let pool = BufferPool::new(BUFFERS_BYTES, 0);
        let export = Export::new("data", fs, Vec::new());
        let options = ServerOptions { pool, ..ServerOptions::default() };
        let (sender, receiver) = std::sync::mpsc::channel();
        let over = Arc::new(AtomicBool::new(false));
        let (address, ended) = (Address::Unix(socket.clone()), over.clone());
        let thread = std::thread::spawn(move || {
            run(async move {
                let server = Server::new(options, vec![export], Arc::new(MemoryJournal::default()));
                serve_sockets(&address, server.clone()).await;
                sender.send(server).unwrap();
                while !ended.load(Ordering::Relaxed) {
                    dray_rt::sleep(Duration::from_millis(20)).await;
                }
            });
        });
        let server = receiver.recv_timeout(PATIENCE).unwrap();
        Served { socket, server, over, thread: Some(thread), _dir: dir }
    }

    fn handshake(&self) -> (UnixStream, FileId) {
        let (stream, welcome) = handshake(&self.socket).unwrap();
        (stream, welcome.info.root)
    }

    fn used_bytes(&self) -> usize {
        self.server.status().buffer_used_bytes
    }

    /// So much comes to be counted, and never more than the share of one client. When the client
    /// goes all of it goes.
    fn holds(self, least_bytes: usize, client: UnixStream) {
        let mut most_bytes = 0;
        eventually("it is counted", || {
            most_bytes = most_bytes.max(self.used_bytes());
            most_bytes >= least_bytes
        });
        std::thread::sleep(Duration::from_millis(200));
        most_bytes = most_bytes.max(self.used_bytes());
        assert!(most_bytes <= SHARE_BYTES, "{most_bytes}");
        drop(client);
        eventually("all of it is back", || self.used_bytes() == 0);
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || ended.is_some_and(|ended| ended.is_ok()));
    }
}

fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !check() {
        assert!(begin.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A call in a slot of its own, as its `sequence`th change.
fn slotted(op: Op, slot: u32, sequence: u32) -> CallHead {
    CallHead { slot, sequence, ..head(op, slot) }
}

fn say(stream: &mut UnixStream, head: &CallHead, call: &Call<'_>) {
    stream.write_all(&frame(&message(head, call), b"")).unwrap();
}

/// Each page of a listing that was not read was a piece of the heap beside all bounds.
// proves: P128
#[test]
fn pages_of_listings_count() {
    let fs = memory();
    run(async {
        let cx = Context::system();
        let new = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: true };
        for number in 0..1000 {
            let name = format!("{number:0200}");
            let name = Name::new(name.as_bytes()).unwrap();
            let (_, file) = fs.create(&cx, fs.info().root, name, new).await.unwrap();
            file.close(&cx).await.unwrap();
        }
    });
    let served = Served::new(Arc::new(fs));
    let (mut lazy, root) = served.handshake();
    let how = OpenHow::new(libc::O_RDONLY | libc::O_DIRECTORY);
    let open = Call::Open { id: root, how, handle: 1, again: false };
    assert_eq!(ask(&mut lazy, &slotted(Op::Open, 0, 1), &open).unwrap().errno, 0);
    let list = Call::Readdir { handle: 1, cookie: 0, max_bytes: 1 << 20, plus: true };
    for tag in 1..=60 {
        say(&mut lazy, &head(Op::Readdir, tag), &list);
    }
    served.holds(1 << 20, lazy);
}

/// Nor were the values of attributes counted.
// proves: P128
#[test]
fn long_answers_count() {
    let served = Served::new(Arc::new(memory()));
    let (mut lazy, id) = served.handshake();
    let value = vec![b'v'; 60 << 10];
    let set = Call::Setxattr { id, name: b"user.x", value: &value, how: XattrSet::Any };
    assert_eq!(ask(&mut lazy, &slotted(Op::Setxattr, 0, 1), &set).unwrap().errno, 0);
    let get = Call::Getxattr { id, name: b"user.x" };
    for tag in 1..=100 {
        say(&mut lazy, &head(Op::Getxattr, tag), &get);
    }
    // All of them come in the end: who finds no room is asked again.
    eventually("they wait", || served.used_bytes() > 1 << 20);
    assert!(served.used_bytes() <= SHARE_BYTES);
    for _ in 1..=100 {
        assert!(read_frame(&mut lazy).unwrap().0.len() > value.len());
    }
    eventually("what was read is back", || served.used_bytes() == 0);
    for tag in 1..=100 {
        say(&mut lazy, &head(Op::Getxattr, tag), &get);
    }
    served.holds(1 << 20, lazy);
}

/// Long messages whose calls the file system below is slow with: further ones are not read until
/// these are over, and each is carried out.
// proves: P128
#[test]
fn bodies_of_calls_count() {
    let slow = Fault {
        op: Some(Op::Setxattr),
        when: When::Always,
        delay: Duration::from_millis(20),
        error: None,
    };
    let fs = Observed::new(Arc::new(memory()), Arc::new(Faults::new(vec![slow])));
    let served = Served::new(Arc::new(fs));
    let (stream, id) = served.handshake();
    let mut writer = stream.try_clone().unwrap();
    let writing = std::thread::spawn(move || {
        let value = vec![b'v'; 60 << 10];
        for slot in 0..60 {
            let name = format!("user.{slot}");
            let set =
                Call::Setxattr { id, name: name.as_bytes(), value: &value, how: XattrSet::Any };
            say(&mut writer, &slotted(Op::Setxattr, slot, 1), &set);
        }
    });
    let mut reader = stream.try_clone().unwrap();
    let reading = std::thread::spawn(move || {
        (0..60).for_each(|_| drop(read_frame(&mut reader).unwrap()));
    });
    let mut most_bytes = 0;
    while !reading.is_finished() {
        most_bytes = most_bytes.max(served.used_bytes());
        std::thread::sleep(Duration::from_millis(5));
    }
    writing.join().unwrap();
    reading.join().unwrap();
    assert!((1 << 20..=SHARE_BYTES).contains(&most_bytes), "{most_bytes}");
    served.holds(0, stream);
}

/// A thousand connections with callers of a MiB each took a GiB.
// proves: P128
#[test]
fn callers_count() {
    let served = Served::new(Arc::new(memory()));
    let (mut stream, _) = served.handshake();
    for index in 1..100u32 {
        let groups = (0..GROUPS_MAX as u32).map(|group| Gid(1000 * index + group)).collect();
        let who = Identity { groups, ..Identity::default() };
        stream.write_all(&frame(&identity_of(index, &who), b"")).unwrap();
    }
    served.holds(300 << 10, stream);
}

/// Nor what a call takes that waits: here for a lock that never comes.
// proves: P128
#[test]
fn calls_that_wait_count() {
    let served = Served::new(Arc::new(memory()));
    let (mut stream, root) = served.handshake();
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: true };
    let create = Call::Create { dir: root, name: b"f", how, handle: 1 };
    assert_eq!(ask(&mut stream, &slotted(Op::Create, 0, 1), &create).unwrap().errno, 0);
    for owner in 1..=100 {
        let (family, kind) = (LockFamily::Posix, LockKind::Exclusive);
        let (range, owner) = (LockRange::ALL, LockOwner::own(owner));
        let lock = Lock { family, kind, range, owner, pid: Pid(1) };
        let call = Call::Lock { handle: 1, lock, wait: true, purpose: LockPurpose::Program };
        say(&mut stream, &head(Op::Lock, owner.number as u32), &call);
    }
    served.holds(700 << 10, stream);
}
