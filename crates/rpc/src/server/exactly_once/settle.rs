//! Finds out, after a death of the server process, whether a change was applied that was under
//! way.
//!
//! An intent holds what was under the names before the change ([`plan`](super::plan)). The server
//! that finds an intent without an answer looks what is there now. That decides it, because
//! changes of the same thing happen one after the other
//! ([`Order`](crate::server::exactly_once::order::Order)) and nobody but dray changes the
//! directory; where somebody else does, the guess is as good as looking can be. Changes that set
//! something, such as a write at an offset, need no decision: they are made again, and nobody
//! else gets at the same before.

use dray_core::{
    Context, Entry, Errno, Error, FileId, FileSystem, FileType, Name, Op, RenameHow, Result, Write,
};

use crate::server::claims::Span;
use crate::server::journal::INTENT_MAX_BYTES;
use crate::server::reply::Reply;
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
    /// The file system does not tell what is there.
    Untold,
}

/// What is answered where nobody knows whether a change was made: to make it once more could be
/// twice.
pub(crate) fn unknown() -> Vec<u8> {
    Reply::failure(&Error::unknown(Errno::EIO)).message
}

/// Why it is not known what came of a change.
enum Unsettled {
    /// Its intent says nothing: it is none of ours.
    Malformed,
    /// The file system does not tell what is there, as where its disk fails.
    Untold,
}

impl From<Malformed> for Unsettled {
    fn from(_: Malformed) -> Unsettled {
        Unsettled::Malformed
    }
}

type Looked<T> = std::result::Result<T, Unsettled>;

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
    settled.unwrap_or_else(|why| match why {
        Unsettled::Malformed => Settled::Undone,
        Unsettled::Untold => Settled::Untold,
    })
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

fn settle_repeatable(intent: &[u8]) -> Looked<Settled> {
    let (_, (file, span)): (bool, (FileId, Span)) = Input::whole(intent)?;
    Ok(CutShort::of(file, span))
}

/// Of these alone a change of the directory takes the turn too: the turn of a directory
/// behind that of another, out of their order, could wait for ever.
pub(super) fn is_regular(entry: &Entry) -> bool {
    entry.attr.file_type() == FileType::Regular
}

/// What has this name now.
async fn find(fs: &dyn FileSystem, dir: FileId, name: &[u8]) -> Looked<Option<Entry>> {
    let Ok(name) = Name::new(name) else { return Ok(None) }; // no file system takes it
    match fs.lookup(&Context::system(), dir, name).await {
        Ok(entry) => Ok(Some(entry)),
        Err(error) if bars_the_change(error.errno()) => Ok(None),
        Err(_) => Err(Unsettled::Untold),
    }
}

/// Whether a lookup that fails like this says that no change of the name can be made, now or
/// later: there is nothing, or the change fails as the lookup does, or nobody gets at what is
/// there (another file system is mounted on it). Other errors, such as of a disk, say nothing.
pub(super) fn bars_the_change(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::ENOENT
            | Errno::ENOTDIR
            | Errno::ESTALE
            | Errno::ENAMETOOLONG
            | Errno::EINVAL
            | Errno::EXDEV
            | Errno::EACCES
            | Errno::EPERM
    ) || errno.raw() == libc::EILSEQ
}

/// Whether both are one file, each of them named by another life of the server: on file systems
/// without handles all but its number is another then. Nobody can have put another file with
/// that number in its place.
fn is_same(one: Option<FileId>, other: Option<FileId>) -> bool {
    matches!((one, other), (Some(one), Some(other)) if one.ino == other.ino)
}

async fn settle_new_name(fs: &dyn FileSystem, op: Op, intent: &[u8]) -> Looked<Settled> {
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
    let now = find(fs, dir, name).await?;
    Ok(match (before, now) {
        // Nothing is known of its extended attributes.
        (None, Some(entry)) if op == Op::Create => {
            Settled::Done(Reply::success(&(entry, false)).message)
        }
        (None, Some(entry)) => Settled::Done(Reply::success(&entry).message),
        _ => Settled::Undone,
    })
}

async fn settle_remove(fs: &dyn FileSystem, intent: &[u8]) -> Looked<Settled> {
    let mut input = Input(intent);
    let (dir, name): (FileId, &[u8]) = input.get()?;
    let before: Option<FileId> = input.get()?;
    let now = match Name::new(name) {
        Ok(name) => fs.lookup(&Context::system(), dir, name).await.map(|entry| entry.id),
        Err(error) => Err(error),
    };
    let gone = match now {
        Ok(now) => !is_same(Some(now), before),
        Err(error) if error.errno() == Errno::ENOENT => true,
        // It says nothing of the name, such as that the directory is not known by this id any
        // more: whoever asks again is told.
        Err(error) if bars_the_change(error.errno()) => false,
        Err(_) => return Err(Unsettled::Untold),
    };
    Ok(if before.is_some() && gone {
        Settled::Done(Reply::success(&()).message)
    } else {
        Settled::Undone
    })
}

async fn settle_rename(fs: &dyn FileSystem, intent: &[u8]) -> Looked<Settled> {
    let mut input = Input(intent);
    let from: (FileId, &[u8]) = input.get()?;
    let to: (FileId, &[u8]) = input.get()?;
    let how: RenameHow = input.get()?;
    let source: Option<FileId> = input.get()?;
    let victim: Option<FileId> = input.get()?;
    let now_from = find(fs, from.0, from.1).await?.map(|entry| entry.id);
    let now_to = find(fs, to.0, to.1).await?.map(|entry| entry.id);
    // Two names of one file: renaming does nothing, and may be repeated.
    let moved = !is_same(source, victim) && is_same(now_to, source);
    let applied = moved
        && match how {
            RenameHow::Exchange => is_same(now_from, victim),
            _ => !is_same(now_from, source),
        };
    Ok(if applied { Settled::Done(Reply::success(&()).message) } else { Settled::Undone })
}

async fn settle_write(fs: &dyn FileSystem, intent: &[u8]) -> Looked<Settled> {
    if intent.first() == Some(&0) {
        return settle_repeatable(intent);
    }
    let (kind, (file, (before, _))): (u8, (FileId, (u64, u64))) = Input::whole(intent)?;
    let now = match fs.getattr(&Context::system(), file).await {
        Ok(now) => now,
        Err(error) if bars_the_change(error.errno()) => return Ok(Settled::Undone),
        Err(_) => return Err(Unsettled::Untold),
    };
    if now.size <= before && kind != ANSWERED {
        return Ok(Settled::Undone);
    }
    // Begun; a kill can end a write half way. Nobody else could make the file longer.
    let held = vec![(file, Span::ALL)];
    Ok(Settled::Cut(CutShort { held, amend: Some(Amend::AppendAt(before)) }))
}

fn settle_copy(intent: &[u8]) -> Looked<Settled> {
    if intent.first() == Some(&0) {
        type Place = (FileId, Span);
        let (_, (target, source)): (bool, (Place, Place)) = Input::whole(intent)?;
        return Ok(Settled::Cut(CutShort { held: vec![target, source], amend: None }));
    }
    let (_, (file, most)): (bool, (FileId, u64)) = Input::whole(intent)?;
    let held = vec![(file, Span::ALL)];
    Ok(Settled::Cut(CutShort { held, amend: Some(Amend::CopyAtMost(most)) }))
}

async fn settle_put(fs: &dyn FileSystem, intent: &[u8]) -> Looked<Settled> {
    let mut input = Input(intent);
    let (dir, name): (FileId, &[u8]) = input.get()?;
    let (before, begun): (Option<FileId>, Option<(FileId, bool)>) = input.get()?;
    let (id, made) = match begun {
        Some(begun) => begun,
        None => match (before, find(fs, dir, name).await?.map(|entry| entry.id)) {
            (None, Some(made)) => (made, true),
            // Cut and written, or not yet: once more into the same file is the same.
            (Some(before), Some(now)) if before == now => (now, false),
            _ => return Ok(Settled::Undone),
        },
    };
    // The name is free for others: the data go to the file, whatever name it has.
    let held = vec![(id, Span::ALL)];
    Ok(Settled::Cut(CutShort { held, amend: Some(Amend::Put { id, made }) }))
}

/// Whether it says that the file system could not look, and not what it thinks of attributes.
fn is_of_a_disk(errno: Errno) -> bool {
    !bars_the_change(errno) && !matches!(errno, Errno::ENOTSUP | Errno::ENOSYS | Errno::E2BIG)
}

async fn settle_xattr(fs: &dyn FileSystem, op: Op, intent: &[u8]) -> Looked<Settled> {
    let mut input = Input(intent);
    let (id, name): (FileId, &[u8]) = input.get()?;
    let existed: bool = input.get()?;
    let now: Result<Vec<u8>> = fs.getxattr(&Context::system(), id, name).await;
    let exists = match &now {
        Ok(_) => true,
        Err(error) if error.errno() == Errno::ENODATA => false,
        Err(error) if is_of_a_disk(error.errno()) => return Err(Unsettled::Untold),
        Err(_) => return Ok(CutShort::of(id, Span::ALL)), // as before the change, too
    };
    let applied = match op {
        Op::Setxattr => !existed && exists,
        _ => existed && !exists,
    };
    let done = || Settled::Done(Reply::success(&()).message);
    Ok(if applied { done() } else { CutShort::of(id, Span::ALL) })
}
