//! How connections within this process begin.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use dray_core::Fut;
use dray_rt::sync::mpsc;

use super::connection::LocalConnection;
use crate::{Connect, Connection, FIRST_HEAD_MAX_BYTES, Incoming, Listener, Peer};

/// Connections that may wait to be accepted; further ones are refused. Threads of one front end make
/// one each.
const BACKLOG: usize = 128;

/// A listener of this process, and the way to it.
pub fn listen() -> (LocalListener, LocalConnector) {
    let (sender, incoming) = mpsc::channel(BACKLOG);
    (LocalListener { incoming: Mutex::new(incoming) }, LocalConnector { sender })
}

/// Accepts connections from holders of its [`LocalConnector`]. They are refused once it is dropped.
pub struct LocalListener {
    incoming: Mutex<mpsc::Receiver<LocalConnection>>,
}

impl LocalListener {
    /// Pending for ever once nobody can connect any more.
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<LocalConnection> {
        let mut incoming = self.incoming.lock().unwrap_or_else(PoisonError::into_inner);
        match incoming.poll_recv(cx) {
            Poll::Ready(Some(connection)) => Poll::Ready(connection),
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }
}

impl Listener for LocalListener {
    fn accept(&self) -> Fut<'_, io::Result<Box<dyn Incoming>>> {
        Box::pin(async {
            let connection = std::future::poll_fn(|cx| self.poll_accept(cx)).await;
            Ok(Box::new(LocalIncoming { connection }) as Box<dyn Incoming>)
        })
    }
}

/// Connects to the listener that it was made with. Errors: `ECONNREFUSED` if that is gone, or too many
/// connections wait for it.
#[derive(Clone)]
pub struct LocalConnector {
    sender: mpsc::Sender<LocalConnection>,
}

impl Connect for LocalConnector {
    fn connect(&self) -> Fut<'_, io::Result<Arc<dyn Connection>>> {
        Box::pin(async {
            let [ours, theirs] = LocalConnection::pair();
            let refused = |_| io::Error::from_raw_os_error(libc::ECONNREFUSED);
            self.sender.try_send(theirs).map_err(refused)?;
            Ok(Arc::new(ours) as Arc<dyn Connection>)
        })
    }

    fn target(&self) -> String {
        "this process".to_owned()
    }
}

struct LocalIncoming {
    connection: LocalConnection,
}

impl Incoming for LocalIncoming {
    fn peer(&self) -> Peer {
        self.connection.peer()
    }

    fn first_head(&self) -> Fut<'_, io::Result<Vec<u8>>> {
        Box::pin(std::future::poll_fn(|cx| {
            self.connection.poll_here(cx, |here| match here.first_head() {
                (Some(head), _) if head.len() > FIRST_HEAD_MAX_BYTES => {
                    Some(Err(io::Error::from_raw_os_error(libc::EMSGSIZE)))
                }
                (Some(head), _) => Some(Ok(head.to_vec())),
                (None, true) => Some(Err(io::ErrorKind::UnexpectedEof.into())),
                (None, false) => None,
            })
        }))
    }

    fn home_cpu(&self) -> Option<usize> {
        None
    }

    /// The other end is lost with this one.
    fn notice_loss(&self, _: Duration) -> io::Result<()> {
        Ok(())
    }

    fn establish(self: Box<LocalIncoming>) -> io::Result<Arc<dyn Connection>> {
        Ok(Arc::new(self.connection))
    }
}
