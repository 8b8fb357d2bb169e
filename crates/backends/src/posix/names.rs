//! Operations on names.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use dray_core::{
    Access, Attr, CreateHow, Entry, Errno, Error, FileId, FileType, Make, Name, NameBuf, OpenHow,
    RemoveKind, RenameHow, Result,
};

use super::core::{Caller, Core, Ids};
use super::descriptor::{FileState, Opened};
use super::lanes::{Kept, Lane, is_large};
use super::nodes::Node;
use super::reopen::{Granted, Purpose};
use super::{attrs, sys};

/// A creation that finds the name taken, and the next moment free again, tries this often.
pub(super) const CREATE_TRIES: usize = 16;

/// What is about to lose a name.
#[derive(Default)]
struct Leaving {
    /// As the cache has it.
    known: Option<Arc<Node>>,
    _large: Option<Kept>,
}

/// What came of a creation.
pub(crate) enum Created {
    Opened(Entry, Arc<FileState>),
    /// The name is that of this file, which is to be cut, and nobody has seen to it that this may
    /// take its time.
    Cuts(FileId),
}

/// [`Make`] with a target of its own.
pub(crate) enum Making {
    Directory(u32),
    Node(u32, u32),
    Symlink(Vec<u8>),
}

impl From<Make<'_>> for Making {
    fn from(what: Make<'_>) -> Making {
        match what {
            Make::Directory { mode } => Making::Directory(mode),
            Make::Node { mode, rdev } => Making::Node(mode, rdev),
            Make::Symlink { target } => Making::Symlink(target.to_vec()),
        }
    }
}

impl Core {
    pub(crate) fn lookup(&self, caller: &Caller, dir: FileId, name: &Name) -> Result<Entry> {
        let dir = self.directory(dir)?;
        // A descriptor for what goes at once would be made to be closed.
        if dir.expects_removal(caller.asker)
            && let Some(entry) = self.glance(dir.id, dir.fd(), name)
            && entry.attr.file_type() == FileType::Regular
        {
            if !is_large(&entry.attr) {
                dir.found_small(entry.id);
            }
            return Ok(entry);
        }
        match self.find_at_hand(caller, &dir, name)? {
            Some(entry) => Ok(entry),
            None => self.find_for(caller, &dir, name),
        }
    }

    pub(crate) fn make(&self, dir: FileId, name: &Name, what: Making) -> Result<Entry> {
        self.writable()?;
        let dir = self.directory(dir)?;
        match what {
            Making::Directory(mode) => sys::make_dir(dir.fd(), name, mode)?,
            Making::Node(mode, rdev) => sys::make_node(dir.fd(), name, mode, rdev)?,
            Making::Symlink(target) => sys::make_symlink(dir.fd(), name, &target)?,
        }
        Ok(self.find(&dir, name)?.0)
    }

    pub(crate) fn remove(
        &self,
        caller: &Caller,
        dir: FileId,
        name: &Name,
        kind: RemoveKind,
    ) -> Result<()> {
        self.writable()?;
        let dir = self.directory(dir)?;
        self.files.before_removal();
        let _no_parking = self.files.removing();
        let leaving = self.before_removal(caller, &dir, name)?;
        // An overlay copies what has further names, for the number of these.
        let copied = self.below.is_overlay().then(|| self.known_at(&dir, name)).flatten();
        let _copying = self.copying([copied.as_ref().map(|(id, _)| *id), None]);
        sys::unlink(dir.fd(), name, kind == RemoveKind::Directory)?;
        self.after_removal(caller, leaving.known.as_ref());
        dir.removed_from(caller.asker);
        if let Ids::Table(table) = &self.ids {
            table.removed(dir.id, name);
        }
        if let Some((id, fd)) = copied {
            self.changed(id, fd.as_fd());
        }
        Ok(())
    }

    /// What has this name may be about to go: our cache must not keep it, and files open on
    /// it must. To be called under [`super::files::Files::removing`]. Errors: `ENFILE` if
    /// there are too many such files; what is open must not be lost. Answers what keeps the file
    /// over the removal, so that the kernel frees its data later, and elsewhere.
    fn before_removal(&self, caller: &Caller, dir: &Node, name: &Name) -> Result<Leaving> {
        let Some(id) = self.id_at(dir, name) else { return Ok(Leaving::default()) };
        if let Some(inode) = self.files.needs_pin(id) {
            match sys::open_path(dir.fd(), name) {
                Ok(fd) if has_other_names(fd.as_fd()) => {}
                Ok(fd) => {
                    self.files.admit_pin(caller.taker)?;
                    inode.pin(fd, caller.taker);
                }
                Err(errno @ Errno::ENFILE) => return Err(errno.into()),
                Err(_) => {} // the removal will find out
            }
        }
        if let Some(inode) = self.files.needs_keeping(id)
            && let Ok(fd) = sys::open_path(dir.fd(), name)
        {
            self.files.keep(&inode, fd.as_fd());
        }
        if !self.below.is_local() {
            // A network file system keeps what is held under another name, for all to see.
            self.nodes.forget(id);
            return Ok(Leaving::default());
        }
        let known = self.nodes.get(id);
        let large = match &known {
            Some(_) => None, // which keeps it
            None if dir.was_small(id) && !self.may_take_long() => None,
            None => self.open_large(dir, name),
        };
        Ok(Leaving { known, _large: large })
    }

    /// Whether even a small file takes long to go, as behind a disk that others wait for.
    fn may_take_long(&self) -> bool {
        !self.below.is_memory() && self.lanes.are_busy()
    }

    /// A descriptor of a file that takes long to go.
    fn open_large(&self, dir: &Node, name: &Name) -> Option<Kept> {
        let attr = sys::stat_at(dir.fd(), name).ok()?.attr;
        let is_slow = is_large(&attr) || self.may_take_long();
        let holds = attr.file_type() == FileType::Regular && is_slow;
        let fd = holds.then(|| sys::open_path(dir.fd(), name).ok()).flatten()?;
        Some(Kept::new(fd, &self.lanes))
    }

    /// What was `known` has lost its name.
    fn after_removal(&self, caller: &Caller, known: Option<&Arc<Node>>) {
        let Some(node) = known else { return };
        self.has_left(caller, node);
        // Somebody may have opened it since we looked.
        if let Some(inode) = self.files.needs_keeping(node.id) {
            self.files.keep(&inode, node.fd());
        }
    }

    pub(crate) fn rename(
        &self,
        caller: &Caller,
        from: (FileId, &Name),
        to: (FileId, &Name),
        how: RenameHow,
    ) -> Result<()> {
        self.writable()?;
        let (old, new) = (self.directory(from.0)?, self.directory(to.0)?);
        self.files.before_removal();
        let _no_parking = self.files.removing();
        let replaced = match how {
            RenameHow::Replace => self.before_removal(caller, &new, to.1)?,
            RenameHow::NoReplace | RenameHow::Exchange => Leaving::default(),
        };
        let flags = match how {
            RenameHow::Replace => 0,
            RenameHow::NoReplace => libc::RENAME_NOREPLACE,
            RenameHow::Exchange => libc::RENAME_EXCHANGE,
        };
        let moved = [(&old, from.1), (&new, to.1)].map(|(dir, name)| self.known_at(dir, name));
        let _copying = self.copying(moved.each_ref().map(|at| at.as_ref().map(|(id, _)| *id)));
        sys::rename((old.fd(), from.1), (new.fd(), to.1), flags)?;
        self.after_removal(caller, replaced.known.as_ref());
        if let Ids::Table(table) = &self.ids {
            table.renamed((old.id, from.1), (new.id, to.1), how == RenameHow::Exchange);
        }
        for (id, fd) in moved.into_iter().flatten() {
            self.changed(id, fd.as_fd());
        }
        Ok(())
    }

    pub(crate) fn link(&self, id: FileId, dir: FileId, name: &Name) -> Result<Entry> {
        self.writable()?;
        let node = self.node(id)?;
        let dir = self.directory(dir)?;
        let _copying = self.copying([Some(id), None]);
        sys::link(self.proc_fd(), node.fd(), dir.fd(), name)?;
        if let Ids::Table(table) = &self.ids {
            table.linked(id, dir.id, name);
            self.changed(id, node.fd());
        }
        Ok(Entry { id, attr: self.stat(node.fd())?.attr })
    }

    /// The flags for open(2), from what a client may ask for.
    fn open_flags(&self, caller: Option<&Caller>, how: OpenHow) -> Result<i32> {
        // Both bits of the access mode take the right to read and to write, and give neither:
        // such a file is for ioctl(2) alone.
        let changes = how.flags & libc::O_ACCMODE != libc::O_RDONLY;
        let again = caller.is_some_and(|caller| opens_again(caller, how));
        if (changes || how.truncates()) && !again {
            self.writable()?;
        }
        let mut passed = libc::O_ACCMODE | libc::O_TRUNC | libc::O_DIRECTORY | libc::O_NOATIME;
        if self.options.direct {
            passed |= libc::O_DIRECT;
        }
        if !self.below.is_local() {
            // A program behind it may go by how a file was opened, and not look at each write.
            // (Not O_APPEND: one that does so would also append what has its place.)
            passed |= libc::O_SYNC;
        }
        Ok(how.flags & passed)
    }

    /// Which threads open a file, and whether whoever asks may try: cutting it takes as long as
    /// it is large, and so does what an overlay copies before a change.
    pub(crate) fn way_to_open(&self, id: FileId, how: OpenHow) -> ((Lane, FileId), bool) {
        let copies = self.below.is_overlay() && how.writes();
        let lane = if how.truncates() || copies { Lane::Writes } else { Lane::Looks };
        let tries = self.inline && self.below.is_memory();
        ((lane, id), tries || self.stays(lane))
    }

    /// Opens a file or directory. None if that would take long, and may not.
    pub(crate) fn open_node(
        &self,
        caller: &Caller,
        id: FileId,
        how: OpenHow,
        may_block: bool,
    ) -> Option<Result<Arc<FileState>>> {
        let node = match self.node_for(caller, id) {
            Ok(node) => node,
            Err(error) => return Some(Err(error)),
        };
        if how.truncates()
            && !may_block
            && sys::stat(node.fd()).is_ok_and(|stat| !self.is_quick_to_cut(&stat.attr, 0))
        {
            return None;
        }
        Some(self.open_found(caller, &node, how))
    }

    fn open_found(&self, caller: &Caller, node: &Node, how: OpenHow) -> Result<Arc<FileState>> {
        let flags = self.open_flags(Some(caller), how)?;
        match node.kind {
            FileType::Regular | FileType::Directory => {}
            FileType::Symlink => return Err(Errno::ELOOP.into()),
            _ => return Err(Error::new(Errno::ENXIO).because("opened at the client itself")),
        }
        if caller.internal && how.truncates() {
            return Err(
                Error::new(Errno::EPERM).because("the server cuts nothing of its own accord")
            );
        }
        self.files.admit()?;
        if node.lookers().is_gone() {
            self.files.admit_pin(caller.taker)?;
        }
        let changes = (how.writes() || how.truncates()) && !how.executes();
        let copying = self.copying([Some(node.id).filter(|_| changes), None]);
        if how.truncates() && how.kill_set_id {
            attrs::clear_set_id(self, node.fd(), caller)?;
        }
        let opened = self.reopen_for(caller, node, how, flags)?;
        if how.writes() || how.truncates() {
            self.changed(node.id, node.fd());
        }
        drop(copying);
        let directory = node.kind == FileType::Directory;
        let file = self.files.opened(node.id, directory, how.flags, opened);
        // In this order: whoever removes it looks for those who have it open last.
        if node.lookers().is_gone() {
            self.hold_nameless(caller, &file, node.fd())?;
        }
        Ok(file)
    }

    /// `file` has no name by which it could be found again.
    fn hold_nameless(&self, caller: &Caller, file: &FileState, fd: BorrowedFd<'_>) -> Result<()> {
        if self.files.is_crowded() {
            file.inode.pin(sys::reopen(self.proc_fd(), fd, libc::O_PATH)?, caller.taker);
        }
        if self.files.needs_keeping(file.inode.id).is_some() {
            self.files.keep(&file.inode, fd);
        }
        Ok(())
    }

    /// Closes `file`. Where the node cache has a descriptor of it, too, nobody asks the kernel
    /// whether this one is the last.
    pub(crate) fn close_file(&self, file: &FileState) {
        let Some(fd) = file.close() else { return };
        if let Some(node) = self.nodes.get(file.inode.id)
            && let Some(fd) = Arc::into_inner(fd)
        {
            fd.close_beside(node.fd());
        }
    }

    /// Opens what was found.
    fn reopen_for(&self, caller: &Caller, node: &Node, how: OpenHow, flags: i32) -> Result<Opened> {
        if how.executes() && node.kind == FileType::Regular {
            // A program may be run by those who cannot read it, and the client's kernel, which
            // runs it, must read it (NFS does the same: NFSD_MAY_READ_IF_EXEC, fs/nfsd/vfs.h).
            self.check_access(caller, node.id, Access(libc::X_OK as u32))?;
            let granted = Granted::to_caller(flags).without_changes();
            let fd = self.reopen_as_server(node.fd(), Purpose::Execute(granted))?;
            return Ok(Opened::new(fd, granted));
        }
        let open = |flags: i32| match opens_again(caller, how) {
            true => Opened::again(self, node.fd(), Granted::by_ticket(flags)),
            false => {
                let fd = sys::reopen(self.proc_fd(), node.fd(), flags)?;
                Ok(Opened::for_caller(fd, flags))
            }
        };
        match open(flags) {
            // A file that takes appends only (chattr +a) wants to hear that they are.
            Err(error) if error.errno() == Errno::EPERM && how.appends() => {
                open(flags | libc::O_APPEND)
            }
            opened => opened,
        }
    }

    /// Opens a file that is made if need be. The file `cuts` can be cut here.
    pub(crate) fn create(
        &self,
        caller: &Caller,
        dir: FileId,
        name: &NameBuf,
        how: CreateHow,
        cuts: Option<FileId>,
    ) -> Result<Created> {
        if how.open.directory() {
            return Err(Error::new(Errno::EINVAL).because("O_CREAT makes no directories"));
        }
        let flags = self.open_flags(None, how.open)?;
        let dir = self.directory(dir)?;
        for _ in 0..CREATE_TRIES {
            if !self.options.read_only {
                self.files.admit()?;
                match sys::open_new(dir.fd(), name, flags & !libc::O_TRUNC, how.mode & 0o7777) {
                    Ok(fd) => {
                        let entry = self.identify(Some((dir.id, name)), fd.as_fd())?;
                        let opened = Opened::for_caller(fd, flags);
                        let file = self.files.opened(entry.id, false, how.open.flags, opened);
                        return Ok(Created::Opened(entry, file));
                    }
                    Err(Errno::EEXIST) if !how.exclusive => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
            match self.open_existing(caller, &dir, name, how.open, cuts) {
                // Removed between the two steps.
                Err(error) if matches!(error.errno(), Errno::ENOENT | Errno::ESTALE) => {
                    self.writable()?;
                }
                result => return result,
            }
        }
        Err(Error::retry(Errno::EAGAIN).because("the name comes and goes"))
    }

    fn open_existing(
        &self,
        caller: &Caller,
        dir: &Node,
        name: &Name,
        how: OpenHow,
        cuts: Option<FileId>,
    ) -> Result<Created> {
        let (entry, node) = self.find(dir, name)?;
        if node.kind == FileType::Directory {
            return Err(Errno::EISDIR.into());
        }
        let is_quick = || self.is_quick_to_cut(&entry.attr, 0);
        if how.truncates() && cuts != Some(node.id) && !is_quick() {
            return Ok(Created::Cuts(node.id));
        }
        let file = self.open_found(caller, &node, how)?;
        let attr = if how.truncates() { self.stat(node.fd())?.attr } else { entry.attr };
        Ok(Created::Opened(Entry { id: entry.id, attr }, file))
    }

    pub(crate) fn tmpfile(
        &self,
        caller: &Caller,
        dir: FileId,
        how: CreateHow,
    ) -> Result<(Entry, Arc<FileState>)> {
        self.writable()?;
        if !how.open.writes() {
            return Err(Error::new(Errno::EINVAL).because("O_TMPFILE is for writing"));
        }
        let flags = self.open_flags(None, how.open)? & !(libc::O_TRUNC | libc::O_DIRECTORY);
        let dir = self.directory(dir)?;
        self.files.admit()?;
        self.files.admit_pin(caller.taker)?;
        let exclusive = if how.exclusive { libc::O_EXCL } else { 0 };
        let fd = sys::open_unnamed(dir.fd(), flags | exclusive, how.mode & 0o7777)?;
        let entry = self.identify(None, fd.as_fd())?;
        let opened = Opened::for_caller(fd, flags);
        let file = self.files.opened(entry.id, false, how.open.flags, opened);
        let fd = file.fd(self)?;
        self.hold_nameless(caller, &file, fd.as_fd())?;
        drop(fd);
        Ok((entry, file))
    }
}

/// Whether the server itself opens what a client had open before: the file system below may take no
/// changes by now, and what was opened to be changed can be read all the same.
fn opens_again(caller: &Caller, how: OpenHow) -> bool {
    caller.internal && !how.executes()
}

/// Whether a file goes on to be found by a name when it loses one.
fn has_other_names(fd: BorrowedFd<'_>) -> bool {
    let more = |attr: Attr| attr.file_type() != FileType::Directory && attr.nlink > 1;
    sys::stat(fd).is_ok_and(|stat| more(stat.attr))
}

#[cfg(test)]
mod tests {
    use dray_core::{Context, FileSystem, FsUuid, SetAttr};
    use dray_rt::{DriverKind, Executor};

    use super::super::{PosixFs, PosixOptions};
    use super::*;

    /// The kernel freed the data on the thread that served others, with the directory locked.
    #[test]
    fn what_is_large_goes_behind_the_removal_of_its_name() {
        let name = format!("dray-names-{:x}", dray_rt::random_u64());
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir(&dir).unwrap();
        let fs = PosixFs::open(&dir, FsUuid(1), PosixOptions::default()).unwrap();
        let (cx, root) = (Context::system(), fs.info().root);
        let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: true };
        Executor::new(DriverKind::Epoll).unwrap().block_on(async {
            let large = SetAttr { size: Some(1 << 30), ..SetAttr::default() };
            let make = async |name: &str, large: Option<SetAttr>| {
                let name = Name::new(name.as_bytes()).unwrap();
                let (_, file) = fs.create(&cx, root, name, how).await.unwrap();
                if let Some(large) = large {
                    file.setattr(&cx, large).await.unwrap();
                }
                file
            };
            let [removed, replaced, open] = ["removed", "replaced", "open"]
                .map(|name| (name, Name::new(name.as_bytes()).unwrap()));
            for (name, _) in [removed, replaced] {
                make(name, Some(large)).await.close(&cx).await.unwrap();
            }
            let file = make(open.0, Some(large)).await;
            make("small", None).await.close(&cx).await.unwrap();
            assert_eq!(fs.core.lanes.closes(), 0);
            fs.remove(&cx, root, removed.1, RemoveKind::File).await.unwrap();
            assert_eq!(fs.core.lanes.closes(), 1);
            let from = (root, Name::new(b"small").unwrap());
            fs.rename(&cx, from, (root, replaced.1), RenameHow::Replace).await.unwrap();
            assert_eq!(fs.core.lanes.closes(), 2);
            fs.remove(&cx, root, open.1, RemoveKind::File).await.unwrap();
            file.close(&cx).await.unwrap();
            assert!(fs.core.lanes.closes() > 2);
            fs.core.lanes.closed().await;
        });
        std::fs::remove_dir_all(dir).unwrap();
    }
}
