//! The file system in memory with locks on top, for one node: enough to have lock
//! requests wait, be interrupted and be released.

use std::any::Any;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use dray_backends::memory::MemoryFs;
use dray_core::*;

/// Locks held: file, and lock.
#[derive(Default)]
pub struct Table {
    held: Mutex<Vec<(FileId, Lock)>>,
    changed: dray_rt::sync::Notify,
    /// Reads wait until this is taken back, or they are cancelled.
    pub stalled: AtomicBool,
    /// Reads are answered late: when this is taken back.
    pub reads_late: AtomicBool,
    /// Listings are answered late, with the names that were there before: when this is taken back.
    pub listings_late: AtomicBool,
    /// Writes are carried out late: when this is taken back.
    pub writes_held: AtomicBool,
    /// Flushes are answered late: when this is taken back.
    pub flushes_held: AtomicBool,
    /// Locks are given back late: when this is taken back, or not at all if that is cancelled.
    pub unlocks_held: AtomicBool,
    /// Removals are carried out late: when this is taken back.
    pub removals_held: AtomicBool,
    /// While this is locked, reading the attribute `user.gate` holds the worker's thread up.
    pub gate: Mutex<()>,
    /// So many files have been replaced between their lookup and their opening.
    pub replaced: AtomicUsize,
    /// So many names lead elsewhere when something is opened by them.
    pub moved: AtomicUsize,
    /// So many lookups find nothing.
    pub absent: AtomicUsize,
    /// So many answers about attributes call a directory a regular file.
    pub mistaken: AtomicUsize,
    /// Room is allocated in part, and the rest of it is not there.
    pub full: AtomicBool,
    /// Calls of flush so far.
    pub flushes: AtomicUsize,
    /// Calls of sync so far: whether of the data only.
    pub syncs: Mutex<Vec<bool>>,
    /// Writes that were to be on media (`O_SYNC`), and those that were not.
    pub synced_writes: Mutex<Vec<bool>>,
}

impl Table {
    pub fn count(&self) -> usize {
        self.held.lock().unwrap().len()
    }

    /// The owners that hold the locks.
    pub fn owners(&self) -> Vec<LockOwner> {
        self.held.lock().unwrap().iter().map(|(_, lock)| lock.owner).collect()
    }

    async fn while_set(&self, flag: &AtomicBool) {
        while flag.load(Ordering::SeqCst) {
            dray_rt::sleep(std::time::Duration::from_millis(1)).await;
        }
    }

    /// Whether there was one left of `count`.
    fn takes_one(count: &AtomicUsize) -> bool {
        let order = Ordering::SeqCst;
        count.fetch_update(order, order, |left| left.checked_sub(1)).is_ok()
    }

    fn conflict(&self, id: FileId, lock: &Lock) -> Option<Lock> {
        let held = self.held.lock().unwrap();
        let other = held.iter().find(|(file, other)| {
            *file == id && other.owner != lock.owner && other.conflicts(lock)
        });
        other.map(|(_, lock)| *lock)
    }

    /// Whole ranges only: what the tests need.
    fn set(&self, id: FileId, lock: Lock) {
        let mut held = self.held.lock().unwrap();
        held.retain(|(file, other)| {
            *file != id || other.owner != lock.owner || other.family != lock.family
        });
        if lock.kind != LockKind::Unlock {
            held.push((id, lock));
        }
        drop(held);
        self.changed.notify_waiters();
    }

    fn release(&self, id: FileId, keep: impl Fn(&Lock) -> bool) {
        self.held.lock().unwrap().retain(|(file, lock)| *file != id || keep(lock));
        self.changed.notify_waiters();
    }
}

pub struct LockingFs {
    pub inner: MemoryFs,
    pub table: Arc<Table>,
}

struct LockingFile {
    inner: Arc<dyn OpenFile>,
    table: Arc<Table>,
    /// flock owners that came through this open file.
    flocks: Mutex<Vec<LockOwner>>,
}

impl LockingFs {
    fn wrap(&self, inner: Arc<dyn OpenFile>) -> Arc<dyn OpenFile> {
        Arc::new(LockingFile { inner, table: self.table.clone(), flocks: Mutex::default() })
    }
}

macro_rules! pass_on {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $name<'a>(&'a self, cx: &'a Context, $($arg: $type),*) -> Fut<'a, $result> {
            self.inner.$name(cx, $($arg),*)
        })*
    };
}

impl FileSystem for LockingFs {
    fn info(&self) -> &FsInfo {
        self.inner.info()
    }

    fn path(&self, id: FileId) -> Option<Vec<u8>> {
        self.inner.path(id)
    }

    fn clock(&self) -> Option<Timestamp> {
        self.inner.clock()
    }

    fn user_of(&self, cx: &Context) -> Uid {
        self.inner.user_of(cx)
    }

    pass_on! {
        parent(dir: FileId) -> Result<Entry>;
        setattr(id: FileId, set: SetAttr) -> Result<Attr>;
        readlink(id: FileId) -> Result<Vec<u8>>;
        make(dir: FileId, name: &'a Name, what: Make<'a>) -> Result<Entry>;
        rename(from: (FileId, &'a Name), to: (FileId, &'a Name), how: RenameHow) -> Result<()>;
        link(id: FileId, dir: FileId, name: &'a Name) -> Result<Entry>;
        access(id: FileId, want: Access) -> Result<()>;
        statfs() -> Result<Statfs>;
        sync_all() -> Result<()>;
        setxattr(id: FileId, name: &'a [u8], value: &'a [u8], how: XattrSet) -> Result<()>;
        listxattr(id: FileId) -> Result<Vec<u8>>;
        removexattr(id: FileId, name: &'a [u8]) -> Result<()>;
    }

    fn lookup<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        if Table::takes_one(&self.table.absent) {
            return Box::pin(async { Err(Errno::ENOENT.into()) });
        }
        self.inner.lookup(cx, dir, name)
    }

    fn getattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Attr>> {
        Box::pin(async move {
            let mut attr = self.inner.getattr(cx, id).await?;
            let kind = attr.file_type();
            if kind == FileType::Directory && Table::takes_one(&self.table.mistaken) {
                attr.mode ^= kind.mode_bits() ^ FileType::Regular.mode_bits();
            }
            Ok(attr)
        })
    }

    fn getxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<Vec<u8>>> {
        if name == b"user.gate" {
            drop(self.table.gate.lock());
        }
        self.inner.getxattr(cx, id, name)
    }

    fn open<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        if Table::takes_one(&self.table.replaced) {
            return Box::pin(async { Err(Errno::ESTALE.into()) });
        }
        Box::pin(async move { Ok(self.wrap(self.inner.open(cx, id, how).await?)) })
    }

    fn learn<'a>(
        &'a self,
        _: &'a Context,
        _: (FileId, &'a Name),
        _: FileId,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async { Err(Errno::ENOTSUP.into()) })
    }

    fn open_named<'a>(
        &'a self,
        cx: &'a Context,
        place: (FileId, &'a Name),
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        if Table::takes_one(&self.table.moved) {
            return Box::pin(async { Err(Errno::ESTALE.into()) });
        }
        Box::pin(open_named(self, cx, place, id, how))
    }

    fn remove<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        kind: RemoveKind,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            while self.table.removals_held.load(Ordering::SeqCst) {
                dray_rt::sleep(std::time::Duration::from_millis(5)).await;
            }
            self.inner.remove(cx, dir, name, kind).await
        })
    }

    fn create<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        Box::pin(async move {
            let (entry, file) = self.inner.create(cx, dir, name, how).await?;
            Ok((entry, self.wrap(file)))
        })
    }

    fn put<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        mode: u32,
        data: Buf,
    ) -> Fut<'a, Result<()>> {
        Box::pin(put_in_steps(self, cx, (dir, name), mode, data))
    }

    fn tmpfile<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        Box::pin(async move {
            let (entry, file) = self.inner.tmpfile(cx, dir, how).await?;
            Ok((entry, self.wrap(file)))
        })
    }
}

impl OpenFile for LockingFile {
    fn id(&self) -> FileId {
        self.inner.id()
    }

    fn at_open(&self) -> Option<AtOpen> {
        self.inner.at_open()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    pass_on! {
        getattr() -> Result<Attr>;
        setattr(set: SetAttr) -> Result<Attr>;
        seek(at: u64, what: Seek) -> Result<u64>;
        get_flags() -> Result<u32>;
        set_flags(flags: u32) -> Result<()>;
        get_xflags() -> Result<Xflags>;
        set_xflags(set: Xflags) -> Result<()>;
    }

    fn allocate<'a>(&'a self, cx: &'a Context, what: Allocate) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let full = self.table.full.load(Ordering::SeqCst);
            let len_bytes = if full { what.len_bytes / 2 } else { what.len_bytes };
            self.inner.allocate(cx, Allocate { len_bytes, ..what }).await?;
            if full { Err(Errno::ENOSPC.into()) } else { Ok(()) }
        })
    }

    fn write<'a>(&'a self, cx: &'a Context, how: Write, from: Buf) -> Fut<'a, Result<usize>> {
        self.table.synced_writes.lock().unwrap().push(how.sync);
        Box::pin(async move {
            self.table.while_set(&self.table.writes_held).await;
            self.inner.write(cx, how, from).await
        })
    }

    fn local_copy<'a>(&'a self, _: &'a Context) -> Fut<'a, Option<Arc<dyn LocalCopy>>> {
        Box::pin(async { None })
    }

    fn read<'a>(&'a self, cx: &'a Context, at: u64, into: BufMut) -> Fut<'a, Io<BufMut>> {
        Box::pin(async move {
            while self.table.stalled.load(Ordering::SeqCst) {
                if cx.check().is_err() {
                    return Err((Errno::EINTR.into(), into));
                }
                dray_rt::sleep(std::time::Duration::from_millis(1)).await;
            }
            let read = self.inner.read(cx, at, into).await;
            self.table.while_set(&self.table.reads_late).await;
            read
        })
    }

    fn readdir<'a>(
        &'a self,
        cx: &'a Context,
        cookie: u64,
        max_bytes: usize,
        plus: bool,
    ) -> Fut<'a, Result<DirPage>> {
        Box::pin(async move {
            let page = self.inner.readdir(cx, cookie, max_bytes, plus).await;
            self.table.while_set(&self.table.listings_late).await;
            page
        })
    }

    fn copy_range<'a>(
        &'a self,
        cx: &'a Context,
        at: u64,
        to: &'a dyn OpenFile,
        to_at: u64,
        len_bytes: u64,
    ) -> Fut<'a, Result<u64>> {
        match to.as_any().downcast_ref::<LockingFile>() {
            Some(to) => self.inner.copy_range(cx, at, &*to.inner, to_at, len_bytes),
            None => Box::pin(async { Err(Errno::EXDEV.into()) }),
        }
    }

    fn sync<'a>(&'a self, cx: &'a Context, data_only: bool) -> Fut<'a, Result<()>> {
        self.table.syncs.lock().unwrap().push(data_only);
        self.inner.sync(cx, data_only)
    }

    fn flush<'a>(&'a self, _cx: &'a Context, owner: LockOwner) -> Fut<'a, Result<()>> {
        self.table.flushes.fetch_add(1, Ordering::SeqCst);
        self.table
            .release(self.id(), |lock| lock.owner != owner || lock.family != LockFamily::Posix);
        Box::pin(async {
            while self.table.flushes_held.load(Ordering::SeqCst) {
                dray_rt::sleep(std::time::Duration::from_millis(1)).await;
            }
            Ok(())
        })
    }

    fn lock<'a>(&'a self, cx: &'a Context, lock: Lock, wait: bool) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            while lock.kind == LockKind::Unlock && self.table.unlocks_held.load(Ordering::SeqCst) {
                cx.check()?;
                dray_rt::sleep(std::time::Duration::from_millis(1)).await;
            }
            loop {
                let changed = self.table.changed.notified();
                let mut changed = std::pin::pin!(changed);
                changed.as_mut().enable();
                if self.table.conflict(self.id(), &lock).is_none() {
                    self.table.set(self.id(), lock);
                    if lock.family == LockFamily::Flock {
                        self.flocks.lock().unwrap().push(lock.owner);
                    }
                    return Ok(());
                }
                if !wait {
                    return Err(Errno::EAGAIN.into());
                }
                let cancel = cx.cancel.clone().unwrap();
                std::future::poll_fn(|task| {
                    if cancel.poll_set(task) {
                        return std::task::Poll::Ready(());
                    }
                    changed.as_mut().poll(task)
                })
                .await;
                cx.check()?;
            }
        })
    }

    fn test_lock<'a>(&'a self, _cx: &'a Context, lock: Lock) -> Fut<'a, Result<Option<Lock>>> {
        Box::pin(async move { Ok(self.table.conflict(self.id(), &lock)) })
    }

    fn close<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        let flocks = self.flocks.lock().unwrap().clone();
        self.table.release(self.id(), |lock| {
            lock.family != LockFamily::Flock || !flocks.contains(&lock.owner)
        });
        self.inner.close(cx)
    }
}
