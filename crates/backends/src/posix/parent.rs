//! The parent of a directory, if the parent is in the export.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use dray_core::{Entry, Errno, Error, FileId, FileType, IdHash, Result};

use super::core::{Core, Ids};
use super::find::stale;
use super::paths::PathTable;
use super::{cred, sys};

/// Directories that one search for the export's root goes up, at most.
const STEPS_MAX: usize = 16_384;

/// Directories that are remembered to have been in the export, in each of two generations.
const INSIDE_MAX: usize = 16_384;

/// Directories that were in the export when their parent was looked for.
///
/// An id that was given out stays valid, wherever its directory is moved. So the id of a directory
/// that was once in the export reveals nothing more than the earlier answer did.
#[derive(Default)]
pub(crate) struct SeenInside(Mutex<Generations>);

/// What was found last, and what was found before that.
#[derive(Default)]
struct Generations {
    new: HashSet<FileId, IdHash>,
    old: HashSet<FileId, IdHash>,
}

impl SeenInside {
    fn has(&self, dir: FileId) -> bool {
        let generations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        generations.new.contains(&dir) || generations.old.contains(&dir)
    }

    fn add(&self, dirs: Vec<FileId>) {
        let mut generations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for dir in dirs {
            if generations.new.len() >= INSIDE_MAX {
                generations.old = std::mem::take(&mut generations.new);
            }
            generations.new.insert(dir);
        }
    }
}

impl Core {
    /// The directory above. A directory that was moved out of the export has none.
    pub(crate) fn parent_of(&self, dir: FileId) -> Result<Entry> {
        let node = self.directory(dir)?;
        if dir == self.root.id {
            return Ok(Entry { id: dir, attr: self.stat(node.fd())?.attr });
        }
        let fd = sys::open_parent(node.fd()).map_err(parent_error)?;
        match &self.ids {
            Ids::Native(_) => {
                let entry = self.identify(None, fd.as_fd())?;
                if entry.id != self.root.id {
                    self.must_be_inside(entry.id, &fd)?;
                    self.nodes.insert(self.new_node(entry.id, FileType::Directory, fd));
                }
                Ok(entry)
            }
            Ids::Table(table) => self.parent_by_place(table, dir, self.stat(fd.as_fd())?),
        }
    }

    /// Goes up until it meets the export's root, or a directory that clients know already. Without
    /// the latter a walk through a deep tree would cost its depth in each directory. Errors:
    /// `ESTALE`.
    fn must_be_inside(&self, id: FileId, dir: &OwnedFd) -> Result<()> {
        let (mut seen, mut here, mut fd) = (Vec::new(), id, None);
        while here != self.root.id && !self.is_known(here) {
            if seen.len() >= STEPS_MAX {
                return Err(left());
            }
            seen.push(here);
            let below = fd.as_ref().unwrap_or(dir);
            let up = cred::as_root(|| sys::open_parent(below.as_fd()))?.map_err(parent_error)?;
            let above = self.identify(None, up.as_fd())?.id;
            if above == here {
                return Err(left()); // the root of the file system
            }
            (here, fd) = (above, Some(up));
        }
        self.inside.add(seen);
        Ok(())
    }

    /// Whether clients have been given this directory, or could have been.
    fn is_known(&self, dir: FileId) -> bool {
        self.nodes.get(dir).is_some() || self.inside.has(dir)
    }

    /// What the path table says is above `dir`, if that looks as what is there.
    fn parent_by_place(
        &self,
        table: &PathTable,
        dir: FileId,
        there: sys::InodeStat,
    ) -> Result<Entry> {
        let known = table.find(dir).ok_or_else(stale)?;
        let id = known.places.first().ok_or_else(stale)?.0;
        let place = |stat: &sys::InodeStat| (stat.dev, stat.attr.ino);
        // Found by its names, from the root down.
        let attr = match self.stat(self.directory(id)?.fd())? {
            known if place(&known) == place(&there) => known.attr,
            _ => return Err(left()),
        };
        Ok(Entry { id, attr })
    }
}

fn left() -> Error {
    stale().because("the directory was moved out of the export")
}

/// A directory within an export has its parent on the same mount, unless it has been moved away
/// or something was mounted over its parent.
fn parent_error(errno: Errno) -> Error {
    match errno {
        Errno::EXDEV => stale().because("the parent directory is on another mount"),
        errno => errno.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_is_bounded() {
        let inside = SeenInside::default();
        let dir = |ino: usize| FileId { ino: ino as u64, generation: 1 };
        for ino in 0..3 * INSIDE_MAX {
            inside.add(vec![dir(ino)]);
            assert!(inside.has(dir(ino)) && inside.has(dir(ino.saturating_sub(INSIDE_MAX - 1))));
        }
        let generations = inside.0.lock().unwrap();
        assert!(generations.new.len() + generations.old.len() <= 2 * INSIDE_MAX);
    }
}
