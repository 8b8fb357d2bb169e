//! The connection of one client to the server. It comes from an address of its own, as from a separate
//! machine. It can vanish at once, as a machine that has died.

use std::future::pending;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use dray_core::Fut;
use dray_fabric::{Address, Connect, ConnectFrom, Connection};

/// Connects to one address from one address.
pub struct LoopbackLink {
    to: SocketAddr,
    from: Ipv4Addr,
    gone: AtomicBool,
    last: Mutex<Option<Weak<dyn Connection>>>,
}

impl LoopbackLink {
    /// From an address of loopback that `clients_each` share, by the client's number.
    pub fn new(to: SocketAddr, number: usize, clients_each: usize) -> LoopbackLink {
        let machine = (number / clients_each.max(1)) as u32 + 2;
        let from = Ipv4Addr::from(u32::from(Ipv4Addr::LOCALHOST) - 1 + machine);
        LoopbackLink { to, from, gone: AtomicBool::new(false), last: Mutex::default() }
    }

    /// Nothing is said to the server from now on, not even that it is so.
    pub fn die(&self) {
        self.gone.store(true, Ordering::SeqCst);
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).take();
        last.and_then(|last| last.upgrade()).into_iter().for_each(|connection| connection.close());
    }
}

impl Connect for LoopbackLink {
    fn connect(&self) -> Fut<'_, io::Result<Arc<dyn Connection>>> {
        Box::pin(async {
            if self.gone.load(Ordering::SeqCst) {
                pending::<()>().await;
            }
            let to = Address::Tcp { host: self.to.ip().to_string(), port: self.to.port() };
            let from = ConnectFrom::Address(self.from.into());
            let connection = dray_fabric::connector(&to, from).connect().await?;
            *self.last.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(Arc::downgrade(&connection));
            Ok(connection)
        })
    }

    fn target(&self) -> String {
        self.to.to_string()
    }
}
