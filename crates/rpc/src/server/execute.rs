//! Carries out one call on the export's file system.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dray_core::{
    AtOpen, Buf, Context, CreateHow, DirPage, Entry, Errno, Error, FileId, FileSystem, Identity,
    Lock, LockKind, LockOwner, Make, Name, Op, OpenFile, OpenHow, Result, Write,
};

use crate::server::intent::{Amend, Standing};
use crate::server::order::Span;
use crate::server::service::{Inner, Sabotage};
use crate::server::session::Session;
use crate::server::stamps::WHOLE;
use crate::wire::{Call, Change, Input, PAGE_MAX_BYTES, ReplyHead, Stamp, Wire, get_floors};

/// An answer, complete but for its tag.
pub(crate) struct Reply {
    pub(crate) message: Vec<u8>,
    pub(crate) data: Option<Buf>,
}

impl Reply {
    pub(crate) fn success<'a>(value: &impl Wire<'a>) -> Reply {
        let mut message = Vec::with_capacity(192); // an entry fits
        ReplyHead::success(0).put_message(&mut message);
        value.put(&mut message);
        Reply { message, data: None }
    }

    fn with_data(data: Buf) -> Reply {
        Reply { data: Some(data), ..Reply::success(&()) }
    }

    /// Whether the call was carried out.
    pub(crate) fn is_success(&self) -> bool {
        let head = ReplyHead::get_message(&mut Input(&self.message));
        head.is_ok_and(|head| head.errno == 0)
    }

    /// Adds a stamp.
    pub(crate) fn stamp(&mut self, stamp: Stamp) {
        ReplyHead::set_stamp(&mut self.message, stamp);
    }

    pub(crate) fn failure(error: &Error) -> Reply {
        let mut message = Vec::new();
        ReplyHead::failure(0, error).put_message(&mut message);
        Reply { message, data: None }
    }

    /// The error that it carries.
    pub(crate) fn error(&self) -> Option<Error> {
        ReplyHead::get_message(&mut Input(&self.message)).ok()?.error()
    }

    pub(crate) fn replayed(message: Vec<u8>) -> Reply {
        Reply { message, data: None }
    }

    fn unknown_handle() -> Reply {
        let head = ReplyHead {
            flags: ReplyHead::UNKNOWN_HANDLE,
            ..ReplyHead::failure(0, &Error::retry(Errno::EBADF))
        };
        let mut message = Vec::new();
        head.put_message(&mut message);
        Reply { message, data: None }
    }
}

/// Whether the session has the open files that a call names.
pub(crate) fn check_handles(
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

/// Carries out a call; whatever happens, there is an answer.
pub(crate) async fn execute(
    server: &Inner,
    session: &Session,
    cx: &Context,
    op: Op,
    body: &[u8],
    data: Option<Buf>,
    standing: Standing<'_>,
) -> Reply {
    let result = match Call::get(op, &mut Input(body)) {
        Ok(Call::Put { dir, name, mode }) => {
            let data = data.unwrap_or_default();
            session.written_bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
            let place = Place { dir, name, mode, standing };
            put(session, cx, place, data).await.map(|id| Reply::success(&id))
        }
        Ok(call) => {
            let call = match standing.amend {
                Some(amend) => amend.apply(call),
                None => call,
            };
            run(server, session, cx, call, data).await
        }
        Err(_) => Err(Error::new(Errno::EPROTO).because("malformed call")),
    };
    result.unwrap_or_else(|error| Reply::failure(&error))
}

async fn run(
    server: &Inner,
    session: &Session,
    cx: &Context,
    call: Call<'_>,
    data: Option<Buf>,
) -> Result<Reply> {
    let fs = &*session.export.fs;
    Ok(match call {
        Call::Lookup { dir, name } => Reply::success(&fs.lookup(cx, dir, Name::new(name)?).await?),
        Call::Parent { dir } => Reply::success(&fs.parent(cx, dir).await?),
        Call::Getattr { id, handle: None } => Reply::success(&fs.getattr(cx, id).await?),
        Call::Setattr { id, handle: None, set } => Reply::success(&fs.setattr(cx, id, set).await?),
        Call::Readlink { id } => Reply::success(&fs.readlink(cx, id).await?),
        Call::Make { .. } => make(fs, cx, call).await?,
        Call::Remove { dir, name, kind } => {
            Reply::success(&fs.remove(cx, dir, Name::new(name)?, kind).await?)
        }
        Call::Rename { from, from_name, to, to_name, how } => {
            let (from, to) = ((from, Name::new(from_name)?), (to, Name::new(to_name)?));
            Reply::success(&fs.rename(cx, from, to, how).await?)
        }
        Call::Link { id, dir, name } => {
            Reply::success(&fs.link(cx, id, dir, Name::new(name)?).await?)
        }
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
        Call::Access { id, want } => Reply::success(&fs.access(cx, id, want).await?),
        Call::Statfs {} => Reply::success(&fs.statfs(cx).await?),
        Call::Getxattr { id, name } => Reply::success(&fs.getxattr(cx, id, name).await?),
        Call::Setxattr { id, name, value, how } => {
            Reply::success(&fs.setxattr(cx, id, name, value, how).await?)
        }
        Call::Listxattr { id } => Reply::success(&fs.listxattr(cx, id).await?),
        Call::Removexattr { id, name } => Reply::success(&fs.removexattr(cx, id, name).await?),
        Call::Close { handle } => {
            if let Some(file) = session.take_file(handle) {
                session.close_file(cx, handle, &*file).await?;
            }
            Reply::success(&())
        }
        Call::SyncAll {} => sync_all(server, session, cx).await?,
        Call::Recover { instance, .. } if instance != server.instance => {
            return Err(Error::new(Errno::ESTALE).because("meant for an earlier server"));
        }
        Call::Recover { step: 2, .. } => {
            server.recovery.done(session.id);
            Reply::success(&())
        }
        Call::Recover { newest, floor, floors, step, .. } => {
            recover(server, session, (newest, floor, floors, step == 1)).await?
        }
        call => run_on_file(server, session, cx, call, data).await?,
    })
}

async fn sync_all(server: &Inner, session: &Session, cx: &Context) -> Result<Reply> {
    let export = &session.export;
    let stamp = export.stable.sync_all(cx, &*export.fs, &export.stamps).await?;
    server.tell_stable(export, stamp);
    let mut reply = Reply::success(&());
    if session.stamps() {
        reply.stamp(Stamp { number: stamp, at: Stamp::NOWHERE });
    }
    Ok(reply)
}

/// Syncs a file. Its stamp says what is on media: everything that was over before.
async fn sync(session: &Session, cx: &Context, handle: u64, data_only: bool) -> Result<Reply> {
    let file = session.file(handle).ok_or_else(|| Error::new(Errno::EBADF))?;
    let upto = session.export.stamps.take(file.id(), WHOLE).await.number;
    file.sync(cx, data_only).await?;
    let mut reply = Reply::success(&());
    if session.stamps() {
        reply.stamp(Stamp { number: upto, at: Stamp::NOWHERE });
    }
    Ok(reply)
}

/// What a client knows after a loss of power; with the last of it, it waits for the others.
async fn recover(
    server: &Inner,
    session: &Session,
    (newest, floor, floors, last): (u64, u64, &[u8], bool),
) -> Result<Reply> {
    server.recovery.admit(session.id)?;
    let floors = get_floors(floors).map_err(|_| Error::new(Errno::EPROTO))?;
    session.export.stamps.raise(newest);
    if server.options.sabotage != Some(Sabotage::RedoFloor) {
        session.export.redone.declare(floor, &floors)?;
    }
    if last {
        server.recovery.declare(session.id).await?;
    }
    Ok(Reply::success(&()))
}

async fn redo(
    server: &Inner,
    session: &Session,
    cx: &Context,
    file: &dyn OpenFile,
    (stamp, change, data): (u64, Change, Buf),
) -> Result<Reply> {
    let _active = server.recovery.enter(session.id)?;
    let stamp = match server.options.sabotage {
        Some(Sabotage::Redo) => return Ok(Reply::success(&())),
        Some(Sabotage::RedoOrder) => session.export.stamps.next(),
        _ => stamp,
    };
    let export = &session.export;
    export.redone.redo(cx, &export.stamps, file, (stamp, change, data)).await?;
    Ok(Reply::success(&()))
}

async fn run_on_file(
    server: &Inner,
    session: &Session,
    cx: &Context,
    call: Call<'_>,
    data: Option<Buf>,
) -> Result<Reply> {
    let file = |handle| session.file(handle).ok_or_else(|| Error::new(Errno::EBADF));
    Ok(match call {
        Call::Read { handle, at, len_bytes } => {
            let len_bytes = (len_bytes as usize).min(dray_core::IO_MAX_BYTES);
            let span = Span::bytes(at, len_bytes as u64);
            session.export.order.whole(file(handle)?.id(), span).await;
            let mut into = session.buffers.wait(len_bytes).await;
            drop(into.split_off(len_bytes));
            let read = file(handle)?.read(cx, at, into).await.map_err(|(error, _)| error)?;
            session.read_bytes.fetch_add(read.len() as u64, Ordering::Relaxed);
            Reply::with_data(read.freeze())
        }
        Call::Write { handle, how } => {
            let written = file(handle)?.write(cx, how, data.unwrap_or_default()).await?;
            session.written_bytes.fetch_add(written as u64, Ordering::Relaxed);
            Reply::success(&(written as u32))
        }
        Call::Readdir { handle, cookie, max_bytes, plus } => {
            // The page must fit its frame with every record's fixed part.
            let max_bytes = (max_bytes as usize).min(PAGE_MAX_BYTES / 2);
            page(&file(handle)?.readdir(cx, cookie, max_bytes, plus).await?)?
        }
        Call::Getattr { handle: Some(handle), .. } => {
            Reply::success(&file(handle)?.getattr(cx).await?)
        }
        Call::Setattr { handle: Some(handle), set, .. } => {
            Reply::success(&file(handle)?.setattr(cx, set).await?)
        }
        Call::Flush { handle, owner } => {
            let flushed = file(handle)?.flush(cx, owner).await;
            session.forget_owner(handle, owner);
            Reply::success(&flushed?)
        }
        Call::Sync { handle, data_only } => sync(session, cx, handle, data_only).await?,
        Call::Redo { handle, stamp, change } => {
            let change = (stamp, change, data.unwrap_or_default());
            redo(server, session, cx, &*file(handle)?, change).await?
        }
        Call::Allocate { handle, what } => Reply::success(&file(handle)?.allocate(cx, what).await?),
        Call::Seek { handle, at, what } => Reply::success(&file(handle)?.seek(cx, at, what).await?),
        Call::CopyRange { handle, at, to, to_at, len_bytes } => {
            let (from, to) = (file(handle)?, file(to)?);
            Reply::success(&from.copy_range(cx, at, &*to, to_at, len_bytes).await?)
        }
        Call::Lock { handle, lock, wait, reclaim } => {
            let file = file(handle)?;
            if lock.range.start > lock.range.end {
                return Err(Error::new(Errno::EINVAL).because("a lock that ends before it begins"));
            }
            // Before: a session that ends meanwhile has to know.
            if lock.kind != LockKind::Unlock {
                session.note_lock(handle, &lock)?;
            }
            let reply = lock_file(server, session, cx, &*file, (lock, wait, reclaim)).await?;
            if lock.kind != LockKind::Unlock {
                session.note_lock(handle, &lock)?; // a close may have come in between
            }
            reply
        }
        Call::TestLock { handle, lock } => {
            Reply::success(&file(handle)?.test_lock(cx, lock).await?)
        }
        Call::GetFlags { handle } => Reply::success(&file(handle)?.get_flags(cx).await?),
        Call::SetFlags { handle, flags } => {
            Reply::success(&file(handle)?.set_flags(cx, flags).await?)
        }
        _ => unreachable!("`run` deals with every call that is not on an open file"),
    })
}

async fn lock_file(
    server: &Inner,
    session: &Session,
    cx: &Context,
    file: &dyn OpenFile,
    (lock, wait, reclaim): (Lock, bool, bool),
) -> Result<Reply> {
    let takes = lock.kind != LockKind::Unlock;
    if takes && !reclaim {
        // Somebody may come back for a lock that the server's last life gave out.
        server.grace.wait(cx).await?;
    } else if reclaim && !server.grace.allows(session.id) {
        let error = Error::new(Errno::ENOLCK);
        return Err(error.because("too late to claim a lock again: others may have had it"));
    }
    if reclaim && server.options.sabotage == Some(Sabotage::Reclaim) {
        return Ok(Reply::success(&()));
    }
    if wait && let Some(cancel) = &cx.cancel {
        session.wait_begins(cx.request.0, cancel.clone());
    }
    let result = file.lock(cx, lock, wait).await;
    session.wait_ends(cx.request.0);
    Ok(Reply::success(&result?))
}

async fn make(fs: &dyn FileSystem, cx: &Context, call: Call<'_>) -> Result<Reply> {
    let Call::Make { dir, name, kind, mode, rdev, target } = call else {
        unreachable!("called for this call alone");
    };
    let what = match kind {
        0 => Make::Directory { mode },
        1 => Make::Node { mode, rdev },
        2 => Make::Symlink { target },
        _ => return Err(Error::new(Errno::EPROTO).because("unknown kind of file to make")),
    };
    Ok(Reply::success(&fs.make(cx, dir, Name::new(name)?, what).await?))
}

/// Where data are put.
struct Place<'a> {
    dir: FileId,
    name: &'a [u8],
    mode: u32,
    standing: Standing<'a>,
}

/// Create, write, close. Answers the file.
async fn put(session: &Session, cx: &Context, place: Place<'_>, mut data: Buf) -> Result<FileId> {
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

/// Opening again after the server lost its state: the rights were checked at the first
/// open, and the file's mode may forbid by now what was allowed then.
fn as_system(cx: &Context) -> Context {
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

/// An opening that an earlier life of the server carried out is answered again, and this
/// one has not the file: it is opened, else it could go before its client uses it.
pub(crate) async fn open_replayed(
    session: &Session,
    cx: &Context,
    op: Op,
    body: &[u8],
    answer: &[u8],
) {
    let mut input = Input(answer);
    if !ReplyHead::get_message(&mut input).is_ok_and(|head| head.errno == 0) {
        return;
    }
    let opened = match Call::get(op, &mut Input(body)) {
        Ok(Call::Create { how, handle, .. }) | Ok(Call::Tmpfile { how, handle, .. }) => {
            input.get::<Entry>().ok().map(|entry| (entry.id, how.open, handle))
        }
        Ok(Call::Open { id, how, handle, .. }) => Some((id, how, handle)),
        _ => None,
    };
    let Some((id, how, handle)) = opened.filter(|(_, _, handle)| !session.has_file(*handle)) else {
        return;
    };
    let how = OpenHow::new(how.flags & !(libc::O_TRUNC | libc::O_CREAT | libc::O_EXCL));
    if let Ok(file) = session.export.fs.open(&as_system(cx), id, how).await {
        let _ = keep(session, cx, handle, file).await; // its client will find out
    }
}

async fn keep(session: &Session, cx: &Context, handle: u64, file: Arc<dyn OpenFile>) -> Result<()> {
    match session.keep_file(handle, file) {
        Ok(()) => Ok(()),
        Err(file) => {
            let _ = file.close(cx).await; // the error that counts is the next
            Err(Error::new(Errno::ENFILE).because("the client has as many open files as it may"))
        }
    }
}

fn page(page: &DirPage) -> Result<Reply> {
    let mut bytes = Vec::with_capacity(PAGE_MAX_BYTES / 2);
    page.put(&mut bytes);
    if bytes.len() > PAGE_MAX_BYTES {
        return Err(Error::new(Errno::EIO).because("a directory page larger than asked for"));
    }
    Ok(Reply::with_data(Buf::from(bytes)))
}

/// What a call is about, for people.
pub(crate) fn describe(op: Op, body: &[u8]) -> String {
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
