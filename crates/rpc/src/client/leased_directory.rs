//! A directory that was opened while its listing was leased. The server hears of it only if it is asked for
//! something that is not remembered here. Most programs that open a directory read it, and close it.

use std::any::Any;
use std::sync::Arc;

use dray_core::{
    Allocate, AtOpen, Attr, Buf, BufMut, Context, DirPage, Errno, FileId, FileSystem, Fut, Io,
    LocalCopy, Lock, LockOwner, OpenFile, OpenHow, Result, Seek, SetAttr, Write, Xflags,
};
use dray_rt::sync::OnceCell;

use crate::client::fs::RemoteFs;

/// The directory, and how it was opened.
pub(super) struct LeasedDirectory {
    fs: RemoteFs,
    id: FileId,
    how: OpenHow,
    /// The caller that opened it. A descriptor may be passed on to others, with the opener's rights.
    opener: Context,
    /// The same at the server, once it is open there.
    opened: OnceCell<Arc<dyn OpenFile>>,
}

impl LeasedDirectory {
    pub(super) fn open(
        fs: RemoteFs,
        cx: &Context,
        (id, how): (FileId, OpenHow),
    ) -> Arc<dyn OpenFile> {
        let opener = Context { cancel: None, steps: None, ..cx.clone() };
        Arc::new(LeasedDirectory { fs, id, how, opener, opened: OnceCell::new() })
    }

    /// Opens it at the server, if it is not open there. Its number is that of the request that opened it
    /// here: a successor of this process asks for that.
    async fn at_server(&self, cx: &Context) -> Result<&dyn OpenFile> {
        let open = || async {
            let opener = Context { cancel: cx.cancel.clone(), ..self.opener.clone() };
            self.fs.open_at(&opener, None, self.id, self.how).await
        };
        self.opened.get_or_try_init(open).await.map(|file| &**file)
    }
}

impl OpenFile for LeasedDirectory {
    fn id(&self) -> FileId {
        self.id
    }

    fn at_open(&self) -> Option<AtOpen> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn local_copy<'a>(&'a self, _: &'a Context) -> Fut<'a, Option<Arc<dyn LocalCopy>>> {
        Box::pin(async { None })
    }

    fn read<'a>(&'a self, _: &'a Context, _: u64, into: BufMut) -> Fut<'a, Io<BufMut>> {
        Box::pin(async move { Err((Errno::EISDIR.into(), into)) })
    }

    fn write<'a>(&'a self, _: &'a Context, _: Write, _: Buf) -> Fut<'a, Result<usize>> {
        Box::pin(async { Err(Errno::EBADF.into()) })
    }

    fn readdir<'a>(
        &'a self,
        cx: &'a Context,
        cookie: u64,
        max_bytes: usize,
        plus: bool,
    ) -> Fut<'a, Result<DirPage>> {
        Box::pin(async move {
            let leases = &self.fs.session.link.leases;
            if let Some(page) = leases.listing(self.id, (cookie, max_bytes), plus) {
                return Ok(page);
            }
            match self.at_server(cx).await {
                Ok(file) => file.readdir(cx, cookie, max_bytes, plus).await,
                // It was removed meanwhile. A directory that is open and removed has no entries.
                Err(error) if error.errno() == Errno::ESTALE => {
                    let mut nothing = DirPage::default();
                    nothing.end = true;
                    Ok(nothing)
                }
                Err(error) => Err(error),
            }
        })
    }

    fn getattr<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Attr>> {
        Box::pin(async move {
            match self.opened.get() {
                Some(file) => file.getattr(cx).await,
                None => self.fs.getattr(cx, self.id).await,
            }
        })
    }

    fn setattr<'a>(&'a self, cx: &'a Context, set: SetAttr) -> Fut<'a, Result<Attr>> {
        Box::pin(async move { self.at_server(cx).await?.setattr(cx, set).await })
    }

    fn flush<'a>(&'a self, cx: &'a Context, owner: LockOwner) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            match self.opened.get() {
                Some(file) => file.flush(cx, owner).await,
                None => Ok(()),
            }
        })
    }

    fn sync<'a>(&'a self, cx: &'a Context, data_only: bool) -> Fut<'a, Result<()>> {
        Box::pin(async move { self.at_server(cx).await?.sync(cx, data_only).await })
    }

    fn allocate<'a>(&'a self, _: &'a Context, _: Allocate) -> Fut<'a, Result<()>> {
        Box::pin(async { Err(Errno::EBADF.into()) })
    }

    fn seek<'a>(&'a self, cx: &'a Context, at: u64, what: Seek) -> Fut<'a, Result<u64>> {
        Box::pin(async move { self.at_server(cx).await?.seek(cx, at, what).await })
    }

    fn copy_range<'a>(
        &'a self,
        _: &'a Context,
        _: u64,
        _: &'a dyn OpenFile,
        _: u64,
        _: u64,
    ) -> Fut<'a, Result<u64>> {
        Box::pin(async { Err(Errno::EISDIR.into()) })
    }

    fn lock<'a>(&'a self, cx: &'a Context, lock: Lock, wait: bool) -> Fut<'a, Result<()>> {
        Box::pin(async move { self.at_server(cx).await?.lock(cx, lock, wait).await })
    }

    fn test_lock<'a>(&'a self, cx: &'a Context, lock: Lock) -> Fut<'a, Result<Option<Lock>>> {
        Box::pin(async move { self.at_server(cx).await?.test_lock(cx, lock).await })
    }

    fn get_flags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<u32>> {
        Box::pin(async move { self.at_server(cx).await?.get_flags(cx).await })
    }

    fn set_flags<'a>(&'a self, cx: &'a Context, flags: u32) -> Fut<'a, Result<()>> {
        Box::pin(async move { self.at_server(cx).await?.set_flags(cx, flags).await })
    }

    fn get_xflags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Xflags>> {
        Box::pin(async move { self.at_server(cx).await?.get_xflags(cx).await })
    }

    fn set_xflags<'a>(&'a self, cx: &'a Context, set: Xflags) -> Fut<'a, Result<()>> {
        Box::pin(async move { self.at_server(cx).await?.set_xflags(cx, set).await })
    }

    fn close<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            match self.opened.get() {
                Some(file) => file.close(cx).await,
                None => Ok(()),
            }
        })
    }
}
