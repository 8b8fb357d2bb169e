//! Answers one request for each connection on a listening socket. The control socket and the metrics
//! endpoint share it.

use std::collections::VecDeque;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::Poll;
use std::time::Duration;

use dray_core::{Cancel, Fut};
use dray_rt::sync::Semaphore;
use dray_rt::{Interest, Source};

/// Longest request, bytes.
const REQUEST_MAX_BYTES: usize = 4096;
/// Requests answered at a time. One more closes a connection that has sent no request so far,
/// else one that does not read its answer.
const CONNECTIONS_MAX: usize = 16;
/// A connection that takes longer to send its request or to read its answer is closed.
const PATIENCE: Duration = Duration::from_secs(10);

/// Makes the answer to a request.
pub type Responder = Arc<dyn Fn(String) -> Fut<'static, Vec<u8>> + Send + Sync>;

/// The progress of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Asking,
    /// Whatever takes time now is none of their doing.
    Answering,
    Listening,
}

/// One connection to the endpoint, which asks something.
struct Inquiry {
    stage: Mutex<Stage>,
    /// Set: another connection needs the place.
    leaves: Cancel,
}

impl Inquiry {
    fn stage(&self) -> Stage {
        *self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn comes_to(&self, stage: Stage) {
        *self.stage.lock().unwrap_or_else(PoisonError::into_inner) = stage;
    }
}

/// The inquiries that are served, the longest first.
#[derive(Default)]
struct Inquiries(VecDeque<Weak<Inquiry>>);

impl Inquiries {
    fn enter(&mut self) -> Arc<Inquiry> {
        self.0.retain(|inquiry| inquiry.strong_count() > 0);
        let inquiry =
            Arc::new(Inquiry { stage: Mutex::new(Stage::Asking), leaves: Cancel::default() });
        self.0.push_back(Arc::downgrade(&inquiry));
        inquiry
    }

    /// Closes one connection, if there is one that may be closed.
    fn make_way(&mut self) {
        let leaves = |stage: Stage| {
            let mut here = self.0.iter().filter_map(Weak::upgrade);
            here.find(|inquiry| inquiry.stage() == stage && !inquiry.leaves.is_set())
        };
        if let Some(inquiry) = leaves(Stage::Asking).or_else(|| leaves(Stage::Listening)) {
            inquiry.leaves.set();
        }
    }
}

/// Answers what arrives on `listener`; a request ends with `end`. Runs until the listener
/// breaks.
pub async fn serve(listener: OwnedFd, end: &'static str, answer: Responder) -> io::Result<()> {
    let source = Source::new(listener)?;
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut inquiries = Inquiries::default();
    loop {
        let socket = match source.io(Interest::Read, |_| accept(&source)).await {
            Ok(socket) => socket,
            Err(error) => {
                log::warn!("cannot accept a request for status: {error}");
                dray_rt::sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        if places.available_permits() == 0 {
            inquiries.make_way();
        }
        let Ok(place) = places.clone().acquire_owned().await else { return Ok(()) };
        let (answer, inquiry) = (answer.clone(), inquiries.enter());
        dray_rt::spawn(async move {
            answer_inquiry(&inquiry, socket, end, answer).await;
            drop(place);
        });
    }
}

/// Until the connection has its answer, takes too long, or gives its place to another one.
async fn answer_inquiry(inquiry: &Inquiry, socket: OwnedFd, end: &str, answer: Responder) {
    let exchange = dray_rt::timeout(PATIENCE, exchange(inquiry, socket, end, answer));
    let mut exchange = std::pin::pin!(exchange);
    let ended = std::future::poll_fn(|task| {
        if inquiry.leaves.poll_set(task) && inquiry.stage() != Stage::Answering {
            return Poll::Ready(None);
        }
        exchange.as_mut().poll(task).map(Some)
    });
    if let Some(Ok(Err(error))) = ended.await {
        log::debug!("a request for status failed: {error}");
    }
}

async fn exchange(
    inquiry: &Inquiry,
    socket: OwnedFd,
    end: &str,
    answer: Responder,
) -> io::Result<()> {
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
    inquiry.comes_to(Stage::Answering);
    let reply = answer(String::from_utf8_lossy(&request).into_owned()).await;
    inquiry.comes_to(Stage::Listening);
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
/// died is replaced. Errors: `EADDRINUSE` if another process listens there.
pub fn listen_unix(path: &Path) -> io::Result<OwnedFd> {
    if dray_fabric::somebody_listens(path)? {
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
    use std::os::unix::net::UnixStream;

    use socket2::{Domain, SockAddr, Socket, Type};

    /// A new server waited for ever for the one that listened to accept its connection.
    #[test]
    fn who_listens_and_accepts_nobody_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let busy = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        busy.bind(&SockAddr::unix(&path).unwrap()).unwrap();
        busy.listen(0).unwrap();
        let _waiting: Vec<UnixStream> = std::iter::from_fn(|| {
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            let connected = socket.connect(&SockAddr::unix(&path).unwrap());
            connected.ok().map(|()| UnixStream::from(OwnedFd::from(socket)))
        })
        .collect();
        let error = listen_unix(&path).err().unwrap();
        assert_eq!(error.raw_os_error(), Some(libc::EADDRINUSE));
    }

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
            let answer: Responder = Arc::new(|request| {
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

    /// Sixteen that said nothing kept everybody else out for ten seconds, and the next sixteen for
    /// ten more.
    // proves: P125
    #[test]
    fn who_says_nothing_and_who_does_not_read_make_way() {
        const LONG_BYTES: usize = 8 << 20;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = listen_unix(&path).unwrap();
        let asker = std::thread::spawn(move || {
            let begin = std::time::Instant::now();
            let crowd: Vec<UnixStream> = (0..10 * CONNECTIONS_MAX)
                .map(|number| {
                    let mut socket = UnixStream::connect(&path).unwrap();
                    if number % 2 == 0 {
                        let _ = socket.write_all(b"long\n");
                    }
                    socket
                })
                .collect();
            let mut socket = UnixStream::connect(&path).unwrap();
            socket.write_all(b"hello\n").unwrap();
            let mut reply = String::new();
            socket.read_to_string(&mut reply).unwrap();
            let took = begin.elapsed();
            drop(crowd);
            (reply, took)
        });
        let mut executor = dray_rt::Executor::new(dray_rt::DriverKind::Epoll).unwrap();
        let (reply, took) = executor.block_on(async {
            let answer: Responder = Arc::new(|request| {
                Box::pin(async move {
                    match request.as_str() {
                        "long\n" => vec![b'x'; LONG_BYTES],
                        _ => b"yes".to_vec(),
                    }
                })
            });
            dray_rt::spawn(async move { serve(listener, "\n", answer).await.unwrap() });
            while !asker.is_finished() {
                dray_rt::sleep(Duration::from_millis(5)).await;
            }
            asker.join().unwrap()
        });
        assert_eq!(reply, "yes");
        assert!(took < 5 * PATIENCE, "{took:?}");
    }
}
