//! A connector to one of several servers: whichever serves what its user wants.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dray_core::Fut;

use crate::{Connect, Connection};

/// Connects to several servers in turn. Each connection begins with the server after the one that was
/// tried last. So a client that was refused there comes to another one when it tries again.
pub struct ConnectInTurn {
    servers: Vec<Arc<dyn Connect>>,
    next: AtomicUsize,
}

impl ConnectInTurn {
    /// To these, of which the first is tried first.
    ///
    /// # Panics
    /// If there is none.
    pub fn new(servers: Vec<Arc<dyn Connect>>) -> ConnectInTurn {
        assert!(!servers.is_empty(), "there has to be a server");
        ConnectInTurn { servers, next: AtomicUsize::new(0) }
    }
}

impl Connect for ConnectInTurn {
    /// Tries each server once. Errors: that of the last one.
    fn connect(&self) -> Fut<'_, io::Result<Arc<dyn Connection>>> {
        Box::pin(async move {
            let mut tried = None;
            for _ in 0..self.servers.len() {
                let next = self.next.fetch_add(1, Ordering::Relaxed) % self.servers.len();
                match self.servers[next].connect().await {
                    Ok(connection) => return Ok(connection),
                    Err(error) => tried = Some(error),
                }
            }
            Err(tried.unwrap_or_else(|| io::Error::from_raw_os_error(libc::EHOSTUNREACH)))
        })
    }

    fn in_turn(&self) -> &[Arc<dyn Connect>] {
        &self.servers
    }

    fn target(&self) -> String {
        let targets: Vec<String> = self.servers.iter().map(|server| server.target()).collect();
        targets.join(" or ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::Network;
    use dray_rt::{DriverKind, Executor};

    #[test]
    fn who_was_refused_by_one_comes_to_the_other() {
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let network = Network::new();
            let (mut first, mut second) = (network.listen("first"), network.listen("second"));
            let servers = ["first", "second"].map(|name| network.connector(name));
            let connector = ConnectInTurn::new(servers.into());
            for _ in 0..2 {
                drop(connector.connect().await.unwrap());
                first.recv().await.unwrap();
                drop(connector.connect().await.unwrap());
                second.recv().await.unwrap();
            }
            drop(first);
            network.partition("first", true);
            for _ in 0..3 {
                drop(connector.connect().await.unwrap());
                second.recv().await.unwrap();
            }
            network.partition("second", true);
            assert!(connector.connect().await.is_err());
        });
    }
}
