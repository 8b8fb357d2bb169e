//! An open file whose callers are replaced, or which takes no changes.

use std::any::Any;
use std::sync::Arc;

use dray_core::{
    Allocate, AtOpen, Attr, Buf, BufMut, Context, DirPage, FileId, Fut, Io, LocalCopy, Lock,
    LockOwner, Op, OpenFile, Result, Seek, SetAttr, Write, Xflags,
};

use super::callers::CallerPolicy;

pub(super) struct ForwardFile {
    pub(super) inner: Arc<dyn OpenFile>,
    pub(super) callers: CallerPolicy,
}

/// As for file systems.
macro_rules! as_caller {
    ($self:ident, $cx:ident, $call:expr) => {
        match $self.callers.replaced($cx) {
            None => $call,
            Some(own) => Box::pin(async move {
                let $cx = &own;
                $call.await
            }),
        }
    };
}

/// As for file systems.
macro_rules! as_changer {
    ($self:ident, $cx:ident, $op:expr, $call:expr) => {
        match $self.callers.may_change($op) {
            Ok(()) => as_caller!($self, $cx, $call),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    };
}

/// What needs a file that is open for writing is not refused here: the opening was.
impl OpenFile for ForwardFile {
    fn id(&self) -> FileId {
        self.inner.id()
    }

    fn at_open(&self) -> Option<AtOpen> {
        self.inner.at_open()
    }

    /// The file of the session, so that it recognises its own.
    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }

    fn local_copy<'a>(&'a self, _: &'a Context) -> Fut<'a, Option<Arc<dyn LocalCopy>>> {
        Box::pin(async { None })
    }

    fn read<'a>(&'a self, cx: &'a Context, at: u64, into: BufMut) -> Fut<'a, Io<BufMut>> {
        as_caller!(self, cx, self.inner.read(cx, at, into))
    }

    fn write<'a>(&'a self, cx: &'a Context, how: Write, from: Buf) -> Fut<'a, Result<usize>> {
        as_caller!(self, cx, self.inner.write(cx, how, from))
    }

    fn readdir<'a>(
        &'a self,
        cx: &'a Context,
        cookie: u64,
        max_bytes: usize,
        plus: bool,
    ) -> Fut<'a, Result<DirPage>> {
        as_caller!(self, cx, self.inner.readdir(cx, cookie, max_bytes, plus))
    }

    fn getattr<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Attr>> {
        as_caller!(self, cx, self.inner.getattr(cx))
    }

    fn setattr<'a>(&'a self, cx: &'a Context, set: SetAttr) -> Fut<'a, Result<Attr>> {
        as_changer!(self, cx, Op::Setattr, self.inner.setattr(cx, set))
    }

    fn flush<'a>(&'a self, cx: &'a Context, owner: LockOwner) -> Fut<'a, Result<()>> {
        as_caller!(self, cx, self.inner.flush(cx, owner))
    }

    fn sync<'a>(&'a self, cx: &'a Context, data_only: bool) -> Fut<'a, Result<()>> {
        as_caller!(self, cx, self.inner.sync(cx, data_only))
    }

    fn allocate<'a>(&'a self, cx: &'a Context, what: Allocate) -> Fut<'a, Result<()>> {
        as_caller!(self, cx, self.inner.allocate(cx, what))
    }

    fn seek<'a>(&'a self, cx: &'a Context, at: u64, what: Seek) -> Fut<'a, Result<u64>> {
        as_caller!(self, cx, self.inner.seek(cx, at, what))
    }

    fn copy_range<'a>(
        &'a self,
        cx: &'a Context,
        at: u64,
        to: &'a dyn OpenFile,
        to_at: u64,
        len_bytes: u64,
    ) -> Fut<'a, Result<u64>> {
        as_caller!(self, cx, self.inner.copy_range(cx, at, to, to_at, len_bytes))
    }

    fn lock<'a>(&'a self, cx: &'a Context, lock: Lock, wait: bool) -> Fut<'a, Result<()>> {
        as_caller!(self, cx, self.inner.lock(cx, lock, wait))
    }

    fn test_lock<'a>(&'a self, cx: &'a Context, lock: Lock) -> Fut<'a, Result<Option<Lock>>> {
        as_caller!(self, cx, self.inner.test_lock(cx, lock))
    }

    fn get_flags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<u32>> {
        as_caller!(self, cx, self.inner.get_flags(cx))
    }

    fn set_flags<'a>(&'a self, cx: &'a Context, flags: u32) -> Fut<'a, Result<()>> {
        as_changer!(self, cx, Op::SetFlags, self.inner.set_flags(cx, flags))
    }

    fn get_xflags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Xflags>> {
        as_caller!(self, cx, self.inner.get_xflags(cx))
    }

    fn set_xflags<'a>(&'a self, cx: &'a Context, set: Xflags) -> Fut<'a, Result<()>> {
        as_changer!(self, cx, Op::SetXflags, self.inner.set_xflags(cx, set))
    }

    fn close<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        as_caller!(self, cx, self.inner.close(cx))
    }
}
