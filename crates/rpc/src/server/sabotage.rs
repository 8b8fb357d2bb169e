//! What a test breaks in a server on purpose, to prove that it would notice.

use dray_core::Op;

/// A protection left out, or a promise broken. Nothing but a test sets it.
#[doc(hidden)]
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

impl Sabotage {
    /// Whether a change of this kind is carried out whenever it comes.
    pub(crate) fn forgets_answers(of: Option<Sabotage>, op: Op) -> bool {
        matches!(of, Some(Sabotage::ReplyCache(which)) if which.is_none_or(|which| which == op))
    }

    /// Whether what was noted of a change of this kind is not looked at.
    pub(crate) fn forgets_intents(of: Option<Sabotage>, op: Op) -> bool {
        matches!(of, Some(Sabotage::Intents(which)) if which.is_none_or(|which| which == op))
    }

    /// Whether this call is answered and not carried out.
    pub(crate) fn forgets(of: Option<Sabotage>, op: Op) -> bool {
        of == Some(Sabotage::Forgotten(op)) && dray_rt::random_u64().is_multiple_of(8)
    }

    /// Whether this change is told to nobody.
    pub(crate) fn leaves_untold(of: Option<Sabotage>) -> bool {
        of == Some(Sabotage::Untold) && dray_rt::random_u64().is_multiple_of(8)
    }
}
