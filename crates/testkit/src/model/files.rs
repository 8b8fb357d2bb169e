//! Operations on open files.

use dray_core::{Errno, Identity};

use super::node::{ModelContent, ModelHandle};
use super::{Answer, EXECUTE, Model, READ, StepOutcome, WRITE};
use crate::step::{self, Action, Path};

impl Model {
    fn put(&mut self, slot: u8, opened: Option<ModelHandle>) {
        let count = self.slots.len();
        self.slots[usize::from(slot) % count] = opened;
    }

    pub(super) fn open(&mut self, who: &Identity, path: &Path, flags: i32, slot: u8) -> Answer {
        let follow = flags & libc::O_NOFOLLOW == 0;
        let ino = self.walk(who, path, follow)?;
        self.open_node(who, ino, flags, slot)
    }

    fn open_node(&mut self, who: &Identity, ino: u64, flags: i32, slot: u8) -> Answer {
        let opened = ModelHandle { ino, flags };
        let node = self.node(ino);
        if flags & libc::O_DIRECTORY != 0 && !node.is_dir() {
            return Err(Errno::ENOTDIR);
        }
        let truncates = flags & libc::O_TRUNC != 0;
        let changes = opened.writes() || truncates;
        if node.is_symlink() {
            return Err(Errno::ELOOP);
        }
        if node.is_dir() && changes {
            return Err(Errno::EISDIR);
        }
        if node.is_special() {
            return Err(Errno::ENXIO); // by agreement: nothing here opens FIFOs and sockets
        }
        node.may(who, if opened.reads() { READ } else { 0 } | if changes { WRITE } else { 0 })?;
        if truncates {
            node.kind = ModelContent::File(vec![]);
            node.content_changed(who);
        }
        self.put(slot, Some(opened));
        Ok(StepOutcome::Done)
    }

    pub(super) fn create(
        &mut self,
        who: &Identity,
        path: &Path,
        (flags, mode, exclusive): (i32, u32, bool),
        slot: u8,
    ) -> Answer {
        let (dir, name) = self.parent(who, path)?;
        if let Some(ino) = self.lookup(who, dir, &name)? {
            let node = &self.nodes[&ino];
            if exclusive {
                return Err(Errno::EEXIST);
            }
            if node.is_symlink() && flags & libc::O_NOFOLLOW == 0 {
                return Err(Errno::ENOENT);
            }
            if node.is_dir() {
                return Err(Errno::EISDIR);
            }
            let dir = &self.nodes[&dir];
            let owned_by_others = node.uid != dir.uid && node.uid != who.uid.0;
            let level = self.quirks.protected_regular;
            let exposed = level > 0 && dir.mode & 0o002 != 0 || level > 1 && dir.mode & 0o020 != 0;
            let regular = matches!(node.kind, ModelContent::File(_));
            if regular && dir.mode & libc::S_ISVTX != 0 && owned_by_others && exposed {
                return Err(Errno::EACCES);
            }
            return self.open_node(who, ino, flags, slot);
        }
        self.nodes[&dir].may(who, WRITE | EXECUTE)?;
        let ino = self.add(who, dir, libc::S_IFREG | mode, ModelContent::File(vec![]));
        self.set_name(dir, &name, Some(ino));
        self.put(slot, Some(ModelHandle { ino, flags }));
        Ok(StepOutcome::Done)
    }

    pub(super) fn tmpfile(&mut self, who: &Identity, dir: &Path, mode: u32, slot: u8) -> Answer {
        let dir = self.walk(who, dir, true)?;
        if !self.nodes[&dir].is_dir() {
            return Err(Errno::ENOTDIR);
        }
        self.nodes[&dir].may(who, WRITE | EXECUTE)?;
        let ino = self.add(who, dir, libc::S_IFREG | mode, ModelContent::File(vec![]));
        self.node(ino).linkable = true;
        self.put(slot, Some(ModelHandle { ino, flags: libc::O_RDWR }));
        Ok(StepOutcome::Done)
    }

    pub(super) fn run_on_slot(&mut self, who: &Identity, action: &Action) -> Answer {
        let (Action::Close { slot }
        | Action::Read { slot, .. }
        | Action::Write { slot, .. }
        | Action::Fsync { slot }
        | Action::Fstat { slot }
        | Action::Ftruncate { slot, .. }
        | Action::Fallocate { slot, .. }
        | Action::Seek { slot, .. }
        | Action::CopyRange { from: slot, .. }) = action
        else {
            return Err(Errno::ENOSYS);
        };
        let Some(open) = self.slot(*slot) else {
            return Ok(StepOutcome::NoSlot);
        };
        match *action {
            Action::Close { slot } => {
                self.put(slot, None);
                Ok(StepOutcome::Done)
            }
            Action::Read { at, len, .. } => self.read(open, at, len),
            Action::Write { at, len, fill, .. } => {
                self.write(who, open, at, &step::pattern(fill, len))
            }
            Action::Fstat { .. } => Ok(self.stat(open.ino)),
            Action::Ftruncate { size, .. } => {
                if !open.writes() {
                    return Err(Errno::EINVAL);
                }
                self.set_size(who, open.ino, size)
            }
            Action::Fallocate { flags, at, len, .. } => self.fallocate(who, open, flags, at, len),
            Action::CopyRange { at, to, to_at, len, .. } => match self.slot(to) {
                Some(to) => self.copy_range(who, (open, at), (to, to_at), len),
                None => Ok(StepOutcome::NoSlot),
            },
            // Where it leads is judged by `seek_allowed`, since file systems differ.
            Action::Seek { .. } | Action::Fsync { .. } => Ok(StepOutcome::Done),
            _ => Err(Errno::ENOSYS),
        }
    }

    fn content(&self, ino: u64) -> Result<&Vec<u8>, Errno> {
        match &self.nodes[&ino].kind {
            ModelContent::File(content) => Ok(content),
            ModelContent::Directory(_) => Err(Errno::EISDIR),
            _ => Err(Errno::EINVAL),
        }
    }

    fn content_mut(&mut self, ino: u64) -> Result<&mut Vec<u8>, Errno> {
        match &mut self.node(ino).kind {
            ModelContent::File(content) => Ok(content),
            ModelContent::Directory(_) => Err(Errno::EISDIR),
            _ => Err(Errno::EINVAL),
        }
    }

    fn read(&self, open: ModelHandle, at: u64, len: u32) -> Answer {
        if !open.reads() {
            return Err(Errno::EBADF);
        }
        let content = self.content(open.ino)?;
        let behind = content.iter().skip(at as usize).take(len as usize);
        Ok(StepOutcome::Bytes(behind.copied().collect()))
    }

    fn write(&mut self, who: &Identity, open: ModelHandle, at: u64, bytes: &[u8]) -> Answer {
        if !open.writes() {
            return Err(Errno::EBADF);
        }
        let appends = open.flags & libc::O_APPEND != 0;
        let content = self.content_mut(open.ino)?;
        if bytes.is_empty() {
            return Ok(StepOutcome::Count(0));
        }
        let at = if appends { content.len() } else { at as usize };
        let end = at + bytes.len();
        if content.len() < end {
            content.resize(end, 0);
        }
        content[at..end].copy_from_slice(bytes);
        self.node(open.ino).content_changed(who);
        Ok(StepOutcome::Count(bytes.len() as u64))
    }

    pub(super) fn set_size(&mut self, who: &Identity, ino: u64, size: u64) -> Answer {
        self.content_mut(ino)?.resize(size as usize, 0);
        self.node(ino).content_changed(who);
        Ok(StepOutcome::Done)
    }

    fn fallocate(
        &mut self,
        who: &Identity,
        open: ModelHandle,
        flags: i32,
        at: u64,
        len: u64,
    ) -> Answer {
        if !open.writes() {
            return Err(Errno::EBADF);
        }
        let content = self.content_mut(open.ino)?;
        let end = (at + len) as usize;
        if flags & libc::FALLOC_FL_PUNCH_HOLE != 0 {
            let size = content.len();
            content[(at as usize).min(size)..end.min(size)].fill(0);
        } else if flags & libc::FALLOC_FL_KEEP_SIZE == 0 && content.len() < end {
            content.resize(end, 0);
        }
        self.node(open.ino).content_changed(who);
        Ok(StepOutcome::Done)
    }

    fn copy_range(
        &mut self,
        who: &Identity,
        (from, at): (ModelHandle, u64),
        (to, to_at): (ModelHandle, u64),
        len: u64,
    ) -> Answer {
        self.content(to.ino)?;
        let source = self.content(from.ino)?;
        if !from.reads() || !to.writes() || to.flags & libc::O_APPEND != 0 {
            return Err(Errno::EBADF);
        }
        let len = len.min((source.len() as u64).saturating_sub(at));
        if from.ino == to.ino && to_at + len > at && to_at < at + len {
            return Err(Errno::EINVAL);
        }
        let bytes: Vec<u8> = source.iter().skip(at as usize).take(len as usize).copied().collect();
        self.write(who, to, to_at, &bytes)
    }
}
