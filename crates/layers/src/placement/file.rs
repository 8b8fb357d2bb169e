//! An open file or directory of a projection.

use std::any::Any;
use std::sync::Arc;

use dray_core::{
    Allocate, AtOpen, Attr, Buf, BufMut, Context, DirPage, Errno, Error, FileId, FileType, Fut,
    IO_MAX_BYTES, Io, LocalCopy, Lock, LockOwner, Op, OpenFile, OpenHow, Result, Seek, SetAttr,
    Write, Xflags,
};

use super::servers::PlacedServers;
use super::slices::SliceIndex;
use super::striped::StripedFile;

/// Files of a listing whose attributes are asked for at once.
const ASKED_AT_ONCE: usize = 64;

/// Data that one call copies between two servers at most: they pass this client.
const COPY_MAX_BYTES: u64 = IO_MAX_BYTES as u64;

/// A file that is open at its home server, or a directory at the server of its names.
pub(super) struct PlacedFile {
    shared: Arc<PlacedServers>,
    at: SliceIndex,
    how: OpenHow,
    inner: Arc<dyn OpenFile>,
    /// Of a file whose blocks are at several servers.
    striped: Option<Box<StripedFile>>,
}

impl PlacedFile {
    /// `inner` is open at server `at`.
    pub(super) fn open(
        shared: &Arc<PlacedServers>,
        (at, how): (SliceIndex, OpenHow),
        inner: Arc<dyn OpenFile>,
    ) -> Arc<dyn OpenFile> {
        // A file without a name, and one that is used where it was made, is at one server.
        let splits = shared.slices.placement().splits()
            && !how.directory()
            && shared.slices.home(inner.id()) == at;
        let striped = splits.then(|| Box::new(StripedFile::new(shared, (at, how), inner.clone())));
        Arc::new(PlacedFile { shared: shared.clone(), at, how, inner, striped })
    }

    /// Makes a call at every server where the file is open, at all at once. Errors: the first.
    async fn at_all<'a>(
        &'a self,
        striped: &'a StripedFile,
        call: impl Fn(&'a dyn OpenFile) -> Fut<'a, Result<()>>,
    ) -> Result<()> {
        let calls = striped.opened().map(|file| call(&**file)).collect();
        dray_rt::join_all(calls).await.into_iter().collect()
    }

    /// Replaces attributes that are not from a file's home.
    async fn ask_homes(&self, cx: &Context, page: &mut DirPage) {
        let away = |id: FileId| self.shared.slices.home(id) != self.at;
        let asked: Vec<usize> = page
            .iter()
            .enumerate()
            .filter(|(_, (_, entry))| entry.attr.is_some() && away(entry.id))
            .map(|(index, _)| index)
            .collect();
        for some in asked.chunks(ASKED_AT_ONCE) {
            let ids = some.iter().filter_map(|index| Some(page.get(*index)?.1.id));
            let calls = ids.map(|id| self.shared.getattr(cx, id)).collect();
            let answers = dray_rt::join_all(calls).await;
            for (index, attr) in some.iter().zip(answers) {
                // What the directory's server said of the name stays. None of a file that is gone.
                let said = page.get(*index).and_then(|(_, entry)| entry.attr?.validity.name);
                page.set_attr(*index, attr.ok().map(|attr| attr.of_name(said)));
            }
        }
    }

    /// Why these open files do not allow a copy, as copy_file_range(2) has it. It looks at types first.
    async fn cannot_copy(&self, cx: &Context, to: &PlacedFile) -> Error {
        for file in [&self.inner, &to.inner] {
            match file.getattr(cx).await {
                Ok(attr) if attr.file_type() == FileType::Directory => {
                    return Error::new(Errno::EISDIR);
                }
                Ok(_) => {}
                Err(error) => return error,
            }
        }
        Error::new(Errno::EBADF)
    }

    /// Copies through this client what is at another server than `to` is.
    async fn copy_to_another_server(
        &self,
        cx: &Context,
        at: u64,
        (to, to_at): (&PlacedFile, u64),
        len_bytes: u64,
    ) -> Result<u64> {
        if !self.how.reads() || !to.how.writes() || to.how.appends() {
            return Err(self.cannot_copy(cx, to).await.during(Op::CopyRange));
        }
        let into = BufMut::heap(len_bytes.min(COPY_MAX_BYTES) as usize);
        let data = self.inner.read(cx, at, into).await.map_err(|(error, _)| error)?;
        if data.is_empty() {
            return Ok(0);
        }
        Ok(to.inner.write(cx, Write::at(to_at), data.freeze()).await? as u64)
    }
}

impl OpenFile for PlacedFile {
    fn id(&self) -> FileId {
        self.inner.id()
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
        match &self.striped {
            Some(striped) => Box::pin(striped.read(cx, at, into)),
            None => self.inner.read(cx, at, into),
        }
    }

    fn write<'a>(&'a self, cx: &'a Context, how: Write, from: Buf) -> Fut<'a, Result<usize>> {
        match &self.striped {
            Some(striped) => Box::pin(striped.write(cx, how, from)),
            None => self.inner.write(cx, how, from),
        }
    }

    /// Attributes of files with another home are asked for there, many at once: the directory's server
    /// may have old ones.
    fn readdir<'a>(
        &'a self,
        cx: &'a Context,
        cookie: u64,
        max_bytes: usize,
        plus: bool,
    ) -> Fut<'a, Result<DirPage>> {
        Box::pin(async move {
            let mut page = self.inner.readdir(cx, cookie, max_bytes, plus).await?;
            if plus {
                self.shared.met_all(self.id(), &page);
                self.ask_homes(cx, &mut page).await;
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
        match &self.striped {
            Some(striped) => Box::pin(self.at_all(striped, move |file| file.flush(cx, owner))),
            None => self.inner.flush(cx, owner),
        }
    }

    fn sync<'a>(&'a self, cx: &'a Context, data_only: bool) -> Fut<'a, Result<()>> {
        match &self.striped {
            Some(striped) => Box::pin(striped.sync(cx, data_only)),
            None => self.inner.sync(cx, data_only),
        }
    }

    fn allocate<'a>(&'a self, cx: &'a Context, what: Allocate) -> Fut<'a, Result<()>> {
        self.inner.allocate(cx, what)
    }

    fn seek<'a>(&'a self, cx: &'a Context, at: u64, what: Seek) -> Fut<'a, Result<u64>> {
        self.inner.seek(cx, at, what)
    }

    fn copy_range<'a>(
        &'a self,
        cx: &'a Context,
        at: u64,
        to: &'a dyn OpenFile,
        to_at: u64,
        len_bytes: u64,
    ) -> Fut<'a, Result<u64>> {
        let Some(to) = to.as_any().downcast_ref::<PlacedFile>() else {
            return Box::pin(async { Err(Error::new(Errno::EXDEV).during(Op::CopyRange)) });
        };
        if to.at == self.at {
            return self.inner.copy_range(cx, at, &*to.inner, to_at, len_bytes);
        }
        Box::pin(self.copy_to_another_server(cx, at, (to, to_at), len_bytes))
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
        match &self.striped {
            Some(striped) => Box::pin(self.at_all(striped, move |file| file.close(cx))),
            None => self.inner.close(cx),
        }
    }
}
