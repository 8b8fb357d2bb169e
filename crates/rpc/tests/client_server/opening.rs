//! An export whose file system answers late: the server serves the others meanwhile, and its
//! clients find what was theirs once it is open.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{client_options, connect, serve_simulated, simulate};
use dray_backends::memory::{MemoryDisk, MemoryOptions};
use dray_core::{
    Context, CreateHow, Errno, FileId, FileSystem, Lock, LockFamily, LockKind, LockOwner,
    LockRange, Make, Name, OpenFile, OpenHow, Pid,
};
use dray_fabric::sim::Network;
use dray_rpc::client::{ClientOptions, RemoteFs};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions, StateLoss};
use dray_rt::{Scope, now, sleep, timeout};

const NAMES: [&str; 2] = ["well", "ice"];
const HOW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: false };

/// Two disks and a journal, which outlive servers.
struct Machine {
    network: Network,
    disks: [MemoryDisk; 2],
    journal: MemoryJournal,
    server_process: Scope,
}

impl Machine {
    fn new(network: &Network) -> Machine {
        let disk =
            || MemoryDisk::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() });
        Machine {
            network: network.clone(),
            disks: [disk(), disk()],
            journal: MemoryJournal::default(),
            server_process: Scope::new(),
        }
    }

    fn export(&self, index: usize) -> Export {
        Export::new(NAMES[index], Arc::new(self.disks[index].mount()), Vec::new())
    }

    /// Serves; no export is open yet.
    fn start(&mut self) -> Server {
        let options = ServerOptions { boot: 1, ..ServerOptions::default() };
        let server = Server::awaiting(options, &NAMES, Arc::new(self.journal.clone()));
        self.server_process = Scope::new();
        serve_simulated(&self.network, "s", &server, &self.server_process);
        server
    }

    fn kill(&mut self) {
        self.disks.iter().for_each(MemoryDisk::kill);
        self.server_process.kill();
        self.network.break_all("s");
    }
}

async fn mount(network: &Network, export: usize, limit: Option<Duration>) -> RemoteFs {
    let options =
        ClientOptions { export: NAMES[export].into(), timeout: limit, ..client_options() };
    connect(network.connector_from("host", "s"), options).await.unwrap()
}

async fn open(fs: &RemoteFs, name: &[u8]) -> Arc<dyn OpenFile> {
    let name = Name::new(name).unwrap();
    fs.create(&Context::system(), fs.info().root, name, HOW).await.unwrap().1
}

async fn lock(file: &Arc<dyn OpenFile>) -> Result<(), Errno> {
    let (family, kind, range) = (LockFamily::Flock, LockKind::Exclusive, LockRange::ALL);
    let lock = Lock { family, kind, range, owner: LockOwner::own(1), pid: Pid(1) };
    file.lock(&Context::system(), lock, false).await.map_err(|error| error.errno())
}

async fn mkdir(fs: &RemoteFs, name: &[u8]) -> Result<FileId, Errno> {
    let (cx, name) = (Context::system(), Name::new(name).unwrap());
    let made = fs.make(&cx, fs.info().root, name, Make::Directory { mode: 0o777 }).await;
    made.map(|entry| entry.id).map_err(|error| error.errno())
}

// proves: P112
#[test]
fn clients_of_an_export_that_opens_late_keep_their_files_and_others_do_not_wait() {
    for seed in 0..20 {
        simulate(seed, opens_late());
    }
}

async fn opens_late() {
    let network = Network::new();
    let mut machine = Machine::new(&network);
    let server = machine.start();
    for index in 0..2 {
        server.open(machine.export(index), StateLoss::Nothing).await.unwrap();
    }
    server.opened().await;
    let [well, ice] = [mount(&network, 0, None).await, mount(&network, 1, None).await];
    let brief = mount(&network, 1, Some(Duration::from_secs(2))).await;
    let (others, mine) = (open(&well, b"f").await, open(&ice, b"f").await);
    lock(&mine).await.unwrap();
    machine.kill();

    let server = machine.start();
    server.open(machine.export(0), StateLoss::Nothing).await.unwrap();
    // No client of this export has a lock to reclaim.
    let begin = now();
    lock(&others).await.unwrap();
    mkdir(&well, b"d").await.unwrap();
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    assert_eq!(mkdir(&brief, b"brief").await.unwrap_err(), Errno::EHOSTDOWN);
    // Longer than a lease: it counts from the opening on.
    let made = dray_rt::spawn_join(async move { (mkdir(&ice, b"d").await, ice) });
    sleep(server.lease() * 3).await;
    assert!(timeout(Duration::from_secs(1), server.opened()).await.is_err());

    server.open(machine.export(1), StateLoss::Nothing).await.unwrap();
    server.opened().await;
    let (made, _ice) = made.await.unwrap();
    made.unwrap();
    sleep(Duration::from_secs(1)).await; // until it has connected
    mkdir(&brief, b"brief").await.unwrap();
    let other = open(&brief, b"f").await;
    assert_eq!(lock(&other).await, Err(Errno::EAGAIN), "its holder has it still");
    mine.close(&Context::system()).await.unwrap();
    sleep(Duration::from_secs(1)).await;
    lock(&other).await.unwrap();
}

/// Changes that the last server epoch left unfinished are settled when their export opens.
// proves: P112
#[test]
fn changes_of_an_export_that_opens_late_are_made_once() {
    for seed in 0..40 {
        simulate(seed, async move {
            let network = Network::new();
            let mut machine = Machine::new(&network);
            let server = machine.start();
            for index in 0..2 {
                server.open(machine.export(index), StateLoss::Nothing).await.unwrap();
            }
            let ice = mount(&network, 1, None).await;
            let mut at = Duration::from_millis(seed % 7);
            for number in 0..10 {
                let name = format!("d{number}").into_bytes();
                let (fs, made) = (ice.clone(), name.clone());
                let making = dray_rt::spawn_join(async move { mkdir(&fs, &made).await });
                sleep(at).await;
                machine.kill();
                let server = machine.start();
                server.open(machine.export(0), StateLoss::Nothing).await.unwrap();
                sleep(Duration::from_secs(90)).await;
                server.open(machine.export(1), StateLoss::Nothing).await.unwrap();
                making.await.unwrap().unwrap();
                assert_eq!(mkdir(&ice, &name).await.unwrap_err(), Errno::EEXIST);
                at += Duration::from_micros(300);
            }
        });
    }
}
