//! Answers one request a connection on a listening socket: the control socket's and the
//! metrics endpoint's common part.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dray_core::Fut;
use dray_rt::sync::Semaphore;
use dray_rt::{Interest, Source};

/// Longest request, bytes.
const REQUEST_MAX_BYTES: usize = 4096;
/// Requests answered at a time; further ones wait.
const CONNECTIONS_MAX: usize = 16;
/// Who takes longer to ask or to listen is cut off.
const PATIENCE: Duration = Duration::from_secs(10);

/// Makes the answer to a request.
pub type Answer = Arc<dyn Fn(String) -> Fut<'static, Vec<u8>> + Send + Sync>;

/// Answers what arrives on `listener`; a request ends with `end`. Runs until the listener
/// breaks.
pub async fn serve(listener: OwnedFd, end: &'static str, answer: Answer) -> io::Result<()> {
    let source = Source::new(listener)?;
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return Ok(()) };
        let socket = match source.io(Interest::Read, |_| accept(&source)).await {
            Ok(socket) => socket,
            Err(error) => {
                log::warn!("cannot accept a request for status: {error}");
                dray_rt::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let answer = answer.clone();
        dray_rt::spawn(async move {
            let exchange = dray_rt::timeout(PATIENCE, exchange(socket, end, answer)).await;
            if let Ok(Err(error)) = exchange {
                log::debug!("a request for status came to nothing: {error}");
            }
            drop(place);
        });
    }
}

async fn exchange(socket: OwnedFd, end: &str, answer: Answer) -> io::Result<()> {
    let source = Source::new(socket)?;
    let mut request = Vec::new();
    while !contains(&request, end.as_bytes()) {
        if request.len() >= REQUEST_MAX_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut chunk = [0u8; 1024];
        let count = source.io(Interest::Read, |fd| receive(fd, &mut chunk)).await?;
        if count == 0 {
            break;
        }
        request.extend_from_slice(&chunk[..count]);
    }
    if request.is_empty() {
        return Ok(()); // somebody wanted to know whether we are here
    }
    let reply = answer(String::from_utf8_lossy(&request).into_owned()).await;
    let mut rest = &reply[..];
    while !rest.is_empty() {
        let count = source.io(Interest::Write, |fd| send(fd, rest)).await?;
        rest = &rest[count..];
    }
    Ok(())
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

fn accept(listener: &Source) -> io::Result<OwnedFd> {
    use std::os::fd::FromRawFd;
    let (fd, flags) = (listener.as_fd().as_raw_fd(), libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
    // SAFETY: no address is asked for, so no memory is passed.
    match unsafe { libc::accept4(fd, std::ptr::null_mut(), std::ptr::null_mut(), flags) } {
        // SAFETY: just made, owned by nobody else.
        socket @ 0.. => Ok(unsafe { OwnedFd::from_raw_fd(socket) }),
        _ => Err(io::Error::last_os_error()),
    }
}

fn receive(fd: i32, into: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the kernel writes at most into.len() bytes to it.
    let count = unsafe { libc::recv(fd, into.as_mut_ptr().cast(), into.len(), 0) };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

fn send(fd: i32, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: the kernel reads at most bytes.len() bytes from it.
    let count = unsafe { libc::send(fd, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Listens on a Unix socket that only its owner may use. One left over by a process that
/// died is replaced. Errors: `EADDRINUSE` if somebody answers there.
pub fn listen_unix(path: &Path) -> io::Result<OwnedFd> {
    if UnixStream::connect(path).is_ok() {
        return Err(io::Error::from_raw_os_error(libc::EADDRINUSE));
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Nobody else gets to the directory, so there is no moment of weakness in between.
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener.into())
}

/// Listens on `ADDR:PORT`; answers where, too, with the port that the system chose if 0 was
/// asked for. Errors: those of bind(2), or no address.
pub fn listen_tcp(address: &str) -> io::Result<(OwnedFd, String)> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    let bound = listener.local_addr()?.to_string();
    Ok((listener.into(), bound))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn requests_are_answered_and_endless_ones_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = listen_unix(&path).unwrap();
        assert!(listen_unix(&path).is_err());
        let asker = std::thread::spawn({
            let path = path.clone();
            move || {
                let ask = |text: &[u8]| {
                    let mut socket = UnixStream::connect(&path).unwrap();
                    let _ = socket.write_all(text); // it may be cut off half way
                    let mut reply = String::new();
                    let _ = socket.read_to_string(&mut reply);
                    reply
                };
                (ask(b"hello\nrest"), ask(&[b'x'; 3 * REQUEST_MAX_BYTES]))
            }
        });
        let mut executor = dray_rt::Executor::new(dray_rt::DriverKind::Epoll).unwrap();
        let replies = executor.block_on(async {
            let answer: Answer = Arc::new(|request| {
                Box::pin(async move { format!("<{}>", request.lines().next().unwrap()).into() })
            });
            dray_rt::spawn(async move { serve(listener, "\n", answer).await.unwrap() });
            while !asker.is_finished() {
                dray_rt::sleep(Duration::from_millis(5)).await;
            }
            asker.join().unwrap()
        });
        assert_eq!(replies, ("<hello>".to_owned(), String::new()));
    }
}
