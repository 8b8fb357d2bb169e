//! Changes that must not be applied twice over the death of the server process: what is
//! noted before them, and how a later server finds out whether they were applied.
//!
//! An intent holds what was under the names before the change. The server that finds an
//! intent without an answer looks what is there now. That decides it, because changes
//! of one directory happen one after the other ([`Order`](crate::server::order::Order))
//! and nobody but dray changes the directory; where somebody else does, the guess is as
//! good as looking can be, and it is logged.

use dray_core::{
    Context, Entry, Errno, FileId, FileSystem, Identity, Name, Op, RenameHow, Result, SetAttr,
};

use crate::server::execute::Reply;
use crate::server::journal::INTENT_MAX_BYTES;
use crate::server::order::Turn;
use crate::server::session::Session;
use crate::wire::{Call, Input, Malformed, ReplyHead, Wire};

/// What came of a change that was under way when the server died.
pub(crate) enum Settled {
    /// It was not applied: when it comes again it is a new one.
    Undone,
    /// It was applied; this is the answer that its client waits for.
    Done(Vec<u8>),
    /// Data for the end of the file belong here; writing them again does no harm.
    AppendAt(u64),
}

/// The order in which a change takes its turn, and the intent to note.
pub(crate) struct Plan {
    pub(crate) intent: Vec<u8>,
    /// Where an append goes, bytes.
    pub(crate) append_at: Option<u64>,
    _turn: Turn,
}

/// What most intents take, bytes.
const INTENT_BYTES: usize = 128;

/// Waits for the turn of a change and looks at what there is before it. None for a call
/// that may be repeated without harm.
pub(crate) async fn plan(
    session: &Session,
    cx: &Context,
    call: &Call<'_>,
    data_bytes: usize,
) -> Option<Plan> {
    let fs = &*session.export.fs;
    let order = &session.export.order;
    let system = Context { who: Identity::system(), internal: true, cancel: None, ..cx.clone() };
    let cx = &system;
    let mut intent = Vec::with_capacity(INTENT_BYTES);
    let mut append_at = None;
    let turn = match call {
        Call::Make { dir, name, .. }
        | Call::Create { dir, name, .. }
        | Call::Link { dir, name, .. }
        | Call::Remove { dir, name, .. } => {
            let turn = order.turn(*dir, None).await;
            (*dir, *name).put(&mut intent);
            find(fs, cx, *dir, name).await.map(|entry| entry.id).put(&mut intent);
            turn
        }
        Call::Rename { from, from_name, to, to_name, how } => {
            let turn = order.turn(*from, Some(*to)).await;
            ((*from, *from_name), (*to, *to_name)).put(&mut intent);
            how.put(&mut intent);
            find(fs, cx, *from, from_name).await.map(|entry| entry.id).put(&mut intent);
            find(fs, cx, *to, to_name).await.map(|entry| entry.id).put(&mut intent);
            turn
        }
        Call::Write { handle, how } if how.append => {
            let file = session.file(*handle)?;
            let turn = order.turn(file.id(), None).await;
            let size = file.getattr(cx).await.ok()?.size;
            (file.id(), (size, data_bytes as u64)).put(&mut intent);
            append_at = Some(size);
            turn
        }
        Call::Setxattr { id, name, .. } | Call::Removexattr { id, name } => {
            let turn = order.turn(*id, None).await;
            (*id, *name).put(&mut intent);
            fs.getxattr(cx, *id, name).await.is_ok().put(&mut intent);
            turn
        }
        _ => return None,
    };
    // Only names that no file system takes make it longer: such a call changes nothing.
    (intent.len() <= INTENT_MAX_BYTES).then_some(Plan { intent, append_at, _turn: turn })
}

/// Finds out what came of a change.
pub(crate) async fn settle(fs: &dyn FileSystem, op: Op, intent: &[u8]) -> Settled {
    let settled = match op {
        Op::Make | Op::Create | Op::Link => settle_new_name(fs, intent).await,
        Op::Remove => settle_remove(fs, intent).await,
        Op::Rename => settle_rename(fs, intent).await,
        Op::Write => settle_append(fs, intent, false).await,
        Op::Setxattr | Op::Removexattr => settle_xattr(fs, op, intent).await,
        _ => Ok(Settled::Undone),
    };
    settled.unwrap_or(Settled::Undone)
}

/// Finds out whether an answered change is still there after a loss of the machine. What it
/// had noted before it tells; without a note it can be made again without harm.
pub(crate) async fn settle_answered(
    fs: &dyn FileSystem,
    answer: Vec<u8>,
    begun: Option<(Op, Vec<u8>)>,
) -> Settled {
    let failed = ReplyHead::get_message(&mut Input(&answer)).is_ok_and(|head| head.errno != 0);
    match begun {
        _ if failed => Settled::Done(answer),
        // Others may have appended behind it: its place stays its own.
        Some((Op::Write, intent)) => {
            settle_append(fs, &intent, true).await.unwrap_or(Settled::Undone)
        }
        Some((op, intent)) => settle(fs, op, &intent).await,
        None => Settled::Undone,
    }
}

async fn find(fs: &dyn FileSystem, cx: &Context, dir: FileId, name: &[u8]) -> Option<Entry> {
    fs.lookup(cx, dir, Name::new(name).ok()?).await.ok()
}

async fn settle_new_name(
    fs: &dyn FileSystem,
    intent: &[u8],
) -> std::result::Result<Settled, Malformed> {
    let mut input = Input(intent);
    let (dir, name): (FileId, &[u8]) = input.get()?;
    let before: Option<FileId> = input.get()?;
    let now = find(fs, &Context::system(), dir, name).await;
    Ok(match (before, now) {
        (None, Some(entry)) => Settled::Done(Reply::success(&entry).message),
        _ => Settled::Undone,
    })
}

async fn settle_remove(
    fs: &dyn FileSystem,
    intent: &[u8],
) -> std::result::Result<Settled, Malformed> {
    let mut input = Input(intent);
    let (dir, name): (FileId, &[u8]) = input.get()?;
    let before: Option<FileId> = input.get()?;
    let now = find(fs, &Context::system(), dir, name).await.map(|entry| entry.id);
    let removed = before.is_some() && now != before;
    Ok(if removed { Settled::Done(Reply::success(&()).message) } else { Settled::Undone })
}

async fn settle_rename(
    fs: &dyn FileSystem,
    intent: &[u8],
) -> std::result::Result<Settled, Malformed> {
    let mut input = Input(intent);
    let from: (FileId, &[u8]) = input.get()?;
    let to: (FileId, &[u8]) = input.get()?;
    let how: RenameHow = input.get()?;
    let source: Option<FileId> = input.get()?;
    let victim: Option<FileId> = input.get()?;
    let cx = Context::system();
    let now_from = find(fs, &cx, from.0, from.1).await.map(|entry| entry.id);
    let now_to = find(fs, &cx, to.0, to.1).await.map(|entry| entry.id);
    // Two names of one file: renaming does nothing, and may be repeated.
    let moved = source.is_some() && source != victim && now_to == source;
    let applied = moved
        && match how {
            RenameHow::Exchange => now_from == victim,
            _ => now_from != source,
        };
    Ok(if applied { Settled::Done(Reply::success(&()).message) } else { Settled::Undone })
}

async fn settle_append(
    fs: &dyn FileSystem,
    intent: &[u8],
    answered: bool,
) -> std::result::Result<Settled, Malformed> {
    let (id, (before, len)): (FileId, (u64, u64)) = Input::whole(intent)?;
    let cx = Context::system();
    let Ok(now) = fs.getattr(&cx, id).await else { return Ok(Settled::Undone) };
    let end = before.checked_add(len).ok_or(Malformed("an append beyond the longest file"))?;
    if now.size <= before && !answered {
        return Ok(Settled::Undone);
    }
    // Begun. A kill can end a write half way: the place is kept until the data come again.
    if now.size < end {
        let set = SetAttr { size: Some(end), ..SetAttr::default() };
        if let Err(error) = fs.setattr(&cx, id, set).await {
            log::error!("{id}: cannot keep the place of an append that was cut short: {error}");
        }
    }
    Ok(Settled::AppendAt(before))
}

async fn settle_xattr(
    fs: &dyn FileSystem,
    op: Op,
    intent: &[u8],
) -> std::result::Result<Settled, Malformed> {
    let mut input = Input(intent);
    let (id, name): (FileId, &[u8]) = input.get()?;
    let existed: bool = input.get()?;
    let now: Result<Vec<u8>> = fs.getxattr(&Context::system(), id, name).await;
    let exists = match &now {
        Ok(_) => true,
        Err(error) if error.errno() == Errno::ENODATA => false,
        Err(_) => return Ok(Settled::Undone),
    };
    let applied = match op {
        Op::Setxattr => !existed && exists,
        _ => existed && !exists,
    };
    Ok(if applied { Settled::Done(Reply::success(&()).message) } else { Settled::Undone })
}
