//! What is different with a log on the local disk (ADR 0058): a sync is answered by that disk, and a close at once.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dray_core::{FileId, Result};

use super::KeptWrites;
use super::file::KeptFile;
use crate::client::file::RemoteFile;

/// How many batches were sent so far.
#[derive(Clone, Copy)]
pub(crate) struct SentBatches(u64);

impl KeptFile {
    fn has_unsent(&self) -> bool {
        self.state().writer.is_some()
    }

    /// Brings what is kept of the file to media here. False: the server has to be asked, since it has changes that may
    /// not be on media there, or this disk fails.
    pub(crate) async fn sync_in_log(&self) -> bool {
        let Some(log) = self.store.log() else { return false };
        {
            let mut state = self.state();
            let is_all = state.writer.is_some() && !state.local.is_unsynced_at_server;
            if !is_all || state.lease.is_none() || state.failure.is_some() {
                return false;
            }
            state.local.is_synced = true;
        }
        log.sync().await.is_ok() && self.state().failure.is_none()
    }

    /// Everything is at the server, which is asked to bring it to media now.
    pub(crate) fn syncs_at_server(&self) {
        self.state().local.is_unsynced_at_server = false;
    }

    /// The server did not do so.
    pub(crate) fn is_unsynced_at_server(&self) {
        self.state().local.is_unsynced_at_server = true;
    }

    /// The last program that had `file` open has closed it. True: the file is closed at the server when what is kept
    /// is there.
    fn closes_later(&self, file: &RemoteFile) -> bool {
        let mut state = self.state();
        let is_writer = |(writer, _): &(Arc<RemoteFile>, _)| writer.handle() == file.handle();
        let later = state.failure.is_none() && state.writer.as_ref().is_some_and(is_writer);
        state.local.is_closed |= later;
        later
    }

    /// Whether something is kept that goes through another open file.
    fn goes_through_other(&self, file: &RemoteFile) -> bool {
        self.state().writer.as_ref().is_some_and(|(writer, _)| writer.handle() != file.handle())
    }

    /// Sends what is kept soon, if it may be kept no more.
    pub(super) fn settle_soon(self: &Arc<Self>) {
        let Some((file, _)) = self.state().writer.clone() else { return };
        let kept = self.clone();
        file.session.link.spawn_home(async move { kept.settle().await });
    }
}

impl KeptWrites {
    /// Whether what is kept is in a log.
    pub(crate) fn has_log(&self) -> bool {
        self.store.log().is_some()
    }

    /// To be asked before a name is looked up: the file may be one of those whose writes are kept. In a log there may be
    /// much of others, so only the file that is found is sent behind the call.
    pub(crate) async fn before_lookup(&self) -> SentBatches {
        if !self.has_log() {
            self.settle_all().await;
        }
        SentBatches(self.sum.sent.load(Ordering::SeqCst))
    }

    /// Whether the answer to a lookup shows all writes to the file that were kept before it.
    pub(crate) fn is_shown(&self, SentBatches(before): SentBatches, id: FileId) -> bool {
        let is_kept = || self.find(id).is_some_and(|file| file.has_unsent());
        // What was sent meanwhile may have been sent behind the answer.
        !self.has_log() || self.sum.sent.load(Ordering::SeqCst) == before && !is_kept()
    }

    /// A descriptor of a file is closed. Errors: what was written is lost.
    pub(crate) async fn flush(&self, id: FileId) -> Result<()> {
        match self.has_log() {
            true => self.find(id).map_or(Ok(()), |file| file.failure()),
            false => self.close(id).await,
        }
    }

    /// The last descriptor of an open file is closed. True: there is nothing more to do, and the file is closed at the
    /// server later.
    pub(crate) fn closes_later(&self, file: &RemoteFile, has_locks: bool) -> bool {
        self.has_log()
            && !has_locks
            && self.find(file.id).is_some_and(|kept| kept.closes_later(file))
    }

    /// The same, where the file is closed at the server now. Errors: what was written is lost.
    pub(crate) async fn close_file(&self, file: &RemoteFile) -> Result<()> {
        match self.find(file.id).filter(|_| self.has_log()) {
            Some(kept) if kept.goes_through_other(file) => kept.failure(),
            _ => self.close(file.id).await,
        }
    }

    /// All leases have ended.
    pub(super) fn settle_all_soon(&self, all: &[Arc<KeptFile>]) {
        if self.has_log() {
            all.iter().for_each(KeptFile::settle_soon);
        }
    }

    /// The session ends, and something is still here.
    pub(crate) fn warn_of_rest(&self, target: &str) {
        let Some(log) = self.store.log() else { return };
        let (bytes, dir) = (self.bytes(), log.dir().display());
        log::error!(
            "{target}: {bytes} bytes that programs have written are not at the server; they are in {dir}, and are \
             written when this machine mounts the export with this cache again"
        );
    }

    /// No program is there any more. Sends everything; when that is done nothing is left on the disk.
    pub(crate) async fn finish(&self) {
        let Some(log) = self.store.log() else { return };
        self.settle_each().await;
        if !self.has_any() && log.is_clean() {
            log.remove();
        }
    }
}
