//! What an observer is.

use std::time::Duration;

use dray_core::{Context, Error, FileId, Fut, Name, Op, Result};

/// A call as observers see it.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The operation.
    pub op: Op,
    /// The file or directory it is about; the root where it names none.
    pub id: FileId,
    /// The name in it, where the operation has one.
    pub name: Option<&'a Name>,
    /// Where a rename or a link leads to.
    pub to: Option<(FileId, &'a Name)>,
    /// Bytes asked for or brought along.
    pub bytes: u64,
}

impl<'a> Call<'a> {
    /// A call on `id` that has neither names nor data.
    pub fn new(op: Op, id: FileId) -> Call<'a> {
        Call { op, id, name: None, to: None, bytes: 0 }
    }
}

/// How a call ended.
#[derive(Clone, Copy, Debug)]
pub struct Outcome<'a> {
    /// Bytes moved; 0 if it failed or moves none.
    pub bytes: u64,
    /// Why it failed.
    pub error: Option<&'a Error>,
}

/// What becomes of a call.
pub enum Admit<'a> {
    /// It goes on.
    Now,
    /// It goes on, or fails, when this has ended.
    After(Fut<'a, Result<()>>),
    /// It fails. [`Observer::done`] is told nevertheless.
    Refuse(Error),
}

/// Looks on at every call of a file system: metrics, faults, audit, shares of bandwidth.
/// Its state is its own; wrappers are cheap.
pub trait Observer: Send + Sync + 'static {
    /// A call is about to be made. What can be decided at once should be, because a future
    /// costs an allocation.
    fn admit<'a>(&'a self, cx: &'a Context, call: &'a Call<'a>) -> Admit<'a>;

    /// It has ended, after `elapsed`, the wait for its admission included.
    fn done(&self, cx: &Context, call: &Call<'_>, outcome: Outcome<'_>, elapsed: Duration);
}
