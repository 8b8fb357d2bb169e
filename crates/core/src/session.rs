//! The interface that a front end needs beside the two traits.

use std::sync::Arc;

use crate::{
    Attr, FileId, FileSystem, Fut, HearRecalls, LockOwner, NodeId, OpenFile, OpenHow, Pid,
    RequestId,
};

/// Gets files that other clients have changed. It must not wait.
pub type HearChanges = Box<dyn Fn(Vec<FileId>) + Send + Sync>;
/// A caller and its batch job.
pub type CallersJob = (Pid, Box<str>);
/// Takes the jobs of callers, on any thread.
pub type TellJobs = Box<dyn FnOnce(Vec<CallersJob>) + Send>;
/// Finds the jobs of callers, and hands them on when it knows them. It must not wait.
pub type FindJobs = Box<dyn Fn(Vec<Pid>, TellJobs) + Send + Sync>;

/// The session under a front end's file system: what outlives the front end's process, and what the
/// server says without being asked.
///
/// This is the one seam beside [`FileSystem`] and [`OpenFile`]. Further functions for front ends
/// belong here or into those traits. There are no default bodies, as there are none in the traits.
/// No method waits. File systems without a session have [`NoSession`].
pub trait SessionControl: Send + Sync + 'static {
    /// The node by which the session's requests are known over the front end's processes. A front
    /// end puts it into the context of each request, together with a number of its own.
    fn node(&self) -> NodeId;

    /// A file that a process before this one opened and the server still has open. The flags in
    /// `how` are no creation flags and no `O_TRUNC`. The number of the request that opened the file
    /// is `request`. Rights were checked at the first open. No call is made: if the server has lost
    /// the file it is opened again when it is used. None: open it again with [`FileSystem::open`].
    fn attach(&self, id: FileId, how: OpenHow, request: RequestId) -> Option<Arc<dyn OpenFile>>;

    /// Every file that a process before this one had open has been attached. Only then a server
    /// that has lost its state is notified that this client has reopened its files.
    fn attached(&self);

    /// A process before this one may have opened files for itself, by numbers that no front end
    /// knows. An example is a striped file at the servers of its blocks. The server closes them. To
    /// be said once everything has been attached.
    fn release_inherited(&self);

    /// The owners of fcntl locks that a process before this one left, and their files. None if
    /// there may be more of them: then each close of a file that had locks must be passed on.
    fn lock_owners(&self) -> Option<Vec<(FileId, LockOwner)>>;

    /// Whether an error of writing `id` may wait to be reported at the next close of a descriptor.
    /// Then the close must be passed on ([`OpenFile::flush`]). Asked at each close: it must be
    /// cheap.
    fn owes_error(&self, id: FileId) -> bool;

    /// Programs store into a shared mapping of this file. Other clients that do so, too, do not see
    /// it.
    fn mapped(&self, id: FileId);

    /// Calls `hear` with the files that are open here and that other clients have changed, for
    /// front ends that cache. The first `hear` stays.
    fn hear_changes_by(&self, hear: HearChanges);

    /// Calls `hear` with what is not to be believed any more of the answers that said how long they
    /// may be believed ([`Validity`](crate::Validity)). Without a listener the session forgets by
    /// itself alone, and acknowledges at once. The first `hear` stays.
    fn hear_recalls_by(&self, hear: HearRecalls);

    /// The attributes of a file, while a lease on them holds. While it does nobody but this session changes
    /// the file. It must be cheap: a cache asks at each read.
    fn leased_attributes(&self, id: FileId) -> Option<Attr>;

    /// Calls `find` when the server asks for the batch jobs of callers. The first `find` stays.
    fn find_jobs_by(&self, find: FindJobs);

    /// Sends everything to the server that is kept of what programs have written. To be called when the front end
    /// serves no more callers, before [`SessionControl::goodbye`].
    fn finish(&self) -> Fut<'_, ()>;

    /// Ends the session: the server gives back at once what it holds for the session. To be called
    /// when the front end serves no more callers.
    fn goodbye(&self);
}

/// The stack that a front end serves: a file system, with all its layers, and the session under it.
#[derive(Clone)]
pub struct Stack {
    /// The file system.
    pub fs: Arc<dyn FileSystem>,
    /// The session under it.
    pub session: Arc<dyn SessionControl>,
}

impl Stack {
    /// A file system without a session.
    pub fn alone(fs: Arc<dyn FileSystem>) -> Stack {
        Stack { fs, session: Arc::new(NoSession) }
    }
}

/// For a file system in the front end's own process: nothing outlives the process, and no other
/// client changes anything.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoSession;

impl SessionControl for NoSession {
    fn node(&self) -> NodeId {
        NodeId(0)
    }

    fn attach(&self, _: FileId, _: OpenHow, _: RequestId) -> Option<Arc<dyn OpenFile>> {
        None
    }

    fn attached(&self) {}

    fn release_inherited(&self) {}

    fn lock_owners(&self) -> Option<Vec<(FileId, LockOwner)>> {
        None
    }

    fn owes_error(&self, _: FileId) -> bool {
        false
    }

    fn mapped(&self, _: FileId) {}

    fn hear_changes_by(&self, _: HearChanges) {}

    fn hear_recalls_by(&self, _: HearRecalls) {}

    fn leased_attributes(&self, _: FileId) -> Option<Attr> {
        None
    }

    fn find_jobs_by(&self, _: FindJobs) {}

    fn finish(&self) -> Fut<'_, ()> {
        Box::pin(async {})
    }

    fn goodbye(&self) {}
}
