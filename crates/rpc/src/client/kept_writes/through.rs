//! An open file, as what is kept goes through it.

use dray_core::{Attr, Buf, Context, Origin, Result, Write};

use super::{Keep, KeptBatch};
use crate::client::channel::CallAnswer;
use crate::client::file::RemoteFile;
use crate::client::slots::SlotPurpose;
use crate::wire::{Call, Change, WriteBase};

impl RemoteFile {
    /// Keeps a write, if that may be. None: it has to go to the server, and what was kept of the file is there.
    pub(in crate::client) async fn write_kept(
        &self,
        cx: &Context,
        how: Write,
        from: &Buf,
    ) -> Option<Result<usize>> {
        let link = &self.session.link;
        if link.kept.was_noted(link.own_request_of(cx)) {
            return Some(Ok(from.len()));
        }
        let kept = link.kept.find(self.id)?;
        if let Err(failure) = kept.failure() {
            return Some(Err(failure));
        }
        match kept.keep((cx, self), how, from) {
            Keep::Kept => Some(Ok(from.len())),
            Keep::Full => Some(kept.write_back(false).await.map(|()| from.len())),
            Keep::No => {
                let written = kept.write_back(false).await;
                kept.changed_past();
                written.err().map(Err)
            }
        }
    }

    /// Before the file is changed by another call.
    pub(in crate::client) async fn changes_past_kept(&self) {
        self.session.link.kept.changes_past(self.id).await;
    }

    /// Before it is synced. Errors: something that was written is lost.
    pub(in crate::client) async fn settle_kept(&self) -> Result<()> {
        let Some(kept) = self.session.link.kept.find(self.id) else { return Ok(()) };
        kept.write_back(false).await?;
        kept.failure()
    }

    /// Brings what was written to media at the server.
    pub(crate) async fn sync_written(&self, cx: &Context) -> Result<()> {
        let call = Call::Sync { handle: self.handle, data_only: false };
        let ((), made) = self.send(cx, &call, None, (None, None)).await?;
        self.session.link.unsynced.sync_answered(self.id, made.confirmation());
        Ok(())
    }

    /// Sends what was kept of the file. Answers the state of the file behind it.
    pub(crate) async fn write_back(&self, cx: &Context, what: KeptBatch) -> Result<WriteBase> {
        let KeptBatch { request, lease, base, kill_set_id, ends, extents, pieces, data } = what;
        let (handle, extents) = (self.handle, &extents[..]);
        let call = Call::WriteBack { handle, lease, base, kill_set_id, ends, extents };
        // Others may wait for this: it waits for no share of the slots.
        let origin = Origin { node: self.session.link.node, request };
        let takes = Context { internal: true, origin, ..cx.clone() };
        let slot = self.session.take_slot(&takes, SlotPurpose::Data).await?;
        let sent = self.answer(cx, &call, Some(&slot), (Some(data.clone()), None)).await?;
        let CallAnswer::<Attr> { value: attr, made, change: own, .. } = sent;
        self.session.link.leases.set(own, (self.id, attr));
        let mut begin = 0;
        for (at, len_bytes) in pieces {
            let end = begin + len_bytes as usize;
            self.written(cx, made, (Some(Change::Write { at }), &data[begin..end]), false);
            begin = end;
        }
        Ok(WriteBase::of(&attr))
    }
}
