//! No client can have all of a thing that is counted at a server.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{client_options, connect, serve_simulated, simulate};
use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{
    Context, CreateHow, Errno, Error, FileSystem, Lock, LockFamily, LockKind, LockOwner, LockRange,
    Name, OpenFile, OpenHow, Pid,
};
use dray_fabric::sim::Network;
use dray_rpc::client::RemoteFs;
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions, StateLoss};
use dray_rt::Scope;

/// The most open files, locks and owners of locks.
const MOST: usize = 40;
const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

struct Machine {
    network: Network,
    fs: MemoryFs,
    journal: MemoryJournal,
    server_process: Scope,
}

impl Machine {
    fn new() -> Machine {
        let fs = MemoryFs::new(MemoryOptions { locks_max: MOST, ..MemoryOptions::default() });
        let (network, journal, server_process) =
            (Network::new(), MemoryJournal::default(), Scope::new());
        Machine { network, fs, journal, server_process }
    }

    async fn start(&mut self) -> Server {
        let export = Export::new("data", Arc::new(self.fs.clone()), Vec::new());
        let options = ServerOptions {
            open_files_max: MOST,
            lock_owners_max: MOST,
            ..ServerOptions::default()
        };
        let server = Server::new(options, vec![export], Arc::new(self.journal.clone()));
        server.restore(StateLoss::Nothing).await;
        self.server_process = Scope::new();
        serve_simulated(&self.network, "s", &server, &self.server_process);
        server
    }

    async fn client(&self) -> RemoteFs {
        connect(self.network.connector("s"), client_options()).await.unwrap()
    }
}

async fn create(
    fs: &RemoteFs,
    prefix: &str,
    number: usize,
) -> Result<Arc<dyn OpenFile>, (String, Error)> {
    let text = format!("{prefix}{number}");
    let (cx, name) = (Context::system(), Name::new(text.as_bytes()).unwrap());
    match fs.create(&cx, fs.info().root, name, NEW).await {
        Ok((_, file)) => Ok(file),
        Err(error) => Err((text, error)),
    }
}

/// Opens as many files as a client can have. Returns them, with the name and error of the next one.
async fn open_all(fs: &RemoteFs, prefix: &str) -> (Vec<Arc<dyn OpenFile>>, (String, Error)) {
    let mut files = Vec::new();
    loop {
        match create(fs, prefix, files.len()).await {
            Ok(file) => files.push(file),
            Err(refused) => return (files, refused),
        }
    }
}

/// One client had all open files of an export, also when it had been gone for a while, and all
/// others got `ENFILE`.
// proves: P127
#[test]
fn a_client_that_opens_all_it_can_leaves_files_to_others() {
    simulate(21, async {
        let mut machine = Machine::new();
        let server = machine.start().await;
        let (greedy, other) = (machine.client().await, machine.client().await);
        let (mut files, (name, error)) = open_all(&greedy, "g").await;
        assert_eq!((files.len(), error.errno()), (MOST / 2, Errno::ENFILE));
        let (cx, root) = (Context::system(), other.info().root);
        let lookup = other.lookup(&cx, root, Name::new(name.as_bytes()).unwrap()).await;
        assert_eq!(lookup.unwrap_err().errno(), Errno::ENOENT, "what was refused was made");
        let (others, _) = open_all(&other, "o").await;
        assert!(others.len() >= MOST / 5 - 1, "{}", others.len());
        assert_eq!(server.status().refused.files, 2);
        // Gone without a word, and not for so long yet that its lease has ended.
        machine.network.break_all("s");
        let third = machine.client().await;
        create(&third, "t", 0).await.unwrap();
        drop(files.drain(..files.len() / 2));
        for file in &others {
            file.getattr(&cx).await.unwrap();
        }
    });
}

fn byte(at: u64, owner: u64) -> Lock {
    let (family, kind) = (LockFamily::Posix, LockKind::Exclusive);
    let range = LockRange { start: at, end: at };
    Lock { family, kind, range, owner: LockOwner::own(owner), pid: Pid(1) }
}

/// One process that locked every other byte of a file had all locks of the export.
// proves: P127
#[test]
fn a_client_that_locks_all_it_can_leaves_locks_to_others() {
    simulate(22, async {
        let mut machine = Machine::new();
        let server = machine.start().await;
        let (greedy, other) = (machine.client().await, machine.client().await);
        let cx = Context::system();
        let all_of = async |fs: &RemoteFs, name: &str, owner_of: fn(u64) -> u64| {
            let file = create(fs, name, 0).await.unwrap();
            let mut had = 0;
            loop {
                match file.lock(&cx, byte(2 * had, owner_of(had)), false).await {
                    Ok(()) => had += 1,
                    Err(error) => return (file, had as usize, error),
                }
            }
        };
        let (_file, had, error) = all_of(&greedy, "g", |_| 1).await;
        assert_eq!((had, error.errno()), (MOST / 2, Errno::ENOLCK));
        let (file, had, error) = all_of(&other, "o", |_| 1).await;
        assert_eq!(error.errno(), Errno::ENOLCK);
        assert!(had >= MOST / 5 - 1, "{had}");
        assert_eq!(server.status().refused.locks, 2);
        // Owners are counted for each open file that they have locks through.
        file.flush(&cx, LockOwner::own(1)).await.unwrap();
        let (file, had, error) = all_of(&other, "p", |byte| byte + 10).await;
        assert_eq!(error.errno(), Errno::ENOLCK);
        assert!((2..MOST / 2).contains(&had), "{had}");
        file.close(&cx).await.unwrap();
    });
}

/// After a restart of the server those who had most may be last to come back.
// proves: P127
#[test]
fn what_a_client_had_it_has_again_after_a_restart() {
    simulate(23, async {
        let mut machine = Machine::new();
        machine.start().await;
        let (greedy, other) = (machine.client().await, machine.client().await);
        let (files, _) = open_all(&greedy, "g").await;
        let (others, _) = open_all(&other, "o").await;
        machine.server_process.kill();
        machine.network.break_all("s");
        machine.start().await;
        let cx = Context::system();
        for file in others.iter().chain(&files) {
            file.getattr(&cx).await.unwrap();
        }
        dray_rt::sleep(Duration::from_secs(1)).await;
        assert!(create(&greedy, "more", 0).await.is_err(), "its share is what it was");
    });
}
