//! The session as front ends see it.

use std::sync::{Arc, PoisonError};

use dray_core::{
    Attr, FileId, FindJobs, HearChanges, HearRecalls, LockOwner, NodeId, OpenFile, OpenHow,
    RequestId, SessionControl, Stack,
};

use crate::client::fs::RemoteFs;
use crate::client::session::ClientSession;

impl RemoteFs {
    /// A file system over this session, and the session under it, for a front end.
    pub fn stack(session: Arc<ClientSession>) -> Stack {
        let remote = Arc::new(RemoteFs::new(session));
        Stack { fs: remote.clone(), session: remote }
    }
}

impl SessionControl for RemoteFs {
    fn node(&self) -> NodeId {
        self.session.node()
    }

    fn attach(
        &self,
        id: FileId,
        how: OpenHow,
        RequestId(request): RequestId,
    ) -> Option<Arc<dyn OpenFile>> {
        let handle = self.session.link.files.aliases.number_of(request);
        Some(Arc::new(self.file(id, handle, how, (None, None)).inherited()))
    }

    fn attached(&self) {
        self.session.link.files.complete();
    }

    fn release_inherited(&self) {
        self.session.release_inherited();
    }

    fn lock_owners(&self) -> Option<Vec<(FileId, LockOwner)>> {
        self.session.link.held.owners()
    }

    fn owes_error(&self, id: FileId) -> bool {
        let link = &self.session.link;
        link.unsynced.may_report_loss(id)
            || link.server().writes_late && link.unsynced.has_changes_of(id)
    }

    fn mapped(&self, id: FileId) {
        let channels = self.session.channels.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.first() {
            channel.tell_mapped(id);
        }
    }

    fn hear_changes_by(&self, hear: HearChanges) {
        self.session.link.hear_changes_by(hear);
    }

    fn hear_recalls_by(&self, hear: HearRecalls) {
        self.session.link.leases.hear_recalls_by(hear);
    }

    fn leased_attributes(&self, id: FileId) -> Option<Attr> {
        self.session.link.leases.leased_attributes(id)
    }

    fn find_jobs_by(&self, find: FindJobs) {
        self.session.link.find_jobs_by(find);
    }

    fn goodbye(&self) {
        self.session.goodbye();
    }
}
