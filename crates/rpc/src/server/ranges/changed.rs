//! Which bytes a call changes.

use dray_core::{Allocate, FileId};

use super::Span;
use crate::wire::Call;

/// Bytes that one call copies at most; its client asks again for the rest. Whoever wants to read
/// the bytes behind them does not wait for it.
const COPY_MAX_BYTES: u64 = 64 << 20;

/// How many of the bytes that a copy is asked for are copied by one call.
pub(crate) fn copied_bytes(len_bytes: u64) -> u64 {
    len_bytes.min(COPY_MAX_BYTES)
}

/// The bytes whose content a call changes; none if it changes no data. A call that finds its file
/// by a name is not known here: its plan knows the file. An append changes all that is there. `of`:
/// the file that is open under this number.
pub(crate) fn bytes_changed(
    call: &Call<'_>,
    data_bytes: usize,
    of: impl Fn(u64) -> Option<FileId>,
) -> Option<(FileId, Span)> {
    match call {
        Call::Write { handle, how } if how.append => Some((of(*handle)?, Span::ALL)),
        Call::Write { handle, how } => Some((of(*handle)?, Span::bytes(how.at, data_bytes as u64))),
        Call::Setattr { id, set, .. } => Some((*id, Span::from(set.size?))),
        Call::Allocate { handle, what } => Some((of(*handle)?, allocated(*what))),
        Call::CopyRange { to, to_at, len_bytes, .. } => {
            Some((of(*to)?, Span::bytes(*to_at, copied_bytes(*len_bytes))))
        }
        // What is opened again is not cut.
        Call::Open { id, how, again: false, .. } | Call::OpenNamed { id, how, .. }
            if how.truncates() =>
        {
            Some((*id, Span::ALL))
        }
        Call::Open { .. } | Call::OpenNamed { .. } => None,
        Call::Lookup { .. }
        | Call::LookupOpen { .. }
        | Call::Parent { .. }
        | Call::Getattr { .. }
        | Call::Readlink { .. }
        | Call::Make { .. }
        | Call::Remove { .. }
        | Call::Rename { .. }
        | Call::Link { .. }
        | Call::Create { .. }
        | Call::Tmpfile { .. }
        | Call::Put { .. }
        | Call::Reopen { .. }
        | Call::Access { .. }
        | Call::Statfs { .. }
        | Call::Getxattr { .. }
        | Call::Setxattr { .. }
        | Call::Listxattr { .. }
        | Call::Removexattr { .. }
        | Call::Read { .. }
        | Call::Readdir { .. }
        | Call::Flush { .. }
        | Call::Sync { .. }
        | Call::Seek { .. }
        | Call::Lock { .. }
        | Call::TestLock { .. }
        | Call::GetFlags { .. }
        | Call::SetFlags { .. }
        | Call::GetXflags { .. }
        | Call::SetXflags { .. }
        | Call::Close { .. }
        | Call::SyncAll { .. }
        | Call::Recover { .. }
        | Call::Declare { .. } => None,
        // What is sent again after a loss of power waits for all of the file, whatever it changes.
        Call::Redo { .. } => None,
    }
}

/// What moves others' bytes changes all that is there.
fn allocated(what: Allocate) -> Span {
    let moves = libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_INSERT_RANGE;
    match what.flags & moves {
        0 => Span::bytes(what.at, what.len_bytes),
        _ => Span::ALL,
    }
}
