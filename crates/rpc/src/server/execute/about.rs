//! What a call is about, without carrying it out.

use dray_core::{Errno, Error, FileId, Op};

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

/// Whether the session has the open files that a call names. One that names a file besides by its
/// id, for which it has its turn and its stamp, must mean the same.
pub(in crate::server) fn check_handles(
    session: &Session,
    op: Op,
    body: &[u8],
) -> std::result::Result<(), Reply> {
    let Ok(call) = Call::get(op, &mut Input(body)) else { return Ok(()) };
    if let Call::Setattr { id, handle: Some(handle), .. } = call
        && session.file(handle).is_some_and(|file| file.id() != id)
    {
        let error = Error::new(Errno::EPROTO).because("one call about two files");
        return Err(Reply::failure(&error));
    }
    let known = handles(&call).all(|handle| session.has_file(handle));
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
