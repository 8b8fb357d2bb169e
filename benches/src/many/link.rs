//! The way of one client to the server: from an address of its own, as if it were a machine of
//! its own, and gone from one moment to the next, as a machine that has died.

use std::future::pending;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use dray_core::Fut;
use dray_fabric::{Connect, Connection, Peer, StreamConnection};
use dray_rt::{Interest, Source};
use socket2::{Domain, Socket, Type};

/// Connects to one address from one address.
pub struct Link {
    to: SocketAddr,
    from: Ipv4Addr,
    gone: AtomicBool,
    last: Mutex<Weak<StreamConnection>>,
}

impl Link {
    /// From an address of loopback that `clients_each` share, by the client's number.
    pub fn new(to: SocketAddr, number: usize, clients_each: usize) -> Link {
        let machine = (number / clients_each.max(1)) as u32 + 2;
        let from = Ipv4Addr::from(u32::from(Ipv4Addr::LOCALHOST) - 1 + machine);
        Link { to, from, gone: AtomicBool::new(false), last: Mutex::default() }
    }

    /// Nothing is said to the server from now on, not even that it is so.
    pub fn die(&self) {
        self.gone.store(true, Ordering::SeqCst);
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        last.into_iter().for_each(|connection| connection.close());
    }

    async fn socket(&self) -> io::Result<Socket> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)?;
        socket.bind(&SocketAddr::from((self.from, 0)).into())?;
        match socket.connect(&self.to.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
            _ => {}
        }
        let source = Source::new(socket.try_clone()?.into())?;
        let connected = |_| match (socket.take_error()?, socket.peer_addr()) {
            (Some(error), _) => Err(error),
            (None, Ok(_)) => Ok(()),
            (None, Err(_)) => Err(io::ErrorKind::WouldBlock.into()),
        };
        source.io(Interest::Write, connected).await?;
        Ok(socket)
    }
}

impl Connect for Link {
    fn connect(&self) -> Fut<'_, io::Result<Arc<dyn Connection>>> {
        Box::pin(async {
            if self.gone.load(Ordering::SeqCst) {
                pending::<()>().await;
            }
            let socket = self.socket().await?;
            let connection = Arc::new(StreamConnection::new(socket.into(), Peer::Ip(self.to))?);
            *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&connection);
            Ok(connection as Arc<dyn Connection>)
        })
    }

    fn target(&self) -> String {
        self.to.to_string()
    }
}
