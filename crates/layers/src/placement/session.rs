//! The sessions of a projection, as one for the front end.

use std::collections::HashSet;
use std::sync::Arc;

use dray_core::{
    Attr, FileId, FindJobs, Fut, HearChanges, HearRecalls, HoldLeases, LockOwner, NodeId, OpenFile,
    OpenHow, RequestId, SessionControl, Stack,
};

use super::file::PlacedFile;
use super::fs::PlacedFs;
use super::mapping::Placement;
use super::places::FilePlaces;
use super::servers::PlacedServers;
use super::slices::SliceIndex;

/// One session with each server of a projection. All have the same node, so that the numbers of
/// requests and the owners of locks mean the same at each server.
struct PlacedSession {
    shared: Arc<PlacedServers>,
    sessions: Vec<Arc<dyn SessionControl>>,
}

/// A projection for a front end: `servers` in the order of the definition, with failover one for each slice.
/// `places` are of the client that has these sessions, whatever stacks they are in. `holders` are the same servers
/// if they lease what they own, and none if not.
///
/// # Panics
/// If there is not one stack for each, or they have several nodes.
pub fn placed_stack(
    placement: Placement,
    places: Arc<FilePlaces>,
    servers: Vec<Stack>,
    holders: Vec<Arc<dyn HoldLeases>>,
) -> Stack {
    let (files, sessions): (Vec<_>, Vec<_>) =
        servers.into_iter().map(|stack| (stack.fs, stack.session)).unzip();
    let nodes: HashSet<NodeId> = sessions.iter().map(|session| session.node()).collect();
    assert_eq!(nodes.len(), 1, "the sessions of a projection have one node");
    let fs = PlacedFs::new(placement, places, files, holders);
    let session = PlacedSession { shared: fs.shared.clone(), sessions };
    Stack { fs: Arc::new(fs), session: Arc::new(session) }
}

impl PlacedSession {
    fn at(&self, SliceIndex(index): SliceIndex) -> &dyn SessionControl {
        &*self.sessions[usize::from(index)]
    }

    fn home(&self, id: FileId) -> &dyn SessionControl {
        self.at(self.shared.slices.home(id))
    }
}

impl SessionControl for PlacedSession {
    fn node(&self) -> NodeId {
        self.sessions[0].node()
    }

    fn attach(&self, id: FileId, how: OpenHow, request: RequestId) -> Option<Arc<dyn OpenFile>> {
        let at = self.shared.opening(id, how);
        let file = self.at(at).attach(id, how, request)?;
        Some(PlacedFile::open(&self.shared, (at, how), file))
    }

    fn attached(&self) {
        self.sessions.iter().for_each(|session| session.attached());
    }

    fn release_inherited(&self) {
        self.sessions.iter().for_each(|session| session.release_inherited());
    }

    fn lock_owners(&self) -> Option<Vec<(FileId, LockOwner)>> {
        let owners: Option<Vec<_>> =
            self.sessions.iter().map(|session| session.lock_owners()).collect();
        Some(owners?.into_iter().flatten().collect())
    }

    fn owes_error(&self, id: FileId) -> bool {
        self.sessions.iter().any(|session| session.owes_error(id))
    }

    fn mapped(&self, id: FileId) {
        self.home(id).mapped(id);
    }

    fn hear_changes_by(&self, hear: HearChanges) {
        let hear = Arc::new(hear);
        for session in &self.sessions {
            let hear = hear.clone();
            session.hear_changes_by(Box::new(move |files| hear(files)));
        }
    }

    fn hear_recalls_by(&self, hear: HearRecalls) {
        self.sessions.iter().for_each(|session| session.hear_recalls_by(hear.clone()));
    }

    fn leased_attributes(&self, id: FileId) -> Option<Attr> {
        self.home(id).leased_attributes(id)
    }

    fn find_jobs_by(&self, find: FindJobs) {
        let find = Arc::new(find);
        for session in &self.sessions {
            let find = find.clone();
            session.find_jobs_by(Box::new(move |callers, report| find(callers, report)));
        }
    }

    fn finish(&self) -> Fut<'_, ()> {
        Box::pin(async move {
            for session in &self.sessions {
                session.finish().await;
            }
        })
    }

    fn goodbye(&self) {
        self.sessions.iter().for_each(|session| session.goodbye());
    }
}
