//! Attributes: setattr, access and the flags of FS_IOC_GETFLAGS.

use dray_core::{Access, Attr, Context, Errno, Error, Gid, Result, SetAttr, TimeSet, Timestamp};

use super::data::FILE_MAX_BYTES;
use super::inode::{MODE_BITS, Meta, now};
use super::store::Store;

/// `FS_NODUMP_FL` and `FS_NOATIME_FL`: the flags that can be kept without being enforced.
const FLAGS_KEPT: u32 = 0x40 | 0x80;

impl Store {
    pub(super) fn getattr(&self, ino: u64) -> Result<Attr> {
        Ok(self.inode(ino)?.attr(ino))
    }

    /// Changes attributes, all or nothing. `writable`: through an open file, whether it
    /// was opened for writing, which then decides about the size.
    pub(super) fn setattr(
        &mut self,
        cx: &Context,
        ino: u64,
        set: SetAttr,
        writable: Option<bool>,
    ) -> Result<Attr> {
        let inode = self.inode(ino)?;
        if let Some(size) = set.size {
            if writable == Some(false) {
                return Err(Errno::EINVAL.into()); // ftruncate(2) of a read-only descriptor
            }
            inode.content()?;
            match writable {
                Some(_) => {}
                None => inode.meta.may(cx, libc::W_OK as u32)?,
            }
            if size > FILE_MAX_BYTES {
                return Err(Errno::EFBIG.into());
            }
        }
        let meta = changed(cx, &inode.meta, &set, inode.meta.kind().mode_bits())?;
        if let Some(size) = set.size {
            self.set_size(ino, size)?;
        }
        self.change(ino)?.meta = meta;
        self.getattr(ino)
    }

    pub(super) fn access(&self, cx: &Context, ino: u64, want: Access) -> Result<()> {
        if want.0 & !0o7 != 0 {
            return Err(Errno::EINVAL.into());
        }
        self.inode(ino)?.meta.may(cx, want.0)
    }

    pub(super) fn get_flags(&self, ino: u64) -> Result<u32> {
        Ok(self.inode(ino)?.meta.flags)
    }

    pub(super) fn set_flags(&mut self, cx: &Context, ino: u64, flags: u32) -> Result<()> {
        if !self.inode(ino)?.meta.owned_by(&cx.who) {
            return Err(Errno::EPERM.into());
        }
        if flags & !FLAGS_KEPT != 0 {
            return Err(
                Error::new(Errno::ENOTSUP).because("the memory backend cannot enforce this flag")
            );
        }
        let inode = self.change(ino)?;
        inode.meta.flags = flags;
        inode.meta.ctime = now();
        Ok(())
    }

    /// Stamps a change of the content by `who`.
    pub(super) fn content_changed(
        &mut self,
        cx: &Context,
        ino: u64,
        kill_set_id: bool,
    ) -> Result<()> {
        let time = now();
        let meta = &mut self.change(ino)?.meta;
        (meta.mtime, meta.ctime) = (time, time);
        if kill_set_id || !cx.who.is_root() {
            meta.drop_set_id(&cx.who);
        }
        Ok(())
    }
}

/// What `meta` becomes under `set`. `EPERM` where only the owner, or only root, may.
fn changed(cx: &Context, meta: &Meta, set: &SetAttr, type_bits: u32) -> Result<Meta> {
    let who = &*cx.who;
    let mut new = meta.clone();
    let time = now();
    let uid_allowed = |uid| who.is_root() || who.uid == meta.uid && uid == meta.uid;
    let gid_allowed =
        |gid: Gid| who.is_root() || who.uid == meta.uid && (who.in_group(gid) || gid == meta.gid);
    if set.uid.is_some_and(|uid| !uid_allowed(uid)) || set.gid.is_some_and(|gid| !gid_allowed(gid))
    {
        return Err(Errno::EPERM.into());
    }
    if set.mode.is_some() && !meta.owned_by(who) {
        return Err(Errno::EPERM.into());
    }
    times_allowed(cx, meta, set)?;
    let privileged_write = set.size.is_some() && who.is_root() && !set.kill_set_id;
    let changes_owner = set.uid.is_some() || set.gid.is_some();
    if changes_owner && !meta.is_dir() || set.size.is_some() && !privileged_write || set.kill_set_id
    {
        new.drop_set_id(who);
    }
    new.uid = set.uid.unwrap_or(meta.uid);
    new.gid = set.gid.unwrap_or(meta.gid);
    if let Some(mode) = set.mode {
        new.mode = type_bits | mode & MODE_BITS;
        if !(who.is_root() || who.in_group(new.gid)) {
            new.mode &= !libc::S_ISGID;
        }
    }
    if set.size.is_some() {
        new.mtime = time;
    }
    let at = |set: TimeSet| -> Timestamp {
        match set {
            TimeSet::Now => time,
            TimeSet::At(time) => time,
        }
    };
    new.atime = set.atime.map_or(new.atime, at);
    new.mtime = set.mtime.map_or(new.mtime, at);
    new.ctime = time;
    Ok(new)
}

/// utimensat(2): a caller that may write may set both times to now; all else is the owner's.
fn times_allowed(cx: &Context, meta: &Meta, set: &SetAttr) -> Result<()> {
    let touches = matches!((set.atime, set.mtime), (Some(TimeSet::Now), Some(TimeSet::Now)));
    let comes_with_size = set.size.is_some()
        && set.atime.is_none_or(|time| time == TimeSet::Now)
        && set.mtime.is_none_or(|time| time == TimeSet::Now);
    if set.atime.is_none() && set.mtime.is_none() || comes_with_size || meta.owned_by(&cx.who) {
        return Ok(());
    }
    if touches { meta.may(cx, libc::W_OK as u32) } else { Err(Errno::EPERM.into()) }
}
