//! All inodes by number, and the few primitives through which every change goes.

use std::collections::{BTreeMap, BTreeSet};

use dray_core::{Entry, Errno, Error, FileId, Name, NameBuf, Result, Statfs, Ttl};

use super::MemoryOptions;
use super::content::{CHUNK_BYTES, Content, chunk_range};
use super::directory::{DirSlot, Directory};
use super::inode::{Body, Inode, Meta, now};
use super::journal::DiskJournal;

pub(super) const ROOT_INO: u64 = 1;
/// Names that one file may have (as ext4).
pub(super) const LINK_MAX: u32 = 65_000;

/// What the operation in progress has changed so far.
#[derive(Debug, Default)]
pub(super) struct StoreChange {
    pub(super) inodes: BTreeSet<u64>,
    pub(super) names: Vec<(u64, NameBuf, Option<DirSlot>)>,
    /// Holes made in files: number, offset, length.
    pub(super) punched: Vec<(u64, u64, u64)>,
}

/// The file system's state.
pub(super) struct Store {
    inodes: BTreeMap<u64, Inode>,
    next_ino: u64,
    used_chunks: u64,
    options: MemoryOptions,
    epoch: u64,
    /// The durable side, if there is a disk.
    journal: Option<DiskJournal>,
    change: StoreChange,
    /// What is said of how long a name is absent.
    pub(super) absence: Option<Ttl>,
}

/// The generation of an inode number. It is spread out, so that code that ignores it fails.
fn generation(ino: u64) -> u64 {
    ino.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33 | 1
}

impl Store {
    /// An empty file system.
    pub(super) fn new(options: MemoryOptions) -> Store {
        let time = now();
        let meta = Meta {
            mode: libc::S_IFDIR | options.root_mode & 0o7777,
            nlink: 2,
            atime: time,
            mtime: time,
            ctime: time,
            btime: time,
            ..Meta::default()
        };
        let root = Inode {
            generation: generation(ROOT_INO),
            meta,
            body: Body::Directory(Directory::new(ROOT_INO)),
            opens: 0,
            linkable: false,
        };
        Store {
            inodes: BTreeMap::from([(ROOT_INO, root)]),
            next_ino: ROOT_INO + 1,
            used_chunks: 0,
            options,
            epoch: 0,
            journal: None,
            change: StoreChange::default(),
            absence: None,
        }
    }

    /// Puts a simulated disk under it, which holds what is there now.
    pub(super) fn attach_journal(&mut self) {
        self.journal = Some(DiskJournal::new(self.inodes.clone()));
    }

    pub(super) fn journal_mut(&mut self) -> Option<(&mut DiskJournal, &BTreeMap<u64, Inode>)> {
        self.journal.as_mut().map(|journal| (journal, &self.inodes))
    }

    /// Starts another epoch with these files: objects of the former epoch are dead.
    pub(super) fn begin_epoch(&mut self, inodes: BTreeMap<u64, Inode>) {
        self.epoch += 1;
        self.used_chunks =
            inodes.values().filter_map(|i| i.content().ok()).map(Content::chunk_count).sum();
        self.inodes = inodes;
        self.change = StoreChange::default();
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(super) fn options(&self) -> &MemoryOptions {
        &self.options
    }

    pub(super) fn root_id(&self) -> FileId {
        FileId { ino: ROOT_INO, generation: generation(ROOT_INO) }
    }

    pub(super) fn inodes(&self) -> &BTreeMap<u64, Inode> {
        &self.inodes
    }

    /// The number behind an id; `ESTALE` if the file is gone.
    pub(super) fn find(&self, id: FileId) -> Result<u64> {
        match self.inodes.get(&id.ino) {
            Some(inode) if inode.generation == id.generation => Ok(id.ino),
            _ => Err(Errno::ESTALE.into()),
        }
    }

    pub(super) fn inode(&self, ino: u64) -> Result<&Inode> {
        self.inodes.get(&ino).ok_or(Error::new(Errno::ESTALE))
    }

    /// A file to be changed; goes into the journal at the end of the operation.
    pub(super) fn change(&mut self, ino: u64) -> Result<&mut Inode> {
        self.change.inodes.insert(ino);
        self.unlogged(ino)
    }

    /// A file to be changed in what needs no journal: times of access, open count.
    pub(super) fn unlogged(&mut self, ino: u64) -> Result<&mut Inode> {
        self.inodes.get_mut(&ino).ok_or(Error::new(Errno::ESTALE))
    }

    pub(super) fn entry(&self, ino: u64) -> Result<Entry> {
        let inode = self.inode(ino)?;
        Ok(Entry { id: FileId { ino, generation: inode.generation }, attr: inode.attr(ino) })
    }

    /// Adds a file that has no name yet. `ENOSPC` at the limit.
    pub(super) fn add(&mut self, meta: Meta, body: Body) -> Result<u64> {
        if self.inodes.len() as u64 >= self.options.inodes_max {
            return Err(
                Error::new(Errno::ENOSPC).because("the export has reached its limit of files")
            );
        }
        let ino = self.next_ino;
        self.next_ino += 1;
        let inode = Inode { generation: generation(ino), meta, body, opens: 0, linkable: false };
        self.inodes.insert(ino, inode);
        self.change.inodes.insert(ino);
        if let Some(journal) = &mut self.journal {
            journal.layout_changes(ino);
        }
        Ok(ino)
    }

    /// Frees the file if neither a name nor an open file holds it.
    pub(super) fn drop_if_unused(&mut self, ino: u64) {
        if self.inodes.get(&ino).is_some_and(|inode| inode.meta.nlink == 0 && inode.opens == 0)
            && let Some(inode) = self.inodes.remove(&ino)
        {
            self.used_chunks -= inode.content().map_or(0, Content::chunk_count);
            self.change.inodes.insert(ino);
        }
    }

    /// Gives `name` in `dir` to `ino` and stamps the directory.
    pub(super) fn set_name(&mut self, dir: u64, name: &Name, ino: u64) -> Result<()> {
        let time = now();
        let inode = self.change(dir)?;
        let Body::Directory(directory) = &mut inode.body else {
            return Err(Errno::ENOTDIR.into());
        };
        let slot = directory.set(name, ino);
        (inode.meta.mtime, inode.meta.ctime) = (time, time);
        self.change.names.push((dir, name.to_owned(), Some(slot)));
        Ok(())
    }

    /// Takes `name` out of `dir` and stamps the directory.
    pub(super) fn clear_name(&mut self, dir: u64, name: &Name) -> Result<()> {
        let time = now();
        let inode = self.change(dir)?;
        let Body::Directory(directory) = &mut inode.body else {
            return Err(Errno::ENOTDIR.into());
        };
        directory.remove(name);
        (inode.meta.mtime, inode.meta.ctime) = (time, time);
        self.change.names.push((dir, name.to_owned(), None));
        Ok(())
    }

    /// Bytes of data that still fit in.
    pub(super) fn free_chunks(&self) -> u64 {
        (self.options.capacity_bytes / CHUNK_BYTES).saturating_sub(self.used_chunks)
    }

    /// Changes a file's data, keeping count of the chunks.
    pub(super) fn edit(&mut self, ino: u64, edit: impl FnOnce(&mut Content)) -> Result<()> {
        let content = self.change(ino)?.content_mut()?;
        let before = content.chunk_count();
        edit(content);
        let after = content.chunk_count();
        self.used_chunks = self.used_chunks + after - before;
        Ok(())
    }

    /// Puts bytes into a file for which there is room.
    pub(super) fn write_bytes(&mut self, ino: u64, at: u64, bytes: &[u8]) -> Result<()> {
        self.edit(ino, |content| content.write(at, bytes))?;
        if let Some(journal) = &mut self.journal {
            journal.dirty(ino, chunk_range(at, bytes.len() as u64));
        }
        Ok(())
    }

    /// Cuts or grows a file.
    pub(super) fn set_size(&mut self, ino: u64, size: u64) -> Result<()> {
        let shrinks = self.inode(ino)?.size() > size;
        self.edit(ino, |content| content.set_size(size))?;
        if let Some(journal) = &mut self.journal
            && shrinks
        {
            journal.layout_changes(ino);
        }
        Ok(())
    }

    /// Makes a hole.
    pub(super) fn punch(&mut self, ino: u64, at: u64, len: u64) -> Result<()> {
        self.edit(ino, |content| content.punch(at, len))?;
        self.change.punched.push((ino, at, len));
        if let Some(journal) = &mut self.journal {
            journal.layout_changes(ino);
        }
        Ok(())
    }

    /// What `ino` is and holds becomes durable, with everything that was changed before.
    pub(super) fn sync(&mut self, ino: u64) {
        self.finish();
        if let Some(journal) = &mut self.journal {
            journal.sync(ino, &self.inodes);
        }
    }

    /// Everything becomes durable.
    pub(super) fn sync_all(&mut self) {
        self.finish();
        if let Some(journal) = &mut self.journal {
            journal.sync_all(&self.inodes);
        }
    }

    /// Ends an operation: what it changed becomes one record of the journal.
    pub(super) fn finish(&mut self) {
        let change = std::mem::take(&mut self.change);
        if let Some(journal) = &mut self.journal
            && !change.inodes.is_empty()
        {
            journal.record(change, &self.inodes);
        }
    }

    pub(super) fn statfs(&self) -> Statfs {
        let free = self.free_chunks();
        let files = self.options.inodes_max;
        Statfs {
            block_bytes: CHUNK_BYTES as u32,
            fragment_bytes: CHUNK_BYTES as u32,
            blocks: self.options.capacity_bytes / CHUNK_BYTES,
            blocks_free: free,
            blocks_available: free,
            files,
            files_free: files.saturating_sub(self.inodes.len() as u64),
            name_max_bytes: dray_core::NAME_MAX_BYTES as u32,
        }
    }
}
