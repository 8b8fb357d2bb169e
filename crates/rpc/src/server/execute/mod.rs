//! Carries out one call on the export's file system.

mod absent_xattrs;
mod file;
mod lock_leases;
mod media;
mod object_ids;
mod open_ahead;
mod opening;
mod operands;
mod replayed;

use std::sync::Arc;

use dray_core::{Buf, Context, Entry, Errno, Error, Make, Name, OpenFile, Result, Write};

use crate::server::counted;
use crate::server::exactly_once::plan::ChangeState;
use crate::server::reply::Reply;
use crate::server::sabotage::Sabotage;
use crate::server::service::Inner;
use crate::server::session::ServerSession;
use crate::server::tickets;
use crate::wire::{Call, CallHead, copied_bytes};

pub(super) use opening::{check_name, is_to_be_made};
pub(super) use operands::{Files, ShownOperand, check_handles, span};
pub(super) use replayed::{make_answered, note_made_again, open_replayed};

/// Carries out a call, and leaves its answer in `reply`, which is one without results so far. A reply is large:
/// the data of a read are put into it where it is. There is one arm for each operation: here the compiler asks
/// how a new one is carried out. `flags`: those of its [`CallHead`](crate::wire::CallHead).
pub(super) async fn run(
    server: &Inner,
    session: &ServerSession,
    cx: &Context,
    (call, flags, state): (&Call<'_>, u16, ChangeState<'_>),
    data: Option<Buf>,
    reply: &mut Reply,
) -> Result<()> {
    let (fs, broken) = (&*session.export.fs, server.options.broken());
    let file = |handle| opened(session, state.files, handle);
    let amend = state.amend;
    *reply = match *call {
        Call::Lookup { dir, name } => Reply::success(fs.lookup(cx, dir, Name::new(name)?).await?),
        Call::LookupOpen { dir, name, how, handle } => {
            open_ahead::lookup_open(server, session, cx, (dir, name), (how, handle)).await?
        }
        Call::Parent { dir } => Reply::success(fs.parent(cx, dir).await?),
        Call::Getattr { id, handle: None } => Reply::success(fs.getattr(cx, id).await?),
        Call::Getattr { handle: Some(handle), .. } => {
            Reply::success(file(handle)?.getattr(cx).await?)
        }
        Call::Setattr { id, handle, set } => {
            let attr = match handle {
                Some(handle) => file(handle)?.setattr(cx, set).await?,
                None => fs.setattr(cx, id, set).await?,
            };
            Reply::success(attr).with_ticket(opening::cut_ticket(session, id, set))
        }
        Call::Readlink { id } => counted::answer(session, || fs.readlink(cx, id)).await?,
        Call::Make { dir, name, kind, mode, rdev, target } => {
            let entry = match amend.and_then(|amend| amend.made()) {
                Some((id, _)) => Entry { id, attr: fs.getattr(cx, id).await? },
                None => {
                    let what = made(kind, (mode, rdev), target)?;
                    fs.make(cx, dir, Name::new(name)?, what).await?
                }
            };
            Reply::success(entry)
        }
        Call::Remove { .. } | Call::Rename { .. } if broken.drops_change(call.op()) => {
            Reply::success(())
        }
        Call::Remove { dir, name, kind } => {
            Reply::success(fs.remove(cx, dir, Name::new(name)?, kind).await?)
        }
        Call::Rename { from, from_name, to, to_name, how } => {
            let (from, to) = ((from, Name::new(from_name)?), (to, Name::new(to_name)?));
            Reply::success(fs.rename(cx, from, to, how).await?)
        }
        Call::Link { id, dir, name } => {
            Reply::success(fs.link(cx, id, dir, Name::new(name)?).await?)
        }
        Call::Open { id, how, handle, again } => {
            let how = if again { tickets::again(how) } else { how };
            opening::open(session, cx, (id, how, handle), again).await?
        }
        // The name was looked at before its intent was noted.
        Call::OpenNamed { id, how, handle, .. } => {
            opening::open(session, cx, (id, how, handle), false).await?
        }
        Call::Learn { dir, name, id } => {
            Reply::success(fs.learn(cx, (dir, Name::new(name)?), id).await?)
        }
        // What it names was marked and recalled before, and stays so.
        Call::Hold { .. } => Reply::success(()),
        Call::Release { number } => {
            let lasted = session.export.lease_holds.release(session.id, number);
            // A hold that has not lasted comes again behind the change, which would mend what is broken here.
            let pretended = server.options.broken().is(Sabotage::LeaseHolds);
            Reply::success(u64::from(lasted || pretended))
        }
        Call::Reopen { id, how, handle, ticket } => {
            opening::reopen(session, cx, (id, how, handle), ticket).await?
        }
        Call::Create { dir, name, how, handle } => match amend.and_then(|amend| amend.made()) {
            Some(made) => opening::created_before(session, cx, (how, handle), made).await?,
            None => opening::create(session, cx, (dir, name), (how, handle)).await?,
        },
        Call::Tmpfile { dir, how, handle } => {
            opening::tmpfile(session, cx, dir, (how, handle)).await?
        }
        Call::Access { id, want } => Reply::success(fs.access(cx, id, want).await?),
        Call::Statfs {} => Reply::success(fs.statfs(cx).await?),
        Call::Getxattr { id, name } if object_ids::are_asked(session, name) => {
            Reply::success(object_ids::of(session, cx, id, name).await?)
        }
        Call::Getxattr { id, name } => {
            counted::answer(session, || fs.getxattr(cx, id, name)).await?
        }
        Call::Setxattr { id, name, value, how } => {
            Reply::success(fs.setxattr(cx, id, name, value, how).await?)
        }
        Call::Listxattr { id } => counted::answer(session, || fs.listxattr(cx, id)).await?,
        Call::Removexattr { id, name } => Reply::success(fs.removexattr(cx, id, name).await?),
        Call::Read { handle, at, len_bytes } => {
            reply.add_data(file::read(server, session, cx, (handle, at, len_bytes)).await?);
            return Ok(());
        }
        Call::Write { handle, how } => {
            let appends_at = amend.and_then(|amend| amend.append_at());
            let how = appends_at.map_or(how, |at| Write { at, append: false, ..how });
            let (file, data) = (file(handle)?, data.unwrap_or_default());
            file::write(server, session, cx, &*file, (how, data)).await?
        }
        Call::WriteBack { handle, kill_set_id, extents, .. } => {
            let written = (kill_set_id, extents, data.unwrap_or_default());
            file::write_back(session, cx, &*file(handle)?, written).await?
        }
        Call::Readdir { handle, cookie, max_bytes, plus } => {
            let absences = flags & CallHead::WANTS_ABSENCES != 0;
            file::readdir(session, cx, handle, (cookie, max_bytes, plus, absences)).await?
        }
        Call::Flush { handle, owner } => {
            let owner = owner.of_node(cx.origin.node);
            let flushed = file(handle)?.flush(cx, owner).await;
            session.forget_owner(handle, owner);
            Reply::success(flushed?)
        }
        Call::Sync { handle, data_only } => {
            file::sync(server, session, cx, (handle, data_only)).await?
        }
        Call::Allocate { handle, what } => Reply::success(file(handle)?.allocate(cx, what).await?),
        Call::Seek { handle, at, what } => Reply::success(file(handle)?.seek(cx, at, what).await?),
        Call::CopyRange { handle, at, to, to_at, len_bytes } => {
            let most = amend.and_then(|amend| amend.copy_at_most()).unwrap_or(u64::MAX);
            let (from, to) = (file(handle)?, file(to)?);
            Reply::success(
                from.copy_range(cx, at, &*to, to_at, copied_bytes(len_bytes).min(most)).await?,
            )
        }
        Call::Lock { handle, lock, purpose, .. } if purpose.gives_back() => {
            lock_leases::give_back(session, cx, handle, (lock, purpose)).await?
        }
        Call::Lock { handle, lock, wait, purpose } => {
            file::note_and_lock(server, session, cx, handle, (lock, wait, purpose)).await?
        }
        Call::TestLock { handle, lock } => {
            Reply::success(file::test_lock(session, cx, &*file(handle)?, lock).await?)
        }
        Call::GetFlags { handle } => Reply::success(file(handle)?.get_flags(cx).await?),
        Call::SetFlags { handle, flags } => {
            Reply::success(file(handle)?.set_flags(cx, flags).await?)
        }
        Call::GetXflags { handle } => Reply::success(file(handle)?.get_xflags(cx).await?),
        Call::SetXflags { handle, set } => Reply::success(file(handle)?.set_xflags(cx, set).await?),
        Call::Close { .. } if broken.is(Sabotage::Closes) => Reply::success(()),
        Call::Close { handle } => {
            if let Some(file) = session.take_file(handle) {
                session.close_file(cx, handle, &*file).await?;
            }
            Reply::success(())
        }
        Call::Put { dir, name, mode } => {
            let data = data.unwrap_or_default();
            opening::put(session, cx, (dir, name), (mode, data), state).await?
        }
        Call::SyncAll {} => media::sync_all(server, session, cx).await?,
        Call::Recover { instance, newest, durable_stamp, step, .. } => {
            media::recover(server, session, instance, (newest, durable_stamp, step)).await?
        }
        Call::Declare { instance, durable_stamp, ticket, durable_stamps, last } => {
            let known =
                media::Declaration { durable_stamp: (durable_stamp, ticket), durable_stamps, last };
            media::declare(server, session, instance, known).await?
        }
        Call::Redo { handle, stamp, change } => {
            let change = (stamp, change, data.unwrap_or_default());
            file::redo(server, session, cx, &*file(handle)?, change).await?
        }
    };
    Ok(())
}

/// An open file: the one that the change has its range grant for, or else the one with the number
/// now. Errors: `EBADF`.
fn opened(session: &ServerSession, files: &Files, handle: u64) -> Result<Arc<dyn OpenFile>> {
    let file = files.get(handle).cloned().or_else(|| session.file(handle));
    file.ok_or_else(|| Error::new(Errno::EBADF))
}

/// The entry that [`Call::Make`] makes. Errors: `EPROTO`, there is no such kind.
fn made(kind: u8, (mode, rdev): (u32, u32), target: &[u8]) -> Result<Make<'_>> {
    match kind {
        0 => Ok(Make::Directory { mode }),
        1 => Ok(Make::Node { mode, rdev }),
        2 => Ok(Make::Symlink { target }),
        _ => Err(Error::new(Errno::EPROTO).because("unknown kind of file to make")),
    }
}
