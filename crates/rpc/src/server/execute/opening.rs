//! Carries out a call that opens a file, for longer or to put data into it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dray_core::{
    AtOpen, Buf, Context, CreateHow, Entry, Errno, Error, FileId, FileSystem, LockOwner, Name,
    OpenFile, OpenHow, Reservation, Result, SetAttr, Write, must_be_named,
};

use crate::server::as_server;
use crate::server::exactly_once::plan::ChangeState;
use crate::server::exactly_once::settle::Amend;
use crate::server::reply::Reply;
use crate::server::session::ServerSession;
use crate::server::tickets;
use crate::wire::{Call, Ticket};

/// Reopens a file that was open in an earlier server epoch; the ticket says with what access.
pub(super) async fn reopen(
    session: &ServerSession,
    cx: &Context,
    (id, how, handle): (FileId, OpenHow, u64),
    ticket: Ticket,
) -> Result<Reply> {
    // The file was opened for execution by a caller with that right; the ticket says so. And rights
    // were checked at the first opening: the file's mode may forbid by now what was allowed then.
    let how = tickets::again(OpenHow { flags: how.flags & !OpenHow::EXECUTE, ..how });
    if !session.export.tickets.may_open(ticket, session.node, id, how) {
        let error = Error::new(Errno::EACCES);
        return Err(error.because("opened again for more than it had been open for"));
    }
    if !session.has_file(handle) {
        let place = place_for(session, true)?;
        let file = as_server::open(&*session.export.fs, cx, id, how).await?;
        keep(session, cx, handle, (file, how, place)).await?;
    }
    Ok(opened(session, cx, how, handle).await)
}

pub(super) async fn create(
    session: &ServerSession,
    cx: &Context,
    (dir, name): (FileId, &[u8]),
    (how, handle): (CreateHow, u64),
) -> Result<Reply> {
    let place = place_for(session, false)?;
    let made = session.export.fs.create(cx, dir, Name::new(name)?, how).await?;
    keep_new(session, cx, made, (how.open, handle, place)).await
}

pub(super) async fn tmpfile(
    session: &ServerSession,
    cx: &Context,
    dir: FileId,
    (how, handle): (CreateHow, u64),
) -> Result<Reply> {
    let place = place_for(session, false)?;
    let made = session.export.fs.tmpfile(cx, dir, how).await?;
    keep_new(session, cx, made, (how.open, handle, place)).await
}

/// Whether what a call opens has the name that it says. Checked before the call is noted: a
/// truncation that an earlier server epoch began passed the check then.
pub(in crate::server) async fn check_name(
    session: &ServerSession,
    cx: &Context,
    call: &Call<'_>,
) -> Result<()> {
    let Call::OpenNamed { dir, name, id, handle, .. } = *call else { return Ok(()) };
    if session.has_file(handle) {
        return Ok(()); // it had its name when the call came first
    }
    let place = (dir, Name::new(name)?);
    must_be_named(&*session.export.fs, &cx.uncounted(), place, id).await
}

/// A place for an open file. Refusals are counted and logged at intervals: other clients would get
/// no place either.
fn place_for(session: &ServerSession, reclaims: bool) -> Result<Reservation> {
    let place = session.place_for_file(reclaims);
    place.inspect_err(|error| session.export.refused_files.of(session, error))
}

/// Opens a file, unless the session has it already; `reclaims`: it had it before. The client has to
/// prove it.
pub(super) async fn open(
    session: &ServerSession,
    cx: &Context,
    (id, how, handle): (FileId, OpenHow, u64),
    reclaims: bool,
) -> Result<Reply> {
    if !session.has_file(handle) {
        let place = place_for(session, reclaims)?;
        let file = session.export.fs.open(cx, id, how).await?;
        keep(session, cx, handle, (file, how, place)).await?;
    }
    Ok(opened(session, cx, how, handle).await)
}

/// Whether a change that a death of the server cut short has to be made after all, though something
/// was found under the name. Then the file found belongs to somebody else than the caller.
pub(in crate::server) async fn is_to_be_made(
    session: &ServerSession,
    cx: &Context,
    amend: Option<Amend>,
) -> bool {
    let Some(Amend::Made { id, .. }) = amend else { return false };
    matches!(is_own(&*session.export.fs, cx, id).await, Ok(false))
}

/// Whether the caller owns this file.
async fn is_own(fs: &dyn FileSystem, cx: &Context, id: FileId) -> Result<bool> {
    let attr = fs.getattr(&as_server::to_look(cx), id).await?;
    Ok(attr.uid == fs.user_of(cx))
}

/// Opens what the caller has made, whatever its mode: creat(2) opens a file for more than that
/// allows.
async fn open_own(
    fs: &dyn FileSystem,
    cx: &Context,
    id: FileId,
    how: OpenHow,
) -> Result<Arc<dyn OpenFile>> {
    match fs.open(cx, id, how).await {
        Err(error) if error.errno() == Errno::EACCES && is_own(fs, cx, id).await? => {
            as_server::open(fs, cx, id, how).await
        }
        opened => opened,
    }
}

/// Answers a creation that has made this before a death of the server.
pub(super) async fn created_before(
    session: &ServerSession,
    cx: &Context,
    (how, handle): (CreateHow, u64),
    (id, proven): (FileId, bool),
) -> Result<Reply> {
    let fs = &*session.export.fs;
    let place = place_for(session, true)?;
    let again = tickets::again(how.open); // nothing is left to be cut
    let file = match proven {
        true => open_own(fs, cx, id, again).await?,
        false => fs.open(cx, id, again).await?,
    };
    let entry = Entry { id, attr: file.getattr(&cx.uncounted()).await? };
    keep_new(session, cx, (entry, file), (how.open, handle, place)).await
}

/// The answer that it is open.
async fn opened(session: &ServerSession, cx: &Context, how: OpenHow, handle: u64) -> Reply {
    let at_open = at_open(session, cx, handle, how).await;
    let times_past = at_open.and_then(|seen| seen.times_past);
    let reply = Reply::success(at_open).with_times_past(times_past);
    reply.with_ticket(session.ticket_of(handle))
}

async fn keep_new(
    session: &ServerSession,
    cx: &Context,
    (entry, file): (Entry, Arc<dyn OpenFile>),
    (how, handle, place): (OpenHow, u64, Reservation),
) -> Result<Reply> {
    keep(session, cx, handle, (file, how, place)).await?;
    let no_capability = no_capability(&*session.export.fs, cx, entry.id, how).await;
    Ok(Reply::success((entry, no_capability)).with_ticket(session.ticket_of(handle)))
}

pub(super) async fn keep(
    session: &ServerSession,
    cx: &Context,
    handle: u64,
    (file, how, place): (Arc<dyn OpenFile>, OpenHow, Reservation),
) -> Result<()> {
    match session.keep_file(handle, file, (tickets::access_of(how), place)) {
        Ok(()) => Ok(()),
        Err(file) => {
            let _ = file.close(&cx.uncounted()).await; // the error that counts is the next
            Err(cx.cancelled()) // the session is over, and nobody hears of it
        }
    }
}

/// The ticket for a truncation or extension, which needs the right to write the file. With it the
/// client can replay the change after a loss of power.
pub(super) fn cut_ticket(session: &ServerSession, id: FileId, set: SetAttr) -> Option<Ticket> {
    set.size.map(|_| session.export.tickets.opened(session.node, id, Ticket::WRITE))
}

/// Attributes for a client that caches, which saves it a call. An error is left to that call.
async fn at_open(
    session: &ServerSession,
    cx: &Context,
    handle: u64,
    how: OpenHow,
) -> Option<AtOpen> {
    let file = session.file(handle)?;
    if !how.with_attr {
        // The file system's statement about the pages. It does not know of writes under way, as
        // below.
        return file.at_open().map(|abandoned| AtOpen { times_past: None, ..abandoned });
    }
    let cx = &cx.uncounted();
    // A write that is under way has given the file its time already, and changes it still.
    let at_rest = !session.export.ranges.is_changing(file.id());
    let clock = session.export.fs.clock();
    let attr = file.getattr(cx).await.ok()?;
    let times_past = clock.map(|clock| at_rest && attr.is_past(clock));
    let no_capability = no_capability(&*session.export.fs, cx, file.id(), how).await;
    Some(AtOpen { attr, no_capability, times_past })
}

/// Whether it is known that a file just opened has no `security.capability`. That matters to
/// those who write, for their kernel wants to remove it.
async fn no_capability(fs: &dyn FileSystem, cx: &Context, id: FileId, how: OpenHow) -> bool {
    how.with_attr
        && how.writes()
        && fs
            .getxattr(&cx.uncounted(), id, b"security.capability")
            .await
            .is_err_and(|error| matches!(error.errno(), Errno::ENODATA | Errno::ENOTSUP))
}

/// Create, write, close. Answers the file.
pub(super) async fn put(
    session: &ServerSession,
    cx: &Context,
    name: (FileId, &[u8]),
    (mode, data): (u32, Buf),
    state: ChangeState<'_>,
) -> Result<Reply> {
    session.written_bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
    let id = match open_to_put(session, cx, name, mode, state).await? {
        Target::Open(file) => fill(cx, &*file, data).await?,
        Target::Removed(id) => id,
    };
    let ticket = session.export.tickets.opened(session.node, id, Ticket::WRITE);
    Ok(Reply::success(id).with_ticket(Some(ticket)))
}

/// Where data are put.
enum Target {
    Open(Arc<dyn OpenFile>),
    /// The file was there, and somebody has removed it since.
    Removed(FileId),
}

async fn open_to_put(
    session: &ServerSession,
    cx: &Context,
    (dir, name): (FileId, &[u8]),
    mode: u32,
    state: ChangeState<'_>,
) -> Result<Target> {
    let fs = &*session.export.fs;
    let open = OpenHow::new(libc::O_WRONLY | libc::O_TRUNC);
    let Some((id, made)) = state.amend.and_then(Amend::put) else {
        let how = CreateHow { open, mode, exclusive: false };
        let file = fs.create_without_attr(cx, dir, Name::new(name)?, how).await?;
        if let Some(plan) = state.plan {
            plan.made(&session.export.ranges, file.id()).await;
        }
        return Ok(Target::Open(file));
    };
    // A file that was made was empty, and others may have written to it since.
    let opened = match made {
        true => open_own(fs, cx, id, OpenHow::new(libc::O_WRONLY)).await,
        false => fs.open(cx, id, open).await,
    };
    match opened {
        Err(error) if error.errno() == Errno::ESTALE => Ok(Target::Removed(id)),
        opened => opened.map(Target::Open),
    }
}

/// Writes all of the data, and closes the file.
async fn fill(cx: &Context, file: &dyn OpenFile, mut data: Buf) -> Result<FileId> {
    dray_rt::step().await;
    let mut written = Ok(0);
    let mut at = 0;
    while !data.is_empty() {
        written = file.write(cx, Write::at(at), data.clone()).await;
        match written {
            Ok(0) => written = Err(Error::new(Errno::EIO).because("a write of nothing")),
            Ok(count) => (at, data) = (at + count as u64, data.slice(count..data.len())),
            Err(_) => {}
        }
        if written.is_err() {
            break;
        }
    }
    let flushed = file.flush(cx, LockOwner::own(0)).await;
    let closed = file.close(cx).await;
    written.and(flushed).and(closed).map(|()| file.id())
}
