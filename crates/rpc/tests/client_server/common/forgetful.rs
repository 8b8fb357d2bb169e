//! A server that knows no session, says that it waits for the lost changes, and answers nothing.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use dray_core::{BufMut, FsInfo};
use dray_fabric::sim::{Network, SimConnection};
use dray_fabric::{Connection, Sink};
use dray_rpc::wire::{Challenge, Welcome};

struct Forgetful {
    connection: Arc<SimConnection>,
    epochs: Arc<AtomicU64>,
    said: u32,
    info: FsInfo,
}

impl Sink for Forgetful {
    fn poll_place(
        &mut self,
        _: &mut TaskContext<'_>,
        _: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(Ok(BufMut::heap(data_bytes)))
    }

    fn frame(&mut self, _: &[u8], _: Option<BufMut>) -> io::Result<()> {
        self.said += 1;
        let challenge =
            Challenge { version: 1, features: u64::MAX, nonce: [1; 32], proof: [0; 32] };
        match self.said {
            1 => self.connection.send(&challenge.message(), None),
            2 => {
                let epoch = self.epochs.fetch_add(1, Ordering::Relaxed) + 2;
                let welcome = Welcome {
                    session: epoch / 3 + 1000, // some epochs know the session, and nothing of it
                    secret: [0; 16],
                    resumed: false,
                    connection: 1,
                    instance: epoch,
                    boot: u128::from(epoch / 2) + 1,
                    calls_max: 128,
                    slots: 64,
                    lease_ms: 60_000,
                    info: self.info.clone(),
                    lease_term_ms: 0,
                    lease_epoch: 0,
                };
                self.connection.send(&welcome.message(), None)
            }
            _ => Ok(()),
        }
    }
}

/// Serves so as `s`, each connection for as long as its `patience` lasts; answers how many
/// welcomes there were, and how many connections there are.
pub fn serve_forgetfully(
    network: &Network,
    info: FsInfo,
    patience: Duration,
) -> (Arc<AtomicU64>, Arc<AtomicUsize>) {
    let (epochs, open) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicUsize::new(0)));
    let counts = (epochs.clone(), open.clone());
    let mut incoming = network.listen("s");
    dray_rt::spawn(async move {
        while let Some(connection) = incoming.recv().await {
            let connection = Arc::new(connection);
            let (epochs, info, open) = (epochs.clone(), info.clone(), open.clone());
            let mut serving = Forgetful { connection: connection.clone(), epochs, said: 0, info };
            dray_rt::spawn(async move {
                open.fetch_add(1, Ordering::Relaxed);
                let served = serving.connection.clone();
                let ran = served.run(&mut serving);
                let _ = dray_rt::timeout(patience, ran).await; // it has had enough
                connection.close();
                open.fetch_sub(1, Ordering::Relaxed);
            });
        }
    });
    counts
}
