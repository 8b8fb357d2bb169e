//! [`OpenFile`] over a file of the server's machine.

use std::any::Any;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use dray_core::{
    Allocate, AtOpen, Attr, Buf, BufMut, Context, DirPage, Errno, Error, FileId, Fut, Io, Lock,
    LockFamily, LockKind, LockOwner, Op, OpenFile, Result, Seek, SetAttr, Write, Xflags,
};

use super::attrs::Target;
use super::core::{Caller, Core};
use super::data;
use super::descriptor::FileState;
use super::sys;
use crate::locks::Owner;

/// A file open at a client.
pub(crate) struct PosixFile {
    core: Arc<Core>,
    state: Arc<FileState>,
}

impl PosixFile {
    pub(crate) fn shared(core: &Arc<Core>, state: Arc<FileState>) -> Arc<dyn OpenFile> {
        Arc::new(PosixFile { core: core.clone(), state })
    }

    /// By another thread; `inline`: one that must not wait is to try it first. A buffer cannot be lost
    /// with a call that finds no thread: it waits beside it.
    async fn read_elsewhere(
        &self,
        cx: &Context,
        (at, inline): (u64, bool),
        into: BufMut,
    ) -> Io<BufMut> {
        let waiting = Arc::new(Mutex::new(Some(into)));
        let (slot, file) = (waiting.clone(), self.state.clone());
        let lock = |slot: &Mutex<Option<BufMut>>| {
            slot.lock().unwrap_or_else(PoisonError::into_inner).take()
        };
        let done = self.core.run_patient(cx, Op::Read, inline, move |core, _, may_block| {
            let mut into = lock(&slot)?;
            let result = data::read(core, &file, at, &mut into, may_block);
            *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(into);
            result
        });
        let result = done.await;
        let into = lock(&waiting).unwrap_or_else(|| BufMut::heap(0));
        match result {
            Ok(()) => Ok(into),
            Err(error) => Err((error, into)),
        }
    }

    fn owner(cx: &Context, owner: LockOwner) -> Owner {
        Owner { node: cx.node, owner }
    }
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

    fn read<'a>(&'a self, cx: &'a Context, at: u64, mut into: BufMut) -> Fut<'a, Io<BufMut>> {
        Box::pin(async move {
            if let Err(error) = cx.check() {
                return Err((error, into));
            }
            if self.core.inline {
                let caller = self.core.caller(cx, Op::Read);
                if self.core.thread_for(&caller).is_some() {
                    return self.read_elsewhere(cx, (at, true), into).await;
                }
                let read = |core: &Core| data::read(core, &self.state, at, &mut into, false);
                match self.core.now(&caller, read) {
                    Some(Ok(())) => return Ok(into),
                    Some(Err(error)) => return Err((error.during(Op::Read), into)),
                    None => {}
                }
            }
            self.read_elsewhere(cx, (at, false), into).await
        })
    }

    fn write<'a>(&'a self, cx: &'a Context, how: Write, from: Buf) -> Fut<'a, Result<usize>> {
        let file = self.state.clone();
        let inline = self.core.inline && !how.sync;
        self.core.run_patient(cx, Op::Write, inline, move |core, caller: &Caller, may_block| {
            data::write(core, caller, &file, how, &from, may_block)
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
        self.core.run(cx, Op::Readdir, move |core, _| {
            data::read_dir(core, &file, cookie, max_bytes, plus)
        })
    }

    fn getattr<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Attr>> {
        let file = self.state.clone();
        self.core.run(cx, Op::Getattr, move |core, _| Ok(core.stat(file.fd(core)?.as_fd())?.attr))
    }

    fn setattr<'a>(&'a self, cx: &'a Context, set: SetAttr) -> Fut<'a, Result<Attr>> {
        let file = self.state.clone();
        self.core.run_patient(cx, Op::Setattr, self.core.inline, move |core, caller, may_block| {
            let fd = if set.size.is_some() { file.fd_to_change(core) } else { file.fd(core) };
            match fd {
                Ok(fd) => {
                    let target = Target::Open(fd.as_fd());
                    let done = core.set_attr(caller, file.inode.id, &target, set, may_block);
                    if set.size.is_some() {
                        file.written();
                    }
                    done
                }
                Err(error) => Some(Err(error)),
            }
        })
    }

    fn flush<'a>(&'a self, cx: &'a Context, owner: LockOwner) -> Fut<'a, Result<()>> {
        self.core.locks.release(self.id(), LockFamily::Posix, PosixFile::owner(cx, owner));
        if self.core.below.is_local() {
            return Box::pin(async { Ok(()) });
        }
        let file = self.state.clone();
        self.core.run(cx, Op::Flush, move |core, _| Ok(sys::flush_by_close(&*file.fd(core)?)?))
    }

    fn sync<'a>(&'a self, cx: &'a Context, data_only: bool) -> Fut<'a, Result<()>> {
        let file = self.state.clone();
        self.core.run_slow(cx, Op::Sync, move |core, _| file.sync(core, data_only))
    }

    fn allocate<'a>(&'a self, cx: &'a Context, what: Allocate) -> Fut<'a, Result<()>> {
        let file = self.state.clone();
        self.core.run_slow(cx, Op::Allocate, move |core, _| data::allocate(core, &file, what))
    }

    fn seek<'a>(&'a self, cx: &'a Context, at: u64, what: Seek) -> Fut<'a, Result<u64>> {
        let file = self.state.clone();
        self.core.run(cx, Op::Seek, move |core, _| data::seek(core, &file, at, what))
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
        let source = self.state.clone();
        self.core.run_slow(cx, Op::CopyRange, move |core, _| {
            data::copy_range(core, (&source, at), (&target, to_at), len_bytes)
        })
    }

    fn lock<'a>(&'a self, cx: &'a Context, lock: Lock, wait: bool) -> Fut<'a, Result<()>> {
        // Locks are ours alone: the file system below would see one process, the server.
        Box::pin(async move {
            let owner = PosixFile::owner(cx, lock.owner);
            let taken = self.core.locks.lock(cx, self.id(), lock, wait).await;
            if taken.is_ok() && lock.family == LockFamily::Flock && lock.kind != LockKind::Unlock {
                self.state.remember_flock((owner.node, owner.owner));
            }
            taken.map_err(|error| error.during(Op::Lock))
        })
    }

    fn test_lock<'a>(&'a self, cx: &'a Context, lock: Lock) -> Fut<'a, Result<Option<Lock>>> {
        Box::pin(async move { Ok(self.core.locks.test(cx.node, self.id(), lock)) })
    }

    fn get_flags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<u32>> {
        let file = self.state.clone();
        self.core.run(cx, Op::GetFlags, move |core, _| Ok(sys::get_flags(file.fd(core)?.as_fd())?))
    }

    fn set_flags<'a>(&'a self, cx: &'a Context, flags: u32) -> Fut<'a, Result<()>> {
        let file = self.state.clone();
        self.core.run(cx, Op::SetFlags, move |core, _| {
            core.writable()?;
            let fd = file.fd(core)?;
            let _copying = core.copying([Some(file.inode.id), None]);
            let set = sys::set_flags(fd.as_fd(), flags);
            core.changed(file.inode.id, fd.as_fd());
            Ok(set?)
        })
    }

    fn get_xflags<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Xflags>> {
        let file = self.state.clone();
        self.core
            .run(cx, Op::GetXflags, move |core, _| Ok(sys::get_xflags(file.fd(core)?.as_fd())?))
    }

    fn set_xflags<'a>(&'a self, cx: &'a Context, set: Xflags) -> Fut<'a, Result<()>> {
        let file = self.state.clone();
        self.core.run(cx, Op::SetXflags, move |core, _| {
            core.writable()?;
            let fd = file.fd(core)?;
            let _copying = core.copying([Some(file.inode.id), None]);
            let set = sys::set_xflags(fd.as_fd(), set);
            core.changed(file.inode.id, fd.as_fd());
            Ok(set?)
        })
    }

    fn close<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        for (node, owner) in self.state.take_flock_owners() {
            self.core.locks.release(self.id(), LockFamily::Flock, Owner { node, owner });
        }
        let file = self.state.clone();
        self.core.run(cx, Op::Close, move |_, _| {
            drop(file.close());
            Ok(())
        })
    }
}

impl Drop for PosixFile {
    fn drop(&mut self) {
        for (node, owner) in self.state.take_flock_owners() {
            self.core.locks.release(self.id(), LockFamily::Flock, Owner { node, owner });
        }
    }
}
