//! The sessions of a projection over servers with their own disks, as one for the front end.

use std::collections::HashSet;
use std::sync::Arc;

use dray_core::{
    Attr, FileId, FindJobs, Fut, HearChanges, HearRecalls, LockOwner, NodeId, OpenFile, OpenHow,
    RequestId, SessionControl, Stack,
};

use super::directory::OwnDirectory;
use super::file::OwnDisksFile;
use super::fs::of_stub;
use super::{OwnDisks, OwnDisksFs};
use crate::placement::Placement;

/// One session with each server. All have the same node.
struct OwnDisksSession {
    shared: Arc<OwnDisks>,
    sessions: Vec<Arc<dyn SessionControl>>,
}

/// A projection for a front end: `servers` in the order of the definition.
///
/// # Panics
/// If there is not one stack for each server, or they have several nodes.
pub fn own_disks_stack(placement: Placement, servers: Vec<Stack>) -> Stack {
    let (files, sessions): (Vec<_>, Vec<_>) =
        servers.into_iter().map(|stack| (stack.fs, stack.session)).unzip();
    let nodes: HashSet<NodeId> = sessions.iter().map(|session| session.node()).collect();
    assert_eq!(nodes.len(), 1, "the sessions of a projection have one node");
    let fs = OwnDisksFs::new(placement, files);
    let session = OwnDisksSession { shared: fs.shared.clone(), sessions };
    Stack { fs: Arc::new(fs), session: Arc::new(session) }
}

impl OwnDisksSession {
    /// Stubs are open, locked and mapped here.
    fn home(&self) -> &dyn SessionControl {
        &*self.sessions[0]
    }
}

impl SessionControl for OwnDisksSession {
    fn node(&self) -> NodeId {
        self.home().node()
    }

    /// The objects are opened when they are used.
    fn attach(&self, id: FileId, how: OpenHow, request: RequestId) -> Option<Arc<dyn OpenFile>> {
        let names = self.shared.names.get().copied();
        if id == self.shared.info.root && names.is_none() {
            return None; // which directory that is at the home is not known yet
        }
        let at_home = names.filter(|_| id == self.shared.info.root).unwrap_or(id);
        let inner = self.home().attach(at_home, of_stub(how), request)?;
        Some(match how.directory() {
            true => OwnDirectory::open(&self.shared, id, inner),
            false => OwnDisksFile::open(&self.shared, (how, None), inner),
        })
    }

    fn attached(&self) {
        self.sessions.iter().for_each(|session| session.attached());
    }

    /// Objects that the process before this one had open, and its locks for appending. The home has what is
    /// attached, so that the little that is left there stays until the session ends.
    fn release_inherited(&self) {
        self.sessions.iter().skip(1).for_each(|session| session.release_inherited());
    }

    fn lock_owners(&self) -> Option<Vec<(FileId, LockOwner)>> {
        self.home().lock_owners()
    }

    /// Which objects are a file's is not known without asking.
    fn owes_error(&self, _: FileId) -> bool {
        true
    }

    fn mapped(&self, id: FileId) {
        self.home().mapped(id);
    }

    /// Targets know objects, and no file that a front end knows.
    fn hear_changes_by(&self, hear: HearChanges) {
        self.home().hear_changes_by(hear);
    }

    /// Sessions with several servers have no leases.
    fn hear_recalls_by(&self, _: HearRecalls) {}

    fn leased_attributes(&self, _: FileId) -> Option<Attr> {
        None
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
