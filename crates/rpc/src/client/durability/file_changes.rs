//! The unsynced changes of one file.

use std::collections::VecDeque;
use std::sync::Arc;

use dray_core::{Attr, Buf, Identity, SetAttr, TimeSet};

use super::{Change, ChangeStamp, Ticket};

/// The cost of a kept change beside its data, bytes.
pub(super) const CHANGE_BYTES: u64 = 160;

/// A change that can be repeated.
#[derive(Clone)]
pub(crate) struct KeptChange {
    pub(super) stamp: ChangeStamp,
    pub(crate) change: Change,
    pub(crate) data: Option<Buf>,
    pub(crate) who: Arc<Identity>,
    /// The change was synced as it was made.
    pub(super) is_durable: bool,
    /// The last replay in which it was sent.
    pub(super) replayed_in: u64,
}

impl KeptChange {
    /// The place of the change in the server's order.
    pub(crate) fn number(&self) -> u64 {
        self.stamp.number
    }

    pub(super) fn data_bytes(&self) -> u64 {
        self.data.as_deref().map_or(0, <[u8]>::len) as u64
    }

    fn cost_bytes(&self) -> u64 {
        self.data_bytes() + CHANGE_BYTES
    }
}

/// The log's knowledge of one file.
#[derive(Default)]
pub(super) struct FileChanges {
    /// In the order of their stamps.
    pub(super) kept: VecDeque<KeptChange>,
    /// The cost of the kept changes.
    pub(super) kept_bytes: u64,
    /// The last change that was not kept, and bytes of all such.
    pub(super) unkept: Option<ChangeStamp>,
    pub(super) unkept_bytes: u64,
    /// There was no room for one of them.
    pub(super) overflowed: bool,
    /// Opens the file for writing; for reading, where no better ticket was given.
    pub(super) ticket: Option<Ticket>,
    /// A name of the file has been removed or given to another file.
    pub(super) removed: bool,
    /// Open files through which it was changed.
    pub(super) writers: u32,
    /// Number of the loss that these are to report; 0: none.
    pub(super) loss: u64,
}

impl FileChanges {
    /// Remembers the ticket that allows more.
    pub(super) fn add_ticket(&mut self, ticket: Option<Ticket>) {
        let writes = |ticket: Ticket| ticket.access() & Ticket::WRITE != 0;
        if !self.ticket.is_some_and(writes) {
            self.ticket = ticket.or(self.ticket);
        }
    }

    /// Keeps a change. Answers what it costs, bytes.
    pub(super) fn keep(&mut self, kept: KeptChange) -> u64 {
        let cost_bytes = kept.cost_bytes();
        let later = self.kept.iter().rev().take_while(|one| one.number() > kept.number());
        let index = self.kept.len() - later.count();
        self.kept.insert(index, kept);
        self.kept_bytes += cost_bytes;
        cost_bytes
    }

    /// Notes a change of so many bytes that is not kept.
    pub(super) fn note(&mut self, stamp: ChangeStamp, bytes: u64, overflowed: bool) {
        self.unkept = Some(stamp);
        self.unkept_bytes += bytes;
        self.overflowed |= overflowed;
    }

    /// Everything up to stamp `durable` is on media and forgotten. Answers the bytes freed.
    pub(super) fn forget(&mut self, durable: u64) -> u64 {
        let mut freed_bytes = 0;
        while self.kept.front().is_some_and(|kept| kept.number() <= durable) {
            freed_bytes += self.kept.pop_front().map_or(0, |kept| kept.cost_bytes());
        }
        self.kept_bytes -= freed_bytes;
        if self.unkept.is_some_and(|stamp| stamp.number <= durable) {
            (self.unkept, self.unkept_bytes, self.overflowed) = (None, 0, false);
        }
        freed_bytes
    }

    /// Forgets the changes that were synced as they were made. A later durable change is not
    /// kept, and a replay must not repeat an older one over it. Answers the bytes freed.
    pub(super) fn forget_durable(&mut self) -> u64 {
        let mut freed_bytes = 0;
        self.kept.retain(|kept| {
            freed_bytes += if kept.is_durable { kept.cost_bytes() } else { 0 };
            !kept.is_durable
        });
        self.kept_bytes -= freed_bytes;
        freed_bytes
    }

    /// The changes that were not kept are lost. With `kept_too`, so are the kept ones from before
    /// `power_epoch`. Answers the bytes of data, and what is freed.
    pub(super) fn lose(&mut self, power_epoch: u64, kept_too: bool) -> (u64, u64) {
        let mut lost_bytes = std::mem::take(&mut self.unkept_bytes);
        (self.unkept, self.overflowed) = (None, false);
        let mut freed_bytes = 0;
        self.kept.retain(|kept| {
            let lost = kept_too && kept.stamp.is_before(power_epoch);
            if lost {
                lost_bytes += kept.data_bytes();
                freed_bytes += kept.cost_bytes();
            }
            !lost
        });
        self.kept_bytes -= freed_bytes;
        (lost_bytes, freed_bytes)
    }

    /// Data that may not be on media.
    pub(super) fn unsynced_bytes(&self) -> u64 {
        self.unkept_bytes + self.kept.iter().map(KeptChange::data_bytes).sum::<u64>()
    }

    /// Whether every change of the file is on media.
    pub(super) fn is_clean(&self) -> bool {
        self.kept.is_empty() && self.unkept.is_none()
    }

    /// Whether nothing of the file has to be remembered.
    pub(super) fn is_done(&self) -> bool {
        self.is_clean() && self.writers == 0 && self.loss == 0
    }
}

/// The changes that a call of setattr made, in a form that can be repeated later. For "now" they
/// have the time that the file was given.
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
