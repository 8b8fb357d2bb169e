//! Calls that a server before this one has answered, and that are answered once more. They are openings, and
//! changes of data that may have gone with that server's machine.

use dray_core::{Allocate, Buf, Context, CreateHow, Errno, FileId, OpenHow, Result, SetAttr};

use crate::server::as_server;
use crate::server::execute::opening::keep;
use crate::server::reply::Reply;
use crate::server::session::ServerSession;
use crate::server::tickets;
use crate::wire::{Call, Change, Opening, Stamp};

/// Opens the file of a repeated answer: an earlier server epoch carried out the open, and this one
/// does not have the file. Otherwise the file could be removed before its client uses it.
pub(in crate::server) async fn open_replayed(
    session: &ServerSession,
    cx: &Context,
    opening: Opening,
    answer: &Reply,
) {
    let Some((id, how)) = opened(opening, answer) else { return };
    if session.has_file(opening.handle) {
        return;
    }
    // The call may ask for something else than what was answered.
    let known = answer
        .ticket()
        .is_some_and(|ticket| session.export.tickets.may_open(ticket, session.node, id, how));
    let Ok(place) = session.place_for_file(true) else { return }; // its client will find out
    let fs = &*session.export.fs;
    let opened = match known {
        true => as_server::open(fs, cx, id, how).await,
        false => fs.open(&cx.uncounted(), id, how).await,
    };
    if let Ok(file) = opened {
        let _ = keep(session, cx, opening.handle, (file, how, place)).await; // as above
    }
}

/// The file that a call has opened according to its answer, and what for; none if nothing.
fn opened(opening: Opening, answer: &Reply) -> Option<(FileId, OpenHow)> {
    if !answer.is_success() {
        return None;
    }
    let id = opening.file.or_else(|| answer.file())?;
    // The work that the file was cut and made for has been done.
    Some((id, tickets::again(opening.how)))
}

/// Makes a change of data again that was answered so: as one of those that clients send again, so that
/// it undoes no later one. Errors: those of the file system.
pub(in crate::server) async fn make_answered(
    session: &ServerSession,
    cx: &Context,
    (call, data): (&Call<'_>, Option<Buf>),
    (file, answer): (FileId, &Reply),
) -> Result<()> {
    let Some(stamp) = answer.stamped() else { return Ok(()) };
    let export = &session.export;
    let how = OpenHow::new(libc::O_WRONLY);
    let opened = match as_server::open(&*export.fs, cx, file, how).await {
        // It has been removed since, and nobody has it open.
        Err(error) if matches!(error.errno(), Errno::ESTALE | Errno::ENOENT) => return Ok(()),
        opened => opened?,
    };
    // Only changes of data are made again so: see `settle::changes_data`.
    let changes = data_changes(call, data.unwrap_or_default(), stamp.at);
    for (change, data) in changes.into_iter().flatten() {
        let change = (stamp.number, change, data);
        let own = as_server::to_look(cx);
        export.replayed.redo(&own, session.id, &export.ranges, &*opened, change).await?;
    }
    Ok(())
}

/// Notes a change that was made again as it was begun, and got `stamp` with that. `written`: its bytes.
pub(in crate::server) fn note_made_again(
    session: &ServerSession,
    call: &Call<'_>,
    data: Buf,
    (file, stamp): (FileId, Stamp),
) {
    let note = |change, data_bytes| {
        let made = (stamp.number, change, data_bytes);
        session.export.replayed.made_besides(session.id, file, made);
    };
    if let Call::CopyRange { to_at, len_bytes, .. } = *call {
        return note(Change::Write { at: to_at }, len_bytes);
    }
    for (change, data) in data_changes(call, data, stamp.at).into_iter().flatten() {
        note(change, data.len() as u64);
    }
}

/// The changes of a file's data that a call makes. `appended_at`: where its data went.
fn data_changes(call: &Call<'_>, data: Buf, appended_at: u64) -> [Option<(Change, Buf)>; 2] {
    let change = |change| Some((change, Buf::default()));
    let cut = |size| change(Change::Size { size });
    if let Call::Write { how, .. } = call {
        let at = if how.append { appended_at } else { how.at };
        return [Some((Change::Write { at }, data)), None];
    }
    if let Call::Put { .. } = call {
        return [cut(0), Some((Change::Write { at: 0 }, data))];
    }
    if let Call::Setattr { set, .. } = call {
        let rest = SetAttr { size: None, kill_set_id: false, ..*set };
        return [set.size.and_then(cut), change(Change::Attr(rest))];
    }
    if let Call::Allocate { what: Allocate { flags, at, len_bytes }, .. } = *call {
        return [change(Change::Allocate { flags, at, len_bytes }), None];
    }
    if let Call::Create { how: CreateHow { open: how, .. }, .. }
    | Call::Open { how, .. }
    | Call::OpenNamed { how, .. } = call
    {
        return [how.truncates().then(|| cut(0)).flatten(), None];
    }
    [None, None] // flags and the like: they are not kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Stamp;
    use dray_core::{Attr, Entry, Errno, Error};

    const ID: FileId = FileId { ino: 27, generation: 3 };

    fn creation() -> Opening {
        Opening { handle: 9, file: None, how: OpenHow::new(libc::O_RDWR | libc::O_TRUNC) }
    }

    // proves: P90
    #[test]
    fn a_new_file_is_found_in_an_answer_with_a_stamp_and_in_one_without() {
        let wanted = Some((ID, OpenHow::READ_WRITE));
        let entry = Entry { id: ID, attr: Attr::default() };
        let mut reply = Reply::success((entry, false));
        assert_eq!(opened(creation(), &reply), wanted);
        reply.stamp(Stamp { number: 5, at: Stamp::NOWHERE });
        assert_eq!(opened(creation(), &reply), wanted);
    }

    #[test]
    fn what_failed_opened_nothing() {
        let reply = Reply::failure(&Error::new(Errno::EEXIST));
        assert_eq!(opened(creation(), &reply), None);
    }
}
