//! The way of notes from one server of a slice to the other.

use std::io;
use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dray_core::Fut;
use dray_rpc::server::{ReplicaLink, ReplicaRefusal};
use dray_rt::{random_u64, sleep};

use super::fleet::{Inner, fraction};

/// One batch in so many arrives once more, so late at most: behind a takeover, often.
const LATE_ONE_IN: u64 = 16;
const LATE_MAX: Duration = Duration::from_secs(4);

/// From one server to the other.
pub(super) struct SimLink {
    fleet: Weak<Inner>,
    slice: usize,
    /// The receiver's role.
    to: usize,
}

/// A batch on its way.
struct SimBatch {
    epoch: u64,
    number: u64,
    bytes: Vec<u8>,
}

fn is_away() -> ReplicaRefusal {
    ReplicaRefusal::Io(io::Error::from_raw_os_error(libc::ECONNREFUSED))
}

impl SimLink {
    pub(super) fn new(fleet: Weak<Inner>, slice: usize, to: usize) -> SimLink {
        SimLink { fleet, slice, to }
    }

    /// Gives a batch to the process that is there now.
    fn deliver(&self, batch: &SimBatch) -> Result<(), ReplicaRefusal> {
        let fleet = Inner::upgraded(&self.fleet).ok_or_else(is_away)?;
        if fleet.0.slices[self.slice].are_peers_cut.load(Ordering::SeqCst) {
            return Err(is_away());
        }
        let server = fleet.server(self.slice, self.to).ok_or_else(is_away)?;
        server.replica().take(batch.epoch, batch.number, &batch.bytes)
    }

    /// One way.
    async fn travel(&self) {
        let way_max = self.fleet.upgrade().map_or(Duration::ZERO, |fleet| fleet.way_max);
        sleep(way_max.mul_f64(fraction())).await;
    }
}

impl ReplicaLink for SimLink {
    fn ship<'a>(
        &'a self,
        epoch: u64,
        number: u64,
        bytes: Vec<u8>,
    ) -> Fut<'a, Result<(), ReplicaRefusal>> {
        let batch = SimBatch { epoch, number, bytes };
        Box::pin(async move {
            self.travel().await;
            let taken = self.deliver(&batch);
            if random_u64().is_multiple_of(LATE_ONE_IN) {
                let link = SimLink::new(self.fleet.clone(), self.slice, self.to);
                let late = LATE_MAX.mul_f64(fraction());
                dray_rt::spawn(async move {
                    sleep(late).await;
                    let _ = link.deliver(&batch); // nobody waits for an answer
                });
            }
            taken?;
            self.travel().await;
            Ok(())
        })
    }
}
