//! Operations on names.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use dray_core::{
    Access, Attr, CreateHow, Entry, Errno, Error, FileId, FileType, Make, Name, NameBuf, OpenHow,
    RemoveKind, RenameHow, Result,
};

use super::core::{Core, Ids, SquashedCaller};
use super::descriptor::{FileState, OpenedDescriptor};
use super::inode_cache::CachedInode;
use super::lanes::{DeferredClose, Lane, is_large};
use super::reopen::{OpenGrant, Purpose};
use super::{attrs, sys};

/// How often a creation tries again that finds the name taken, and then free.
pub(super) const CREATE_TRIES: usize = 16;

/// A file that is about to lose a name.
#[derive(Default)]
struct RemovedName {
    /// The cached inode.
    known: Option<Arc<CachedInode>>,
    _large: Option<DeferredClose>,
}

/// The outcome of a creation.
pub(crate) enum CreateOutcome {
    /// With its entry, if that was wanted.
    Opened(Option<Entry>, Arc<FileState>),
    /// The name is that of this file, which is to be truncated. The lane of this call is not the
    /// one for truncation.
    Cuts(FileId),
}

/// [`Make`] that owns its target.
pub(crate) enum OwnedMake {
    Directory(u32),
    Node(u32, u32),
    Symlink(Vec<u8>),
}

impl From<Make<'_>> for OwnedMake {
    fn from(what: Make<'_>) -> OwnedMake {
        match what {
            Make::Directory { mode } => OwnedMake::Directory(mode),
            Make::Node { mode, rdev } => OwnedMake::Node(mode, rdev),
            Make::Symlink { target } => OwnedMake::Symlink(target.to_vec()),
        }
    }
}

impl Core {
    pub(crate) fn lookup(
        &self,
        caller: &SquashedCaller,
        dir: FileId,
        name: &Name,
    ) -> Result<Entry> {
        let dir = self.directory(dir)?;
        if self.hides(dir.id, name.as_bytes()) {
            return Err(Errno::ENOENT.into());
        }
        // The file is probably removed at once, and its descriptor would only be closed again.
        if dir.removal.is_near(caller.thread)
            && let Some(entry) = self.look_before_removal(caller, &dir, name)
        {
            return Ok(entry);
        }
        match self.find_at_hand(caller, &dir, name)? {
            Some(entry) => Ok(entry),
            None => self.find_for(caller, &dir, name),
        }
    }

    pub(crate) fn make(&self, dir: FileId, name: &Name, what: OwnedMake) -> Result<Entry> {
        self.writable()?;
        let dir = self.directory(dir)?;
        match what {
            OwnedMake::Directory(mode) => sys::make_dir(dir.fd(), name, mode)?,
            OwnedMake::Node(mode, rdev) => sys::make_node(dir.fd(), name, mode, rdev)?,
            OwnedMake::Symlink(target) => sys::make_symlink(dir.fd(), name, &target)?,
        }
        Ok(self.find(&dir, name)?.0)
    }

    pub(crate) fn remove(
        &self,
        caller: &SquashedCaller,
        dir: FileId,
        name: &Name,
        kind: RemoveKind,
    ) -> Result<()> {
        self.writable()?;
        let dir = self.directory(dir)?;
        self.files.before_removal();
        let _no_parking = self.files.removing();
        let leaving = self.before_removal(caller, &dir, name)?;
        // An overlay copies a file with further names first, because the count of its names
        // changes.
        let copied = self.below.is_overlay().then(|| self.known_at(&dir, name)).flatten();
        let _copying = self.copying([copied.as_ref().map(|(id, _)| *id), None]);
        sys::unlink(dir.fd(), name, kind == RemoveKind::Directory)?;
        self.after_removal(caller, leaving.known.as_ref());
        dir.removal.removed_by(caller.thread);
        if let Ids::Table(table) = &self.ids {
            table.removed(dir.id, name);
        }
        if let Some((id, fd)) = copied {
            self.changed(id, fd.as_fd());
        }
        Ok(())
    }

    /// What has this name may be about to go: our cache must not keep it, and files open on
    /// it must. To be called under [`super::files::OpenFileTable::removing`]. Errors: `ENFILE` if
    /// there are too many such files; what is open must not be lost. Answers what keeps the file
    /// over the removal, so that the kernel frees its data later, and elsewhere.
    fn before_removal(
        &self,
        caller: &SquashedCaller,
        dir: &CachedInode,
        name: &Name,
    ) -> Result<RemovedName> {
        let id = dir.removal.take_confirmed(name, caller.thread).or_else(|| self.id_at(dir, name));
        let Some(id) = id else { return Ok(RemovedName::default()) };
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
            // A network file system keeps a held file under another name, which everyone can see.
            self.nodes.forget(id);
            return Ok(RemovedName::default());
        }
        let known = self.nodes.get(id);
        let large = match &known {
            Some(_) => None, // which keeps it
            None if dir.removal.was_small(id) && !self.may_take_long() => None,
            None => self.open_large(dir, name),
        };
        Ok(RemovedName { known, _large: large })
    }

    /// Whether the removal of even a small file may take long, as on a busy disk.
    fn may_take_long(&self) -> bool {
        !self.below.is_memory() && self.lanes.are_busy()
    }

    /// A descriptor of a file whose removal takes long.
    fn open_large(&self, dir: &CachedInode, name: &Name) -> Option<DeferredClose> {
        let attr = sys::stat_at(dir.fd(), name).ok()?.attr;
        let is_slow = is_large(&attr) || self.may_take_long();
        let holds = attr.file_type() == FileType::Regular && is_slow;
        let fd = holds.then(|| sys::open_path(dir.fd(), name).ok()).flatten()?;
        Some(DeferredClose::new(fd, &self.lanes))
    }

    /// The inode `known` has lost its name.
    pub(crate) fn after_removal(&self, caller: &SquashedCaller, known: Option<&Arc<CachedInode>>) {
        let Some(node) = known else { return };
        self.note_unlinked(caller, node);
        // A client may have opened it since the lookup.
        if let Some(inode) = self.files.needs_keeping(node.id) {
            self.files.keep(&inode, node.fd());
        }
    }

    pub(crate) fn rename(
        &self,
        caller: &SquashedCaller,
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
            RenameHow::NoReplace | RenameHow::Exchange => RemovedName::default(),
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
    fn open_flags(&self, caller: Option<&SquashedCaller>, how: OpenHow) -> Result<i32> {
        // The access mode with both bits needs the right to read and to write, and gives neither.
        // Such a file is for ioctl(2) alone.
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
            // A program below may look at the flags of the open, not at each write. (Not
            // `O_APPEND`: such a program would also append data that have a place.)
            passed |= libc::O_SYNC;
        }
        Ok(how.flags & passed)
    }

    /// The lane that opens a file, and whether the calling thread may try first. Truncation takes
    /// time in proportion to the size, and so does the copy that an overlay makes before a change.
    pub(crate) fn lane_to_open(&self, id: FileId, how: OpenHow) -> ((Lane, FileId), bool) {
        let copy_ups = self.below.is_overlay() && how.writes();
        let lane = if how.truncates() || copy_ups { Lane::Writes } else { Lane::Looks };
        let tries = self.inline && self.below.is_memory();
        ((lane, id), tries || self.stays(lane))
    }

    /// Opens a file or directory. None if that would take long, and `may_block` is false.
    pub(crate) fn open_node(
        &self,
        caller: &SquashedCaller,
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

    fn open_found(
        &self,
        caller: &SquashedCaller,
        node: &CachedInode,
        how: OpenHow,
    ) -> Result<Arc<FileState>> {
        let flags = self.open_flags(Some(caller), how)?;
        match node.kind {
            FileType::Regular | FileType::Directory => {}
            FileType::Symlink => return Err(Errno::ELOOP.into()),
            _ => {
                return Err(Error::new(Errno::ENXIO)
                    .because("devices, pipes and sockets are opened at the client"));
            }
        }
        if caller.internal && how.truncates() {
            return Err(Error::new(Errno::EPERM).because("the server truncates no file by itself"));
        }
        self.files.admit()?;
        if node.lookup_holders().is_gone() {
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
        if how.truncates() {
            self.size_was_set(node.id);
        }
        drop(copying);
        let directory = node.kind == FileType::Directory;
        let file = self.files.opened(node.id, directory, how.flags, opened);
        // In this order: a removal checks last which clients have the file open.
        if node.lookup_holders().is_gone() {
            self.hold_nameless(caller, &file, node.fd())?;
        }
        Ok(file)
    }

    /// `file` has no name by which it could be found again.
    fn hold_nameless(
        &self,
        caller: &SquashedCaller,
        file: &FileState,
        fd: BorrowedFd<'_>,
    ) -> Result<()> {
        if self.files.is_crowded() {
            file.inode.pin(sys::reopen(self.proc_fd(), fd, libc::O_PATH)?, caller.taker);
        }
        if self.files.needs_keeping(file.inode.id).is_some() {
            self.files.keep(&file.inode, fd);
        }
        Ok(())
    }

    /// Closes `file`. Where the inode cache has a descriptor of it, too, the kernel is not asked
    /// whether this one is the last.
    pub(crate) fn close_file(&self, file: &FileState) {
        file.inode.closed();
        let Some(fd) = file.close() else { return };
        if let Some(node) = self.nodes.get(file.inode.id)
            && let Some(fd) = Arc::into_inner(fd)
        {
            fd.close_beside(node.fd());
        }
    }

    /// Opens what was found.
    fn reopen_for(
        &self,
        caller: &SquashedCaller,
        node: &CachedInode,
        how: OpenHow,
        flags: i32,
    ) -> Result<OpenedDescriptor> {
        if how.executes() && node.kind == FileType::Regular {
            // A caller may run a program that it cannot read, but the client's kernel, which runs
            // the program, must read it (NFS does the same: NFSD_MAY_READ_IF_EXEC, fs/nfsd/vfs.h).
            self.check_access(caller, node.id, Access(libc::X_OK as u32))?;
            let granted = OpenGrant::to_caller(flags).without_changes();
            let fd = self.reopen_as_server(node.fd(), Purpose::Execute(granted))?;
            return Ok(OpenedDescriptor::new(fd, granted));
        }
        let open = |flags: i32| match opens_again(caller, how) {
            true => OpenedDescriptor::again(self, node.fd(), OpenGrant::by_ticket(flags)),
            false => {
                let fd = sys::reopen(self.proc_fd(), node.fd(), flags)?;
                Ok(OpenedDescriptor::for_caller(fd, flags))
            }
        };
        match open(flags) {
            // An append-only file (chattr +a) has to be opened with `O_APPEND`.
            Err(error) if error.errno() == Errno::EPERM && how.appends() => {
                open(flags | libc::O_APPEND)
            }
            Err(error)
                if error.errno() == Errno::EACCES
                    && how.is_by_creator()
                    && node.kind == FileType::Regular
                    && sys::stat(node.fd())?.attr.uid == caller.who.uid =>
            {
                let granted = OpenGrant::to_caller(flags);
                let fd = self.reopen_as_server(node.fd(), Purpose::GoOn(granted))?;
                Ok(OpenedDescriptor::new(fd, granted))
            }
            opened => opened,
        }
    }

    /// Opens a file, and makes it if need be. This thread may truncate the file `cuts`. The entry is answered if the
    /// caller `wants_attr`.
    pub(crate) fn create(
        &self,
        caller: &SquashedCaller,
        (dir, name): (FileId, &NameBuf),
        how: CreateHow,
        (cuts, wants_attr): (Option<FileId>, bool),
    ) -> Result<CreateOutcome> {
        if how.open.directory() {
            return Err(Error::new(Errno::EINVAL).because("O_CREAT with O_DIRECTORY is refused"));
        }
        let flags = self.open_flags(None, how.open)?;
        let dir = self.directory(dir)?;
        for _ in 0..CREATE_TRIES {
            if !self.options.read_only {
                self.files.admit()?;
                match sys::open_new(dir.fd(), name, flags & !libc::O_TRUNC, how.mode & 0o7777) {
                    Ok(fd) => {
                        let id = (!wants_attr).then(|| self.id_of_new(fd.as_fd())).flatten();
                        let (id, entry) = match id {
                            Some(id) => (id?, None),
                            None => {
                                let entry = self.identify(Some((dir.id, name)), fd.as_fd())?;
                                (entry.id, Some(entry))
                            }
                        };
                        let opened = OpenedDescriptor::of_new_file(fd, flags);
                        let file = self.files.opened(id, false, how.open.flags, opened);
                        return Ok(CreateOutcome::Opened(entry.filter(|_| wants_attr), file));
                    }
                    Err(Errno::EEXIST) if !how.exclusive => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
            match self.open_existing(caller, (&dir, name), how.open, (cuts, wants_attr)) {
                // Removed between the two steps.
                Err(error) if matches!(error.errno(), Errno::ENOENT | Errno::ESTALE) => {
                    self.writable()?;
                }
                result => return result,
            }
        }
        Err(Error::retry(Errno::EAGAIN)
            .because("other clients create and remove the name again and again"))
    }

    fn open_existing(
        &self,
        caller: &SquashedCaller,
        (dir, name): (&CachedInode, &Name),
        how: OpenHow,
        (cuts, wants_attr): (Option<FileId>, bool),
    ) -> Result<CreateOutcome> {
        let (entry, node) = self.find(dir, name)?;
        if node.kind == FileType::Directory {
            return Err(Errno::EISDIR.into());
        }
        let is_quick = || self.is_quick_to_cut(&entry.attr, 0);
        if how.truncates() && cuts != Some(node.id) && !is_quick() {
            return Ok(CreateOutcome::Cuts(node.id));
        }
        let file = self.open_found(caller, &node, how)?;
        if !wants_attr {
            return Ok(CreateOutcome::Opened(None, file));
        }
        let attr = if how.truncates() { self.stat(node.fd())?.attr } else { entry.attr };
        Ok(CreateOutcome::Opened(Some(Entry { id: entry.id, attr }), file))
    }

    pub(crate) fn tmpfile(
        &self,
        caller: &SquashedCaller,
        dir: FileId,
        how: CreateHow,
    ) -> Result<(Entry, Arc<FileState>)> {
        self.writable()?;
        if !how.open.writes() {
            return Err(Error::new(Errno::EINVAL).because("O_TMPFILE needs write access"));
        }
        let flags = self.open_flags(None, how.open)? & !(libc::O_TRUNC | libc::O_DIRECTORY);
        let dir = self.directory(dir)?;
        self.files.admit()?;
        self.files.admit_pin(caller.taker)?;
        let exclusive = if how.exclusive { libc::O_EXCL } else { 0 };
        let fd = sys::open_unnamed(dir.fd(), flags | exclusive, how.mode & 0o7777)?;
        let entry = self.identify(None, fd.as_fd())?;
        let opened = OpenedDescriptor::for_caller(fd, flags);
        let file = self.files.opened(entry.id, false, how.open.flags, opened);
        let fd = file.fd(self)?;
        self.hold_nameless(caller, &file, fd.as_fd())?;
        drop(fd);
        Ok((entry, file))
    }
}

/// Whether the server itself reopens a file for a client. The file system below may refuse changes
/// by now. A file that was opened for changes can still be read.
fn opens_again(caller: &SquashedCaller, how: OpenHow) -> bool {
    caller.internal && !how.executes()
}

/// Whether a file that loses a name has another one.
fn has_other_names(fd: BorrowedFd<'_>) -> bool {
    let more = |attr: Attr| attr.file_type() != FileType::Directory && attr.nlink > 1;
    sys::stat(fd).is_ok_and(|stat| more(stat.attr))
}

#[cfg(test)]
mod tests {
    use dray_core::{Context, FileSystem, FsUuid, SetAttr};
    use dray_rt::{DriverKind, Executor};

    use super::super::lanes::NEW_LASTS;
    use super::super::{PosixFs, PosixOptions};
    use super::*;

    /// The kernel freed the data on the thread that served others, with the directory locked.
    // proves: D1
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
            dray_rt::sleep(2 * NEW_LASTS).await; // else no look is taken at it in memory
            file.close(&cx).await.unwrap();
            assert!(fs.core.lanes.closes() > 2);
            fs.core.lanes.closed().await;
        });
        std::fs::remove_dir_all(dir).unwrap();
    }
}
