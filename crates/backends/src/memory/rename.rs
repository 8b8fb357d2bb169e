//! renameat2(2).

use dray_core::{Context, Errno, FileId, Name, RenameHow, Result};

use super::inode::{Body, now};
use super::store::{LINK_MAX, Store};

/// A name and what it stands for.
#[derive(Clone, Copy)]
struct Named {
    dir: u64,
    ino: u64,
    is_dir: bool,
}

impl Store {
    /// Checks in the order in which Linux does, so that the same error comes first where
    /// several would do.
    pub(super) fn rename(
        &mut self,
        cx: &Context,
        from: (FileId, &Name),
        to: (FileId, &Name),
        how: RenameHow,
    ) -> Result<()> {
        let (from_dir, to_dir) = (self.find(from.0)?, self.find(to.0)?);
        self.inode(to_dir)?.directory()?;
        let source = self.existing(cx, from_dir, from.1)?;
        let target = self.named(cx, to_dir, to.1)?;
        match (how, target) {
            (RenameHow::NoReplace, Some(_)) => return Err(Errno::EEXIST.into()),
            (RenameHow::Exchange, None) => return Err(Errno::ENOENT.into()),
            _ => {}
        }
        self.check_ancestors((from_dir, source), (to_dir, target), how)?;
        if target == Some(source) {
            return Ok(()); // two names of one file: nothing to do, says POSIX
        }
        let source_is_dir = self.inode(source)?.meta.is_dir();
        let source = Named { dir: from_dir, ino: source, is_dir: source_is_dir };
        self.may_remove(cx, from_dir, source.ino, source_is_dir)?;
        match target {
            None => {
                self.may_add(cx, to_dir)?;
                self.may_move(cx, source, to_dir)?;
                self.move_name(source, from.1, to_dir, to.1, None)
            }
            Some(ino) => {
                let is_dir = self.inode(ino)?.meta.is_dir();
                let target = Named { dir: to_dir, ino, is_dir };
                if how == RenameHow::Exchange {
                    self.may_remove(cx, to_dir, ino, is_dir)?;
                    self.may_move(cx, source, to_dir)?;
                    self.may_move(cx, target, from_dir)?;
                    return self.exchange(source, from.1, target, to.1);
                }
                self.may_remove(cx, to_dir, ino, source_is_dir)?;
                self.may_move(cx, source, to_dir)?;
                if is_dir && !self.inode(ino)?.directory()?.is_empty() {
                    return Err(Errno::ENOTEMPTY.into());
                }
                self.move_name(source, from.1, to_dir, to.1, Some(ino))
            }
        }
    }

    /// No directory may end up inside itself, and what is replaced must be empty.
    fn check_ancestors(
        &self,
        (from_dir, source): (u64, u64),
        (to_dir, target): (u64, Option<u64>),
        how: RenameHow,
    ) -> Result<()> {
        if from_dir == to_dir {
            return Ok(());
        }
        if self.is_within(to_dir, source)? {
            return Err(Errno::EINVAL.into());
        }
        match target {
            Some(target) if self.is_within(from_dir, target)? => Err(match how {
                RenameHow::Exchange => Errno::EINVAL.into(),
                _ => Errno::ENOTEMPTY.into(),
            }),
            _ => Ok(()),
        }
    }

    /// A directory that changes parents has its `..` changed: it must be writable.
    fn may_move(&self, cx: &Context, moved: Named, to_dir: u64) -> Result<()> {
        if !moved.is_dir || moved.dir == to_dir {
            return Ok(());
        }
        self.inode(moved.ino)?.meta.may(cx, libc::W_OK as u32)?;
        if self.inode(to_dir)?.meta.nlink >= LINK_MAX {
            return Err(Errno::EMLINK.into());
        }
        Ok(())
    }

    fn move_name(
        &mut self,
        source: Named,
        from: &Name,
        to_dir: u64,
        to: &Name,
        replaced: Option<u64>,
    ) -> Result<()> {
        self.clear_name(source.dir, from)?;
        self.set_name(to_dir, to, source.ino)?;
        if let Some(replaced) = replaced {
            self.lose_name(to_dir, replaced)?;
        }
        self.arrived(source, to_dir)
    }

    fn exchange(
        &mut self,
        one: Named,
        one_name: &Name,
        other: Named,
        other_name: &Name,
    ) -> Result<()> {
        self.set_name(one.dir, one_name, other.ino)?;
        self.set_name(other.dir, other_name, one.ino)?;
        self.arrived(one, other.dir)?;
        self.arrived(other, one.dir)
    }

    /// `moved` now has its name in `to_dir`.
    fn arrived(&mut self, moved: Named, to_dir: u64) -> Result<()> {
        let inode = self.change(moved.ino)?;
        inode.meta.ctime = now();
        if moved.is_dir && moved.dir != to_dir {
            if let Body::Directory(directory) = &mut inode.body {
                directory.parent = to_dir;
            }
            self.change(moved.dir)?.meta.nlink -= 1;
            self.change(to_dir)?.meta.nlink += 1;
        }
        Ok(())
    }
}
