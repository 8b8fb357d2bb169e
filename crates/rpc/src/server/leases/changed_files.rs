//! The attributes of files that a change has changed beside that of its results. They go with its answer,
//! if they can be leased: so the client need not ask for them behind its own change (ADR 0054).

use dray_core::{Attr, Context, FileId};

use super::grants::LeaseGrants;
use super::marks::Part;
use crate::server::execute::Files;
use crate::server::session::ServerSession;
use crate::wire::{CallHead, CallRow, Changes, FileRef};

/// The files that a call changes whose attributes its answer may have.
pub(crate) struct ChangedFiles<'a> {
    /// Directories of changed names.
    directories: [Option<FileId>; 2],
    /// The open file whose data are changed, if the client wants its attributes.
    open: Option<(u64, &'a Files)>,
}

impl<'a> ChangedFiles<'a> {
    /// None: there are none, or the client does not take them. `flags`: those of the [`CallHead`].
    pub(crate) fn of(
        session: &ServerSession,
        (row, files): (&CallRow<'_>, &'a Files),
        flags: u16,
    ) -> Option<ChangedFiles<'a>> {
        // What is held has not changed yet.
        if !session.takes_changed_files() || row.changes == Changes::Leases {
            return None;
        }
        let [one, other] = row.breaks().names.map(|name| name.map(|(dir, _)| dir));
        let directories = [one, other.filter(|_| other != one)];
        let wanted = flags & CallHead::WANTS_ATTRIBUTES != 0;
        let open = match row.changes {
            Changes::Data(FileRef::Handle(handle), _) if wanted => Some((handle, files)),
            Changes::Nothing
            | Changes::Names
            | Changes::Leases
            | Changes::Attributes(_)
            | Changes::Data(..)
            | Changes::DataOfReply
            | Changes::Redone => None,
        };
        let some = one.is_some() || open.is_some();
        some.then_some(ChangedFiles { directories, open })
    }
}

impl LeaseGrants<'_> {
    /// What can be leased of that. To be asked while the change has its marks.
    pub(crate) async fn attributes_of(
        &self,
        session: &ServerSession,
        cx: &Context,
        changed: ChangedFiles<'_>,
    ) -> Vec<(FileId, Attr)> {
        let cx = Context { cancel: None, ..cx.uncounted() };
        let mut files = Vec::new();
        for dir in changed.directories.into_iter().flatten() {
            if self.may_lease(Part::Attributes(dir))
                && let Ok(attr) = session.export.fs.getattr(&cx, dir).await
            {
                files.push((dir, attr));
            }
        }
        let open = changed.open.and_then(|(handle, files)| files.get(handle));
        if let Some(file) = open
            && self.may_lease(Part::Attributes(file.id()))
            && let Ok(attr) = file.getattr(&cx).await
        {
            files.push((file.id(), attr));
        }
        files
    }
}
