//! An open file with read-ahead and merged writes.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dray_core::{
    Allocate, AtOpen, Attr, Buf, BufMut, Context, DirPage, FileId, Fut, Io, LocalCopy, Lock,
    LockOwner, Op, OpenFile, OpenHow, Result, Seek, SetAttr, Write, Xflags,
};

use super::ahead::{ClientRead, READ_MAX_BYTES};
use super::core::AggregateCore;
use super::figures::add;
use super::file_state::AggregatedFileState;
use super::late_errors::ErrorCursor;
use super::pending::{OFFSET_MAX, SmallWrite, WRITE_MAX_BYTES};
use super::streams::Reader;

/// A file open at a client.
pub(super) struct AggregatedFile {
    state: Arc<AggregatedFileState>,
    inner: Arc<dyn OpenFile>,
    how: OpenHow,
    reader: Reader,
    cursor: ErrorCursor,
    /// A write through it has succeeded: the next ones may be merged. What is wrong with all writes of
    /// an open file, such as a file system that is read-only, the first one finds out.
    has_written: AtomicBool,
}

impl AggregatedFile {
    pub(super) fn shared(
        core: &Arc<AggregateCore>,
        inner: Arc<dyn OpenFile>,
        how: OpenHow,
    ) -> Arc<dyn OpenFile> {
        let state = core.state(inner.id());
        let cursor = state.cursor_at_open();
        let reader = Reader(core.next_reader());
        let has_written = AtomicBool::new(false);
        Arc::new(AggregatedFile { state, inner, how, reader, cursor, has_written })
    }

    async fn read_all(&self, cx: &Context, at: u64, mut into: BufMut) -> Io<BufMut> {
        if let Err(error) = cx.check() {
            return Err((error.during(Op::Read), into));
        }
        let (state, len_bytes) = (&self.state, into.room());
        let figures = &state.core.figures;
        if state.has_pending() && self.how.reads() {
            if len_bytes > 0 && state.read_pending(at, &mut into) {
                add(&figures.read_hits, 1);
                add(&figures.read_hit_bytes, len_bytes as u64);
                return Ok(into);
            }
            state.settle_range(at, len_bytes).await;
        }
        let small = (1..=READ_MAX_BYTES).contains(&len_bytes);
        if small && self.how.reads() && state.core.reads_ahead() {
            let wanted = ClientRead { cx, file: &self.inner, reader: self.reader, at, len_bytes };
            if let Some(data) = state.read_ahead(&wanted).await {
                add(&figures.read_hits, 1);
                add(&figures.read_hit_bytes, len_bytes as u64);
                into.put(&data);
                return Ok(into);
            }
        }
        self.read_below(cx, at, into).await
    }

    /// A file ends where its pending data end, and what is before them is a hole.
    async fn read_below(&self, cx: &Context, at: u64, into: BufMut) -> Io<BufMut> {
        add(&self.state.core.figures.reads_passed, 1);
        let before = into.len();
        let into = self.inner.read(cx, at, into).await?;
        if into.room() == 0 || !self.state.has_pending() {
            return Ok(into);
        }
        self.state.settle_all().await;
        let at = at.saturating_add((into.len() - before) as u64);
        self.inner.read(cx, at, into).await
    }

    async fn write_all(&self, cx: &Context, how: Write, from: Buf) -> Result<usize> {
        cx.check()?;
        let state = &self.state;
        state.parts().errors.at_write(&self.cursor)?;
        if self.may_merge(how, from.len()) {
            let end = how.at + from.len() as u64;
            state.forget(how.at, end);
            let write = SmallWrite { cx, file: &self.inner, how, data: &from };
            let merged = state.merge(&write).await;
            state.forget(how.at, end);
            if merged {
                return Ok(from.len());
            }
        }
        self.write_below(cx, how, from).await
    }

    fn may_merge(&self, how: Write, len_bytes: usize) -> bool {
        const DIRECT: i32 = libc::O_DIRECT | libc::O_APPEND;
        (1..=WRITE_MAX_BYTES).contains(&len_bytes)
            && !how.append
            && !how.sync
            && how.at < OFFSET_MAX
            && self.state.core.merges()
            && self.how.flags & DIRECT == 0
            && self.has_written.load(Ordering::Relaxed)
            && (!how.kill_set_id || self.state.parts().privileges_cleared)
    }

    async fn write_below(&self, cx: &Context, how: Write, from: Buf) -> Result<usize> {
        let state = &self.state;
        let is_anywhere = how.append || how.sync; // what is on media is all that came before
        let (start, end) = match is_anywhere {
            true => (0, u64::MAX),
            false => (how.at, how.at.saturating_add(from.len() as u64)),
        };
        match is_anywhere {
            true => state.settle_all().await,
            false => state.settle_range(how.at, from.len()).await,
        }
        state.forget(start, end);
        add(&state.core.figures.writes_passed, 1);
        let written = self.inner.write(cx, how, from).await;
        state.forget(start, end);
        if written.is_ok() {
            self.has_written.store(true, Ordering::Relaxed);
            if how.kill_set_id {
                state.parts().privileges_cleared = true;
            }
        }
        written
    }

    /// Has `change` change the file in a way that is not known here.
    async fn change<T>(&self, change: impl Future<Output = T>) -> T {
        self.state.before_change().await;
        let outcome = change.await;
        self.state.after_change();
        outcome
    }

    async fn change_attributes<T>(&self, change: impl Future<Output = T>) -> T {
        self.state.attributes_change();
        let outcome = self.change(change).await;
        self.state.attributes_change();
        outcome
    }

    /// Attributes in a listing are those of files of which nothing is pending.
    async fn settle_listed(&self, cx: &Context, page: &mut DirPage) {
        let core = &self.state.core;
        for index in 0..page.len() {
            let Some((_, entry)) = page.get(index) else { return };
            let (id, has_attr) = (entry.id, entry.attr.is_some());
            if let Some(state) = core.with_pending(id).filter(|_| has_attr) {
                state.settle_all().await;
                page.set_attr(index, core.inner.getattr(&cx.uncounted(), id).await.ok());
            }
        }
    }
}

impl OpenFile for AggregatedFile {
    fn id(&self) -> FileId {
        self.inner.id()
    }

    fn at_open(&self) -> Option<AtOpen> {
        self.inner.at_open()
    }

    /// The file below, so that it recognises its own.
    fn as_any(&self) -> &dyn Any {
        self.inner.as_any()
    }

    fn local_copy<'a>(&'a self, _: &'a Context) -> Fut<'a, Option<Arc<dyn LocalCopy>>> {
        Box::pin(async { None })
    }

    fn read<'a>(&'a self, cx: &'a Context, at: u64, into: BufMut) -> Fut<'a, Io<BufMut>> {
        Box::pin(self.read_all(cx, at, into))
    }

    fn write<'a>(&'a self, cx: &'a Context, how: Write, from: Buf) -> Fut<'a, Result<usize>> {
        Box::pin(async move {
            self.write_all(cx, how, from).await.map_err(|error| error.during(Op::Write))
        })
    }

    fn readdir<'a>(
        &'a self,
        cx: &'a Context,
        cookie: u64,
        max_bytes: usize,
        plus: bool,
    ) -> Fut<'a, Result<DirPage>> {
        Box::pin(async move {
            let mut page = self.inner.readdir(cx, cookie, max_bytes, plus).await?;
            if plus && self.state.core.pending_files.load(Ordering::Acquire) > 0 {
                self.settle_listed(cx, &mut page).await;
            }
            Ok(page)
        })
    }

    fn getattr<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Attr>> {
        Box::pin(async move {
            self.state.settle_all().await;
            self.inner.getattr(cx).await
        })
    }

    fn setattr<'a>(&'a self, cx: &'a Context, set: SetAttr) -> Fut<'a, Result<Attr>> {
        Box::pin(self.change_attributes(async move { self.inner.setattr(cx, set).await }))
    }

    fn flush<'a>(&'a self, cx: &'a Context, owner: LockOwner) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let settled = self.state.settle_and_report(&self.cursor).await;
            self.inner.flush(cx, owner).await?; // locks end in any case
            settled.map_err(|error| error.during(Op::Flush))
        })
    }

    fn sync<'a>(&'a self, cx: &'a Context, data_only: bool) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let settled = self.state.settle_and_report(&self.cursor).await;
            self.inner.sync(cx, data_only).await?;
            settled.map_err(|error| error.during(Op::Sync))
        })
    }

    fn allocate<'a>(&'a self, cx: &'a Context, what: Allocate) -> Fut<'a, Result<()>> {
        Box::pin(self.change(async move { self.inner.allocate(cx, what).await }))
    }

    fn seek<'a>(&'a self, cx: &'a Context, at: u64, what: Seek) -> Fut<'a, Result<u64>> {
        Box::pin(async move {
            self.state.settle_all().await;
            self.inner.seek(cx, at, what).await
        })
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
            self.state.settle_all().await;
            let copy = async { self.inner.copy_range(cx, at, to, to_at, len_bytes).await };
            let Some(target) = self.state.core.known(to.id()) else { return copy.await };
            target.before_change().await;
            let copied = copy.await;
            target.after_change();
            copied
        })
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
        Box::pin(self.change_attributes(async move { self.inner.set_flags(cx, flags).await }))
    }

    fn get_xflags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Xflags>> {
        self.inner.get_xflags(cx)
    }

    fn set_xflags<'a>(&'a self, cx: &'a Context, set: Xflags) -> Fut<'a, Result<()>> {
        Box::pin(self.change_attributes(async move { self.inner.set_xflags(cx, set).await }))
    }

    fn close<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let settled = self.state.settle_and_report(&self.cursor).await;
            self.inner.close(cx).await?;
            settled.map_err(|error| error.during(Op::Close))
        })
    }
}
