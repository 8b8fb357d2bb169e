//! An open file whose calls an observer sees, and what was moved through the file.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dray_core::{
    Allocate, AtOpen, Attr, Buf, BufMut, CallDetail, Context, Counted, DirPage, FileId, Fut,
    Identity, Io, LocalCopy, Lock, LockOwner, NodeId, ObservedCall, Op, OpenFile, OpenTotals,
    Result, Seek, SetAttr, Via, Write, Xflags,
};

use super::{admitted, observe, plain, watch};
use crate::observe::{Observer, Outcome};

/// An open file whose calls an observer sees.
pub(super) struct ObservedFile<O: Observer> {
    pub(super) inner: Arc<dyn OpenFile>,
    pub(super) observer: Arc<O>,
    /// None: no observer wants to know.
    pub(super) opened: Option<Box<OpenedFile>>,
}

/// An open file from its opening to its end.
pub(super) struct OpenedFile {
    totals: OpenTotals,
    /// Who opened it, and closes it: a kernel does not say who did, and of some closes nobody did.
    who: Arc<Identity>,
    node: NodeId,
    via: Option<Via>,
    closed: AtomicBool,
}

impl OpenedFile {
    pub(super) fn by(cx: &Context) -> OpenedFile {
        let (totals, closed) = (OpenTotals::default(), AtomicBool::new(false));
        let (who, node) = (cx.who.clone(), cx.origin.node);
        OpenedFile { totals, who, node, via: cx.via, closed }
    }

    fn moved(&self, cx: &Context, op: Op, bytes: u64) {
        match cx.counted {
            Counted::Whole | Counted::IfDone => self.totals.count(op, bytes, true),
            Counted::Bytes => self.totals.count(op, bytes, false),
            Counted::Nothing => {}
        }
    }

    /// A context of who opened it, for its close.
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

    fn local_copy<'a>(&'a self, cx: &'a Context) -> Fut<'a, Option<Arc<dyn LocalCopy>>> {
        self.inner.local_copy(cx)
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
            // Of a file that the server has opened for itself, nothing is observed.
            let own = opened.via.is_some().then(|| opened.context());
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
