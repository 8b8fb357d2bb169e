//! What a call is about, without carrying it out.

use std::sync::Arc;

use dray_core::{Errno, Error, FileId, Op, OpenFile, Result};

use crate::server::reply::Reply;
use crate::server::session::Session;
use crate::wire::{Call, Input};

/// The open files that a call names.
fn handles(call: &Call<'_>) -> impl Iterator<Item = u64> + use<> {
    let named = match *call {
        Call::Setattr { handle, .. } | Call::Getattr { handle, .. } => [handle, None],
        Call::CopyRange { handle, to, .. } => [Some(handle), Some(to)],
        Call::Write { handle, .. }
        | Call::Read { handle, .. }
        | Call::Readdir { handle, .. }
        | Call::Flush { handle, .. }
        | Call::Sync { handle, .. }
        | Call::Allocate { handle, .. }
        | Call::Seek { handle, .. }
        | Call::Lock { handle, .. }
        | Call::TestLock { handle, .. }
        | Call::GetFlags { handle }
        | Call::GetXflags { handle }
        | Call::SetXflags { handle, .. }
        | Call::Redo { handle, .. }
        | Call::SetFlags { handle, .. } => [Some(handle), None],
        _ => [None, None],
    };
    named.into_iter().flatten()
}

/// The open files that a change in a slot names, found once: those that it has its grants for are those
/// that it changes, whatever its client opens under their numbers meanwhile.
#[derive(Default)]
pub(in crate::server) struct Files([Option<(u64, Arc<dyn OpenFile>)>; 2]);

impl Files {
    /// Those that `call` names. Errors: `EBADF`, one of them has been closed, or is another by now than
    /// the call says besides.
    pub(in crate::server) fn of(session: &Session, call: &Call<'_>) -> Result<Files> {
        let mut files = Files::default();
        for (place, handle) in files.0.iter_mut().zip(handles(call)) {
            let file = session.file(handle).filter(|file| match *call {
                Call::Setattr { id, .. } => file.id() == id,
                _ => true,
            });
            *place = Some((handle, file.ok_or_else(|| Error::new(Errno::EBADF))?));
        }
        Ok(files)
    }

    /// The one of this number.
    pub(in crate::server) fn get(&self, handle: u64) -> Option<&Arc<dyn OpenFile>> {
        self.all().find(|(number, _)| *number == handle).map(|(_, file)| file)
    }

    fn all(&self) -> impl Iterator<Item = &(u64, Arc<dyn OpenFile>)> {
        self.0.iter().flatten()
    }
}

/// What a change is about that a death of the server may cut short: that of which it needs a grant.
pub(in crate::server) fn changed(call: &Call<'_>, files: &Files) -> impl Iterator<Item = FileId> {
    let named = match *call {
        Call::Setattr { id, .. }
        | Call::Open { id, .. }
        | Call::OpenNamed { id, .. }
        | Call::Setxattr { id, .. }
        | Call::Removexattr { id, .. }
        | Call::Create { dir: id, .. } => Some(id),
        _ => None, // a put is about the file that was found for it
    };
    named.into_iter().chain(files.all().map(|(_, file)| file.id()))
}

/// Whether the session has the open files that a call names. One that names a file besides by its
/// id, for which it has its grant, must mean the same.
pub(in crate::server) fn check_handles(
    session: &Session,
    call: &Call<'_>,
) -> std::result::Result<(), Reply> {
    if let Call::Setattr { id, handle: Some(handle), .. } = *call
        && session.file(handle).is_some_and(|file| file.id() != id)
    {
        let error = Error::new(Errno::EPROTO).because("one call about two files");
        return Err(Reply::failure(&error));
    }
    let known = handles(call).all(|handle| session.has_file(handle));
    if known { Ok(()) } else { Err(Reply::unknown_handle()) }
}

/// Files that a call is about, and the names in them that it has, for people.
pub(in crate::server) fn subjects(
    session: &Session,
    op: Op,
    body: &[u8],
) -> Vec<(FileId, Option<Vec<u8>>)> {
    let Ok(call) = Call::get(op, &mut Input(body)) else { return Vec::new() };
    let opened = |handle: u64| session.file(handle).map(|file| (file.id(), None));
    let named = |dir: FileId, name: &[u8]| (dir, Some(name.to_vec()));
    match call {
        Call::Lookup { dir, name }
        | Call::LookupOpen { dir, name, .. }
        | Call::OpenNamed { dir, name, .. }
        | Call::Make { dir, name, .. }
        | Call::Remove { dir, name, .. }
        | Call::Create { dir, name, .. }
        | Call::Put { dir, name, .. } => vec![named(dir, name)],
        Call::Link { id, dir, name } => vec![(id, None), named(dir, name)],
        Call::Rename { from, from_name, to, to_name, .. } => {
            vec![named(from, from_name), named(to, to_name)]
        }
        Call::Open { id, .. }
        | Call::Getattr { id, .. }
        | Call::Setattr { id, .. }
        | Call::Readlink { id }
        | Call::Access { id, .. } => vec![(id, None)],
        _ => handles(&call).filter_map(opened).collect(),
    }
}
