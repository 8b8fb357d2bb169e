//! Carries out a call that opens a file, for longer or to put data into it.

use std::sync::Arc;

use dray_core::{
    AtOpen, Buf, Context, CreateHow, Errno, Error, FileId, FileSystem, Identity, LockOwner, Name,
    OpenFile, OpenHow, Result, Write,
};

use crate::server::intent::{Amend, Standing};
use crate::server::reply::Reply;
use crate::server::session::Session;
use crate::wire::Call;

pub(super) async fn run(session: &Session, cx: &Context, call: Call<'_>) -> Result<Reply> {
    let fs = &*session.export.fs;
    Ok(match call {
        Call::Open { id, how, handle, again } => {
            if !session.has_file(handle) {
                let cx = if again { &as_system(cx) } else { cx };
                keep(session, cx, handle, fs.open(cx, id, how).await?).await?;
            }
            Reply::success(&at_open(session, cx, handle, how).await)
        }
        Call::Create { dir, name, how, handle } => {
            let (entry, file) = fs.create(cx, dir, Name::new(name)?, how).await?;
            keep(session, cx, handle, file).await?;
            Reply::success(&(entry, no_capability(fs, cx, entry.id, how.open).await))
        }
        Call::Tmpfile { dir, how, handle } => {
            let (entry, file) = fs.tmpfile(cx, dir, how).await?;
            keep(session, cx, handle, file).await?;
            Reply::success(&(entry, no_capability(fs, cx, entry.id, how.open).await))
        }
        _ => unreachable!("called for calls that open a file alone"),
    })
}

pub(super) async fn keep(
    session: &Session,
    cx: &Context,
    handle: u64,
    file: Arc<dyn OpenFile>,
) -> Result<()> {
    match session.keep_file(handle, file) {
        Ok(()) => Ok(()),
        Err(file) => {
            let _ = file.close(cx).await; // the error that counts is the next
            Err(Error::new(Errno::ENFILE).because("the client has as many open files as it may"))
        }
    }
}

/// Opening again after the server lost its state: the rights were checked at the first
/// open, and the file's mode may forbid by now what was allowed then.
pub(super) fn as_system(cx: &Context) -> Context {
    Context { who: Identity::system(), internal: true, ..cx.clone() }
}

/// What a client that caches wants to know besides, so that it need not ask. An error is
/// told when it does.
async fn at_open(session: &Session, cx: &Context, handle: u64, how: OpenHow) -> Option<AtOpen> {
    let file = session.file(handle).filter(|_| how.with_attr)?;
    let attr = file.getattr(cx).await.ok()?;
    let no_capability = no_capability(&*session.export.fs, cx, file.id(), how).await;
    Some(AtOpen { attr, no_capability })
}

/// Whether it is known that a file just opened has no `security.capability`. That matters to
/// those who write, for their kernel wants to remove it.
async fn no_capability(fs: &dyn FileSystem, cx: &Context, id: FileId, how: OpenHow) -> bool {
    how.with_attr
        && how.writes()
        && fs
            .getxattr(cx, id, b"security.capability")
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
            let (cx, how) = match made {
                true => (&as_system(cx), OpenHow::new(libc::O_WRONLY)),
                false => (cx, how),
            };
            match fs.open(cx, id, how).await {
                // It was there, and somebody has removed it since.
                Err(error) if error.errno() == Errno::ESTALE => return Ok(id),
                opened => opened?,
            }
        }
        _ => {
            let how = CreateHow { open: how, mode: place.mode, exclusive: false };
            let (entry, file) = fs.create(cx, place.dir, Name::new(place.name)?, how).await?;
            if let Some(plan) = place.standing.plan {
                plan.made(&session.export.order, entry.id).await;
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
