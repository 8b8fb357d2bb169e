//! Tests of the order in which calls of several mounts about the same bytes wait for each other.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, simulate};
use dray_core::{
    Allocate, Buf, BufMut, Context, CreateHow, FileId, FileSystem, Fut, Name, Op, OpenFile,
    OpenHow, Result, SetAttr, Write,
};
use dray_fabric::sim::Network;
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::client::RemoteFs;
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::{Scope, now, sleep, spawn_join};

const LEN: u64 = 100;
/// How long the file system below takes for the call that a test is about.
const LONG: Duration = Duration::from_secs(1);
/// Time for several calls that wait for nobody.
const SOON: Duration = Duration::from_millis(100);

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

fn opens(flags: i32) -> CreateHow {
    CreateHow { open: OpenHow::new(libc::O_RDWR | flags), mode: 0o644, exclusive: false }
}

/// A server with a file system that is slow at one operation, on demand.
struct Site {
    network: Network,
    _scope: Scope,
}

impl Site {
    async fn new(slow: Op) -> (Site, Mount) {
        let below = Arc::new(memory());
        let (cx, root) = (Context::system(), below.info().root);
        for text in ["f", "g"] {
            let (_, file) = below.create(&cx, root, name(text), opens(0)).await.unwrap();
            let data = Buf::from(vec![b'a'; LEN as usize]);
            file.write(&cx, Write::at(0), data).await.unwrap();
        }
        let slow = Fault { op: Some(slow), when: When::Always, delay: LONG, error: None };
        let fs = Observed::new(below, Arc::new(Faults::new(vec![slow])));
        let exports = vec![Export::new("data", Arc::new(fs), Vec::new())];
        let server =
            Server::new(ServerOptions::default(), exports, Arc::new(MemoryJournal::default()));
        let (network, scope) = (Network::new(), Scope::new());
        serve_simulated(&network, "s", &server, &scope);
        let site = Site { network, _scope: scope };
        let mount = site.mount().await;
        (site, mount)
    }

    async fn mount(&self) -> Mount {
        let fs = connect(self.network.connector("s"), client_options()).await.unwrap();
        let (cx, root) = (Context::system(), fs.info().root);
        let mut files = Vec::new();
        for text in ["f", "g"] {
            let id = fs.lookup(&cx, root, name(text)).await.unwrap().id;
            files.push(fs.open(&cx, id, OpenHow::READ_WRITE).await.unwrap());
        }
        let g = files.pop().unwrap();
        Mount { fs, f: files.pop().unwrap(), g }
    }
}

/// A mount with two files open.
#[derive(Clone)]
struct Mount {
    fs: RemoteFs,
    f: Arc<dyn OpenFile>,
    g: Arc<dyn OpenFile>,
}

/// How long a read takes.
async fn reads(file: &dyn OpenFile, at: u64) -> Duration {
    let before = now();
    file.read(&Context::system(), at, BufMut::heap(10)).await.map_err(|(error, _)| error).unwrap();
    before.elapsed()
}

type Change = for<'a> fn(&'a Mount, &'a Context) -> Fut<'a, Result<()>>;

/// A change, the operation below that makes it, and whether reads of the first and the last bytes
/// of the file wait for it.
struct Case {
    what: &'static str,
    change: Change,
    slow: Op,
    keeps_from: [bool; 2],
}

const fn case(what: &'static str, slow: Op, keeps_from: [bool; 2], change: Change) -> Case {
    Case { what, change, slow, keeps_from }
}

fn data(len: usize) -> Buf {
    Buf::from(vec![b'b'; len])
}

fn id_of(mount: &Mount) -> FileId {
    mount.f.id()
}

const CASES: &[Case] = &[
    case("a write", Op::Write, [true, false], |mount, cx| {
        Box::pin(async { mount.f.write(cx, Write::at(0), data(50)).await.map(drop) })
    }),
    case("an append", Op::Write, [false, true], |mount, cx| {
        let how = Write { append: true, ..Write::at(0) };
        Box::pin(async move { mount.f.write(cx, how, data(50)).await.map(drop) })
    }),
    case("a cut", Op::Setattr, [false, true], |mount, cx| {
        let set = SetAttr { size: Some(50), ..SetAttr::default() };
        Box::pin(async move { mount.f.setattr(cx, set).await.map(drop) })
    }),
    case("a cut by id", Op::Setattr, [false, true], |mount, cx| {
        let set = SetAttr { size: Some(50), ..SetAttr::default() };
        Box::pin(async move { mount.fs.setattr(cx, id_of(mount), set).await.map(drop) })
    }),
    case("a change of rights", Op::Setattr, [false, false], |mount, cx| {
        let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
        Box::pin(async move { mount.f.setattr(cx, set).await.map(drop) })
    }),
    case("fallocate", Op::Allocate, [true, false], |mount, cx| {
        let what = Allocate { flags: libc::FALLOC_FL_ZERO_RANGE, at: 0, len_bytes: 50 };
        Box::pin(async move { mount.f.allocate(cx, what).await })
    }),
    case("a copy to it", Op::CopyRange, [false, true], |mount, cx| {
        Box::pin(async { mount.g.copy_range(cx, 0, &*mount.f, 50, 50).await.map(drop) })
    }),
    case("a copy from it", Op::CopyRange, [false, false], |mount, cx| {
        Box::pin(async { mount.f.copy_range(cx, 0, &*mount.g, 0, 100).await.map(drop) })
    }),
    case("a copy within it", Op::CopyRange, [false, true], |mount, cx| {
        Box::pin(async { mount.f.copy_range(cx, 0, &*mount.f, 50, 50).await.map(drop) })
    }),
    case("opening it to cut it", Op::Open, [true, true], |mount, cx| {
        let how = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
        Box::pin(async move { mount.fs.open(cx, id_of(mount), how).await.map(drop) })
    }),
    case("creating what is there", Op::Create, [true, true], |mount, cx| {
        let (dir, how) = (mount.fs.info().root, opens(libc::O_TRUNC));
        Box::pin(async move { mount.fs.create(cx, dir, name("f"), how).await.map(drop) })
    }),
    case("a put", Op::Write, [true, true], |mount, cx| {
        let dir = mount.fs.info().root;
        Box::pin(async move { mount.fs.put(cx, dir, name("f"), 0o644, data(9)).await })
    }),
];

#[test]
fn reads_wait_for_the_change_of_their_bytes_and_for_no_other() {
    for Case { what, change, slow, keeps_from } in CASES {
        simulate(7, async {
            let (site, reader) = Site::new(*slow).await;
            // Opening is what some of them hold up.
            let writer = if *slow == Op::Open { reader.clone() } else { site.mount().await };
            let changing =
                spawn_join(async move { change(&writer, &Context::system()).await.unwrap() });
            sleep(LONG / 4).await;
            let last = spawn_join({
                let file = reader.f.clone();
                async move { reads(&*file, LEN - 5).await } // and where an append goes
            });
            let waits = [reads(&*reader.f, 0).await, last.await.unwrap()];
            changing.await.unwrap();
            for (waits, keeps) in waits.into_iter().zip(keeps_from) {
                let waited = waits > LONG / 2;
                assert!(waited || waits < SOON, "{what}: {waits:?}");
                assert_eq!(waited, *keeps, "{what} of {keeps_from:?}: {waits:?}");
            }
        });
    }
}

/// Writers of the same file wait for each other, one after the other. Readers of the existing data
/// waited for all of them, where there were as many as a file has clients.
#[test]
fn a_read_waits_for_one_write_and_not_for_all_that_wait_for_each_other() {
    simulate(3, async {
        let (site, reader) = Site::new(Op::Write).await;
        let mut writers = Vec::new();
        for _ in 0..5 {
            let mount = site.mount().await;
            writers.push(spawn_join(async move {
                mount.f.write(&Context::system(), Write::at(0), data(10)).await.unwrap()
            }));
        }
        sleep(LONG / 4).await;
        let waited = reads(&*reader.f, 0).await;
        assert!(waited > LONG / 2 && waited < LONG, "{waited:?}");
        for writer in writers {
            writer.await.unwrap();
        }
    });
}

/// A truncation of a file under a write waited on a thread, with the directory locked.
#[test]
fn a_truncate_during_a_write_waits_and_blocks_no_other_call() {
    simulate(5, async {
        let (site, mount) = Site::new(Op::Write).await;
        let writer = mount.clone();
        let writing = spawn_join(async move {
            writer.f.write(&Context::system(), Write::at(0), data(10)).await.unwrap()
        });
        sleep(LONG / 4).await;
        let cutter = site.mount().await;
        let cutting = spawn_join(async move {
            let (cx, dir, before) = (Context::system(), cutter.fs.info().root, now());
            cutter.fs.create(&cx, dir, name("f"), opens(libc::O_TRUNC)).await.unwrap();
            before.elapsed()
        });
        sleep(LONG / 4).await;
        let (cx, root, before) = (Context::system(), mount.fs.info().root, now());
        mount.fs.lookup(&cx, root, name("f")).await.unwrap();
        mount.g.setattr(&cx, SetAttr { size: Some(1), ..SetAttr::default() }).await.unwrap();
        assert!(reads(&*mount.g, 0).await < SOON && before.elapsed() < SOON);
        writing.await.unwrap();
        assert!(cutting.await.unwrap() > LONG / 4);
    });
}

/// A sync is about the writes before it. A later write neither waits for the sync nor holds it up.
#[test]
fn a_sync_waits_for_the_writes_of_before_it_alone() {
    simulate(9, async {
        let (site, mount) = Site::new(Op::Write).await;
        let write = |mount: Mount, at: u64| {
            spawn_join(async move {
                let before = now();
                mount.f.write(&Context::system(), Write::at(at), data(10)).await.unwrap();
                before.elapsed()
            })
        };
        let first = write(site.mount().await, 0);
        sleep(LONG / 2).await;
        let syncing = spawn_join(async move {
            let before = now();
            mount.f.sync(&Context::system(), false).await.unwrap();
            before.elapsed()
        });
        sleep(LONG / 10).await;
        let later = write(site.mount().await, 50);
        let synced = syncing.await.unwrap();
        assert!(synced > LONG / 4 && synced < LONG * 3 / 4, "{synced:?}");
        first.await.unwrap();
        assert!(later.await.unwrap() < LONG + SOON);
    });
}
