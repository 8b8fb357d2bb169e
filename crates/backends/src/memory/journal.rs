//! The durable side of a simulated disk.
//!
//! Every operation leaves one record of the names and attributes that it changed. Records become durable
//! in order. Data become durable chunk by chunk.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use dray_core::NameBuf;

use super::content::Content;
use super::directory::{DirSlot, Directory};
use super::inode::{Body, Inode, Meta};
use super::store::StoreChange;

/// Records that wait at most; beyond it the oldest become durable by themselves, as the
/// periodical commit of a real journal does it.
const RECORDS_MAX: usize = 4096;

/// Attributes of a file after an operation.
struct Image {
    generation: u64,
    meta: Meta,
    kind: Kind,
    linkable: bool,
}

enum Kind {
    File { size: u64 },
    Directory { parent: u64 },
    Symlink(Arc<[u8]>),
    Special,
}

struct Record {
    /// None for a file that is gone.
    inodes: Vec<(u64, Option<Image>)>,
    names: Vec<(u64, NameBuf, Option<DirSlot>)>,
    punched: Vec<(u64, u64, u64)>,
}

/// Durable files, and what has been changed since.
pub(super) struct DiskJournal {
    durable: BTreeMap<u64, Inode>,
    records: VecDeque<Record>,
    /// Number of the first record in `records`; everything below is durable.
    first: u64,
    /// The last record that touched a file.
    touched: BTreeMap<u64, u64>,
    /// The last record that cut the file or made a hole in it.
    layout: BTreeMap<u64, u64>,
    /// Chunks written and not synced, each with the record that must be durable before its data can
    /// be. Data written behind a cut are in new blocks, which only the cut's record makes part of
    /// the file.
    dirty: BTreeMap<u64, BTreeMap<u64, u64>>,
}

impl DiskJournal {
    pub(super) fn new(durable: BTreeMap<u64, Inode>) -> DiskJournal {
        DiskJournal {
            durable,
            records: VecDeque::new(),
            first: 1,
            touched: BTreeMap::new(),
            layout: BTreeMap::new(),
            dirty: BTreeMap::new(),
        }
    }

    /// Number that the operation in progress will get.
    fn next(&self) -> u64 {
        self.first + self.records.len() as u64
    }

    /// The operation in progress cuts `ino` or makes a hole in it.
    pub(super) fn layout_changes(&mut self, ino: u64) {
        let next = self.next();
        self.layout.insert(ino, next);
        if let Some(dirty) = self.dirty.get_mut(&ino) {
            dirty.values_mut().for_each(|needs| *needs = next);
        }
    }

    /// The operation in progress writes these chunks.
    pub(super) fn dirty(&mut self, ino: u64, chunks: Range<u64>) {
        let needs = self.layout.get(&ino).copied().unwrap_or(0);
        self.dirty.entry(ino).or_default().extend(chunks.map(|chunk| (chunk, needs)));
    }

    /// Notes what an operation changed.
    pub(super) fn record(&mut self, change: StoreChange, inodes: &BTreeMap<u64, Inode>) {
        let next = self.next();
        let image = |&ino: &u64| (ino, inodes.get(&ino).map(picture));
        let record = Record {
            inodes: change.inodes.iter().map(image).collect(),
            names: change.names,
            punched: change.punched,
        };
        self.touched.extend(change.inodes.iter().map(|&ino| (ino, next)));
        self.records.push_back(record);
        if self.records.len() > RECORDS_MAX {
            self.commit_next();
        }
    }

    /// Number of records that are not durable yet.
    pub(super) fn waiting(&self) -> usize {
        self.records.len()
    }

    /// Makes everything up to the last change of `ino` durable, and its data.
    pub(super) fn sync(&mut self, ino: u64, inodes: &BTreeMap<u64, Inode>) {
        let upto = self.touched.get(&ino).copied().unwrap_or(0);
        while self.first <= upto && self.commit_next() {}
        let (Some(Ok(volatile)), Some(Ok(durable))) = (
            inodes.get(&ino).map(Inode::content),
            self.durable.get_mut(&ino).map(Inode::content_mut),
        ) else {
            return;
        };
        for chunk in self.dirty.remove(&ino).unwrap_or_default().into_keys() {
            durable.set_chunk(chunk, volatile.chunk(chunk));
        }
    }

    /// Makes `ino` durable as it is now, whatever its content was before.
    pub(super) fn replace_content(&mut self, ino: u64, inodes: &BTreeMap<u64, Inode>) {
        self.sync(ino, inodes);
        if let (Some(Ok(volatile)), Some(Ok(durable))) = (
            inodes.get(&ino).map(Inode::content),
            self.durable.get_mut(&ino).map(Inode::content_mut),
        ) {
            durable.clone_from(volatile);
        }
    }

    /// Makes everything durable.
    pub(super) fn sync_all(&mut self, inodes: &BTreeMap<u64, Inode>) {
        while self.commit_next() {}
        let dirty: Vec<u64> = self.dirty.keys().copied().collect();
        dirty.into_iter().for_each(|ino| self.sync(ino, inodes));
    }

    /// Makes the oldest record durable; false if there is none.
    pub(super) fn commit_next(&mut self) -> bool {
        let Some(record) = self.records.pop_front() else {
            return false;
        };
        self.first += 1;
        for (ino, image) in record.inodes {
            match image {
                Some(image) => self.restore(ino, image),
                None => self.forget(ino),
            }
        }
        for (dir, name, slot) in record.names {
            if let Some(Body::Directory(directory)) =
                self.durable.get_mut(&dir).map(|inode| &mut inode.body)
            {
                match slot {
                    Some(slot) => directory.put(&name, slot),
                    None => directory.remove(&name),
                }
            }
        }
        for (ino, at, len) in record.punched {
            if let Some(Ok(content)) = self.durable.get_mut(&ino).map(Inode::content_mut) {
                content.punch(at, len);
            }
        }
        true
    }

    fn forget(&mut self, ino: u64) {
        self.durable.remove(&ino);
        self.dirty.remove(&ino);
        self.layout.remove(&ino);
        self.touched.remove(&ino);
    }

    fn restore(&mut self, ino: u64, image: Image) {
        let inode = self.durable.entry(ino).or_insert_with(|| Inode {
            generation: image.generation,
            meta: Meta::default(),
            body: match &image.kind {
                Kind::File { .. } => Body::File(Content::default()),
                Kind::Directory { parent } => Body::Directory(Directory::new(*parent)),
                Kind::Symlink(target) => Body::Symlink(target.clone()),
                Kind::Special => Body::Special,
            },
            opens: 0,
            linkable: image.linkable,
        });
        inode.meta = image.meta;
        match (&mut inode.body, image.kind) {
            (Body::File(content), Kind::File { size }) => content.set_size(size),
            (Body::Directory(directory), Kind::Directory { parent }) => directory.parent = parent,
            _ => {}
        }
    }

    /// The power fails: lets unsynced chunks survive where `survives` says so and where the records
    /// that are durable by now allow it. Everything else is lost. Answers the files that are there
    /// afterwards.
    pub(super) fn crash(
        &mut self,
        inodes: &BTreeMap<u64, Inode>,
        mut survives: impl FnMut() -> bool,
    ) -> BTreeMap<u64, Inode> {
        for (ino, chunks) in std::mem::take(&mut self.dirty) {
            let (Some(Ok(volatile)), Some(Ok(durable))) = (
                inodes.get(&ino).map(Inode::content),
                self.durable.get_mut(&ino).map(Inode::content_mut),
            ) else {
                continue;
            };
            for (chunk, needs) in chunks {
                if survives() && needs < self.first {
                    durable.set_chunk(chunk, volatile.chunk(chunk));
                }
            }
        }
        self.durable.retain(|_, inode| inode.meta.nlink > 0);
        self.first = self.next();
        self.records.clear();
        self.touched.clear();
        self.layout.clear();
        self.durable.clone()
    }
}

fn picture(inode: &Inode) -> Image {
    Image {
        generation: inode.generation,
        meta: inode.meta.clone(),
        kind: match &inode.body {
            Body::File(content) => Kind::File { size: content.size() },
            Body::Directory(directory) => Kind::Directory { parent: directory.parent },
            Body::Symlink(target) => Kind::Symlink(target.clone()),
            Body::Special => Kind::Special,
        },
        linkable: inode.linkable,
    }
}
