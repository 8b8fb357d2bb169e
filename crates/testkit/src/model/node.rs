//! A file of the model, and who may do what with it.

use std::collections::BTreeMap;

use dray_core::{Errno, FileType, Identity};

use super::{EXECUTE, Model, ROOT};
use crate::step::{self, Path};

/// What is in a file.
#[derive(Clone, Debug)]
pub(super) enum ModelContent {
    Directory(BTreeMap<Vec<u8>, u64>),
    File(Vec<u8>),
    Symlink(Vec<u8>),
    Special,
}

/// A file.
#[derive(Clone, Debug)]
pub(super) struct ModelNode {
    /// Type and permissions.
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) kind: ModelContent,
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(super) mtime_sec: Option<i64>,
    /// Made by `O_TMPFILE`: may get a first name.
    pub(super) linkable: bool,
}

/// An open file.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModelHandle {
    pub(super) ino: u64,
    pub(super) flags: i32,
}

impl ModelHandle {
    pub(super) fn reads(self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_WRONLY
    }

    pub(super) fn writes(self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_RDONLY
    }
}

impl ModelNode {
    pub(super) fn new(mode: u32, uid: u32, gid: u32, kind: ModelContent) -> ModelNode {
        let xattrs = BTreeMap::new();
        ModelNode { mode, uid, gid, kind, xattrs, mtime_sec: None, linkable: false }
    }

    pub(super) fn file_type(&self) -> FileType {
        FileType::from_mode(self.mode).expect("the model makes files of known types")
    }

    pub(super) fn is_dir(&self) -> bool {
        matches!(self.kind, ModelContent::Directory(_))
    }

    pub(super) fn is_special(&self) -> bool {
        matches!(self.kind, ModelContent::Special)
    }

    pub(super) fn is_symlink(&self) -> bool {
        matches!(self.kind, ModelContent::Symlink(_))
    }

    pub(super) fn owned_by(&self, who: &Identity) -> bool {
        who.uid.0 == 0 || who.uid.0 == self.uid
    }

    /// The rights of path_resolution(7): `want` out of READ, WRITE, EXECUTE.
    pub(super) fn may(&self, who: &Identity, want: u32) -> Result<(), Errno> {
        let bits = if who.uid.0 == 0 {
            let no_execution = !self.is_dir() && self.mode & 0o111 == 0;
            if no_execution { 6 } else { 7 }
        } else if who.uid.0 == self.uid {
            self.mode >> 6 & 7
        } else if member(who, self.gid) {
            self.mode >> 3 & 7
        } else {
            self.mode & 7
        };
        if bits & want == want { Ok(()) } else { Err(Errno::EACCES) }
    }

    /// Clears set-id bits when the owner or, by somebody without privileges, the content
    /// changes (see chown(2) and write(2)).
    pub(super) fn drop_set_id(&mut self, who: &Identity) {
        let group_executes = self.mode & libc::S_IXGRP != 0;
        self.mode &= !libc::S_ISUID;
        if group_executes || who.uid.0 != 0 && !member(who, self.gid) {
            self.mode &= !libc::S_ISGID;
        }
    }

    /// The content was changed by `who`.
    pub(super) fn content_changed(&mut self, who: &Identity) {
        self.mtime_sec = None;
        if who.uid.0 != 0 {
            self.drop_set_id(who);
        }
    }
}

pub(super) fn member(who: &Identity, gid: u32) -> bool {
    who.gid.0 == gid || who.groups.iter().any(|group| group.0 == gid)
}

impl Model {
    pub(super) fn node(&mut self, ino: u64) -> &mut ModelNode {
        self.nodes.get_mut(&ino).expect("the model never forgets a file")
    }

    pub(super) fn slot(&self, slot: u8) -> Option<ModelHandle> {
        self.slots[usize::from(slot) % self.slots.len()]
    }

    pub(super) fn child(&self, dir: u64, name: &[u8]) -> Option<u64> {
        match &self.nodes[&dir].kind {
            ModelContent::Directory(names) => names.get(name).copied(),
            _ => None,
        }
    }

    /// Looks one name up as `who`.
    pub(super) fn lookup(
        &self,
        who: &Identity,
        dir: u64,
        name: &[u8],
    ) -> Result<Option<u64>, Errno> {
        let node = &self.nodes[&dir];
        if !node.is_dir() {
            return Err(Errno::ENOTDIR);
        }
        node.may(who, EXECUTE)?;
        Ok(self.child(dir, name))
    }

    /// Where a path leads. Symbolic links lead to nothing.
    pub(super) fn walk(
        &self,
        who: &Identity,
        path: &Path,
        follow_last: bool,
    ) -> Result<u64, Errno> {
        let mut at = ROOT;
        for (index, &part) in path.iter().enumerate() {
            at = self.lookup(who, at, &step::name(part))?.ok_or(Errno::ENOENT)?;
            let last = index + 1 == path.len();
            if self.nodes[&at].is_symlink() && (!last || follow_last) {
                return Err(Errno::ENOENT);
            }
        }
        Ok(at)
    }

    /// The directory that a path's last name is in, and that name.
    pub(super) fn parent(&self, who: &Identity, path: &Path) -> Result<(u64, Vec<u8>), Errno> {
        let (&last, above) = path.split_last().ok_or(Errno::EINVAL)?;
        let dir = self.walk(who, &above.to_vec(), true)?;
        if !self.nodes[&dir].is_dir() {
            return Err(Errno::ENOTDIR);
        }
        // Linux checks this while it walks: before it looks at another path.
        self.nodes[&dir].may(who, EXECUTE)?;
        Ok((dir, step::name(last)))
    }

    /// Number of names, as stat(2) tells it.
    pub(super) fn nlink(&self, ino: u64) -> u32 {
        let named = |directory: &ModelNode| match &directory.kind {
            ModelContent::Directory(names) => {
                names.values().filter(|&&child| child == ino).count() as u32
            }
            _ => 0,
        };
        let names: u32 = self.nodes.values().map(named).sum();
        match &self.nodes[&ino].kind {
            ModelContent::Directory(_) if names == 0 && ino != ROOT => 0,
            ModelContent::Directory(_) if self.quirks.directories_have_one_link => 1,
            ModelContent::Directory(children) => {
                2 + children.values().filter(|child| self.nodes[child].is_dir()).count() as u32
            }
            _ => names,
        }
    }

    /// Whether `dir` is `top` or somewhere below it.
    pub(super) fn is_below(&self, dir: u64, top: u64) -> bool {
        let ModelContent::Directory(children) = &self.nodes[&top].kind else {
            return false;
        };
        dir == top || children.values().any(|&child| self.is_below(dir, child))
    }
}
