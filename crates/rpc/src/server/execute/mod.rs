//! Carries out one call on the export's file system.

mod about;
mod ahead;
mod file;
mod media;
mod opening;
mod replayed;

use std::sync::atomic::Ordering;

use dray_core::{Buf, Context, Errno, Error, FileSystem, Make, Name, Op, Result};

use crate::server::counted;
use crate::server::exactly_once::plan::Standing;
use crate::server::exactly_once::settle::Amend;
use crate::server::reply::Reply;
use crate::server::sabotage::Sabotage;
use crate::server::service::Inner;
use crate::server::session::Session;
use crate::wire::{Call, Input, Ticket};

pub(super) use about::{Files, changed, check_handles, subjects};
pub(super) use opening::{check_name, is_to_be_made};
pub(super) use replayed::open_replayed;

use opening::Place;

/// Carries out a call; whatever happens, there is an answer.
pub(super) async fn execute(
    server: &Inner,
    session: &Session,
    cx: &Context,
    op: Op,
    body: &[u8],
    data: Option<Buf>,
    standing: Standing<'_>,
) -> Reply {
    let result = match (Call::get(op, &mut Input(body)), standing.amend) {
        (Ok(Call::Put { dir, name, mode }), _) => {
            let data = data.unwrap_or_default();
            session.written_bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
            let place = Place { dir, name, mode, standing };
            opening::put(session, cx, place, data).await.map(|id| {
                let ticket = session.export.tickets.opened(session.node, id, Ticket::WRITE);
                Reply::success(&id).with_ticket(Some(ticket))
            })
        }
        (Ok(call), Some(Amend::Made { id, proven })) => {
            opening::made(session, cx, call, (id, proven)).await
        }
        (Ok(call), amend) => {
            let call = match amend {
                Some(amend) => amend.apply(call),
                None => call,
            };
            run(server, session, cx, (call, standing.files), data).await
        }
        (Err(_), _) => Err(Error::new(Errno::EPROTO).because("malformed call")),
    };
    result.unwrap_or_else(|error| Reply::failure(&error))
}

async fn run(
    server: &Inner,
    session: &Session,
    cx: &Context,
    (call, files): (Call<'_>, &Files),
    data: Option<Buf>,
) -> Result<Reply> {
    let (fs, sabotage) = (&*session.export.fs, server.options.sabotage);
    Ok(match call {
        Call::Lookup { dir, name } => Reply::success(&fs.lookup(cx, dir, Name::new(name)?).await?),
        Call::LookupOpen { dir, name, how, handle } => {
            ahead::lookup_open(server, session, cx, (dir, name), (how, handle)).await?
        }
        Call::Parent { dir } => Reply::success(&fs.parent(cx, dir).await?),
        Call::Getattr { id, handle: None } => Reply::success(&fs.getattr(cx, id).await?),
        Call::Setattr { id, handle: None, set } => {
            let reply = Reply::success(&fs.setattr(cx, id, set).await?);
            reply.with_ticket(opening::cut_ticket(session, id, set))
        }
        Call::Readlink { id } => counted::answer(session, || fs.readlink(cx, id)).await?,
        Call::Make { .. } => make(fs, cx, call).await?,
        Call::Remove { .. } | Call::Rename { .. } if Sabotage::forgets(sabotage, call.op()) => {
            Reply::success(&())
        }
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
        Call::Open { .. }
        | Call::OpenNamed { .. }
        | Call::Reopen { .. }
        | Call::Create { .. }
        | Call::Tmpfile { .. } => opening::run(session, cx, call).await?,
        Call::Access { id, want } => Reply::success(&fs.access(cx, id, want).await?),
        Call::Statfs {} => Reply::success(&fs.statfs(cx).await?),
        Call::Getxattr { id, name } => {
            counted::answer(session, || fs.getxattr(cx, id, name)).await?
        }
        Call::Setxattr { id, name, value, how } => {
            Reply::success(&fs.setxattr(cx, id, name, value, how).await?)
        }
        Call::Listxattr { id } => counted::answer(session, || fs.listxattr(cx, id)).await?,
        Call::Removexattr { id, name } => Reply::success(&fs.removexattr(cx, id, name).await?),
        Call::Close { .. } if sabotage == Some(Sabotage::Closes) => Reply::success(&()),
        Call::Close { handle } => {
            if let Some(file) = session.take_file(handle) {
                session.close_file(cx, handle, &*file).await?;
            }
            Reply::success(&())
        }
        Call::SyncAll {} | Call::Recover { .. } | Call::Declare { .. } => {
            media::run(server, session, cx, call).await?
        }
        call => file::run(server, session, cx, (call, files), data).await?,
    })
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
