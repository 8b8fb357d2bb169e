//! An open file: its stub, which is open at the home, and its objects, which are opened when they are used.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use dray_core::{
    Allocate, AtOpen, Attr, Buf, BufMut, Context, CreateHow, DirPage, Errno, Error, FileId, Fut,
    IO_MAX_BYTES, Io, LocalCopy, Lock, LockOwner, Op, OpenFile, OpenHow, Result, Seek, SetAttr,
    Write, Xflags,
};
use dray_rt::sync::Semaphore;

use super::fs::of_stub_attr;
use super::object::OBJECT_MODE;
use super::{ObjectId, OwnDisks, unrepeated};
use crate::placement::ServerIndex;

/// Data that one call copies at most: they pass this client.
const COPY_MAX_BYTES: u64 = IO_MAX_BYTES as u64;

pub(super) struct OwnDisksFile {
    pub(super) shared: Arc<OwnDisks>,
    pub(super) stub: Arc<dyn OpenFile>,
    how: OpenHow,
    at_open: Option<AtOpen>,
    /// For each server the object there, once it is open.
    parts: Box<[OnceLock<Arc<dyn OpenFile>>]>,
    /// One task opens objects.
    opening: Semaphore,
    /// One task appends: the lock that keeps other open files out does not keep this one out.
    pub(super) appending: Semaphore,
    /// The first write through this open file has cleared the set-id bits of the stub.
    cleared_set_id: AtomicBool,
    /// The id of the objects is on the media of the home.
    synced_id: AtomicBool,
}

impl OwnDisksFile {
    pub(super) fn open(
        shared: &Arc<OwnDisks>,
        (how, at_open): (OpenHow, Option<AtOpen>),
        stub: Arc<dyn OpenFile>,
    ) -> Arc<dyn OpenFile> {
        let parts = shared.servers.iter().map(|_| OnceLock::new()).collect();
        Arc::new(OwnDisksFile {
            shared: shared.clone(),
            stub,
            how,
            at_open,
            parts,
            opening: Semaphore::new(1),
            appending: Semaphore::new(1),
            cleared_set_id: AtomicBool::new(false),
            synced_id: AtomicBool::new(false),
        })
    }

    pub(super) async fn object_of(&self, cx: &Context) -> Result<Option<ObjectId>> {
        self.shared.object_of(cx, self.stub.id()).await
    }

    /// The object at `target`, opened; none if it is not there.
    pub(super) async fn part(
        &self,
        cx: &Context,
        target: ServerIndex,
        object: ObjectId,
    ) -> Result<Option<Arc<dyn OpenFile>>> {
        self.open_part(cx, target, object, false).await
    }

    /// The object at `target`, opened, and made before if need be.
    pub(super) async fn made_part(
        &self,
        cx: &Context,
        target: ServerIndex,
        object: ObjectId,
    ) -> Result<Arc<dyn OpenFile>> {
        let part = self.open_part(cx, target, object, true).await?;
        part.ok_or_else(|| Error::new(Errno::EIO).because("an object that was made is not there"))
    }

    async fn open_part(
        &self,
        cx: &Context,
        target: ServerIndex,
        object: ObjectId,
        make: bool,
    ) -> Result<Option<Arc<dyn OpenFile>>> {
        let part = &self.parts[usize::from(target.0)];
        if let Some(open) = part.get() {
            return Ok(Some(open.clone()));
        }
        let _alone = self.opening.acquire().await;
        if let Some(open) = part.get() {
            return Ok(Some(open.clone()));
        }
        let (fs, how, cx) = (self.shared.at(target), self.how_of_part(), unrepeated(cx));
        let opened = match make {
            true => {
                let dir = self.shared.shard(&cx, target, object).await?;
                let create = CreateHow { open: how, mode: OBJECT_MODE, exclusive: false };
                match fs.create(&cx, dir, &object.file_name()?, create).await {
                    Ok((_, part)) => part,
                    Err(error) => {
                        return Err(self.shared.of_shard(&cx, (target, dir), error).await);
                    }
                }
            }
            false => match self.shared.find(&cx, target, object).await? {
                Some(entry) => fs.open(&cx, entry.id, how).await?,
                None => return Ok(None),
            },
        };
        Ok(Some(part.get_or_init(|| opened).clone()))
    }

    /// Rights were checked at the home. A caller that may write may have to look where data are.
    fn how_of_part(&self) -> OpenHow {
        let access = if self.how.writes() { libc::O_RDWR } else { libc::O_RDONLY };
        let kept = self.how.flags & (libc::O_DIRECT | libc::O_SYNC | libc::O_NOATIME);
        OpenHow::new(access | kept)
    }

    /// Objects that are open.
    fn open_parts(&self) -> impl Iterator<Item = &Arc<dyn OpenFile>> {
        self.parts.iter().filter_map(OnceLock::get)
    }

    pub(super) fn must_read(&self) -> Result<()> {
        match self.how.reads() || self.how.executes() {
            true => Ok(()),
            false => Err(Error::new(Errno::EBADF)),
        }
    }

    pub(super) fn must_write(&self) -> Result<()> {
        match self.how.writes() {
            true => Ok(()),
            false => Err(Error::new(Errno::EBADF)),
        }
    }

    /// Before the first write through this file: a write of anybody but the super-user clears set-id
    /// bits, which are the stub's.
    pub(super) async fn clear_set_id(&self, cx: &Context, kill: bool) -> Result<()> {
        let privileged = cx.who.is_root() && !kill;
        if privileged || self.cleared_set_id.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let set = SetAttr { size: Some(0), kill_set_id: true, ..SetAttr::default() };
        self.stub.setattr(cx, set).await.map(drop)
    }

    /// As copy_file_range(2) has it: `EINVAL` if a range is copied onto a part of itself.
    async fn must_not_overlap(
        &self,
        cx: &Context,
        (at, to_at): (u64, u64),
        len_bytes: u64,
    ) -> Result<()> {
        let size = self.getattr(cx).await?.size;
        let count = len_bytes.min(size.saturating_sub(at));
        match to_at.saturating_add(count) > at && to_at < at.saturating_add(count) {
            true => Err(Error::new(Errno::EINVAL).during(Op::CopyRange)),
            false => Ok(()),
        }
    }

    /// Without the attribute of its stub nobody finds the data of a file.
    async fn sync_stub(&self, cx: &Context) -> Result<()> {
        self.stub.sync(cx, false).await?;
        self.synced_id.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Opens the objects that others may have written, too, and brings all to media.
    async fn sync_parts(&self, cx: &Context, data_only: bool) -> Result<()> {
        let Some(object) = self.object_of(cx).await? else { return Ok(()) };
        let syncs = self.shared.targets_of(object).map(|target| {
            Box::pin(async move {
                match self.part(cx, target, object).await? {
                    Some(part) => part.sync(&unrepeated(cx), data_only).await,
                    None => Ok(()),
                }
            }) as Fut<'_, Result<()>>
        });
        dray_rt::join_all(syncs.collect()).await.into_iter().collect()
    }
}

impl OpenFile for OwnDisksFile {
    fn id(&self) -> FileId {
        self.stub.id()
    }

    fn at_open(&self) -> Option<AtOpen> {
        self.at_open
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn local_copy<'a>(&'a self, _: &'a Context) -> Fut<'a, Option<Arc<dyn LocalCopy>>> {
        Box::pin(async { None })
    }

    fn read<'a>(&'a self, cx: &'a Context, at: u64, into: BufMut) -> Fut<'a, Io<BufMut>> {
        Box::pin(self.read_at(cx, at, into))
    }

    fn write<'a>(&'a self, cx: &'a Context, how: Write, from: Buf) -> Fut<'a, Result<usize>> {
        Box::pin(async move {
            self.must_write()?;
            self.clear_set_id(cx, how.kill_set_id).await?;
            let object = self.shared.make_object(cx, self.stub.id()).await?;
            let written = match how.append {
                true => self.append(cx, object, (how, from)).await?,
                false => self.write_at(cx, object, (how, from)).await?,
            };
            if how.sync && !self.synced_id.load(Ordering::Relaxed) {
                self.sync_stub(cx).await?;
            }
            Ok(written)
        })
    }

    fn readdir<'a>(
        &'a self,
        cx: &'a Context,
        cookie: u64,
        max_bytes: usize,
        plus: bool,
    ) -> Fut<'a, Result<DirPage>> {
        self.stub.readdir(cx, cookie, max_bytes, plus)
    }

    fn getattr<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Attr>> {
        Box::pin(async move {
            let stub = self.stub.getattr(cx).await?;
            self.shared.whole(cx, self.stub.id(), stub).await
        })
    }

    fn setattr<'a>(&'a self, cx: &'a Context, set: SetAttr) -> Fut<'a, Result<Attr>> {
        Box::pin(async move {
            let stub = self.stub.setattr(cx, of_stub_attr(set)).await?;
            self.shared.followed(cx, self.stub.id(), (set, stub)).await
        })
    }

    /// Errors of writing are those of objects.
    fn flush<'a>(&'a self, cx: &'a Context, owner: LockOwner) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let mut flushed = self.stub.flush(cx, owner).await;
            for part in self.open_parts() {
                flushed = flushed.and(part.flush(&unrepeated(cx), owner).await);
            }
            flushed
        })
    }

    fn sync<'a>(&'a self, cx: &'a Context, data_only: bool) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let parts = self.sync_parts(cx, data_only).await;
            parts.and(self.sync_stub(cx).await)
        })
    }

    fn allocate<'a>(&'a self, cx: &'a Context, what: Allocate) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            self.must_write()?;
            self.clear_set_id(cx, false).await?;
            let object = self.shared.make_object(cx, self.stub.id()).await?;
            self.allocate_parts(cx, object, what).await
        })
    }

    fn seek<'a>(&'a self, cx: &'a Context, at: u64, what: Seek) -> Fut<'a, Result<u64>> {
        Box::pin(async move {
            match self.object_of(cx).await? {
                Some(object) => self.seek_in(cx, object, (at, what)).await,
                None => self.stub.seek(cx, at, what).await, // it is empty, or no file
            }
        })
    }

    /// Through this client: the data of two files are rarely at one server.
    fn copy_range<'a>(
        &'a self,
        cx: &'a Context,
        at: u64,
        to: &'a dyn OpenFile,
        to_at: u64,
        len_bytes: u64,
    ) -> Fut<'a, Result<u64>> {
        Box::pin(async move {
            let Some(to) = to.as_any().downcast_ref::<OwnDisksFile>() else {
                return Err(Error::new(Errno::EXDEV).during(Op::CopyRange));
            };
            if !self.how.reads() || !to.how.writes() || to.how.appends() {
                return Err(Error::new(Errno::EBADF).during(Op::CopyRange)); // as copy_file_range(2)
            }
            if self.id() == to.id() {
                self.must_not_overlap(cx, (at, to_at), len_bytes).await?;
            }
            let into = BufMut::heap(len_bytes.min(COPY_MAX_BYTES) as usize);
            let data = self.read(cx, at, into).await.map_err(|(error, _)| error)?;
            match data.is_empty() {
                true => Ok(0),
                false => Ok(to.write(cx, Write::at(to_at), data.freeze()).await? as u64),
            }
        })
    }

    fn lock<'a>(&'a self, cx: &'a Context, lock: Lock, wait: bool) -> Fut<'a, Result<()>> {
        self.stub.lock(cx, lock, wait)
    }

    fn test_lock<'a>(&'a self, cx: &'a Context, lock: Lock) -> Fut<'a, Result<Option<Lock>>> {
        self.stub.test_lock(cx, lock)
    }

    fn get_flags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<u32>> {
        self.stub.get_flags(cx)
    }

    fn set_flags<'a>(&'a self, cx: &'a Context, flags: u32) -> Fut<'a, Result<()>> {
        self.stub.set_flags(cx, flags)
    }

    fn get_xflags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Xflags>> {
        self.stub.get_xflags(cx)
    }

    fn set_xflags<'a>(&'a self, cx: &'a Context, set: Xflags) -> Fut<'a, Result<()>> {
        self.stub.set_xflags(cx, set)
    }

    /// The last one to close a file without a name removes its objects. Their id has to be known before.
    fn close<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let id = self.stub.id();
            let object = self.object_of(cx).await.ok().flatten();
            let mut closed = Ok(());
            for part in self.open_parts() {
                closed = closed.and(part.close(&unrepeated(cx)).await);
            }
            let closed = closed.and(self.stub.close(cx).await);
            if let Some(object) = object {
                self.shared.bury(id, object);
            }
            closed
        })
    }
}
