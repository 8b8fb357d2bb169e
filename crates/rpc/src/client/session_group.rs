//! The sessions of one mount with the slices of a projection: what they have in common.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use dray_core::{FileId, FsInfo, FsUuid};

use crate::client::durability::{LimitedSegments, SegmentLimit};
use crate::client::link::{Link, ServerEnd};

/// Sessions that are one to users: they keep as much as one would, end together, and have one file system.
pub struct SessionGroup {
    kept: Arc<SegmentLimit>,
    /// The file system, as the first server that was met has it, and its root.
    tree: OnceLock<(FsUuid, FileId)>,
    links: Mutex<Vec<Weak<Link>>>,
}

impl fmt::Debug for SessionGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionGroup").finish_non_exhaustive()
    }
}

impl SessionGroup {
    /// Sessions that keep up to `replay_bytes` together, whichever of them keep it.
    pub fn new(replay_bytes: u64) -> Arc<SessionGroup> {
        let kept = Arc::new(SegmentLimit::of(replay_bytes));
        Arc::new(SessionGroup { kept, tree: OnceLock::new(), links: Mutex::default() })
    }

    pub(crate) fn segments(&self) -> LimitedSegments {
        LimitedSegments::new(self.kept.clone())
    }

    /// One session more: a mount has as many as the projection has slices.
    pub(crate) fn join(&self, link: &Arc<Link>) {
        self.links.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(link));
    }

    /// A server has ended one of the sessions for good.
    pub(crate) fn end_all(&self, why: ServerEnd) {
        let links = self.links.lock().unwrap_or_else(PoisonError::into_inner).clone();
        links.iter().filter_map(Weak::upgrade).for_each(|link| link.end_with_others(why));
    }

    /// A server of the projection is gone: each session asks its own whether it is there.
    pub(crate) fn alarm_all(&self) {
        let links = self.links.lock().unwrap_or_else(PoisonError::into_inner).clone();
        links.iter().filter_map(Weak::upgrade).for_each(|link| link.alarm());
    }

    /// Whether a server has the file system of the others. Errors: their root.
    pub(crate) fn must_have(&self, info: &FsInfo) -> Result<(), FileId> {
        let (uuid, root) = *self.tree.get_or_init(|| (info.uuid, info.root));
        if (uuid, root) == (info.uuid, info.root) { Ok(()) } else { Err(root) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server at which the shared file system was not mounted would have had its part of the files in an
    /// empty directory.
    #[test]
    fn a_server_of_another_file_system_is_not_one_of_the_group() {
        let info = |uuid, ino| FsInfo {
            uuid: FsUuid(uuid),
            root: FileId { ino, generation: 0 },
            kind: String::new(),
            read_only: false,
        };
        let group = SessionGroup::new(0);
        assert_eq!(group.must_have(&info(1, 2)), Ok(()));
        assert_eq!(group.must_have(&info(1, 2)), Ok(()));
        let first = FileId { ino: 2, generation: 0 };
        for other in [info(1, 3), info(2, 2)] {
            assert_eq!(group.must_have(&other), Err(first));
        }
    }
}
