//! Opening files of which the kernel reads a copy on a local disk by itself (ADR 0055).
//!
//! A kernel does not mix such open files of an inode with others, nor two copies. So where another kind is wanted, the
//! file gets another node. The caller is answered with ESTALE and looks the path up again (`do_filp_open` in
//! fs/namei.c), which leads to the new node. Open files of the former node go on.

use std::sync::Arc;

use dray_core::{Context, Errno, Error, FileId, FileType, LocalCopy, OpenFile, Result};

use crate::front::Worker;
use crate::state::passthrough::{OpenMode, ReadCopy, version_of};
use crate::worker::shared::MountShared;

impl Worker {
    /// To be called before a file is opened. Errors: `ESTALE`, the kernel is to look the name up again; `ETXTBSY`, a
    /// caller without a name wants to write.
    pub(super) fn before_open(
        &self,
        cx: &Context,
        node: u64,
        flags: i32,
    ) -> Result<PassthroughOpen> {
        let through = &self.shared.passthrough;
        let is_regular = || self.shared.nodes.type_of(node) == Some(FileType::Regular);
        if !through.is_agreed() || !is_regular() {
            return Ok(PassthroughOpen::Uncounted);
        }
        let reads = flags & (libc::O_ACCMODE | libc::O_DIRECT | libc::O_TRUNC) == libc::O_RDONLY;
        match (reads, through.is_through(node)) {
            (true, _) => Ok(PassthroughOpen::Reads),
            (false, false) => Ok(PassthroughOpen::Others),
            (false, true) if !through.came_back(cx.pid, node) => Err(self.stale(cx, node)),
            // What is stored into a mapping would stay in the copy.
            (false, true) if flags & libc::O_ACCMODE == libc::O_RDWR => {
                Err(Error::new(Errno::ETXTBSY).because("the kernel reads a copy of it"))
            }
            (false, true) => Ok(PassthroughOpen::Beside),
        }
    }

    /// Counts a file that has been opened. Errors: `ESTALE`, as above; then it is closed again.
    pub(super) async fn open_mode(
        &self,
        cx: &Context,
        node: u64,
        file: &Arc<dyn OpenFile>,
        how: PassthroughOpen,
    ) -> Result<Option<OpenMode>> {
        let through = &self.shared.passthrough;
        let copy = match how {
            PassthroughOpen::Uncounted => return Ok(None),
            PassthroughOpen::Beside => return Ok(through.opened_beside(node, file)),
            PassthroughOpen::Others => None,
            PassthroughOpen::Reads => self.copy_of(cx, file).await,
        };
        let version = file.at_open().map(|seen| version_of(&seen.attr));
        match through.opened(node, file, copy.zip(version)) {
            Ok(mode) => Ok(Some(mode)),
            Err(_) if through.came_back(cx.pid, node) => Ok(through.opened_beside(node, file)),
            Err(_) => {
                let _ = file.close(cx).await; // the caller opens another one
                Err(self.stale(cx, node))
            }
        }
    }

    async fn copy_of(&self, cx: &Context, file: &Arc<dyn OpenFile>) -> Option<Arc<dyn LocalCopy>> {
        match self.shared.passthrough.is_wanted() {
            true => file.local_copy(cx).await,
            false => None,
        }
    }

    fn stale(&self, cx: &Context, node: u64) -> Error {
        self.shared.nodes.divert(node);
        self.shared.passthrough.expect_again(cx.pid, node);
        Error::new(Errno::ESTALE).because("the kernel reads a copy of it, and this open cannot")
    }

    /// A file that has been created may have been there, and be read from a copy. Its answer names another node then.
    pub(super) fn before_created(&self, id: FileId) {
        if let Some(node) = self.shared.nodes.find(id)
            && self.shared.passthrough.is_through(node)
        {
            self.shared.nodes.divert(node);
        }
    }

    /// Counts the open file of a creation.
    pub(super) fn created_mode(&self, file: &Arc<dyn OpenFile>) -> Option<OpenMode> {
        let MountShared { passthrough, nodes, .. } = &*self.shared;
        let node = nodes.find(file.id()).filter(|_| passthrough.is_agreed())?;
        passthrough.opened(node, file, None).ok() // it has no copy: see above
    }
}

/// What an open is to the copies that the kernel reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PassthroughOpen {
    /// There are no copies, or it is no file that has any.
    Uncounted,
    /// Of a reader, which may read a copy.
    Reads,
    /// Of one that is served by requests.
    Others,
    /// Of one that is served by requests although there is a copy.
    Beside,
}

/// Others, or this mount, have changed a file: copies that the kernel reads follow, soon.
pub(crate) fn follow_soon(shared: &Arc<MountShared>, id: FileId) {
    let copies = shared.passthrough.changed(id);
    if copies.is_empty() {
        return;
    }
    let shared = shared.clone();
    dray_rt::spawn(async move {
        let cx = Context::system().on_behalf_of(shared.node);
        for copy in copies {
            follow(&shared, &cx, copy).await;
        }
    });
}

/// The same, before this returns: of a caller that was granted a lock.
pub(crate) async fn follow_now(shared: &Arc<MountShared>, cx: &Context, id: FileId) {
    for copy in shared.passthrough.changed(id) {
        follow(shared, cx, copy).await;
    }
}

async fn follow(shared: &MountShared, cx: &Context, (copy, files): ReadCopy) {
    // Some of them may be about to be closed.
    for file in files {
        if copy.refresh(cx, &*file).await.is_ok() {
            return;
        }
    }
    shared.passthrough.note_left_behind();
}
