//! Carries out a call that opens a file, for longer or to put data into it.

use std::sync::Arc;

use dray_core::{
    AtOpen, Buf, Context, CreateHow, Entry, Errno, Error, FileId, FileSystem, LockOwner, Name,
    OpenFile, OpenHow, Place as FilePlace, Result, SetAttr, Write, must_be_named,
};

use crate::server::as_server;
use crate::server::exactly_once::plan::Standing;
use crate::server::exactly_once::settle::Amend;
use crate::server::reply::Reply;
use crate::server::session::Session;
use crate::server::tickets;
use crate::wire::{Call, Ticket};

pub(super) async fn run(session: &Session, cx: &Context, call: Call<'_>) -> Result<Reply> {
    let fs = &*session.export.fs;
    Ok(match call {
        // Whoever says that it had the file open has to show it, as below.
        Call::Open { id, how, handle, again } => {
            let how = if again { tickets::again(how) } else { how };
            open(session, cx, (id, how, handle), again).await?
        }
        // The name was looked at before its intent was noted.
        Call::OpenNamed { id, how, handle, .. } => {
            open(session, cx, (id, how, handle), false).await?
        }
        Call::Reopen { id, how, handle, ticket } => {
            // It was opened to be executed by who could; the ticket says so. And rights were checked at
            // the first opening: the file's mode may forbid by now what was allowed then.
            let how = tickets::again(OpenHow { flags: how.flags & !OpenHow::EXECUTE, ..how });
            if !session.export.tickets.may_open(ticket, session.node, id, how) {
                let error = Error::new(Errno::EACCES);
                return Err(error.because("opened again for more than it had been open for"));
            }
            if !session.has_file(handle) {
                let place = place_for(session, true)?;
                let file = as_server::open(fs, cx, id, how).await?;
                keep(session, cx, handle, (file, how, place)).await?;
            }
            opened(session, cx, how, handle).await
        }
        Call::Create { dir, name, how, handle } => {
            let place = place_for(session, false)?;
            let made = fs.create(cx, dir, Name::new(name)?, how).await?;
            keep_new(session, cx, made, (how.open, handle, place)).await?
        }
        Call::Tmpfile { dir, how, handle } => {
            let place = place_for(session, false)?;
            let made = fs.tmpfile(cx, dir, how).await?;
            keep_new(session, cx, made, (how.open, handle, place)).await?
        }
        _ => unreachable!("called for calls that open a file alone"),
    })
}

/// Whether what a call opens has the name that it says. Asked before anything is noted of the call:
/// what a life of the server before this one had begun to cut had its name then.
pub(in crate::server) async fn check_name(
    session: &Session,
    cx: &Context,
    call: &Call<'_>,
) -> Result<()> {
    match *call {
        // Which the session has open had its name when the call came first.
        Call::OpenNamed { dir, name, id, handle, .. } if !session.has_file(handle) => {
            let place = (dir, Name::new(name)?);
            must_be_named(&*session.export.fs, &cx.uncounted(), place, id).await
        }
        _ => Ok(()),
    }
}

/// A place for an open file. Who is refused one is told of, since others would have none.
fn place_for(session: &Session, claims: bool) -> Result<FilePlace> {
    let place = session.place_for_file(claims);
    place.inspect_err(|error| session.export.refused_files.of(session, error))
}

/// Opens a file, unless the session has it already; `claims`: it had it before.
async fn open(
    session: &Session,
    cx: &Context,
    (id, how, handle): (FileId, OpenHow, u64),
    claims: bool,
) -> Result<Reply> {
    if !session.has_file(handle) {
        let place = place_for(session, claims)?;
        let file = session.export.fs.open(cx, id, how).await?;
        keep(session, cx, handle, (file, how, place)).await?;
    }
    Ok(opened(session, cx, how, handle).await)
}

/// Whether what a death of the server cut short has to be made after all, though something was found
/// under the name: that belongs to somebody else than who asks now.
pub(in crate::server) async fn is_to_be_made(
    session: &Session,
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

/// Opens what the caller has made, whatever its mode: creat(2) opens a file for more than that allows.
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

/// Answers a call that has made this before a death of the server.
pub(super) async fn made(
    session: &Session,
    cx: &Context,
    call: Call<'_>,
    (id, proven): (FileId, bool),
) -> Result<Reply> {
    let fs = &*session.export.fs;
    match call {
        Call::Create { how, handle, .. } => {
            let place = place_for(session, true)?;
            let again = tickets::again(how.open); // nothing is left to be cut
            let file = match proven {
                true => open_own(fs, cx, id, again).await?,
                false => fs.open(cx, id, again).await?,
            };
            let entry = Entry { id, attr: file.getattr(&cx.uncounted()).await? };
            keep_new(session, cx, (entry, file), (how.open, handle, place)).await
        }
        Call::Make { .. } => Ok(Reply::success(&Entry { id, attr: fs.getattr(cx, id).await? })),
        _ => Err(Error::new(Errno::EPROTO).because("it makes nothing")),
    }
}

/// The answer that it is open.
async fn opened(session: &Session, cx: &Context, how: OpenHow, handle: u64) -> Reply {
    let at_open = at_open(session, cx, handle, how).await;
    let times_past = at_open.and_then(|seen| seen.times_past);
    let reply = Reply::success(&at_open).with_times_past(times_past);
    reply.with_ticket(session.ticket_of(handle))
}

async fn keep_new(
    session: &Session,
    cx: &Context,
    (entry, file): (Entry, Arc<dyn OpenFile>),
    (how, handle, place): (OpenHow, u64, FilePlace),
) -> Result<Reply> {
    keep(session, cx, handle, (file, how, place)).await?;
    let no_capability = no_capability(&*session.export.fs, cx, entry.id, how).await;
    Ok(Reply::success(&(entry, no_capability)).with_ticket(session.ticket_of(handle)))
}

pub(super) async fn keep(
    session: &Session,
    cx: &Context,
    handle: u64,
    (file, how, place): (Arc<dyn OpenFile>, OpenHow, FilePlace),
) -> Result<()> {
    match session.keep_file(handle, file, (tickets::access_of(how), place)) {
        Ok(()) => Ok(()),
        Err(file) => {
            let _ = file.close(&cx.uncounted()).await; // the error that counts is the next
            Err(cx.cancelled()) // the session is over, and nobody hears of it
        }
    }
}

/// For whoever cut or lengthened a file, which takes the right to write it: the change is to
/// be made again after a loss of power.
pub(super) fn cut_ticket(session: &Session, id: FileId, set: SetAttr) -> Option<Ticket> {
    set.size.map(|_| session.export.tickets.opened(session.node, id, Ticket::WRITE))
}

/// What a client that caches wants to know besides, so that it need not ask. An error is
/// told when it does.
async fn at_open(session: &Session, cx: &Context, handle: u64, how: OpenHow) -> Option<AtOpen> {
    let file = session.file(handle)?;
    if !how.with_attr {
        // What the file system has to say of the pages. It does not know of writes under way, as below.
        return file.at_open().map(|unasked| AtOpen { times_past: None, ..unasked });
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

/// Where data are put.
pub(super) struct Place<'a> {
    pub(super) dir: FileId,
    pub(super) name: &'a [u8],
    pub(super) mode: u32,
    pub(super) standing: Standing<'a>,
}

/// Create, write, close. Answers the file.
pub(super) async fn put(
    session: &Session,
    cx: &Context,
    place: Place<'_>,
    mut data: Buf,
) -> Result<FileId> {
    let fs = &*session.export.fs;
    let how = OpenHow::new(libc::O_WRONLY | libc::O_TRUNC);
    let file = match place.standing.amend {
        Some(Amend::Put { id, made }) => {
            // One that was made was empty, and others may have written to it since.
            let opened = match made {
                true => open_own(fs, cx, id, OpenHow::new(libc::O_WRONLY)).await,
                false => fs.open(cx, id, how).await,
            };
            match opened {
                // It was there, and somebody has removed it since.
                Err(error) if error.errno() == Errno::ESTALE => return Ok(id),
                opened => opened?,
            }
        }
        _ => {
            let how = CreateHow { open: how, mode: place.mode, exclusive: false };
            let (entry, file) = fs.create(cx, place.dir, Name::new(place.name)?, how).await?;
            if let Some(plan) = place.standing.plan {
                plan.made(&session.export.ranges, entry.id).await;
            }
            file
        }
    };
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
    let flushed = file.flush(cx, LockOwner(0)).await;
    let closed = file.close(cx).await;
    written.and(flushed).and(closed).map(|()| file.id())
}
