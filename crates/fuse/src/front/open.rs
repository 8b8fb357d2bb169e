//! Opening and closing.

use std::os::fd::AsFd;
use std::sync::Arc;

use dray_core::{
    AtOpen, Context, CreateHow, Entry, Errno, FileId, LockOwner, Name, OpenFile, OpenHow,
    PageValidity, Result,
};

use crate::front::Worker;
use crate::notify::inval_inode;
use crate::proto::OpenOperation;
use crate::proto::abi::{self, fopen, init};
use crate::proto::reply;
use crate::proto::wire::Small;
use crate::state::capabilities::XattrQuery;
use crate::state::changes;
use crate::state::handles::OpenHandle;
use crate::state::passthrough::OpenMode;
use crate::state::stale_retries::{RetriedOpen, RetryCaller};
use crate::transport::KernelAnswer;
use crate::worker::versions::{OpenTime, PageDrop};

/// Flags that the file system below has no use for. They are about the descriptor, or about the
/// creation, which has a call of its own.
const NOT_PASSED_ON: i32 =
    libc::O_CREAT | libc::O_EXCL | libc::O_NOCTTY | libc::O_CLOEXEC | libc::O_NONBLOCK;

impl Worker {
    fn how(&self, flags: u32, open_flags: u32) -> OpenHow {
        OpenHow {
            flags: flags as i32 & !NOT_PASSED_ON,
            kill_set_id: open_flags & abi::OPEN_KILL_SUIDGID != 0,
            with_attr: self.shared.mode.looks_at_open(),
        }
    }

    fn create_how(&self, flags: u32, mode: u32, open_flags: u32) -> CreateHow {
        CreateHow {
            open: self.how(flags, open_flags),
            mode: mode & 0o7777,
            exclusive: flags as i32 & libc::O_EXCL != 0,
        }
    }

    pub(crate) async fn opening(
        &self,
        cx: &Context,
        node: u64,
        op: &OpenOperation<'_>,
    ) -> Result<KernelAnswer> {
        let id = self.id(node)?;
        let asked = self.shared.capabilities.asked();
        let before = self.shared.changes.now();
        match *op {
            OpenOperation::Open { flags, open_flags } => {
                let how = self.how(flags, open_flags);
                let passes = self.before_open(cx, node, how.flags)?;
                let file = self.open_believed(cx, (node, id), how).await?;
                let mode = self.open_mode(cx, node, &file, passes).await?;
                let kernel = match mode.as_ref().and_then(OpenMode::kernel_flags) {
                    Some(through) => (through, None),
                    None => {
                        let (kernel, dropping) =
                            self.kernel_flags(cx, (node, asked, before), &file, how.flags).await?;
                        ((kernel | self.past_the_cache(how.flags), 0), dropping)
                    }
                };
                self.open_answer(cx, Small::new(), (file, mode), how.flags, kernel)
            }
            OpenOperation::Opendir { flags } => {
                let how = self.how(flags | libc::O_DIRECTORY as u32, 0);
                let how = OpenHow { with_attr: false, ..how };
                let file = self.open_believed(cx, (node, id), how).await?;
                let said = file.at_open().map(|seen| seen.attr.validity);
                let kernel = match self.shared.mode.pages(said) {
                    PageValidity::Never => self.listing_flags((node, id), before),
                    PageValidity::UntilChanged => 0,
                    PageValidity::UntilRevoked => fopen::KEEP_CACHE | fopen::CACHE_DIR,
                };
                self.open_answer(cx, Small::new(), (file, None), how.flags, ((kernel, 0), None))
            }
            OpenOperation::Create { name, flags, mode, open_flags, .. } => {
                let how = self.create_how(flags, mode, open_flags);
                let caller = RetryCaller { thread: cx.pid, call: None };
                self.shared.stale_retries.comes(RetriedOpen {
                    caller,
                    file: id,
                    request: cx.origin.request,
                });
                let made = self.fs.create(cx, id, name, how).await?;
                self.created(cx, made, Some((id, name)), how, (asked, before))
            }
            OpenOperation::Tmpfile { flags, mode, open_flags, .. } => {
                let mut how = self.create_how(flags, mode, open_flags);
                how.open.flags &= !libc::O_TMPFILE; // which has O_DIRECTORY in it
                let made = self.fs.tmpfile(cx, id, how).await?;
                self.created(cx, made, None, how, (asked, before))
            }
        }
    }

    fn created(
        &self,
        cx: &Context,
        (entry, file): (Entry, Arc<dyn OpenFile>),
        place: Option<(FileId, &Name)>,
        how: CreateHow,
        (asked, before): (XattrQuery, changes::ChangeNumber),
    ) -> Result<KernelAnswer> {
        self.before_created(entry.id);
        let out = self.entry(&entry, place, before)?;
        if let Some(seen) = file.at_open().filter(|seen| seen.no_capability)
            && let Some(node) = self.shared.nodes.find(entry.id)
        {
            self.note_capability(node, asked, &seen);
        }
        if how.open.flags & libc::O_TRUNC != 0
            && let Some(node) = self.shared.nodes.find(entry.id)
        {
            self.shared.pages.doubt(node); // the file may have been there
        }
        let kernel = match self.shared.mode.pages(Some(entry.attr.validity)) {
            PageValidity::Never => fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES,
            PageValidity::UntilChanged | PageValidity::UntilRevoked => {
                self.past_the_cache(how.open.flags)
            }
        };
        let mode = self.created_mode(&file);
        self.open_answer(cx, out, (file, mode), how.open.flags, ((kernel, 0), None))
    }

    /// Appends must come in one piece, for the server to place. Through its page cache the kernel
    /// splits them where it takes a page to end (`fuse_fill_write_pages` in fs/fuse/file.c). What
    /// may be mapped has to stay in the cache, where the kernel maps nothing else (before 6.6). What must
    /// not be mapped to be stored into must not stay there.
    fn past_the_cache(&self, flags: i32) -> u32 {
        let access = flags & libc::O_ACCMODE;
        if !self.shared.options.shared_mmap && access == libc::O_RDWR {
            return fopen::DIRECT_IO;
        }
        let maps = access != libc::O_WRONLY && !self.shared.session.has(init::DIRECT_IO_ALLOW_MMAP);
        if flags & libc::O_APPEND == 0 || maps { 0 } else { fopen::DIRECT_IO }
    }

    fn open_answer(
        &self,
        cx: &Context,
        mut out: Small,
        (file, mode): (Arc<dyn OpenFile>, Option<OpenMode>),
        flags: i32,
        (kernel, dropping): ((u32, u32), Option<PageDrop>),
    ) -> Result<KernelAnswer> {
        let handles = &self.shared.handles;
        let fh = handles.add(file, flags, cx.origin.request, dropping)?;
        if let Some(mode) = mode {
            handles.find(fh)?.is_open_as(mode);
        }
        if flags & libc::O_DIRECTORY != 0 {
            handles.find(fh)?.keeps_listing(kernel.0 & fopen::CACHE_DIR != 0);
        }
        reply::put_open(&mut out, fh, kernel);
        Ok(KernelAnswer::Small(out))
    }

    /// What the kernel may do with the data of an open file, and which it is to drop. `asked` and
    /// `before` are from before it was opened.
    async fn kernel_flags(
        &self,
        cx: &Context,
        (node, asked, before): (u64, XattrQuery, changes::ChangeNumber),
        file: &Arc<dyn OpenFile>,
        flags: i32,
    ) -> Result<(u32, Option<PageDrop>)> {
        let seen = match file.at_open() {
            None if self.shared.mode.looks_at_open() => Some(self.seen_at_open(cx, file).await?),
            seen => seen,
        };
        if let Some(seen) = &seen {
            self.note_capability(node, asked, seen);
        }
        let watched = match self.shared.mode.pages(seen.map(|seen| seen.attr.validity)) {
            // Nothing is cached but for mappings, whose pages the kernel drops at each
            // open without KEEP_CACHE, and under leases.
            PageValidity::Never => return Ok(self.open_strictly((node, file.id()), flags)),
            PageValidity::UntilChanged => false,
            // What has been said since of a change by others may be newer than this answer.
            PageValidity::UntilRevoked => !self.shared.changes.since(before, file.id()),
        };
        // Nothing is said of its version: none has ever been another one.
        let Some(seen) = seen else { return Ok((fopen::KEEP_CACHE, None)) };
        let Some(dropping) = self.shared.versions.at_open(node, &seen, watched, OpenTime::now())
        else {
            return Ok((fopen::KEEP_CACHE, None));
        };
        // The kernel's idea of the size may be as old as its attributes. Without
        // data to drop this takes no lock that the open could hold. If it fails,
        // the attributes run out by themselves a little later.
        let _ = inval_inode(self.shared.device.as_fd(), node, None);
        Ok((0, Some(dropping)))
    }

    fn note_capability(&self, node: u64, asked: XattrQuery, seen: &AtOpen) {
        if seen.no_capability {
            let believed = self.shared.mode.attributes(&seen.attr);
            self.shared.capabilities.note_absent(node, asked, believed);
        }
    }

    /// What a file system does not say with the opening.
    async fn seen_at_open(&self, cx: &Context, file: &Arc<dyn OpenFile>) -> Result<AtOpen> {
        let clock = self.fs.clock();
        let attr = file.getattr(cx).await?;
        let times_past = clock.map(|clock| attr.is_past(clock));
        Ok(AtOpen { attr, no_capability: false, times_past })
    }

    /// A request came through this open file, so that the kernel has had the answer to its
    /// opening.
    pub(crate) fn used(&self, node: u64, handle: &OpenHandle) {
        let Some(dropping) = handle.take_dropping() else { return };
        match self.shared.mode.is_leased() {
            true => self.shared.pages.dropped(node, dropping),
            false => self.shared.versions.dropped(node, dropping),
        }
    }

    /// A descriptor was closed. The server hears of it if it has something to do or to say. Fcntl
    /// locks end with it, and an error not yet reported must be reported.
    pub(crate) async fn flush(
        &self,
        cx: &Context,
        node: u64,
        fh: u64,
        owner: u64,
    ) -> Result<KernelAnswer> {
        let owner = LockOwner::own(owner);
        let (shared, handle) = (&self.shared, self.handle(fh)?);
        self.used(node, &handle);
        let locks = shared.lock_owners.closes(&shared.nodes, node, owner);
        if locks.is_some() || shared.control.owes_error(handle.id) {
            let file = self.file_of(cx, &handle).await?;
            match file.flush(cx, owner).await {
                Ok(()) => {}
                // Of a caller that ends, or may: its locks are given back when that can be.
                Err(error) if error.errno() == Errno::EINTR && cx.check().is_err() => {
                    return Ok(KernelAnswer::Empty);
                }
                Err(error) => return Err(error),
            }
            if let Some(asked) = locks {
                shared.lock_owners.gave_up(node, owner, asked);
            }
        }
        Ok(KernelAnswer::Empty)
    }

    /// The last descriptor was closed; the kernel waits for nothing. The handle stays in
    /// the table until the server knows, so that a successor can close it.
    pub(crate) async fn release(&self, cx: &Context, node: u64, fh: u64) -> Result<KernelAnswer> {
        let handle = self.handle(fh)?;
        self.used(node, &handle);
        // A handle that a predecessor opened is opened again to be closed. The server may have kept
        // the file open, with its locks.
        let result = match handle.file(cx, &*self.fs, &*self.shared.control).await {
            Ok(file) => file.close(cx).await,
            Err(error) => Err(error),
        };
        drop(handle); // so that what is not in the table any more counts nowhere as open
        self.shared.handles.remove(fh)?;
        result.map(|()| KernelAnswer::Empty)
    }
}
