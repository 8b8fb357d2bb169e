//! Listening for connections.

use std::io;
use std::net::SocketAddr;

use dray_core::Fut;
use dray_rt::{Interest, Source};
use socket2::{Domain, SockRef, Socket, Type};

use super::connect::{no_address, resolve};
use super::file::{SocketFile, bind_unix, lock_directory, unix_name};
use super::incoming::IncomingSocket;
use super::options::{calm, local_peer, prepare};
use crate::{Address, Bound, Incoming, Listener, Listening, Peer};

/// Connections that may wait to be accepted: as many as the system allows by default
/// (net.core.somaxconn, listen(2)). Where all clients come back at once those beyond are heard a
/// second later.
const BACKLOG: i32 = 4096;
/// A port that the system chose for the first of a name's addresses may be taken at another: so
/// often another one is chosen.
const ANY_PORT_TRIES: usize = 16;

/// Accepts connections on one address.
pub(super) struct SocketListener {
    /// A Unix socket's, removed in the end, and before the socket.
    _file: Option<SocketFile>,
    source: Source,
}

/// See [`crate::listen`].
pub(super) async fn bind_all(address: &Address) -> io::Result<Bound> {
    match address {
        Address::Tcp { port, .. } => {
            let tries = if *port == 0 { ANY_PORT_TRIES } else { 1 };
            bind_any(&resolve(address).await?, tries)
        }
        Address::Unix(path) => {
            let name = unix_name(path)?;
            let lock = lock_directory(path).await?;
            let socket = bind_unix(path, &name)?;
            let file = SocketFile::made(path)?;
            let listener = SocketListener::begin(socket, Some(file))?;
            drop(lock); // from now on others find a socket that is listened on
            let listening = vec![listening(address.clone(), listener)];
            Ok(Bound { listening, left_out: Vec::new() })
        }
    }
}

fn listening(address: Address, listener: SocketListener) -> Listening {
    Listening { address, listener: Box::new(listener) }
}

/// A listener, and where the system put it.
pub(super) fn bind_one(address: SocketAddr) -> io::Result<(Address, SocketListener)> {
    let socket = bind_tcp(address)?;
    calm(&socket, address.ip()); // before a connection begins, it inherits this
    let bound = socket.local_addr()?.as_socket().unwrap_or(address);
    let address = Address::Tcp { host: host_of(bound), port: bound.port() };
    Ok((address, SocketListener::begin(socket, None)?))
}

impl SocketListener {
    fn begin(socket: Socket, file: Option<SocketFile>) -> io::Result<SocketListener> {
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        Ok(SocketListener { _file: file, source: Source::new(socket.into())? })
    }

    pub(super) async fn next(&self) -> io::Result<IncomingSocket> {
        let (socket, name) =
            self.source.io(Interest::Read, |_| SockRef::from(&self.source).accept()).await?;
        let peer = match name.as_socket() {
            Some(address) => Peer::Ip(address),
            None => local_peer(&socket)?,
        };
        prepare(&socket, peer)?;
        Ok(IncomingSocket { socket: socket.into(), peer })
    }
}

impl Listener for SocketListener {
    fn accept(&self) -> Fut<'_, io::Result<Box<dyn Incoming>>> {
        Box::pin(async { Ok(Box::new(self.next().await?) as Box<dyn Incoming>) })
    }
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
    let mut bound = Bound { listening: Vec::new(), left_out: Vec::new() };
    let mut chosen = None;
    for (index, address) in addresses.iter().enumerate() {
        if addresses[..index].contains(address) {
            continue; // a name can have an address twice
        }
        let mut at = *address;
        at.set_port(chosen.unwrap_or(address.port()));
        match bind_one(at) {
            Ok((address, listener)) => {
                if let Address::Tcp { port, .. } = address {
                    chosen = Some(port);
                }
                bound.listening.push(listening(address, listener));
            }
            Err(error) if is_elsewhere(&error) => bound.left_out.push((*address, error)),
            Err(error) => return Err(error),
        }
    }
    match (bound.listening.is_empty(), bound.left_out.pop()) {
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

/// A socket bound to `address`. That at all addresses of IPv6 leaves those of IPv4 to a process that
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::listen_first;
    use dray_rt::{DriverKind, Executor};

    #[test]
    fn both_families_can_be_listened_at_together() {
        let mut executor = Executor::new(DriverKind::Epoll).unwrap();
        executor.block_on(async {
            let at = |host: &str, port| Address::Tcp { host: host.into(), port };
            let four = listen_first(&at("0.0.0.0", 0)).await.unwrap();
            let Address::Tcp { port, .. } = four.address else { unreachable!() };
            let six = listen_first(&at("::", port)).await.unwrap();
            let twice = listen_first(&at("::", port)).await.err().unwrap();
            assert_eq!(twice.kind(), io::ErrorKind::AddrInUse);
            drop((four, six));
        });
    }

    /// The server listened at the first one only: a client that got the other one was refused.
    #[test]
    fn all_addresses_of_a_name_are_listened_at() {
        let at = |text: &str| -> SocketAddr { text.parse().unwrap() };
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let far = at("192.0.2.1:0"); // of nobody (RFC 5737)
            let bound = bind_any(&[at("127.0.0.1:0"), far, at("[::1]:0"), at("127.0.0.1:0")], 16);
            let Bound { listening, left_out } = bound.unwrap();
            let port = |one: &Listening| match &one.address {
                Address::Tcp { host, port } => (host.clone(), *port),
                Address::Unix(_) => unreachable!(),
            };
            let bound: Vec<_> = listening.iter().map(port).collect();
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

    /// A process that looked whether a server listens there waited for that server to accept: for ever,
    /// if it stood still.
    #[test]
    fn a_server_that_accepts_nobody_is_found_out() {
        let dir = std::env::temp_dir().join(format!("dray-listen-{:x}", dray_rt::random_u64()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("socket");
        let name = unix_name(&path).unwrap();
        let listener = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        listener.bind(&name).unwrap();
        listener.listen(1).unwrap();
        let mut crowd = Vec::new();
        loop {
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
            socket.set_nonblocking(true).unwrap();
            if socket.connect(&name).is_err() {
                break;
            }
            crowd.push(socket);
        }
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut executor = Executor::new(DriverKind::Epoll).unwrap();
            let bound = executor.block_on(listen_first(&Address::Unix(path)));
            let _ = sender.send(bound.err().map(|error| error.kind()));
        });
        let found = receiver.recv_timeout(std::time::Duration::from_secs(30));
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(found, Ok(Some(io::ErrorKind::AddrInUse)));
        drop(crowd);
    }
}
