//! An open directory. It is open at the home.

use std::any::Any;
use std::sync::Arc;

use dray_core::{
    Allocate, AtOpen, Attr, Buf, BufMut, Context, DirPage, Errno, Error, FileId, FileType, Fut, Io,
    LocalCopy, Lock, LockOwner, OpenFile, Result, Seek, SetAttr, Write, Xflags,
};

use super::OwnDisks;

pub(super) struct OwnDirectory {
    shared: Arc<OwnDisks>,
    id: FileId,
    inner: Arc<dyn OpenFile>,
}

impl OwnDirectory {
    /// `inner` is open at the home, where the projection's root is another directory than `id`.
    pub(super) fn open(
        shared: &Arc<OwnDisks>,
        id: FileId,
        inner: Arc<dyn OpenFile>,
    ) -> Arc<dyn OpenFile> {
        Arc::new(OwnDirectory { shared: shared.clone(), id, inner })
    }
}

/// Files of a listing whose attributes are asked for at once.
const ASKED_AT_ONCE: usize = 64;

impl OpenFile for OwnDirectory {
    fn id(&self) -> FileId {
        self.id
    }

    fn at_open(&self) -> Option<AtOpen> {
        self.inner.at_open()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn local_copy<'a>(&'a self, _: &'a Context) -> Fut<'a, Option<Arc<dyn LocalCopy>>> {
        Box::pin(async { None })
    }

    fn read<'a>(&'a self, cx: &'a Context, at: u64, into: BufMut) -> Fut<'a, Io<BufMut>> {
        self.inner.read(cx, at, into)
    }

    fn write<'a>(&'a self, cx: &'a Context, how: Write, from: Buf) -> Fut<'a, Result<usize>> {
        self.inner.write(cx, how, from)
    }

    /// The sizes of files are asked for at the targets, many at once.
    fn readdir<'a>(
        &'a self,
        cx: &'a Context,
        cookie: u64,
        max_bytes: usize,
        plus: bool,
    ) -> Fut<'a, Result<DirPage>> {
        Box::pin(async move {
            let mut page = self.inner.readdir(cx, cookie, max_bytes, plus).await?;
            let of_files: Vec<(usize, FileId, Attr)> = page
                .iter()
                .enumerate()
                .filter_map(|(index, (_, entry))| Some((index, entry.id, entry.attr?)))
                .filter(|(_, _, attr)| attr.file_type() == FileType::Regular)
                .collect();
            for some in of_files.chunks(ASKED_AT_ONCE) {
                let calls = some.iter().map(|(_, id, attr)| {
                    Box::pin(self.shared.whole(cx, *id, *attr)) as Fut<'_, Result<Attr>>
                });
                let answers = dray_rt::join_all(calls.collect()).await;
                for ((index, _, _), attr) in some.iter().zip(answers) {
                    page.set_attr(*index, attr.ok()); // none of a file that is gone
                }
            }
            Ok(page)
        })
    }

    fn getattr<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Attr>> {
        self.inner.getattr(cx)
    }

    fn setattr<'a>(&'a self, cx: &'a Context, set: SetAttr) -> Fut<'a, Result<Attr>> {
        self.inner.setattr(cx, set)
    }

    fn flush<'a>(&'a self, cx: &'a Context, owner: LockOwner) -> Fut<'a, Result<()>> {
        self.inner.flush(cx, owner)
    }

    fn sync<'a>(&'a self, cx: &'a Context, data_only: bool) -> Fut<'a, Result<()>> {
        self.inner.sync(cx, data_only)
    }

    fn allocate<'a>(&'a self, cx: &'a Context, what: Allocate) -> Fut<'a, Result<()>> {
        self.inner.allocate(cx, what)
    }

    fn seek<'a>(&'a self, cx: &'a Context, at: u64, what: Seek) -> Fut<'a, Result<u64>> {
        self.inner.seek(cx, at, what)
    }

    fn copy_range<'a>(
        &'a self,
        _: &'a Context,
        _: u64,
        _: &'a dyn OpenFile,
        _: u64,
        _: u64,
    ) -> Fut<'a, Result<u64>> {
        Box::pin(async { Err(Error::new(Errno::EISDIR)) })
    }

    fn lock<'a>(&'a self, cx: &'a Context, lock: Lock, wait: bool) -> Fut<'a, Result<()>> {
        self.inner.lock(cx, lock, wait)
    }

    fn test_lock<'a>(&'a self, cx: &'a Context, lock: Lock) -> Fut<'a, Result<Option<Lock>>> {
        self.inner.test_lock(cx, lock)
    }

    fn get_flags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<u32>> {
        self.inner.get_flags(cx)
    }

    fn set_flags<'a>(&'a self, cx: &'a Context, flags: u32) -> Fut<'a, Result<()>> {
        self.inner.set_flags(cx, flags)
    }

    fn get_xflags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Xflags>> {
        self.inner.get_xflags(cx)
    }

    fn set_xflags<'a>(&'a self, cx: &'a Context, set: Xflags) -> Fut<'a, Result<()>> {
        self.inner.set_xflags(cx, set)
    }

    fn close<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        self.inner.close(cx)
    }
}
