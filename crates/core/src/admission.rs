//! Admission of calls: whether a call may begin, and when.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::{Context, Error, FileId, Fut, Make, Name, Op, OpenHow, RemoveKind, Result, SetAttr};

/// What a call sets or makes, where the operation alone does not say that.
#[derive(Clone, Copy, Debug, Default)]
pub enum CallDetail<'a> {
    /// The operation says all.
    #[default]
    Nothing,
    /// What is made.
    Make(MakeKind),
    /// What is removed.
    Remove(RemoveKind),
    /// Attributes that are set.
    Set(&'a SetAttr),
    /// The extended attribute of this name.
    Xattr(&'a [u8]),
    /// What was moved through the open file that is closed, and who opened it.
    Closed(&'a OpenTotals),
}

/// The kind of what [`FileSystem::make`](crate::FileSystem::make) makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MakeKind {
    /// A directory.
    Directory,
    /// A file without opening it, FIFO, socket or device.
    Node,
    /// A symbolic link.
    Symlink,
}

impl MakeKind {
    /// That of `what`.
    pub fn of(what: &Make<'_>) -> MakeKind {
        match what {
            Make::Directory { .. } => MakeKind::Directory,
            Make::Node { .. } => MakeKind::Node,
            Make::Symlink { .. } => MakeKind::Symlink,
        }
    }
}

/// What was moved through one open file. It is counted only where an observer wants that.
#[derive(Debug, Default)]
pub struct OpenTotals {
    /// Bytes read.
    pub read_bytes: AtomicU64,
    /// Calls that read.
    pub reads: AtomicU64,
    /// Bytes written.
    pub written_bytes: AtomicU64,
    /// Calls that wrote.
    pub writes: AtomicU64,
}

impl OpenTotals {
    /// Counts a read, or another call that moved so many bytes into the file. `whole`: it is no later part of a call that was
    /// counted before.
    pub fn count(&self, op: Op, bytes: u64, whole: bool) {
        let (sum, calls) = if op == Op::Read {
            (&self.read_bytes, &self.reads)
        } else {
            (&self.written_bytes, &self.writes)
        };
        sum.fetch_add(bytes, Ordering::Relaxed);
        calls.fetch_add(u64::from(whole), Ordering::Relaxed);
    }
}

/// A call, as an admission or an observer sees it.
#[derive(Clone, Copy, Debug)]
pub struct ObservedCall<'a> {
    /// The operation.
    pub op: Op,
    /// The file or directory it is about; the root where it names none.
    pub id: FileId,
    /// The name in it, where the operation has one.
    pub name: Option<&'a Name>,
    /// Where a rename or a link leads to.
    pub to: Option<(FileId, &'a Name)>,
    /// How a file is opened, where the operation opens one.
    pub open: Option<OpenHow>,
    /// Bytes asked for or brought along.
    pub bytes: u64,
    /// What it sets or makes.
    pub detail: CallDetail<'a>,
}

impl<'a> ObservedCall<'a> {
    /// A call on `id` that has neither names nor data, and opens nothing.
    pub fn new(op: Op, id: FileId) -> ObservedCall<'a> {
        let detail = CallDetail::Nothing;
        ObservedCall { op, id, name: None, to: None, open: None, bytes: 0, detail }
    }

    /// The same with what it sets or makes.
    pub fn with(self, detail: CallDetail<'a>) -> ObservedCall<'a> {
        ObservedCall { detail, ..self }
    }
}

/// The decision about a call.
pub enum Admit<'a> {
    /// The call goes on.
    Now,
    /// The call goes on, or fails, when this future has ended.
    After(Fut<'a, Result<()>>),
    /// The call fails.
    Refuse(Error),
}

/// What an admitted call holds until it has ended: a number of the admission's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grant(pub u64);

impl Grant {
    /// The call holds nothing.
    pub const NONE: Grant = Grant(0);
}

/// The decision about a call. It is notified when the call has ended.
pub enum GrantedAdmit<'a> {
    /// The call goes on.
    Now(Grant),
    /// The call goes on, or fails, when this future has ended.
    After(Fut<'a, Result<Grant>>),
    /// The call fails.
    Refuse(Error),
}

/// Decides about the calls of clients to one export: shares of bandwidth, or deliberate faults.
///
/// A server asks before a call waits for anything. A call that has to wait here holds no lock on a
/// directory and no range of a file. It holds nothing else that calls of other clients wait for.
/// The server does not ask for its own calls, nor for calls that restore what a client had before a
/// restart.
pub trait CallAdmission: Send + Sync + 'static {
    /// Whether calls are to be asked for now. It may change at any time.
    fn is_on(&self) -> bool;

    /// Lets a call begin, if that can be decided at once. None: nothing is decided, and
    /// [`CallAdmission::admit`] is to be asked.
    fn admit_at_once(&self, cx: &Context, call: &ObservedCall<'_>) -> Option<Grant>;

    /// A call has come. A decision that is possible at once should be made at once, because a
    /// future costs an allocation.
    fn admit<'a>(&'a self, cx: &'a Context, call: &'a ObservedCall<'a>) -> GrantedAdmit<'a>;

    /// A call that was admitted has ended, or will not be made: said once for each grant but
    /// [`Grant::NONE`].
    fn ended(&self, grant: Grant);

    /// A call has failed with the error that [`CallAdmission::admit`] gave it, `elapsed` after that
    /// was asked. It was not carried out.
    fn refused(&self, cx: &Context, call: &ObservedCall<'_>, error: &Error, elapsed: Duration);

    /// A change is answered that a server before this one has made, and may have reported. `made`:
    /// the file that the answer is about. `error`: the change had failed, or nobody knows.
    fn settled(
        &self,
        cx: &Context,
        call: &ObservedCall<'_>,
        made: Option<FileId>,
        error: Option<&Error>,
    );
}
