//! What is kept of one file: batches, each of which one message takes.

use std::collections::VecDeque;

use dray_core::{BufMut, RequestId};

use super::KeptBatch;
use super::extents::KeptExtents;
use crate::client::dirty_log::{FoundWrite, LoggedRange};
use crate::wire::{WriteBase, put_extents};

/// Writes that are sent together.
#[derive(Debug, Default)]
pub(super) struct UnsentBatch {
    pub(super) extents: KeptExtents,
    pub(super) kill_set_id: bool,
    /// By which it is being sent. Nothing is added to it then.
    pub(super) request: Option<RequestId>,
    /// Where its writes are in a log.
    pub(super) logged: LoggedRange,
}

/// In the order in which they are sent.
#[derive(Debug, Default)]
pub(super) struct UnsentWrites {
    batches: VecDeque<UnsentBatch>,
}

impl UnsentBatch {
    /// A write that a process before this one had noted.
    pub(super) fn add(&mut self, write: &FoundWrite) {
        self.extents.write(write.record.at, &write.data);
        self.kill_set_id |= write.record.kill_set_id;
        self.logged.add(write.record.number, (write.segment, write.data.len() as u64));
    }

    pub(super) fn message(
        &self,
        (lease, base): (u64, WriteBase),
        (request, ends): (RequestId, bool),
    ) -> KeptBatch {
        let pieces: Vec<(u64, u32)> =
            self.extents.iter().map(|(at, piece)| (at, piece.len() as u32)).collect();
        let mut data = BufMut::heap(self.extents.bytes());
        self.extents.iter().for_each(|(_, piece)| _ = data.put(piece));
        let mut extents = Vec::new();
        put_extents(pieces.iter().copied(), &mut extents);
        let (kill_set_id, data) = (self.kill_set_id, data.freeze());
        KeptBatch { request, lease, base, kill_set_id, ends, extents, pieces, data }
    }
}

impl UnsentWrites {
    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    pub(super) fn count(&self) -> usize {
        self.batches.len()
    }

    /// Bytes that are kept.
    pub(super) fn bytes(&self) -> usize {
        self.batches.iter().map(|batch| batch.extents.bytes()).sum()
    }

    /// The batch that is sent next, or is being sent.
    pub(super) fn first(&mut self) -> Option<&mut UnsentBatch> {
        self.batches.front_mut()
    }

    /// The first batch is sent.
    pub(super) fn remove_first(&mut self) -> Option<UnsentBatch> {
        self.batches.pop_front()
    }

    pub(super) fn last(&self) -> Option<&UnsentBatch> {
        self.batches.back()
    }

    /// The batch to which a write of this length is added; none of them has more than `max_bytes` then.
    pub(super) fn open(&mut self, len_bytes: usize, max_bytes: usize) -> &mut UnsentBatch {
        let takes = |last: &UnsentBatch| {
            let fits = last.extents.bytes() + len_bytes <= max_bytes;
            last.request.is_none() && fits && !last.extents.is_scattered()
        };
        if !self.batches.back().is_some_and(takes) {
            self.batches.push_back(UnsentBatch::default());
        }
        self.batches.back_mut().expect("there is one")
    }

    /// The next write begins another batch.
    pub(super) fn begin_batch(&mut self) {
        self.batches.push_back(UnsentBatch::default());
    }

    /// The first batch was not sent. It is sent later, by another request.
    pub(super) fn is_not_sent(&mut self) {
        if let Some(first) = self.batches.front_mut() {
            first.request = None;
        }
    }

    /// All of it as one batch.
    pub(super) fn join(&mut self) -> UnsentBatch {
        let mut all = self.batches.drain(..);
        let first = all.next().unwrap_or_default();
        all.fold(first, |before, newer| UnsentBatch {
            extents: before.extents.under(&newer.extents),
            kill_set_id: before.kill_set_id || newer.kill_set_id,
            request: None,
            logged: before.logged.and(newer.logged),
        })
    }

    /// Puts a batch before all others.
    pub(super) fn put_first(&mut self, batch: UnsentBatch) {
        self.batches.push_front(batch);
    }
}
