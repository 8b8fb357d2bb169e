//! Clients and servers that do what they like. Nobody else notices.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::calls::{self, Words};
use crate::common::raw::{
    Chance, PATIENCE, ask, frame, handshake, head, hello, identity, message, read_frame,
    unauthenticated,
};
use crate::common::{client_options, connect, memory, run, serve_sockets};
use dray_backends::posix::{PosixFs, PosixOptions, Squash};
use dray_core::{
    Buf, BufMut, Context, CreateHow, FileSystem, FsUuid, Name, Op, OpenHow, Write as WriteHow,
};
use dray_fabric::{Address, BufferPool, Sockets};
use dray_rpc::client::ClientOptions;
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rpc::wire::{Call, Challenge, Kind, NotifyHead, ReplyHead, Welcome};

const BUFFERS_BYTES: usize = 16 << 20;

/// A server of its own process's thread.
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
        let options =
            ServerOptions { pool: BufferPool::new(BUFFERS_BYTES, 0), ..ServerOptions::default() };
        let export = Export::new("data", fs, Vec::new());
        let (sender, receiver) = std::sync::mpsc::channel();
        let over = Arc::new(AtomicBool::new(false));
        let (address, ended) = (Address::Unix(socket.clone()), over.clone());
        let thread = std::thread::spawn(move || {
            run(async move {
                let server = Server::new(options, vec![export], Arc::new(MemoryJournal::default()));
                serve_sockets(&address, server.clone()).await;
                let leases = server.clone();
                dray_rt::spawn(async move { leases.expire_leases().await });
                sender.send(server).unwrap();
                while !ended.load(Ordering::Relaxed) {
                    dray_rt::sleep(Duration::from_millis(20)).await;
                }
            });
        });
        let server = receiver.recv_timeout(PATIENCE).unwrap();
        Served { socket, server, over, thread: Some(thread), _dir: dir }
    }

    /// Ends it; a panic of it is one of the test.
    fn end(mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().expect("the server died");
    }
}

fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !check() {
        assert!(begin.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Writes and reads until the flag stops it; answers how often.
fn honest_client(socket: &Path, stop: Arc<AtomicBool>) -> JoinHandle<u64> {
    let address = Address::Unix(socket.to_owned());
    std::thread::spawn(move || {
        run(async {
            let options = ClientOptions { timeout: Some(PATIENCE), ..client_options() };
            let fs = connect(Arc::new(Sockets(address)), options).await.unwrap();
            let (cx, root) = (Context::system(), fs.info().root);
            let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: true };
            let (_, file) = fs.create(&cx, root, Name::new(b"honest").unwrap(), how).await.unwrap();
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) {
                let text = vec![rounds as u8; 300_000];
                file.write(&cx, WriteHow::at(0), Buf::from(&text[..])).await.unwrap();
                let read = file.read(&cx, 0, BufMut::heap(300_000)).await.unwrap();
                assert!(read.filled() == text, "round {rounds}");
                rounds += 1;
            }
            let status = fs.session().status();
            assert_eq!((status.channels[0].connections, status.lost), (1, 0));
            rounds
        })
    })
}

/// The next bytes that a hostile client sends.
fn hostile_bytes(chance: &mut Chance, welcome: &Welcome, tag: u32) -> Vec<u8> {
    let words = Words::by_chance(chance);
    let op = Op::ALL[chance.below(Op::ALL.len())];
    let mut call_head = head(op, tag);
    if chance.below(2) == 0 {
        call_head.slot = chance.below(70) as u32;
        call_head.sequence = chance.edge() as u32;
    }
    let call = calls::call(op, welcome.info.root, &words, chance);
    let sound = message(&call_head, &call);
    let data = if op == Op::Write { chance.bytes(3000) } else { Vec::new() };
    let mut notice = Vec::new();
    NotifyHead { what: chance.below(6) as u8, flags: 0, tag: chance.edge() as u32 }
        .put_message(&mut notice);
    match chance.below(24) {
        0 => frame(&chance.bytes(200), b""),
        1 => frame(&sound[..chance.below(sound.len())], b""),
        2 => frame(&sound, &chance.bytes(100)),
        3 => {
            let mut bytes = frame(&sound, &data);
            let at = chance.below(bytes.len());
            bytes[at] ^= 1 << chance.below(8);
            bytes
        }
        4 => [&b"dray"[..], &[0xff; 12]].concat(),
        5 => frame(&hello("data").message(), b""),
        6 => frame(&identity(chance.edge() as u32), b""),
        // A goodbye is left out: it would leave nothing to be hostile with.
        7 if notice[1] != NotifyHead::GOODBYE => frame(&notice, b""),
        8 => {
            let mut reply = Vec::new();
            ReplyHead::success(tag).put_message(&mut reply);
            frame(&reply, b"")
        }
        9 => {
            let mut mutated = sound;
            let at = mutated.len().min(26) + chance.below(mutated.len().max(27) - 26);
            if let Some(byte) = mutated.get_mut(at) {
                *byte = chance.next() as u8;
            }
            frame(&mutated, &data)
        }
        _ => frame(&sound, &data),
    }
}

/// A connection that is hostile until the server has enough of it.
fn be_hostile(socket: &Path, seed: u64) {
    let mut chance = Chance::new(seed);
    let Ok((mut stream, welcome)) = handshake(socket) else { panic!("seed {seed}: not let in") };
    let reads = chance.below(4) > 0;
    for tag in 0..120 {
        if stream.write_all(&hostile_bytes(&mut chance, &welcome, tag)).is_err() {
            return; // the server ended it
        }
        if reads && chance.below(8) == 0 {
            stream.set_nonblocking(true).unwrap();
            let _ = stream.read(&mut [0; 65_536]); // whatever it is
            stream.set_nonblocking(false).unwrap();
        }
    }
}

fn hostile_clients_disturb_no_other_client(fs: Arc<dyn FileSystem>) {
    let served = Served::new(fs);
    let stop = Arc::new(AtomicBool::new(false));
    let honest = honest_client(&served.socket, stop.clone());
    for seed in 0..150 {
        be_hostile(&served.socket, seed);
        assert!(!honest.is_finished(), "seed {seed} ended the honest client");
    }
    stop.store(true, Ordering::Relaxed);
    let rounds = honest.join().expect("the honest client was disturbed");
    assert!(rounds > 0);
    eventually("every buffer is back", || served.server.status().buffer_used_bytes == 0);
    // A sync of everything takes as long as the disk does.
    eventually("every call is over", || served.server.status().operations.is_empty());
    served.end();
}

// proves: P122
#[test]
fn hostile_clients_disturb_no_other_client_on_memory() {
    hostile_clients_disturb_no_other_client(Arc::new(memory()));
}

// proves: P122
#[test]
fn hostile_clients_disturb_no_other_client_on_a_directory() {
    // SAFETY: no memory is passed.
    if unsafe { libc::geteuid() } != 0 {
        return eprintln!("skipped: not root");
    }
    let dir = tempfile::tempdir().unwrap();
    let options = PosixOptions { squash: Squash::None, ..PosixOptions::default() };
    let fs = PosixFs::open(dir.path(), FsUuid(7), options).unwrap();
    hostile_clients_disturb_no_other_client(fs);
}

/// The client sends reads of the largest size and reads no answer. It holds a share, and its
/// connection is ended in time.
// proves: P128
#[test]
fn a_client_that_stops_reading_holds_a_share_and_is_ended() {
    let served = Served::new(Arc::new(memory()));
    let stop = Arc::new(AtomicBool::new(false));
    let (mut lazy, welcome) = handshake(&served.socket).unwrap();
    let root = welcome.info.root;
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: false };
    let create = Call::Create { dir: root, name: b"large", how, handle: 1 };
    let mut slotted = head(Op::Create, 0);
    (slotted.slot, slotted.sequence) = (0, 1);
    assert_eq!(ask(&mut lazy, &slotted, &create).unwrap().errno, 0);
    let write = Call::Write { handle: 1, how: WriteHow::at(0) };
    (slotted.op, slotted.sequence) = (Op::Write, 2);
    lazy.write_all(&frame(&message(&slotted, &write), &vec![1; 1 << 20])).unwrap();
    read_frame(&mut lazy).unwrap();
    let read = Call::Read { handle: 1, at: 0, len_bytes: 1 << 20 };
    for tag in 1..=100 {
        lazy.write_all(&frame(&message(&head(Op::Read, tag), &read), b"")).unwrap();
    }
    let honest = honest_client(&served.socket, stop.clone());
    let half_frame = {
        let (mut stream, _) = handshake(&served.socket).unwrap();
        let write = Call::Write { handle: 1, how: WriteHow::at(0) };
        let bytes = frame(&message(&head(Op::Write, 1), &write), &vec![1; 1 << 20]);
        stream.write_all(&bytes[..500_000]).unwrap();
        stream
    };
    let used = || served.server.status().buffer_used_bytes;
    eventually("it holds what it can get", || used() >= BUFFERS_BYTES / 2 - (1 << 20));
    let clients = || {
        let status = served.server.status();
        status.clients.iter().map(|client| client.connections).sum::<usize>()
    };
    eventually("the honest one has come, too", || clients() == 3);
    let begin = Instant::now();
    while clients() > 1 {
        assert!(begin.elapsed() < Duration::from_secs(120), "the lazy ones are still there");
        assert!(used() <= BUFFERS_BYTES * 3 / 4, "{} bytes are held", used());
        assert!(!honest.is_finished(), "the honest client was disturbed");
        std::thread::sleep(Duration::from_millis(200));
    }
    stop.store(true, Ordering::Relaxed);
    assert!(honest.join().expect("the honest client was disturbed") > 100);
    eventually("every buffer is back", || used() == 0);
    drop(half_frame);
    served.end();
}

/// More calls than it may have under way, in the form of answers that it does not fetch.
// proves: P128
#[test]
fn unread_answers_count_as_calls_under_way() {
    let served = Served::new(Arc::new(memory()));
    let (mut stream, welcome) = handshake(&served.socket).unwrap();
    let call = Call::Getattr { id: welcome.info.root, handle: None };
    let mut sent = 0;
    // The kernel's buffers take some thousands of answers before any is queued.
    while sent < 1_000_000
        && stream.write_all(&frame(&message(&head(Op::Getattr, 1), &call), b"")).is_ok()
    {
        sent += 1;
    }
    assert!(sent < 1_000_000, "nobody minds");
    served.end();
}

// proves: P126
#[test]
fn unauthenticated_peers_are_bounded_and_leave_room_when_they_go() {
    let served = Served::new(Arc::new(memory()));
    let mut crowd: Vec<UnixStream> = (0..200).map(|_| unauthenticated(&served.socket)).collect();
    let closed = |stream: &mut UnixStream| matches!(stream.read(&mut [0; 1]), Ok(0));
    let refused = crowd[128..].iter_mut().filter_map(|stream| closed(stream).then_some(()));
    assert_eq!(refused.count(), 72);
    assert!(handshake(&served.socket).is_err(), "as many as there may be from one place");
    crowd.truncate(100);
    eventually("there is room again", || handshake(&served.socket).is_ok());
    served.end();
}

/// A server that answers with whatever comes to its mind.
fn hostile_server(listener: UnixListener, seed: u64, over: Arc<AtomicBool>) {
    let mut chance = Chance::new(seed);
    listener.set_nonblocking(true).unwrap();
    while !over.load(Ordering::Relaxed) {
        let Ok((mut stream, _)) = listener.accept() else {
            std::thread::sleep(Duration::from_millis(2));
            continue;
        };
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let _ = be_a_hostile_server(&mut stream, &mut chance); // the client may end it
    }
}

fn be_a_hostile_server(stream: &mut UnixStream, chance: &mut Chance) -> std::io::Result<()> {
    read_frame(stream)?;
    let challenge = Challenge { version: 1, features: 0, nonce: [1; 32], proof: [0; 32] };
    stream.write_all(&frame(&challenge.message(), b""))?;
    read_frame(stream)?;
    let welcome = Welcome {
        session: chance.next() | 1,
        secret: [0; 16],
        resumed: chance.below(2) == 0,
        connection: chance.next(),
        instance: chance.next(),
        boot: 0,
        calls_max: chance.edge() as u32 | 1,
        slots: chance.edge() as u32 | 1,
        lease_ms: 0,
        info: memory().info().clone(),
        lease_term_ms: 0,
        lease_epoch: 0,
    };
    stream.write_all(&frame(&welcome.message(), b""))?;
    stream.set_read_timeout(Some(Duration::from_millis(300)))?;
    loop {
        let (asked, _) = read_frame(stream)?;
        if asked[0] != Kind::Call as u8 {
            continue;
        }
        let tag = u32::from_le_bytes(asked[4..8].try_into().unwrap());
        let mut reply = Vec::new();
        let tag = if chance.below(8) == 0 { chance.edge() as u32 } else { tag };
        let fate_of = ReplyHead::success(tag);
        let errno = if chance.below(2) == 0 { 0 } else { chance.next() as u16 };
        let unknown_handle = chance.below(8) == 0;
        ReplyHead { errno, unknown_handle, ..fate_of }.put_message(&mut reply);
        reply.extend_from_slice(&chance.bytes(300));
        let data = if chance.below(3) == 0 { chance.bytes(200_000) } else { Vec::new() };
        let mut bytes = frame(&reply, &data);
        if chance.below(6) == 0 {
            let at = chance.below(bytes.len());
            bytes[at] = chance.next() as u8;
        }
        if chance.below(10) == 0 {
            bytes.truncate(chance.below(bytes.len()));
        }
        stream.write_all(&bytes)?;
    }
}

/// Every call ends, with whatever; nothing panics and nothing grows.
// proves: P122
#[test]
fn hostile_servers_cost_calls_and_no_more() {
    for seed in 0..4 {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let ended = over.clone();
        let server = std::thread::spawn(move || hostile_server(listener, seed, ended));
        run(async {
            let options =
                ClientOptions { timeout: Some(Duration::from_millis(200)), ..client_options() };
            let address = Address::Unix(socket.clone());
            let fs = connect(Arc::new(Sockets(address)), options).await.unwrap();
            let (cx, root) = (Context::system(), fs.info().root);
            let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: true };
            let name = Name::new(b"f").unwrap();
            for _ in 0..8 {
                let _ = fs.lookup(&cx, root, name).await; // any answer will do
                let _ = fs.getxattr(&cx, root, b"user.x").await;
                let _ = fs.statfs(&cx).await;
                let file = fs.open(&cx, root, OpenHow::READ_WRITE).await;
                let made = fs.create(&cx, root, name, how).await.map(|(_, file)| file);
                for file in [file, made].into_iter().flatten() {
                    if let Ok(read) = file.read(&cx, 0, BufMut::heap(4096)).await {
                        assert!(read.len() <= 4096);
                    }
                    let _ = file.readdir(&cx, 0, 4096, true).await;
                    let _ = file.write(&cx, WriteHow::at(0), Buf::from(&b"data"[..])).await;
                    let _ = file.close(&cx).await;
                }
            }
        });
        over.store(true, Ordering::Relaxed);
        server.join().unwrap();
    }
}
