//! Write leases: who has that of a file may keep what it writes (ADR 0053).
//!
//! A call of another session waits before it is carried out, if it names such a file by its id or as an open one. Where
//! a name leads to it, that is known behind the call only: then the answer is made anew.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dray_core::{Attr, DirPage, FileId, LeaseKinds};
use dray_rt::now;

use super::change::LeaseWaits;
use super::file_leases::FileLeases;
use super::holder::LeaseHolder;
use super::marks::{FinishedChanges, MarkRow, Part};
use super::recalls::{FileBreaks, Recalls};
use super::table::{Lease, LeaseSince, LeaseTable, Shard, rest_of};
use crate::wire::WriteBase;

/// The state of changes before a call is carried out whose answer shows files.
#[derive(Clone, Copy)]
pub(crate) struct ShownFiles(FinishedChanges);

impl LeaseTable {
    /// Whether there are write leases at all.
    pub(crate) fn leases_writes(&self) -> bool {
        self.leases_writes
    }

    /// Whether any session has a write lease now.
    pub(crate) fn has_writers(&self) -> bool {
        self.written.load(Ordering::SeqCst) > 0
    }

    pub(super) fn count_written(&self, who: &LeaseHolder, before: LeaseKinds, after: LeaseKinds) {
        let [before, after] = [before, after].map(|kinds| kinds.contains(LeaseKinds::WRITE));
        for count in [&self.written, &who.written] {
            match (before, after) {
                (false, true) => _ = count.fetch_add(1, Ordering::SeqCst),
                (true, false) => _ = count.fetch_sub(1, Ordering::SeqCst),
                (true, true) | (false, false) => {}
            }
        }
    }

    /// Gives the write lease of a file that was opened. `own`: the places that the call has marked itself. None:
    /// somebody else has any lease of it, or it is fought over.
    pub(super) fn lease_writing(
        &self,
        who: &Arc<LeaseHolder>,
        since: LeaseSince,
        own: &[MarkRow],
        id: FileId,
    ) -> Option<u64> {
        let (mut shard, place) = self.shard(id);
        if !self.leases_writes || shard.rests[rest_of(LeaseKinds::WRITE)][place].rests(now()) {
            return None;
        }
        let row = self.marks.row(Part::Attributes(id));
        if !self.marks.is_unchanged(row, since.changes, own.contains(&row)) {
            return None;
        }
        let has_it = own_lease(&mut shard, who, id)
            .is_some_and(|own| own.epoch == since.epoch && own.kinds.contains(LeaseKinds::WRITE));
        let theirs = |lease: &Lease| {
            let is_harmless = self.has_second_writers && lease.kinds.contains(LeaseKinds::WRITE);
            !Arc::ptr_eq(&lease.who, who) && !is_harmless
        };
        if shard.files.get(&id).is_some_and(|leases| leases.iter().any(theirs))
            || !self.hold(&mut shard, who, since.epoch, (id, LeaseKinds::WRITE))
        {
            return None;
        }
        let lease = own_lease(&mut shard, who, id)?;
        if !has_it {
            lease.write_lease = self.next_write_lease.fetch_add(1, Ordering::Relaxed);
        }
        Some(lease.write_lease)
    }

    /// Whether a session has this write lease.
    pub(crate) fn has_write_lease(&self, who: &Arc<LeaseHolder>, id: FileId, number: u64) -> bool {
        let (mut shard, _) = self.shard(id);
        own_lease(&mut shard, who, id).is_some_and(|lease| {
            let is_there = lease.kinds.contains(LeaseKinds::WRITE) && lease.write_lease == number;
            is_there && lease.epoch == who.epoch()
        })
    }

    /// A session gives its write lease back.
    pub(crate) fn end_writing(&self, who: &Arc<LeaseHolder>, id: FileId, number: u64) {
        let (mut shard, _) = self.shard(id);
        self.take(&mut shard, who, id, |lease| {
            if lease.write_lease == number {
                lease.kinds = lease.kinds.without(LeaseKinds::WRITE);
            }
        });
    }

    /// Whether what is written without its lease may still be written: nobody has changed the file.
    pub(crate) fn is_base(&self, base: &WriteBase, attr: &Attr) -> bool {
        self.ignores_base || *base == WriteBase::of(attr)
    }

    /// Whether another session than `who` may have data of the file that nobody has seen.
    pub(super) fn is_written_by_other(
        &self,
        shard: &Shard,
        who: Option<&Arc<LeaseHolder>>,
        id: FileId,
    ) -> bool {
        if !self.has_writers() {
            return false; // nearly always
        }
        let writer = shard.files.get(&id).and_then(FileLeases::writer);
        writer.is_some_and(|lease| who.is_none_or(|who| !Arc::ptr_eq(&lease.who, who)))
    }

    /// Asks others for what they have written of these files. None: nothing.
    pub(crate) fn recall_writes(
        self: &Arc<Self>,
        who: Option<&Arc<LeaseHolder>>,
        files: impl IntoIterator<Item = FileId>,
    ) -> Option<LeaseWaits> {
        if !self.has_writers() || self.never_recalls_writes || self.has_second_writers {
            return None; // nearly always
        }
        let mut recalls = Recalls::default();
        for id in files {
            let broken = FileBreaks { id, kinds: LeaseKinds::WRITE, name: None };
            self.collect(who, &broken, &mut recalls);
        }
        LeaseWaits::send(self, who, recalls)
    }

    /// To be asked before a call whose answer shows files.
    pub(crate) fn shows(&self) -> ShownFiles {
        ShownFiles(self.marks.now())
    }

    /// Whether the answer to a call may show a file as it was before. Another session may keep writes to it, or has
    /// changed it since the call began.
    pub(crate) fn is_shown_anew(
        &self,
        who: Option<&Arc<LeaseHolder>>,
        ShownFiles(since): ShownFiles,
        id: FileId,
    ) -> bool {
        if !self.leases_writes || self.never_recalls_writes {
            return false;
        }
        let row = self.marks.row(Part::Attributes(id));
        let (shard, _) = self.shard(id);
        self.is_written_by_other(&shard, who, id) || !self.marks.is_unchanged(row, since, false)
    }

    /// Takes attributes out of a page of a listing that may not be shown. They are asked for one by one.
    pub(crate) fn hide_written(
        &self,
        who: Option<&Arc<LeaseHolder>>,
        since: ShownFiles,
        page: &mut DirPage,
    ) {
        for index in 0..page.len() {
            let Some((_, entry)) = page.get(index) else { continue };
            if entry.attr.is_some() && self.is_shown_anew(who, since, entry.id) {
                page.set_attr(index, None);
            }
        }
    }
}

fn own_lease<'a>(
    shard: &'a mut Shard,
    who: &Arc<LeaseHolder>,
    id: FileId,
) -> Option<&'a mut Lease> {
    shard.files.get_mut(&id)?.of(who)
}
