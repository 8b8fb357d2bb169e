//! The front end: turns the kernel's requests into calls on a [`FileSystem`].

mod aftercare;
mod attr;
mod believed;
mod by_handle;
pub(crate) mod cache_mode;
mod changes;
pub(crate) mod dirs;
mod file;
mod ioctl;
pub(crate) mod kept_listings;
mod label;
mod leased;
mod leased_pages;
mod locks;
mod names;
mod open;
pub(crate) mod passthrough;
pub(crate) mod removed;
pub(crate) mod undoing;
mod xattr;

use std::sync::Arc;

use dray_core::{
    Context, Errno, Error, FileId, FileSystem, Identity, OpenFile, Pid, RequestId, Result,
};

use crate::proto::abi::UNIQUE_RESEND;
use crate::proto::{
    NameOperation, OpenOperation, Operation, Request, SessionOperation, forgets, reply,
};
use crate::state::handles::OpenHandle;
use crate::transport::{KernelAnswer, KernelMessage, kernel_error};
use crate::worker::caller::sees_callers;
use crate::worker::shared::MountShared;

/// One worker's end of the mount: what all share, and the file system of this thread.
pub(crate) struct Worker {
    pub(crate) index: usize,
    pub(crate) shared: Arc<MountShared>,
    pub(crate) fs: Arc<dyn FileSystem>,
}

impl Worker {
    /// Serves one request, and leaves its answer in `answer`. It is not returned, since it is large:
    /// each future on its way would copy it. The error is the kernel's: a negative number.
    pub(crate) async fn serve(
        &self,
        message: &KernelMessage,
        answer: &mut std::result::Result<KernelAnswer, i32>,
    ) {
        let mut request = match message.decode() {
            Ok(request) => request,
            Err(error) => {
                *answer = Err(kernel_error(error.errno()));
                return;
            }
        };
        if !sees_callers() {
            request.head.pid = Pid(0); // the number is another's there
        }
        if let Some(at_once) = self.serve_at_once(&request) {
            *answer = at_once;
            return;
        }
        let (ticket, cancel, overtaken) =
            self.shared.flights.begin(self.index, request.head, request.waits_for_a_lock());
        self.heed(overtaken);
        self.look_after_callers();
        let mut cx = self.context(&request);
        cx.cancel = Some(cancel);
        let failure = match self.dispatch(&mut cx, &request, message).await {
            Ok(success) => {
                *answer = Ok(success);
                None
            }
            Err(error) => Some(self.answer_to(&request, error)),
        };
        if let Some(error) = &failure {
            self.note_stale_retry(&cx, error).await;
        }
        self.note_changes(&request);
        let signalled = cx.check().is_err();
        drop(cx); // its flag is for the next request
        self.shared.flights.end(ticket);
        if let Some(error) = failure {
            *answer = Err(match error.errno() {
                // The kernel passes an interrupted lock request on to the application as an
                // internal number unless it has really been signalled.
                Errno::EINTR if !signalled => -libc::EIO,
                errno => kernel_error(errno),
            });
        }
    }

    /// The answer to a request that no call is made for. None: the request needs one.
    fn serve_at_once(
        &self,
        request: &Request<'_>,
    ) -> Option<std::result::Result<KernelAnswer, i32>> {
        let Operation::Session(operation) = request.op else { return None };
        match operation {
            SessionOperation::Forget { lookups } => self.forget(request.head.node, lookups),
            SessionOperation::BatchForget { list, .. } => {
                forgets(list).for_each(|(node, lookups)| self.forget(node, lookups));
            }
            SessionOperation::Interrupt { unique } => {
                self.heed(self.shared.flights.interrupt(unique));
            }
            // The server is not asked for operations that it does not serve. The kernel is to
            // remember that and not ask again.
            SessionOperation::Other => return Some(Err(-libc::ENOSYS)),
            SessionOperation::Init => return Some(Err(-libc::EIO)), // done long ago
            SessionOperation::Destroy => return Some(Ok(KernelAnswer::Empty)),
        }
        Some(Ok(KernelAnswer::Nothing))
    }

    fn context(&self, request: &Request<'_>) -> Context {
        let head = &request.head;
        let mut who = self.shared.identities.of(head);
        if let Some(group) = request.group
            && !who.in_group(group)
        {
            let mut groups = who.groups.to_vec();
            groups.push(group);
            groups.sort_unstable();
            who = Arc::new(Identity { groups: groups.into(), ..(*who).clone() });
        }
        let id = RequestId(head.unique & !UNIQUE_RESEND);
        let mut cx = Context::new(self.shared.node, id, who, head.pid);
        cx.patience = self.shared.options.patience;
        cx
    }

    async fn dispatch(
        &self,
        cx: &mut Context,
        request: &Request<'_>,
        message: &KernelMessage,
    ) -> Result<KernelAnswer> {
        let node = request.head.node;
        if let Operation::Names(
            NameOperation::Mknod { umask, .. } | NameOperation::Mkdir { umask, .. },
        )
        | Operation::Opens(
            OpenOperation::Create { umask, .. } | OpenOperation::Tmpfile { umask, .. },
        ) = request.op
        {
            cx.umask = umask & 0o777;
        }
        let cx = &*cx;
        match request.op {
            Operation::Read { fh, at, size } => {
                self.read(cx, (node, fh), (at, size), message).await
            }
            Operation::Write(args) => self.write(cx, node, args, message).await,
            Operation::LookupSelf => self.lookup_self(cx, node).await,
            Operation::LookupParent => self.lookup_parent(cx, node).await,
            Operation::Names(ref operation) => self.naming(cx, node, operation).await,
            Operation::Opens(ref operation) => self.opening(cx, node, operation).await,
            Operation::Flush { fh, owner } => self.flush(cx, node, fh, owner).await,
            Operation::Release { fh, .. } | Operation::Releasedir { fh } => {
                self.release(cx, node, fh).await
            }
            Operation::Readdir { fh, at, size, plus } => {
                self.readdir(cx, (node, fh), (at, size as usize), plus).await
            }
            Operation::Attributes(ref operation) => self.attributes(cx, node, operation).await,
            Operation::Xattrs(ref operation) => self.xattrs(cx, node, operation).await,
            Operation::Files(ref operation) => self.file_operation(cx, node, operation).await,
            Operation::Getlk(lock) => self.test_lock(cx, lock).await,
            Operation::Setlk { lock, wait } => self.lock(cx, node, lock, wait).await,
            Operation::Statfs => Ok(KernelAnswer::Small(reply::statfs(&self.fs.statfs(cx).await?))),
            Operation::Ioctl { fh, cmd, data, out_size } => {
                self.ioctl(cx, (fh, cmd), (data, out_size)).await
            }
            Operation::Session(_) => Err(Errno::EIO.into()), // answered before
        }
    }

    fn forget(&self, node: u64, lookups: u64) {
        let MountShared {
            nodes,
            versions,
            pages,
            listings,
            passthrough,
            lock_owners,
            capabilities,
            ..
        } = &*self.shared;
        nodes.forget(node, lookups, || {
            versions.forget(node);
            pages.forget(node);
            listings.forget(node);
            passthrough.forget(node);
            lock_owners.forget(node);
            capabilities.forget(node);
        });
    }

    pub(crate) fn id(&self, node: u64) -> Result<FileId> {
        self.shared.nodes.id(node)
    }

    pub(crate) fn handle(&self, fh: u64) -> Result<Arc<OpenHandle>> {
        self.shared.handles.find(fh)
    }

    /// The open file behind a handle.
    pub(crate) async fn file(&self, cx: &Context, fh: u64) -> Result<Arc<dyn OpenFile>> {
        self.file_of(cx, &*self.handle(fh)?).await
    }

    pub(crate) async fn file_of(
        &self,
        cx: &Context,
        handle: &OpenHandle,
    ) -> Result<Arc<dyn OpenFile>> {
        match handle.opened() {
            Some(file) => Ok(file),
            None => handle.file(cx, &*self.fs, &*self.shared.control).await,
        }
    }
}

/// `EINVAL`, and why.
pub(crate) fn invalid(why: &'static str) -> Error {
    Error::new(Errno::EINVAL).because(why)
}
