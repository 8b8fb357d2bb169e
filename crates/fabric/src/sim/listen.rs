//! How simulated connections begin.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use dray_core::Fut;
use dray_rt::sync::mpsc;

use super::SimConnection;
use crate::{Connection, FIRST_HEAD_MAX_BYTES, Incoming, Listener, Peer};

/// Accepts connections to one name.
pub struct SimListener {
    incoming: Mutex<mpsc::UnboundedReceiver<SimConnection>>,
}

impl SimListener {
    pub(super) fn new(incoming: mpsc::UnboundedReceiver<SimConnection>) -> SimListener {
        SimListener { incoming: Mutex::new(incoming) }
    }

    /// The next connection as it is; none once somebody else listens there, or the network is gone.
    pub async fn recv(&mut self) -> Option<SimConnection> {
        self.incoming.get_mut().unwrap_or_else(PoisonError::into_inner).recv().await
    }

    /// Pending for ever once nobody can connect any more.
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<SimConnection> {
        let mut incoming = self.incoming.lock().unwrap_or_else(PoisonError::into_inner);
        match incoming.poll_recv(cx) {
            Poll::Ready(Some(connection)) => Poll::Ready(connection),
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }
}

impl Listener for SimListener {
    fn accept(&self) -> Fut<'_, io::Result<Box<dyn Incoming>>> {
        Box::pin(async {
            let connection = std::future::poll_fn(|cx| self.poll_accept(cx)).await;
            Ok(Box::new(SimIncoming { connection }) as Box<dyn Incoming>)
        })
    }
}

struct SimIncoming {
    connection: SimConnection,
}

impl Incoming for SimIncoming {
    fn peer(&self) -> Peer {
        self.connection.peer()
    }

    fn first_head(&self) -> Fut<'_, io::Result<Vec<u8>>> {
        Box::pin(async {
            let head = self.connection.when_due(|end| {
                end.frames.front().map(|frame| frame.head.clone()).unwrap_or_default()
            });
            match head.await {
                Some(head) if head.len() <= FIRST_HEAD_MAX_BYTES => Ok(head),
                Some(_) => Err(io::Error::from_raw_os_error(libc::EMSGSIZE)),
                None => Err(io::ErrorKind::UnexpectedEof.into()),
            }
        })
    }

    fn home_cpu(&self) -> Option<usize> {
        None
    }

    /// Both ends learn of it as the weather has it.
    fn notice_loss(&self, _: Duration) -> io::Result<()> {
        Ok(())
    }

    fn establish(self: Box<SimIncoming>) -> io::Result<Arc<dyn Connection>> {
        Ok(Arc::new(self.connection))
    }
}
