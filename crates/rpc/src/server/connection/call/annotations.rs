//! What a call's answer says beside its results. It is the stamp of a change, the version that a read saw,
//! the attributes of changed files, and what is leased.

use dray_core::{Attr, Buf, FileId};

use super::CallInHand;
use crate::server::execute::{self, Files};
use crate::server::leases::{ChangedFiles, LeaseChange, LeaseGrants, LeaseSince, SaidAbove};
use crate::server::ranges::Span;
use crate::server::reply::Reply;
use crate::server::sabotage::Sabotage;
use crate::wire::{Call, CallHead, CallRow, Changes, OpRow, Stamp};

/// The file whose data or attributes a call has changed.
fn changed_file((row, files): (&CallRow<'_>, &Files), reply: &Reply) -> Option<FileId> {
    match row.changes {
        Changes::Attributes(file) | Changes::Data(file, _) => files.id(file).ok(),
        // The file that was changed by its name. If the file is new, nobody has it open.
        Changes::DataOfReply => reply.file(),
        Changes::Nothing | Changes::Names | Changes::Leases | Changes::Redone => None,
    }
}

impl CallInHand {
    /// Says in an answer what is leased with it.
    pub(super) fn lease(
        &self,
        row: &CallRow<'_>,
        (since, said): (LeaseSince, SaidAbove),
        change: Option<&LeaseChange>,
        reply: &mut Reply,
    ) {
        match self.lease_grants(since, change) {
            Some(grants) => {
                let grants = grants.leased_above(said);
                grants.answer(&self.session, (OpRow::of(self.head.op), row), reply);
            }
            None => reply.changed_files_mut().clear(), // they are of use under leases alone
        }
    }

    /// Takes out of a reply what servers above have leased with it, if the export is forwarded.
    pub(super) fn said_above(&self, reply: &mut Reply) -> SaidAbove {
        match self.session.export.upper_leases {
            Some(_) => SaidAbove::take(reply),
            None => SaidAbove::default(),
        }
    }

    /// None: nothing is leased to the session now.
    fn lease_grants<'a>(
        &'a self,
        since: LeaseSince,
        change: Option<&'a LeaseChange>,
    ) -> Option<LeaseGrants<'a>> {
        let export = &self.session.export;
        let table = export.lease_table.as_ref().filter(|_| !export.recovery.running())?;
        Some(LeaseGrants::new(table, self.session.lease_holder()?, since, change))
    }

    /// The attributes of what it has changed, as they are now, as far as the answer may have them. They are
    /// looked at before others may change them.
    pub(super) async fn changed_files(
        &self,
        (row, files): (&CallRow<'_>, &Files),
        since: Option<LeaseSince>,
        change: Option<&LeaseChange>,
    ) -> Vec<(FileId, Attr)> {
        let wanted = ChangedFiles::of(&self.session, (row, files), self.head.flags);
        let grants = since.and_then(|since| self.lease_grants(since, change));
        match wanted.zip(grants) {
            // In a box, so that other calls are no larger.
            Some((wanted, grants)) => {
                Box::pin(grants.attributes_of(&self.session, &self.cx, wanted)).await
            }
            None => Vec::new(),
        }
    }

    /// The version of the file that one part of a split read sees, as long as nobody changes the file.
    pub(super) fn split_read_version(&self, call: &Call<'_>) -> Option<u64> {
        if self.head.flags & CallHead::SPLIT_READ == 0 {
            return None; // nearly always: before anything is looked for
        }
        let Call::Read { handle, at, len_bytes } = *call else { return None };
        let file = self.session.file(handle)?;
        let span = Span::bytes(at, u64::from(len_bytes));
        if self.server.options.broken().is(Sabotage::SplitReads) {
            return Some(1);
        }
        self.session.export.ranges.version(file.id(), span)
    }

    /// The file whose data or attributes this has changed, if a session watches any file.
    fn watched_file(&self, (row, files): (&CallRow<'_>, &Files), reply: &Reply) -> Option<FileId> {
        if self.session.export.watchers.is_empty() {
            return None;
        }
        changed_file((row, files), reply)
    }

    /// Notes a change that was made again as it was begun, while it has its bytes. It had not to wait for
    /// others that a server before us began.
    pub(super) fn note_made_again(
        &self,
        call: &Call<'_>,
        data: Buf,
        about: (&CallRow<'_>, &Files),
        reply: &Reply,
    ) {
        let Some(stamp) = reply.stamped().cloned().filter(|_| reply.is_success()) else { return };
        if let Some(file) = changed_file(about, reply) {
            execute::note_made_again(&self.session, call, data, (file, stamp));
        }
    }

    /// Puts the stamp of a change that was made into its answer. `at`: where an append went, bytes.
    pub(super) fn stamp(
        &self,
        reply: &mut Reply,
        stamp: Option<u64>,
        (row, files): (&CallRow<'_>, &Files),
        at: Option<u64>,
    ) {
        if !reply.is_success() {
            return;
        }
        let number = stamp.unwrap_or_else(|| self.session.export.ranges.stamps.next());
        self.session.changed(number);
        if let Some(file) = self.watched_file((row, files), reply) {
            self.server.notify_change(&self.session, file);
        }
        if !self.session.stamps() {
            return;
        }
        let at = at.or(row.changes.written_at()).unwrap_or(Stamp::NOWHERE);
        reply.stamp(Stamp { number, at });
    }
}
