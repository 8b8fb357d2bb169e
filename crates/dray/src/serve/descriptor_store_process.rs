//! The process of the descriptor store: `dray keep-files STATE`. `dray serve` starts it, users never do.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use crate::error::{ErrorContext, Failure};
use crate::flock::lock_within;
use crate::serve::descriptor_store::{
    OP_END, OP_HELD, OP_HOLD, OP_RELEASE, StoreKey, held_max, message, message_key, receive, send,
    socket_address, socket_path,
};
use crate::{paths, signals};

/// How long it waits for a new server while it holds something, and while it does not.
const WAIT_HOLDING: Duration = Duration::from_secs(300);
const WAIT_EMPTY: Duration = Duration::from_secs(3);
/// How long it waits for the store process before it to end. One that has a server does not.
const FORMER_STORE_MAX: Duration = Duration::from_secs(5);
/// After a server could not be heard, as where the system has no descriptor left.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Holds what servers give it, until none has come for a while.
pub fn run(state: &Path) -> Result<(), Failure> {
    // SAFETY: no memory is passed. It fails only if we lead a session already.
    unsafe { libc::setsid() };
    signals::name_process(c"dray-keeper");
    signals::let_go(); // a machine that goes down asks everybody to end
    let path = socket_path(state);
    let doing = || format!("cannot listen on {}", path.display());
    // A server that was killed as it started may have left one that starts, too. Of both one has
    // the socket, or the files of the other are where the next server does not find them.
    let Some(_sole) = sole_store(state).doing(doing)? else { return Ok(()) };
    // Nobody listens here: at most the socket of a store process that was killed is left.
    let _ = std::fs::remove_file(&path);
    let listener = Socket::new(Domain::UNIX, Type::SEQPACKET, None).doing(doing)?;
    let (address, _dir) = socket_address(state).doing(doing)?;
    listener.bind(&address).doing(doing)?;
    let inode = || std::fs::symlink_metadata(&path).map(|meta| meta.ino());
    let ours = inode().doing(doing)?;
    listener.listen(1).doing(doing)?;
    let mut held =
        StoredFiles { max: held_max(paths::raise_file_limit()), ..StoredFiles::default() };
    while let Some(server) = next_server(&listener, held.files.is_empty()) {
        // The server's end, however it comes about, is no reason to let go.
        let _ = serve(&server, &mut held);
    }
    // In a directory that was put in the place of ours there may be that of another store process.
    if inode().is_ok_and(|inode| inode == ours) {
        let _ = std::fs::remove_file(&path); // nothing is lost if it stays
    }
    Ok(())
}

/// What one store process of a state directory has at a time, until it is dropped; none if another one
/// does not give it up. Errors: those of open(2) and flock(2).
fn sole_store(state: &Path) -> io::Result<Option<File>> {
    let dir = File::open(state)?;
    Ok(lock_within(&dir, FORMER_STORE_MAX)?.then_some(dir))
}

/// The next server, if one comes in time.
fn next_server(listener: &Socket, empty: bool) -> Option<Socket> {
    let deadline = Instant::now() + if empty { WAIT_EMPTY } else { WAIT_HOLDING };
    loop {
        let left_ms = deadline.saturating_duration_since(Instant::now()).as_millis() as i32;
        let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, which outlives the call.
        match unsafe { libc::poll(&mut poll, 1, left_ms) } {
            0 => return None,
            1 => match listener.accept() {
                Ok((socket, _)) => return Some(socket),
                Err(_) => std::thread::sleep(ACCEPT_AGAIN), // not for longer than the deadline
            },
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            _ => return None,
        }
    }
}

/// What is held, and who lets it go.
#[derive(Default)]
struct StoredFiles {
    /// Files at most.
    max: usize,
    files: HashMap<StoreKey, OwnedFd>,
    /// A thread for each file system: closing the last descriptor of a deleted file frees
    /// its space, and waits where the file system hangs.
    closers: HashMap<[u8; 16], Sender<OwnedFd>>,
}

impl StoredFiles {
    fn hold(&mut self, key: StoreKey, fd: OwnedFd) {
        if let Some(old) = self.files.insert(key, fd) {
            self.close(&key, old);
        }
    }

    fn release(&mut self, key: &StoreKey) {
        if let Some(fd) = self.files.remove(key) {
            self.close(key, fd);
        }
    }

    fn close(&mut self, key: &StoreKey, fd: OwnedFd) {
        let closer = match self.closers.entry(std::array::from_fn(|index| key[index])) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                let (sender, receiver) = channel();
                let closer = move || receiver.into_iter().for_each(drop::<OwnedFd>);
                let started = std::thread::Builder::new().name("dray-close".into()).spawn(closer);
                if started.is_err() {
                    return; // and close it here
                }
                new.insert(sender)
            }
        };
        let _ = closer.send(fd); // a thread that ended would leave it to us to close
    }
}

fn serve(server: &Socket, held: &mut StoredFiles) -> io::Result<()> {
    for key in held.files.keys() {
        send(server, &message(OP_HELD, key), None)?;
    }
    send(server, &message(OP_END, &[0; 32]), None)?;
    loop {
        let (said, fd) = receive(server)?;
        let key = message_key(&said);
        match (said[0], fd) {
            (OP_HOLD, Some(fd)) if held.files.len() < held.max => held.hold(key, fd),
            (OP_RELEASE, _) => held.release(&key),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    /// How long closing a socket with unread data is made to take.
    const LINGER: Duration = Duration::from_secs(60);

    /// Something that is not closed at once, as a file on a file system that hangs; and the
    /// other end, which must stay.
    fn stubborn() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        near.set_nonblocking(true).unwrap();
        while near.write(&[0; 1 << 16]).is_ok() {}
        assert_eq!(near.write(&[0]).unwrap_err().kind(), ErrorKind::WouldBlock);
        socket2::SockRef::from(&near).set_linger(Some(LINGER)).unwrap();
        near.set_nonblocking(false).unwrap();
        (near.into(), far)
    }

    // proves: P109
    #[test]
    fn a_file_that_cannot_be_let_go_holds_up_no_other_file_system() {
        let (hung, well) = ([1; 32], [2; 32]);
        let (stubborn, _far) = stubborn();
        let (file, mut witness) = UnixStream::pair().unwrap();
        let mut held = StoredFiles::default();
        held.hold(hung, stubborn);
        held.hold(well, file.into());
        let begin = Instant::now();
        held.release(&hung);
        held.release(&well);
        assert_eq!(witness.read(&mut [0]).unwrap(), 0, "it has been closed");
        assert!(begin.elapsed() < LINGER / 2, "{:?}", begin.elapsed());
        assert!(held.files.is_empty());
    }
}
