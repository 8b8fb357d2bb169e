//! A lookup with which the file is opened, if that can be done.

use dray_core::{Context, FileId, FileType, Name, OpenHow, Result};

use super::opening::keep;
use crate::server::call_admission;
use crate::server::reply::Reply;
use crate::server::service::Inner;
use crate::server::session::ServerSession;

/// Looks a name up and opens what it finds. A file that is not open when this ends is not kept
/// under the number. The call may have been carried out before, on a connection that broke.
pub(super) async fn lookup_open(
    server: &Inner,
    session: &ServerSession,
    cx: &Context,
    (dir, name): (FileId, &[u8]),
    (how, handle): (OpenHow, u64),
) -> Result<Reply> {
    let found = match Name::new(name) {
        Ok(name) => session.export.fs.lookup(cx, dir, name).await,
        Err(error) => Err(error),
    };
    let open = match &found {
        Ok(entry) if entry.attr.file_type() == FileType::Regular && how.is_harmless() => {
            open(server, session, cx, entry.id, (how, handle)).await
        }
        _ => false,
    };
    if !open && let Some(file) = session.take_file(handle) {
        let _ = session.close_file(&cx.uncounted(), handle, &*file).await; // its client never heard of it
    }
    let ticket = if open { session.ticket_of(handle) } else { None };
    Ok(Reply::success((found?, open)).with_ticket(ticket))
}

/// Whether the file is open under that number now.
async fn open(
    server: &Inner,
    session: &ServerSession,
    cx: &Context,
    id: FileId,
    (how, handle): (OpenHow, u64),
) -> bool {
    if session.file(handle).is_some_and(|file| file.id() == id) {
        return true; // since the call came first, from which on its client counts
    }
    // A caller that is refused here gets the error at its open.
    let Ok(place) = session.place_for_file(false) else { return false };
    if call_admission::is_on(session)
        && Box::pin(call_admission::ask_for_open(session, cx, id, how)).await.is_err()
    {
        return false; // as above
    }
    // The calls that wait for this file begin to wait before the rights are looked at.
    if !server.open_ahead.opens(id, session.id) {
        return false;
    }
    // Its client may not want to open the file at all: then nobody was denied anything.
    match session.export.fs.open(&cx.counted_if_done(), id, how).await {
        Ok(file) => keep(session, cx, handle, (file, how, place)).await.is_ok(),
        Err(_) => false, // the open returns the error
    }
}
