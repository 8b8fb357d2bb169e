//! Operations on names.

use std::collections::BTreeMap;

use dray_core::{Errno, Identity, RenameHow};

use super::node::{ModelContent, ModelNode, member};
use super::{Answer, EXECUTE, Model, READ, StepOutcome, WRITE};
use crate::step::{self, Path};

impl Model {
    /// Adds a file called `name` to `dir`, as `who` makes it.
    pub(super) fn add(&mut self, who: &Identity, dir: u64, mode: u32, kind: ModelContent) -> u64 {
        let parent = &self.nodes[&dir];
        let inherits = parent.mode & libc::S_ISGID != 0;
        let gid = if inherits { parent.gid } else { who.gid.0 };
        let mut mode = mode;
        if matches!(kind, ModelContent::Directory(_)) {
            if inherits {
                mode |= libc::S_ISGID;
            }
        } else if inherits
            && mode & libc::S_ISGID != 0
            && mode & libc::S_IXGRP != 0
            && who.uid.0 != 0
            && !member(who, gid)
        {
            mode &= !libc::S_ISGID;
        }
        let ino = self.nodes.len() as u64 + 1;
        self.nodes.insert(ino, ModelNode::new(mode, who.uid.0, gid, kind));
        ino
    }

    pub(super) fn set_name(&mut self, dir: u64, name: &[u8], ino: Option<u64>) {
        let node = self.node(dir);
        node.mtime_sec = None;
        if let ModelContent::Directory(names) = &mut node.kind {
            match ino {
                Some(ino) => names.insert(name.to_vec(), ino),
                None => names.remove(name),
            };
        }
    }

    fn make(&mut self, who: &Identity, path: &Path, mode: u32, kind: ModelContent) -> Answer {
        let (dir, name) = self.parent(who, path)?;
        if self.lookup(who, dir, &name)?.is_some() {
            return Err(Errno::EEXIST);
        }
        self.nodes[&dir].may(who, WRITE | EXECUTE)?;
        let ino = self.add(who, dir, mode, kind);
        self.set_name(dir, &name, Some(ino));
        Ok(StepOutcome::Done)
    }

    pub(super) fn mkdir(&mut self, who: &Identity, path: &Path, mode: u32) -> Answer {
        self.make(
            who,
            path,
            libc::S_IFDIR | mode & 0o1777,
            ModelContent::Directory(BTreeMap::new()),
        )
    }

    pub(super) fn mknod(&mut self, who: &Identity, path: &Path, mode: u32) -> Answer {
        let regular = mode & libc::S_IFMT == libc::S_IFREG;
        self.make(
            who,
            path,
            mode,
            if regular { ModelContent::File(vec![]) } else { ModelContent::Special },
        )
    }

    pub(super) fn symlink(&mut self, who: &Identity, path: &Path, target: u8) -> Answer {
        let target = step::NOWHERE[usize::from(target) % step::NOWHERE.len()];
        self.make(who, path, libc::S_IFLNK | 0o777, ModelContent::Symlink(target.to_vec()))
    }

    pub(super) fn link(&mut self, who: &Identity, ino: u64, to: &Path) -> Answer {
        let (dir, name) = self.parent(who, to)?;
        if self.lookup(who, dir, &name)?.is_some() {
            return Err(Errno::EEXIST);
        }
        let node = &self.nodes[&ino];
        if self.quirks.protected_hardlinks && !node.owned_by(who) {
            let set_gid = node.mode & libc::S_ISGID != 0 && node.mode & libc::S_IXGRP != 0;
            let dangerous = node.mode & libc::S_ISUID != 0 || set_gid;
            let regular = matches!(node.kind, ModelContent::File(_));
            if !regular || dangerous || node.may(who, READ | WRITE).is_err() {
                return Err(Errno::EPERM);
            }
        }
        self.nodes[&dir].may(who, WRITE | EXECUTE)?;
        if node.is_dir() {
            return Err(Errno::EPERM);
        }
        if self.nlink(ino) == 0 && !node.linkable {
            return Err(Errno::ENOENT);
        }
        self.node(ino).linkable = false;
        self.set_name(dir, &name, Some(ino));
        Ok(StepOutcome::Done)
    }

    /// Whether `who` may take `victim` out of `dir`; `dir_wanted`: as a directory.
    fn may_remove(
        &self,
        who: &Identity,
        dir: u64,
        victim: u64,
        dir_wanted: bool,
    ) -> Result<(), Errno> {
        let (dir, victim) = (&self.nodes[&dir], &self.nodes[&victim]);
        dir.may(who, WRITE | EXECUTE)?;
        if dir.mode & libc::S_ISVTX != 0 && !dir.owned_by(who) && !victim.owned_by(who) {
            return Err(Errno::EPERM);
        }
        match (dir_wanted, victim.is_dir()) {
            (true, false) => Err(Errno::ENOTDIR),
            (false, true) => Err(Errno::EISDIR),
            _ => Ok(()),
        }
    }

    fn is_empty(&self, dir: u64) -> bool {
        matches!(&self.nodes[&dir].kind, ModelContent::Directory(names) if names.is_empty())
    }

    pub(super) fn remove(&mut self, who: &Identity, path: &Path, as_dir: bool) -> Answer {
        let (dir, name) = self.parent(who, path)?;
        let victim = self.lookup(who, dir, &name)?.ok_or(Errno::ENOENT)?;
        self.may_remove(who, dir, victim, as_dir)?;
        if as_dir && !self.is_empty(victim) {
            return Err(Errno::ENOTEMPTY);
        }
        self.set_name(dir, &name, None);
        Ok(StepOutcome::Done)
    }

    pub(super) fn rename(
        &mut self,
        who: &Identity,
        from: &Path,
        to: &Path,
        how: RenameHow,
    ) -> Answer {
        let (from_dir, from_name) = self.parent(who, from)?;
        let (to_dir, to_name) = self.parent(who, to)?;
        let source = self.lookup(who, from_dir, &from_name)?.ok_or(Errno::ENOENT)?;
        let target = self.lookup(who, to_dir, &to_name)?;
        let exchange = how == RenameHow::Exchange;
        if how == RenameHow::NoReplace && target.is_some() {
            return Err(Errno::EEXIST);
        }
        if exchange && target.is_none() {
            return Err(Errno::ENOENT);
        }
        if self.is_below(to_dir, source) {
            return Err(Errno::EINVAL);
        }
        if target.is_some_and(|target| self.is_below(from_dir, target)) {
            return Err(if exchange { Errno::EINVAL } else { Errno::ENOTEMPTY });
        }
        if target == Some(source) {
            return Ok(StepOutcome::Done);
        }
        let is_dir = |ino: u64| self.nodes[&ino].is_dir();
        self.may_remove(who, from_dir, source, is_dir(source))?;
        match target {
            Some(target) if exchange => self.may_remove(who, to_dir, target, is_dir(target))?,
            Some(target) => self.may_remove(who, to_dir, target, is_dir(source))?,
            None => self.nodes[&to_dir].may(who, WRITE | EXECUTE)?,
        }
        if from_dir != to_dir {
            for moved in [Some(source), target.filter(|_| exchange)].into_iter().flatten() {
                if is_dir(moved) {
                    self.nodes[&moved].may(who, WRITE)?;
                }
            }
        }
        if target.is_some_and(|target| !exchange && is_dir(target) && !self.is_empty(target)) {
            return Err(Errno::ENOTEMPTY);
        }
        self.set_name(from_dir, &from_name, target.filter(|_| exchange));
        self.set_name(to_dir, &to_name, Some(source));
        if exchange && from_dir != to_dir && self.quirks.exchanged_directories_are_modified {
            for moved in [Some(source), target].into_iter().flatten() {
                let node = self.node(moved);
                node.mtime_sec = node.mtime_sec.filter(|_| !node.is_dir());
            }
        }
        Ok(StepOutcome::Done)
    }

    pub(super) fn list(&self, who: &Identity, path: &Path) -> Answer {
        let ino = self.walk(who, path, true)?;
        let node = &self.nodes[&ino];
        let ModelContent::Directory(names) = &node.kind else {
            return Err(Errno::ENOTDIR);
        };
        node.may(who, READ)?;
        let with_type = |(name, ino): (&Vec<u8>, &u64)| (name.clone(), self.nodes[ino].file_type());
        Ok(StepOutcome::Names(names.iter().map(with_type).collect()))
    }

    pub(super) fn readlink(&self, who: &Identity, path: &Path) -> Answer {
        match &self.nodes[&self.walk(who, path, false)?].kind {
            ModelContent::Symlink(target) => Ok(StepOutcome::Bytes(target.clone())),
            _ => Err(Errno::EINVAL),
        }
    }
}
