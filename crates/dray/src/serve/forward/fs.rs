//! The file system of an export that other servers have.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dray_backends::backend::{Backend, ExportLocation, Hang};
use dray_client::RemoteFs;
use dray_core::{
    Access, Attr, Buf, Context, CreateHow, Entry, Errno, FileId, FileSystem, FsInfo, Fut, Make,
    Name, OnOutsideChanges, Op, OpenFile, OpenHow, RemoveKind, RenameHow, Result, SetAttr, Statfs,
    Timestamp, Uid, UpperLeases, XattrSet,
};

use super::callers::CallerPolicy;
use super::connection::{UpperConnection, calls_of};
use super::file::ForwardFile;
use crate::serve::workers::is_serving_thread;

/// Passes each call on to the servers above.
pub struct ForwardFs {
    inner: Arc<dyn FileSystem>,
    info: FsInfo,
    connection: UpperConnection,
    callers: CallerPolicy,
    /// What the server above leases is leased on.
    leases: bool,
}

/// Makes a call as the caller that the server above is to see. A future of its own is made only for one
/// whose identity is replaced.
macro_rules! as_caller {
    ($self:ident, $cx:ident, $call:expr) => {{
        $self.attach_here();
        match $self.callers.replaced($cx) {
            None => $call,
            Some(own) => Box::pin(async move {
                let $cx = &own;
                $call.await
            }),
        }
    }};
}

/// The same for a call that changes something.
macro_rules! as_changer {
    ($self:ident, $cx:ident, $op:expr, $call:expr) => {
        match $self.callers.may_change($op) {
            Ok(()) => as_caller!($self, $cx, $call),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    };
}

impl ForwardFs {
    pub fn new(connection: UpperConnection, callers: CallerPolicy, leases: bool) -> ForwardFs {
        let inner = connection.client.stack().fs;
        let mut info = connection.client.info().clone();
        info.read_only |= callers.read_only;
        ForwardFs { inner, info, connection, callers, leases }
    }

    /// Gives a thread that serves clients connections of its own. All other threads share the first ones:
    /// their executors may end.
    fn attach_here(&self) {
        if is_serving_thread() {
            self.connection.client.attach_here();
        }
    }

    fn file(&self, file: Arc<dyn OpenFile>) -> Arc<dyn OpenFile> {
        match self.callers.all_pass() {
            true => file,
            false => Arc::new(ForwardFile { inner: file, callers: self.callers }),
        }
    }

    /// As open(2) has it on a file system that takes no changes: what is there is opened.
    async fn open_existing(
        &self,
        cx: &Context,
        (dir, name): (FileId, &Name),
        how: CreateHow,
    ) -> Result<(Entry, Arc<dyn OpenFile>)> {
        let found = self.lookup(cx, dir, name).await;
        let entry = match found {
            Err(error) if error.errno() == Errno::ENOENT => {
                return Err(Errno::EROFS.into());
            }
            found => found?,
        };
        if how.exclusive {
            return Err(Errno::EEXIST.into());
        }
        let flags = how.open.flags & !(libc::O_CREAT | libc::O_EXCL);
        let file = self.open(cx, entry.id, OpenHow { flags, ..how.open }).await?;
        Ok((entry, file))
    }
}

impl FileSystem for ForwardFs {
    fn info(&self) -> &FsInfo {
        &self.info
    }

    fn path(&self, id: FileId) -> Option<Vec<u8>> {
        self.inner.path(id)
    }

    fn clock(&self) -> Option<Timestamp> {
        self.inner.clock()
    }

    fn user_of(&self, cx: &Context) -> Uid {
        self.callers.user_of(cx)
    }

    fn lookup<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        as_caller!(self, cx, self.inner.lookup(cx, dir, name))
    }

    fn parent<'a>(&'a self, cx: &'a Context, dir: FileId) -> Fut<'a, Result<Entry>> {
        as_caller!(self, cx, self.inner.parent(cx, dir))
    }

    fn getattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Attr>> {
        as_caller!(self, cx, self.inner.getattr(cx, id))
    }

    fn setattr<'a>(&'a self, cx: &'a Context, id: FileId, set: SetAttr) -> Fut<'a, Result<Attr>> {
        as_changer!(self, cx, Op::Setattr, self.inner.setattr(cx, id, set))
    }

    fn readlink<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        as_caller!(self, cx, self.inner.readlink(cx, id))
    }

    fn make<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        what: Make<'a>,
    ) -> Fut<'a, Result<Entry>> {
        as_changer!(self, cx, Op::Make, self.inner.make(cx, dir, name, what))
    }

    fn remove<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        kind: RemoveKind,
    ) -> Fut<'a, Result<()>> {
        as_changer!(self, cx, Op::Remove, self.inner.remove(cx, dir, name, kind))
    }

    fn rename<'a>(
        &'a self,
        cx: &'a Context,
        from: (FileId, &'a Name),
        to: (FileId, &'a Name),
        how: RenameHow,
    ) -> Fut<'a, Result<()>> {
        as_changer!(self, cx, Op::Rename, self.inner.rename(cx, from, to, how))
    }

    fn link<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        as_changer!(self, cx, Op::Link, self.inner.link(cx, id, dir, name))
    }

    /// The servers above learn ids from their own client, which is this server.
    fn learn<'a>(
        &'a self,
        _: &'a Context,
        _: (FileId, &'a Name),
        _: FileId,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async { Err(Errno::ENOTSUP.into()) })
    }

    fn open<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move {
            self.callers.may_open(how, Op::Open)?;
            let opened: Fut<'_, _> = as_caller!(self, cx, self.inner.open(cx, id, how));
            opened.await.map(|file| self.file(file))
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
            self.callers.may_open(how, Op::OpenNamed)?;
            let opened: Fut<'_, _> =
                as_caller!(self, cx, self.inner.open_named(cx, place, id, how));
            opened.await.map(|file| self.file(file))
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
            if self.callers.read_only {
                return self.open_existing(cx, (dir, name), how).await;
            }
            let created: Fut<'_, Result<(Entry, _)>> =
                as_caller!(self, cx, self.inner.create(cx, dir, name, how));
            created.await.map(|(entry, file)| (entry, self.file(file)))
        })
    }

    fn tmpfile<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        Box::pin(async move {
            let created: Fut<'_, Result<(Entry, _)>> =
                as_changer!(self, cx, Op::Tmpfile, self.inner.tmpfile(cx, dir, how));
            created.await.map(|(entry, file)| (entry, self.file(file)))
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
        as_changer!(self, cx, Op::Put, self.inner.put(cx, dir, name, mode, data))
    }

    fn access<'a>(&'a self, cx: &'a Context, id: FileId, want: Access) -> Fut<'a, Result<()>> {
        let writes = want.0 & libc::W_OK as u32 != 0;
        match self.callers.may_change(Op::Access) {
            Err(error) if writes => Box::pin(std::future::ready(Err(error))),
            Ok(()) | Err(_) => as_caller!(self, cx, self.inner.access(cx, id, want)),
        }
    }

    fn statfs<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Statfs>> {
        as_caller!(self, cx, self.inner.statfs(cx))
    }

    fn sync_all<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        as_caller!(self, cx, self.inner.sync_all(cx))
    }

    fn getxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<Vec<u8>>> {
        as_caller!(self, cx, self.inner.getxattr(cx, id, name))
    }

    fn setxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
        value: &'a [u8],
        how: XattrSet,
    ) -> Fut<'a, Result<()>> {
        as_changer!(self, cx, Op::Setxattr, self.inner.setxattr(cx, id, name, value, how))
    }

    fn listxattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        as_caller!(self, cx, self.inner.listxattr(cx, id))
    }

    fn removexattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<()>> {
        as_changer!(self, cx, Op::Removexattr, self.inner.removexattr(cx, id, name))
    }
}

impl Backend for ForwardFs {
    fn caveats(&self) -> Vec<String> {
        let nothing = self.leases && !self.connection.client.has_leases();
        let caveat =
            "the server above leases nothing that can be leased on, so this one leases nothing";
        nothing.then(|| caveat.to_owned()).into_iter().collect()
    }

    fn has_shared_ids(&self) -> bool {
        false
    }

    /// Calls that are answered late by a server that is there are not counted: that server says so.
    fn hang(&self, least: Duration) -> Option<Hang> {
        if least.is_zero() {
            let calls = self.connection.calls() as usize;
            return (calls > 0).then_some(Hang { calls, since: Duration::ZERO });
        }
        let away = self.connection.away();
        let late = away.iter().filter(|(_, since)| *since >= least);
        let hangs = late.map(|(status, since)| (calls_of(status) as usize, *since));
        let (calls, since) = hangs
            .filter(|(calls, _)| *calls > 0)
            .reduce(|(all, longest), (calls, since)| (all + calls, longest.max(since)))?;
        Some(Hang { calls, since })
    }

    fn upkeep(&self) -> Fut<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    fn location<'a>(&'a self, _: &'a Path) -> Fut<'a, ExportLocation> {
        Box::pin(std::future::ready(ExportLocation::There))
    }

    fn is_mortal(&self) -> bool {
        false
    }

    fn is_dead(&self) -> Fut<'_, bool> {
        Box::pin(std::future::ready(false))
    }

    fn servers_away(&self) -> Option<String> {
        let away = self.connection.away();
        let words = away.iter().map(|(status, since)| {
            let why = match (status.evicted, status.redefined, &status.trouble) {
                (true, _, _) => ": it has evicted this server: restart this one",
                (_, true, _) => ": its projection has another definition now: restart this server",
                (_, _, Some(why)) => &format!(": {why}"),
                (_, _, None) => "",
            };
            format!("the server {} is away for {} s{why}", status.target, since.as_secs())
        });
        let words: Vec<String> = words.collect();
        (!words.is_empty()).then(|| words.join("; "))
    }

    fn recovered(&self) {
        self.connection.client.sessions().iter().for_each(|session| session.release_inherited());
    }

    fn find_removed(&self) -> Result<()> {
        Ok(()) // the servers above keep them
    }

    fn forget_removed(&self, _: &dyn Fn(FileId) -> bool) {}

    fn watch_outside(&self, _: Arc<dyn OnOutsideChanges>) -> std::result::Result<(), String> {
        Ok(())
    }

    fn outside_unnoticed(&self) -> Option<String> {
        Some("that is for the servers above, which recall what they notice".to_owned())
    }

    fn upper_leases(&self) -> Option<Arc<dyn UpperLeases>> {
        let leased = || Arc::new(RemoteFs::new(self.connection.client.session().clone()));
        self.leases.then(|| leased() as Arc<dyn UpperLeases>)
    }

    fn leave(&self) {}
}
