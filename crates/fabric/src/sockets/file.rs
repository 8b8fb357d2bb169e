//! The file of a Unix socket: one server has it at a time, whatever other server starts at the same moment or
//! ends late.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use dray_rt::sleep;
use socket2::{Domain, SockAddr, Socket, Type};

/// A holder of the lock needs it for a moment. Somebody else's lock of the directory, which is none
/// of ours, is not waited for any longer.
const LOCK_TRIES: u32 = 500;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// The name of a socket. Errors: `ENAMETOOLONG` (unix(7): 107 bytes).
pub(crate) fn unix_name(path: &Path) -> io::Result<SockAddr> {
    // The only thing that can be wrong: there is room for so many bytes.
    SockAddr::unix(path).map_err(|_| io::Error::from_raw_os_error(libc::ENAMETOOLONG))
}

/// Sockets of a directory are looked at and made by one server after the other. Of two that find
/// the one that a third has left, the second would remove that of the first. None where there are
/// no such locks. Errors: those of open(2), or somebody else keeps the directory locked.
pub(crate) async fn lock_directory(path: &Path) -> io::Result<Option<File>> {
    let Some(dir) = directory(path)? else { return Ok(None) };
    for _ in 0..LOCK_TRIES {
        match lock(&dir) {
            Ok(()) => return Ok(Some(dir)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(LOCK_PAUSE).await,
            Err(_) => return Ok(None), // some network file systems have none
        }
    }
    Err(io::Error::new(io::ErrorKind::ResourceBusy, "somebody keeps its directory locked (flock)"))
}

fn directory(path: &Path) -> io::Result<Option<File>> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    match File::open(dir.unwrap_or(Path::new("."))) {
        Ok(dir) => Ok(Some(dir)),
        // Sockets can be made in a directory that cannot be read.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        Err(error) => Err(error),
    }
}

fn lock(dir: &File) -> io::Result<()> {
    // SAFETY: no memory is passed; the descriptor is open.
    match unsafe { libc::flock(dir.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A socket of this name, in place of one that was left over; to be called in one's [`lock_directory`].
/// Errors: `EADDRINUSE`, somebody listens there; `EEXIST`, it is no socket; those of bind(2).
pub(crate) fn bind_unix(path: &Path, name: &SockAddr) -> io::Result<Socket> {
    if somebody_listens(path)? {
        return Err(io::Error::from_raw_os_error(libc::EADDRINUSE));
    }
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => std::fs::remove_file(path)?,
        Ok(_) => return Err(io::Error::from_raw_os_error(libc::EEXIST)),
        Err(_) => {} // bind(2) says what is wrong with the path
    }
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // A peer that connects speaks for every user: the umask that we were started with does not decide.
    // What a socket has before it is bound its file has from its first moment on.
    // SAFETY: no memory is passed; the descriptor is open.
    if unsafe { libc::fchmod(socket.as_raw_fd(), 0o600) } != 0 {
        return Err(io::Error::last_os_error());
    }
    socket.bind(name).map(|()| socket)
}

/// Whether somebody listens on a Unix socket, also one who has not accepted for long, and whom a
/// connection would wait for. Errors: `ENAMETOOLONG`, and those of socket(2).
pub fn somebody_listens(path: &Path) -> io::Result<bool> {
    let name = unix_name(path)?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    // EAGAIN: as many wait to be accepted as may (unix(7)).
    let full = |error: io::Error| error.kind() == io::ErrorKind::WouldBlock;
    Ok(socket.connect(&name).map_or_else(full, |()| true))
}

/// A socket's file: removed in the end, unless the name is somebody else's by then. To be dropped
/// before the socket, whose number is nobody else's as long as it is open.
pub(crate) struct SocketFile {
    path: PathBuf,
    /// Device and number.
    inode: (u64, u64),
}

impl SocketFile {
    /// What was just made at `path`.
    pub(crate) fn made(path: &Path) -> io::Result<SocketFile> {
        let meta = std::fs::symlink_metadata(path)?;
        Ok(SocketFile { path: path.to_owned(), inode: (meta.dev(), meta.ino()) })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Where another process has the lock it stays, as after a kill.
        let Ok(dir) = directory(&self.path) else { return };
        if dir.as_ref().is_some_and(|dir| lock(dir).is_err()) {
            return;
        }
        let ours = |meta: std::fs::Metadata| (meta.dev(), meta.ino()) == self.inode;
        if std::fs::symlink_metadata(&self.path).is_ok_and(ours) {
            let _ = std::fs::remove_file(&self.path); // somebody may have tidied up before us
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Address, listen_first};
    use dray_rt::{DriverKind, Executor};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::{Arc, Barrier};

    fn directory() -> PathBuf {
        let dir = std::env::temp_dir().join(format!("dray-socket-{:x}", dray_rt::random_u64()));
        std::fs::create_dir(&dir).unwrap();
        dir
    }

    /// Each found that nobody listened, and removed what the one before had just made: all but the
    /// last listened where nobody came.
    // proves: P92
    #[test]
    fn of_servers_that_start_at_once_one_has_the_socket() {
        const SERVERS: usize = 8;
        let dir = directory();
        for round in 0..20 {
            let path = dir.join(round.to_string());
            drop(UnixListener::bind(&path).unwrap()); // left over
            let (begin, done) = (Arc::new(Barrier::new(SERVERS)), Arc::new(Barrier::new(SERVERS)));
            let start = |_| {
                let (path, begin, done) = (path.clone(), begin.clone(), done.clone());
                std::thread::spawn(move || {
                    let mut executor = Executor::new(DriverKind::Epoll).unwrap();
                    begin.wait();
                    let bound = executor.block_on(listen_first(&Address::Unix(path.clone())));
                    done.wait();
                    let reached = UnixStream::connect(&path).is_ok();
                    done.wait();
                    assert!(reached, "nobody listens");
                    bound.err().map(|error| error.kind())
                })
            };
            let servers: Vec<_> = (0..SERVERS).map(start).collect();
            let errors = servers.into_iter().filter_map(|server| server.join().unwrap());
            let errors: Vec<_> = errors.collect();
            assert_eq!(errors, [io::ErrorKind::AddrInUse; SERVERS - 1], "round {round}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// Under a umask of 0 every user of the machine could connect, and act as any other.
    // proves: P92
    #[test]
    fn a_socket_is_for_its_owner_alone() {
        use std::os::unix::fs::MetadataExt;
        let dir = directory();
        let address = Address::Unix(dir.join("socket"));
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let _listener = listen_first(&address).await.unwrap();
            let mode = std::fs::metadata(dir.join("socket")).unwrap().mode();
            assert_eq!(mode & 0o777, 0o600);
        });
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// A server that ended took away the socket of the server that had come after it.
    // proves: P92
    #[test]
    fn a_server_that_ends_leaves_the_socket_of_another() {
        let dir = directory();
        let path = dir.join("socket");
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let address = Address::Unix(path.clone());
            let first = listen_first(&address).await.unwrap();
            std::fs::remove_file(&path).unwrap();
            let second = listen_first(&address).await.unwrap();
            drop(first);
            UnixStream::connect(&path).unwrap();
            drop(second);
            assert!(!path.exists());
        });
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
