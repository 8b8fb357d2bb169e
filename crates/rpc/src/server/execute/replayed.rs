//! Openings that are answered once more.

use dray_core::{Context, Entry, FileId, Op, OpenHow};

use crate::server::as_server;
use crate::server::execute::opening::keep;
use crate::server::session::Session;
use crate::server::tickets;
use crate::wire::{Call, Input, Malformed, ReplyHead};

/// A file that an answer says is open.
#[derive(Debug, PartialEq, Eq)]
struct Opened {
    id: FileId,
    how: OpenHow,
    handle: u64,
}

/// An opening that an earlier life of the server carried out is answered again, and this
/// one has not the file: it is opened, else it could go before its client uses it.
pub(in crate::server) async fn open_replayed(
    session: &Session,
    cx: &Context,
    op: Op,
    body: &[u8],
    answer: &[u8],
) {
    let Ok(Some(Opened { id, how, handle })) = opened(op, body, answer) else { return };
    if session.has_file(handle) {
        return;
    }
    // What is asked for may be something else than what was answered.
    let known = ReplyHead::ticket(answer)
        .is_some_and(|ticket| session.export.tickets.may_open(ticket, session.node, id, how));
    let Ok(place) = session.place_for_file(true) else { return }; // its client will find out
    let fs = &*session.export.fs;
    let opened = match known {
        true => as_server::open(fs, cx, id, how).await,
        false => fs.open(&cx.uncounted(), id, how).await,
    };
    if let Ok(file) = opened {
        let _ = keep(session, cx, handle, (file, how, place)).await; // as above
    }
}

/// What a call has opened according to its answer; none if nothing.
fn opened(op: Op, body: &[u8], answer: &[u8]) -> Result<Option<Opened>, Malformed> {
    let Some(results) = ReplyHead::results(answer) else { return Ok(None) };
    let (id, how, handle) = match Call::get(op, &mut Input(body))? {
        Call::Create { how, handle, .. } | Call::Tmpfile { how, handle, .. } => {
            (Input(results).get::<Entry>()?.id, how.open, handle)
        }
        Call::Open { id, how, handle, .. } | Call::OpenNamed { id, how, handle, .. } => {
            (id, how, handle)
        }
        _ => return Ok(None),
    };
    // What it was cut and made for has been done.
    Ok(Some(Opened { id, how: tickets::again(how), handle }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::reply::Reply;
    use crate::wire::Stamp;
    use dray_core::{Attr, CreateHow, Errno, Error};

    const ID: FileId = FileId { ino: 27, generation: 3 };

    fn create() -> Vec<u8> {
        let how = CreateHow {
            open: OpenHow::new(libc::O_RDWR | libc::O_TRUNC),
            mode: 0o644,
            exclusive: false,
        };
        let mut body = Vec::new();
        Call::Create { dir: ID, name: b"f", how, handle: 9 }.put(&mut body);
        body
    }

    #[test]
    fn a_new_file_is_found_in_an_answer_with_a_stamp_and_in_one_without() {
        let wanted = Opened { id: ID, how: OpenHow::READ_WRITE, handle: 9 };
        let entry = Entry { id: ID, attr: Attr::default() };
        let mut reply = Reply::success(&(entry, false));
        assert_eq!(opened(Op::Create, &create(), &reply.message), Ok(Some(wanted)));
        let wanted = Opened { id: ID, how: OpenHow::READ_WRITE, handle: 9 };
        reply.stamp(Stamp { number: 5, at: Stamp::NOWHERE });
        assert_eq!(opened(Op::Create, &create(), &reply.message), Ok(Some(wanted)));
    }

    #[test]
    fn what_failed_opened_nothing() {
        let reply = Reply::failure(&Error::new(Errno::EEXIST));
        assert_eq!(opened(Op::Create, &create(), &reply.message), Ok(None));
    }
}
