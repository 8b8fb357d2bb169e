//! A session whose news of changes reach the cache, too.

use std::sync::Arc;

use dray_core::{
    Attr, FileId, FindJobs, Fut, HearChanges, HearRecalls, LockOwner, NodeId, OpenFile, OpenHow,
    RequestId, SessionControl,
};

use crate::file::{CachedFile, OpenedAs};
use crate::fs::CacheUser;

/// The session under a [`CachedFs`](crate::CachedFs) that goes by versions at openings. The cache hears of changes
/// before the front end does. Files that a process before this one has opened report their changes, too.
pub struct CachedSession {
    inner: Arc<dyn SessionControl>,
    user: Arc<CacheUser>,
}

impl CachedSession {
    pub(crate) fn new(inner: Arc<dyn SessionControl>, user: Arc<CacheUser>) -> CachedSession {
        CachedSession { inner, user }
    }

    /// The cache hears before `hear` does.
    pub(crate) fn hearing(&self, hear: HearChanges) -> HearChanges {
        let cache = self.user.cache.clone();
        Box::new(move |files| {
            files.iter().for_each(|id| cache.changes.note(*id));
            hear(files);
        })
    }
}

impl SessionControl for CachedSession {
    fn node(&self) -> NodeId {
        self.inner.node()
    }

    fn attach(&self, id: FileId, how: OpenHow, request: RequestId) -> Option<Arc<dyn OpenFile>> {
        let file = self.inner.attach(id, how, request)?;
        Some(Arc::new(CachedFile::new(self.user.clone(), file, OpenedAs::Uncached)))
    }

    fn attached(&self) {
        self.inner.attached();
    }

    fn release_inherited(&self) {
        self.inner.release_inherited();
    }

    fn lock_owners(&self) -> Option<Vec<(FileId, LockOwner)>> {
        self.inner.lock_owners()
    }

    fn owes_error(&self, id: FileId) -> bool {
        self.inner.owes_error(id)
    }

    fn mapped(&self, id: FileId) {
        self.inner.mapped(id);
    }

    fn hear_changes_by(&self, hear: HearChanges) {
        self.inner.hear_changes_by(self.hearing(hear));
    }

    fn hear_recalls_by(&self, hear: HearRecalls) {
        self.inner.hear_recalls_by(hear);
    }

    fn leased_attributes(&self, id: FileId) -> Option<Attr> {
        self.inner.leased_attributes(id)
    }

    fn find_jobs_by(&self, find: FindJobs) {
        self.inner.find_jobs_by(find);
    }

    fn finish(&self) -> Fut<'_, ()> {
        self.inner.finish()
    }

    fn goodbye(&self) {
        self.inner.goodbye();
    }
}
