//! How connections begin: what a provider of them has to have, and which one carries frames to
//! which address.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use dray_core::Fut;

use crate::{Address, Connection, Peer, sockets};

/// Makes connections to one server: sockets, or a simulated network.
pub trait Connect: Send + Sync + 'static {
    /// Tries once. Errors: those of connect(2) or of the name's resolution.
    fn connect(&self) -> Fut<'_, io::Result<Arc<dyn Connection>>>;

    /// Where it connects to, for people.
    fn target(&self) -> String;

    /// A connector for each server, where it is one of several that serves what is wanted. Empty: there is
    /// one.
    fn in_turn(&self) -> &[Arc<dyn Connect>] {
        &[]
    }
}

/// Accepts connections.
pub trait Listener: Send + Sync + 'static {
    /// The next connection. Errors: those of accept(2), after which there may be another one.
    fn accept(&self) -> Fut<'_, io::Result<Box<dyn Incoming>>>;
}

/// A connection that somebody has begun. It belongs to no executor yet: what it says first decides
/// where it is served. Dropping it ends it.
pub trait Incoming: Send + Sync + 'static {
    /// The other end.
    fn peer(&self) -> Peer;

    /// The head of the first frame, which stays there to be received. Waits for it on this thread's
    /// executor. Errors: `EPROTO` where no frame begins, `EMSGSIZE` for a head of more than
    /// [`FIRST_HEAD_MAX_BYTES`](crate::FIRST_HEAD_MAX_BYTES), `UnexpectedEof` at the end of the
    /// connection.
    fn first_head(&self) -> Fut<'_, io::Result<Vec<u8>>>;

    /// The CPU on which it is served with the fewest wake-ups of others, where one is known.
    fn home_cpu(&self) -> Option<usize>;

    /// Has the connection end `within` so long of the last sign of the other end's machine, where
    /// that is sooner than otherwise. Providers that learn of its loss at once have nothing to do.
    /// Errors: it ends later.
    fn notice_loss(&self, within: Duration) -> io::Result<()>;

    /// The connection, which this thread's executor serves from now on. Errors: descriptors or
    /// memory are short.
    fn establish(self: Box<Self>) -> io::Result<Arc<dyn Connection>>;
}

/// A listener, and where others find it.
pub struct Listening {
    /// With the port that the system chose, if any was wanted.
    pub address: Address,
    /// The listener there.
    pub listener: Box<dyn Listener>,
}

/// What became of the addresses that a name has.
pub struct Bound {
    /// One for each address that this machine has; there is one at least.
    pub listening: Vec<Listening>,
    /// Addresses of the name that this machine has not, or has no protocol for.
    pub left_out: Vec<(SocketAddr, io::Error)>,
}

/// Where a connection comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectFrom {
    /// Whatever the system chooses.
    Any,
    /// Over TCP a port below [`RESERVED_PORTS_END`](crate::RESERVED_PORTS_END), where this process
    /// may have one and one is free. A server that asks for no key wants such a port.
    ReservedPort,
    /// This address of the machine, with any port. Of Unix sockets there is none.
    Address(IpAddr),
}

/// A way to carry frames.
pub(crate) trait Provider: Sync {
    /// See [`listen`].
    fn listen<'a>(&self, at: &'a Address) -> Fut<'a, io::Result<Bound>>;

    /// See [`connector`].
    fn connector(&self, to: &Address, from: ConnectFrom) -> Arc<dyn Connect>;
}

/// The provider that carries frames to an address: a line for each provider.
fn provider(address: &Address) -> &'static dyn Provider {
    match address {
        Address::Tcp { .. } | Address::Unix(_) => &sockets::SocketProvider,
    }
}

/// Listens on all addresses that `address` names, on this thread's executor. All addresses of
/// IPv6 are those of IPv4, too, unless somebody listens at these. Errors: those of socket(7)
/// of any address that this machine has, and of the last one if it has none.
///
/// A Unix socket left over from a server that died is replaced. One that somebody answers on is
/// `EADDRINUSE`, a file that is no socket `EEXIST`, a path that is too long `ENAMETOOLONG`
/// (unix(7): 107 bytes).
pub async fn listen(address: &Address) -> io::Result<Bound> {
    provider(address).listen(address).await
}

/// As [`listen`], on the first one of a name that has several addresses.
pub async fn listen_first(address: &Address) -> io::Result<Listening> {
    Ok(listen(address).await?.listening.remove(0))
}

/// Makes connections to `address`.
pub fn connector(address: &Address, from: ConnectFrom) -> Arc<dyn Connect> {
    provider(address).connector(address, from)
}
