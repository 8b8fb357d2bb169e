//! Changes that must not be applied twice over the death of the server process: what is
//! noted before them, and how a later server finds out whether they were applied.
//!
//! An intent holds what was under the names before the change. The server that finds an
//! intent without an answer looks what is there now. That decides it, because changes
//! of the same thing happen one after the other ([`Order`](crate::server::exactly_once::order::Order))
//! and nobody but dray changes the directory; where somebody else does, the guess is as
//! good as looking can be. Changes that set something, such as a write at an offset, need
//! no decision: they are made again, and nobody else gets at the same before.

use std::cell::Cell;
use std::sync::Arc;

use dray_core::{
    Context, Entry, Errno, FileId, FileSystem, FileType, Identity, Name, Op, RenameHow, Result,
    Write,
};

use crate::server::exactly_once::order::{Order, Span, Turn};
use crate::server::journal::INTENT_MAX_BYTES;
use crate::server::reply::Reply;
use crate::server::session::Session;
use crate::wire::{Call, Input, Malformed, ReplyHead, Wire};

/// What came of a change that was under way when the server died.
pub(crate) enum Settled {
    /// It was not applied: when it comes again it is a new one.
    Undone,
    /// It was applied; this is the answer that its client waits for.
    Done(Vec<u8>),
    /// It may have been, wholly or in part. Making it again sets that right, as long as
    /// nobody touches the same before: it is kept for whoever asked.
    Cut(CutShort),
}

/// What a change that was cut short is about.
pub(crate) struct CutShort {
    pub(crate) held: Vec<(FileId, Span)>,
    pub(crate) amend: Option<Amend>,
}

/// What of a call is not as it was asked for when it is made again.
#[derive(Clone, Copy)]
pub(crate) enum Amend {
    /// Data for the end of the file go where that was.
    AppendAt(u64),
    /// A copy within a file takes what was there, not what it has put behind that.
    CopyAtMost(u64),
    /// This file is to be written, whatever name it has now. If `made`, it was made for
    /// that, so that its mode does not limit the writing.
    Put { id: FileId, made: bool },
}

impl Amend {
    /// The call to make.
    pub(crate) fn apply<'a>(self, call: Call<'a>) -> Call<'a> {
        match (self, call) {
            (Amend::AppendAt(at), Call::Write { handle, how }) => {
                Call::Write { handle, how: Write { at, append: false, ..how } }
            }
            (Amend::CopyAtMost(most), Call::CopyRange { handle, at, to, to_at, len_bytes }) => {
                Call::CopyRange { handle, at, to, to_at, len_bytes: len_bytes.min(most) }
            }
            (_, call) => call, // a put looks itself
        }
    }

    /// The intent to note instead, where looking once more could find something else.
    pub(crate) fn intent(self, old: &[u8]) -> Option<Vec<u8>> {
        let Amend::Put { id, made } = self else { return None };
        let mut input = Input(old);
        let place: (FileId, &[u8]) = input.get().ok()?;
        let before: Option<FileId> = input.get().ok()?;
        let mut intent = Vec::with_capacity(INTENT_MAX_BYTES);
        (place, (before, Some((id, made)))).put(&mut intent);
        Some(intent)
    }
}

impl CutShort {
    fn of(file: FileId, span: Span) -> Settled {
        Settled::Cut(CutShort { held: vec![(file, span)], amend: None })
    }
}

/// A change's turn, and the intent to note before it.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) intent: Vec<u8>,
    /// Where an append goes, bytes.
    pub(crate) append_at: Option<u64>,
    _turns: [Option<Turn>; 2],
}

thread_local! {
    /// The memory of the last intent, for the next.
    static SPARE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

impl Plan {
    fn new(intent: Vec<u8>, turn: Turn, second: Option<Turn>) -> Plan {
        Plan { intent, append_at: None, _turns: [Some(turn), second] }
    }

    /// The file that a put has just made is its too, until its data are in it: who appended
    /// meanwhile could not tell, after a death, whose bytes are at the end.
    pub(crate) async fn made(&mut self, order: &Arc<Order>, file: FileId) {
        if self._turns[1].is_none() {
            self._turns[1] = Some(order.turn(file, Span::ALL).await);
        }
    }
}

/// What a call in a slot has besides what was asked.
#[derive(Default)]
pub(crate) struct Standing<'a> {
    /// When it is made for the first time.
    pub(crate) plan: Option<&'a mut Plan>,
    /// When it is made again.
    pub(crate) amend: Option<Amend>,
}

impl Drop for Plan {
    fn drop(&mut self) {
        let intent = std::mem::take(&mut self.intent);
        let _ = SPARE.try_with(|spare| spare.set(intent)); // the thread may be ending
    }
}

/// Waits for the turn of a change and looks at what there is before it. None for a call
/// that may be repeated without harm.
pub(crate) async fn plan(
    session: &Session,
    cx: &Context,
    call: &Call<'_>,
    data_bytes: usize,
) -> Option<Plan> {
    let mut intent = SPARE.take();
    intent.clear();
    let plan = match repeatable(session, call, data_bytes) {
        Some((file, span)) => {
            (false, (file, span)).put(&mut intent);
            Plan::new(intent, session.export.order.turn(file, span).await, None)
        }
        None => plan_looked_at(session, cx, call, data_bytes, intent).await?,
    };
    // Only names that no file system takes make it longer: such a call changes nothing.
    (plan.intent.len() <= INTENT_MAX_BYTES).then_some(plan)
}

/// What a change is about whose repetition sets the same again, so that there is no need
/// to know whether it was made.
fn repeatable(session: &Session, call: &Call<'_>, data_bytes: usize) -> Option<(FileId, Span)> {
    let id = |handle: &u64| session.file(*handle).map(|file| file.id());
    Some(match call {
        Call::Write { handle, how } if !how.append => {
            (id(handle)?, Span::bytes(how.at, data_bytes as u64))
        }
        Call::Allocate { handle, .. } | Call::SetFlags { handle, .. } => (id(handle)?, Span::ALL),
        Call::Setattr { id, .. } | Call::Open { id, .. } => (*id, Span::ALL),
        _ => return None,
    })
}

async fn plan_looked_at(
    session: &Session,
    cx: &Context,
    call: &Call<'_>,
    data_bytes: usize,
    mut intent: Vec<u8>,
) -> Option<Plan> {
    let fs = &*session.export.fs;
    let order = &session.export.order;
    let cx = &Context { who: Identity::system(), internal: true, cancel: None, ..cx.clone() };
    let mut second = None;
    let mut append_at = None;
    let turn = match call {
        Call::Make { dir, name, .. }
        | Call::Create { dir, name, .. }
        | Call::Link { dir, name, .. }
        | Call::Remove { dir, name, .. } => {
            let turn = order.turn(*dir, Span::ALL).await;
            (*dir, *name).put(&mut intent);
            let entry = find(fs, cx, *dir, name).await;
            let before = entry.as_ref().map(|entry| entry.id);
            before.put(&mut intent);
            if let (Call::Remove { .. }, Some(victim)) = (call, &entry) {
                session.export.returning.keep(fs, cx, victim).await;
            }
            if let (Call::Create { how, .. }, Some(entry)) = (call, &entry) {
                let cuts = how.open.truncates() && !how.exclusive && is_regular(entry);
                cuts.put(&mut intent);
                if cuts {
                    second = Some(order.turn(entry.id, Span::ALL).await);
                }
            }
            turn
        }
        Call::Put { dir, name, .. } => {
            let turn = order.turn(*dir, Span::ALL).await;
            let entry = find(fs, cx, *dir, name).await;
            let before = entry.as_ref().map(|entry| entry.id);
            ((*dir, *name), (before, None::<(FileId, bool)>)).put(&mut intent);
            if let Some(file) = entry.filter(is_regular) {
                second = Some(order.turn(file.id, Span::ALL).await);
            }
            turn
        }
        Call::Rename { from, from_name, to, to_name, how } => {
            let (turn, other) = order.turns(*from, *to).await;
            second = other;
            ((*from, *from_name), (*to, *to_name)).put(&mut intent);
            how.put(&mut intent);
            find(fs, cx, *from, from_name).await.map(|entry| entry.id).put(&mut intent);
            let victim = find(fs, cx, *to, to_name).await;
            victim.as_ref().map(|entry| entry.id).put(&mut intent);
            if let (RenameHow::Replace, Some(victim)) = (how, &victim) {
                session.export.returning.keep(fs, cx, victim).await;
            }
            turn
        }
        Call::Write { handle, .. } => {
            let file = session.file(*handle)?;
            let turn = order.turn(file.id(), Span::ALL).await;
            let size = file.getattr(cx).await.ok()?.size;
            (true, (file.id(), (size, data_bytes as u64))).put(&mut intent);
            append_at = Some(size);
            turn
        }
        Call::CopyRange { handle, at, to, to_at, len_bytes }
            if session.file(*handle)?.id() != session.file(*to)?.id() =>
        {
            // The source as well: when the copy is made again it must be what it was.
            let id = |handle: &u64| session.file(*handle).map(|file| file.id());
            let source = (id(handle)?, Span::bytes(*at, *len_bytes));
            let target = (id(to)?, Span::bytes(*to_at, *len_bytes));
            (false, (target, source)).put(&mut intent);
            let (turn, other) = order.turns_of(source, target).await;
            second = other;
            turn
        }
        Call::CopyRange { handle, at, .. } => {
            let file = session.file(*handle)?;
            let turn = order.turn(file.id(), Span::ALL).await;
            let size = file.getattr(cx).await.ok()?.size;
            (true, (file.id(), size.saturating_sub(*at))).put(&mut intent);
            turn
        }
        Call::Setxattr { id, name, .. } | Call::Removexattr { id, name } => {
            let turn = order.turn(*id, Span::ALL).await;
            (*id, *name).put(&mut intent);
            fs.getxattr(cx, *id, name).await.is_ok().put(&mut intent);
            turn
        }
        _ => return None,
    };
    let mut plan = Plan::new(intent, turn, second);
    plan.append_at = append_at;
    Some(plan)
}

/// Finds out what came of a change.
pub(crate) async fn settle(fs: &dyn FileSystem, op: Op, intent: &[u8]) -> Settled {
    let settled = match op {
        Op::Make | Op::Create | Op::Link => settle_new_name(fs, op, intent).await,
        Op::Remove => settle_remove(fs, intent).await,
        Op::Rename => settle_rename(fs, intent).await,
        Op::Write => settle_write(fs, intent).await,
        Op::CopyRange => settle_copy(intent),
        Op::Put => settle_put(fs, intent).await,
        Op::Setxattr | Op::Removexattr => settle_xattr(fs, op, intent).await,
        _ => settle_repeatable(intent),
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
        Some((op, intent)) => settle(fs, op, &of_answered(op, intent, None)).await,
        None => Settled::Undone,
    }
}

/// In the first byte of an append's intent: it had been answered before the machine was lost.
/// Others may have appended behind it, so its place stays its own.
const ANSWERED: u8 = 2;

/// The intent to note for a change that had been answered, is not wholly on media, and is
/// to be made again.
pub(crate) fn of_answered(op: Op, mut intent: Vec<u8>, amend: Option<Amend>) -> Vec<u8> {
    if let Some(intent) = amend.and_then(|amend| amend.intent(&intent)) {
        return intent;
    }
    if let (Op::Write, Some(kind @ 1)) = (op, intent.first_mut()) {
        *kind = ANSWERED;
    }
    intent
}

fn settle_repeatable(intent: &[u8]) -> std::result::Result<Settled, Malformed> {
    let (_, (file, span)): (bool, (FileId, Span)) = Input::whole(intent)?;
    Ok(CutShort::of(file, span))
}

/// Of these alone a change of the directory takes the turn too: the turn of a directory
/// behind that of another, out of their order, could wait for ever.
fn is_regular(entry: &Entry) -> bool {
    entry.attr.file_type() == FileType::Regular
}

async fn find(fs: &dyn FileSystem, cx: &Context, dir: FileId, name: &[u8]) -> Option<Entry> {
    fs.lookup(cx, dir, Name::new(name).ok()?).await.ok()
}

/// Whether both are one file, each of them named by another life of the server: on file systems
/// without handles all but its number is another then. Nobody can have put another file with
/// that number in its place.
fn is_same(one: Option<FileId>, other: Option<FileId>) -> bool {
    matches!((one, other), (Some(one), Some(other)) if one.ino == other.ino)
}

async fn settle_new_name(
    fs: &dyn FileSystem,
    op: Op,
    intent: &[u8],
) -> std::result::Result<Settled, Malformed> {
    let mut input = Input(intent);
    let (dir, name): (FileId, &[u8]) = input.get()?;
    let before: Option<FileId> = input.get()?;
    if let Some(file) = before
        && op == Op::Create
        && input.get()?
    {
        let held = vec![(file, Span::ALL), (dir, Span::ALL)];
        return Ok(Settled::Cut(CutShort { held, amend: None }));
    }
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
    let now = match Name::new(name) {
        Ok(name) => fs.lookup(&Context::system(), dir, name).await.map(|entry| entry.id),
        Err(error) => Err(error),
    };
    let gone = match now {
        Ok(now) => !is_same(Some(now), before),
        // Anything else says nothing of the name, such as that the directory is not known by
        // this id any more: whoever asks again is told.
        Err(error) => error.errno() == Errno::ENOENT,
    };
    Ok(if before.is_some() && gone {
        Settled::Done(Reply::success(&()).message)
    } else {
        Settled::Undone
    })
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
    let moved = !is_same(source, victim) && is_same(now_to, source);
    let applied = moved
        && match how {
            RenameHow::Exchange => is_same(now_from, victim),
            _ => !is_same(now_from, source),
        };
    Ok(if applied { Settled::Done(Reply::success(&()).message) } else { Settled::Undone })
}

async fn settle_write(
    fs: &dyn FileSystem,
    intent: &[u8],
) -> std::result::Result<Settled, Malformed> {
    if intent.first() == Some(&0) {
        return settle_repeatable(intent);
    }
    let (kind, (file, (before, _))): (u8, (FileId, (u64, u64))) = Input::whole(intent)?;
    let Ok(now) = fs.getattr(&Context::system(), file).await else { return Ok(Settled::Undone) };
    if now.size <= before && kind != ANSWERED {
        return Ok(Settled::Undone);
    }
    // Begun; a kill can end a write half way. Nobody else could make the file longer.
    let held = vec![(file, Span::ALL)];
    Ok(Settled::Cut(CutShort { held, amend: Some(Amend::AppendAt(before)) }))
}

fn settle_copy(intent: &[u8]) -> std::result::Result<Settled, Malformed> {
    if intent.first() == Some(&0) {
        type Place = (FileId, Span);
        let (_, (target, source)): (bool, (Place, Place)) = Input::whole(intent)?;
        return Ok(Settled::Cut(CutShort { held: vec![target, source], amend: None }));
    }
    let (_, (file, most)): (bool, (FileId, u64)) = Input::whole(intent)?;
    let held = vec![(file, Span::ALL)];
    Ok(Settled::Cut(CutShort { held, amend: Some(Amend::CopyAtMost(most)) }))
}

async fn settle_put(fs: &dyn FileSystem, intent: &[u8]) -> std::result::Result<Settled, Malformed> {
    let mut input = Input(intent);
    let (dir, name): (FileId, &[u8]) = input.get()?;
    let (before, begun): (Option<FileId>, Option<(FileId, bool)>) = input.get()?;
    let now = find(fs, &Context::system(), dir, name).await.map(|entry| entry.id);
    let (id, made) = match (begun, before, now) {
        (Some(begun), _, _) => begun,
        (None, None, Some(made)) => (made, true),
        // Cut and written, or not yet: once more into the same file is the same.
        (None, Some(before), Some(now)) if before == now => (now, false),
        _ => return Ok(Settled::Undone),
    };
    // The name is free for others: the data go to the file, whatever name it has.
    let held = vec![(id, Span::ALL)];
    Ok(Settled::Cut(CutShort { held, amend: Some(Amend::Put { id, made }) }))
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
        Err(_) => return Ok(CutShort::of(id, Span::ALL)),
    };
    let applied = match op {
        Op::Setxattr => !existed && exists,
        _ => existed && !exists,
    };
    let done = || Settled::Done(Reply::success(&()).message);
    Ok(if applied { done() } else { CutShort::of(id, Span::ALL) })
}
