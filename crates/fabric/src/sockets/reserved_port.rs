//! Connections from ports that ordinary users may not use.
//!
//! A server that asks for no key takes such a port as a sign. The client's machine vouches for its
//! users then, as with NFS servers. The call bindresvport(3) would do for a few connections of one
//! machine. It keeps a port from every other connection, and gives up where the ports are in use
//! for another server.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use socket2::{Domain, Socket, Type};

use super::connect::{ConnectAttempt, begin};
use super::options::prepare;
use crate::{Peer, RESERVED_PORTS_END};

/// The first port that is taken: those below it are well-known services' (bindresvport(3)).
const FIRST: u16 = 512;
/// There are so many, and as many connections without a key from one machine to one address of a
/// server. Each is tried once.
const COUNT: u16 = RESERVED_PORTS_END - FIRST;

/// Begins to connect to `to` from a reserved port. None if this process may not have one, or all of
/// them are in use for that address. Errors: those of socket(2) and of connect(2).
pub(crate) fn begin_from_reserved(to: SocketAddr) -> io::Result<Option<ConnectAttempt>> {
    let first = (dray_rt::random_u64() % u64::from(COUNT)) as u16;
    for attempt in 0..COUNT {
        let begun = begin_from(FIRST + (first + attempt) % COUNT, to);
        match begun.as_ref().err().and_then(io::Error::raw_os_error) {
            // There is a connection from that port to the same address, or one has just ended, or
            // somebody listens at the port.
            Some(libc::EADDRINUSE | libc::EADDRNOTAVAIL) => {}
            // Or a firewall says so, and does again where that is not why.
            Some(libc::EACCES | libc::EPERM) => return Ok(None),
            _ => return begun.map(Some),
        }
    }
    Ok(None)
}

fn begin_from(port: u16, to: SocketAddr) -> io::Result<ConnectAttempt> {
    let any = match to {
        SocketAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
    };
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    prepare(&socket, Peer::Ip(to))?;
    // One port is good for connections to several servers. A service that is started later does not
    // find the port that it listens at taken by us.
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::new(any, port).into())?;
    begin(socket, &to.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Address, Connect, ReservedPort, listen_first};
    use dray_core::{Gid, Uid};
    use dray_rt::{DriverKind, Executor};

    /// Whether this process may have reserved ports, which is said if not.
    fn may() -> bool {
        let may = (FIRST..RESERVED_PORTS_END).any(|port| {
            let bound = std::net::TcpListener::bind(("127.0.0.1", port));
            bound.is_ok()
        });
        if !may {
            eprintln!("skipped: ports below 1024 need CAP_NET_BIND_SERVICE");
        }
        may
    }

    /// Connections to one address use each port once; those to another one have as many.
    #[test]
    fn ports_are_shared_between_servers_and_end_at_one() {
        if !may() {
            return;
        }
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let any = |host: &str| Address::Tcp { host: host.into(), port: 0 };
            let one = listen_first(&any("127.0.0.1")).await.unwrap();
            let other = match listen_first(&any("::1")).await {
                Ok(six) => six,
                Err(_) => listen_first(&any("127.0.0.1")).await.unwrap(),
            };
            let mut held = Vec::new();
            let mut reserved = [0; 2];
            for attempt in 0..usize::from(COUNT) + 8 {
                for (index, one) in [&one, &other].into_iter().enumerate() {
                    let connection = ReservedPort(one.address.clone()).connect().await;
                    held.push(connection.unwrap_or_else(|error| panic!("{attempt}: {error}")));
                    let incoming = one.listener.accept().await.unwrap();
                    reserved[index] += usize::from(incoming.peer().is_privileged());
                }
            }
            // Other programs on this machine listen at some of these ports, or connect from them.
            let expected = usize::from(COUNT) * 3 / 4..=usize::from(COUNT);
            assert!(reserved.iter().all(|count| expected.contains(count)), "{reserved:?}");
        });
    }

    #[test]
    fn what_is_a_reserved_port_and_who_is_privileged() {
        let from = |port: u16| Peer::Ip(([10, 0, 0, 1], port).into()).is_privileged();
        assert!(from(1) && from(1023) && !from(1024) && !from(65_535));
        assert!(Peer::Local.is_privileged() && !Peer::User(Uid(1), Gid(1)).is_privileged());
    }
}
