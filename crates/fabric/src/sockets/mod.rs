//! Connections by sockets of the kernel: TCP and Unix.

mod connect;
mod file;
mod frame;
mod incoming;
mod listen;
mod options;
mod pages;
mod peek;
mod reserved_port;
mod stream;

use std::io;
use std::sync::Arc;

use dray_core::Fut;

use crate::provider::Provider;
use crate::{Address, Bound, Connect, ConnectFrom};

pub use connect::{ReservedPort, Sockets};
pub use file::somebody_listens;

/// Carries frames to `tcp://` and `unix://` addresses.
pub(crate) struct SocketProvider;

impl Provider for SocketProvider {
    fn listen<'a>(&self, at: &'a Address) -> Fut<'a, io::Result<Bound>> {
        Box::pin(listen::bind_all(at))
    }

    fn connector(&self, to: &Address, from: ConnectFrom) -> Arc<dyn Connect> {
        Arc::new(connect::SocketConnect { to: to.clone(), from })
    }
}
