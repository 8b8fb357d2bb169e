//! Ids that are learned from names: on file systems without lasting handles that several servers share.
//!
//! An id is the inode number, and a signature of number and type by the key that the servers share. So each
//! server gives a file the same id, and no client can make one up. A server that has not met an id, or
//! does not find the file where it met it, says so. The client then says a name of the file
//! ([ADR 0046](../../../../docs/adr/0046-learned-ids.md)).

use std::os::fd::AsFd;

use dray_core::{Attr, Errno, FileId, Name, Result};

use super::core::{Core, Ids};
use super::find::stale;
use super::siphash::siphash;
use super::{cred, sys};

/// The number that a signed id has beside the inode number. Inode numbers may be used again for a file
/// of another type, which is another id.
pub(super) fn signature(key: u128, attr: &Attr) -> u64 {
    siphash(key, [attr.ino, u64::from(attr.mode & libc::S_IFMT)])
}

impl Core {
    /// Whether ids are learned from names.
    pub(crate) fn learns_ids(&self) -> bool {
        matches!(&self.ids, Ids::Table(table) if table.learns())
    }

    /// Enters `id` as `name` in `dir`, if it is there. As the server, not as the caller: who has the id
    /// was let in once. Errors: `ESTALE` if the name is another file's or nobody's; unmet if `dir`
    /// was not met here.
    pub(crate) fn learn(&self, (dir, name): (FileId, &Name), id: FileId) -> Result<()> {
        let Ids::Table(table) = &self.ids else { return Err(Errno::ENOTSUP.into()) };
        if !table.learns() {
            return Err(Errno::ENOTSUP.into());
        }
        let dir = self.directory(dir)?;
        let opened = cred::as_root(|| sys::open_path(dir.fd(), name))?;
        let fd = opened.map_err(|errno| match errno {
            Errno::ENOENT | Errno::ENOTDIR | Errno::EXDEV => stale(),
            errno => errno.into(),
        })?;
        let stat = self.stat(fd.as_fd())?;
        self.same_mount(&stat).map_err(|_| stale())?;
        if table.signed(&stat.attr) != Some(id) {
            return Err(stale().because("the name is that of another file"));
        }
        table.learned(id, (dir.id, name), &stat.attr);
        self.nodes.replace(self.new_node(id, stat.attr.file_type(), fd));
        Ok(())
    }
}
