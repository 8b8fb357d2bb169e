//! What a call is about, without carrying it out.

use dray_core::Op;

use crate::server::reply::Reply;
use crate::server::session::Session;
use crate::wire::{Call, Input};

/// Whether the session has the open files that a call names.
pub(in crate::server) fn check_handles(
    session: &Session,
    op: Op,
    body: &[u8],
) -> std::result::Result<(), Reply> {
    let Ok(call) = Call::get(op, &mut Input(body)) else { return Ok(()) };
    let [first, second] = match call {
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
        | Call::Redo { handle, .. }
        | Call::SetFlags { handle, .. } => [Some(handle), None],
        _ => [None, None],
    };
    let known = [first, second].into_iter().flatten().all(|handle| session.has_file(handle));
    if known { Ok(()) } else { Err(Reply::unknown_handle()) }
}

/// What a call is about, for people.
pub(in crate::server) fn describe(op: Op, body: &[u8]) -> String {
    let name = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match Call::get(op, &mut Input(body)) {
        Ok(Call::Lookup { dir, name: bytes })
        | Ok(Call::Make { dir, name: bytes, .. })
        | Ok(Call::Remove { dir, name: bytes, .. })
        | Ok(Call::Create { dir, name: bytes, .. })
        | Ok(Call::Put { dir, name: bytes, .. })
        | Ok(Call::Link { dir, name: bytes, .. }) => format!("{dir}/{}", name(bytes)),
        Ok(Call::Rename { from, from_name, to, to_name, .. }) => {
            format!("{from}/{} -> {to}/{}", name(from_name), name(to_name))
        }
        Ok(Call::Open { id, .. }) | Ok(Call::Getattr { id, .. }) | Ok(Call::Setattr { id, .. }) => {
            id.to_string()
        }
        Ok(Call::Read { handle, at, len_bytes }) => format!("#{handle} at {at}, {len_bytes} bytes"),
        Ok(Call::Write { handle, how }) => format!("#{handle} at {}", how.at),
        _ => String::new(),
    }
}
