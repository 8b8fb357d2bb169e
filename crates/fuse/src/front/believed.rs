//! Opening files under names that the kernel believes.
//!
//! Under `close-to-open` the kernel opens a file whose name it has believed in for a while, and tells
//! us of the file alone. Others may have given the name to another file meanwhile, or have removed it:
//! who opens a file wants the one that is there. So the server learns by which name the kernel has
//! come to the file, and answers ESTALE if the name leads elsewhere by now. The kernel tries that once
//! more then, and looks up each name of the path (`do_filp_open` in fs/namei.c, LOOKUP_REVAL). So it
//! does where the kernel may have come by one of several names.
//!
//! At the second time no name is asked for: what was looked up within the call is opened, though others
//! may have replaced that, too. And a caller that opens by a descriptor (/proc/self/fd, `.` of a directory)
//! names nothing, comes back to the same file, and gets it. So does who opens by a handle, without coming
//! back: the kernel's NFS server would pass ESTALE on.

use std::sync::Arc;

use dray_core::{Context, Errno, Error, FileId, OpenFile, OpenHow, Pid, Result};

use crate::front::Worker;
use crate::proto::abi::ROOT_NODE;
use crate::state::places::NameForOpen;
use crate::state::stale_retries::{NOTHING, RetriedOpen, RetryCaller};
use crate::worker::caller::{call_that_waits, is_of_kernel};
use crate::worker::shared::MountShared;

/// System calls that open a file by its path. What io_uring(7) opens is in none of them.
const OPENING: &[i64] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_creat,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_execve,
    libc::SYS_execveat,
];

impl Worker {
    /// Opens a file to which the kernel has come by a name that it may only believe in. Of callers
    /// that cannot be seen a retry cannot be recognized: such callers get no ESTALE.
    pub(super) async fn open_believed(
        &self,
        cx: &Context,
        (node, id): (u64, FileId),
        how: OpenHow,
    ) -> Result<Arc<dyn OpenFile>> {
        let (nodes, stale_retries) = (&self.shared.nodes, &self.shared.stale_retries);
        let caller = self.retry_caller(cx.pid).await;
        let caller = caller.unwrap_or(RetryCaller { thread: cx.pid, call: None });
        let mut opening = RetriedOpen { caller, file: id, request: cx.origin.request };
        let named = self.shared.mode.names_may_change() && node != ROOT_NODE;
        if !named || cx.pid == Pid(0) || stale_retries.comes(opening) {
            return self.fs.open(cx, id, how).await;
        }
        let opened = match nodes.name_for_open(node) {
            NameForOpen::JustLookedUp => return self.fs.open(cx, id, how).await,
            NameForOpen::Only(dir, name) => self.fs.open_named(cx, (dir, &name), id, how).await,
            NameForOpen::Unknown => {
                Err(Error::new(Errno::ESTALE).because("it may have been any of its names"))
            }
        };
        if opened.is_err() && stale_retries.inherits() {
            self.give_up(cx, id, how).await;
        }
        if opened.as_ref().is_err_and(|error| error.errno() == Errno::ESTALE) {
            let call = call_that_waits(cx.pid).await;
            let by_handle = call.is_some_and(|call| call.number == libc::SYS_open_by_handle_at);
            if by_handle || is_of_kernel(cx.pid) {
                return self.fs.open(cx, id, how).await;
            }
            let call = call.filter(|call| OPENING.contains(&call.number));
            opening.caller.call = call.map(|call| call.print);
            stale_retries.note(opening);
        }
        opened
    }

    /// What else is ESTALE within open(2) sends it back as well. Its rights to a file that others
    /// have removed are looked at first, where the kernel does not know them any more.
    pub(super) async fn note_stale_retry(&self, cx: &Context, error: &Error) {
        let stale = error.errno() == Errno::ESTALE && self.shared.mode.names_may_change();
        if !stale || cx.pid == Pid(0) || self.shared.stale_retries.knows(cx.pid, cx.origin.request)
        {
            return;
        }
        let call = call_that_waits(cx.pid).await.filter(|call| OPENING.contains(&call.number));
        if let Some(call) = call {
            let caller = RetryCaller { thread: cx.pid, call: Some(call.print) };
            self.shared.stale_retries.note(RetriedOpen {
                caller,
                file: NOTHING,
                request: cx.origin.request,
            });
        }
    }

    /// The caller, if that is a thread that was answered with ESTALE.
    pub(super) async fn retry_caller(&self, thread: Pid) -> Option<RetryCaller> {
        if !self.shared.stale_retries.remembers(thread) {
            return None;
        }
        let call = call_that_waits(thread).await;
        Some(RetryCaller { thread, call: call.map(|call| call.print) })
    }

    /// A predecessor may have had it opened for this very request, before it died. The kernel has not heard
    /// of that, and will not.
    async fn give_up(&self, cx: &Context, id: FileId, how: OpenHow) {
        let MountShared { handles, control, .. } = &*self.shared;
        let left = handles.left_by(cx.origin.request);
        let file = match &left {
            Some((_, handle)) => handle.file(cx, &*self.fs, &**control).await.ok(),
            None => {
                let how = OpenHow::new(how.flags & !libc::O_TRUNC);
                control.attach(id, how, cx.origin.request)
            }
        };
        if let Some(file) = file {
            let _ = file.close(cx).await; // nobody has used it
        }
        // Last: a successor of ours closes it else.
        if let Some((fh, _)) = left {
            let _ = handles.remove(fh); // it was there just now
        }
    }
}
