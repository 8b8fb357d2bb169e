//! Finds out, after a death of the server process, whether a change was applied that was under
//! way.
//!
//! An intent holds what was under the names before the change ([`plan`](super::plan)), and who was
//! to make something there ([`Maker`]). The server that finds an intent without an answer looks
//! what is there now. That decides it, because changes of the same thing happen one after the other
//! ([`RangeTable`](crate::server::ranges::RangeTable)). A process beside dray may change the
//! directory. Owner, age and content then distinguish its files from those of the caller. Changes
//! that set something, such as a write at an offset, need no decision. They are made again, and
//! nobody else gets at the same before.

use dray_core::{Entry, Errno, Error, FileId, FileSystem, FileType, Name, Op, Result};

use crate::server::as_server;
use crate::server::exactly_once::maker::Maker;
use crate::server::exactly_once::settle_rename::settle_rename;
use crate::server::journal::INTENT_MAX_BYTES;
use crate::server::ranges::Span;
use crate::server::reply::Reply;
use crate::wire::{Input, Malformed, OpRow, Trace, Wire};

/// The outcome of a change that was under way when the server died.
pub(crate) enum Settlement {
    /// The change was not applied: when it comes again it is a new one.
    Undone,
    /// The change was applied; this is the answer that its client waits for.
    Done(Box<Reply>),
    /// The change may have been applied, wholly or in part. Repeating it corrects that, as long as
    /// no other change of the same file comes first. The grants are therefore held for the caller.
    Cut(CutShortChange),
    /// The file system cannot report what is there.
    Unreadable,
}

/// The answer for a change of unknown outcome: repeating it could apply it twice.
pub(crate) fn unknown() -> Reply {
    Reply::failure(&Error::unknown(Errno::EIO))
}

/// Why it is not known what came of a change.
pub(super) enum Unsettled {
    /// The intent says nothing: it is none of ours.
    Malformed,
    /// The file system cannot report what is there, for example because its disk fails.
    Unreadable,
}

impl From<Malformed> for Unsettled {
    fn from(_: Malformed) -> Unsettled {
        Unsettled::Malformed
    }
}

pub(super) type Looked<T> = std::result::Result<T, Unsettled>;

/// A change that was cut short: the ranges held for it, and how to make it again.
pub(crate) struct CutShortChange {
    pub(crate) held: Vec<(FileId, Span)>,
    pub(crate) amend: Option<Amend>,
}

/// The way in which a repeated call differs from the call as it was first asked for.
#[derive(Clone, Copy)]
pub(crate) enum Amend {
    /// Data for the end of the file go where that was.
    AppendAt(u64),
    /// A copy within a file takes what was there, not what it has put behind that.
    CopyAtMost(u64),
    /// This file is to be written, whatever name it has now. If `made`, the file was made for the
    /// put, so that its mode does not limit writes of its owner.
    Put { id: FileId, made: bool },
    /// This file was found under the name. If the caller that asks again owns it, it is the file
    /// that was to be made. If `proven`, that was noted beforehand, and its mode does not limit
    /// what it was opened for.
    Made { id: FileId, proven: bool },
}

impl Amend {
    /// Where data for the end of the file go, bytes.
    pub(crate) fn append_at(self) -> Option<u64> {
        match self {
            Amend::AppendAt(at) => Some(at),
            Amend::CopyAtMost(_) | Amend::Put { .. } | Amend::Made { .. } => None,
        }
    }

    /// The most that a copy takes, bytes.
    pub(crate) fn copy_at_most(self) -> Option<u64> {
        match self {
            Amend::CopyAtMost(most) => Some(most),
            Amend::AppendAt(_) | Amend::Put { .. } | Amend::Made { .. } => None,
        }
    }

    /// The file that was found under the name, and whether it is proven to be the caller's.
    pub(crate) fn made(self) -> Option<(FileId, bool)> {
        match self {
            Amend::Made { id, proven } => Some((id, proven)),
            Amend::AppendAt(_) | Amend::CopyAtMost(_) | Amend::Put { .. } => None,
        }
    }

    /// The file that data are put into, and whether it was made for that.
    pub(crate) fn put(self) -> Option<(FileId, bool)> {
        match self {
            Amend::Put { id, made } => Some((id, made)),
            Amend::AppendAt(_) | Amend::CopyAtMost(_) | Amend::Made { .. } => None,
        }
    }

    /// The intent to note instead, where looking once more could find something else.
    pub(crate) fn intent(self, old: &[u8]) -> Option<Vec<u8>> {
        let (Amend::Put { id, made: sure } | Amend::Made { id, proven: sure }) = self else {
            return None;
        };
        let mut input = Input(old);
        let place: (FileId, &[u8]) = input.get().ok()?;
        let before: Option<FileId> = input.get().ok()?;
        let (_, by) = found_by(&mut input).ok()?;
        let mut intent = Vec::with_capacity(INTENT_MAX_BYTES);
        ((place, before), (Some((id, sure)), by)).put(&mut intent);
        Some(intent)
    }
}

impl CutShortChange {
    fn of(file: FileId, span: Span) -> Settlement {
        Settlement::Cut(CutShortChange { held: vec![(file, span)], amend: None })
    }
}

/// The file that was found under a name, and whether it is sure that this change made it.
type Found = (FileId, bool);

/// The file that an earlier server epoch found under the name, and the user who was to make it.
/// Former versions did not note the latter, nor the first but of a put.
fn found_by(input: &mut Input<'_>) -> Looked<(Option<Found>, Option<Maker>)> {
    let found = if input.0.is_empty() { None } else { input.get()? };
    let by = if input.0.is_empty() { None } else { input.get()? };
    Ok((found, by))
}

/// The knowledge of a change beside its intent.
#[derive(Clone, Copy)]
struct Background {
    /// The machine has lost power since: what an earlier server epoch found may be gone.
    lost: bool,
    /// The file that the change was answered to have made.
    answered: Option<FileId>,
}

/// Finds out what came of a change. `lost`: the machine has been lost since it was noted.
pub(crate) async fn settle(fs: &dyn FileSystem, op: Op, intent: &[u8], lost: bool) -> Settlement {
    settle_known(fs, op, intent, Background { lost, answered: None }).await
}

async fn settle_known(
    fs: &dyn FileSystem,
    op: Op,
    intent: &[u8],
    background: Background,
) -> Settlement {
    let settled = match OpRow::of(op).trace {
        Trace::Made => settle_made(fs, intent, background, false).await,
        Trace::Created => settle_made(fs, intent, background, true).await,
        Trace::Linked => settle_link(fs, intent).await,
        Trace::Removed => settle_remove(fs, intent).await,
        Trace::Renamed => settle_rename(fs, intent, background.lost).await,
        Trace::Written => settle_write(fs, intent).await,
        Trace::Copied => settle_copy(intent),
        Trace::Put => settle_put(fs, intent, background).await,
        Trace::XattrSet => settle_xattr(fs, intent, true).await,
        Trace::XattrRemoved => settle_xattr(fs, intent, false).await,
        Trace::Repeatable => settle_repeatable(intent),
        Trace::None => Ok(Settlement::Undone), // none of ours
    };
    settled.unwrap_or_else(|why| match why {
        Unsettled::Malformed => Settlement::Undone,
        Unsettled::Unreadable => Settlement::Unreadable,
    })
}

/// Whether a change that was noted so changes the data of a file.
pub(crate) fn changes_data((op, intent): &(Op, Vec<u8>)) -> bool {
    match OpRow::of(*op).trace {
        Trace::Written | Trace::Put | Trace::Repeatable | Trace::Copied => true,
        Trace::Created => cuts(intent).unwrap_or(false),
        Trace::None
        | Trace::Made
        | Trace::Linked
        | Trace::Removed
        | Trace::Renamed
        | Trace::XattrSet
        | Trace::XattrRemoved => false,
    }
}

/// Whether the creation of this intent cuts a file that was there.
fn cuts(intent: &[u8]) -> std::result::Result<bool, Malformed> {
    let mut input = Input(intent);
    let _: (FileId, &[u8]) = input.get()?;
    Ok(input.get::<Option<FileId>>()?.is_some() && input.get()?)
}

/// Finds out whether an answered change is still there after a loss of the machine. The note from
/// before the change decides; a change without a note can be repeated without harm.
pub(crate) async fn settle_answered(
    fs: &dyn FileSystem,
    answer: Reply,
    begun: Option<(Op, Vec<u8>)>,
) -> Settlement {
    match begun {
        _ if !answer.is_success() => Settlement::Done(Box::new(answer)),
        Some((op, intent)) => {
            let background = Background { lost: true, answered: answer.file() };
            settle_known(fs, op, &of_answered(op, intent, None), background).await
        }
        None => Settlement::Undone,
    }
}

/// A value in the first byte of an append's intent: the append had been answered before the machine
/// was lost. Others may have appended behind it, so its place stays its own.
const ANSWERED: u8 = 2;

/// The intent to note for a change that had been answered, is not wholly on media, and is
/// to be made again.
pub(crate) fn of_answered(op: Op, mut intent: Vec<u8>, amend: Option<Amend>) -> Vec<u8> {
    if let Some(intent) = amend.and_then(|amend| amend.intent(&intent)) {
        return intent;
    }
    if let (Trace::Written, Some(kind @ 1)) = (OpRow::of(op).trace, intent.first_mut()) {
        *kind = ANSWERED;
    }
    intent
}

fn settle_repeatable(intent: &[u8]) -> Looked<Settlement> {
    let (_, (file, span)): (bool, (FileId, Span)) = Input::whole(intent)?;
    Ok(CutShortChange::of(file, span))
}

/// Of these alone a change of the directory has a grant, too: a call that waits for a second
/// directory out of order could deadlock.
pub(super) fn is_regular(entry: &Entry) -> bool {
    entry.attr.file_type() == FileType::Regular
}

/// The entry that has this name now.
pub(super) async fn find(fs: &dyn FileSystem, dir: FileId, name: &[u8]) -> Looked<Option<Entry>> {
    let Ok(name) = Name::new(name) else { return Ok(None) }; // no file system takes it
    match fs.lookup(&as_server::of_nobody(), dir, name).await {
        Ok(entry) => Ok(Some(entry)),
        Err(error) if bars_the_change(error.errno()) => Ok(None),
        Err(_) => Err(Unsettled::Unreadable),
    }
}

/// Whether a lookup that fails like this says that no change of the name can be made, now or later.
/// There may be nothing, or the change fails as the lookup does. Or nobody gets at what is there,
/// because another file system is mounted on it. Other errors, such as of a disk, say nothing.
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

/// Whether both are one file, each id being of another server epoch: on file systems without
/// handles all but its number is another then. Nobody can have put another file with that number in
/// its place.
pub(super) fn is_same(one: Option<FileId>, other: Option<FileId>) -> bool {
    matches!((one, other), (Some(one), Some(other)) if one.ino == other.ino)
}

/// The file that an earlier server epoch noted as found, if it is still there. A loss of the
/// machine takes what was not on media: then the change is one that has not been made.
async fn still_found(
    fs: &dyn FileSystem,
    (dir, name): (FileId, &[u8]),
    (found, by): (Found, Option<Maker>),
    lost: bool,
) -> Looked<Option<Found>> {
    let (id, _) = found;
    if !lost {
        return Ok(Some(found)); // a removal since came after the change
    }
    match fs.getattr(&as_server::of_nobody(), id).await {
        Ok(_) => Ok(Some(found)),
        // Or the file has another id in this server epoch: then its name leads to it.
        Err(error) if matches!(error.errno(), Errno::ESTALE | Errno::ENOENT) => {
            Ok(find(fs, dir, name).await?.and_then(|entry| made_it(entry, by, Some(id))))
        }
        Err(error) if bars_the_change(error.errno()) => Ok(Some(found)),
        Err(_) => Err(Unsettled::Unreadable),
    }
}

/// `opens`: it opens what is there already, and may cut that.
async fn settle_made(
    fs: &dyn FileSystem,
    intent: &[u8],
    Background { lost, answered }: Background,
    opens: bool,
) -> Looked<Settlement> {
    let mut input = Input(intent);
    let (dir, name): (FileId, &[u8]) = input.get()?;
    if let Some(file) = input.get::<Option<FileId>>()? {
        // There was something: it was cut, or it is as before.
        if !opens || !input.get()? {
            return Ok(Settlement::Undone);
        }
        let held = vec![(file, Span::ALL), (dir, Span::ALL)];
        return Ok(Settlement::Cut(CutShortChange { held, amend: None }));
    }
    let (found, by) = found_by(&mut input)?;
    let found = match found {
        Some(found) => still_found(fs, (dir, name), (found, by), lost).await?,
        None => find(fs, dir, name).await?.and_then(|entry| made_it(entry, by, answered)),
    };
    let Some((id, proven)) = found else { return Ok(Settlement::Undone) };
    let amend = Some(Amend::Made { id, proven });
    Ok(Settlement::Cut(CutShortChange { held: Vec::new(), amend }))
}

/// Whether an entry that was not there before is what a change has made, and whether that is sure.
/// The owner of the change is `by`, not known of former versions. The file that the change was
/// answered to have made is `answered`.
fn made_it(entry: Entry, by: Option<Maker>, answered: Option<FileId>) -> Option<Found> {
    let its_own = match (answered, by) {
        (Some(answered), _) if answered == entry.id => true,
        // The file may have changed since, and its number may be in use again.
        (Some(answered), by) => {
            is_same(Some(answered), Some(entry.id)) && by.is_none_or(|by| by.owns(&entry.attr))
        }
        (None, by) => by.is_none_or(|by| by.has_made(&entry.attr)),
    };
    its_own.then_some((entry.id, by.is_some() || answered == Some(entry.id)))
}

async fn settle_link(fs: &dyn FileSystem, intent: &[u8]) -> Looked<Settlement> {
    let mut input = Input(intent);
    let (dir, name): (FileId, &[u8]) = input.get()?;
    let before: Option<FileId> = input.get()?;
    // Former versions did not note what is linked.
    let linked = if input.0.is_empty() { None } else { Some(input.get::<FileId>()?) };
    let is_link = |entry: &Entry| match linked {
        Some(linked) => is_same(Some(linked), Some(entry.id)),
        None => entry.attr.nlink > 1,
    };
    let now = find(fs, dir, name).await?;
    Ok(match now.filter(|entry| before.is_none() && is_link(entry)) {
        Some(entry) => Settlement::Done(Box::new(Reply::success(entry))),
        None => Settlement::Undone,
    })
}

async fn settle_remove(fs: &dyn FileSystem, intent: &[u8]) -> Looked<Settlement> {
    let mut input = Input(intent);
    let (dir, name): (FileId, &[u8]) = input.get()?;
    let before: Option<FileId> = input.get()?;
    let now = match Name::new(name) {
        Ok(name) => fs.lookup(&as_server::of_nobody(), dir, name).await.map(|entry| entry.id),
        Err(error) => Err(error),
    };
    let gone = match now {
        Ok(now) => !is_same(Some(now), before),
        Err(error) if error.errno() == Errno::ENOENT => true,
        // The error says nothing of the name, such as that the directory is not known by this id
        // any more. The caller sees the error when it repeats the call.
        Err(error) if bars_the_change(error.errno()) => false,
        Err(_) => return Err(Unsettled::Unreadable),
    };
    Ok(if before.is_some() && gone {
        Settlement::Done(Box::new(Reply::success(())))
    } else {
        Settlement::Undone
    })
}

async fn settle_write(fs: &dyn FileSystem, intent: &[u8]) -> Looked<Settlement> {
    if intent.first() == Some(&0) {
        return settle_repeatable(intent);
    }
    let (kind, (file, (before, _))): (u8, (FileId, (u64, u64))) = Input::whole(intent)?;
    let now = match fs.getattr(&as_server::of_nobody(), file).await {
        Ok(now) => now,
        Err(error) if bars_the_change(error.errno()) => return Ok(Settlement::Undone),
        Err(_) => return Err(Unsettled::Unreadable),
    };
    if now.size <= before && kind != ANSWERED {
        return Ok(Settlement::Undone);
    }
    // Begun; a kill can end a write half way. Nobody else could make the file longer.
    let held = vec![(file, Span::ALL)];
    Ok(Settlement::Cut(CutShortChange { held, amend: Some(Amend::AppendAt(before)) }))
}

fn settle_copy(intent: &[u8]) -> Looked<Settlement> {
    if intent.first() == Some(&0) {
        type Place = (FileId, Span);
        let (_, (target, source)): (bool, (Place, Place)) = Input::whole(intent)?;
        return Ok(Settlement::Cut(CutShortChange { held: vec![target, source], amend: None }));
    }
    let (_, (file, most)): (bool, (FileId, u64)) = Input::whole(intent)?;
    let held = vec![(file, Span::ALL)];
    Ok(Settlement::Cut(CutShortChange { held, amend: Some(Amend::CopyAtMost(most)) }))
}

async fn settle_put(
    fs: &dyn FileSystem,
    intent: &[u8],
    Background { lost, answered }: Background,
) -> Looked<Settlement> {
    let mut input = Input(intent);
    let (dir, name): (FileId, &[u8]) = input.get()?;
    let before: Option<FileId> = input.get()?;
    let (begun, by) = found_by(&mut input)?;
    let found = match begun {
        Some(begun) => still_found(fs, (dir, name), (begun, by), lost).await?,
        None => match (before, find(fs, dir, name).await?) {
            (None, Some(entry)) => made_it(entry, by, answered),
            // Cut and written, or not yet: once more into the same file is the same.
            (Some(before), Some(now)) if before == now.id => Some((before, false)),
            _ => None,
        },
    };
    let Some((id, made)) = found else { return Ok(Settlement::Undone) };
    // The name is free for others: the data go to the file, whatever name it has. A former version
    // notes a file as made without knowing for sure that this change made it.
    let (held, made) = (vec![(id, Span::ALL)], made && by.is_some());
    Ok(Settlement::Cut(CutShortChange { held, amend: Some(Amend::Put { id, made }) }))
}

/// Whether it says that the file system could not look, and not what it thinks of attributes.
fn is_of_a_disk(errno: Errno) -> bool {
    !bars_the_change(errno) && !matches!(errno, Errno::ENOTSUP | Errno::ENOSYS | Errno::E2BIG)
}

/// `sets`: the attribute was to be there afterwards.
async fn settle_xattr(fs: &dyn FileSystem, intent: &[u8], sets: bool) -> Looked<Settlement> {
    let mut input = Input(intent);
    let (id, name): (FileId, &[u8]) = input.get()?;
    let existed: bool = input.get()?;
    let now: Result<Vec<u8>> = fs.getxattr(&as_server::of_nobody(), id, name).await;
    let exists = match &now {
        Ok(_) => true,
        Err(error) if error.errno() == Errno::ENODATA => false,
        Err(error) if is_of_a_disk(error.errno()) => return Err(Unsettled::Unreadable),
        Err(_) => return Ok(CutShortChange::of(id, Span::ALL)), // as before the change, too
    };
    let applied = existed != sets && exists == sets;
    let done = || Settlement::Done(Box::new(Reply::success(())));
    Ok(if applied { done() } else { CutShortChange::of(id, Span::ALL) })
}
