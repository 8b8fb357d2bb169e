//! One file: attributes and content.

use std::collections::BTreeMap;
use std::sync::Arc;

use dray_core::{Attr, Context, Errno, FileType, Gid, Identity, Result, Timestamp, Uid, Validity};

use super::content::Content;
use super::directory::Directory;

/// Permission, set-id and sticky bits.
pub(super) const MODE_BITS: u32 = 0o7777;

/// Attributes that are kept (not computed).
#[derive(Clone, Debug, Default)]
pub(super) struct Meta {
    pub(super) mode: u32,
    pub(super) uid: Uid,
    pub(super) gid: Gid,
    pub(super) nlink: u32,
    pub(super) rdev: u32,
    pub(super) atime: Timestamp,
    pub(super) mtime: Timestamp,
    pub(super) ctime: Timestamp,
    pub(super) btime: Timestamp,
    /// `FS_*_FL` bits.
    pub(super) flags: u32,
    pub(super) xattrs: Arc<BTreeMap<Vec<u8>, Vec<u8>>>,
    /// What answers about it say.
    pub(super) validity: Validity,
}

/// What is in it.
#[derive(Clone, Debug)]
pub(super) enum Body {
    File(Content),
    Directory(Directory),
    Symlink(Arc<[u8]>),
    /// FIFO, socket, device.
    Special,
}

/// A file of any type.
#[derive(Clone, Debug)]
pub(super) struct Inode {
    pub(super) generation: u64,
    pub(super) meta: Meta,
    pub(super) body: Body,
    /// Open files on it: it lives as long as these or a name.
    pub(super) opens: u32,
    /// Made without a name and allowed to get one.
    pub(super) linkable: bool,
}

impl Meta {
    pub(super) fn kind(&self) -> FileType {
        FileType::from_mode(self.mode).unwrap_or(FileType::Regular)
    }

    pub(super) fn is_dir(&self) -> bool {
        self.kind() == FileType::Directory
    }

    /// Whether `who` owns the file or may act as if.
    pub(super) fn owned_by(&self, who: &Identity) -> bool {
        who.is_root() || who.uid == self.uid
    }

    /// Checks `want`, bits `R_OK`, `W_OK`, `X_OK`, by owner, group and other as
    /// path_resolution(7) describes. ACLs are not looked at.
    pub(super) fn may(&self, cx: &Context, want: u32) -> Result<()> {
        let who = &*cx.who;
        let granted = if who.is_root() {
            let executes = self.is_dir() || self.mode & 0o111 != 0;
            0o6 | u32::from(executes)
        } else if who.uid == self.uid {
            self.mode >> 6
        } else if who.in_group(self.gid) {
            self.mode >> 3
        } else {
            self.mode
        };
        if want & !granted & 0o7 == 0 { Ok(()) } else { Err(Errno::EACCES.into()) }
    }

    /// Clears set-id bits as a change of the content by an unprivileged user does. The set-group-id
    /// bit stays where it means something else (no group execution) and the caller is in the group.
    pub(super) fn drop_set_id(&mut self, who: &Identity) {
        self.mode &= !libc::S_ISUID;
        if self.mode & libc::S_IXGRP != 0 || !(who.is_root() || who.in_group(self.gid)) {
            self.mode &= !libc::S_ISGID;
        }
    }
}

impl Inode {
    /// Size, bytes: of the content, of the link's text, or nominal for a directory.
    pub(super) fn size(&self) -> u64 {
        match &self.body {
            Body::File(content) => content.size(),
            Body::Directory(_) => 4096,
            Body::Symlink(target) => target.len() as u64,
            Body::Special => 0,
        }
    }

    pub(super) fn attr(&self, ino: u64) -> Attr {
        let meta = &self.meta;
        let chunks = match &self.body {
            Body::File(content) => content.chunk_count(),
            _ => 0,
        };
        Attr {
            ino,
            mode: meta.mode,
            nlink: meta.nlink,
            uid: meta.uid,
            gid: meta.gid,
            rdev: meta.rdev,
            block_bytes: 4096,
            size: self.size(),
            blocks: chunks * (super::content::CHUNK_BYTES / 512),
            atime: meta.atime,
            mtime: meta.mtime,
            ctime: meta.ctime,
            btime: meta.btime,
            attributes: 0,
            attributes_mask: 0,
            validity: meta.validity,
        }
    }

    pub(super) fn directory(&self) -> Result<&Directory> {
        match &self.body {
            Body::Directory(directory) => Ok(directory),
            _ => Err(Errno::ENOTDIR.into()),
        }
    }

    /// The content of a regular file; `EISDIR` or `EINVAL` for anything else.
    pub(super) fn content(&self) -> Result<&Content> {
        match &self.body {
            Body::File(content) => Ok(content),
            Body::Directory(_) => Err(Errno::EISDIR.into()),
            _ => Err(Errno::EINVAL.into()),
        }
    }

    /// As [`Inode::content`], to be changed.
    pub(super) fn content_mut(&mut self) -> Result<&mut Content> {
        match &mut self.body {
            Body::File(content) => Ok(content),
            Body::Directory(_) => Err(Errno::EISDIR.into()),
            _ => Err(Errno::EINVAL.into()),
        }
    }
}

/// The time of now, as files carry it.
pub(super) fn now() -> Timestamp {
    dray_rt::wall_clock().into()
}
