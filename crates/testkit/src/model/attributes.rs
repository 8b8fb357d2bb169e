//! Operations on attributes.

use dray_core::{Errno, FileType, Identity, XattrSet};

use super::node::{ModelContent, member};
use super::{Answer, Model, ModelStat, READ, StepOutcome, WRITE};
use crate::step::{Action, Path, xattr_name};

impl Model {
    pub(super) fn stat(&self, ino: u64) -> StepOutcome {
        let node = &self.nodes[&ino];
        let size = match &node.kind {
            ModelContent::File(content) => content.len(),
            ModelContent::Symlink(target) => target.len(),
            _ => 0,
        };
        StepOutcome::Stat(ModelStat {
            mode: node.mode,
            nlink: self.nlink(ino),
            uid: node.uid,
            gid: node.gid,
            size: size as u64,
            mtime_sec: node.mtime_sec,
        })
    }

    pub(super) fn run_on_attributes(&mut self, who: &Identity, action: &Action) -> Answer {
        match action {
            Action::Lstat { path } => Ok(self.stat(self.walk(who, path, false)?)),
            Action::Chmod { path, mode } => self.chmod(who, path, *mode),
            Action::Lchown { path, uid, gid } => self.chown(who, path, *uid, *gid),
            Action::Truncate { path, size } => {
                let ino = self.walk(who, path, true)?;
                match &self.nodes[&ino].kind {
                    ModelContent::File(_) => self.nodes[&ino].may(who, WRITE)?,
                    ModelContent::Directory(_) => return Err(Errno::EISDIR),
                    _ => return Err(Errno::EINVAL),
                }
                self.set_size(who, ino, *size)
            }
            Action::Utimens { path, mtime_sec } => self.utimens(who, path, *mtime_sec),
            Action::Access { path, want } => {
                self.nodes[&self.walk(who, path, true)?].may(who, *want)?;
                Ok(StepOutcome::Done)
            }
            Action::Setxattr { path, name, value, how } => {
                self.setxattr(who, path, xattr_name(*name), value, *how)
            }
            Action::Getxattr { path, name } => self.getxattr(who, path, xattr_name(*name)),
            Action::Listxattr { path } => {
                let ino = self.walk(who, path, false)?;
                Ok(StepOutcome::XattrNames(self.nodes[&ino].xattrs.keys().cloned().collect()))
            }
            Action::Removexattr { path, name } => {
                let ino = self.walk(who, path, false)?;
                self.may_change_xattrs(who, ino)?;
                let removed = self.node(ino).xattrs.remove(xattr_name(*name));
                removed.map(|_| StepOutcome::Done).ok_or(Errno::ENODATA)
            }
            _ => Err(Errno::ENOSYS),
        }
    }

    fn chmod(&mut self, who: &Identity, path: &Path, mode: u32) -> Answer {
        let ino = self.walk(who, path, true)?;
        let node = self.node(ino);
        if !node.owned_by(who) {
            return Err(Errno::EPERM);
        }
        node.mode = node.mode & libc::S_IFMT | mode;
        if who.uid.0 != 0 && !member(who, node.gid) {
            node.mode &= !libc::S_ISGID;
        }
        Ok(StepOutcome::Done)
    }

    fn chown(&mut self, who: &Identity, path: &Path, uid: Option<u32>, gid: Option<u32>) -> Answer {
        let ino = self.walk(who, path, false)?;
        let node = self.node(ino);
        let owner = who.uid.0 == node.uid;
        let uid_allowed = uid.is_none_or(|uid| who.uid.0 == 0 || owner && uid == node.uid);
        let gid_allowed =
            gid.is_none_or(|gid| who.uid.0 == 0 || owner && (member(who, gid) || gid == node.gid));
        if !uid_allowed || !gid_allowed {
            return Err(Errno::EPERM);
        }
        if !node.is_dir() {
            node.drop_set_id(who);
        }
        node.uid = uid.unwrap_or(node.uid);
        node.gid = gid.unwrap_or(node.gid);
        Ok(StepOutcome::Done)
    }

    fn utimens(&mut self, who: &Identity, path: &Path, mtime_sec: Option<u32>) -> Answer {
        let ino = self.walk(who, path, true)?;
        let node = self.node(ino);
        if !node.owned_by(who) {
            match mtime_sec {
                Some(_) => return Err(Errno::EPERM),
                None => node.may(who, WRITE)?,
            }
        }
        node.mtime_sec = mtime_sec.map(i64::from);
        Ok(StepOutcome::Done)
    }

    fn takes_xattrs(&self, ino: u64) -> bool {
        matches!(self.nodes[&ino].file_type(), FileType::Regular | FileType::Directory)
    }

    fn may_change_xattrs(&self, who: &Identity, ino: u64) -> Result<(), Errno> {
        let node = &self.nodes[&ino];
        let sticky = node.is_dir() && node.mode & libc::S_ISVTX != 0 && !node.owned_by(who);
        if !self.takes_xattrs(ino) || sticky {
            return Err(Errno::EPERM);
        }
        node.may(who, WRITE)
    }

    fn setxattr(
        &mut self,
        who: &Identity,
        path: &Path,
        name: &[u8],
        value: &[u8],
        how: XattrSet,
    ) -> Answer {
        let ino = self.walk(who, path, false)?;
        self.may_change_xattrs(who, ino)?;
        let xattrs = &mut self.node(ino).xattrs;
        match (how, xattrs.contains_key(name)) {
            (XattrSet::Create, true) => return Err(Errno::EEXIST),
            (XattrSet::Replace, false) => return Err(Errno::ENODATA),
            _ => {}
        }
        xattrs.insert(name.to_vec(), value.to_vec());
        Ok(StepOutcome::Done)
    }

    fn getxattr(&self, who: &Identity, path: &Path, name: &[u8]) -> Answer {
        let ino = self.walk(who, path, false)?;
        if !self.takes_xattrs(ino) {
            return Err(Errno::ENODATA);
        }
        self.nodes[&ino].may(who, READ)?;
        let value = self.nodes[&ino].xattrs.get(name);
        value.map(|value| StepOutcome::Bytes(value.clone())).ok_or(Errno::ENODATA)
    }
}
