//! An export that is taken away while the server goes on: to its clients a server that is away, and
//! then another one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{client_options, connect, serve_simulated, simulate};
use dray_backends::memory::{MemoryDisk, MemoryOptions};
use dray_core::{
    Buf, Context, CreateHow, Errno, FileSystem, Lock, LockFamily, LockKind, LockOwner, LockRange,
    Make, Name, Op, OpenFile, OpenHow, Pid, SetAttr, Write,
};
use dray_fabric::sim::Network;
use dray_layers::Observed;
use dray_layers::faults::{Fault, Faults, When};
use dray_rpc::client::RemoteFs;
use dray_rpc::server::{Export, ExportLost, MemoryJournal, Server, ServerOptions, StateLoss};
use dray_rt::{Scope, sleep, spawn_join, timeout};

const HOW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: false };

/// A server of one export.
struct Rig {
    network: Network,
    server: Server,
    disk: MemoryDisk,
    _server_process: Scope,
}

impl Rig {
    async fn new() -> Rig {
        let network = Network::new();
        let options = ServerOptions { boot: 1, ..ServerOptions::default() };
        let journal = Arc::new(MemoryJournal::default());
        let server = Server::awaiting(options, &["data"], journal);
        let server_process = Scope::new();
        serve_simulated(&network, "s", &server, &server_process);
        let disk = MemoryDisk::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() });
        let rig = Rig { network, server, disk, _server_process: server_process };
        rig.open().await;
        rig
    }

    fn export(&self, faults: Vec<Fault>) -> Export {
        let fs = Observed::new(Arc::new(self.disk.mount()), Arc::new(Faults::new(faults)));
        Export::new("data", Arc::new(fs), Vec::new())
    }

    async fn open(&self) {
        self.server.open(self.export(Vec::new()), StateLoss::Nothing).await.unwrap();
    }

    /// Takes the export away, and waits until nothing of it is in use.
    async fn withdraw(&self) {
        let withdrawn = self.server.withdraw("data", StateLoss::Nothing).unwrap();
        assert!(self.server.withdraw("data", StateLoss::Nothing).is_none());
        while withdrawn.is_in_use() {
            sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(withdrawn.loss, StateLoss::Nothing);
    }

    async fn mount(&self) -> RemoteFs {
        self.mount_at("host").await
    }

    async fn mount_at(&self, host: &str) -> RemoteFs {
        connect(self.network.connector_from(host, "s"), client_options()).await.unwrap()
    }
}

async fn create(fs: &RemoteFs, name: &[u8]) -> Arc<dyn OpenFile> {
    let name = Name::new(name).unwrap();
    fs.create(&Context::system(), fs.info().root, name, HOW).await.unwrap().1
}

async fn mkdir(fs: &RemoteFs, name: &[u8]) -> Result<(), Errno> {
    let (cx, name) = (Context::system(), Name::new(name).unwrap());
    let made = fs.make(&cx, fs.info().root, name, Make::Directory { mode: 0o777 }).await;
    made.map(|_| ()).map_err(|error| error.errno())
}

async fn lock(file: &Arc<dyn OpenFile>) -> Result<(), Errno> {
    let (family, kind, range) = (LockFamily::Flock, LockKind::Exclusive, LockRange::ALL);
    let lock = Lock { family, kind, range, owner: LockOwner::own(1), pid: Pid(1) };
    file.lock(&Context::system(), lock, false).await.map_err(|error| error.errno())
}

// proves: P114
#[test]
fn open_files_and_locks_outlive_an_export_that_was_away() {
    for seed in 0..20 {
        simulate(seed, async {
            let rig = Rig::new().await;
            let [one, other] = [rig.mount().await, rig.mount().await];
            let file = create(&one, b"f").await;
            lock(&file).await.unwrap();
            let cx = Context::system();
            file.write(&cx, Write::at(0), Buf::from(&b"before"[..])).await.unwrap();
            for _ in 0..3 {
                rig.withdraw().await;
                let writing = {
                    let file = file.clone();
                    spawn_join(async move {
                        let data = Buf::from(&b"behind"[..]);
                        file.write(&Context::system(), Write::at(6), data).await
                    })
                };
                // Longer than a lease, which counts from the opening on.
                sleep(rig.server.lease() * 3).await;
                rig.open().await;
                assert_eq!(writing.await.unwrap().unwrap(), 6);
                let same = create(&other, b"f").await;
                assert_eq!(lock(&same).await, Err(Errno::EAGAIN), "its holder has it still");
                same.close(&cx).await.unwrap();
            }
            file.close(&cx).await.unwrap();
            let same = create(&other, b"f").await;
            lock(&same).await.unwrap();
        });
    }
}

/// Calls are cut short at any moment.
// proves: P114
#[test]
fn changes_are_made_once_however_often_their_export_goes_away() {
    for seed in 0..40 {
        simulate(seed, async move {
            let rig = Rig::new().await;
            let fs = rig.mount().await;
            let mut at = Duration::from_micros(seed * 37 % 1000);
            for number in 0..10 {
                let name = format!("d{number}").into_bytes();
                let (making, made) = (fs.clone(), name.clone());
                let making = spawn_join(async move { mkdir(&making, &made).await });
                sleep(at).await;
                rig.withdraw().await;
                sleep(Duration::from_secs(1)).await;
                rig.open().await;
                making.await.unwrap().unwrap();
                assert_eq!(mkdir(&fs, &name).await.unwrap_err(), Errno::EEXIST);
                at += Duration::from_micros(300);
            }
        });
    }
}

/// An append was in the file system when the export went, and a cut of the same file waited for it. The
/// cut noted its intent all the same. Then both seemed to have begun. The cut was made first, and the
/// append at its old place behind it.
// proves: P199
#[test]
fn what_waited_for_a_change_that_was_cut_short_has_not_begun() {
    simulate(1, async {
        let rig = Rig::new().await;
        let [one, other] = [rig.mount_at("one").await, rig.mount_at("other").await];
        rig.withdraw().await;
        let slow = Fault {
            op: Some(Op::Write),
            when: When::Nth(2),
            delay: Duration::from_millis(50),
            error: None,
        };
        rig.server.open(rig.export(vec![slow]), StateLoss::Nothing).await.unwrap();
        let [appended, cut] = [create(&one, b"f").await, create(&other, b"f").await];
        let append = Write { append: true, ..Write::default() };
        let (cx, bytes) = (Context::system(), || Buf::from(&b"word"[..]));
        appended.write(&cx, append, bytes()).await.unwrap();
        let appending = spawn_join(async move {
            appended.write(&Context::system(), append, bytes()).await.map(|_| appended)
        });
        sleep(Duration::from_millis(20)).await;
        let cutting = spawn_join(async move {
            let to_nothing = SetAttr { size: Some(0), ..SetAttr::default() };
            cut.setattr(&Context::system(), to_nothing).await.map(|_| cut)
        });
        sleep(Duration::from_millis(20)).await;
        rig.network.partition("one", true);
        rig.withdraw().await;
        rig.open().await;
        sleep(Duration::from_secs(1)).await;
        rig.network.partition("one", false);
        appending.await.unwrap().unwrap();
        let size = cutting.await.unwrap().unwrap().getattr(&cx).await.unwrap().size;
        assert_eq!(size, 0, "the append is in the file behind the cut");
    });
}

/// A file system that has died reports so, and the first watcher sets the flag. The error is then
/// no answer, neither at once nor to a repeated call.
#[test]
fn what_fails_because_an_export_is_lost_is_no_answer() {
    simulate(1, async {
        let rig = Rig::new().await;
        let fs = rig.mount().await;
        rig.withdraw().await;
        let lost = Arc::new(AtomicBool::new(false));
        let broken = |op| Fault {
            op: Some(op),
            when: When::Always,
            delay: Duration::from_millis(100),
            error: Some(Errno::ENOTCONN),
        };
        let export = rig.export(vec![broken(Op::Make)]);
        let export = export.that_may_be_lost(lost.clone());
        rig.server.open(export, StateLoss::Nothing).await.unwrap();
        let making = {
            let fs = fs.clone();
            spawn_join(async move { mkdir(&fs, b"d").await })
        };
        // Once its intent is noted: a call notes none where it cannot be carried out.
        sleep(Duration::from_millis(50)).await;
        lost.store(true, Ordering::SeqCst);
        sleep(Duration::from_secs(1)).await;
        rig.withdraw().await;
        // The server dies once more before it is known what became of the change.
        let lost = Arc::new(AtomicBool::new(true));
        let export = rig.export(vec![broken(Op::Lookup)]).that_may_be_lost(lost);
        assert_eq!(rig.server.open(export, StateLoss::Nothing).await, Err(ExportLost));
        assert!(timeout(Duration::from_secs(1), rig.server.opened()).await.is_err());
        rig.open().await;
        making.await.unwrap().unwrap();
        assert_eq!(mkdir(&fs, b"d").await.unwrap_err(), Errno::EEXIST);
    });
}
