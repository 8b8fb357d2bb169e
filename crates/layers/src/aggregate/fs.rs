//! The file system with read-ahead and merged writes.

use std::io;
use std::sync::Arc;

use dray_core::{
    Access, Attr, Buf, Context, CreateHow, Entry, Errno, FileId, FileSystem, FsInfo, Fut, IdMap,
    Make, Name, OpenFile, OpenHow, RemoveKind, RenameHow, Result, SetAttr, Statfs, Timestamp, Uid,
    XattrSet,
};

use super::core::{AggregateCore, AggregateOptions};
use super::figures::AggregateFigures;
use super::file::AggregatedFile;

/// A file system that reads ahead and merges small writes.
pub struct Aggregate {
    core: Arc<AggregateCore>,
}

impl Aggregate {
    /// Around `inner`. `failed`: files of which [`recover`](super::recover) could not write data.
    /// Errors: those of the file for pending data.
    pub fn new(
        inner: Arc<dyn FileSystem>,
        options: AggregateOptions,
        failed: IdMap<FileId, Errno>,
    ) -> io::Result<Aggregate> {
        Ok(Aggregate { core: AggregateCore::new(inner, options, failed)? })
    }

    /// What it has done.
    pub fn figures(&self) -> Arc<AggregateFigures> {
        self.core.figures.clone()
    }

    /// Writes what is pending, and passes on all further calls.
    pub async fn stop_merging(&self) {
        self.core.stop();
        self.core.settle_quietly().await;
    }

    fn inner(&self) -> &dyn FileSystem {
        &*self.core.inner
    }

    fn file(&self, inner: Arc<dyn OpenFile>, how: OpenHow) -> Arc<dyn OpenFile> {
        AggregatedFile::shared(&self.core, inner, how)
    }

    /// Before a call that sees the attributes of `id`: they are those of a file of which nothing is
    /// pending.
    async fn before_look(&self, id: FileId) {
        if let Some(state) = self.core.with_pending(id) {
            state.settle_all().await;
        }
    }

    /// Has `change` change a file in a way that is not known here.
    async fn change<T>(&self, id: FileId, change: impl Future<Output = T>) -> T {
        let Some(state) = self.core.known(id) else { return change.await };
        state.attributes_change();
        state.before_change().await;
        let outcome = change.await;
        state.attributes_change();
        state.after_change();
        outcome
    }

    /// The same for a call that may cut the file that is called `name`, if there is one. Whatever is
    /// pending while it is cut was written at the same time, so that it may come afterwards.
    async fn change_named<T>(
        &self,
        cx: &Context,
        (dir, name): (FileId, &Name),
        change: impl Future<Output = T>,
    ) -> T {
        if !self.core.holds_data() {
            return change.await;
        }
        match self.core.inner.lookup(&cx.uncounted(), dir, name).await {
            Ok(entry) => self.change(entry.id, change).await,
            Err(_) => change.await,
        }
    }

    /// An entry whose attributes are those of a file of which nothing is pending. `look` gets it.
    async fn entry<'a>(&'a self, look: impl Fn() -> Fut<'a, Result<Entry>>) -> Result<Entry> {
        let entry = look().await?;
        match self.core.with_pending(entry.id) {
            None => Ok(entry),
            Some(state) => {
                state.settle_all().await;
                look().await
            }
        }
    }
}

impl Drop for Aggregate {
    fn drop(&mut self) {
        self.core.end();
    }
}

impl FileSystem for Aggregate {
    fn info(&self) -> &FsInfo {
        self.inner().info()
    }

    fn path(&self, id: FileId) -> Option<Vec<u8>> {
        self.inner().path(id)
    }

    fn clock(&self) -> Option<Timestamp> {
        self.inner().clock()
    }

    fn user_of(&self, cx: &Context) -> Uid {
        self.inner().user_of(cx)
    }

    fn lookup<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        Box::pin(self.entry(move || self.inner().lookup(cx, dir, name)))
    }

    fn parent<'a>(&'a self, cx: &'a Context, dir: FileId) -> Fut<'a, Result<Entry>> {
        self.inner().parent(cx, dir)
    }

    fn getattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Attr>> {
        Box::pin(async move {
            self.before_look(id).await;
            self.inner().getattr(cx, id).await
        })
    }

    fn setattr<'a>(&'a self, cx: &'a Context, id: FileId, set: SetAttr) -> Fut<'a, Result<Attr>> {
        Box::pin(self.change(id, async move { self.inner().setattr(cx, id, set).await }))
    }

    fn readlink<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        self.inner().readlink(cx, id)
    }

    fn make<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        what: Make<'a>,
    ) -> Fut<'a, Result<Entry>> {
        self.inner().make(cx, dir, name, what)
    }

    fn remove<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        kind: RemoveKind,
    ) -> Fut<'a, Result<()>> {
        self.inner().remove(cx, dir, name, kind)
    }

    fn rename<'a>(
        &'a self,
        cx: &'a Context,
        from: (FileId, &'a Name),
        to: (FileId, &'a Name),
        how: RenameHow,
    ) -> Fut<'a, Result<()>> {
        self.inner().rename(cx, from, to, how)
    }

    fn link<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        Box::pin(async move {
            self.before_look(id).await;
            self.inner().link(cx, id, dir, name).await
        })
    }

    fn learn<'a>(
        &'a self,
        cx: &'a Context,
        place: (FileId, &'a Name),
        id: FileId,
    ) -> Fut<'a, Result<()>> {
        self.inner().learn(cx, place, id)
    }

    fn open<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move {
            let open = async { self.inner().open(cx, id, how).await };
            let opened = match how.truncates() {
                true => self.change(id, open).await?,
                false => {
                    self.before_look(id).await;
                    open.await?
                }
            };
            Ok(self.file(opened, how))
        })
    }

    fn open_named<'a>(
        &'a self,
        cx: &'a Context,
        place: (FileId, &'a Name),
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move {
            let open = async { self.inner().open_named(cx, place, id, how).await };
            let opened = match how.truncates() {
                true => self.change(id, open).await?,
                false => {
                    self.before_look(id).await;
                    open.await?
                }
            };
            Ok(self.file(opened, how))
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
            let create = async { self.inner().create(cx, dir, name, how).await };
            let created = match how.exclusive {
                true => create.await,
                false => self.change_named(cx, (dir, name), create).await,
            };
            let (entry, file) = created?;
            Ok((entry, self.file(file, how.open)))
        })
    }

    fn tmpfile<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        Box::pin(async move {
            let (entry, file) = self.inner().tmpfile(cx, dir, how).await?;
            Ok((entry, self.file(file, how.open)))
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
        let put = async move { self.inner().put(cx, dir, name, mode, data).await };
        Box::pin(self.change_named(cx, (dir, name), put))
    }

    fn access<'a>(&'a self, cx: &'a Context, id: FileId, want: Access) -> Fut<'a, Result<()>> {
        self.inner().access(cx, id, want)
    }

    /// What is pending takes space that is free below.
    fn statfs<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Statfs>> {
        Box::pin(async move {
            self.core.settle_quietly().await;
            self.inner().statfs(cx).await
        })
    }

    fn sync_all<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let settled = self.core.settle().await;
            self.inner().sync_all(cx).await?;
            settled
        })
    }

    fn getxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<Vec<u8>>> {
        self.inner().getxattr(cx, id, name)
    }

    fn setxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
        value: &'a [u8],
        how: XattrSet,
    ) -> Fut<'a, Result<()>> {
        let set = async move { self.inner().setxattr(cx, id, name, value, how).await };
        Box::pin(self.change(id, set))
    }

    fn listxattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        self.inner().listxattr(cx, id)
    }

    fn removexattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<()>> {
        Box::pin(self.change(id, async move { self.inner().removexattr(cx, id, name).await }))
    }
}
