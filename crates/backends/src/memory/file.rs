//! An open file of a [`MemoryFs`].

use std::any::Any;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dray_core::{
    Allocate, AtOpen, Attr, Buf, BufMut, Context, DirPage, Errno, Error, FileId, Fut, Io,
    LocalCopy, Lock, LockFamily, LockKind, LockOwner, OpenFile, OpenHow, Result, Seek, SetAttr,
    Write, Xflags,
};

use super::store::Store;
use super::{MemoryFs, Shared};
use crate::locks::{Flocks, LockTable, Owner};

/// Bytes that an entry of a listing counts besides its name.
const DIRENT_BYTES: usize = 24;
/// The same with attributes.
const DIRENT_PLUS_BYTES: usize = 152;

/// An open file or directory in memory.
pub struct MemoryFile {
    shared: Arc<Shared>,
    epoch: u64,
    id: FileId,
    how: OpenHow,
    /// Where more is to be said of its pages than what the mount's mode has.
    at_open: Option<Box<AtOpen>>,
    closed: AtomicBool,
    locks: Arc<LockTable>,
    /// The owners of the flock locks that were taken through this open file: the locks end with it.
    flocks: Flocks,
}

impl MemoryFs {
    /// Counts one more open file on `ino`, which the caller was found to have a right to.
    pub(super) fn opened(&self, store: &mut Store, ino: u64, how: OpenHow) -> Result<MemoryFile> {
        let inode = store.unlogged(ino)?;
        inode.opens += 1;
        let id = FileId { ino, generation: inode.generation };
        let attr = inode.meta.validity.pages.map(|_| inode.attr(ino));
        let at_open = |attr: Attr| {
            let times_past = Some(attr.is_past(super::inode::now()));
            Box::new(AtOpen { attr, no_capability: false, times_past })
        };
        Ok(MemoryFile {
            shared: self.shared.clone(),
            epoch: self.epoch,
            id,
            how,
            at_open: attr.map(at_open),
            closed: AtomicBool::new(false),
            locks: self.locks.clone(),
            flocks: Flocks::default(),
        })
    }
}

impl MemoryFile {
    fn with<T>(&self, op: impl FnOnce(&mut Store) -> Result<T>) -> Result<T> {
        self.shared.with(self.epoch, op)
    }

    fn with_change<T>(&self, op: impl FnOnce(&mut Store) -> Result<T>) -> Result<T> {
        self.shared.with_change(self.epoch, op)
    }

    fn release(&self) {
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.flocks.release(&self.locks, self.id);
        // After the end of its machine there is nothing left to give back.
        let _ = self.with(|store| {
            let inode = store.unlogged(self.id.ino)?;
            inode.opens = inode.opens.saturating_sub(1);
            store.drop_if_unused(self.id.ino);
            Ok(())
        });
    }

    fn readable(&self) -> Result<()> {
        if self.how.reads() { Ok(()) } else { Err(Errno::EBADF.into()) }
    }

    fn writable(&self) -> Result<()> {
        if self.how.writes() { Ok(()) } else { Err(Errno::EBADF.into()) }
    }

    pub(super) fn read_now(&self, at: u64, into: &mut BufMut) -> Result<()> {
        self.readable()?;
        self.with(|store| store.read(self.id.ino, at, into))
    }

    pub(super) fn write_now(&self, cx: &Context, how: Write, from: &Buf) -> Result<usize> {
        self.writable()?;
        self.with_change(|store| store.write(cx, self.id.ino, how, from))
    }

    fn list(&self, cookie: u64, max_bytes: usize, plus: bool) -> Result<DirPage> {
        self.readable()?;
        self.with(|store| {
            let directory = store.inode(self.id.ino)?.directory()?;
            let record_bytes = if plus { DIRENT_PLUS_BYTES } else { DIRENT_BYTES };
            let mut page = DirPage::default();
            let mut bytes = 0;
            for (name, ino, next) in directory.behind(cookie) {
                bytes += name.as_bytes().len() + record_bytes;
                if bytes > max_bytes && !page.is_empty() {
                    return Ok(page);
                }
                let entry = store.entry(ino)?;
                let kind = Some(entry.attr.file_type());
                page.push(name.as_bytes(), entry.id, kind, next, plus.then_some(entry.attr));
            }
            page.end = true;
            Ok(page)
        })
    }

    fn copy(&self, cx: &Context, at: u64, to: &dyn OpenFile, to_at: u64, len: u64) -> Result<u64> {
        let other_fs = Error::new(Errno::EXDEV);
        let to = to.as_any().downcast_ref::<MemoryFile>().ok_or(other_fs.clone())?;
        if !Arc::ptr_eq(&self.shared, &to.shared) {
            return Err(other_fs);
        }
        self.with_change(|store| {
            // Linux looks at the kind of both files before it looks at their modes.
            store.inode(to.id.ino)?.content()?;
            store.inode(self.id.ino)?.content()?;
            self.readable()?;
            to.writable()?;
            if to.how.appends() {
                return Err(Errno::EBADF.into());
            }
            store.copy_range(cx, (self.id.ino, at), (to.id.ino, to_at), len)
        })
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        self.release();
    }
}

/// Answers at once: nothing but locks waits.
fn answer<'a, T: Send + 'a>(result: T) -> Fut<'a, T> {
    Box::pin(ready(result))
}

impl OpenFile for MemoryFile {
    fn id(&self) -> FileId {
        self.id
    }

    fn at_open(&self) -> Option<AtOpen> {
        self.at_open.as_deref().copied()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn local_copy<'a>(&'a self, _: &'a Context) -> Fut<'a, Option<Arc<dyn LocalCopy>>> {
        Box::pin(async { None })
    }

    fn read<'a>(&'a self, _cx: &'a Context, at: u64, mut into: BufMut) -> Fut<'a, Io<BufMut>> {
        if let Some(pause) = self.shared.read_pause {
            return Box::pin(self.read_in_pieces(pause, at, into));
        }
        answer(match self.read_now(at, &mut into) {
            Ok(()) => Ok(into),
            Err(error) => Err((error, into)),
        })
    }

    fn write<'a>(&'a self, cx: &'a Context, how: Write, from: Buf) -> Fut<'a, Result<usize>> {
        match self.shared.read_pause {
            Some(_) => Box::pin(self.write_in_pieces(cx, how, from)),
            None => answer(self.write_now(cx, how, &from)),
        }
    }

    fn readdir<'a>(
        &'a self,
        _cx: &'a Context,
        cookie: u64,
        max_bytes: usize,
        plus: bool,
    ) -> Fut<'a, Result<DirPage>> {
        answer(self.list(cookie, max_bytes, plus))
    }

    fn getattr<'a>(&'a self, _cx: &'a Context) -> Fut<'a, Result<Attr>> {
        answer(self.with(|store| store.getattr(self.id.ino)))
    }

    fn setattr<'a>(&'a self, cx: &'a Context, set: SetAttr) -> Fut<'a, Result<Attr>> {
        let writable = Some(self.how.writes());
        answer(self.with_change(|store| store.setattr(cx, self.id.ino, set, writable)))
    }

    fn flush<'a>(&'a self, cx: &'a Context, owner: LockOwner) -> Fut<'a, Result<()>> {
        self.locks.release(self.id, LockFamily::Posix, Owner::of(cx, owner));
        answer(self.with(|_| Ok(())))
    }

    fn sync<'a>(&'a self, _cx: &'a Context, _data_only: bool) -> Fut<'a, Result<()>> {
        answer(self.with(|store| {
            store.sync(self.id.ino);
            Ok(())
        }))
    }

    fn allocate<'a>(&'a self, cx: &'a Context, what: Allocate) -> Fut<'a, Result<()>> {
        answer(
            self.writable()
                .and_then(|()| self.with_change(|store| store.allocate(cx, self.id.ino, what))),
        )
    }

    fn seek<'a>(&'a self, _cx: &'a Context, at: u64, what: Seek) -> Fut<'a, Result<u64>> {
        answer(self.with(|store| store.seek(self.id.ino, at, what)))
    }

    fn copy_range<'a>(
        &'a self,
        cx: &'a Context,
        at: u64,
        to: &'a dyn OpenFile,
        to_at: u64,
        len_bytes: u64,
    ) -> Fut<'a, Result<u64>> {
        answer(self.copy(cx, at, to, to_at, len_bytes))
    }

    fn lock<'a>(&'a self, cx: &'a Context, lock: Lock, wait: bool) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            if lock.family == LockFamily::Flock && lock.kind != LockKind::Unlock {
                self.flocks.add(&self.locks, self.id, Owner::of(cx, lock.owner));
            }
            self.locks.lock(cx, self.id, lock, wait).await
        })
    }

    fn test_lock<'a>(&'a self, cx: &'a Context, lock: Lock) -> Fut<'a, Result<Option<Lock>>> {
        answer(Ok(self.locks.test(cx, self.id, lock)))
    }

    fn get_flags<'a>(&'a self, _cx: &'a Context) -> Fut<'a, Result<u32>> {
        answer(self.with(|store| store.get_flags(self.id.ino)))
    }

    fn set_flags<'a>(&'a self, cx: &'a Context, flags: u32) -> Fut<'a, Result<()>> {
        answer(self.with_change(|store| store.set_flags(cx, self.id.ino, flags)))
    }

    /// A memory file has no such flags, but for those of [`OpenFile::get_flags`].
    fn get_xflags<'a>(&'a self, _: &'a Context) -> Fut<'a, Result<Xflags>> {
        answer(Err(Errno::ENOTTY.into()))
    }

    fn set_xflags<'a>(&'a self, _: &'a Context, _: Xflags) -> Fut<'a, Result<()>> {
        answer(Err(Errno::ENOTTY.into()))
    }

    fn close<'a>(&'a self, _cx: &'a Context) -> Fut<'a, Result<()>> {
        self.release();
        answer(Ok(()))
    }
}
