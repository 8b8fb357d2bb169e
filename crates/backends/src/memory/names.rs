//! Names: lookup, making, removing and linking.

use std::sync::Arc;

use dray_core::{
    Context, Entry, Errno, Error, FileId, FileType, Make, Name, PATH_MAX_BYTES, RemoveKind, Result,
};

use super::content::Content;
use super::directory::Directory;
use super::inode::{Body, MODE_BITS, Meta, now};
use super::store::{LINK_MAX, ROOT_INO, Store};

const SEARCH: u32 = libc::X_OK as u32;
const CHANGE: u32 = (libc::W_OK | libc::X_OK) as u32;

impl Store {
    /// What `name` in `dir` stands for, if anything; the caller must be allowed to search.
    pub(super) fn named(&self, cx: &Context, dir: u64, name: &Name) -> Result<Option<u64>> {
        let inode = self.inode(dir)?;
        let directory = inode.directory()?;
        inode.meta.may(cx, SEARCH)?;
        Ok(directory.get(name))
    }

    /// As `named`; `ENOENT` for nothing.
    pub(super) fn existing(&self, cx: &Context, dir: u64, name: &Name) -> Result<u64> {
        self.named(cx, dir, name)?.ok_or(Error::new(Errno::ENOENT).absent_for(self.absence))
    }

    pub(super) fn lookup(&self, cx: &Context, dir: FileId, name: &Name) -> Result<Entry> {
        let ino = self.existing(cx, self.find(dir)?, name)?;
        self.entry(ino)
    }

    pub(super) fn parent(&self, cx: &Context, dir: FileId) -> Result<Entry> {
        let inode = self.inode(self.find(dir)?)?;
        let parent = inode.directory()?.parent;
        inode.meta.may(cx, SEARCH)?;
        self.entry(parent)
    }

    /// Whether the caller may put a new name into `dir`. A removed directory takes none.
    pub(super) fn may_add(&self, cx: &Context, dir: u64) -> Result<()> {
        let meta = &self.inode(dir)?.meta;
        if meta.nlink == 0 {
            return Err(Errno::ENOENT.into());
        }
        meta.may(cx, CHANGE)
    }

    /// Whether the caller may take `victim` out of `dir`: `EACCES` by the directory's
    /// mode, `EPERM` by its sticky bit, `ENOTDIR` or `EISDIR` if it is of the wrong kind.
    pub(super) fn may_remove(
        &self,
        cx: &Context,
        dir: u64,
        victim: u64,
        as_dir: bool,
    ) -> Result<()> {
        let meta = &self.inode(dir)?.meta;
        let target = &self.inode(victim)?.meta;
        meta.may(cx, CHANGE)?;
        let sticky = meta.mode & libc::S_ISVTX != 0;
        if sticky && !meta.owned_by(&cx.who) && !target.owned_by(&cx.who) {
            return Err(Errno::EPERM.into());
        }
        match (as_dir, target.is_dir()) {
            (true, false) => Err(Errno::ENOTDIR.into()),
            (false, true) => Err(Errno::EISDIR.into()),
            _ => Ok(()),
        }
    }

    /// Attributes of a new file in `dir`, as inode_init_owner of Linux sets them. A set-group-id
    /// directory hands on its group, and to directories the bit too.
    pub(super) fn new_meta(&self, cx: &Context, dir: u64, mode: u32) -> Result<Meta> {
        let parent = &self.inode(dir)?.meta;
        let inherits = parent.mode & libc::S_ISGID != 0;
        let gid = if inherits { parent.gid } else { cx.who.gid };
        let is_dir = mode & libc::S_IFMT == libc::S_IFDIR;
        let mut mode = mode & !(cx.umask & 0o777);
        let executable_set_gid = libc::S_ISGID | libc::S_IXGRP;
        if inherits && is_dir {
            mode |= libc::S_ISGID;
        } else if inherits
            && mode & executable_set_gid == executable_set_gid
            && !(cx.who.is_root() || cx.who.in_group(gid))
        {
            mode &= !libc::S_ISGID;
        }
        let time = now();
        Ok(Meta {
            mode,
            uid: cx.who.uid,
            gid,
            nlink: if is_dir { 2 } else { 1 },
            atime: time,
            mtime: time,
            ctime: time,
            btime: time,
            ..Meta::default()
        })
    }

    pub(super) fn make(
        &mut self,
        cx: &Context,
        dir: FileId,
        name: &Name,
        what: Make<'_>,
    ) -> Result<Entry> {
        let dir = self.find(dir)?;
        if self.named(cx, dir, name)?.is_some() {
            return Err(Errno::EEXIST.into());
        }
        self.may_add(cx, dir)?;
        let (mode, rdev, body) = match what {
            Make::Directory { mode } => {
                if self.inode(dir)?.meta.nlink >= LINK_MAX {
                    return Err(Errno::EMLINK.into());
                }
                let mode = libc::S_IFDIR | mode & 0o1777;
                (mode, 0, Body::Directory(Directory::new(dir)))
            }
            Make::Node { mode, rdev } => {
                let mode = if mode & libc::S_IFMT == 0 { mode | libc::S_IFREG } else { mode };
                let mode = mode & (libc::S_IFMT | MODE_BITS);
                (mode, rdev, node_body(cx, mode)?)
            }
            Make::Symlink { target } => {
                if target.is_empty() || target.contains(&0) {
                    return Err(Errno::EINVAL.into());
                }
                if target.len() >= PATH_MAX_BYTES {
                    return Err(Errno::ENAMETOOLONG.into());
                }
                (libc::S_IFLNK | 0o777, 0, Body::Symlink(Arc::from(target)))
            }
        };
        let mut meta = self.new_meta(cx, dir, mode)?;
        meta.rdev = rdev;
        if matches!(body, Body::Symlink(_)) {
            meta.mode = libc::S_IFLNK | 0o777; // no umask for links
        }
        let is_dir = meta.is_dir();
        let ino = self.add(meta, body)?;
        self.set_name(dir, name, ino)?;
        if is_dir {
            self.change(dir)?.meta.nlink += 1;
        }
        self.entry(ino)
    }

    pub(super) fn remove(
        &mut self,
        cx: &Context,
        dir: FileId,
        name: &Name,
        kind: RemoveKind,
    ) -> Result<()> {
        let dir = self.find(dir)?;
        let victim = self.existing(cx, dir, name)?;
        let as_dir = kind == RemoveKind::Directory;
        self.may_remove(cx, dir, victim, as_dir)?;
        if as_dir && !self.inode(victim)?.directory()?.is_empty() {
            return Err(Errno::ENOTEMPTY.into());
        }
        self.clear_name(dir, name)?;
        self.lose_name(dir, victim)
    }

    /// `victim` has lost its name in `dir`.
    pub(super) fn lose_name(&mut self, dir: u64, victim: u64) -> Result<()> {
        let time = now();
        let inode = self.change(victim)?;
        inode.meta.ctime = time;
        if inode.meta.is_dir() {
            inode.meta.nlink = 0;
            self.change(dir)?.meta.nlink -= 1;
        } else {
            inode.meta.nlink -= 1;
        }
        self.drop_if_unused(victim);
        Ok(())
    }

    pub(super) fn link(
        &mut self,
        cx: &Context,
        id: FileId,
        dir: FileId,
        name: &Name,
    ) -> Result<Entry> {
        let (ino, dir) = (self.find(id)?, self.find(dir)?);
        if self.named(cx, dir, name)?.is_some() {
            return Err(Errno::EEXIST.into());
        }
        self.may_add(cx, dir)?;
        let inode = self.inode(ino)?;
        if inode.meta.is_dir() {
            return Err(Errno::EPERM.into());
        }
        if inode.meta.nlink == 0 && !inode.linkable {
            return Err(Errno::ENOENT.into());
        }
        if inode.meta.nlink >= LINK_MAX {
            return Err(Errno::EMLINK.into());
        }
        let inode = self.change(ino)?;
        inode.meta.nlink += 1;
        inode.meta.ctime = now();
        inode.linkable = false;
        self.set_name(dir, name, ino)?;
        self.entry(ino)
    }

    /// Makes a regular file called `name` in `dir`, where there is none.
    pub(super) fn new_file(
        &mut self,
        cx: &Context,
        dir: u64,
        name: Option<&Name>,
        mode: u32,
    ) -> Result<u64> {
        self.may_add(cx, dir)?;
        let mut meta = self.new_meta(cx, dir, libc::S_IFREG | mode & MODE_BITS)?;
        if name.is_none() {
            meta.nlink = 0;
        }
        let ino = self.add(meta, Body::File(Content::default()))?;
        if let Some(name) = name {
            self.set_name(dir, name, ino)?;
        }
        Ok(ino)
    }

    /// Whether `above` is `dir` or a directory that `dir` is in, however deep.
    pub(super) fn is_within(&self, dir: u64, above: u64) -> Result<bool> {
        let mut at = dir;
        loop {
            if at == above {
                return Ok(true);
            }
            if at == ROOT_INO {
                return Ok(false);
            }
            at = self.inode(at)?.directory()?.parent;
        }
    }
}

/// The body of a node. Devices are for root; directories are made otherwise.
fn node_body(cx: &Context, mode: u32) -> Result<Body> {
    match FileType::from_mode(mode) {
        Some(FileType::Regular) => Ok(Body::File(Content::default())),
        Some(FileType::Fifo | FileType::Socket) => Ok(Body::Special),
        Some(FileType::CharDevice | FileType::BlockDevice) if cx.who.is_root() => Ok(Body::Special),
        Some(FileType::CharDevice | FileType::BlockDevice | FileType::Directory) => {
            Err(Errno::EPERM.into())
        }
        _ => Err(Errno::EINVAL.into()),
    }
}
