//! The server process dies, at any place, and a new one takes over.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, simulate};
use dray_backends::memory::MemoryFs;
use dray_core::{
    Buf, BufMut, Context, CreateHow, Errno, FileSystem, Make, Name, Op, OpenHow, RemoveKind,
    RenameHow, Write,
};
use dray_fabric::sim::Network;
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::client::RemoteFs;
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions, StateLoss};
use dray_rt::{Scope, random_u64, sleep};
use dray_testkit::fixture::seeds;

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

/// A server that can be killed and started again over the same files and journal.
struct Machine {
    network: Network,
    fs: MemoryFs,
    journal: MemoryJournal,
    server_process: Scope,
}

impl Machine {
    async fn start(network: &Network) -> Machine {
        let mut machine = Machine {
            network: network.clone(),
            fs: memory(),
            journal: MemoryJournal::default(),
            server_process: Scope::new(),
        };
        machine.restart().await;
        machine
    }

    fn kill(&mut self) {
        self.server_process.kill();
        self.network.break_all("s");
    }

    async fn restart(&mut self) -> Server {
        self.restart_on(Arc::new(self.fs.clone())).await
    }

    /// The same, with something between the server and the files.
    async fn restart_on(&mut self, fs: Arc<dyn FileSystem>) -> Server {
        let exports = vec![Export::new("data", fs, Vec::new())];
        let journal = Arc::new(self.journal.clone());
        let server = Server::new(ServerOptions::default(), exports, journal);
        server.restore(StateLoss::Nothing).await;
        self.server_process = Scope::new();
        serve_simulated(&self.network, "s", &server, &self.server_process);
        server
    }
}

/// Kills the server again and again until `done`.
async fn torment(mut machine: Machine, done: Arc<std::sync::atomic::AtomicBool>) -> u64 {
    let mut kills = 0;
    while !done.load(std::sync::atomic::Ordering::Relaxed) {
        sleep(Duration::from_micros(random_u64() % 10_000)).await;
        machine.kill();
        kills += 1;
        sleep(Duration::from_micros(random_u64() % 20_000)).await;
        machine.restart().await;
    }
    kills
}

/// Changes that would show if they were applied twice or not at all.
async fn work(fs: &RemoteFs, rounds: u32) {
    let cx = Context::system();
    let root = fs.info().root;
    let (_, log) = fs.create(&cx, root, name("log"), NEW).await.unwrap();
    let fail = |what: &str, round: u32| format!("{what} in round {round}");
    for round in 0..rounds {
        let text = format!("{round:04}");
        let dir = fs.make(&cx, root, name(&text), Make::Directory { mode: 0o700 }).await;
        let dir = dir.unwrap_or_else(|error| panic!("{}: {error:?}", fail("mkdir", round)));
        let how = Write { append: true, ..Write::default() };
        let written = log.write(&cx, how, Buf::from(text.as_bytes())).await;
        assert_eq!(
            written.unwrap_or_else(|error| panic!("{}: {error:?}", fail("append", round))),
            4
        );
        let (entry, file) = fs
            .create(&cx, dir.id, name("f"), NEW)
            .await
            .unwrap_or_else(|error| panic!("{}: {error:?}", fail("create", round)));
        file.write(&cx, Write::at(0), Buf::from(text.as_bytes()))
            .await
            .unwrap_or_else(|error| panic!("{}: {error:?}", fail("write", round)));
        let to = (root, name("g"));
        fs.rename(&cx, (dir.id, name("f")), to, RenameHow::Replace)
            .await
            .unwrap_or_else(|error| panic!("{}: {error:?}", fail("rename", round)));
        let linked = fs
            .link(&cx, entry.id, dir.id, name("h"))
            .await
            .unwrap_or_else(|error| panic!("{}: {error:?}", fail("link", round)));
        assert_eq!((linked.id, linked.attr.nlink), (entry.id, 2));
        let read = file
            .read(&cx, 0, BufMut::heap(16))
            .await
            .unwrap_or_else(|error| panic!("{}: {error:?}", fail("read", round)));
        assert_eq!(read.filled(), text.as_bytes());
        let put = fs.put(&cx, dir.id, name("p"), 0o444, Buf::from(text.as_bytes())).await;
        put.unwrap_or_else(|error| panic!("{}: {error:?}", fail("put", round)));
        fs.rename(&cx, (dir.id, name("p")), (root, name("q")), RenameHow::Replace)
            .await
            .unwrap_or_else(|error| panic!("{}: {error:?}", fail("rename what was put", round)));
        let found = fs.lookup(&cx, root, name("q")).await.unwrap().id;
        let put = fs.open(&cx, found, OpenHow::READ).await.unwrap();
        let read = put.read(&cx, 0, BufMut::heap(16)).await.unwrap();
        assert_eq!(read.filled(), text.as_bytes(), "put in round {round}");
        file.close(&cx).await.unwrap_or_else(|error| panic!("{}: {error:?}", fail("close", round)));
        fs.remove(&cx, dir.id, name("h"), RemoveKind::File)
            .await
            .unwrap_or_else(|error| panic!("{}: {error:?}", fail("unlink", round)));
        fs.remove(&cx, root, name(&text), RemoveKind::Directory)
            .await
            .unwrap_or_else(|error| panic!("{}: {error:?}", fail("rmdir", round)));
    }
    let read = log.read(&cx, 0, BufMut::heap(65_536)).await.unwrap();
    let expected: String = (0..rounds).map(|round| format!("{round:04}")).collect();
    assert_eq!(String::from_utf8_lossy(read.filled()), expected);
}

// proves: P80
#[test]
fn changes_are_applied_once_over_deaths_of_the_server() {
    let (mut kills, seeds) = (0, seeds(25));
    for seed in seeds.clone() {
        kills += simulate(seed, async {
            let network = Network::new();
            let machine = Machine::start(&network).await;
            let fs = connect(network.connector("s"), client_options()).await.unwrap();
            let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
            let torment = dray_rt::spawn_join(torment(machine, done.clone()));
            let worked = dray_rt::timeout(Duration::from_secs(600), work(&fs, 30)).await;
            assert!(worked.is_ok(), "seed {seed}: no progress: {:?}", fs.session().status());
            assert_eq!(fs.session().status().lost, 0, "seed {seed}");
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            torment.await.unwrap()
        });
    }
    assert!(kills > 16 * seeds.end, "only {kills} kills: the test tests nothing");
}

/// One client puts a file, another removes it as soon as it is there. The file must not come back,
/// though the first may still have to ask again whether it was put.
// proves: P87
#[test]
fn a_put_happens_once_over_server_restarts() {
    let (mut kills, seeds) = (0, seeds(20));
    for seed in seeds.clone() {
        kills += simulate(seed, async {
            let network = Network::new();
            let machine = Machine::start(&network).await;
            let putter = connect(network.connector("s"), client_options()).await.unwrap();
            let remover = connect(network.connector("s"), client_options()).await.unwrap();
            let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
            let torment = dray_rt::spawn_join(torment(machine, done.clone()));
            let (cx, root) = (Context::system(), remover.info().root);
            for round in 0..20 {
                let text = format!("x{round}");
                let put = dray_rt::spawn_join({
                    let (putter, text) = (putter.clone(), text.clone());
                    async move {
                        let data = Buf::from(text.as_bytes());
                        putter.put(&Context::system(), root, name(&text), 0o444, data).await
                    }
                });
                while remover.remove(&cx, root, name(&text), RemoveKind::File).await.is_err() {
                    sleep(Duration::from_micros(random_u64() % 500)).await;
                }
                put.await.unwrap().unwrap();
                let found = remover.lookup(&cx, root, name(&text)).await;
                assert!(found.is_err(), "seed {seed}: {text} was put again after its removal");
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            torment.await.unwrap()
        });
    }
    assert!(kills > 4 * seeds.end, "only {kills} kills: the test tests nothing");
}

/// One client puts a file, another appends to it as soon as it is there. After a crash it must be
/// clear which bytes at the end came from which client.
// proves: P87
#[test]
fn an_append_follows_an_unfinished_put_after_a_server_restart() {
    simulate(1, async {
        let network = Network::new();
        let mut machine = Machine::start(&network).await;
        machine.kill();
        let slow = |number, delay_ms| Fault {
            op: Some(Op::Write),
            when: When::Nth(number),
            delay: Duration::from_millis(delay_ms),
            error: None,
        };
        // The put is written after 50 ms, and the append not before the death.
        let faults = Faults::new(vec![slow(1, 50), slow(2, 500)]);
        let fs = Observed::new(Arc::new(machine.fs.clone()), Arc::new(faults));
        machine.restart_on(Arc::new(fs)).await;
        let putter = connect(network.connector("s"), client_options()).await.unwrap();
        let other = connect(network.connector("s"), client_options()).await.unwrap();
        let (cx, root) = (Context::system(), other.info().root);
        let put = dray_rt::spawn_join(async move {
            let data = Buf::from(&b"put"[..]);
            putter.put(&Context::system(), root, name("f"), 0o644, data).await
        });
        sleep(Duration::from_millis(20)).await;
        let entry = other.lookup(&cx, root, name("f")).await.unwrap();
        let file = other.open(&cx, entry.id, OpenHow::READ_WRITE).await.unwrap();
        let append = dray_rt::spawn_join({
            let file = file.clone();
            async move {
                let how = Write { append: true, ..Write::default() };
                file.write(&Context::system(), how, Buf::from(&b"append"[..])).await
            }
        });
        put.await.unwrap().unwrap();
        sleep(Duration::from_millis(50)).await;
        assert_eq!(other.getattr(&cx, entry.id).await.unwrap().size, 3, "not appended so far");
        machine.kill();
        machine.restart().await;
        append.await.unwrap().unwrap();
        let read = file.read(&cx, 0, BufMut::heap(64)).await.unwrap();
        assert_eq!(String::from_utf8_lossy(read.filled()), "putappend");
    });
}

/// A look at the name that failed counted as "nothing there". After a death, a file that had been
/// there all along was taken for what the change had made.
// proves: P84
#[test]
fn what_cannot_be_looked_at_before_a_change_is_no_proof_that_the_change_was_made() {
    simulate(1, async {
        let network = Network::new();
        let mut machine = Machine::start(&network).await;
        let (cx, root) = (Context::system(), machine.fs.info().root);
        let directory = Make::Directory { mode: 0o755 };
        machine.fs.make(&cx, root, name("d"), directory).await.unwrap();
        let fault = |op, when, delay_ms, error| Fault {
            op: Some(op),
            when,
            delay: Duration::from_millis(delay_ms),
            error,
        };
        let faults = Faults::new(vec![
            fault(Op::Lookup, When::Nth(1), 0, Some(Errno::EIO)),
            fault(Op::Make, When::Always, 500, None),
        ]);
        machine.kill();
        machine
            .restart_on(Arc::new(Observed::new(Arc::new(machine.fs.clone()), faults.into())))
            .await;
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let making = dray_rt::spawn_join(async move {
            fs.make(&Context::system(), root, name("d"), directory).await
        });
        sleep(Duration::from_millis(50)).await;
        machine.kill();
        machine.restart().await;
        making.await.unwrap().unwrap_err();
    });
}

/// Without a known end of the file nothing is appended: a later server could not decide whether the
/// append was made.
// proves: P84
#[test]
fn nothing_is_appended_where_the_end_of_the_file_is_unknown() {
    simulate(1, async {
        let network = Network::new();
        let mut machine = Machine::start(&network).await;
        let (op, error) = (Some(Op::Getattr), Some(Errno::EIO));
        let fault = Fault { op, when: When::Nth(1), delay: Duration::ZERO, error };
        let faults = Arc::new(Faults::new(vec![fault]));
        machine.kill();
        machine.restart_on(Arc::new(Observed::new(Arc::new(machine.fs.clone()), faults))).await;
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let (cx, root) = (Context::system(), fs.info().root);
        let (_, file) = fs.create(&cx, root, name("f"), NEW).await.unwrap();
        let how = Write { append: true, ..Write::default() };
        let append = || file.write(&cx, how, Buf::from(&b"x"[..]));
        assert_eq!(append().await.unwrap_err().errno(), Errno::EIO);
        append().await.unwrap();
        assert_eq!(file.getattr(&cx).await.unwrap().size, 1);
    });
}
