//! Which calls come in a replay slot.
//!
//! A change in a slot has a grant of what it changes ([`ranges`](crate::server::ranges)), by
//! which a split read is found to be whole, and its intent is noted, by which the next life of
//! the server tells whose a file is. A change in no slot would pass both by.

use dray_core::Op;

use crate::wire::Call;

/// Whether a call comes in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slots {
    /// It changes files or names, and its answer is short enough to be remembered.
    Needs,
    /// It opens a file, and needs a slot if it cuts it.
    MayNeed,
    /// It changes nothing, or what is no file and has an order of its own: the locks and open files of
    /// its session, or after a loss of power what the server has stamped.
    Never,
}

fn slots(op: Op) -> Slots {
    use Op::*;
    match op {
        Setattr | Make | Remove | Rename | Link | Create | Tmpfile | Setxattr | Removexattr
        | Write | Allocate | CopyRange | SetFlags | SetXflags | Put => Slots::Needs,
        Open | OpenNamed => Slots::MayNeed,
        Lookup | Parent | Getattr | Readlink | Access | Statfs | Getxattr | Listxattr | Read
        | Readdir | Flush | Sync | Seek | Lock | TestLock | GetFlags | GetXflags | Close
        | SyncAll | Recover | Redo | Reopen | Declare | LookupOpen => Slots::Never,
    }
}

/// Why a call is not carried out that comes in a slot, or in none; nothing if it comes as it should.
pub(crate) fn objection(call: &Call<'_>, in_slot: bool) -> Option<&'static str> {
    // What is opened again, or ahead of its use, is never cut.
    let cuts = match *call {
        Call::Open { how, again, .. } => how.truncates() && !again,
        Call::OpenNamed { how, .. } => how.truncates(),
        _ => false,
    };
    match (slots(call.op()), in_slot) {
        (Slots::Needs, true) | (Slots::MayNeed, true) | (Slots::Never, false) => None,
        (Slots::MayNeed, false) if !cuts => None,
        (Slots::Needs | Slots::MayNeed, false) => Some("a change that comes in no replay slot"),
        (Slots::Never, true) => Some("not a change, but in a replay slot"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changes_files_needs_a_slot() {
        for op in Op::ALL.iter().filter(|op| op.writes()) {
            let is_no_file = matches!(op, Op::Lock | Op::Close);
            let has_its_order = *op == Op::Redo;
            let expected = if is_no_file || has_its_order { Slots::Never } else { Slots::Needs };
            assert_eq!(slots(*op), expected, "{op:?}");
        }
    }
}
