//! The control sockets: every server and every mount answers questions about itself in
//! JSON, one question a connection.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;
use socket2::{Domain, SockAddr, Socket, Type};

use crate::at_once;
use crate::endpoint;
use crate::error::{ErrorContext, Failure};
use crate::mount::mount_table::MountEntry;
use crate::mount::supervisor::Supervisors;
use crate::paths;
use crate::run_file::{self, RunFile};

/// Which kind of process listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessKind {
    /// `dray serve`; called by the short name of its state directory.
    Server,
    /// `dray mount`; called as [`paths::mount_name`] says.
    Mount,
}

const MOUNTS: &str = "mounts";
/// Of the files of control sockets.
pub const EXTENSION: &str = "sock";

impl ProcessKind {
    fn dir(self) -> PathBuf {
        paths::run_dir().join(match self {
            ProcessKind::Server => "servers",
            ProcessKind::Mount => MOUNTS,
        })
    }

    /// The socket of the process that is called so.
    pub fn socket(self, name: &str) -> PathBuf {
        self.dir().join(file_name(name))
    }

    /// All sockets of this kind, dead ones included.
    pub fn all(self) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.dir()) else { return Vec::new() };
        let mut all: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        all.retain(|path| path.extension().is_some_and(|extension| extension == EXTENSION));
        all.sort();
        all
    }

    /// Listens as the process that is called so. One that still listens there is about to
    /// end, or its mount is no longer in the tree.
    pub fn listen(self, name: &str) -> Result<(OwnedFd, RunFile), Failure> {
        paths::make_run_dir()?;
        paths::make_private(&self.dir())?;
        let socket = self.socket(name);
        let aside = run_file::aside(&socket);
        let doing = || format!("cannot listen on the control socket {}", socket.display());
        let listener = endpoint::listen_unix(&aside).doing(doing)?;
        let named = RunFile::take(&aside, socket.clone()).doing(doing)?;
        Ok((listener, named))
    }

    /// Removes what a process that was killed has left of its socket.
    pub fn remove_dead(self, name: &str) {
        remove_dead(&self.socket(name));
    }

    /// The same of all of this kind.
    pub fn remove_all_dead(self) {
        self.all().iter().for_each(|socket| remove_dead(socket));
    }
}

fn file_name(name: &str) -> String {
    format!("{name}.{EXTENSION}")
}

/// Removes a socket at which nobody listens. One that cannot be tried stays.
pub fn remove_dead(socket: &Path) {
    run_file::remove_if(socket, |_| matches!(dray_fabric::somebody_listens(socket), Ok(false)));
}

/// Where the process listens that serves each of these mounts; none if it cannot be found.
pub fn sockets_of(mounts: Vec<MountEntry>) -> Vec<Option<PathBuf>> {
    let supervisors = Supervisors::look();
    let find = move |mount| socket_of(&mount, &supervisors);
    at_once::each(PATIENCE, mounts, find).into_iter().map(Option::flatten).collect()
}

/// Where the process listens that serves this mount; none if it cannot be found.
pub fn socket_of(mount: &MountEntry, supervisors: &Supervisors) -> Option<PathBuf> {
    let places = supervisors.whereabouts_of(mount).into_iter();
    let mut sockets = places.map(|place| place.dir.join(MOUNTS).join(file_name(&place.name)));
    sockets.find(|socket| belongs_to(socket, mount.user))
}

/// Whether it is a socket of this user, and no file of another user.
fn belongs_to(socket: &Path, user: u32) -> bool {
    let meta = std::fs::symlink_metadata(socket);
    meta.is_ok_and(|meta| meta.file_type().is_socket() && meta.uid() == user)
}

/// A process that does not answer within this time is stuck.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest answer that is read, bytes.
const REPLY_MAX_BYTES: usize = 64 << 20;
const CHUNK_BYTES: usize = 64 << 10;

/// Asks the process behind `socket`. Errors: nobody is there, or the answer makes no sense.
pub fn ask(socket: &Path, question: &str) -> io::Result<Value> {
    ask_within(PATIENCE, socket, question)
}

fn ask_within(patience: Duration, socket: &Path, question: &str) -> io::Result<Value> {
    let begin = Instant::now();
    let stream = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    stream.set_write_timeout(Some(patience))?; // connecting, too, where nobody accepts
    stream.connect(&SockAddr::unix(socket)?)?;
    let mut stream = UnixStream::from(OwnedFd::from(stream));
    stream.write_all(format!("{question}\n").as_bytes())?;
    let (mut reply, mut chunk) = (Vec::new(), vec![0; CHUNK_BYTES]);
    loop {
        let left = patience.saturating_sub(begin.elapsed());
        if left.is_zero() || reply.len() >= REPLY_MAX_BYTES {
            return Err(io::ErrorKind::WouldBlock.into()); // it never ends
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut chunk)? {
            0 => break,
            count => reply.extend_from_slice(&chunk[..count]),
        }
    }
    serde_json::from_slice(&reply).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Asks all of them at the same time: one that is stuck takes nobody else's.
pub fn ask_all(sockets: Vec<PathBuf>, question: &str) -> Vec<(PathBuf, io::Result<Value>)> {
    ask_all_within(PATIENCE, sockets, question)
}

fn ask_all_within(
    patience: Duration,
    sockets: Vec<PathBuf>,
    question: &str,
) -> Vec<(PathBuf, io::Result<Value>)> {
    let question = question.to_owned();
    let ask = move |socket: PathBuf| ask_within(patience, &socket, &question);
    // The sockets of other users may lie in file systems of theirs, which do not answer, either.
    let answers = at_once::each(2 * patience, sockets.clone(), ask);
    let stuck = || Err(io::ErrorKind::WouldBlock.into());
    let answers = answers.into_iter().map(|answer| answer.unwrap_or_else(stuck));
    sockets.into_iter().zip(answers).collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::time::Instant;

    /// Each of them made a caller that asked for another socket wait its full time.
    #[test]
    fn those_that_are_stuck_are_waited_for_at_the_same_time() {
        let dir = tempfile::tempdir().unwrap();
        let socket = |number: usize| dir.path().join(format!("{number}.sock"));
        let stuck: Vec<_> = (0..30).map(|number| UnixListener::bind(socket(number))).collect();
        let live = UnixListener::bind(socket(30)).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = live.accept().unwrap();
            stream.read_exact(&mut [0; "status\n".len()]).unwrap();
            stream.write_all(b"7").unwrap();
        });
        let begin = Instant::now();
        let patience = Duration::from_secs(5);
        let answers = ask_all_within(patience, (0..31).map(socket).collect(), "status");
        assert!(begin.elapsed() < 15 * patience, "one after the other");
        assert!(answers[..30].iter().all(|(_, answer)| answer.is_err()), "{answers:?}");
        assert_eq!(answers[30].1.as_ref().unwrap(), 7);
        server.join().unwrap();
        drop(stuck);
    }

    /// The programs that asked before have left, but their connections wait to be accepted.
    #[test]
    fn a_process_that_accepts_nobody_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let stopped = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        stopped.bind(&SockAddr::unix(&path).unwrap()).unwrap();
        stopped.listen(0).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let ask = |_| ask_within(Duration::from_millis(50), &path, "status").is_err();
            let _ = sender.send((0..5).all(ask));
        });
        assert_eq!(receiver.recv_timeout(Duration::from_secs(30)), Ok(true));
    }
}
