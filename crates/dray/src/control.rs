//! The control sockets: every server and every mount answers questions about itself in
//! JSON, one question a connection.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::endpoint;
use crate::error::{Doing, Failure};
use crate::named::{self, Named};
use crate::paths;

/// Which kind of process listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `dray serve`; named after its state directory.
    Server,
    /// `dray mount`; named after its mount point.
    Mount,
}

impl Kind {
    fn dir(self) -> PathBuf {
        paths::run_dir().join(match self {
            Kind::Server => "servers",
            Kind::Mount => "mounts",
        })
    }

    /// The socket of the process that is about `path`.
    pub fn socket(self, path: &Path) -> PathBuf {
        self.dir().join(format!("{}.sock", paths::short_name(path)))
    }

    /// All sockets of this kind, dead ones included.
    pub fn all(self) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.dir()) else { return Vec::new() };
        let mut all: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        all.retain(|path| path.extension().is_some_and(|extension| extension == "sock"));
        all.sort();
        all
    }

    /// Listens as the process that is about `path`. One that still listens there is about to
    /// end, or its mount is no longer in the tree.
    pub fn listen(self, path: &Path) -> Result<(OwnedFd, Named), Failure> {
        paths::make_private(&paths::run_dir())?;
        paths::make_private(&self.dir())?;
        let socket = self.socket(path);
        let aside = named::aside(&socket);
        let doing = || format!("cannot listen on the control socket {}", socket.display());
        let listener = endpoint::listen_unix(&aside).doing(doing)?;
        let named = Named::take(&aside, socket.clone()).doing(doing)?;
        Ok((listener, named))
    }

    /// Removes what a process that was killed has left of its socket.
    pub fn remove_dead(self, path: &Path) {
        let socket = self.socket(path);
        named::remove_if(&socket, |_| UnixStream::connect(&socket).is_err());
    }
}

/// A process that does not answer within this time is stuck.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest answer that is read, bytes.
const REPLY_MAX_BYTES: u64 = 64 << 20;

/// Asks the process behind `socket`. Errors: nobody is there, or the answer makes no sense.
pub fn ask(socket: &Path, question: &str) -> io::Result<Value> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(format!("{question}\n").as_bytes())?;
    let mut reply = Vec::new();
    stream.take(REPLY_MAX_BYTES).read_to_end(&mut reply)?;
    serde_json::from_slice(&reply).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// The word and the rest of a question.
pub fn parse(question: &str) -> (&str, &str) {
    let line = question.lines().next().unwrap_or_default().trim();
    let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
    (word, rest.trim())
}

/// An answer that says that the question was not understood, or could not be granted.
pub fn refusal(what: &str) -> Value {
    serde_json::json!({ "error": what })
}
