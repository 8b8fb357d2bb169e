//! What was changed in one file.

use std::collections::VecDeque;
use std::sync::Arc;

use dray_core::{Attr, Buf, Identity, SetAttr, TimeSet};

use super::Moment;
use crate::wire::{Change, Ticket};

/// What a kept change costs beside its data, bytes.
pub(super) const CHANGE_BYTES: u64 = 160;

/// A change that can be made again.
#[derive(Clone)]
pub(crate) struct Kept {
    pub(crate) stamp: u64,
    pub(super) epoch: u64,
    pub(crate) change: Change,
    pub(crate) data: Option<Buf>,
    pub(crate) who: Arc<Identity>,
    /// It was synced as it was made.
    pub(super) on_media: bool,
    /// The last recovery in which it was sent.
    pub(super) sent: u64,
}

impl Kept {
    pub(super) fn data_bytes(&self) -> u64 {
        self.data.as_deref().map_or(0, <[u8]>::len) as u64
    }

    fn cost_bytes(&self) -> u64 {
        self.data_bytes() + CHANGE_BYTES
    }
}

#[derive(Default)]
pub(super) struct OfFile {
    /// In the order of their stamps.
    pub(super) changes: VecDeque<Kept>,
    /// What they cost.
    pub(super) kept_bytes: u64,
    /// The last change that was not kept, and bytes of all such.
    pub(super) unkept: Option<Moment>,
    pub(super) unkept_bytes: u64,
    /// There was no room for one of them.
    pub(super) overflowed: bool,
    /// With which it can be opened for writing; for reading, where that was all.
    pub(super) ticket: Option<Ticket>,
    /// A name of it has been removed or given to another file.
    pub(super) removed: bool,
    /// Open files through which it was changed.
    pub(super) writers: u32,
    /// Number of the loss that these are to be told of; 0: none.
    pub(super) lost: u64,
}

impl OfFile {
    /// The more it is good for the better.
    pub(super) fn has_ticket(&mut self, ticket: Option<Ticket>) {
        let writes = |ticket: Ticket| ticket.access() & Ticket::WRITE != 0;
        if !self.ticket.is_some_and(writes) {
            self.ticket = ticket.or(self.ticket);
        }
    }

    /// Keeps a change; answers what that costs, bytes.
    pub(super) fn keep(&mut self, kept: Kept) -> u64 {
        let cost_bytes = kept.cost_bytes();
        let behind = self.changes.iter().rev().take_while(|one| one.stamp > kept.stamp);
        let place = self.changes.len() - behind.count();
        self.changes.insert(place, kept);
        self.kept_bytes += cost_bytes;
        cost_bytes
    }

    /// Notes a change of so many bytes that is not kept.
    pub(super) fn note(&mut self, at: Moment, bytes: u64, overflowed: bool) {
        self.unkept = Some(at);
        self.unkept_bytes += bytes;
        self.overflowed |= overflowed;
    }

    /// Forgets what is on media; answers how many bytes that frees.
    pub(super) fn forget(&mut self, upto: u64) -> u64 {
        let mut freed_bytes = 0;
        while self.changes.front().is_some_and(|kept| kept.stamp <= upto) {
            freed_bytes += self.changes.pop_front().map_or(0, |kept| kept.cost_bytes());
        }
        self.kept_bytes -= freed_bytes;
        if self.unkept.is_some_and(|at| at.stamp <= upto) {
            (self.unkept, self.unkept_bytes, self.overflowed) = (None, 0, false);
        }
        freed_bytes
    }

    /// Forgets what was synced as it was made, since a later change of that kind is not kept, over which
    /// it must not be made again; answers how many bytes that frees.
    pub(super) fn forget_on_media(&mut self) -> u64 {
        let mut freed_bytes = 0;
        self.changes.retain(|kept| {
            freed_bytes += if kept.on_media { kept.cost_bytes() } else { 0 };
            !kept.on_media
        });
        self.kept_bytes -= freed_bytes;
        freed_bytes
    }

    /// What was not kept is lost, and, if `kept_too`, what was kept before the life `epoch`
    /// of the server's machine. Answers the bytes of data, and what is freed.
    pub(super) fn lose(&mut self, epoch: u64, kept_too: bool) -> (u64, u64) {
        let mut lost_bytes = std::mem::take(&mut self.unkept_bytes);
        (self.unkept, self.overflowed) = (None, false);
        let mut freed_bytes = 0;
        self.changes.retain(|kept| {
            let old = kept_too && kept.epoch < epoch;
            if old {
                lost_bytes += kept.data_bytes();
                freed_bytes += kept.cost_bytes();
            }
            !old
        });
        self.kept_bytes -= freed_bytes;
        (lost_bytes, freed_bytes)
    }

    /// Data that may not be on media.
    pub(super) fn unsynced_bytes(&self) -> u64 {
        self.unkept_bytes + self.changes.iter().map(Kept::data_bytes).sum::<u64>()
    }

    pub(super) fn is_clean(&self) -> bool {
        self.changes.is_empty() && self.unkept.is_none()
    }

    pub(super) fn is_done(&self) -> bool {
        self.is_clean() && self.writers == 0 && self.lost == 0
    }
}

/// The changes that a call of setattr made, so that they can be made again later: `now` is
/// the time that it was then.
pub(crate) fn changes_of(set: SetAttr, attr: &Attr) -> impl Iterator<Item = Change> {
    let at = |time: TimeSet, then| match time {
        TimeSet::Now => TimeSet::At(then),
        time => time,
    };
    let rest = SetAttr {
        size: None,
        kill_set_id: false,
        atime: set.atime.map(|time| at(time, attr.atime)),
        mtime: set.mtime.map(|time| at(time, attr.mtime)),
        ..set
    };
    let size = set.size.map(|size| Change::Size { size });
    let rest = (rest != SetAttr::default()).then_some(Change::Attr(rest));
    size.into_iter().chain(rest)
}
