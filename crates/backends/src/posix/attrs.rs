//! Attributes and extended attributes.

use std::os::fd::BorrowedFd;

use dray_core::{Access, Attr, Errno, Error, FileId, FileType, Gid, Result, SetAttr, XattrSet};

use super::core::{Core, SquashedCaller};
use super::lanes::{Lane, QUICK_MAX_BYTES};
use super::options::Inline;
use super::{cred, shared_key, sys};

/// What [`apply`] changes: an inode found by its id, or an open file.
pub(crate) enum AttrTarget<'a> {
    Path(BorrowedFd<'a>),
    Open(BorrowedFd<'a>),
}

impl AttrTarget<'_> {
    fn fd(&self) -> BorrowedFd<'_> {
        match *self {
            AttrTarget::Path(fd) | AttrTarget::Open(fd) => fd,
        }
    }
}

impl Core {
    /// The lane that changes attributes, and whether the calling thread may try first. A change of
    /// size takes time in proportion to the data behind it.
    pub(crate) fn lane_to_set(&self, id: FileId, set: SetAttr) -> ((Lane, FileId), bool) {
        match set.size {
            Some(_) => {
                let tries = self.inline && self.below.is_memory();
                ((Lane::Writes, id), tries || self.stays(Lane::Writes))
            }
            None => ((Lane::Changes, id), self.stays(Lane::Changes)),
        }
    }

    /// Whether the data behind `size` are so few that the calling thread may truncate the file.
    /// Never on a disk: there truncation waits for writes that are under way
    /// (`truncate_inode_pages_range` in mm/truncate.c).
    pub(crate) fn is_quick_to_cut(&self, attr: &Attr, size: u64) -> bool {
        self.options.inline == Inline::Always
            || self.below.is_memory() && attr.size <= size.saturating_add(QUICK_MAX_BYTES)
    }

    /// Changes attributes. None if that would take long, and may not.
    pub(crate) fn set_attr(
        &self,
        caller: &SquashedCaller,
        id: FileId,
        target: &AttrTarget<'_>,
        set: SetAttr,
        may_block: bool,
    ) -> Option<Result<Attr>> {
        if let Some(size) = set.size
            && !may_block
            && sys::stat(target.fd()).is_ok_and(|stat| !self.is_quick_to_cut(&stat.attr, size))
        {
            return None;
        }
        let _copying = self.copying([Some(id), None]);
        let attr = self.writable().and_then(|()| apply(self, caller, target, set));
        self.changed(id, target.fd());
        if set.size.is_some() {
            self.size_was_set(id);
        }
        Some(attr)
    }

    pub(crate) fn check_access(
        &self,
        caller: &SquashedCaller,
        id: FileId,
        want: Access,
    ) -> Result<()> {
        if want.0 & !7 != 0 {
            return Err(Errno::EINVAL.into());
        }
        let node = self.node_for(caller, id)?;
        if want.0 & libc::W_OK as u32 != 0
            && matches!(node.kind, FileType::Regular | FileType::Directory | FileType::Symlink)
        {
            self.writable()?;
        }
        match sys::access(node.fd(), want) {
            Err(Errno::ENOSYS) => by_mode(caller, &sys::stat(node.fd())?.attr, want),
            result => Ok(result?),
        }
    }

    pub(crate) fn get_xattr(
        &self,
        caller: &SquashedCaller,
        id: FileId,
        name: &[u8],
    ) -> Result<Vec<u8>> {
        if name == shared_key::NAME {
            return Err(Errno::ENODATA.into());
        }
        let node = self.node_for(caller, id)?;
        let c_name = sys::xattr_name(name)?;
        guarded(caller, name, || Ok(sys::get_xattr(node.fd(), &c_name)?))
    }

    pub(crate) fn list_xattr(&self, caller: &SquashedCaller, id: FileId) -> Result<Vec<u8>> {
        let node = self.node_for(caller, id)?;
        // Names of trusted attributes are listed for callers that may read them.
        let names = guarded(caller, b"trusted.", || Ok(sys::list_xattr(node.fd())?))?;
        Ok(shared_key::left_out(names))
    }

    pub(crate) fn set_xattr(
        &self,
        caller: &SquashedCaller,
        id: FileId,
        name: &[u8],
        value: &[u8],
        how: XattrSet,
    ) -> Result<()> {
        self.writable()?;
        refuse_foreign(caller, name)?;
        if value.len() > dray_core::XATTR_MAX_BYTES {
            return Err(Errno::E2BIG.into());
        }
        let node = self.node_for(caller, id)?;
        let c_name = sys::xattr_name(name)?;
        let _copying = self.copying([Some(id), None]);
        let set = guarded(caller, name, || Ok(sys::set_xattr(node.fd(), &c_name, value, how)?));
        self.changed(id, node.fd());
        set
    }

    pub(crate) fn remove_xattr(
        &self,
        caller: &SquashedCaller,
        id: FileId,
        name: &[u8],
    ) -> Result<()> {
        self.writable()?;
        let node = self.node_for(caller, id)?;
        let c_name = sys::xattr_name(name)?;
        let remove = || Ok(sys::remove_xattr(node.fd(), &c_name)?);
        let _copying = self.copying([Some(id), None]);
        let removed = if name == CAPABILITY && !caller.who.is_root() {
            may_drop_capability(caller, node.fd())?;
            cred::as_root(|| cred::with_xattr_rights(remove))??
        } else {
            refuse_foreign(caller, name)?;
            guarded(caller, name, remove)
        };
        self.changed(id, node.fd());
        removed
    }
}

/// The capabilities of a program.
const CAPABILITY: &[u8] = b"security.capability";

/// Whether the caller may remove a file's capabilities. The client's kernel removes them before a
/// truncation, a chown or a write, as the caller of that (`security_inode_killpriv`). The kernel
/// here would do the same by itself for the same callers: owners, and users with write access.
fn may_drop_capability(caller: &SquashedCaller, fd: BorrowedFd<'_>) -> Result<()> {
    let attr = sys::stat(fd)?.attr;
    if attr.uid == caller.who.uid {
        return Ok(());
    }
    let write = Access(libc::W_OK as u32);
    let may = match sys::access(fd, write) {
        Err(Errno::ENOSYS) => by_mode(caller, &attr, write).is_ok(),
        result => result.is_ok(),
    };
    if may { Ok(()) } else { Err(Errno::EPERM.into()) }
}

fn is_privileged(name: &[u8]) -> bool {
    name.starts_with(b"security.") || name.starts_with(b"trusted.")
}

/// An ordinary user could give a program of its own capabilities by such an attribute. The
/// kernel refuses as well, for want of capabilities; twice is better than never.
fn refuse_foreign(caller: &SquashedCaller, name: &[u8]) -> Result<()> {
    if name == shared_key::NAME {
        return Err(Error::new(Errno::EPERM).because("the attribute is the servers' own"));
    }
    if is_privileged(name) && !caller.who.is_root() {
        return Err(
            Error::new(Errno::EPERM).because("only the super-user may change this attribute")
        );
    }
    Ok(())
}

/// Runs `call`. It has more rights if the attributes are the super-user's and the caller is the
/// super-user.
fn guarded<T>(caller: &SquashedCaller, name: &[u8], call: impl FnOnce() -> Result<T>) -> Result<T> {
    if is_privileged(name) && caller.who.is_root() {
        cred::with_xattr_rights(call)?
    } else {
        call()
    }
}

/// Changes owner, mode, size and times, in this order: a change of the owner clears set-id
/// bits, and a change of the size sets times.
fn apply(
    core: &Core,
    caller: &SquashedCaller,
    target: &AttrTarget<'_>,
    set: SetAttr,
) -> Result<Attr> {
    let fd = target.fd();
    if set.kill_set_id && set.mode.is_none() {
        clear_set_id(core, fd, caller)?;
    }
    if set.uid.is_some() || set.gid.is_some() || is_chown_to_nobody(caller, fd, set)? {
        sys::chown(fd, set.uid, set.gid)?;
    }
    if let Some(mode) = set.mode {
        sys::chmod(core.proc_fd(), fd, mode)?;
    }
    match (set.size, target) {
        (Some(size), AttrTarget::Path(fd)) => sys::truncate_path(*fd, size)?,
        (Some(size), AttrTarget::Open(fd)) => sys::truncate_open(*fd, size)?,
        (None, _) => {}
    }
    if set.atime.is_some() || set.mtime.is_some() {
        sys::set_times(core.proc_fd(), fd, set.atime, set.mtime)?;
    }
    Ok(core.stat(fd)?.attr)
}

/// Whether a change of nothing is chown(2) with both ids -1, which clears set-id bits and sets the
/// time of change. The client's kernel says no more of it, nor of its own wish to clear bits before
/// a write by somebody else. That user may not do this.
fn is_chown_to_nobody(caller: &SquashedCaller, fd: BorrowedFd<'_>, set: SetAttr) -> Result<bool> {
    let nothing = set == SetAttr::default();
    Ok(nothing && (caller.who.is_root() || sys::stat(fd)?.attr.uid == caller.who.uid))
}

/// Clears set-id bits as a change by an unprivileged user does. For such users the kernel
/// does it by itself; what is left is the super-user of a container at the client, who is
/// all-powerful here.
pub(crate) fn clear_set_id(core: &Core, fd: BorrowedFd<'_>, caller: &SquashedCaller) -> Result<()> {
    if !caller.who.is_root() {
        return Ok(());
    }
    let attr = sys::stat(fd)?.attr;
    let mode = attr.mode & 0o7777;
    let mut cleared = mode & !libc::S_ISUID;
    if mode & libc::S_IXGRP != 0 {
        cleared &= !libc::S_ISGID;
    }
    if cleared != mode && attr.file_type() == FileType::Regular {
        sys::chmod(core.proc_fd(), fd, cleared)?;
    }
    Ok(())
}

/// The rights by mode bits alone, for kernels that cannot check an open file for another
/// user. ACLs are not seen; every later operation is checked by the kernel anyway.
fn by_mode(caller: &SquashedCaller, attr: &Attr, want: Access) -> Result<()> {
    let who = &caller.who;
    if who.is_root() {
        let runs = attr.mode & 0o111 != 0 || attr.file_type() == FileType::Directory;
        let ok = want.0 & libc::X_OK as u32 == 0 || runs;
        return if ok { Ok(()) } else { Err(Errno::EACCES.into()) };
    }
    let shift = match (who.uid == attr.uid, who.in_group(Gid(attr.gid.0))) {
        (true, _) => 6,
        (false, true) => 3,
        (false, false) => 0,
    };
    if want.0 & !(attr.mode >> shift) & 7 == 0 { Ok(()) } else { Err(Errno::EACCES.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_core::{Identity, Uid};

    #[test]
    fn mode_bits_go_by_owner_then_group_then_others() {
        let attr =
            Attr { mode: libc::S_IFREG | 0o640, uid: Uid(5), gid: Gid(6), ..Attr::default() };
        let may = |uid: u32, gid: u32, want: u32| {
            let who = Identity { uid: Uid(uid), gid: Gid(gid), ..Identity::default() };
            by_mode(&SquashedCaller::of(who), &attr, Access(want)).is_ok()
        };
        assert!(may(5, 1, 6) && !may(5, 1, 7));
        assert!(may(7, 6, 4) && !may(7, 6, 2));
        assert!(!may(7, 7, 4) && may(7, 7, 0));
        assert!(may(0, 0, 6) && !may(0, 0, 1));
    }
}
