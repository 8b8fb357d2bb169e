//! Openings that are answered once more.

use dray_core::{Context, FileId, OpenHow};

use crate::server::as_server;
use crate::server::execute::opening::keep;
use crate::server::reply::Reply;
use crate::server::session::ServerSession;
use crate::server::tickets;
use crate::wire::Opening;

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
