//! A program on a mount, which opens what it looks up.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use dray_core::{
    Context, CreateHow, Entry, FileId, FileSystem, Gid, Identity, Name, OpenFile, OpenHow, Pid,
    RequestId, Result, SetAttr, Uid,
};
use dray_fabric::sim::Network;
use dray_rpc::client::RemoteFs;
use dray_rpc::server::{Sabotage, Server, ServerOptions};
use dray_rt::{Scope, sleep};

use crate::common::{client_options, connect, memory, serve_simulated, server_of};

pub const FILE: &[u8] = b"f";
pub const READ: OpenHow = OpenHow::READ;
/// Longer than anything is kept open unused.
pub const A_WHILE: Duration = Duration::from_millis(200);

/// A program on a mount: one thread of an ordinary user.
pub struct Program {
    pub fs: RemoteFs,
    pid: u32,
    requests: Cell<u64>,
}

impl Program {
    pub async fn mount(network: &Network, pid: u32) -> Program {
        Program::on(connect(network.connector("s"), client_options()).await.unwrap(), pid)
    }

    pub fn on(fs: RemoteFs, pid: u32) -> Program {
        // The program numbers its requests as the kernel does.
        Program { fs, pid, requests: Cell::new(1000 * u64::from(pid)) }
    }

    pub fn cx_of(&self, uid: u32) -> Context {
        self.requests.set(self.requests.get() + 2);
        let (uid, gid) = (Uid(uid), Gid(uid));
        let who = Identity { uid, gid, ..Identity::default() };
        let request = RequestId(self.requests.get());
        Context::new(self.fs.session().node(), request, Arc::new(who), Pid(self.pid))
    }

    pub fn cx(&self) -> Context {
        self.cx_of(1001)
    }

    pub fn root(&self) -> FileId {
        self.fs.info().root
    }

    pub async fn lookup(&self, name: &[u8]) -> Result<Entry> {
        self.fs.lookup(&self.cx(), self.root(), Name::new(name).unwrap()).await
    }

    pub async fn open(&self, id: FileId, how: OpenHow) -> Result<Arc<dyn OpenFile>> {
        self.fs.open(&self.cx(), id, how).await
    }

    /// open(2) and close(2).
    pub async fn open_close(&self, name: &[u8], how: OpenHow) {
        let entry = self.lookup(name).await.unwrap();
        let file = self.open(entry.id, how).await.unwrap();
        file.close(&self.cx()).await.unwrap();
    }

    /// stat(2).
    pub async fn stat(&self, name: &[u8]) {
        let entry = self.lookup(name).await.unwrap();
        self.fs.getattr(&self.cx(), entry.id).await.unwrap();
    }

    pub async fn chmod(&self, id: FileId, mode: u32) {
        let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
        self.fs.setattr(&self.cx_of(0), id, set).await.unwrap();
    }

    pub fn round_trips(&self) -> u64 {
        self.fs.session().status().channels.iter().map(|channel| channel.calls).sum()
    }

    pub fn made(&self) -> u64 {
        self.fs.session().status().open_ahead.made
    }
}

/// A file that everybody may read and write.
pub async fn make(fs: &RemoteFs, name: &[u8]) -> FileId {
    let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o666, exclusive: true };
    let name = Name::new(name).unwrap();
    let made = fs.create(&Context::system(), fs.info().root, name, how).await;
    let (entry, file) = made.unwrap();
    file.close(&Context::system()).await.unwrap();
    entry.id
}

pub fn open_files(server: &Server) -> usize {
    server.status().clients.iter().map(|client| client.files).sum()
}

/// A server, one program that has learned to open what it looks up, and the file.
pub async fn learned(
    network: &Network,
    sabotage: Option<Sabotage>,
) -> (Server, Scope, Program, FileId) {
    let options = ServerOptions { sabotage, ..ServerOptions::default() };
    let (server, scope) = (server_of(memory(), options), Scope::new());
    serve_simulated(network, "s", &server, &scope);
    let program = Program::mount(network, 7).await;
    let id = make(&program.fs, FILE).await;
    program.open_close(FILE, READ).await;
    sleep(A_WHILE).await;
    (server, scope, program, id)
}
