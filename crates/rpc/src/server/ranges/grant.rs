//! A grant of ranges of a file, released when dropped.

use std::sync::Arc;

use dray_core::FileId;

use super::queue::Arrival;
use super::{RangeTable, Span};

/// A change that is under way, the bytes that it writes, and its stamp. Before these are granted,
/// it has places in the queues for them.
pub(crate) struct RangeGrant {
    table: Arc<RangeTable>,
    file: FileId,
    change: Option<Arrival>,
    /// A server that died had begun it.
    cut: bool,
    data: Option<Arrival>,
    stamp: Option<u64>,
}

impl RangeGrant {
    fn new(
        table: &Arc<RangeTable>,
        file: FileId,
        change: Option<Arrival>,
        cut: bool,
    ) -> RangeGrant {
        RangeGrant { table: table.clone(), file, change, cut, data: None, stamp: None }
    }

    pub(super) fn of_change(table: &Arc<RangeTable>, file: FileId, change: Arrival) -> RangeGrant {
        RangeGrant::new(table, file, Some(change), false)
    }

    pub(super) fn of_cut(table: &Arc<RangeTable>, file: FileId, change: Arrival) -> RangeGrant {
        RangeGrant::new(table, file, Some(change), true)
    }

    pub(super) fn of_write(table: &Arc<RangeTable>, file: FileId) -> RangeGrant {
        RangeGrant::new(table, file, None, false)
    }

    /// The file or directory.
    pub(crate) fn file(&self) -> FileId {
        self.file
    }

    /// The stamp of the change, once it has the bytes that it writes.
    pub(crate) fn stamp(&self) -> Option<u64> {
        self.stamp
    }

    /// Waits until nobody else reads or writes these bytes, and takes a stamp. To be called once,
    /// behind everything else that the change waits for: readers wait from now on.
    pub(crate) async fn write(&mut self, span: Span) {
        debug_assert!(self.data.is_none(), "a change has all of its bytes at once");
        let (arrival, stamp) = self.table.enter_write(self.file, span);
        self.data = Some(arrival); // whatever becomes of the wait
        self.stamp = Some(match stamp {
            Some(stamp) => stamp,
            None => self.table.wait_to_write(self.file, arrival).await,
        });
    }
}

impl Drop for RangeGrant {
    fn drop(&mut self) {
        if self.cut {
            self.table.one_cut_less();
        }
        self.table.release(self.file, self.change, self.data);
    }
}

/// Bytes that are being read, or a place in the queue for them.
pub(crate) struct ReadGrant<'a> {
    pub(super) table: &'a RangeTable,
    pub(super) file: FileId,
    pub(super) arrival: Arrival,
}

impl Drop for ReadGrant<'_> {
    fn drop(&mut self) {
        self.table.release(self.file, None, Some(self.arrival));
    }
}
