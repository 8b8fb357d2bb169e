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
use crate::wire::{Call, Input, Malformed, Wire};

/// What came of a change that was under way when the server died.
pub(crate) enum Settled {
    /// It was not applied: when it comes again it is a new one.
    Undone,
    /// It was applied; this is the answer that its client waits for.
    Done(Vec<u8>),
    /// It was begun, and is to be gone on with when it comes again.
    Begun(Begun),
}

/// What is known of a change that the server's death cut short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// Data for the end of the file belong here; writing them again does no harm.
    AppendAt(u64),
    /// This file was to be written, whatever name it has now. If `made`, it was made for
    /// that, so that its mode does not limit the writing.
    Put { id: FileId, made: bool },
}

impl Begun {
    /// The intent to note instead, where looking once more could find something else.
    pub(crate) fn intent(self, old: &[u8]) -> Option<Vec<u8>> {
        let Begun::Put { id, made } = self else { return None };
        let mut input = Input(old);
        let place: (FileId, &[u8]) = input.get().ok()?;
        let before: Option<FileId> = input.get().ok()?;
        let mut intent = Vec::with_capacity(old.len());
        (place, (before, Some((id, made)))).put(&mut intent);
        Some(intent)
    }
}

/// The order in which a change takes its turn, and the intent to note.
pub(crate) struct Plan {
    pub(crate) intent: Vec<u8>,
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
        Call::Put { dir, name, .. } => {
            let turn = order.turn(*dir, None).await;
            let before = find(fs, cx, *dir, name).await.map(|entry| entry.id);
            ((*dir, *name), (before, None::<(FileId, bool)>)).put(&mut intent);
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
    (intent.len() <= INTENT_MAX_BYTES).then_some(Plan { intent, _turn: turn })
}

/// Finds out what came of a change.
pub(crate) async fn settle(fs: &dyn FileSystem, op: Op, intent: &[u8]) -> Settled {
    let settled = match op {
        Op::Make | Op::Create | Op::Link => settle_new_name(fs, op, intent).await,
        Op::Remove => settle_remove(fs, intent).await,
        Op::Rename => settle_rename(fs, intent).await,
        Op::Write => settle_append(fs, intent).await,
        Op::Put => settle_put(fs, intent).await,
        Op::Setxattr | Op::Removexattr => settle_xattr(fs, op, intent).await,
        _ => Ok(Settled::Undone),
    };
    settled.unwrap_or(Settled::Undone)
}

async fn find(fs: &dyn FileSystem, cx: &Context, dir: FileId, name: &[u8]) -> Option<Entry> {
    fs.lookup(cx, dir, Name::new(name).ok()?).await.ok()
}

async fn settle_new_name(
    fs: &dyn FileSystem,
    op: Op,
    intent: &[u8],
) -> std::result::Result<Settled, Malformed> {
    let mut input = Input(intent);
    let (dir, name): (FileId, &[u8]) = input.get()?;
    let before: Option<FileId> = input.get()?;
    let now = find(fs, &Context::system(), dir, name).await;
    Ok(match (before, now) {
        // Nothing is known of its extended attributes.
        (None, Some(entry)) if op == Op::Create => {
            Settled::Done(Reply::success(&(entry, false)).message)
        }
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
) -> std::result::Result<Settled, Malformed> {
    let (id, (before, len)): (FileId, (u64, u64)) = Input::whole(intent)?;
    let cx = Context::system();
    let Ok(now) = fs.getattr(&cx, id).await else { return Ok(Settled::Undone) };
    let end = before.checked_add(len).ok_or(Malformed("an append beyond the longest file"))?;
    if now.size <= before {
        return Ok(Settled::Undone);
    }
    // Begun. A kill can end a write half way: the place is kept until the data come again.
    if now.size < end {
        let set = SetAttr { size: Some(end), ..SetAttr::default() };
        if let Err(error) = fs.setattr(&cx, id, set).await {
            log::error!("{id}: cannot keep the place of an append that was cut short: {error}");
        }
    }
    Ok(Settled::Begun(Begun::AppendAt(before)))
}

async fn settle_put(fs: &dyn FileSystem, intent: &[u8]) -> std::result::Result<Settled, Malformed> {
    let mut input = Input(intent);
    let (dir, name): (FileId, &[u8]) = input.get()?;
    let (before, begun): (Option<FileId>, Option<(FileId, bool)>) = input.get()?;
    if let Some((id, made)) = begun {
        return Ok(Settled::Begun(Begun::Put { id, made }));
    }
    let now = find(fs, &Context::system(), dir, name).await.map(|entry| entry.id);
    Ok(match (before, now) {
        (None, Some(id)) => Settled::Begun(Begun::Put { id, made: true }),
        // Cut and written, or not yet: once more into the same file is the same.
        (Some(before), Some(id)) if before == id => Settled::Begun(Begun::Put { id, made: false }),
        _ => Settled::Undone,
    })
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
