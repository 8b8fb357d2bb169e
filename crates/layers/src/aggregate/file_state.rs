//! The state of one file, for all that have it open.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{FileId, Result};
use dray_rt::Instant;
use dray_rt::sync::Notify;

use super::ahead::ReadAheadWindow;
use super::core::AggregateCore;
use super::late_errors::{ErrorCursor, LateErrors};
use super::pending::Block;
use super::streams::Streams;

/// What is known and held of a file.
pub(super) struct AggregatedFileState {
    pub(super) id: FileId,
    pub(super) core: Arc<AggregateCore>,
    parts: Mutex<Parts>,
    /// A window was filled, or a block was written.
    pub(super) changed: Notify,
    /// Pending blocks, to be looked at without the mutex.
    pub(super) block_count: AtomicUsize,
}

/// The parts that are behind the mutex. No holder waits.
#[derive(Default)]
pub(super) struct Parts {
    pub(super) streams: Streams,
    pub(super) windows: Vec<ReadAheadWindow>,
    /// Where the file ended when that was last seen.
    pub(super) end: Option<(u64, Instant)>,
    /// By their number in the file.
    pub(super) blocks: BTreeMap<u64, Block>,
    pub(super) errors: LateErrors,
    /// An ordinary user has written, and nobody has changed attributes since: no set-id bits and no
    /// capabilities are left to be cleared.
    pub(super) privileges_cleared: bool,
    /// Counts windows and blocks, so that one is not taken for another.
    pub(super) serial: u64,
}

impl AggregatedFileState {
    pub(super) fn new(
        core: &Arc<AggregateCore>,
        id: FileId,
        errors: LateErrors,
    ) -> Arc<AggregatedFileState> {
        Arc::new(AggregatedFileState {
            id,
            core: core.clone(),
            parts: Mutex::new(Parts { errors, ..Parts::default() }),
            changed: Notify::new(),
            block_count: AtomicUsize::new(0),
        })
    }

    pub(super) fn parts(&self) -> MutexGuard<'_, Parts> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn has_pending(&self) -> bool {
        self.block_count.load(Ordering::Acquire) > 0
    }

    pub(super) fn holds_data(&self) -> bool {
        let parts = self.parts();
        !parts.windows.is_empty() || !parts.blocks.is_empty()
    }

    /// Before a call that sees or changes all of the file: nothing is pending then.
    pub(super) async fn before_change(self: &Arc<Self>) {
        self.settle_all().await;
        self.forget_all();
    }

    /// Behind a call that has changed the file in a way that is not known.
    pub(super) fn after_change(&self) {
        self.forget_all();
    }

    /// Attributes may be set that a write has to clear.
    pub(super) fn attributes_change(&self) {
        self.parts().privileges_cleared = false;
    }

    pub(super) fn cursor_at_open(&self) -> ErrorCursor {
        self.parts().errors.cursor_at_open()
    }

    /// Writes what is pending. Errors: that of a late write behind `cursor`.
    pub(super) async fn settle_and_report(self: &Arc<Self>, cursor: &ErrorCursor) -> Result<()> {
        self.settle_all().await;
        self.parts().errors.at_sync(cursor)
    }

    /// Waits for the next change of windows or blocks, unless `is_over` holds.
    pub(super) async fn wait_until(&self, mut is_over: impl FnMut(&Parts) -> bool) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable(); // before the look: no change is missed
            if is_over(&self.parts()) {
                return;
            }
            changed.await;
        }
    }
}

impl Drop for AggregatedFileState {
    fn drop(&mut self) {
        self.core.ended(self.id);
    }
}

/// Whether something of this time is older than `age_max`.
pub(super) fn is_older(since: Instant, age_max: Duration) -> bool {
    since.elapsed() >= age_max
}
