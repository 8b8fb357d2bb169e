//! Servers, mounts and files that a survey makes for itself and removes again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use dray_backends::null::NullFs;
use dray_client::{ConnectOptions, Target};
use dray_core::FsUuid;
use dray_fabric::{Address, Listening, listen_first};
use dray_rpc::server::{Export, MemoryJournal, Server, ServerOptions};
use dray_rt::sync::oneshot;
use dray_rt::{DriverKind, Executor, ExecutorHandle, Scope};

use super::load::LoadTarget;
use crate::control;
use crate::error::{ErrorContext, Failure};
use crate::mount::mount_table;
use crate::mount::supervisor::Supervisors;
use crate::serve::workers::Workers;

/// Size of the null backend's file: nothing is ever at its end.
const NULL_BYTES: u64 = 1 << 40;
const NULL_EXPORT: &str = "null";

/// A server of a null backend in this process, by TCP on loopback.
pub struct Loopback {
    target: Target,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Loopback {
    pub fn start() -> Result<Loopback, Failure> {
        let what = || "cannot start a server of nothing on loopback".to_owned();
        let fs = NullFs::new(FsUuid(1), NULL_BYTES);
        let mut export = Export::new(NULL_EXPORT, fs, Vec::new());
        export.insecure = true; // the surveying user need not be root, and there is nothing in it
        let exports = vec![export];
        let journal = Arc::new(MemoryJournal::default());
        let server = Server::new(ServerOptions::default(), exports, journal);
        let workers = Workers::new(&[NULL_EXPORT], 0);
        let (stop, stopped) = oneshot::channel();
        let (sender, receiver) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name("dray-survey".into()).spawn(move || {
            let result = Executor::new(DriverKind::Epoll).map(|mut executor| {
                executor.block_on(accept(server, Arc::new(workers), sender.clone(), stopped));
            });
            if let Err(error) = result {
                let _ = sender.send(Err(error)); // the starting thread waits for it
            }
        });
        let thread = thread.doing(what)?;
        let address = receiver.recv().doing(what)?.doing(what)?;
        let target = Target::at(address, NULL_EXPORT.to_owned());
        Ok(Loopback { target, stop: Some(stop), thread: Some(thread) })
    }

    pub fn place(&self) -> LoadTarget {
        LoadTarget::Remote(self.target.clone(), ConnectOptions::default(), Vec::new())
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.stop.take().map(|stop| stop.send(()));
        self.thread.take().map(JoinHandle::join);
    }
}

async fn accept(
    server: Server,
    workers: Arc<Workers>,
    sender: std::sync::mpsc::Sender<std::io::Result<Address>>,
    stopped: oneshot::Receiver<()>,
) {
    let any = Address::Tcp { host: "127.0.0.1".to_owned(), port: 0 };
    let Listening { address, listener } = match listen_first(&any).await {
        Ok(listening) => listening,
        Err(error) => {
            let _ = sender.send(Err(error)); // the starting thread waits for it
            return;
        }
    };
    let _ = sender.send(Ok(address)); // as above
    let scope = Scope::new();
    scope.spawn_on(&ExecutorHandle::current(), async move {
        while let Ok(incoming) = listener.accept().await {
            let Some(admission) = server.admit(incoming.peer()) else { continue };
            let (workers, server) = (workers.clone(), server.clone());
            dray_rt::spawn(async move { workers.serve(&server, incoming, admission).await });
        }
    });
    let _ = stopped.await; // an error too means that it is over
    scope.kill();
}

/// A fresh directory in another, removed in the end.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(dir: &Path) -> Result<Scratch, Failure> {
        let path = dir.join(format!(".dray-survey-{}", std::process::id()));
        std::fs::create_dir(&path).map_err(|error| {
            let advice = super::advice(error.raw_os_error());
            Failure::new(format!("cannot write to {}: {error}{advice}", dir.display()))
        })?;
        Ok(Scratch(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            log::warn!("{} is left behind: {error}", self.0.display());
        }
    }
}

/// The process that serves the mount at `dir`, and what is mounted, if it says so.
pub fn mount_process(dir: &Path) -> Option<(u32, Target)> {
    let socket = control::socket_of(&mount_table::find(dir)?, &Supervisors::look())?;
    let report = control::ask(&socket, "status").ok()?;
    let pid = u32::try_from(report["pid"].as_u64()?).ok()?;
    Some((pid, report["target"].as_str()?.parse().ok()?))
}
