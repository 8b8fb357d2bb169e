//! `FileSystem` at the client end: every method is one call.

use std::sync::Arc;

use dray_core::{
    Access, AtOpen, Attr, Buf, Context, CreateHow, Entry, FileId, FileSystem, FsInfo, Fut, Make,
    Name, OpenFile, OpenHow, RemoveKind, RenameHow, Result, SetAttr, Statfs, XattrSet,
};

use crate::client::channel::{Ask, value_of};
use crate::client::file::RemoteFile;
use crate::client::session::Session;
use crate::wire::{Call, Input, Wire};

/// A file system that a server serves.
#[derive(Clone)]
pub struct RemoteFs {
    pub(crate) session: Arc<Session>,
}

impl RemoteFs {
    /// Over an established session.
    pub fn new(session: Arc<Session>) -> RemoteFs {
        RemoteFs { session }
    }

    /// The session under it.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// A file that a process before us opened and the server still has open. `request` is
    /// the number of the request that opened it. No call is made; should the server have
    /// lost it, it is opened again when it is used.
    pub fn attach(&self, id: FileId, how: OpenHow, request: u64) -> Arc<dyn OpenFile> {
        self.file(id, request, how, None)
    }

    /// A call that changes nothing: asking twice does no harm.
    async fn ask<T: for<'b> Wire<'b>>(&self, cx: &Context, call: Call<'_>) -> Result<T> {
        self.send(cx, &call, None, None).await
    }

    /// Makes or replaces the file `name` in `dir` with `data`, at most
    /// [`IO_MAX_BYTES`](dray_core::IO_MAX_BYTES), in one round trip: create, write and close.
    /// Others may see it before all data are in it, as with the three calls. Errors: those
    /// of the three; after an error of writing the file may be there with less in it.
    pub async fn put(
        &self,
        cx: &Context,
        dir: FileId,
        name: &Name,
        mode: u32,
        data: Buf,
    ) -> Result<()> {
        let slot = self.session.link.slots.take(cx, self.session.link.request_of(cx)).await?;
        let call = Call::Put { dir, name: name.as_bytes(), mode };
        self.send(cx, &call, Some((slot.number, slot.sequence)), Some(data)).await
    }

    /// A call that changes something: in a replay slot, so that it is applied once.
    async fn change<T: for<'b> Wire<'b>>(&self, cx: &Context, call: Call<'_>) -> Result<T> {
        let slot = self.session.link.slots.take(cx, self.session.link.request_of(cx)).await?;
        self.send(cx, &call, Some((slot.number, slot.sequence)), None).await
    }

    async fn send<T: for<'b> Wire<'b>>(
        &self,
        cx: &Context,
        call: &Call<'_>,
        slot: Option<(u32, u32)>,
        data: Option<Buf>,
    ) -> Result<T> {
        let request = self.session.link.request_of(cx);
        let ask = Ask { cx, call, slot, request, data, into: None, to: None };
        let channel = self.session.channel()?;
        value_of(channel.call(ask, |bytes| Input::whole(bytes)).await)
            .map_err(|error| error.during(call.op()))
    }

    fn file(
        &self,
        id: FileId,
        handle: u64,
        how: OpenHow,
        at_open: Option<AtOpen>,
    ) -> Arc<dyn OpenFile> {
        Arc::new(RemoteFile::new(self.session.clone(), id, handle, how, at_open))
    }

    /// A file that a call has just made.
    fn made(&self, made: (Entry, bool), handle: u64, how: OpenHow) -> (Entry, Arc<dyn OpenFile>) {
        let (entry, no_capability) = made;
        let at_open = how.with_attr.then_some(AtOpen { attr: entry.attr, no_capability });
        (entry, self.file(entry.id, handle, how, at_open))
    }
}

impl FileSystem for RemoteFs {
    fn info(&self) -> &FsInfo {
        self.session.info()
    }

    fn lookup<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        Box::pin(self.ask(cx, Call::Lookup { dir, name: name.as_bytes() }))
    }

    fn parent<'a>(&'a self, cx: &'a Context, dir: FileId) -> Fut<'a, Result<Entry>> {
        Box::pin(self.ask(cx, Call::Parent { dir }))
    }

    fn getattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Attr>> {
        Box::pin(self.ask(cx, Call::Getattr { id, handle: None }))
    }

    fn setattr<'a>(&'a self, cx: &'a Context, id: FileId, set: SetAttr) -> Fut<'a, Result<Attr>> {
        Box::pin(self.change(cx, Call::Setattr { id, handle: None, set }))
    }

    fn readlink<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        Box::pin(self.ask(cx, Call::Readlink { id }))
    }

    fn make<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        what: Make<'a>,
    ) -> Fut<'a, Result<Entry>> {
        let (kind, mode, rdev, target) = match what {
            Make::Directory { mode } => (0, mode, 0, &[][..]),
            Make::Node { mode, rdev } => (1, mode, rdev, &[][..]),
            Make::Symlink { target } => (2, 0, 0, target),
        };
        let name = name.as_bytes();
        Box::pin(self.change(cx, Call::Make { dir, name, kind, mode, rdev, target }))
    }

    fn remove<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        kind: RemoveKind,
    ) -> Fut<'a, Result<()>> {
        Box::pin(self.change(cx, Call::Remove { dir, name: name.as_bytes(), kind }))
    }

    fn rename<'a>(
        &'a self,
        cx: &'a Context,
        from: (FileId, &'a Name),
        to: (FileId, &'a Name),
        how: RenameHow,
    ) -> Fut<'a, Result<()>> {
        Box::pin(self.change(
            cx,
            Call::Rename {
                from: from.0,
                from_name: from.1.as_bytes(),
                to: to.0,
                to_name: to.1.as_bytes(),
                how,
            },
        ))
    }

    fn link<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        Box::pin(self.change(cx, Call::Link { id, dir, name: name.as_bytes() }))
    }

    fn open<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move {
            let handle = self.session.link.handle_of(cx);
            let call = Call::Open { id, how, handle, again: false };
            // Cutting a file twice could cut what was written in between.
            let at_open = match how.truncates() {
                true => self.change(cx, call).await?,
                false => self.ask(cx, call).await?,
            };
            Ok(self.file(id, handle, how, at_open))
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
            let handle = self.session.link.handle_of(cx);
            let call = Call::Create { dir, name: name.as_bytes(), how, handle };
            Ok(self.made(self.change(cx, call).await?, handle, how.open))
        })
    }

    fn tmpfile<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        Box::pin(async move {
            let handle = self.session.link.handle_of(cx);
            let call = Call::Tmpfile { dir, how, handle };
            Ok(self.made(self.change(cx, call).await?, handle, how.open))
        })
    }

    fn access<'a>(&'a self, cx: &'a Context, id: FileId, want: Access) -> Fut<'a, Result<()>> {
        Box::pin(self.ask(cx, Call::Access { id, want }))
    }

    fn statfs<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Statfs>> {
        Box::pin(self.ask(cx, Call::Statfs {}))
    }

    fn getxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<Vec<u8>>> {
        Box::pin(self.ask(cx, Call::Getxattr { id, name }))
    }

    fn setxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
        value: &'a [u8],
        how: XattrSet,
    ) -> Fut<'a, Result<()>> {
        Box::pin(self.change(cx, Call::Setxattr { id, name, value, how }))
    }

    fn listxattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        Box::pin(self.ask(cx, Call::Listxattr { id }))
    }

    fn removexattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<()>> {
        Box::pin(self.change(cx, Call::Removexattr { id, name }))
    }
}
