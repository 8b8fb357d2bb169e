//! Extended attributes.

use std::sync::Arc;

use dray_core::{Context, Errno, FileType, Result, XATTR_MAX_BYTES, XattrSet};

use super::inode::{Meta, now};
use super::store::Store;

/// Bytes of one attribute's name that Linux accepts (`XATTR_NAME_MAX`).
const NAME_MAX_BYTES: usize = 255;
/// Bytes of all names of a file, each with its NUL, that listxattr(2) can show.
const LIST_MAX_BYTES: usize = 64 << 10;
/// Bytes of all attributes of a file; beyond it `ENOSPC`.
const TOTAL_MAX_BYTES: usize = 1 << 20;

const READ: u32 = libc::R_OK as u32;
const WRITE: u32 = libc::W_OK as u32;

/// Whether the caller may do this to the attribute, by the rules of xattr(7).
fn allowed(cx: &Context, meta: &Meta, name: &[u8], want: u32) -> Result<()> {
    if name.is_empty() || name.len() > NAME_MAX_BYTES {
        return Err(Errno::ERANGE.into());
    }
    let writes = want == WRITE;
    let refuse = |errno| Err(if writes { Errno::EPERM.into() } else { errno });
    if let Some(rest) = name.strip_prefix(b"user.") {
        if rest.is_empty() {
            return Err(Errno::EINVAL.into());
        }
        let sticky_dir = meta.is_dir() && meta.mode & libc::S_ISVTX != 0;
        return match meta.kind() {
            FileType::Regular | FileType::Directory => {
                if writes && sticky_dir && !meta.owned_by(&cx.who) {
                    return Err(Errno::EPERM.into());
                }
                meta.may(cx, want)
            }
            _ => refuse(Errno::ENODATA.into()),
        };
    }
    if name.starts_with(b"trusted.") {
        return if cx.who.is_root() { Ok(()) } else { refuse(Errno::ENODATA.into()) };
    }
    if name.starts_with(b"security.") {
        return if cx.who.is_root() || !writes { Ok(()) } else { Err(Errno::EPERM.into()) };
    }
    if name == b"system.posix_acl_access" || name == b"system.posix_acl_default" {
        return acl_allowed(cx, meta, name, writes);
    }
    Err(Errno::ENOTSUP.into())
}

fn acl_allowed(cx: &Context, meta: &Meta, name: &[u8], writes: bool) -> Result<()> {
    if meta.kind() == FileType::Symlink {
        return Err(Errno::ENOTSUP.into());
    }
    if writes && name.ends_with(b"default") && !meta.is_dir() {
        return Err(Errno::EACCES.into());
    }
    if writes && !meta.owned_by(&cx.who) { Err(Errno::EPERM.into()) } else { Ok(()) }
}

impl Store {
    pub(super) fn getxattr(&self, cx: &Context, ino: u64, name: &[u8]) -> Result<Vec<u8>> {
        let meta = &self.inode(ino)?.meta;
        allowed(cx, meta, name, READ)?;
        meta.xattrs.get(name).cloned().ok_or(Errno::ENODATA.into())
    }

    pub(super) fn listxattr(&self, cx: &Context, ino: u64) -> Result<Vec<u8>> {
        let mut list = Vec::new();
        for name in self.inode(ino)?.meta.xattrs.keys() {
            if name.starts_with(b"trusted.") && !cx.who.is_root() {
                continue;
            }
            list.extend_from_slice(name);
            list.push(0);
        }
        Ok(list)
    }

    pub(super) fn setxattr(
        &mut self,
        cx: &Context,
        ino: u64,
        name: &[u8],
        value: &[u8],
        how: XattrSet,
    ) -> Result<()> {
        if value.len() > XATTR_MAX_BYTES {
            return Err(Errno::E2BIG.into());
        }
        let meta = &self.inode(ino)?.meta;
        allowed(cx, meta, name, WRITE)?;
        match (how, meta.xattrs.contains_key(name)) {
            (XattrSet::Create, true) => return Err(Errno::EEXIST.into()),
            (XattrSet::Replace, false) => return Err(Errno::ENODATA.into()),
            _ => {}
        }
        let others = || meta.xattrs.iter().filter(|(other, _)| *other != name);
        let names: usize = others().map(|(name, _)| name.len() + 1).sum();
        let values: usize = others().map(|(_, value)| value.len()).sum();
        let listed = names + name.len() + 1;
        if listed > LIST_MAX_BYTES || listed + values + value.len() > TOTAL_MAX_BYTES {
            return Err(Errno::ENOSPC.into());
        }
        let meta = &mut self.change(ino)?.meta;
        meta.ctime = now();
        Arc::make_mut(&mut meta.xattrs).insert(name.to_vec(), value.to_vec());
        Ok(())
    }

    pub(super) fn removexattr(&mut self, cx: &Context, ino: u64, name: &[u8]) -> Result<()> {
        let meta = &self.inode(ino)?.meta;
        allowed(cx, meta, name, WRITE)?;
        if !meta.xattrs.contains_key(name) {
            return Err(Errno::ENODATA.into());
        }
        let meta = &mut self.change(ino)?.meta;
        meta.ctime = now();
        Arc::make_mut(&mut meta.xattrs).remove(name);
        Ok(())
    }
}
