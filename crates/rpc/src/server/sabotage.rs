//! What a test breaks in a server on purpose, to prove that the test would notice.
//!
//! The cargo feature `sabotage` belongs to `dray-testkit` and to tests. The shipped program is
//! compiled without it: there [`Broken`] is empty, and the compiler removes each use of it.

use dray_core::Op;

/// A protection left out, or a promise broken. Nothing but a test sets it.
#[cfg_attr(not(feature = "sabotage"), expect(dead_code, reason = "only tests break anything"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// A change that comes again is carried out again: those of this kind, or all.
    ReplyCache(Option<Op>),
    /// What was under way when the process died counts as not applied: as above.
    Intents(Option<Op>),
    /// Changes of this kind are answered and not made, now and then. Of those only whose
    /// answer says nothing but success: writes, removals, renames, syncs.
    Forgotten(Op),
    /// A connection goes on being read when its client has come back on another.
    Fence,
    /// Locks are granted, whoever has them.
    Locks,
    /// Locks that are claimed again are said to be had, and are not.
    Reclaim,
    /// Files that are closed stay open.
    Closes,
    /// The buffers of reads are not given back, now and then.
    Buffers,
    /// Clients that say goodbye are not let go.
    Goodbyes,
    /// What the death of the process cut short is not kept for whoever asked for it.
    Turns,
    /// Files that are removed while clients come back are not kept for them.
    Custody,
    /// Clients are not told that the machine has lost power.
    Boot,
    /// Changes sent again after a loss of power are said to be made, and are not.
    Redo,
    /// They are made in the order of their arrival.
    RedoOrder,
    /// New work does not wait for them.
    RedoGate,
    /// What somebody has synced since is not looked at.
    RedoFloor,
    /// Halves of reads are said to be of one version, whatever has been written in between.
    Halves,
    /// Reads do not wait for whoever writes the same bytes, nor he for them.
    Reads,
    /// What takes rights away does not wait for files that were opened at their lookup.
    Ahead,
    /// What is opened by a name is opened, whatever has the name.
    Named,
    /// What a client changed last is not synced when it leaves.
    LastSync,
    /// Who caches an open file is not told of a change of it, now and then.
    Untold,
    /// Who was evicted is let in again.
    Evictions,
}

/// What is broken in one server.
#[derive(Clone, Copy, Default)]
pub(crate) struct Broken {
    #[cfg(feature = "sabotage")]
    pub(crate) what: Option<Sabotage>,
}

impl Broken {
    /// Whether exactly this is broken.
    pub(crate) fn is(self, what: Sabotage) -> bool {
        self.what() == Some(what)
    }

    /// Whether a change of this kind is carried out whenever it comes.
    pub(crate) fn forgets_answers(self, op: Op) -> bool {
        matches!(self.what(), Some(Sabotage::ReplyCache(which)) if which.is_none_or(|which| which == op))
    }

    /// Whether what was noted of a change of this kind is not looked at.
    pub(crate) fn forgets_intents(self, op: Op) -> bool {
        matches!(self.what(), Some(Sabotage::Intents(which)) if which.is_none_or(|which| which == op))
    }

    /// Whether this call is answered and not carried out.
    pub(crate) fn forgets(self, op: Op) -> bool {
        self.is(Sabotage::Forgotten(op)) && dray_rt::random_u64().is_multiple_of(8)
    }

    /// Whether this change is told to nobody.
    pub(crate) fn leaves_untold(self) -> bool {
        self.is(Sabotage::Untold) && dray_rt::random_u64().is_multiple_of(8)
    }

    #[cfg(feature = "sabotage")]
    fn what(self) -> Option<Sabotage> {
        self.what
    }

    #[cfg(not(feature = "sabotage"))]
    #[inline(always)]
    fn what(self) -> Option<Sabotage> {
        None
    }
}
