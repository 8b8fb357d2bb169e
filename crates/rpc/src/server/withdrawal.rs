//! An export that is taken away from its clients while the server goes on, because its file system
//! or program is no longer there. The file system was unmounted, or another one has taken its
//! place, or the program died.
//!
//! To its clients that is as if the server had died and not returned yet, which they can handle.
//! Their connections end without an answer to what is under way. The clients come again until the
//! export is open once more, and find their sessions there, as the journal has them.

use std::sync::{Arc, Mutex, Weak};

use dray_core::OpenFile;
use dray_rt::ExecutorHandle;

use crate::server::export::Export;
use crate::server::options::StateLoss;
use crate::server::service::{Inner, Server, lock};
use crate::server::session::ServerSession;

/// The file system of an export has gone while the export was being opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportLost;

/// An export that was withdrawn, with whatever is still under way there.
pub struct WithdrawnExport {
    export: Weak<Export>,
    /// The loss that is to be reported when the export is opened again.
    pub loss: StateLoss,
}

impl WithdrawnExport {
    /// Whether calls of before are still in its file system, or files of before are not closed yet.
    /// It must not be opened again as long as they are: their late changes could not be
    /// distinguished from later ones of other clients.
    pub fn is_in_use(&self) -> bool {
        self.export.strong_count() > 0
    }
}

/// Files without a name that clients had open when their export was withdrawn. While they are open
/// here, the server that the clients go to finds them.
#[derive(Clone, Default)]
pub(super) struct LeftOpen(Arc<Mutex<Vec<Arc<dyn OpenFile>>>>);

impl LeftOpen {
    /// The files need not stay open any longer.
    pub(super) fn give_back(&self) {
        let files = std::mem::take(&mut *lock(&self.0));
        drop(files); // outside of the lock
    }

    async fn take_from(self, sessions: Vec<Arc<ServerSession>>) {
        // First of all: one session may remove what another one has open.
        for session in &sessions {
            session.carried_out().await;
        }
        for session in sessions {
            let files = session.give_back_locks().await;
            lock(&self.0).extend(files);
        }
    }
}

impl Server {
    /// As [`Server::withdraw`], where another server goes on with the sessions, and this one may later.
    /// Their locks are given back, and files without a name are `left` open. The export is in use until
    /// that is so.
    pub(super) fn withdraw_leaving(&self, name: &str, left: &LeftOpen) -> Option<WithdrawnExport> {
        let export = self.inner.exports.get(name).ok()?;
        let is_of = |session: &&Arc<ServerSession>| Arc::ptr_eq(&session.export, &export);
        let sessions: Vec<_> = lock(&self.inner.sessions).values().filter(is_of).cloned().collect();
        lock(&left.0).extend(export.recovery_window.kept());
        drop(export);
        let withdrawn = self.withdraw(name, StateLoss::Nothing);
        if let Some(first) = sessions.first() {
            let home = first.home().unwrap_or_else(ExecutorHandle::current);
            home.spawn(left.clone().take_from(sessions));
        }
        withdrawn
    }
}

impl Server {
    /// Withdraws an open export until [`Server::open`] opens it again; `loss` is the one that it
    /// was opened with last. Waits for nothing. None: it is not open.
    pub fn withdraw(&self, name: &str, loss: StateLoss) -> Option<WithdrawnExport> {
        let export = self.inner.exports.withdraw(name)?;
        // Before anything ends: what fails from now on is no answer.
        export.lose();
        self.inner.epoch.stamps_given(export.ranges.stamps.newest());
        self.inner.suspend_sessions(&export);
        // The changes that were lost with the machine have not all been made again.
        let loss = if export.recovery.running() { loss } else { StateLoss::Nothing };
        // Calls that wait there would keep the export in use.
        export.recovery.abandon();
        export.recovery_window.abandon();
        Some(WithdrawnExport { export: Arc::downgrade(&export), loss })
    }
}

impl Inner {
    /// Ends the sessions of an export without giving anything back: the journal has them, and they
    /// are taken over when the export is opened again.
    pub(super) fn suspend_sessions(&self, export: &Arc<Export>) {
        let mut sessions = lock(&self.sessions);
        let is_theirs = |session: &&Arc<ServerSession>| Arc::ptr_eq(&session.export, export);
        let theirs: Vec<Arc<ServerSession>> =
            sessions.values().filter(is_theirs).cloned().collect();
        theirs.iter().for_each(|session| _ = sessions.remove(&session.id));
        drop(sessions);
        for session in &theirs {
            session.suspend();
            session.slots.release_cut();
        }
        let former = theirs.iter().map(|session| session.for_the_next_opening());
        self.exports.keep_former(&export.name, former.collect());
    }
}
