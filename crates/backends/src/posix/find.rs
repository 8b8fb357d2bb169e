//! Finds the inode of an id, the inode of a name, and the id of an inode.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use dray_core::{Attr, Entry, Errno, Error, FileId, FileType, Name, Result, Timestamp};

use super::core::{Core, Ids, SquashedCaller};
use super::handle::HandleCodec;
use super::inode_cache::CachedInode;
use super::lanes::DeferredClose;
use super::paths::PathTable;
use super::reopen::Purpose;
use super::sys::InodeStat;
use super::{cred, sys};

/// Looks at a name before a result is accepted that may have lost the name meanwhile.
const LOOKS_MAX: usize = 4;

/// Tries to open a handle while its inode number is being reused, or memory is short.
const OPENS_MAX: usize = 3;

/// Deepest path that the path table follows.
const DEPTH_MAX: usize = 16_384;

impl Core {
    pub(super) fn new_node(&self, id: FileId, kind: FileType, fd: OwnedFd) -> CachedInode {
        CachedInode::new(id, kind, DeferredClose::new(fd, &self.lanes))
    }

    /// The inode with this id. Errors: `ESTALE` if there is none any more, or the id was
    /// never given out.
    pub(crate) fn node(&self, id: FileId) -> Result<Arc<CachedInode>> {
        if id == self.root.id {
            return Ok(self.root.clone());
        }
        if let Some(node) = self.nodes.get(id) {
            return Ok(node);
        }
        match &self.ids {
            Ids::Native(codec) => self.node_by_handle(codec, id),
            Ids::Table(table) => self.node_by_place(table, id).map_err(|error| {
                let is_stale = error.errno() == Errno::ESTALE;
                error.unmet(is_stale && table.learns())
            }),
        }
    }

    /// As [`Core::node`], and also a recently unlinked file that the caller had looked up.
    pub(crate) fn node_for(&self, caller: &SquashedCaller, id: FileId) -> Result<Arc<CachedInode>> {
        match self.node(id) {
            Err(error) if error.errno() == Errno::ESTALE => {
                self.recently_unlinked.find(id, caller.thread).ok_or(error)
            }
            node => node,
        }
    }

    /// The directory with this id; `ENOTDIR` if it is something else.
    pub(crate) fn directory(&self, id: FileId) -> Result<Arc<CachedInode>> {
        let node = self.node(id)?;
        if node.kind == FileType::Directory { Ok(node) } else { Err(Errno::ENOTDIR.into()) }
    }

    fn node_by_handle(&self, codec: &HandleCodec, id: FileId) -> Result<Arc<CachedInode>> {
        let handle = codec.decode(id).ok_or_else(stale)?;
        let open = || sys::open_by_handle(self.mount.as_fd(), &handle);
        let opened = cred::as_root(|| {
            let mut opened = open();
            for _ in 1..OPENS_MAX {
                if opened.as_ref().err() != Some(&Errno::ENOMEM) {
                    break;
                }
                opened = open();
            }
            opened
        })?;
        let fd = opened.map_err(|errno| match errno {
            // Answers of file systems to a handle that means nothing to them. `ENOMEM` comes where
            // the inode's number is being given to a new file. `iget_locked` in fs/inode.c has no
            // answer then, and ext4 and btrfs take that for lack of memory.
            Errno::ENOENT | Errno::EINVAL | Errno::ENOMEM => stale(),
            errno => errno.into(),
        })?;
        let stat = sys::stat(fd.as_fd())?;
        if stat.dev != self.devices.own {
            return Err(stale().because("the file is on another file system than the export"));
        }
        // The file system still has the inode, and would as long as this descriptor is open.
        if stat.attr.nlink == 0 && !self.files.in_use(id) {
            return Err(stale());
        }
        Ok(self.nodes.insert(self.new_node(id, stat.attr.file_type(), fd)))
    }

    fn node_by_place(&self, table: &PathTable, id: FileId) -> Result<Arc<CachedInode>> {
        if let Some(fd) = self.files.any_descriptor(id) {
            let path = self.reopen_as_server(fd.as_fd(), Purpose::Refer)?;
            let kind = sys::stat(path.as_fd())?.attr.file_type();
            return Ok(self.nodes.insert(self.new_node(id, kind, path)));
        }
        // Up to something that is open, then down again.
        let mut missing = vec![id];
        let mut above = None;
        while above.is_none() {
            let last = *missing.last().ok_or_else(stale)?;
            let known = table.find(last).ok_or_else(stale)?;
            let parent = known.places.first().ok_or_else(stale)?.0;
            above = if parent == self.root.id {
                Some(self.root.clone())
            } else {
                self.nodes.get(parent)
            };
            if above.is_none() {
                missing.push(parent);
            }
            if missing.len() > DEPTH_MAX {
                return Err(stale());
            }
        }
        let mut node = above.ok_or_else(stale)?;
        while let Some(id) = missing.pop() {
            node = self.step_down(table, &node, id)?;
        }
        Ok(node)
    }

    fn step_down(
        &self,
        table: &PathTable,
        dir: &CachedInode,
        id: FileId,
    ) -> Result<Arc<CachedInode>> {
        let known = table.find(id).ok_or_else(stale)?;
        for (parent, name) in &known.places {
            let other;
            let dir = if *parent == dir.id {
                dir
            } else {
                match self.nodes.get(*parent) {
                    Some(node) => other = node,
                    None => continue,
                }
                &*other
            };
            let Ok(fd) = cred::as_root(|| sys::open_path(dir.fd(), name))? else { continue };
            let attr = self.stat(fd.as_fd())?.attr;
            if known.is(&self.lasting(attr)) || self.is_copy(table, id, fd.as_fd())? {
                return Ok(self.nodes.insert(self.new_node(id, attr.file_type(), fd)));
            }
        }
        Err(stale())
    }

    /// Id and attributes of the file that was opened at `place`; no place for a file without a
    /// name. Errors: `EXDEV` if it is on another mount.
    pub(crate) fn identify(
        &self,
        place: Option<(FileId, &Name)>,
        fd: BorrowedFd<'_>,
    ) -> Result<Entry> {
        match &self.ids {
            Ids::Native(codec) => {
                let id = self.id_of(codec, fd)?;
                let stat = sys::stat(fd)?;
                if stat.dev != self.devices.own {
                    Err(other_mount())
                } else {
                    Ok(Entry { id, attr: stat.attr })
                }
            }
            Ids::Table(table) => {
                let stat = self.stat(fd)?;
                self.same_mount(&stat)?;
                match place {
                    Some((dir, name)) => self.seen(table, (dir, name), fd, stat.attr),
                    None => Ok(Entry { id: table.unnamed(&stat.attr), attr: stat.attr }),
                }
            }
        }
    }

    /// The id of a file that was just made in a directory of the export, and so is on its file system. None where
    /// attributes decide on the id, as [`Core::identify`] sees them.
    pub(crate) fn id_of_new(&self, fd: BorrowedFd<'_>) -> Option<Result<FileId>> {
        match &self.ids {
            Ids::Native(codec) => Some(self.id_of(codec, fd)),
            Ids::Table(_) => None,
        }
    }

    /// The id that the handle of an open file stands for. Errors: `EXDEV` if it is on another mount.
    fn id_of(&self, codec: &HandleCodec, fd: BorrowedFd<'_>) -> Result<FileId> {
        let (handle, mount_id) = sys::handle_of(fd)?;
        if mount_id != self.mount_id {
            return Err(other_mount());
        }
        codec.encode(&handle).ok_or_else(other_mount)
    }

    /// Errors: `EXDEV` for a file system that is mounted on a name. On overlays, files may have
    /// devices of the layers below. Directories never have.
    pub(crate) fn same_mount(&self, stat: &InodeStat) -> Result<()> {
        let other_device =
            stat.attr.file_type() == FileType::Directory && stat.dev != self.devices.own;
        // A mount made with `--bind` has the same device.
        let mounted = stat.attr.attributes & libc::STATX_ATTR_MOUNT_ROOT as u64 != 0;
        if other_device || mounted { Err(other_mount()) } else { Ok(()) }
    }

    /// Whether names have to be looked up the long way, which stays off mounts below.
    fn has_mounts_below(&self) -> bool {
        self.mounts_below.any(self.mount.as_fd())
    }

    /// As [`Core::find`], if the inode of that name is in the cache already, which saves opening
    /// it. None where it is not, or where files of this directory have not been lately. Errors: `ENOENT`.
    pub(crate) fn find_at_hand(
        &self,
        caller: &SquashedCaller,
        dir: &CachedInode,
        name: &Name,
    ) -> Result<Option<Entry>> {
        let Ids::Native(codec) = &self.ids else { return Ok(None) };
        if dir.looks_cold() || self.has_mounts_below() {
            return Ok(None);
        }
        let (handle, mount_id) = match sys::handle_at(dir.fd(), name) {
            Ok(found) => found,
            Err(Errno::ENOENT) => return Err(Errno::ENOENT.into()),
            Err(_) => return Ok(None), // the slow way says what is wrong
        };
        if mount_id != self.mount_id {
            return Ok(None);
        }
        let Some(node) = codec.encode(&handle).and_then(|id| self.nodes.get(id)) else {
            return Ok(None);
        };
        let entry = Entry { id: node.id, attr: self.stat(node.fd())?.attr };
        dir.looked_up(true);
        Ok(self.was_looked_up(caller, &node).then_some(entry))
    }

    /// Finds `name` in `dir` as the caller, which will then use the id.
    pub(crate) fn find_for(
        &self,
        caller: &SquashedCaller,
        dir: &CachedInode,
        name: &Name,
    ) -> Result<Entry> {
        for _ in 0..LOOKS_MAX {
            let (entry, node) = self.find(dir, name)?;
            if self.was_looked_up(caller, &node) {
                return Ok(entry);
            }
        }
        Ok(self.find(dir, name)?.0)
    }

    /// Finds `name` in `dir` as the caller, and keeps the inode in the cache.
    pub(crate) fn find(&self, dir: &CachedInode, name: &Name) -> Result<(Entry, Arc<CachedInode>)> {
        let fd = sys::open_path(dir.fd(), name)?;
        let entry = self.identify(Some((dir.id, name)), fd.as_fd())?;
        let opened = fd.as_raw_fd();
        let node = self.new_node(entry.id, entry.attr.file_type(), fd);
        let node = match self.ids {
            Ids::Native(_) => self.nodes.insert(node),
            Ids::Table(_) => self.nodes.replace(node),
        };
        dir.looked_up(node.fd().as_raw_fd() != opened);
        Ok((entry, node))
    }

    /// Id and attributes of `name` in `dir` for a caller that does not open it: two looks that must
    /// agree. None where the name changed between them, or is on another mount. A file system that
    /// is mounted there is not asked. It may hang, or be a mount of this very export, which waits
    /// for this call.
    pub(crate) fn stat_without_opening(
        &self,
        dir: FileId,
        fd: BorrowedFd<'_>,
        name: &Name,
    ) -> Option<Entry> {
        match &self.ids {
            Ids::Native(_) if self.has_mounts_below() => {
                let fd = sys::open_path(fd, name).ok()?;
                self.identify(Some((dir, name)), fd.as_fd()).ok()
            }
            Ids::Native(codec) => self.stat_by_name(self.id_by_name(codec, fd, name)?, fd, name),
            Ids::Table(table) => {
                let fd = sys::open_path(fd, name).ok()?;
                let stat = self.stat(fd.as_fd()).ok()?;
                self.same_mount(&stat).ok()?;
                self.seen(table, (dir, name), fd.as_fd(), stat.attr).ok()
            }
        }
    }

    /// The id that `name` leads to; none if that is on another mount.
    fn id_by_name(&self, codec: &HandleCodec, dir: BorrowedFd<'_>, name: &Name) -> Option<FileId> {
        let (handle, mount_id) = sys::handle_at(dir, name).ok()?;
        if mount_id != self.mount_id { None } else { codec.encode(&handle) }
    }

    /// The file with this id, to which `name` has just led; none if it leads elsewhere now.
    fn stat_by_name(&self, id: FileId, dir: BorrowedFd<'_>, name: &Name) -> Option<Entry> {
        let stat = sys::stat_at(dir, name).ok()?;
        let same = stat.dev == self.devices.own && stat.attr.ino == id.ino;
        same.then_some(Entry { id, attr: stat.attr })
    }

    /// As [`Core::stat_without_opening`], of a regular file that the caller is probably about to remove.
    /// The server's own look, which comes behind the client's, needs the type of the file alone. A
    /// file keeps its type, so one question suffices where the name still leads to the same file.
    pub(crate) fn look_before_removal(
        &self,
        caller: &SquashedCaller,
        dir: &CachedInode,
        name: &Name,
    ) -> Option<Entry> {
        let entry = match &self.ids {
            Ids::Native(codec) if caller.internal && !self.has_mounts_below() => {
                let id = self.id_by_name(codec, dir.fd(), name)?;
                if let Some(entry) = dir.removal.confirm(name, id, caller.thread) {
                    return Some(entry);
                }
                self.stat_by_name(id, dir.fd(), name)?
            }
            _ => self.stat_without_opening(dir.id, dir.fd(), name)?,
        };
        if entry.attr.file_type() != FileType::Regular {
            return None;
        }
        let is_certain = caller.internal && matches!(self.ids, Ids::Native(_));
        dir.removal.note(name, &entry, is_certain.then_some(caller.thread));
        Some(entry)
    }

    /// The id of the file that was found at a place, and its attributes.
    fn seen(
        &self,
        table: &PathTable,
        (dir, name): (FileId, &Name),
        fd: BorrowedFd<'_>,
        attr: Attr,
    ) -> Result<Entry> {
        let lasting = self.lasting(attr);
        let there = self.copy_ups.as_ref().and_then(|_| table.known_there(dir, name, &lasting));
        match there {
            // Not looked at again: it may be copied meanwhile, and look different.
            Some((id, true)) => Ok(Entry { id, attr }),
            // An overlay may be copying it, or has copied it since the look.
            Some((id, false)) => {
                let none_copying = self.none_copying(id);
                let attr = self.stat(fd)?.attr;
                let there = table.known_there(dir, name, &self.lasting(attr));
                drop(none_copying);
                match there {
                    Some((id, true)) => Ok(Entry { id, attr }),
                    _ => Ok(Entry { id: self.entered(table, (dir, name), fd, &attr), attr }),
                }
            }
            None => Ok(Entry { id: self.entered(table, (dir, name), fd, &attr), attr }),
        }
    }

    /// The id of the file at a place with the attributes `attr`.
    fn entered(
        &self,
        table: &PathTable,
        (dir, name): (FileId, &Name),
        fd: BorrowedFd<'_>,
        attr: &Attr,
    ) -> FileId {
        let attr = self.lasting(*attr);
        let other = || table.other_link((dir, name), &attr);
        // Servers that share the file system have to trust its numbers.
        let known =
            if table.learns() { None } else { other().filter(|id| self.is_same_file(*id, fd)) };
        table.seen(dir, name, &attr, known)
    }

    /// Whether `fd` is of the inode with this id, known by another name. Numbers prove nothing:
    /// they may be used again, and programs behind FUSE give some twice. All that is said of both
    /// names must agree, and so must the handles that the kernel has for them.
    fn is_same_file(&self, id: FileId, fd: BorrowedFd<'_>) -> bool {
        let Ok(known) = self.node(id) else { return false };
        let handle = sys::identity_of(fd);
        if sys::identity_of(known.fd()) != handle {
            return false;
        }
        let mut before = None;
        for _ in 0..LOOKS_MAX {
            let (Ok(one), Ok(other)) = (self.stat(known.fd()), self.stat(fd)) else { return false };
            let now = [one.attr, other.attr].map(lasting);
            if now[0] == now[1] {
                return true;
            }
            if before == Some(now) {
                return false;
            }
            before = Some(now);
        }
        handle.is_some() // somebody changes it all the time
    }

    /// Whether a file that looks different from `id` is the copy that an overlay has made of it.
    fn is_copy(&self, table: &PathTable, id: FileId, fd: BorrowedFd<'_>) -> Result<bool> {
        let Some(_none) = self.none_copying(id) else { return Ok(false) };
        let attr = self.lasting(self.stat(fd)?.attr);
        Ok(table.find(id).is_some_and(|known| known.is(&attr)))
    }

    /// The id at `name` in `dir`, if it can be found cheaply.
    pub(crate) fn id_at(&self, dir: &CachedInode, name: &Name) -> Option<FileId> {
        match &self.ids {
            Ids::Native(codec) if self.has_mounts_below() => {
                let fd = sys::open_path(dir.fd(), name).ok()?;
                codec.encode(&sys::handle_of(fd.as_fd()).ok()?.0)
            }
            Ids::Native(codec) => codec.encode(&sys::handle_at(dir.fd(), name).ok()?.0),
            Ids::Table(table) => table.at(dir.id, name),
        }
    }

    /// The file that the path table knows at `name`, held for [`Core::changed`] after it has moved.
    pub(crate) fn known_at(&self, dir: &CachedInode, name: &Name) -> Option<(FileId, OwnedFd)> {
        let Ids::Table(table) = &self.ids else { return None };
        let id = table.at(dir.id, name)?;
        let fd = sys::open_path(dir.fd(), name).ok()?;
        let attr = self.stat(fd.as_fd()).ok()?.attr;
        table.find(id)?.is(&self.lasting(attr)).then_some((id, fd))
    }

    /// To be called after a change of the inode with this id, under [`Core::copying`]. An overlay
    /// copies what is changed. The copy has another time of birth, perhaps another number.
    pub(crate) fn changed(&self, id: FileId, fd: BorrowedFd<'_>) {
        if let Ids::Table(table) = &self.ids
            && let Ok(stat) = self.stat(fd)
        {
            table.changed(id, &self.lasting(stat.attr));
        }
    }

    /// The lasting part of these attributes, for the path table. An overlay copies a directory, and
    /// all above it, with the first change in it. So the time of birth of a directory means nothing
    /// there.
    fn lasting(&self, attr: Attr) -> Attr {
        match attr.file_type() {
            FileType::Directory if self.below.is_overlay() => {
                Attr { btime: Timestamp::default(), ..attr }
            }
            _ => attr,
        }
    }

    /// Attributes through an id. Errors: `ESTALE` for an inode that exists only because the server
    /// holds it, and not for this caller.
    pub(crate) fn attr(&self, caller: &SquashedCaller, id: FileId) -> Result<Attr> {
        let node = self.node_for(caller, id)?;
        let attr = self.shown(id, self.stat(node.fd())?.attr);
        // The caller may have looked up another descriptor of it.
        let is_there = attr.nlink > 0
            || self.files.in_use(id)
            || node.lookup_holders().has(caller.thread, dray_rt::now())
            || self.recently_unlinked.find(id, caller.thread).is_some();
        if !is_there {
            if !node.lookup_holders().is_gone() {
                self.note_unlinked(caller, &node);
            }
            return Err(stale());
        }
        if attr.nlink == 0 && !node.lookup_holders().is_gone() && self.files.in_use(id) {
            // The file has lost its last name, and not here: another server of the projection has
            // removed it.
            self.after_removal(caller, Some(&node));
        }
        Ok(attr)
    }

    /// `node` has lost a name, perhaps its last: the cache must not keep it.
    pub(crate) fn note_unlinked(&self, caller: &SquashedCaller, node: &Arc<CachedInode>) {
        // A lookup finds it in the cache or among the recently unlinked.
        self.recently_unlinked.add(node, caller.thread);
        self.nodes.forget_this(node);
    }

    /// Records that the caller has looked `node` up. False if it has lost a name since.
    fn was_looked_up(&self, caller: &SquashedCaller, node: &CachedInode) -> bool {
        caller.internal || node.lookup_holders().add(caller.thread, dray_rt::now())
    }
}

/// The attributes that stay the same while the file is not changed. Reading it and writing it back
/// do not change them.
fn lasting(attr: Attr) -> Attr {
    Attr { atime: Timestamp::default(), blocks: 0, ..attr }
}

pub(crate) fn stale() -> Error {
    Error::new(Errno::ESTALE)
}

fn other_mount() -> Error {
    Error::new(Errno::EXDEV).because("another file system is mounted at this name")
}
