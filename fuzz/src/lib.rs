//! What the targets that run a whole server or client share.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{Buf, BufMut, NodeId};
use dray_fabric::sim::Network;
use dray_fabric::{Connection, Sink};
use dray_rpc::wire::{Auth, Hello, VERSION_MAX, VERSION_MIN};
use dray_rt::{DriverKind, Executor};

/// Runs it on a clock of its own; a standstill is a finding.
pub fn simulated(work: impl Future<Output = ()>) {
    let mut executor = Executor::new(DriverKind::Simulated { seed: 1 }).expect("it needs nothing");
    executor.try_block_on(work).expect("everybody waits for ever");
}

/// An empty file system that everybody may write.
pub fn memory() -> MemoryFs {
    MemoryFs::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() })
}

/// A hello of this version without a key.
pub fn hello() -> Hello {
    Hello {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        features: u64::MAX,
        auth: Auth::None,
        nonce: [7; 32],
        export: "data".into(),
        node: NodeId(99),
        host: "fuzz".into(),
        software: String::new(),
    }
}

/// The fuzzer's bytes, to be cut up.
pub struct Cutter<'a>(pub &'a [u8]);

impl<'a> Cutter<'a> {
    /// The next byte, 0 behind the end.
    pub fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    /// So many bytes, or as many as there are.
    pub fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// As many bytes as the next one says.
    pub fn piece(&mut self) -> &'a [u8] {
        let count = usize::from(self.byte());
        self.take(count)
    }
}

/// One end of a connection, for messages as they are.
pub struct Raw {
    /// The connection.
    pub connection: Arc<dyn Connection>,
}

impl Raw {
    /// Connects to `server`.
    pub async fn connect(network: &Network, server: &str) -> Raw {
        let connection = network.connector_from("fuzz", server).connect().await;
        Raw { connection: connection.expect("it listens") }
    }

    /// Sends a message, and waits until it must have arrived.
    pub async fn say(&self, head: &[u8], data: Option<Buf>) {
        let _ = self.connection.send(head, data); // it may have been ended
        dray_rt::sleep(Duration::from_millis(1)).await;
    }
}

/// Receives and forgets.
pub struct Ignore;

impl Sink for Ignore {
    fn poll_place(
        &mut self,
        _: &mut Context<'_>,
        _: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(Ok(BufMut::heap(data_bytes)))
    }

    fn frame(&mut self, _: &[u8], _: Option<BufMut>) -> io::Result<()> {
        Ok(())
    }
}
