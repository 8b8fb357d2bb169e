//! The one wrapper around a file system for every kind of observer.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dray_core::{
    Access, Admit, Allocate, AtOpen, Attr, Buf, BufMut, CallDetail, Context, Counted, CreateHow,
    DirPage, Entry, FileId, FileSystem, FsInfo, Fut, Identity, Io, Lock, LockOwner, Make, MakeKind,
    Name, NodeId, ObservedCall, Op, OpenFile, OpenHow, OpenTotals, RemoveKind, RenameHow, Result,
    Seek, SetAttr, Statfs, Timestamp, Uid, Via, Write, XattrSet, Xflags,
};

use crate::observe::{Observer, Outcome};
use crate::qos::ProjectTable;

/// A file system whose calls an observer sees.
pub struct Observed<O> {
    inner: Arc<dyn FileSystem>,
    observer: Arc<O>,
}

impl<O: Observer> Observed<O> {
    /// Puts `observer` around `inner` and all files opened through it.
    pub fn new(inner: Arc<dyn FileSystem>, observer: Arc<O>) -> Observed<O> {
        Observed { inner, observer }
    }

    fn file(&self, cx: &Context, file: Arc<dyn OpenFile>) -> Arc<dyn OpenFile> {
        let opened = self.observer.counts_opens().then(|| Box::new(OpenedFile::by(cx)));
        Arc::new(ObservedFile { inner: file, observer: self.observer.clone(), opened })
    }

    /// The same, once its project is known, where that counts.
    async fn opened(&self, cx: &Context, file: Arc<dyn OpenFile>) -> Arc<dyn OpenFile> {
        if let Some(projects) = self.projects() {
            Box::pin(projects.learn_opened(cx, &*file)).await;
        }
        self.file(cx, file)
    }

    async fn know_project_of(&self, cx: &Context, dir: FileId) {
        if let Some(projects) = self.projects() {
            Box::pin(projects.learn_dir(cx, &*self.inner, dir)).await;
        }
    }

    fn projects(&self) -> Option<&ProjectTable> {
        self.observer.projects().filter(|projects| projects.is_on())
    }

    fn call<'a>(&self, op: Op, id: FileId) -> ObservedCall<'a> {
        ObservedCall::new(op, id)
    }

    fn named<'a>(&self, op: Op, dir: FileId, name: &'a Name) -> ObservedCall<'a> {
        ObservedCall { name: Some(name), ..ObservedCall::new(op, dir) }
    }

    fn opening<'a>(&self, call: ObservedCall<'a>, how: OpenHow) -> ObservedCall<'a> {
        ObservedCall { open: Some(how), ..call }
    }
}

/// Puts `observer` around one file.
pub(crate) fn observed_file<O: Observer>(
    file: Arc<dyn OpenFile>,
    observer: &Arc<O>,
) -> Arc<dyn OpenFile> {
    Arc::new(ObservedFile { inner: file, observer: observer.clone(), opened: None })
}

/// Waits until `observer` lets the call begin. Errors: it is refused.
pub(crate) async fn admitted<O: Observer + ?Sized>(
    observer: &O,
    cx: &Context,
    call: &ObservedCall<'_>,
) -> Result<()> {
    match observer.admit(cx, call) {
        Admit::Now => Ok(()),
        Admit::After(wait) => wait.await,
        Admit::Refuse(error) => Err(error),
    }
}

/// Makes the call if it is admitted, and tells the observer how it went. `outcome_of` says what a
/// success was about. `work` must begin when it is first polled. File systems may do their work
/// when a method is called, not only when its future is polled.
async fn observe<O: Observer, T>(
    observer: &O,
    cx: &Context,
    call: ObservedCall<'_>,
    work: impl Future<Output = Result<T>>,
    outcome_of: impl FnOnce(&T) -> Outcome<'static>,
) -> Result<T> {
    let begin = dray_rt::now();
    let result = match admitted(observer, cx, &call).await {
        Ok(()) => work.await,
        Err(error) => Err(error.during(call.op)),
    };
    let outcome = match &result {
        Ok(value) => outcome_of(value),
        Err(error) => Outcome { error: Some(error), ..Outcome::default() },
    };
    observer.done(cx, &call, outcome, begin.elapsed());
    result
}

fn plain<T>(_: &T) -> Outcome<'static> {
    Outcome::default()
}

fn entry(entry: &Entry) -> Outcome<'static> {
    Outcome::about(entry.id)
}

fn opened(file: &Arc<dyn OpenFile>) -> Outcome<'static> {
    Outcome::about(file.id())
}

fn created((entry, _): &(Entry, Arc<dyn OpenFile>)) -> Outcome<'static> {
    Outcome::about(entry.id)
}

/// Wraps a call: what it is, the call itself, and what its answer is about.
macro_rules! watch {
    ($self:ident, $cx:ident, $call:expr, $work:expr) => {
        watch!($self, $cx, $call, $work, plain)
    };
    ($self:ident, $cx:ident, $call:expr, $work:expr, $outcome:expr) => {
        Box::pin(async move {
            observe(&*$self.observer, $cx, $call, async { $work.await }, $outcome).await
        })
    };
}

impl<O: Observer> FileSystem for Observed<O> {
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

    fn lookup<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        let call = self.named(Op::Lookup, dir, name);
        Box::pin(async move {
            self.know_project_of(cx, dir).await; // who makes something there looks for its name first
            observe(
                &*self.observer,
                cx,
                call,
                async { self.inner.lookup(cx, dir, name).await },
                entry,
            )
            .await
        })
    }

    fn parent<'a>(&'a self, cx: &'a Context, dir: FileId) -> Fut<'a, Result<Entry>> {
        watch!(self, cx, self.call(Op::Parent, dir), self.inner.parent(cx, dir), entry)
    }

    fn getattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Attr>> {
        watch!(self, cx, self.call(Op::Getattr, id), self.inner.getattr(cx, id))
    }

    fn setattr<'a>(&'a self, cx: &'a Context, id: FileId, set: SetAttr) -> Fut<'a, Result<Attr>> {
        watch!(
            self,
            cx,
            self.call(Op::Setattr, id).with(CallDetail::Set(&set)),
            self.inner.setattr(cx, id, set)
        )
    }

    fn readlink<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        watch!(self, cx, self.call(Op::Readlink, id), self.inner.readlink(cx, id))
    }

    fn make<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        what: Make<'a>,
    ) -> Fut<'a, Result<Entry>> {
        let detail = CallDetail::Make(MakeKind::of(&what));
        let call = self.named(Op::Make, dir, name).with(detail);
        watch!(self, cx, call, self.inner.make(cx, dir, name, what), entry)
    }

    fn remove<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        kind: RemoveKind,
    ) -> Fut<'a, Result<()>> {
        let call = self.named(Op::Remove, dir, name).with(CallDetail::Remove(kind));
        watch!(self, cx, call, self.inner.remove(cx, dir, name, kind))
    }

    fn rename<'a>(
        &'a self,
        cx: &'a Context,
        from: (FileId, &'a Name),
        to: (FileId, &'a Name),
        how: RenameHow,
    ) -> Fut<'a, Result<()>> {
        let call = ObservedCall { to: Some(to), ..self.named(Op::Rename, from.0, from.1) };
        watch!(self, cx, call, self.inner.rename(cx, from, to, how))
    }

    fn link<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        let call = ObservedCall { to: Some((dir, name)), ..self.call(Op::Link, id) };
        watch!(self, cx, call, self.inner.link(cx, id, dir, name), entry)
    }

    fn open<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move {
            let work = async { self.inner.open(cx, id, how).await };
            let call = self.opening(self.call(Op::Open, id), how);
            let file = observe(&*self.observer, cx, call, work, opened).await?;
            Ok(self.opened(cx, file).await)
        })
    }

    fn learn<'a>(
        &'a self,
        cx: &'a Context,
        place: (FileId, &'a Name),
        id: FileId,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let work = async { self.inner.learn(cx, place, id).await };
            observe(&*self.observer, cx, self.call(Op::Learn, id), work, plain).await
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
            let work = async { self.inner.open_named(cx, place, id, how).await };
            let call = self.opening(self.call(Op::OpenNamed, id), how);
            let file = observe(&*self.observer, cx, call, work, opened).await?;
            Ok(self.opened(cx, file).await)
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
            let work = async { self.inner.create(cx, dir, name, how).await };
            let call = self.opening(self.named(Op::Create, dir, name), how.open);
            let (entry, file) = observe(&*self.observer, cx, call, work, created).await?;
            Ok((entry, self.opened(cx, file).await))
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
        let call = ObservedCall { bytes: data.len() as u64, ..self.named(Op::Put, dir, name) };
        Box::pin(async move {
            let bytes = data.len() as u64;
            let work = async { self.inner.put(cx, dir, name, mode, data).await };
            observe(&*self.observer, cx, call, work, |()| Outcome { bytes, ..Outcome::default() })
                .await
        })
    }

    fn tmpfile<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        Box::pin(async move {
            let work = async { self.inner.tmpfile(cx, dir, how).await };
            let call = self.opening(self.call(Op::Tmpfile, dir), how.open);
            let (entry, file) = observe(&*self.observer, cx, call, work, created).await?;
            Ok((entry, self.opened(cx, file).await))
        })
    }

    fn access<'a>(&'a self, cx: &'a Context, id: FileId, want: Access) -> Fut<'a, Result<()>> {
        watch!(self, cx, self.call(Op::Access, id), self.inner.access(cx, id, want))
    }

    fn statfs<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Statfs>> {
        let root = self.inner.info().root;
        watch!(self, cx, self.call(Op::Statfs, root), self.inner.statfs(cx))
    }

    fn sync_all<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        let root = self.inner.info().root;
        watch!(self, cx, self.call(Op::SyncAll, root), self.inner.sync_all(cx))
    }

    fn getxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<Vec<u8>>> {
        let call = self.call(Op::Getxattr, id).with(CallDetail::Xattr(name));
        watch!(self, cx, call, self.inner.getxattr(cx, id, name))
    }

    fn setxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
        value: &'a [u8],
        how: XattrSet,
    ) -> Fut<'a, Result<()>> {
        let call = ObservedCall { bytes: value.len() as u64, ..self.call(Op::Setxattr, id) };
        watch!(
            self,
            cx,
            call.with(CallDetail::Xattr(name)),
            self.inner.setxattr(cx, id, name, value, how)
        )
    }

    fn listxattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        watch!(self, cx, self.call(Op::Listxattr, id), self.inner.listxattr(cx, id))
    }

    fn removexattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<()>> {
        let call = self.call(Op::Removexattr, id).with(CallDetail::Xattr(name));
        watch!(self, cx, call, self.inner.removexattr(cx, id, name))
    }
}

/// An open file whose calls an observer sees.
struct ObservedFile<O: Observer> {
    inner: Arc<dyn OpenFile>,
    observer: Arc<O>,
    /// None: no observer wants to know.
    opened: Option<Box<OpenedFile>>,
}

/// An open file from its opening to its end.
struct OpenedFile {
    totals: OpenTotals,
    /// Who opened it, for a close that nobody asks for.
    who: Arc<Identity>,
    node: NodeId,
    via: Option<Via>,
    closed: AtomicBool,
}

impl OpenedFile {
    fn by(cx: &Context) -> OpenedFile {
        let (totals, closed) = (OpenTotals::default(), AtomicBool::new(false));
        let (who, node) = (cx.who.clone(), cx.origin.node);
        OpenedFile { totals, who, node, via: cx.via, closed }
    }

    fn moved(&self, cx: &Context, op: Op, bytes: u64) {
        match cx.counted {
            Counted::Whole => self.totals.count(op, bytes, true),
            Counted::Bytes => self.totals.count(op, bytes, false),
            Counted::Nothing => {}
        }
    }

    /// A context of who opened it, for a close by the server.
    fn context(&self) -> Context {
        let mut cx = Context { who: self.who.clone(), via: self.via, ..Context::system() };
        cx.origin.node = self.node;
        cx
    }
}

impl<O: Observer> Drop for ObservedFile<O> {
    /// A file that is never closed ends with the session of its client.
    fn drop(&mut self) {
        let Some(opened) = self.opened.as_ref() else { return };
        if opened.closed.swap(true, Ordering::Relaxed) || opened.via.is_none() {
            return; // or the server opened it for itself
        }
        let call = self.call(Op::Close).with(CallDetail::Closed(&opened.totals));
        self.observer.done(&opened.context(), &call, Outcome::default(), Duration::ZERO);
    }
}

impl<O: Observer> ObservedFile<O> {
    fn call<'a>(&self, op: Op) -> ObservedCall<'a> {
        ObservedCall::new(op, self.inner.id())
    }

    fn sized<'a>(&self, op: Op, bytes: usize) -> ObservedCall<'a> {
        ObservedCall { bytes: bytes as u64, ..self.call(op) }
    }

    fn moved(&self, cx: &Context, op: Op, bytes: u64) {
        if let Some(opened) = &self.opened {
            opened.moved(cx, op, bytes);
        }
    }
}

impl<O: Observer> OpenFile for ObservedFile<O> {
    fn id(&self) -> FileId {
        self.inner.id()
    }

    fn at_open(&self) -> Option<AtOpen> {
        self.inner.at_open()
    }

    /// The file below, so that it recognises its own through any number of observers.
    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }

    fn read<'a>(&'a self, cx: &'a Context, at: u64, into: BufMut) -> Fut<'a, Io<BufMut>> {
        Box::pin(async move {
            let begin = dray_rt::now();
            let (call, before) = (self.sized(Op::Read, into.room()), into.len());
            let result = match admitted(&*self.observer, cx, &call).await {
                Ok(()) => self.inner.read(cx, at, into).await,
                Err(error) => Err((error.during(Op::Read), into)),
            };
            let outcome = match &result {
                Ok(into) => {
                    let bytes = (into.len() - before) as u64;
                    self.moved(cx, Op::Read, bytes);
                    Outcome::moved(bytes)
                }
                Err((error, _)) => Outcome { error: Some(error), ..Outcome::default() },
            };
            self.observer.done(cx, &call, outcome, begin.elapsed());
            result
        })
    }

    fn write<'a>(&'a self, cx: &'a Context, how: Write, from: Buf) -> Fut<'a, Result<usize>> {
        Box::pin(async move {
            let call = self.sized(Op::Write, from.len());
            let work = async { self.inner.write(cx, how, from).await };
            observe(&*self.observer, cx, call, work, |written| {
                self.moved(cx, Op::Write, *written as u64);
                Outcome::moved(*written as u64)
            })
            .await
        })
    }

    fn readdir<'a>(
        &'a self,
        cx: &'a Context,
        cookie: u64,
        max_bytes: usize,
        plus: bool,
    ) -> Fut<'a, Result<DirPage>> {
        let call = self.sized(Op::Readdir, max_bytes);
        watch!(self, cx, call, self.inner.readdir(cx, cookie, max_bytes, plus))
    }

    fn getattr<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Attr>> {
        watch!(self, cx, self.call(Op::Getattr), self.inner.getattr(cx))
    }

    fn setattr<'a>(&'a self, cx: &'a Context, set: SetAttr) -> Fut<'a, Result<Attr>> {
        watch!(
            self,
            cx,
            self.call(Op::Setattr).with(CallDetail::Set(&set)),
            self.inner.setattr(cx, set)
        )
    }

    fn flush<'a>(&'a self, cx: &'a Context, owner: LockOwner) -> Fut<'a, Result<()>> {
        watch!(self, cx, self.call(Op::Flush), self.inner.flush(cx, owner))
    }

    fn sync<'a>(&'a self, cx: &'a Context, data_only: bool) -> Fut<'a, Result<()>> {
        watch!(self, cx, self.call(Op::Sync), self.inner.sync(cx, data_only))
    }

    fn allocate<'a>(&'a self, cx: &'a Context, what: Allocate) -> Fut<'a, Result<()>> {
        watch!(self, cx, self.call(Op::Allocate), self.inner.allocate(cx, what))
    }

    fn seek<'a>(&'a self, cx: &'a Context, at: u64, what: Seek) -> Fut<'a, Result<u64>> {
        watch!(self, cx, self.call(Op::Seek), self.inner.seek(cx, at, what))
    }

    fn copy_range<'a>(
        &'a self,
        cx: &'a Context,
        at: u64,
        to: &'a dyn OpenFile,
        to_at: u64,
        len_bytes: u64,
    ) -> Fut<'a, Result<u64>> {
        Box::pin(async move {
            let call = ObservedCall { bytes: len_bytes, ..self.call(Op::CopyRange) };
            let work = async { self.inner.copy_range(cx, at, to, to_at, len_bytes).await };
            observe(&*self.observer, cx, call, work, |copied| Outcome::moved(*copied)).await
        })
    }

    fn lock<'a>(&'a self, cx: &'a Context, lock: Lock, wait: bool) -> Fut<'a, Result<()>> {
        watch!(self, cx, self.call(Op::Lock), self.inner.lock(cx, lock, wait))
    }

    fn test_lock<'a>(&'a self, cx: &'a Context, lock: Lock) -> Fut<'a, Result<Option<Lock>>> {
        watch!(self, cx, self.call(Op::TestLock), self.inner.test_lock(cx, lock))
    }

    fn get_flags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<u32>> {
        watch!(self, cx, self.call(Op::GetFlags), self.inner.get_flags(cx))
    }

    fn set_flags<'a>(&'a self, cx: &'a Context, flags: u32) -> Fut<'a, Result<()>> {
        watch!(self, cx, self.call(Op::SetFlags), self.inner.set_flags(cx, flags))
    }

    fn get_xflags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Xflags>> {
        watch!(self, cx, self.call(Op::GetXflags), self.inner.get_xflags(cx))
    }

    fn set_xflags<'a>(&'a self, cx: &'a Context, set: Xflags) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let work = async { self.inner.set_xflags(cx, set).await };
            observe(&*self.observer, cx, self.call(Op::SetXflags), work, plain).await?;
            if let Some(projects) = self.observer.projects().filter(|one| one.is_on()) {
                projects.learn(self.inner.id(), set.project);
            }
            Ok(())
        })
    }

    fn close<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let Some(opened) = &self.opened else {
                let work = async { self.inner.close(cx).await };
                return observe(&*self.observer, cx, self.call(Op::Close), work, plain).await;
            };
            // Closed by its client, or by the server when the session ended: it is observed once.
            opened.closed.store(true, Ordering::Relaxed);
            let call = self.call(Op::Close).with(CallDetail::Closed(&opened.totals));
            let by_server = cx.counted == Counted::Nothing && opened.via.is_some();
            let own = by_server.then(|| opened.context());
            let begin = dray_rt::now();
            let result = match admitted(&*self.observer, cx, &call).await {
                Ok(()) => self.inner.close(cx).await,
                Err(error) => Err(error.during(Op::Close)),
            };
            let outcome = Outcome { error: result.as_ref().err(), ..Outcome::default() };
            self.observer.done(own.as_ref().unwrap_or(cx), &call, outcome, begin.elapsed());
            result
        })
    }
}
