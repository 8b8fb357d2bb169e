//! A sync of everything that failed. Its error names no file, so that each file has to be synced by
//! itself. Data that are not on media then are reported as a loss.

use dray_core::FileId;

use super::{FileChanges, State, UnsyncedLog};

impl UnsyncedLog {
    /// A sync of everything has failed. The scheduler is to sync each file by itself.
    pub(crate) fn sync_of_all_failed(&self) {
        self.lock().sync_failed = true;
        self.request_sync();
    }

    /// Whether one has failed, and not each file has been synced by itself since.
    pub(crate) fn has_failed_sync(&self) -> bool {
        self.lock().sync_failed
    }

    /// The files that a failed sync may have left out.
    pub(crate) fn files_to_sync(&self) -> Vec<FileId> {
        let state = self.lock();
        let unsynced = |(_, file): &(&FileId, &FileChanges)| !file.is_clean();
        state.files.iter().filter(unsynced).map(|(id, _)| *id).collect()
    }

    /// The server could not bring a file to media. Its writers are to report it.
    pub(crate) fn file_sync_failed(&self, id: FileId, why: &str) {
        let mut state = self.lock();
        let State { files, losses, .. } = &mut *state;
        let Some(file) = files.get_mut(&id) else { return };
        let number = losses.report(Some(id), "changes of a file", why, file.unsynced_bytes());
        if file.writers > 0 {
            file.loss = number;
        }
        self.update_alert(&state);
    }

    /// Each of the files has been synced by itself, or has failed.
    pub(crate) fn failed_sync_resolved(&self) {
        let mut state = self.lock();
        state.sync_failed = false;
        if state.unnoted.take().is_some() {
            let why = "a sync of everything failed, and they were not noted";
            state.losses.report(None, "changes of further files", why, 0);
        }
    }
}
