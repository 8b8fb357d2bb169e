//! What leases take of a server. Hostile clients leave nothing behind in memory: counted over thousands of messages that one and
//! the same server, or client, gets.

#[path = "client_server/common/mod.rs"]
mod common;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use common::calls::{self, Words};
use common::forgetful::serve_forgetfully;
use common::lessee::Lessee;
use common::raw::{Chance, NO_PROOF, head, hello, identity, message};
use common::{client_options, connect, memory, serve_simulated, server_of, simulate};
use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{
    Buf, BufMut, Context, CreateHow, FileId, FileSystem, Lock, LockFamily, LockKind, LockOwner,
    LockRange, Make, Name, NameBuf, Op, OpenHow, Pid, RemoveKind,
};
use dray_fabric::Sink;
use dray_fabric::sim::Network;
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rpc::wire::NotifyHead;
use dray_rt::Scope;
use dray_testkit::heap::{LiveBytesAllocator, live_bytes};

#[global_allocator]
static ALLOCATOR: LiveBytesAllocator = LiveBytesAllocator;

/// Longer than any lease, and than a connection may take for its handshake.
const LONG: Duration = Duration::from_secs(600);
/// How soon a forgetful server has had enough of a connection.
const PATIENCE: Duration = Duration::from_millis(20);
const ROUNDS: u64 = 600;
/// The size by which tables may still grow. A session, a call or a connection that stays in each
/// round, or in one of ten, is more.
const GROWN_MAX_BYTES: isize = 48 << 10;

/// Hears whatever is said.
struct Deaf;

impl Sink for Deaf {
    fn poll_place(
        &mut self,
        _: &mut TaskContext<'_>,
        _: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(Ok(BufMut::heap(data_bytes)))
    }

    fn frame(&mut self, _: &[u8], _: Option<BufMut>) -> io::Result<()> {
        Ok(())
    }
}

/// The next message that a hostile client sends.
fn hostile_message(chance: &mut Chance, root: FileId, tag: u32) -> (Vec<u8>, Option<Buf>) {
    let words = Words::by_chance(chance);
    let op = Op::ALL[chance.below(Op::ALL.len())];
    let mut call_head = head(op, tag);
    if chance.below(2) == 0 {
        call_head.slot = chance.below(70) as u32;
        call_head.sequence = chance.edge() as u32;
    }
    let mut bytes = message(&call_head, &calls::call(op, root, &words, chance));
    let takes_data = matches!(op, Op::Write | Op::Put | Op::Redo);
    let data = takes_data.then(|| Buf::from(chance.bytes(3000))).filter(|data| !data.is_empty());
    match chance.below(40) {
        0 => bytes.truncate(chance.below(bytes.len()).max(1)),
        1 => bytes = identity(chance.below(300) as u32),
        2 => {
            bytes.clear();
            let (what, tag) = (chance.below(8) as u8, chance.edge() as u32);
            NotifyHead { what, flags: 0, tag }.put_message(&mut bytes);
        }
        3 => {
            let at = chance.below(bytes.len());
            bytes[at] ^= 1 << chance.below(8);
        }
        _ => {}
    }
    (bytes, data)
}

/// A hostile client, from its greeting until it leaves.
async fn be_hostile(network: &Network, root: FileId, seed: u64) {
    let mut chance = Chance::new(seed);
    let connection = network.connector_from("peer", "s").connect().await.unwrap();
    let hears = connection.clone();
    dray_rt::spawn(async move { drop(hears.run(&mut Deaf).await) });
    let greeting = [hello("data").message(), NO_PROOF.message(), identity(0)];
    for bytes in greeting.iter().take(if chance.below(8) == 0 { chance.below(3) } else { 3 }) {
        let _ = connection.send(bytes, None); // it may have been ended, here and below
        dray_rt::sleep(Duration::from_millis(1)).await;
    }
    for tag in 0..40 {
        let (bytes, data) = hostile_message(&mut chance, root, tag);
        let _ = connection.send(&bytes, data);
        dray_rt::sleep(Duration::from_micros(300)).await;
    }
    connection.close();
}

/// Removes what clients have made.
async fn clear(fs: &MemoryFs) {
    let (cx, root) = (Context::system(), fs.info().root);
    let dir = fs.open(&cx, root, OpenHow::new(libc::O_DIRECTORY)).await.unwrap();
    let page = dir.readdir(&cx, 0, 1 << 20, false).await.unwrap();
    assert!(page.end);
    let names: Vec<NameBuf> = (0..page.len())
        .filter_map(|index| Some(Name::new(page.get(index)?.0).ok()?.to_owned()))
        .collect();
    for name in names {
        if fs.remove(&cx, root, &name, RemoveKind::File).await.is_err() {
            fs.remove(&cx, root, &name, RemoveKind::Directory).await.unwrap();
        }
    }
    let listed = fs.listxattr(&cx, root).await.unwrap();
    for name in listed.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let _ = fs.removexattr(&cx, root, name).await; // what has a meaning of its own stays
    }
    dir.close(&cx).await.unwrap();
}

/// Fails if `round` leaves memory behind: after as many rounds in which tables get about their
/// size hardly anything is added.
async fn nothing_stays(mut round: impl AsyncFnMut(u64)) {
    let mut before = 0;
    for number in 0..2 * ROUNDS {
        round(number).await;
        if number + 1 == ROUNDS {
            before = live_bytes();
        }
    }
    let grown_bytes = live_bytes() - before;
    assert!(grown_bytes < GROWN_MAX_BYTES, "{ROUNDS} rounds left {grown_bytes} bytes behind");
}

// proves: P122
#[test]
fn hostile_clients_leave_nothing_behind() {
    simulate(11, async {
        let fs = MemoryFs::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() });
        let server = server_of(fs.clone(), ServerOptions::default());
        let network = Network::new();
        serve_simulated(&network, "s", &server, &Scope::new());
        let root = fs.info().root;
        nothing_stays(async |seed| {
            be_hostile(&network, root, seed).await;
            dray_rt::sleep(LONG).await;
            assert!(server.status().clients.is_empty(), "seed {seed}");
            clear(&fs).await;
        })
        .await;
    });
}

/// Each epoch of such a server had its own recovery and connection, and a task that reopened files:
/// none ended before an answer came.
// proves: P122
#[test]
fn forgetful_servers_leave_nothing_behind() {
    simulate(12, async {
        let (network, scope, cx) = (Network::new(), Scope::new(), Context::system());
        let server = server_of(memory(), ServerOptions::default());
        serve_simulated(&network, "s", &server, &scope);
        let fs = connect(network.connector_from("c", "s"), client_options()).await.unwrap();
        let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: false };
        let root = fs.info().root;
        let mut files = Vec::new();
        for name in [&b"f"[..], b"g", b"h"] {
            let made = fs.create(&cx, root, Name::new(name).unwrap(), how).await;
            files.push(made.unwrap().1);
        }
        let lock = Lock {
            family: LockFamily::Posix,
            kind: LockKind::Exclusive,
            range: LockRange::ALL,
            owner: LockOwner::own(1),
            pid: Pid(1),
        };
        files[0].lock(&cx, lock, false).await.unwrap();
        files[1].write(&cx, dray_core::Write::at(0), Buf::from(&b"kept"[..])).await.unwrap();
        let (epochs, open) = serve_forgetfully(&network, fs.info().clone(), PATIENCE);
        network.break_all("s");
        scope.kill();
        let writes = files[1].clone();
        dray_rt::spawn(async move {
            let cx = Context::system();
            let _ = writes.write(&cx, dray_core::Write::at(0), Buf::from(&b"more"[..])).await;
        });
        nothing_stays(async |_| {
            let before = epochs.load(Ordering::Relaxed);
            while epochs.load(Ordering::Relaxed) == before {
                dray_rt::sleep(Duration::from_millis(50)).await;
                let open = open.load(Ordering::Relaxed);
                assert!(
                    open <= 4,
                    "{open} connections: more than the mount's, a recovery's and those that end"
                );
            }
        })
        .await;
    });
}

/// Each client has looked up files of its own, which is the most that so many leases take mostly. Or all have looked up
/// the same files.
// proves: P297
#[test]
fn a_lease_takes_so_much_of_a_server_and_gives_it_back() {
    simulate(13, async {
        lease_many(|client, lease| format!("file-{client}-{lease}")).await;
        lease_many(|_, lease| format!("file-{lease}")).await;
    });
}

/// 50 clients look up 100 files each, by the numbers of the client and of the file.
async fn lease_many(name: impl Fn(usize, usize) -> String) {
    const CLIENTS: usize = 50;
    const LEASES: usize = 100;
    const BYTES_EACH_MAX: isize = 200;
    let (network, fs) = (Network::new(), memory());
    let root = fs.info().root;
    let node = Make::Node { mode: libc::S_IFREG | 0o644, rdev: 0 };
    for (client, lease) in (0..CLIENTS * LEASES).map(|one| (one / LEASES, one % LEASES)) {
        let name = name(client, lease);
        let name = Name::new(name.as_bytes()).unwrap();
        let _ = fs.make(&Context::system(), root, name, node).await; // all may have the same
    }
    let mut export = Export::new("data", Arc::new(fs), Vec::new());
    (export.insecure, export.leases) = (true, true);
    let journal = Arc::new(MemoryJournal::default());
    let server = Server::new(ServerOptions::default(), vec![export], journal);
    serve_simulated(&network, "s", &server, &Scope::new());
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(Lessee::connect(&network, None).await);
    }
    let before = live_bytes();
    for lease in 0..LEASES {
        for (number, client) in clients.iter_mut().enumerate() {
            client.lookup(root, &name(number, lease)).await.unwrap();
        }
    }
    let held = server.status().leases[0].1.held;
    assert!(held >= CLIENTS * LEASES, "{held} leases");
    let each = (live_bytes() - before) / held as isize;
    assert!(each <= BYTES_EACH_MAX, "{each} bytes each of {held}");
    clients.iter().for_each(Lessee::say_goodbye);
    dray_rt::sleep(Duration::from_secs(1)).await;
    assert_eq!(server.status().leases[0].1.held, 0);
}
