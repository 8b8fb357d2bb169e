//! Writes that are merged, and the late writes of what was merged.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dray_core::Write;
use dray_core::{
    Buf, BufMut, Context, Errno, Error, Fate, Identity, OpenFile, Reservation, Result,
};
use dray_rt::Instant;

use super::BLOCK_BYTES;
use super::core::later;
use super::extents::{BlockExtent, Extents};
use super::figures::{add, take};
use super::file_state::{AggregatedFileState, Parts, is_older};
use super::store::SlotLease;

/// Larger writes gain little.
pub(super) const WRITE_MAX_BYTES: usize = BLOCK_BYTES / 4;

/// Writes behind this offset are passed on as they are: file systems have limits there, and an error
/// should not come late. (ext4 with blocks of 1 KiB: 4 TiB.)
pub(super) const OFFSET_MAX: u64 = 1 << 40;

/// Late writes of one file that run beside its writers. A further block is written by its writer.
const LATE_AT_ONCE: usize = 4;

/// Tries of a late write that says that it may be tried again.
const TRIES: usize = 3;

/// Pending data of one block of a file.
pub(super) struct Block {
    serial: u64,
    lease: Arc<SlotLease>,
    extents: Extents,
    /// The caller that wrote last, and through which open file: both have the right to write.
    cx: Context,
    file: Arc<dyn OpenFile>,
    kill_set_id: bool,
    /// The block is being written, and takes no more data.
    settling: bool,
    since: Instant,
    _place: Reservation,
}

/// A write that is to be merged.
pub(super) struct SmallWrite<'a> {
    pub(super) cx: &'a Context,
    pub(super) file: &'a Arc<dyn OpenFile>,
    pub(super) how: Write,
    pub(super) data: &'a Buf,
}

/// A part of a write that lies in one block.
#[derive(Clone, Copy)]
struct Piece {
    block: u64,
    extent: BlockExtent,
    /// Where it begins in the data.
    from: usize,
}

/// What came of the try to add a piece to its block.
enum Added {
    Done {
        is_whole: bool,
    },
    /// The block has to be written first.
    SettleFirst,
    /// All slots are in use, or the client has its share of them.
    NoRoom,
}

impl AggregatedFileState {
    /// Merges a write. False: it has to be passed on, after what is pending of its bytes.
    pub(super) async fn merge(self: &Arc<Self>, write: &SmallWrite<'_>) -> bool {
        if !self.core.merges() {
            return false;
        }
        for piece in pieces(write.how.at, write.data.len()) {
            loop {
                match self.add(write, piece) {
                    Added::Done { is_whole: true } => self.settle_whole(piece.block).await,
                    Added::Done { is_whole: false } => {}
                    Added::SettleFirst => {
                        self.settle(piece.block).await;
                        continue;
                    }
                    Added::NoRoom => return false,
                }
                break;
            }
        }
        let figures = &self.core.figures;
        add(&figures.writes_merged, 1);
        add(&figures.merged_bytes, write.data.len() as u64);
        true
    }

    fn add(self: &Arc<Self>, write: &SmallWrite<'_>, piece: Piece) -> Added {
        let mut parts = self.parts();
        if !parts.blocks.contains_key(&piece.block) {
            match self.begin_block(&mut parts, write, piece.block) {
                Some(block) => _ = parts.blocks.insert(piece.block, block),
                None => return Added::NoRoom,
            }
            if self.block_count.fetch_add(1, Ordering::AcqRel) == 0 {
                self.core.pending_files.fetch_add(1, Ordering::AcqRel);
            }
        }
        let Some(block) = parts.blocks.get_mut(&piece.block) else { return Added::NoRoom };
        let fits = !block.settling
            && block.kill_set_id == write.how.kill_set_id
            && is_same_caller(&block.cx.who, &write.cx.who);
        let Some(extents) = block.extents.with(piece.extent).filter(|_| fits) else {
            return Added::SettleFirst;
        };
        let bytes = piece.extent.len_bytes();
        block.lease.write(piece.extent.start, &write.data[piece.from..piece.from + bytes]);
        block.lease.note(&extents);
        add(&self.core.figures.pending_bytes, extents.bytes() - block.extents.bytes());
        block.extents = extents;
        let is_whole = extents.cover(BlockExtent { start: 0, end: BLOCK_BYTES as u32 });
        drop(parts);
        if !self.core.is_tended() {
            self.core.activate(self);
        }
        Added::Done { is_whole }
    }

    fn begin_block(
        self: &Arc<Self>,
        parts: &mut Parts,
        write: &SmallWrite<'_>,
        number: u64,
    ) -> Option<Block> {
        let store = self.core.store.as_ref()?;
        let _place = self.core.blocks.take(write.cx.taker()).ok()?;
        let lease = store.lease()?;
        lease.begin(self.id, number, write.how.kill_set_id);
        self.core.activate(self);
        parts.serial += 1;
        Some(Block {
            serial: parts.serial,
            lease,
            extents: Extents::default(),
            cx: later(write.cx),
            file: write.file.clone(),
            kill_set_id: write.how.kill_set_id,
            settling: false,
            since: dray_rt::now(),
            _place,
        })
    }

    /// Writes a block that is full: beside its writer, unless that is far ahead of the disk.
    async fn settle_whole(self: &Arc<Self>, number: u64) {
        let busy = self.parts().blocks.values().filter(|block| block.settling).count();
        if busy >= LATE_AT_ONCE {
            return self.settle(number).await;
        }
        let state = self.clone();
        dray_rt::spawn(async move { state.settle(number).await });
    }

    /// The bytes of a read if all of them are pending. Then no more is asked of the file system below.
    pub(super) fn read_pending(&self, at: u64, into: &mut BufMut) -> bool {
        let pieces = pieces(at, into.room());
        let parts = self.parts();
        let found = pieces.clone().all(|piece| {
            parts.blocks.get(&piece.block).is_some_and(|block| block.extents.cover(piece.extent))
        });
        if found {
            for piece in pieces {
                if let Some(block) = parts.blocks.get(&piece.block) {
                    into.put(block.lease.bytes(piece.extent));
                }
            }
        }
        found
    }

    /// Writes the blocks that have pending data of these bytes, and waits for those that are being
    /// written.
    pub(super) async fn settle_range(self: &Arc<Self>, at: u64, len_bytes: usize) {
        if !self.has_pending() {
            return;
        }
        for piece in pieces(at, len_bytes) {
            let overlaps = self
                .parts()
                .blocks
                .get(&piece.block)
                .is_some_and(|block| block.extents.overlap(piece.extent));
            if overlaps {
                self.settle(piece.block).await;
            }
        }
    }

    /// The same for all that is pending now.
    pub(super) async fn settle_all(self: &Arc<Self>) {
        if !self.has_pending() {
            return;
        }
        let numbers: Vec<u64> = self.parts().blocks.keys().copied().collect();
        for number in numbers {
            self.settle(number).await;
        }
    }

    pub(super) async fn settle_older(self: &Arc<Self>, age_max: Duration) {
        let old =
            |(number, block): (&u64, &Block)| is_older(block.since, age_max).then_some(*number);
        let numbers: Vec<u64> = self.parts().blocks.iter().filter_map(old).collect();
        for number in numbers {
            self.settle(number).await;
        }
    }

    /// Writes one block, or waits for who does.
    async fn settle(self: &Arc<Self>, number: u64) {
        let Some(serial) = self.parts().blocks.get(&number).map(|block| block.serial) else {
            return;
        };
        let is_there =
            |parts: &Parts| parts.blocks.get(&number).is_some_and(|block| block.serial == serial);
        loop {
            if let Some(late) = self.begin_settling(number, serial) {
                let settling = Settling { state: self, number, serial };
                let outcome = late.write(self).await;
                self.settled(number, &late, outcome);
                drop(settling);
                return;
            }
            self.wait_until(|parts| {
                parts
                    .blocks
                    .get(&number)
                    .is_none_or(|block| block.serial != serial || !block.settling)
            })
            .await;
            if !is_there(&self.parts()) {
                return;
            }
        }
    }

    /// None: somebody else is at it, or it is gone.
    fn begin_settling(&self, number: u64, serial: u64) -> Option<LateWrite> {
        let mut parts = self.parts();
        let block = parts.blocks.get_mut(&number)?;
        if block.settling || block.serial != serial {
            return None;
        }
        block.settling = true;
        Some(LateWrite {
            at: number * BLOCK_BYTES as u64,
            lease: block.lease.clone(),
            extents: block.extents,
            cx: block.cx.clone(),
            file: block.file.clone(),
            kill_set_id: block.kill_set_id,
        })
    }

    /// A block has been written, or could not be. Errors are reported to those who have the file open.
    fn settled(&self, number: u64, late: &LateWrite, outcome: Result<()>) {
        let mut parts = self.parts();
        if let Err(error) = outcome {
            if self.core.is_lost() {
                late.lease.keep(); // the next opening of the export writes it
            } else {
                add(&self.core.figures.late_errors, 1);
                log::error!(
                    "a late write of {} bytes at {} of inode {} failed, and its data are lost: {error}",
                    late.extents.bytes(),
                    late.at,
                    self.id.ino
                );
            }
            parts.errors.note(error.errno());
            self.core.failed(error.errno());
        }
        if !late.lease.is_kept() {
            late.lease.clear();
        }
        take(&self.core.figures.pending_bytes, late.extents.bytes());
        parts.blocks.remove(&number);
        drop(parts);
        if self.block_count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.core.pending_files.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// The write of a block.
pub(super) struct LateWrite {
    /// Where the block begins in the file.
    pub(super) at: u64,
    pub(super) lease: Arc<SlotLease>,
    pub(super) extents: Extents,
    pub(super) cx: Context,
    pub(super) file: Arc<dyn OpenFile>,
    pub(super) kill_set_id: bool,
}

impl LateWrite {
    async fn write(&self, state: &AggregatedFileState) -> Result<()> {
        for extent in self.extents.iter() {
            let (start, end) = (self.at + u64::from(extent.start), self.at + u64::from(extent.end));
            state.forget(start, end);
            let written = self.write_extent(extent, |bytes| {
                add(&state.core.figures.late_requests, 1);
                add(&state.core.figures.late_bytes, bytes as u64);
            });
            let written = written.await;
            state.forget(start, end);
            written?;
        }
        Ok(())
    }

    /// Writes all of an extent. `count` hears of each request. Errors: those of the file system below.
    pub(super) async fn write_extent(
        &self,
        extent: BlockExtent,
        mut count: impl FnMut(usize),
    ) -> Result<()> {
        let data = self.lease.buf(extent);
        let (mut done, mut tries) = (0, 0);
        while done < data.len() {
            let at = self.at + u64::from(extent.start) + done as u64;
            let how = Write { kill_set_id: self.kill_set_id, ..Write::at(at) };
            match self.file.write(&self.cx, how, data.slice(done..data.len())).await {
                Ok(0) => return Err(Error::new(Errno::EIO).because("nothing was written")),
                Ok(bytes) => {
                    count(bytes);
                    done += bytes;
                }
                Err(error) if error.fate() == Fate::Retry && tries < TRIES => tries += 1,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// A block that is being written. If that is given up, the next who needs it writes it.
struct Settling<'a> {
    state: &'a AggregatedFileState,
    number: u64,
    serial: u64,
}

impl Drop for Settling<'_> {
    fn drop(&mut self) {
        let mut parts = self.state.parts();
        if let Some(block) = parts.blocks.get_mut(&self.number)
            && block.serial == self.serial
        {
            block.settling = false;
        }
        drop(parts);
        self.state.changed.notify_waiters();
    }
}

/// Whether a late write for the one is as good as one for the other: quotas and rights decide.
fn is_same_caller(one: &Arc<Identity>, other: &Arc<Identity>) -> bool {
    Arc::ptr_eq(one, other)
        || one.uid == other.uid && one.gid == other.gid && one.groups == other.groups
}

fn pieces(at: u64, len_bytes: usize) -> impl Iterator<Item = Piece> + Clone {
    let block_bytes = BLOCK_BYTES as u64;
    let end = at.saturating_add(len_bytes as u64);
    let blocks = match at < end {
        true => at / block_bytes..end.div_ceil(block_bytes),
        false => 0..0,
    };
    blocks.map(move |block| {
        let begin = block * block_bytes;
        let (start, stop) = (at.max(begin), end.min(begin.saturating_add(block_bytes)));
        let extent = BlockExtent { start: (start - begin) as u32, end: (stop - begin) as u32 };
        Piece { block, extent, from: (start - at) as usize }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_is_cut_at_blocks() {
        let of = |at, len_bytes| -> Vec<_> {
            let one =
                |piece: Piece| (piece.block, piece.extent.start, piece.extent.end, piece.from);
            pieces(at, len_bytes).map(one).collect()
        };
        let block = BLOCK_BYTES as u32;
        assert_eq!(of(0, 4096), [(0, 0, 4096, 0)]);
        let end = u64::from(block);
        assert_eq!(of(end - 1, 3), [(0, block - 1, block, 0), (1, 0, 2, 1)]);
        assert_eq!(of(end, BLOCK_BYTES), [(1, 0, block, 0)]);
        assert!(of(5, 0).is_empty());
        assert!(of(u64::MAX, 10).len() <= 1);
    }
}
