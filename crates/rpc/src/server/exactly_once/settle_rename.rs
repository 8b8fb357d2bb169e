//! Finds out whether a rename was made that was under way when the server died. Another server of the same files may
//! have changed both names since. With failover a name is changed at the home of the file that loses it.

use dray_core::{Errno, FileId, FileSystem, Name, RenameHow};

use crate::server::as_server;
use crate::server::exactly_once::settle::{
    Looked, Settlement, Unsettled, bars_the_change, find, is_same,
};
use crate::server::reply::Reply;
use crate::wire::Input;

pub(super) async fn settle_rename(
    fs: &dyn FileSystem,
    intent: &[u8],
    lost: bool,
) -> Looked<Settlement> {
    let mut input = Input(intent);
    let from: (FileId, &[u8]) = input.get()?;
    let to: (FileId, &[u8]) = input.get()?;
    let how: RenameHow = input.get()?;
    let source: Option<FileId> = input.get()?;
    let victim: Option<FileId> = input.get()?;
    let now_from = find(fs, from.0, from.1).await?.map(|entry| entry.id);
    let now_to = find(fs, to.0, to.1).await?.map(|entry| entry.id);
    // Two names of one file: renaming does nothing, and may be repeated.
    let differ = !is_same(source, victim);
    let applied = match (how, source) {
        (RenameHow::Exchange, _) => differ && is_same(now_to, source) && is_same(now_from, victim),
        (RenameHow::Replace | RenameHow::NoReplace, Some(source)) => {
            differ
                && !is_same(now_from, Some(source))
                && (is_same(now_to, Some(source))
                    || !lost
                        && is_known(fs, from).await?
                        && is_known(fs, to).await?
                        && is_gone_from_target(fs, source, (victim, now_to)).await?)
        }
        (RenameHow::Replace | RenameHow::NoReplace, None) => false,
    };
    Ok(if applied { Settlement::Done(Box::new(Reply::success(()))) } else { Settlement::Undone })
}

/// Whether the file system says what the name leads to, if to anything. It may not know the directory by this id.
async fn is_known(fs: &dyn FileSystem, (dir, name): (FileId, &[u8])) -> Looked<bool> {
    let Ok(name) = Name::new(name) else { return Ok(false) };
    match fs.lookup(&as_server::of_nobody(), dir, name).await {
        Ok(_) => Ok(true),
        Err(error) if error.errno() == Errno::ENOENT => Ok(true),
        Err(error) if bars_the_change(error.errno()) => Ok(false),
        Err(_) => Err(Unsettled::Unreadable),
    }
}

/// Whether a file that has neither name of its rename has had the second one, and lost it to another server of the
/// same files. The target has changed then, or the file is no more. Otherwise somebody else has moved the file away.
///
/// Somebody else may also have removed the file while the target was changed or absent. Then the rename counts as
/// made before that: its caller cannot tell it from a removal behind it.
async fn is_gone_from_target(
    fs: &dyn FileSystem,
    source: FileId,
    (victim, now): (Option<FileId>, Option<FileId>),
) -> Looked<bool> {
    match (victim, now) {
        (None, None) => {}
        (Some(_), Some(_)) => return Ok(!is_same(victim, now)),
        (Some(_), None) | (None, Some(_)) => return Ok(true),
    }
    match fs.getattr(&as_server::of_nobody(), source).await {
        Ok(_) => Ok(false),
        Err(error) if matches!(error.errno(), Errno::ESTALE | Errno::ENOENT) => {
            Ok(!error.is_unmet())
        }
        Err(error) if bars_the_change(error.errno()) => Ok(false),
        Err(_) => Err(Unsettled::Unreadable),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Wire;
    use dray_backends::memory::{MemoryFs, MemoryOptions};
    use dray_core::{Context, CreateHow, OpenHow, RemoveKind};

    const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: true };

    fn name(text: &str) -> &Name {
        Name::new(text.as_bytes()).unwrap()
    }

    /// What another server does to names before or behind the rename of "from" to "to".
    #[derive(Clone, Copy)]
    enum Other {
        Removes(&'static str),
        /// A new file gets the name.
        Gives(&'static str),
        Moves(&'static str),
    }

    impl Other {
        async fn act(self, fs: &MemoryFs) {
            let (cx, dir) = (Context::system(), fs.info().root);
            match self {
                Other::Removes(text) => {
                    fs.remove(&cx, dir, name(text), RemoveKind::File).await.unwrap();
                }
                Other::Gives(text) => {
                    fs.create(&cx, dir, name("new"), NEW).await.unwrap();
                    let (new, to) = ((dir, name("new")), (dir, name(text)));
                    fs.rename(&cx, new, to, RenameHow::Replace).await.unwrap();
                }
                Other::Moves(text) => {
                    let (from, to) = ((dir, name(text)), (dir, name("elsewhere")));
                    fs.rename(&cx, from, to, RenameHow::Replace).await.unwrap();
                }
            }
        }
    }

    async fn counts_as_made(replaces: bool, is_made: bool, others: &[Other], lost: bool) -> bool {
        let (fs, cx) = (MemoryFs::new(MemoryOptions::default()), Context::system());
        let dir = fs.info().root;
        let (from, to) = ((dir, name("from")), (dir, name("to")));
        let source = fs.create(&cx, dir, name("from"), NEW).await.unwrap().0.id;
        let mut victim = None;
        if replaces {
            victim = Some(fs.create(&cx, dir, name("to"), NEW).await.unwrap().0.id);
        }
        let mut intent = Vec::new();
        ((dir, from.1.as_bytes()), (dir, to.1.as_bytes())).put(&mut intent);
        (RenameHow::Replace, (Some(source), victim)).put(&mut intent);
        if is_made {
            fs.rename(&cx, from, to, RenameHow::Replace).await.unwrap();
        }
        for other in others {
            other.act(&fs).await;
        }
        let settled = settle_rename(&fs, &intent, lost).await;
        matches!(settled, Ok(Settlement::Done(_)))
    }

    /// The target had been given to another file before the next server looked. So the rename counted as one that had
    /// not been made, and its caller got ENOENT.
    // proves: P80, P323
    #[test]
    fn a_rename_whose_target_others_have_changed_since_counts_as_made() {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(async {
            for replaces in [false, true] {
                for (is_made, others, counts) in [
                    (true, &[][..], true),
                    (true, &[Other::Removes("to")], true),
                    (true, &[Other::Gives("to")], true),
                    (true, &[Other::Moves("to")], replaces), // else it may have been moved from "from"
                    (false, &[], false),
                    (false, &[Other::Moves("from")], false),
                    (false, &[Other::Gives("from")], !replaces), // it may have been made before
                    (false, &[Other::Gives("to")], false),
                ] {
                    let made = counts_as_made(replaces, is_made, others, false).await;
                    assert_eq!(made, counts, "replaces: {replaces}, made: {is_made}");
                }
            }
            let taken = counts_as_made(false, false, &[Other::Removes("from")], true).await;
            assert!(!taken, "a loss of power has taken the file, and the rename was not made");
        });
    }
}
