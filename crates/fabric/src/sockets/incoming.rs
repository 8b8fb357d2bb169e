//! A socket that has been accepted, before it is decided who serves it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use dray_core::Fut;

use super::options::{incoming_cpu, notice_loss};
use super::peek::peek_head;
use super::stream::StreamConnection;
use crate::{Connection, Incoming, Peer};

pub(super) struct IncomingSocket {
    pub(super) socket: OwnedFd,
    pub(super) peer: Peer,
}

impl Incoming for IncomingSocket {
    fn peer(&self) -> Peer {
        self.peer
    }

    fn first_head(&self) -> Fut<'_, io::Result<Vec<u8>>> {
        Box::pin(peek_head(&self.socket))
    }

    /// Where the kernel handles its packets. It tells nothing of use for a Unix socket.
    fn home_cpu(&self) -> Option<usize> {
        match self.peer {
            Peer::Ip(_) => incoming_cpu(&self.socket),
            Peer::Local | Peer::User(..) => None,
        }
    }

    fn notice_loss(&self, within: Duration) -> io::Result<()> {
        match self.peer {
            Peer::Ip(_) => notice_loss(&self.socket, within),
            Peer::Local | Peer::User(..) => Ok(()),
        }
    }

    fn establish(self: Box<IncomingSocket>) -> io::Result<Arc<dyn Connection>> {
        Ok(Arc::new(StreamConnection::new(self.socket, self.peer)?))
    }
}
