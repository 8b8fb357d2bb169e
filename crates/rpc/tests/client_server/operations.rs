//! The table of operations agrees with itself, for calls by chance of every operation.

use std::collections::BTreeMap;

use dray_core::{FileId, Op};
use dray_rpc::wire::{Call, Changes, Intent, OpRow, SessionChange, SlotUse, Trace};

use crate::common::calls::{self, Words};
use crate::common::raw::Chance;

/// Calls of each operation.
const CALLS: usize = 200;

fn each(mut check: impl FnMut(&Call<'_>)) {
    let mut chance = Chance::new(1);
    for &op in Op::ALL {
        for _ in 0..CALLS {
            let words = Words::by_chance(&mut chance);
            let root = FileId { ino: 1, generation: 1 };
            check(&calls::call(op, root, &words, &mut chance));
        }
    }
}

/// A change in no slot would pass the order of changes by, and its intent would not be noted.
// proves: P82
#[test]
fn what_changes_files_needs_a_slot() {
    each(|call| {
        let row = call.row();
        let needed = match row.changes {
            Changes::Nothing | Changes::Leases | Changes::Redone => false,
            Changes::Names | Changes::Attributes(_) | Changes::Data(..) | Changes::DataOfReply => {
                true
            }
        };
        assert_eq!(row.slot == SlotUse::Needed, needed, "{call:?}");
        // Locks and open files have an order of their own.
        let is_session = matches!(call.op(), Op::Lock | Op::Close);
        let writes = call.op().writes() && !is_session;
        assert!(!writes || row.changes != Changes::Nothing, "{call:?}");
    });
}

/// The notes of one server are what the next one looks for.
#[test]
fn an_intent_is_noted_where_the_next_server_looks_for_one() {
    each(|call| {
        let row = call.row();
        let expected: &[Trace] = match row.intent {
            Intent::None => &[Trace::None],
            Intent::Repeat(..) => &[Trace::Repeatable, Trace::Written],
            Intent::Make { .. } => &[Trace::Made],
            Intent::Create { .. } => &[Trace::Created],
            Intent::Link { .. } => &[Trace::Linked],
            Intent::Remove { .. } => &[Trace::Removed],
            Intent::Put { .. } => &[Trace::Put],
            Intent::Rename { .. } => &[Trace::Renamed],
            Intent::Append { .. } => &[Trace::Written],
            Intent::Copy { .. } => &[Trace::Copied],
            Intent::SetXattr { .. } => &[Trace::XattrSet],
            Intent::RemoveXattr { .. } => &[Trace::XattrRemoved],
        };
        assert!(expected.contains(&OpRow::of(call.op()).trace), "{call:?}");
        let noted = row.intent != Intent::None;
        assert!(!noted || row.slot != SlotUse::Refused, "{call:?}: a note without a slot");
        let noted_as = OpRow::of(call.op()).noted_as;
        assert_eq!(OpRow::of(noted_as).trace, OpRow::of(call.op()).trace, "{call:?}");
    });
}

/// The client counts on it: one close is all that may be sent without a reply.
#[test]
fn a_call_that_may_be_one_way_closes() {
    let mut one_way = BTreeMap::new();
    each(|call| {
        if OpRow::of(call.op()).may_be_one_way {
            let closes = matches!(call.row().session, SessionChange::Closes(_));
            assert!(closes && call.row().is_recovery, "{call:?}");
            *one_way.entry(call.op()).or_insert(0) += 1;
        }
    });
    assert_eq!(one_way, BTreeMap::from([(Op::Close, CALLS)]));
}

/// A call that belongs to a recovery must not wait for the end of it, and new work must.
#[test]
fn a_recovery_is_made_of_these() {
    let mut operations = BTreeMap::new();
    each(|call| {
        let is_recovery: &mut (bool, bool) = operations.entry(call.op()).or_default();
        match call.row().is_recovery {
            true => is_recovery.0 = true,
            false => is_recovery.1 = true,
        }
    });
    let of = |wanted: (bool, bool)| -> Vec<Op> {
        operations.iter().filter(|(_, is)| **is == wanted).map(|(op, _)| *op).collect()
    };
    let always = [Op::Lock, Op::Close, Op::Recover, Op::Redo, Op::Reopen, Op::Declare];
    assert_eq!(of((true, false)), always);
    assert_eq!(of((true, true)), [Op::Open], "again, or for the first time");
}

/// Rights that a call takes are rights of a file that it changes.
#[test]
fn what_takes_rights_changes_a_file() {
    let mut taking = 0;
    each(|call| {
        let row = call.row();
        let Some(file) = row.takes_rights else { return };
        taking += 1;
        match row.changes {
            Changes::Attributes(changed) | Changes::Data(changed, _) => {
                assert_eq!(changed, file, "{call:?}");
            }
            other => panic!("{call:?} changes {other:?}"),
        }
    });
    assert!(taking > 2 * CALLS, "few of the calls take rights");
}
