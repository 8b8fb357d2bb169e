//! Listening for connections.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use dray_rt::{Interest, Source};
use socket2::{Domain, SockRef, Socket, Type};

use crate::sockets::connect::{no_address, resolve};
use crate::sockets::file::{SocketFile, bind_unix, turn, unix_name};
use crate::sockets::options::{calm, local_peer, prepare};
use crate::{Address, Peer};

/// Connections that may wait to be accepted: as many as the system allows by default
/// (net.core.somaxconn, listen(2)). Where all clients come back at once those beyond are heard a
/// second later.
const BACKLOG: i32 = 4096;
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

    /// The next connection: a socket, to be made a [`crate::StreamConnection`] on the executor
    /// that shall serve it.
    pub async fn accept(&self) -> io::Result<(OwnedFd, Peer)> {
        let (socket, name) =
            self.source.io(Interest::Read, |_| SockRef::from(&self.source).accept()).await?;
        let peer = match name.as_socket() {
            Some(address) => Peer::Ip(address),
            None => local_peer(&socket)?,
        };
        prepare(&socket, peer)?;
        Ok((socket.into(), peer))
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

#[cfg(test)]
mod tests {
    use super::*;
    use dray_rt::{DriverKind, Executor};

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
}
