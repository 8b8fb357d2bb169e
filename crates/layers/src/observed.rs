//! The one wrapper around a file system for every kind of observer.

mod file;

use std::sync::Arc;

use dray_core::{
    Access, Admit, Attr, Buf, CallDetail, Context, Counted, CreateHow, Entry, FileId, FileSystem,
    FsInfo, Fut, Make, MakeKind, Name, ObservedCall, Op, OpenFile, OpenHow, RemoveKind, RenameHow,
    Result, SetAttr, Statfs, Timestamp, Uid, XattrSet,
};

use crate::observe::{Observer, Outcome};
use crate::qos::ProjectTable;
use file::{ObservedFile, OpenedFile};

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
    if result.is_err() && cx.counted == Counted::IfDone {
        return result;
    }
    let outcome = match &result {
        Ok(value) => outcome_of(value),
        Err(error) => Outcome { error: Some(error), ..Outcome::default() },
    };
    let outcome = Outcome { id: outcome.id.or(cx.taken_name), ..outcome };
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

use watch;

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

    fn create_without_attr<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        how: CreateHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move {
            let work = async { self.inner.create_without_attr(cx, dir, name, how).await };
            let call = self.opening(self.named(Op::Create, dir, name), how.open);
            let file = observe(&*self.observer, cx, call, work, opened).await?;
            Ok(self.opened(cx, file).await)
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
