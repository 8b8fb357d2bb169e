//! The identity of the other end of a connection.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::{ClientAddress, Gid, SessionId, Uid};

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A host on the network.
    Ip(SocketAddr),
    /// A process on this machine, of root's or of the user's that this one is of.
    Local,
    /// A process on this machine of this user and group, which are neither root nor our own.
    User(Uid, Gid),
}

/// Ports below this one are for processes with CAP_NET_BIND_SERVICE over their network (ip(7);
/// `IPPORT_RESERVED` of netinet/in.h).
pub const RESERVED_PORTS_END: u16 = 1024;

impl Peer {
    /// Whether the peer may speak for all users of its machine, as far as the kernels of both ends
    /// say. It came from a reserved port, or is root here, or is the user of this process.
    pub fn is_privileged(&self) -> bool {
        match self {
            Peer::Ip(address) => address.port() < RESERVED_PORTS_END,
            Peer::Local => true,
            Peer::User(..) => false,
        }
    }

    /// The address of the peer, whose share its resources are taken from. An origin is an IPv4
    /// address, an IPv6 network of 64 bits, or a user of this machine. One host can have all of an
    /// IPv6 network of 64 bits (RFC 4291, 2.5.4).
    pub fn address(self) -> ClientAddress {
        /// The beginning of multicast addresses (RFC 4291, 2.7), which are no source of
        /// connections.
        const LOCAL: u64 = 0xffff_ffff << 32;
        ClientAddress(match self {
            Peer::Ip(address) => match address.ip().to_canonical() {
                IpAddr::V4(address) => u32::from(address).into(),
                IpAddr::V6(address) => (u128::from(address) >> 64) as u64,
            },
            Peer::Local => LOCAL,
            Peer::User(uid, _) => LOCAL | u64::from(uid.0),
        })
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::Ip(address) => address.fmt(f),
            Peer::Local => f.write_str("local"),
            Peer::User(uid, _) => write!(f, "user {} of this machine", uid.0),
        }
    }
}

/// How a call came to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Via {
    /// The session that it belongs to, which outlives connections.
    pub session: SessionId,
    /// The other end of the connection that brought it.
    pub peer: Peer,
}
