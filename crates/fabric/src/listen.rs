//! Making connections.

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::task::Poll;
use std::time::Duration;

use dray_core::Fut;
use dray_rt::{Interest, Pool, Source, timeout};
use socket2::{Domain, SockAddr, SockRef, Socket, TcpKeepalive, Type};

use crate::socket_file::{SocketFile, bind_unix, turn, unix_name};
use crate::stream::StreamConnection;
use crate::{Address, Peer};

/// Connections that may wait to be accepted: as many as the system allows by default
/// (net.core.somaxconn, listen(2)). Where all clients come back at once those beyond are heard a
/// second later.
const BACKLOG: i32 = 4096;
/// A connection that shows no life for 30 + 3 x 10 s is gone. The kernel asks, so an
/// idle client is not woken for it.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(30);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEPALIVE_TRIES: u32 = 3;
/// Data that nobody acknowledges for this long end the connection.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(30);
/// An address of a name that has not answered for this long is no longer the only one that is
/// tried (RFC 8305, section 5: Connection Attempt Delay).
const NEXT_ADDRESS_AFTER: Duration = Duration::from_millis(250);

/// Congestion control on loopback: that which every Linux has built in (tcp(7)).
const LOOPBACK_CONGESTION: &[u8] = b"reno";

/// A port that the system chose for the first of a name's addresses may be taken at another: so
/// often another one is chosen.
const ANY_PORT_TRIES: usize = 16;

/// Accepts connections on one address.
pub struct Listener {
    /// A Unix socket's, removed in the end, and before the socket.
    _file: Option<SocketFile>,
    source: Source,
    address: Address,
}

/// What became of the addresses that a name has.
pub struct Bound {
    /// One for each address that this machine has; there is one at least.
    pub listeners: Vec<Listener>,
    /// Addresses of the name that this machine has not, or has no protocol for.
    pub left_out: Vec<(SocketAddr, io::Error)>,
}

impl Listener {
    /// Listens on `address`, on this thread's executor; on the first one of a name that has
    /// several. Errors: as of [`Listener::bind_all`].
    pub async fn bind(address: &Address) -> io::Result<Listener> {
        Ok(Listener::bind_all(address).await?.listeners.remove(0))
    }

    /// Listens on all addresses that `address` names, on this thread's executor. All addresses of
    /// IPv6 are those of IPv4, too, unless somebody listens at these. Errors: those of socket(7)
    /// of any address that this machine has, and of the last one if it has none.
    ///
    /// A Unix socket left over from a server that died is replaced; one that somebody answers
    /// on is `EADDRINUSE`, a file that is no socket `EEXIST`, a path that is too long
    /// `ENAMETOOLONG` (unix(7): 107 bytes).
    pub async fn bind_all(address: &Address) -> io::Result<Bound> {
        match address {
            Address::Tcp { port, .. } => {
                let tries = if *port == 0 { ANY_PORT_TRIES } else { 1 };
                bind_any(&resolve(address).await?, tries)
            }
            Address::Unix(path) => {
                let name = unix_name(path)?;
                let turn = turn(path).await?;
                let socket = bind_unix(path, &name)?;
                let file = SocketFile::made(path)?;
                let listener = Listener::listen(socket, address.clone(), Some(file))?;
                drop(turn); // whoever looks from now on finds somebody who listens
                Ok(Bound { listeners: vec![listener], left_out: Vec::new() })
            }
        }
    }

    fn bind_one(address: SocketAddr) -> io::Result<Listener> {
        let socket = bind_tcp(address)?;
        calm(&socket, address.ip()); // before a connection begins, it inherits this
        let bound = socket.local_addr()?.as_socket().unwrap_or(address);
        let address = Address::Tcp { host: host_of(bound), port: bound.port() };
        Listener::listen(socket, address, None)
    }

    fn listen(socket: Socket, address: Address, file: Option<SocketFile>) -> io::Result<Listener> {
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        Ok(Listener { _file: file, source: Source::new(socket.into())?, address })
    }

    /// Where it listens; with the port that the system chose if 0 was asked for.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The next connection: a socket, to be made a [`StreamConnection`] on the executor
    /// that shall serve it.
    pub async fn accept(&self) -> io::Result<(OwnedFd, Peer)> {
        let (socket, name) =
            self.source.io(Interest::Read, |_| SockRef::from(&self.source).accept()).await?;
        let peer = name.as_socket().map_or(Peer::Local, Peer::Ip);
        prepare(&socket, peer)?;
        Ok((socket.into(), peer))
    }
}

/// The processor that last handled packets of `socket`, where the kernel tells
/// (`SO_INCOMING_CPU`): serving a connection there spares wake-ups across processors.
pub fn incoming_cpu(socket: &impl AsFd) -> Option<usize> {
    let mut cpu: i32 = -1;
    let mut len = std::mem::size_of::<i32>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `cpu`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_INCOMING_CPU,
            (&raw mut cpu).cast(),
            &mut len,
        )
    };
    if result == 0 { usize::try_from(cpu).ok() } else { None }
}

/// Connects to `address`, on this thread's executor; of a name's addresses to the one that
/// answers first, if those in front of it do not answer soon. Errors: those of the name's
/// resolution and of connect(2); the last one if a name has several addresses.
pub async fn connect(address: &Address) -> io::Result<StreamConnection> {
    match address {
        Address::Unix(path) => {
            let name = unix_name(path)?;
            connect_to(Domain::UNIX, &name, Peer::Local).await
        }
        Address::Tcp { .. } => connect_to_any(resolve(address).await?).await,
    }
}

type Try = Fut<'static, io::Result<StreamConnection>>;

/// Tries each of `addresses`, in their order: the next one when all before have failed, or have
/// not answered for a while. Those go on meanwhile.
async fn connect_to_any(addresses: Vec<SocketAddr>) -> io::Result<StreamConnection> {
    let mut last = no_address();
    let mut tries: Vec<Try> = Vec::new();
    let mut addresses = addresses.into_iter();
    loop {
        match addresses.next() {
            Some(address) => tries.push(Box::pin(async move {
                let domain = Domain::for_address(address);
                connect_to(domain, &address.into(), Peer::Ip(address)).await
            })),
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

/// Listeners on all of `addresses`; where any port is wanted, at one port, for which others are
/// tried as often as `tries` says.
fn bind_any(addresses: &[SocketAddr], tries: usize) -> io::Result<Bound> {
    match bind_each(addresses) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && tries > 1 => {
            bind_any(addresses, tries - 1)
        }
        bound => bound,
    }
}

fn bind_each(addresses: &[SocketAddr]) -> io::Result<Bound> {
    let mut bound = Bound { listeners: Vec::new(), left_out: Vec::new() };
    let mut chosen = None;
    for (index, address) in addresses.iter().enumerate() {
        if addresses[..index].contains(address) {
            continue; // a name can have an address twice
        }
        let mut at = *address;
        at.set_port(chosen.unwrap_or(address.port()));
        match Listener::bind_one(at) {
            Ok(listener) => {
                if let Address::Tcp { port, .. } = listener.address {
                    chosen = Some(port);
                }
                bound.listeners.push(listener);
            }
            Err(error) if is_elsewhere(&error) => bound.left_out.push((*address, error)),
            Err(error) => return Err(error),
        }
    }
    match (bound.listeners.is_empty(), bound.left_out.pop()) {
        (true, last) => Err(last.map_or_else(no_address, |(_, error)| error)),
        (false, last) => {
            bound.left_out.extend(last);
            Ok(bound)
        }
    }
}

/// Whether it is no address of this machine, or of a protocol that it does not have.
fn is_elsewhere(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EADDRNOTAVAIL | libc::EAFNOSUPPORT))
}

/// The host of an address, with the network that a local one of IPv6 is of (RFC 4007,
/// section 11).
fn host_of(address: SocketAddr) -> String {
    match address {
        SocketAddr::V6(six) if six.scope_id() != 0 => format!("{}%{}", six.ip(), six.scope_id()),
        address => address.ip().to_string(),
    }
}

/// A socket bound to `address`. That at all addresses of IPv6 leaves those of IPv4 to whoever
/// listens there already.
fn bind_tcp(address: SocketAddr) -> io::Result<Socket> {
    let bind = |ipv6_only: bool| {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        if ipv6_only {
            socket.set_only_v6(true)?;
        }
        socket.set_reuse_address(true)?;
        socket.bind(&address.into()).map(|()| socket)
    };
    match bind(false) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_all_of_ipv6(address) => {
            bind(true)
        }
        bound => bound,
    }
}

fn is_all_of_ipv6(address: SocketAddr) -> bool {
    address.is_ipv6() && address.ip().is_unspecified()
}

async fn connect_to(domain: Domain, name: &SockAddr, peer: Peer) -> io::Result<StreamConnection> {
    let socket = Socket::new(domain, Type::STREAM, None)?;
    prepare(&socket, peer)?;
    match socket.connect(name) {
        Ok(()) => return StreamConnection::new(socket.into(), peer),
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        Err(error) => return Err(error),
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

fn prepare(socket: &Socket, peer: Peer) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    if let Peer::Ip(ip) = peer {
        socket.set_tcp_nodelay(true)?;
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_AFTER)
            .with_interval(KEEPALIVE_EVERY)
            .with_retries(KEEPALIVE_TRIES);
        socket.set_tcp_keepalive(&keepalive)?;
        socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED_MAX))?;
        calm(socket, ip.ip());
    }
    Ok(())
}

/// Keeps a connection that stays on this machine from being paced. Many systems use BBR,
/// which looks for a bottleneck that loopback has not, by timers and by sending less for a
/// while. What goes over a network keeps what the system's administrator has chosen.
fn calm(socket: &Socket, ip: IpAddr) {
    if ip.to_canonical().is_loopback() {
        let _ = socket.set_tcp_congestion(LOOPBACK_CONGESTION); // slower without, no more
    }
}

async fn resolve(address: &Address) -> io::Result<Vec<SocketAddr>> {
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

fn no_address() -> io::Error {
    io::Error::from_raw_os_error(libc::EADDRNOTAVAIL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Connection;
    use dray_rt::{DriverKind, Executor, spawn_join};

    fn congestion_control(socket: &impl AsFd) -> Vec<u8> {
        let mut name = SockRef::from(socket).tcp_congestion().unwrap();
        name.retain(|&byte| byte != 0);
        name
    }

    #[test]
    fn both_families_can_be_listened_at_together() {
        let mut executor = Executor::new(DriverKind::Epoll).unwrap();
        executor.block_on(async {
            let at = |host: &str, port| Address::Tcp { host: host.into(), port };
            let four = Listener::bind(&at("0.0.0.0", 0)).await.unwrap();
            let Address::Tcp { port, .. } = *four.address() else { unreachable!() };
            let six = Listener::bind(&at("::", port)).await.unwrap();
            let twice = Listener::bind(&at("::", port)).await.err().unwrap();
            assert_eq!(twice.kind(), io::ErrorKind::AddrInUse);
            drop((four, six));
        });
    }

    /// Only the first one was listened at: whoever got the other one from the name was refused.
    #[test]
    fn all_addresses_of_a_name_are_listened_at() {
        let at = |text: &str| -> SocketAddr { text.parse().unwrap() };
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let far = at("192.0.2.1:0"); // of nobody (RFC 5737)
            let bound = bind_any(&[at("127.0.0.1:0"), far, at("[::1]:0"), at("127.0.0.1:0")], 16);
            let Bound { listeners, left_out } = bound.unwrap();
            let port = |listener: &Listener| match listener.address() {
                Address::Tcp { host, port } => (host.clone(), *port),
                Address::Unix(_) => unreachable!(),
            };
            let bound: Vec<_> = listeners.iter().map(port).collect();
            let chosen = bound[0].1;
            assert_eq!(bound, [("127.0.0.1".into(), chosen), ("::1".into(), chosen)]);
            assert_eq!(left_out.iter().map(|(address, _)| *address).collect::<Vec<_>>(), [far]);
            let taken = |host: &str| at(&format!("{host}:{chosen}"));
            let error = bind_any(&[taken("127.0.0.2"), taken("[::1]")], 1).err().unwrap();
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "one of its own is missing");
            let error = bind_any(&[far], 1).err().unwrap();
            assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
        });
    }

    #[test]
    fn a_local_address_is_named_with_its_network() {
        let six = std::net::SocketAddrV6::new("fe80::1".parse().unwrap(), 1, 0, 7);
        let address = Address::Tcp { host: host_of(six.into()), port: 1 };
        assert_eq!(address.to_string(), "tcp://[fe80::1%7]:1");
        let again: Address = address.to_string().parse().unwrap();
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            assert_eq!(resolve(&again).await.unwrap(), [SocketAddr::V6(six)]);
        });
    }

    /// Whoever looked whether a server listens there waited for that server to accept: for ever,
    /// if it stood still.
    #[test]
    fn a_server_that_accepts_nobody_is_found_out() {
        let dir = std::env::temp_dir().join(format!("dray-listen-{:x}", dray_rt::random_u64()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("socket");
        let name = unix_name(&path).unwrap();
        let standing = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        standing.bind(&name).unwrap();
        standing.listen(1).unwrap();
        let mut crowd = Vec::new();
        loop {
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            if socket.connect(&name).is_err() {
                break;
            }
            crowd.push(socket);
        }
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut executor = Executor::new(DriverKind::Epoll).unwrap();
            let bound = executor.block_on(Listener::bind(&Address::Unix(path)));
            let _ = tell.send(bound.err().map(|error| error.kind()));
        });
        let found = told.recv_timeout(std::time::Duration::from_secs(30));
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(found, Ok(Some(io::ErrorKind::AddrInUse)));
        drop(crowd);
    }

    /// It was given all the time that a client takes for a connection, each time anew: the other
    /// addresses were never tried.
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
        let refused_at = {
            let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            gone.local_addr().unwrap()
        };
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let limit = UNACKNOWLEDGED_MAX * 2 / 3; // by then the kernel has not given up
            for addresses in [vec![silent_at, live_at], vec![refused_at, silent_at, live_at]] {
                let connected = timeout(limit, connect_to_any(addresses)).await;
                let peer = connected.expect("the first one is waited for").unwrap().peer();
                assert_eq!(peer, Peer::Ip(live_at));
            }
            let refused = connect_to_any(vec![refused_at; 2]).await.err().unwrap();
            assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
            let none = connect_to_any(Vec::new()).await.err().unwrap();
            assert_eq!(none.kind(), io::ErrorKind::AddrNotAvailable);
        });
        drop((crowd, silent));
    }

    #[test]
    fn nothing_paces_a_connection_on_loopback() {
        let mut executor = Executor::new(DriverKind::Epoll).unwrap();
        executor.block_on(async {
            for host in ["127.0.0.1", "0.0.0.0"] {
                let any = Address::Tcp { host: host.into(), port: 0 };
                let listener = Listener::bind(&any).await.unwrap();
                let Address::Tcp { port, .. } = *listener.address() else { unreachable!() };
                let accepted = spawn_join(async move { listener.accept().await.unwrap().0 });
                let near = Address::Tcp { host: "127.0.0.1".into(), port };
                let connection = connect(&near).await.unwrap();
                assert_eq!(congestion_control(&accepted.await.unwrap()), b"reno");
                assert_eq!(congestion_control(connection.socket()), b"reno");
            }
        });
    }
}
