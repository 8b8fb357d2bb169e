//! An observer around what a front end serves.

use std::sync::Arc;

use dray_core::{
    Attr, FileId, FindJobs, Fut, HearChanges, HearRecalls, LockOwner, NodeId, OpenFile, OpenHow,
    RequestId, SessionControl, Stack,
};

use crate::observe::Observer;
use crate::observed::{Observed, observed_file};

/// Puts `observer` around the file system of `stack`, and around files that a process before this one
/// opened.
pub fn observed_stack<O: Observer>(stack: Stack, observer: &Arc<O>) -> Stack {
    let Stack { fs, session } = stack;
    let session = ObservedSession { inner: session, observer: observer.clone() };
    Stack { fs: Arc::new(Observed::new(fs, observer.clone())), session: Arc::new(session) }
}

/// A session of which an observer sees the files that are attached.
struct ObservedSession<O> {
    inner: Arc<dyn SessionControl>,
    observer: Arc<O>,
}

impl<O: Observer> SessionControl for ObservedSession<O> {
    fn node(&self) -> NodeId {
        self.inner.node()
    }

    fn attach(&self, id: FileId, how: OpenHow, request: RequestId) -> Option<Arc<dyn OpenFile>> {
        let file = self.inner.attach(id, how, request)?;
        Some(observed_file(file, &self.observer))
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
        self.inner.hear_changes_by(hear);
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
