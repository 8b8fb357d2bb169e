//! Connecting to a server.

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use dray_core::Fut;
use dray_rt::{Interest, Pool, Source, timeout};
use socket2::{Domain, SockAddr, Socket, Type};

use super::file::unix_name;
use super::options::prepare;
use super::reserved_port::begin_from_reserved;
use super::stream::StreamConnection;
use crate::{Address, Connect, ConnectFrom, Connection, Peer};

/// An address of a name that has not answered for this long is no longer the only one that is
/// tried (RFC 8305, section 5: Connection Attempt Delay).
const NEXT_ADDRESS_AFTER: Duration = Duration::from_millis(250);

/// Connects to an address by sockets.
#[derive(Clone, Debug)]
pub struct Sockets(pub Address);

/// As [`Sockets`], from a [`ConnectFrom::ReservedPort`].
#[derive(Clone, Debug)]
pub struct ReservedPort(pub Address);

/// As [`Sockets`], from wherever is wished.
pub(super) struct SocketConnect {
    pub(super) to: Address,
    pub(super) from: ConnectFrom,
}

impl Connect for Sockets {
    fn connect(&self) -> Fut<'_, io::Result<Arc<dyn Connection>>> {
        Box::pin(connect_shared(&self.0, ConnectFrom::Any))
    }

    fn target(&self) -> String {
        self.0.to_string()
    }
}

impl Connect for ReservedPort {
    fn connect(&self) -> Fut<'_, io::Result<Arc<dyn Connection>>> {
        Box::pin(connect_shared(&self.0, ConnectFrom::ReservedPort))
    }

    fn target(&self) -> String {
        self.0.to_string()
    }
}

impl Connect for SocketConnect {
    fn connect(&self) -> Fut<'_, io::Result<Arc<dyn Connection>>> {
        Box::pin(connect_shared(&self.to, self.from))
    }

    fn target(&self) -> String {
        self.to.to_string()
    }
}

async fn connect_shared(to: &Address, from: ConnectFrom) -> io::Result<Arc<dyn Connection>> {
    Ok(Arc::new(connect_from(to, from).await?))
}

/// Connects to `address`, on this thread's executor. Of a name's addresses it connects to the one
/// that answers first, if those in front of it do not answer soon. Errors: those of the name's
/// resolution and of connect(2); the last one if a name has several addresses.
pub(super) async fn connect_from(
    address: &Address,
    from: ConnectFrom,
) -> io::Result<StreamConnection> {
    match address {
        Address::Unix(path) => {
            let name = unix_name(path)?;
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
            prepare(&socket, Peer::Local)?;
            connected(begin(socket, &name)?, Peer::Local).await
        }
        Address::Tcp { .. } => connect_to_any(resolve(address).await?, from).await,
    }
}

type Try = Fut<'static, io::Result<StreamConnection>>;

/// Tries each of `addresses`, in their order: the next one when all before have failed, or have
/// not answered for a while. Those go on meanwhile.
async fn connect_to_any(
    addresses: Vec<SocketAddr>,
    from: ConnectFrom,
) -> io::Result<StreamConnection> {
    let mut last = no_address();
    let mut tries: Vec<Try> = Vec::new();
    let mut addresses = addresses.into_iter();
    loop {
        match addresses.next() {
            Some(address) => tries.push(Box::pin(connect_tcp(address, from))),
            None if tries.is_empty() => return Err(last),
            None => {}
        }
        let ended = match addresses.len() {
            0 => Ok(first_to_end(&mut tries).await),
            _ => timeout(NEXT_ADDRESS_AFTER, first_to_end(&mut tries)).await,
        };
        match ended {
            Ok(Ok(connection)) => return Ok(connection),
            Ok(Err(error)) => last = error,
            Err(_) => {} // the next address is tried beside them
        }
    }
}

/// Takes the try that ends first out of `tries`, of which there is at least one.
async fn first_to_end(tries: &mut Vec<Try>) -> io::Result<StreamConnection> {
    poll_fn(|cx| {
        for index in 0..tries.len() {
            if let Poll::Ready(result) = tries[index].as_mut().poll(cx) {
                drop(tries.remove(index));
                return Poll::Ready(result);
            }
        }
        Poll::Pending
    })
    .await
}

async fn connect_tcp(to: SocketAddr, from: ConnectFrom) -> io::Result<StreamConnection> {
    let peer = Peer::Ip(to);
    let (reserved, bound_to) = match from {
        ConnectFrom::ReservedPort => (begin_from_reserved(to)?, None),
        ConnectFrom::Address(ip) => (None, Some(SocketAddr::new(ip, 0))),
        ConnectFrom::Any => (None, None),
    };
    let begun = match reserved {
        Some(begun) => begun,
        // The server says whether that will do.
        None => {
            let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
            prepare(&socket, peer)?;
            if let Some(address) = bound_to {
                socket.bind(&address.into())?;
            }
            begin(socket, &to.into())?
        }
    };
    connected(begun, peer).await
}

/// A socket that connects, or has connected.
pub(crate) struct ConnectAttempt {
    socket: Socket,
    is_over: bool,
}

/// Begins to connect a socket. Errors: those of connect(2).
pub(crate) fn begin(socket: Socket, name: &SockAddr) -> io::Result<ConnectAttempt> {
    match socket.connect(name) {
        Ok(()) => Ok(ConnectAttempt { socket, is_over: true }),
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {
            Ok(ConnectAttempt { socket, is_over: false })
        }
        Err(error) => Err(error),
    }
}

async fn connected(begun: ConnectAttempt, peer: Peer) -> io::Result<StreamConnection> {
    let ConnectAttempt { socket, is_over } = begun;
    if is_over {
        return StreamConnection::new(socket.into(), peer);
    }
    // Nothing but the end of the handshake makes the socket writable.
    let source = Source::new(socket.try_clone()?.into())?;
    source
        .io(Interest::Write, |_| match (socket.take_error()?, socket.peer_addr()) {
            (Some(error), _) => Err(error),
            (None, Ok(_)) => Ok(()),
            (None, Err(_)) => Err(io::ErrorKind::WouldBlock.into()),
        })
        .await?;
    drop(source);
    StreamConnection::new(socket.into(), peer)
}

/// The addresses of a name. Errors: those of getaddrinfo(3).
pub(crate) async fn resolve(address: &Address) -> io::Result<Vec<SocketAddr>> {
    let Address::Tcp { host, port } = address else { return Err(no_address()) };
    if let Ok(ip) = host.parse() {
        return Ok(vec![SocketAddr::new(ip, *port)]);
    }
    let (host, port) = (host.clone(), *port);
    // getaddrinfo(3) blocks, and this happens once a connection.
    let pool = Pool::new("dray-resolve", 1, 1);
    pool.run(move || (host.as_str(), port).to_socket_addrs().map(Iterator::collect))
        .await
        .map_err(io::Error::other)?
}

/// A name has no address, or this machine has none of them.
pub(crate) fn no_address() -> io::Error {
    io::Error::from_raw_os_error(libc::EADDRNOTAVAIL)
}

#[cfg(test)]
mod tests {
    use dray_rt::{DriverKind, Executor};

    use super::*;
    use crate::sockets::options::UNACKNOWLEDGED_MAX;

    /// The silent address was given all the time that a client takes for a connection, each time
    /// anew. The other addresses were never tried.
    #[test]
    fn an_address_that_does_not_answer_keeps_nobody_from_the_next() {
        let silent = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        silent.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        silent.listen(0).unwrap();
        let silent_at = silent.local_addr().unwrap().as_socket().unwrap();
        // As many as wait to be accepted may: what comes then is not answered.
        let knock = || std::net::TcpStream::connect_timeout(&silent_at, Duration::from_secs(1));
        let crowd: Vec<_> = std::iter::from_fn(|| knock().ok()).take(16).collect();
        let live = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let live_at = live.local_addr().unwrap();
        // This socket does not listen, keeps the port from others, and lets nobody connect.
        let refusing = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        refusing.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let refused_at = refusing.local_addr().unwrap().as_socket().unwrap();
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let limit = UNACKNOWLEDGED_MAX * 2 / 3; // by then the kernel has not given up
            for addresses in [vec![silent_at, live_at], vec![refused_at, silent_at, live_at]] {
                let connected = timeout(limit, connect_to_any(addresses, ConnectFrom::Any)).await;
                let peer = connected.expect("the first one is waited for").unwrap().peer();
                assert_eq!(peer, Peer::Ip(live_at));
            }
            let refused =
                connect_to_any(vec![refused_at; 2], ConnectFrom::Any).await.err().unwrap();
            assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
            let none = connect_to_any(Vec::new(), ConnectFrom::Any).await.err().unwrap();
            assert_eq!(none.kind(), io::ErrorKind::AddrNotAvailable);
        });
        drop((crowd, silent, refusing));
    }
}
