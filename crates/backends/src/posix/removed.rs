//! Removed files that are still open, kept under hidden names for another server of the directory.
//!
//! A server that dies closes its descriptors, and a file without a name goes with the last of them. So a file that
//! is open here gets a further link before it loses a name. The link is in a directory that clients do not see.
//! The server that goes on for the clients finds the file there. The link goes with the last close.

use std::collections::HashSet;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::{Errno, Error, FileId, FsUuid, Name, NameBuf, Result};

use super::data::names_in;
use super::options::DescriptorStore;
use super::{cred, sys};

/// The directory of the hidden names, in the root of the export.
pub(crate) const REMOVED_DIR: &[u8] = b".dray-removed";

/// The removed files of one export. Their number is limited by that of open files.
#[derive(Debug)]
pub(crate) struct RemovedFiles {
    dir: OwnedFd,
    /// `/proc/self/fd`, through which a descriptor is linked.
    proc_fd: OwnedFd,
    known: Mutex<HashSet<FileId>>,
    /// The number of files, which can be read without the mutex.
    len: AtomicUsize,
}

/// The hidden name of a file.
fn hidden_name(id: FileId) -> NameBuf {
    let text = format!("{:016x}.{:016x}", id.ino, id.generation);
    NameBuf::new(text.as_bytes()).expect("hexadecimal digits and a dot are a name")
}

/// The file of a hidden name; none if it is no such name.
fn id_of(name: &[u8]) -> Option<FileId> {
    let (ino, generation) = std::str::from_utf8(name).ok()?.split_once('.')?;
    let number = |digits: &str| u64::from_str_radix(digits, 16).ok();
    let id = FileId { ino: number(ino)?, generation: number(generation)? };
    (hidden_name(id).as_bytes() == name).then_some(id)
}

impl RemovedFiles {
    /// The removed files of the export with this root. Errors: those of mkdirat(2), openat(2) and getdents64(2).
    pub(crate) fn open(root: BorrowedFd<'_>, proc_fd: BorrowedFd<'_>) -> Result<RemovedFiles> {
        let name = Name::new(REMOVED_DIR)?;
        match sys::make_dir(root, name, 0o700) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => {
                let why = "the directory for removed files (.dray-removed) cannot be made";
                return Err(Error::new(errno).because(why));
            }
        }
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW;
        let dir = sys::open_at(root.as_raw_fd(), c".dray-removed".as_ptr(), flags, 0)?;
        let proc_fd = proc_fd.try_clone_to_owned().map_err(|_| Error::new(Errno::EMFILE))?;
        let files =
            RemovedFiles { dir, proc_fd, known: Mutex::default(), len: AtomicUsize::new(0) };
        files.find()?;
        Ok(files)
    }

    fn known(&self) -> MutexGuard<'_, HashSet<FileId>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, change: impl FnOnce(&mut HashSet<FileId>)) {
        let mut known = self.known();
        change(&mut known);
        self.len.store(known.len(), Ordering::Relaxed);
    }

    /// Whether the file has a hidden name, which does not count as one of its links.
    pub(crate) fn has(&self, id: FileId) -> bool {
        self.len.load(Ordering::Relaxed) > 0 && self.known().contains(&id)
    }

    /// Looks for files that another server has kept. Errors: those of lseek(2) and getdents64(2).
    pub(crate) fn find(&self) -> Result<()> {
        let mut found = HashSet::new();
        names_in(self.dir.as_fd(), |name| found.extend(id_of(name)))?;
        self.note(|known| known.extend(found));
        Ok(())
    }

    /// Removes those that nobody needs, as far as they `are_unused`.
    pub(crate) fn forget(&self, are_unused: impl Fn(FileId) -> bool) {
        let unused: Vec<FileId> =
            self.known().iter().copied().filter(|id| are_unused(*id)).collect();
        unused.into_iter().for_each(|id| self.remove(id));
    }

    fn remove(&self, id: FileId) {
        self.note(|known| _ = known.remove(&id));
        let removed = cred::as_root(|| sys::unlink(self.dir.as_fd(), &hidden_name(id), false));
        match removed {
            Ok(Ok(()) | Err(Errno::ENOENT)) => {}
            Ok(Err(errno)) => log::warn!("a removed file keeps its space ({id}): {errno}"),
            Err(error) => log::warn!("a removed file keeps its space ({id}): {error}"),
        }
    }
}

impl DescriptorStore for RemovedFiles {
    fn hold(&self, _: FsUuid, id: FileId, fd: BorrowedFd<'_>) {
        let (proc_fd, dir) = (self.proc_fd.as_fd(), self.dir.as_fd());
        let linked = cred::as_root(|| sys::link(proc_fd, fd, dir, &hidden_name(id)));
        match linked {
            Ok(Ok(()) | Err(Errno::EEXIST)) => self.note(|known| _ = known.insert(id)),
            // A directory, or a file that has no name left: it ends with this process.
            Ok(Err(errno)) => log::debug!("{id} cannot be kept for another server: {errno}"),
            Err(error) => log::debug!("{id} cannot be kept for another server: {error}"),
        }
    }

    fn holds(&self, _: FsUuid, id: FileId) -> bool {
        self.has(id)
    }

    fn adopt(&self, _: FsUuid, id: FileId) -> bool {
        self.has(id)
    }

    fn release(&self, _: FsUuid, id: FileId) {
        if self.has(id) {
            self.remove(id);
        }
    }

    /// The name stays, by which the next server finds it.
    fn keep_for_recovery(&self, _: FsUuid, _: FileId) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hidden_name_says_whose_it_is_and_nothing_else_is_one() {
        for id in [
            FileId { ino: 0, generation: 0 },
            FileId { ino: 0xfedc_ba98, generation: 7 },
            FileId { ino: u64::MAX, generation: u64::MAX },
        ] {
            assert_eq!(id_of(hidden_name(id).as_bytes()), Some(id));
        }
        for other in [&b"a"[..], b"1.2", b"+000000000000001.0000000000000002", b"\xff.1", b"."] {
            assert_eq!(id_of(other), None);
        }
    }
}
