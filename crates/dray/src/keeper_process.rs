//! The process that holds descriptors of deleted files: `dray keep-files STATE`, started
//! by `dray serve` and never by people.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket, Type};

use crate::error::{Doing, Failure};
use crate::keeper::{
    HELD_MAX, Key, OP_END, OP_HELD, OP_HOLD, OP_RELEASE, message, message_key, receive, send,
    socket_path,
};

/// How long it waits for a new server while it holds something, and while it does not.
const WAIT_HOLDING: Duration = Duration::from_secs(300);
const WAIT_EMPTY: Duration = Duration::from_secs(3);

/// Holds what servers give it, until none has come for a while.
pub fn run(state: &Path) -> Result<(), Failure> {
    // SAFETY: no memory is passed. It fails only if we lead a session already.
    unsafe { libc::setsid() };
    let path = socket_path(state);
    let doing = || format!("cannot listen on {}", path.display());
    // The server has the state directory's lock, so nobody listens here: at most the
    // socket of a keeper that was killed is left.
    let _ = std::fs::remove_file(&path);
    let listener = Socket::new(Domain::UNIX, Type::SEQPACKET, None).doing(doing)?;
    listener.bind(&SockAddr::unix(&path).doing(doing)?).doing(doing)?;
    listener.listen(1).doing(doing)?;
    let mut held = HashMap::new();
    while let Some(server) = next_server(&listener, held.is_empty()) {
        // The server's end, however it comes about, is no reason to let go.
        let _ = serve(&server, &mut held);
    }
    let _ = std::fs::remove_file(&path); // nothing is lost if it stays
    Ok(())
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
            1 => return listener.accept().ok().map(|(socket, _)| socket),
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            _ => return None,
        }
    }
}

fn serve(server: &Socket, held: &mut HashMap<Key, OwnedFd>) -> io::Result<()> {
    for key in held.keys() {
        send(server, &message(OP_HELD, key), None)?;
    }
    send(server, &message(OP_END, &[0; 32]), None)?;
    loop {
        let (said, fd) = receive(server)?;
        let key = message_key(&said);
        match (said[0], fd) {
            (OP_HOLD, Some(fd)) if held.len() < HELD_MAX => {
                held.insert(key, fd);
            }
            (OP_RELEASE, _) => {
                held.remove(&key);
            }
            _ => {}
        }
    }
}
