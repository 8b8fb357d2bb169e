//! [`OpenFile`] over a file of the server's machine.

use std::any::Any;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use dray_core::{
    Allocate, AtOpen, Attr, Buf, BufMut, Class, Context, DirPage, Errno, Error, FileId, Fut, Io,
    LocalCopy, Lock, LockFamily, LockKind, LockOwner, Op, OpenFile, Result, Seek, SetAttr, Write,
    Xflags,
};

use super::attrs::AttrTarget;
use super::core::{Core, SquashedCaller};
use super::data::{self, Copy, WriteAttempt};
use super::descriptor::FileState;
use super::lanes::{Lane, LaneCall};
use super::options::Inline;
use super::{sys, thread_clients};
use crate::locks::Owner;

/// What is written behind its writer goes to the disk at once from this size on. The disk works while the program
/// writes on, and the program waits less at its sync. Less would be small requests of the disk.
const WRITE_BACK_MIN_BYTES: usize = 1 << 20;

/// What a thread that serves connections writes at a time, into memory: some 20 microseconds. No kernel has to interrupt
/// a copy, and small calls would wait for all of a large one.
const PIECE_BYTES: usize = 64 << 10;

/// A file open at a client.
pub(crate) struct PosixFile {
    core: Arc<Core>,
    state: Arc<FileState>,
}

impl PosixFile {
    pub(crate) fn shared(core: &Arc<Core>, state: Arc<FileState>) -> Arc<dyn OpenFile> {
        Arc::new(PosixFile { core: core.clone(), state })
    }

    /// A buffer cannot be lost with a call that finds no thread: it waits beside it.
    async fn read_on_lane(&self, caller: SquashedCaller, at: u64, into: BufMut) -> Io<BufMut> {
        let waiting = Arc::new(Mutex::new(Some(into)));
        let (slot, file) = (waiting.clone(), self.state.clone());
        let lock = |slot: &Mutex<Option<BufMut>>| {
            slot.lock().unwrap_or_else(PoisonError::into_inner).take()
        };
        let read = move |core: &Core, _: &SquashedCaller| {
            let mut into = lock(&slot)?;
            let result = data::read(core, &file, at, &mut into, true);
            *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(into);
            result
        };
        let result = self.core.on_lane(Lane::Reads, self.id(), caller, read).await;
        let into = lock(&waiting).unwrap_or_else(|| BufMut::heap(0));
        match result {
            Ok(()) => Ok(into),
            Err(error) => Err((error.during(Op::Read), into)),
        }
    }

    /// Writes here and now what does not have to wait, and the rest on a thread that may.
    async fn write_as(&self, caller: SquashedCaller, how: Write, from: Buf) -> Result<usize> {
        let (core, file) = (&self.core, &self.state);
        let inline = core.inline && core.may_become(&caller);
        let here = core.options.inline == Inline::Always || core.below.is_memory();
        if inline && here && !how.sync {
            return self.write_here(&caller, how, &from).await;
        }
        let mut done = 0;
        let fails = core.nowait_writes_fail.load(Ordering::Relaxed);
        // While others wait for the disk it may be frozen, which the kernel waits for in any case
        // (`kiocb_start_write` in include/linux/fs.h).
        if inline && !how.sync && !fails && !core.lanes.are_busy() {
            let tried = |core: &Core| Some(Ok(data::try_write(core, file, how, &from)));
            match core.now(&caller, tried) {
                Some(Ok(WriteAttempt::Written(result))) => return result,
                Some(Ok(WriteAttempt::Waits(count))) => done = count,
                Some(Err(error)) => return Err(error),
                None => {}
            }
        }
        let (file, lane) = (file.clone(), if how.sync { Lane::Syncs } else { Lane::Writes });
        let lane = LaneCall::moving(lane, from.len());
        let write = move |core: &Core, caller: &SquashedCaller| {
            Some(data::write(core, caller, &file, how, &from, done..from.len()))
        };
        // In a box, so that writes that end on this thread are no larger.
        match Box::pin(core.on_lane(lane, self.id(), caller, write)).await {
            Err(_) if done > 0 => Ok(done),
            written => written,
        }
    }
}

impl PosixFile {
    /// Writes on this thread. Where that serves several clients, other calls pass between the pieces. An append is one
    /// piece: the kernel has none of another process in between.
    async fn write_here(
        &self,
        caller: &SquashedCaller,
        mut how: Write,
        from: &Buf,
    ) -> Result<usize> {
        let is_one_piece = how.append || !thread_clients::are_several();
        let piece_bytes = if is_one_piece { from.len() } else { PIECE_BYTES };
        let mut done = 0;
        loop {
            let end = from.len().min(done + piece_bytes);
            let write =
                |core: &Core| Some(data::write(core, caller, &self.state, how, from, done..end));
            let written = self.core.now(caller, write).unwrap_or_else(|| Err(Errno::EIO.into()));
            match written {
                Err(_) if done > 0 => return Ok(done),
                Ok(count) if count == end && end < from.len() => done = end,
                written => return written,
            }
            how.kill_set_id = false;
            dray_rt::yield_to_io().await;
        }
    }

    /// Has the kernel begin to write these bytes to the disk, so that a later sync finds little to do. The kernel
    /// reports an error of that to the next sync, as always.
    async fn start_write_back(&self, cx: &Context, at: u64, len_bytes: usize) {
        if self.core.below.is_memory() {
            return;
        }
        let (file, caller) = (self.state.clone(), self.core.caller(cx, Op::Write));
        let start = move |core: &Core, _: &SquashedCaller| {
            let fd = file.fd_to_change(core);
            Some(fd.and_then(|fd| Ok(sys::start_write_back(fd.as_fd(), at, len_bytes)?)))
        };
        // Without it the data go when the kernel likes, or with the sync.
        let _ = self.core.on_lane(Lane::Writes, self.id(), caller, start).await;
    }
}

/// Has the file system below send what it holds back of a file. Errors: those of close(2).
fn flush_by_close(core: &Core, file: &FileState) -> Result<()> {
    let flushed = sys::flush_by_close(&*file.fd(core)?);
    if let Some(ends) = &core.written_ends {
        ends.flushed(file.inode.id);
    }
    Ok(flushed?)
}

impl OpenFile for PosixFile {
    fn id(&self) -> FileId {
        self.state.inode.id
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

    fn read<'a>(&'a self, cx: &'a Context, at: u64, mut into: BufMut) -> Fut<'a, Io<BufMut>> {
        Box::pin(async move {
            if let Err(error) = cx.check() {
                return Err((error, into));
            }
            let caller = self.core.caller(cx, Op::Read);
            if self.core.inline && self.core.may_become(&caller) {
                let read = |core: &Core| data::read(core, &self.state, at, &mut into, false);
                match self.core.now(&caller, read) {
                    Some(Ok(())) => return Ok(into),
                    Some(Err(error)) => return Err((error.during(Op::Read), into)),
                    None => {}
                }
            }
            self.read_on_lane(caller, at, into).await
        })
    }

    fn write<'a>(&'a self, cx: &'a Context, how: Write, from: Buf) -> Fut<'a, Result<usize>> {
        Box::pin(async move {
            cx.check()?;
            let write = || self.write_as(self.core.caller(cx, Op::Write), how, from.clone());
            let written = self.core.with_space(write).await;
            let count = written.map_err(|error| error.during(Op::Write))?;
            if cx.class == Class::Background && count >= WRITE_BACK_MIN_BYTES && !how.append {
                self.start_write_back(cx, how.at, count).await;
            }
            Ok(count)
        })
    }

    fn readdir<'a>(
        &'a self,
        cx: &'a Context,
        cookie: u64,
        max_bytes: usize,
        plus: bool,
    ) -> Fut<'a, Result<DirPage>> {
        let file = self.state.clone();
        let max_bytes = max_bytes.min(dray_core::IO_MAX_BYTES);
        let read = move |core: &Core, _: &SquashedCaller| {
            data::read_dir(core, &file, cookie, max_bytes, plus)
        };
        Box::pin(self.core.run(cx, (Op::Readdir, self.id()), read))
    }

    fn getattr<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Attr>> {
        let file = self.state.clone();
        let look = move |core: &Core, _: &SquashedCaller| {
            let attr = core.stat(file.fd(core)?.as_fd())?.attr;
            Ok(core.shown(file.inode.id, attr))
        };
        Box::pin(self.core.run(cx, (Op::Getattr, self.id()), look))
    }

    fn setattr<'a>(&'a self, cx: &'a Context, set: SetAttr) -> Fut<'a, Result<Attr>> {
        let file = self.state.clone();
        let change = move |core: &Core, caller: &SquashedCaller, may_block| {
            let fd = if set.size.is_some() { file.fd_to_change(core) } else { file.fd(core) };
            let fd = match fd {
                Ok(fd) => fd,
                Err(error) => return Some(Err(error)),
            };
            let target = AttrTarget::Open(fd.as_fd());
            let done = core.set_attr(caller, file.inode.id, &target, set, may_block);
            if set.size.is_some() {
                file.written();
            }
            done
        };
        let lane = self.core.lane_to_set(self.id(), set);
        Box::pin(self.core.run_patient(cx, Op::Setattr, lane, change))
    }

    fn flush<'a>(&'a self, cx: &'a Context, owner: LockOwner) -> Fut<'a, Result<()>> {
        self.core.locks.release(self.id(), LockFamily::Posix, Owner::of(cx, owner));
        if self.core.below.is_local() {
            return Box::pin(async { Ok(()) });
        }
        let file = self.state.clone();
        let flush = move |core: &Core, _: &SquashedCaller| flush_by_close(core, &file);
        Box::pin(self.core.run(cx, (Op::Flush, self.id()), flush))
    }

    fn sync<'a>(&'a self, cx: &'a Context, data_only: bool) -> Fut<'a, Result<()>> {
        let file = self.state.clone();
        let sync = move |core: &Core, _: &SquashedCaller| file.sync(core, data_only);
        Box::pin(self.core.run(cx, (Op::Sync, self.id()), sync))
    }

    fn allocate<'a>(&'a self, cx: &'a Context, what: Allocate) -> Fut<'a, Result<()>> {
        Box::pin(self.core.with_space(move || {
            let file = self.state.clone();
            let allocate = move |core: &Core, _: &SquashedCaller| data::allocate(core, &file, what);
            self.core.run(cx, (Op::Allocate, self.id()), allocate)
        }))
    }

    fn seek<'a>(&'a self, cx: &'a Context, at: u64, what: Seek) -> Fut<'a, Result<u64>> {
        let file = self.state.clone();
        let seek = move |core: &Core, _: &SquashedCaller| data::seek(core, &file, at, what);
        Box::pin(self.core.run(cx, (Op::Seek, self.id()), seek))
    }

    fn copy_range<'a>(
        &'a self,
        cx: &'a Context,
        at: u64,
        to: &'a dyn OpenFile,
        to_at: u64,
        len_bytes: u64,
    ) -> Fut<'a, Result<u64>> {
        let target = match to.as_any().downcast_ref::<PosixFile>() {
            Some(to) if Arc::ptr_eq(&to.core, &self.core) => to.state.clone(),
            _ => return Box::pin(async { Err(Error::new(Errno::EXDEV).during(Op::CopyRange)) }),
        };
        let about = target.inode.id;
        let copy = Copy { from: (self.state.clone(), at), to: (target, to_at), len_bytes };
        let copy = move |core: &Core, _: &SquashedCaller| data::copy_range(core, &copy);
        Box::pin(self.core.run(cx, (Op::CopyRange, about), copy))
    }

    fn lock<'a>(&'a self, cx: &'a Context, lock: Lock, wait: bool) -> Fut<'a, Result<()>> {
        // Locks are ours alone: the file system below would see one process, the server.
        Box::pin(async move {
            if lock.family == LockFamily::Flock && lock.kind != LockKind::Unlock {
                let owner = Owner::of(cx, lock.owner);
                self.state.flocks.add(&self.core.locks, self.id(), owner);
            }
            let taken = self.core.locks.lock(cx, self.id(), lock, wait).await;
            taken.map_err(|error| error.during(Op::Lock))
        })
    }

    fn test_lock<'a>(&'a self, cx: &'a Context, lock: Lock) -> Fut<'a, Result<Option<Lock>>> {
        Box::pin(async move { Ok(self.core.locks.test(cx, self.id(), lock)) })
    }

    fn get_flags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<u32>> {
        let file = self.state.clone();
        let get =
            move |core: &Core, _: &SquashedCaller| Ok(sys::get_flags(file.fd(core)?.as_fd())?);
        Box::pin(self.core.run(cx, (Op::GetFlags, self.id()), get))
    }

    fn set_flags<'a>(&'a self, cx: &'a Context, flags: u32) -> Fut<'a, Result<()>> {
        let file = self.state.clone();
        Box::pin(self.core.run(cx, (Op::SetFlags, self.id()), move |core, _| {
            core.writable()?;
            let fd = file.fd(core)?;
            let _copying = core.copying([Some(file.inode.id), None]);
            let set = sys::set_flags(fd.as_fd(), flags);
            core.changed(file.inode.id, fd.as_fd());
            Ok(set?)
        }))
    }

    fn get_xflags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Xflags>> {
        let file = self.state.clone();
        let get =
            move |core: &Core, _: &SquashedCaller| Ok(sys::get_xflags(file.fd(core)?.as_fd())?);
        Box::pin(self.core.run(cx, (Op::GetXflags, self.id()), get))
    }

    fn set_xflags<'a>(&'a self, cx: &'a Context, set: Xflags) -> Fut<'a, Result<()>> {
        let file = self.state.clone();
        Box::pin(self.core.run(cx, (Op::SetXflags, self.id()), move |core, _| {
            core.writable()?;
            let fd = file.fd(core)?;
            let _copying = core.copying([Some(file.inode.id), None]);
            let set = sys::set_xflags(fd.as_fd(), set);
            core.changed(file.inode.id, fd.as_fd());
            Ok(set?)
        }))
    }

    fn close<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        self.state.flocks.release(&self.core.locks, self.id());
        let file = self.state.clone();
        // Data go to the disk when a file is closed that was cut before (`ext4_release_file`), and
        // blocks that were reserved are given back.
        let is_quick = !file.write_back.is_due() && !self.core.lanes.are_busy();
        let inline = self.core.stays(Lane::Closes) || self.core.inline && is_quick;
        // A file system of a program or over a network gives another name to a file that is removed
        // while it is open. Then the directory does not become empty. A close begins before the
        // removal that comes behind it.
        let lane = if self.core.below.is_local() { Lane::Closes } else { Lane::Changes };
        let lane = ((lane, self.id()), inline);
        Box::pin(self.core.run_patient(cx, Op::Close, lane, move |core, _, _| {
            core.close_file(&file);
            Some(Ok(()))
        }))
    }
}

impl Drop for PosixFile {
    fn drop(&mut self) {
        self.state.flocks.release(&self.core.locks, self.id());
    }
}
