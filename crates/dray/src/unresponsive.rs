//! Processes that do not answer at their control sockets: which processes, and why they do not answer.

use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use socket2::{Domain, SockAddr, Socket, Type};

use crate::mount::mount_table;

/// Whether the socket is that of a process that died.
pub fn is_dead(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound)
}

/// What is shown of a process that has not answered at `socket`.
pub fn report(socket: &Path, error: &io::Error) -> Value {
    json!({
        "kind": "stuck",
        "socket": socket.display().to_string(),
        "mountpoint": mount_behind(socket).map(|at| at.display().to_string()),
        "pid": pid_behind(socket),
        "error": reason(error),
    })
}

/// Of whom such a report is: a socket's name says nothing to who has to look at its process.
pub fn whose(report: &Value) -> String {
    let text = |key: &str| report[key].as_str();
    let place = text("mountpoint").or(text("socket")).unwrap_or_default();
    match report["pid"].as_u64() {
        Some(pid) => format!("{place}, pid {pid}"),
        None => place.to_owned(),
    }
}

/// The same as a sentence.
pub fn sentence(socket: &Path, error: &io::Error) -> String {
    format!("no answer from {}: {}", whose(&report(socket, error)), reason(error))
}

fn reason(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::WouldBlock => "it says nothing: stopped, or overloaded".to_owned(),
        _ => error.to_string(),
    }
}

/// Where the mount is whose daemon listens at `socket`, which has the number of the connection in
/// its name.
fn mount_behind(socket: &Path) -> Option<PathBuf> {
    let (_, number) = socket.file_stem()?.to_str()?.split_once('-')?;
    let number: u32 = number.parse().ok()?;
    mount_table::list().into_iter().find(|mount| mount.connection == number).map(|mount| mount.at)
}

/// The process that listens, which the kernel says also of one that is stopped. None where it
/// cannot be reached, or is in another container.
fn pid_behind(socket: &Path) -> Option<i32> {
    let stream = Socket::new(Domain::UNIX, Type::STREAM, None).ok()?;
    stream.set_nonblocking(true).ok()?; // who does not answer may not accept, either
    stream.connect(&SockAddr::unix(socket).ok()?).ok()?;
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes to the struct; both outlive the call.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut bytes,
        )
    };
    (result == 0 && peer.pid > 0).then_some(peer.pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::control;

    #[test]
    fn a_dead_process_is_distinguished_from_a_stuck_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(pid_behind(&path), Some(std::process::id() as i32));
        drop(listener);
        assert_eq!(pid_behind(&path), None);
        assert!(is_dead(&control::ask(&path, "status").unwrap_err()));
        assert!(is_dead(&control::ask(&dir.path().join("none"), "status").unwrap_err()));
        assert!(!is_dead(&ErrorKind::WouldBlock.into()));
    }

    #[test]
    fn a_mount_is_named_and_a_server_by_its_socket() {
        for (report, expected) in [
            (json!({ "mountpoint": "/home", "socket": "/run/x", "pid": 7 }), "/home, pid 7"),
            (json!({ "socket": "/run/x", "mountpoint": null, "pid": 7 }), "/run/x, pid 7"),
            (json!({ "mountpoint": "/home" }), "/home"),
        ] {
            assert_eq!(whose(&report), expected);
        }
    }
}
