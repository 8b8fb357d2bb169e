//! Syncs of everything in the background: how many there are, and disks of the server that fail.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{client_options, connect, memory, serve_simulated, server_of, simulate};
use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{
    Buf, Cancel, Context, CreateHow, Errno, FileSystem, LockOwner, Name, Op, OpenFile, OpenHow,
    SessionControl, Write,
};
use dray_fabric::sim::Network;
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_layers::metrics::Metrics;
use dray_rpc::client::{ClientOptions, RemoteFs};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::{Scope, sleep};

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };
/// Everything has been synced in the background by then.
const SYNCED: Duration = Duration::from_secs(35);

/// A server on which the first sync of everything fails, and the syncs of single files with these
/// numbers.
fn failing_server(failures: &[u64]) -> Server {
    let fails = |op, nth| {
        let (when, error) = (When::Nth(nth), Some(Errno::EIO));
        Fault { op: Some(op), when, delay: Duration::ZERO, error }
    };
    let files = failures.iter().map(|nth| fails(Op::Sync, *nth));
    let plan = std::iter::once(fails(Op::SyncAll, 1)).chain(files).collect();
    let fs = Observed::new(Arc::new(memory()), Arc::new(Faults::new(plan)));
    let export = Export::new("data", Arc::new(fs), Vec::new());
    Server::new(ServerOptions::default(), vec![export], Arc::new(MemoryJournal::default()))
}

/// A file of this name with something in it that is not on media.
async fn written(fs: &RemoteFs, name: &str) -> Arc<dyn OpenFile> {
    let (cx, name) = (Context::system(), Name::new(name.as_bytes()).unwrap());
    let (_, file) = fs.create(&cx, fs.info().root, name, NEW).await.unwrap();
    write(&*file).await;
    file
}

async fn write(file: &dyn OpenFile) {
    let data = Buf::from(&b"data"[..]);
    assert_eq!(file.write(&Context::system(), Write::at(0), data).await.unwrap(), 4);
}

async fn sync(file: &dyn OpenFile) -> Option<Errno> {
    file.sync(&Context::system(), false).await.err().map(|error| error.errno())
}

/// The next sync of everything succeeded, and counted for it.
// proves: P105
#[test]
fn a_failed_background_sync_is_reported_once_through_each_open_file() {
    simulate(1, async {
        let (network, scope, server) = (Network::new(), Scope::new(), failing_server(&[1]));
        serve_simulated(&network, "s", &server, &scope);
        let (fs, cx) =
            (connect(network.connector("s"), client_options()).await.unwrap(), Context::system());
        let first = written(&fs, "first").await;
        let again = fs.open(&cx, first.id(), OpenHow::READ_WRITE).await.unwrap();
        write(&*again).await;
        let other = written(&fs, "other").await;
        sleep(2 * SYNCED).await;
        assert!(fs.owes_error(first.id()));
        let closed = first.flush(&cx, LockOwner::own(1)).await;
        assert_eq!(closed.unwrap_err().errno(), Errno::EIO);
        let cancel = Arc::new(Cancel::default());
        cancel.set();
        let ends = Context { cancel: Some(cancel), ..Context::system() };
        let closed = first.flush(&ends, LockOwner::own(1)).await;
        assert_eq!(closed.unwrap_err().errno(), Errno::EIO, "the answer was not waited for");
        for file in [&first, &again] {
            assert_eq!(sync(&**file).await, Some(Errno::EIO));
            assert_eq!(sync(&**file).await, None);
        }
        assert_eq!(sync(&*other).await, None, "nothing is wrong with it");
        assert_eq!(fs.session().status().unsynced.losses, 1);
    });
}

/// As the kernel of the server does it through the open file that it has for the client's.
// proves: P105
#[test]
fn a_reported_sync_error_is_not_reported_again() {
    simulate(2, async {
        let (network, scope, server) = (Network::new(), Scope::new(), failing_server(&[1, 2]));
        serve_simulated(&network, "s", &server, &scope);
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let file = written(&fs, "file").await;
        sleep(SYNCED).await;
        assert_eq!(sync(&*file).await, Some(Errno::EIO));
        assert_eq!(sync(&*file).await, None);
    });
}

/// The kernel of the server reports a failed sync once, to the caller of that sync.
// proves: P105
#[test]
fn a_sync_that_failed_for_another_client_is_reported() {
    simulate(3, async {
        let (network, scope, server) = (Network::new(), Scope::new(), failing_server(&[2]));
        serve_simulated(&network, "s", &server, &scope);
        let one = connect(network.connector("s"), client_options()).await.unwrap();
        let other = connect(network.connector("s"), client_options()).await.unwrap();
        let sound = written(&one, "sound").await;
        sleep(SYNCED / 3).await;
        let broken = written(&other, "broken").await;
        sleep(2 * SYNCED).await;
        for _ in 0..2 {
            assert_eq!(sync(&*sound).await, None, "nobody had the other one synced");
        }
        assert_eq!(sync(&*broken).await, Some(Errno::EIO));
        assert_eq!(sync(&*broken).await, None);
    });
}

/// Each client had everything synced every 30 s, for all the others, too: with thousands the
/// server's disk did nothing else.
// proves: P130
#[test]
fn one_client_s_sync_is_everybody_s() {
    const CLIENTS: usize = 40;
    const TIME: Duration = Duration::from_secs(300);
    simulate(4, async {
        let (network, scope, counts) = (Network::new(), Scope::new(), Arc::new(Metrics::new()));
        let fs = Observed::new(Arc::new(memory()), counts.clone());
        let export = Export::new("data", Arc::new(fs), Vec::new());
        let journal = Arc::new(MemoryJournal::default());
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        serve_simulated(&network, "s", &server, &scope);
        let mut clients = Vec::new();
        for number in 0..CLIENTS {
            let fs = connect(network.connector("s"), client_options()).await.unwrap();
            clients.push(dray_rt::spawn_join(async move {
                let file = written(&fs, &format!("file{number}")).await;
                let begin = dray_rt::now();
                while begin.elapsed() < TIME {
                    sleep(Duration::from_millis(900)).await;
                    write(&*file).await;
                    let kept = fs.session().status().unsynced.kept_bytes;
                    assert!(kept < 40 * 200, "{kept} bytes: older than 40 writes");
                }
                sleep(SYNCED).await;
                assert_eq!(fs.session().status().unsynced.files, 0);
            }));
        }
        for client in clients {
            client.await.unwrap();
        }
        let ops = counts.snapshot().ops;
        let syncs = ops.iter().find(|one| one.op == Op::SyncAll).map_or(0, |one| one.count);
        assert!(syncs >= TIME.as_secs() / 30 && syncs < 3 * TIME.as_secs() / 20, "{syncs} syncs");
    });
}

/// Each of many clients that constantly ran out of room had everything synced for itself. The
/// server's disks did nothing else.
// proves: P130
#[test]
fn syncs_that_many_want_leave_the_disks_time() {
    const CLIENTS: usize = 20;
    const TIME: Duration = Duration::from_secs(60);
    const SYNC: Duration = Duration::from_millis(100);
    const ROOM_BYTES: usize = 64 << 10;
    simulate(5, async {
        let (network, scope, counts) = (Network::new(), Scope::new(), Arc::new(Metrics::new()));
        let slow = Fault { op: Some(Op::SyncAll), when: When::Always, delay: SYNC, error: None };
        let fs = Observed::new(Arc::new(memory()), Arc::new(Faults::new(vec![slow])));
        let fs = Observed::new(Arc::new(fs), counts.clone());
        let export = Export::new("data", Arc::new(fs), Vec::new());
        let journal = Arc::new(MemoryJournal::default());
        let server = Server::new(ServerOptions::default(), vec![export], journal);
        serve_simulated(&network, "s", &server, &scope);
        let mut clients = Vec::new();
        for number in 0..CLIENTS {
            let options = ClientOptions { replay_bytes: ROOM_BYTES as u64, ..client_options() };
            let fs = connect(network.connector("s"), options).await.unwrap();
            clients.push(dray_rt::spawn_join(async move {
                let (file, begin) = (written(&fs, &format!("file{number}")).await, dray_rt::now());
                while begin.elapsed() < TIME {
                    sleep(Duration::from_millis(40)).await;
                    let data = Buf::from(vec![7; ROOM_BYTES / 32]);
                    file.write(&Context::system(), Write::at(0), data).await.unwrap();
                }
            }));
        }
        for client in clients {
            client.await.unwrap();
        }
        let ops = counts.snapshot().ops;
        let syncs = ops.iter().find(|one| one.op == Op::SyncAll).map_or(0, |one| one.count);
        let all_the_time = (TIME.as_millis() / SYNC.as_millis()) as u64;
        assert!((20..all_the_time / 2).contains(&syncs), "{syncs} of {all_the_time}");
    });
}

/// Data for which the disk had no room are not the file's: after a loss of power they must not be
/// put there.
#[test]
fn what_a_short_write_left_out_is_not_kept() {
    const ROOM_BYTES: usize = 8192;
    simulate(4, async {
        let (network, scope) = (Network::new(), Scope::new());
        let options = MemoryOptions { capacity_bytes: ROOM_BYTES as u64, ..Default::default() };
        let server = server_of(MemoryFs::new(options), ServerOptions::default());
        serve_simulated(&network, "s", &server, &scope);
        let fs = connect(network.connector("s"), client_options()).await.unwrap();
        let (cx, name) = (Context::system(), Name::new(b"f").unwrap());
        let (_, file) = fs.create(&cx, fs.info().root, name, NEW).await.unwrap();
        let data = Buf::from(vec![7; ROOM_BYTES + ROOM_BYTES / 2]);
        assert_eq!(file.write(&cx, Write::at(0), data).await.unwrap(), ROOM_BYTES);
        let kept = fs.session().status().unsynced.kept_bytes as usize;
        assert!((ROOM_BYTES..ROOM_BYTES + ROOM_BYTES / 4).contains(&kept), "{kept} bytes");
    });
}
