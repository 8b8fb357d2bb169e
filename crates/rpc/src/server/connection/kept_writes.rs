//! What clients have written and kept under write leases, where a call of another client is about it.

use dray_core::{Errno, Error, FileId, Result};

use super::call::CallInHand;
use crate::server::exactly_once::plan;
use crate::server::execute::Files;
use crate::server::leases::{LeaseSince, LeaseWaits, ShownFiles};
use crate::server::reply::Reply;
use crate::wire::{
    Call, CallHead, CallRow, Changes, FileRef, OpRow, Operand, Results, SessionChange,
};

impl CallInHand {
    /// Nobody is shown a file before what clients of the server before have kept is written. A client with a log syncs
    /// what it has written before it writes more, and a sync shows nothing.
    pub(super) fn waits_for_kept_writes(&self, row: &CallRow<'_>) -> bool {
        let restores = OpRow::of(self.head.op).restores_kept_writes
            || row.is_recovery
            || self.head.flags & CallHead::RECOVERY != 0;
        !restores && self.session.export.kept_writes.is_running()
    }

    /// Asks other clients for what they have kept of the files that a call names.
    pub(super) fn recall_writes(&self, row: &CallRow<'_>) -> Option<LeaseWaits> {
        let table = self.session.export.lease_table.as_ref()?;
        // Locks show nothing.
        if row.is_recovery || matches!(row.session, SessionChange::Locks { .. }) {
            return None;
        }
        let opened = match row.session {
            SessionChange::Opens(opening) => opening.file,
            SessionChange::None
            | SessionChange::Reopens(_)
            | SessionChange::Closes(_)
            | SessionChange::Locks { .. } => None,
        };
        let named = |operand: &Operand<'_>| match *operand {
            Operand::Id(id) | Operand::HandleOf(_, id) => Some(id),
            Operand::Handle(handle) => self.session.file(handle).map(|file| file.id()),
            Operand::Name(..) => None,
        };
        let named = row.operands.iter().flatten().filter_map(named);
        table.recall_writes(self.session.lease_holder(), named.chain(opened))
    }

    /// The file that a call cuts by its name, as far as that is known before the call has the directory.
    pub(super) async fn cut_file(&self, row: &CallRow<'_>) -> Option<FileId> {
        let table = self.session.export.lease_table.as_ref()?;
        if row.changes != Changes::DataOfReply || !table.has_writers() {
            return None; // nearly always
        }
        plan::found_by_name(&self.session, &self.cx, row.intent).await
    }

    /// Errors: `EREMCHG`, the client has lost its write lease, and somebody has changed the file. To be asked with the
    /// grant of the file's bytes: a call that changes them waits for it, whatever becomes of the lease.
    pub(super) async fn may_write_back(&self, call: &Call<'_>, files: &Files) -> Result<()> {
        let Call::WriteBack { handle, lease, ref base, .. } = *call else { return Ok(()) };
        let id = files.id(FileRef::Handle(handle))?;
        let refused = || {
            let why = "others have changed the file since its writer lost the write lease";
            Error::new(Errno::EREMCHG).because(why)
        };
        let table = self.session.export.lease_table.as_ref().ok_or_else(refused)?;
        if self.session.lease_holder().is_some_and(|who| table.has_write_lease(who, id, lease)) {
            return Ok(());
        }
        let file = files.get(handle).ok_or_else(|| Error::new(Errno::EBADF))?;
        let attr = file.getattr(&self.cx.uncounted()).await?;
        if table.is_base(base, &attr) { Ok(()) } else { Err(refused()) }
    }

    /// The call was carried out, or refused.
    pub(super) fn writing_ends(&self, call: &Call<'_>) {
        let Call::WriteBack { handle, lease, ends: true, .. } = *call else { return };
        let export = &self.session.export;
        let known = export.lease_table.as_ref().zip(self.session.lease_holder());
        if let Some(((table, who), file)) = known.zip(self.session.file(handle)) {
            table.end_writing(who, file.id(), lease);
        }
    }

    /// Makes an answer anew that shows a file of which another client has kept what it wrote before the call began.
    /// `since` then is when the new one was made.
    pub(super) async fn show_anew(
        &self,
        row: &CallRow<'_>,
        shown: ShownFiles,
        since: &mut Option<LeaseSince>,
        reply: &mut Reply,
    ) {
        let (export, who) = (&self.session.export, self.session.lease_holder());
        let Some(table) = export.lease_table.as_ref().filter(|_| reply.is_success()) else {
            return;
        };
        let id = match reply.results_mut() {
            Results::Entry(entry) if row.changes == Changes::Nothing => entry.id,
            Results::FlaggedEntry((entry, _)) => entry.id,
            Results::Encoded(_)
            | Results::Entry(_)
            | Results::Done(())
            | Results::Attr(_)
            | Results::File(_)
            | Results::Opened(_)
            | Results::Statfs(_)
            | Results::Bytes(_)
            | Results::Number(_)
            | Results::Offset(_)
            | Results::Lock(_)
            | Results::Xflags(_) => return,
        };
        if !table.is_shown_anew(who, shown, id) {
            return;
        }
        if let Some(waits) = table.recall_writes(who, [id]) {
            Box::pin(waits.wait()).await;
        }
        *since = who.map(|who| table.since(who));
        // If it is gone meanwhile, it was there when the call began.
        let Ok(attr) = export.fs.getattr(&self.cx.uncounted(), id).await else { return };
        if let Results::Entry(entry) | Results::FlaggedEntry((entry, _)) = reply.results_mut() {
            entry.attr = attr;
        }
    }
}
