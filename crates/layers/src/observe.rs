//! What an observer is.

use std::time::Duration;

use dray_core::{Admit, Context, Error, FileId, ObservedCall};

use crate::qos::ProjectTable;

/// How a call ended.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome<'a> {
    /// Bytes moved; 0 if it failed or moves none.
    pub bytes: u64,
    /// The file that the answer is about, where the call found, made, linked or opened one. Of a removal or a
    /// rename the file that had the name, where it is known ([`Context::taken_name`]), also if the call failed.
    pub id: Option<FileId>,
    /// Why it failed.
    pub error: Option<&'a Error>,
}

impl Outcome<'_> {
    /// Of a call that has moved so many bytes.
    pub fn moved(bytes: u64) -> Outcome<'static> {
        Outcome { bytes, ..Outcome::default() }
    }

    /// Of a call whose answer is about this file.
    pub fn about(id: FileId) -> Outcome<'static> {
        Outcome { id: Some(id), ..Outcome::default() }
    }
}

/// Looks on at every call of a file system: metrics, faults, audit, shares of bandwidth.
/// Its state is its own; wrappers are cheap.
///
/// Who calls is in the context: the user, the node, and where a server serves the call, the session and
/// the peer ([`Context::via`]). Calls that a server makes by itself have a context that says so
/// ([`Context::counted`]); of an export they are not admitted before.
pub trait Observer: Send + Sync + 'static {
    /// Whether it ever lets a call wait, or refuses one. Asked once: where no observer does, no call is
    /// slower for it.
    fn admits(&self) -> bool;

    /// A call is about to be made. What can be decided at once should be, because a future
    /// costs an allocation. [`Observer::done`] sees a call that is refused, too.
    fn admit<'a>(&'a self, cx: &'a Context, call: &'a ObservedCall<'a>) -> Admit<'a>;

    /// Whether a call may begin now. The answer counts nothing, and the observer may be asked again. False:
    /// [`Observer::admit`] decides, which costs the call a future at its server.
    fn lets_pass(&self, _: &Context, _: &ObservedCall<'_>) -> bool {
        false
    }

    /// Whether the observer wants to know at a close what was moved through the open file. It is then notified
    /// of the end of files that are never closed, too. Asked once.
    fn counts_opens(&self) -> bool {
        false
    }

    /// Where the projects of files are noted while they are opened; none: nobody wants to know.
    fn projects(&self) -> Option<&ProjectTable> {
        None
    }

    /// A change is answered that a server before this one has made, and may have reported.
    fn settled(&self, _: &Context, _: &ObservedCall<'_>, _: Outcome<'_>) {}

    /// A call has ended, after `elapsed`. The wait for the call's admission is part of that where
    /// it was refused, and where no server asked before.
    fn done(&self, cx: &Context, call: &ObservedCall<'_>, outcome: Outcome<'_>, elapsed: Duration);
}
