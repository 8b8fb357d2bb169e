//! The machine of a client that writes back: its disk, and what outlives a daemon there.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use dray_core::{FileSystem, SessionControl};
use dray_fabric::sim::Network;
use dray_rpc::client::{
    ClientOptions, ClientSession, RemoteFs, SessionMemory, WriteBackOptions, dirty_log_summaries_on,
};
use dray_rt::{Instant, now, sleep};

use super::Outcome;
use super::client::{MountHow, SimClient, options};
use super::client_disk::{DiskFaults, SimulatedDisk};
use super::machine::{LEASE, SERVER};
use crate::fixture::TempDir;

/// The directory of all logs on the disk.
const LOGS: &str = "/cache/dirty";
/// What is dirty at most, bytes: some seeds reach it.
const DIRTY_MAX_BYTES: u64 = 4 << 10;
/// Between two tries to mount, or to write what is left.
const AGAIN: Duration = Duration::from_millis(20);
/// How long a daemon that follows tries to reach the server before it goes on without.
const PATIENCE: Duration = Duration::from_millis(100);
/// The longest time for which only the server knows that a connection has broken.
const UNNOTICED_MAX: Duration = Duration::from_secs(4);

/// A machine. Its clones are the same one.
#[derive(Clone)]
pub(super) struct ClientMachine(Arc<Inner>);

struct Inner {
    disk: SimulatedDisk,
    /// For data that cannot be written any more. It is synced there at once.
    aside: TempDir,
    age_max: Duration,
    lost_too_early: AtomicBool,
    state: Mutex<MachineState>,
}

/// What ends with the machine's power.
struct MachineState {
    /// The memory of the session, as the supervisor has it.
    session: Option<OwnedFd>,
    /// Numbers of requests, as the kernel gives them.
    requests: Arc<AtomicU64>,
    /// The session of the process that lives, and how often that has heard that the server had forgotten it.
    process: (Weak<ClientSession>, u64),
    /// Since when no connection is known.
    away_since: Option<Instant>,
}

impl Default for MachineState {
    fn default() -> MachineState {
        // No kernel gives a request the number 0. No later daemon would attach what that opens.
        let requests = Arc::new(AtomicU64::new(1));
        MachineState { session: None, requests, process: Default::default(), away_since: None }
    }
}

/// How a client goes down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientCrash {
    /// The process dies, and another one goes on with its session.
    Daemon,
    /// The machine loses power.
    Machine,
}

impl ClientMachine {
    pub(super) fn new(faults: DiskFaults, age_max: Duration) -> ClientMachine {
        let state = Mutex::new(MachineState::default());
        // Names by chance are the same in each run of a seed, and some of these run at the same time.
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let aside = TempDir::new(&format!("aside{number}")).expect("a directory");
        let (disk, lost_too_early) = (SimulatedDisk::new(faults), AtomicBool::new(false));
        ClientMachine(Arc::new(Inner { disk, aside, age_max, lost_too_early, state }))
    }

    fn lock(&self) -> MutexGuard<'_, MachineState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn crash(&self, how: ClientCrash) {
        match how {
            ClientCrash::Daemon => {
                self.0.disk.end_process();
                let mut state = self.lock();
                state.process = Default::default();
                state.away_since.get_or_insert_with(now);
            }
            ClientCrash::Machine => {
                self.0.disk.lose_power();
                *self.lock() = MachineState::default();
            }
        }
    }

    /// The memory of the session, and whether a process before this one had it.
    fn memory(&self) -> (SessionMemory, bool) {
        let mut state = self.lock();
        match &state.session {
            Some(fd) => {
                let fd = fd.try_clone().expect("a descriptor");
                (SessionMemory::from_fd(fd).expect("it was made here"), true)
            }
            None => {
                let memory = SessionMemory::create_memfd().expect("memory");
                let fd = memory.fd().expect("it has one").try_clone_to_owned();
                state.session = Some(fd.expect("a descriptor"));
                (memory, false)
            }
        }
    }

    /// Mounts, and writes what a crash has left. To be run on the node.
    pub(super) async fn mount(
        &self,
        network: &Network,
        name: &str,
        (number, how): (usize, MountHow),
    ) -> SimClient {
        let log = WriteBackOptions {
            dir: LOGS.into(),
            disk: self.0.disk.of_process(),
            bytes_max: DIRTY_MAX_BYTES,
            age_max: self.0.age_max,
            supervisor: None,
        };
        let aside = Some(self.0.aside.path().to_owned());
        let options = ClientOptions { aside, write_back: Some(log), ..options(name, how) };
        let session = loop {
            if let Some(session) = self.connect(network, name, &options).await {
                break session;
            }
            sleep(AGAIN).await;
        };
        session.attach_another();
        self.lock().process = (Arc::downgrade(&session), 0);
        let fs = RemoteFs::new(session);
        // One that could not be written is tried again by the next mount, and so it is here.
        while fs.session().write_left_behind().await.left > 0 {
            sleep(AGAIN).await;
        }
        SimClient::new(number, fs, self.lock().requests.clone(), Some(self.clone()))
    }

    async fn connect(
        &self,
        network: &Network,
        name: &str,
        options: &ClientOptions,
    ) -> Option<Arc<ClientSession>> {
        let connector = || network.connector_from(name, SERVER);
        let (memory, follows) = self.memory();
        if follows {
            let taken =
                ClientSession::take_over(connector(), options.clone(), memory, PATIENCE, false);
            if let Some(taken) = taken.await {
                return taken.ok();
            }
        }
        // There was no process before, or it died before it was welcomed.
        self.lock().session = None;
        let (memory, _) = self.memory();
        let session = ClientSession::connect(connector(), options.clone(), memory).await;
        session.map_err(|_| self.lock().session = None).ok()
    }

    /// Notes whether the server has forgotten the session, which it may do only where the client was away for a lease.
    /// To be called often, by a task whose clock is neither slow nor fast.
    pub(super) fn note_losses(&self) {
        let mut state = self.lock();
        let Some(session) = state.process.0.upgrade() else { return };
        let status = session.status();
        let away = state.away_since.map_or(Duration::ZERO, |since| since.elapsed());
        if status.lost > state.process.1 && away + UNNOTICED_MAX < LEASE {
            self.0.lost_too_early.store(true, Ordering::Relaxed);
        }
        state.process.1 = status.lost;
        match status.channels.iter().any(|channel| channel.up) {
            true => state.away_since = None,
            false => _ = state.away_since.get_or_insert_with(now),
        }
    }

    /// Whether the server has forgotten a session that it had to remember.
    pub(super) fn lost_session_too_early(&self) -> bool {
        self.note_losses();
        self.0.lost_too_early.load(Ordering::Relaxed)
    }

    /// The first eight bytes of all files that were kept aside, as a number.
    pub(super) fn kept_aside(&self) -> Vec<u64> {
        let is_data = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "data");
        let files = std::fs::read_dir(self.0.aside.path()).expect("it is there");
        let paths = files.map(|file| file.expect("a name").path()).filter(is_data);
        let bytes = paths.map(|path| std::fs::read(path).expect("it is readable"));
        let first = |bytes: Vec<u8>| bytes.first_chunk().map(|first| u64::from_le_bytes(*first));
        bytes.filter_map(first).collect()
    }

    /// Nothing is dirty, now that everything is sent. Errors: what is.
    pub(super) fn has_nothing_left(&self) -> Outcome<()> {
        let logs = dirty_log_summaries_on(&self.0.disk.of_process(), Path::new(LOGS));
        let logs = logs.map_err(|error| format!("the logs cannot be read: {error}"))?;
        match logs.iter().find(|log| log.bytes > 0) {
            None => Ok(()),
            Some(log) => Err(format!("it is quiet, and there is something left: {log:?}")),
        }
    }
}

/// The client sends everything that it keeps. Errors: something is still there.
pub(super) async fn finish(client: &SimClient) -> Outcome<()> {
    client.fs.finish().await;
    let bytes = client.fs.session().status().kept_writes.map_or(0, |status| status.bytes);
    match bytes {
        0 => client.fs.statfs(&client.cx()).await.map(drop).map_err(client.failed("statfs")),
        bytes => Err(format!("client {} has kept {bytes} bytes to the end", client.number)),
    }
}
