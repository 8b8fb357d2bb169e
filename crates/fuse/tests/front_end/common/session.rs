//! A session that says when others have changed files, as a server does.

use std::sync::{Arc, Mutex, PoisonError};

use dray_core::{
    FileId, FindJobs, HearChanges, LockOwner, NodeId, OpenFile, OpenHow, RequestId, SessionControl,
};

/// The callback for changes, if one is set.
#[derive(Clone, Default)]
pub struct NotifyingSession(Arc<Mutex<Option<HearChanges>>>);

impl NotifyingSession {
    /// Another client has changed this file.
    pub fn changed(&self, id: FileId) {
        let hear = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        hear.as_ref().expect("the front end hears of changes")(vec![id]);
    }
}

impl SessionControl for NotifyingSession {
    fn node(&self) -> NodeId {
        NodeId(0)
    }
    fn attach(&self, _: FileId, _: OpenHow, _: RequestId) -> Option<Arc<dyn OpenFile>> {
        None
    }
    fn attached(&self) {}

    fn release_inherited(&self) {}
    fn lock_owners(&self) -> Option<Vec<(FileId, LockOwner)>> {
        None
    }
    fn owes_error(&self, _: FileId) -> bool {
        false
    }
    fn mapped(&self, _: FileId) {}
    fn hear_changes_by(&self, hear: HearChanges) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(hear);
    }
    fn find_jobs_by(&self, _: FindJobs) {}
    fn goodbye(&self) {}
}
