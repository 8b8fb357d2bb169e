//! The classes of callers that a thread has served of late. A hit takes no lock, and compares no text.

use std::cell::RefCell;
use std::sync::Arc;

use dray_core::{Class as Urgency, Context, Identity, Op};

use super::state::QosClass;

/// Callers that each thread remembers.
const ENTRIES: usize = 64;

/// What a class depends on. The identity is compared by its place, which the entry keeps from being
/// another one's.
#[derive(Clone)]
struct Entry {
    /// The gate, and its rules' number.
    of: (u64, u64),
    who: Arc<Identity>,
    session: u64,
    op: Option<Op>,
    project: u32,
    urgency: Urgency,
    class: Arc<QosClass>,
}

thread_local! {
    static CACHE: RefCell<Vec<Option<Entry>>> = const { RefCell::new(Vec::new()) };
}

/// The class of a call; `find` finds it where it is not remembered. `op` is none and `project` 0 where classes do
/// not depend on it.
pub(super) fn class_of(
    of: (u64, u64),
    cx: &Context,
    (op, project): (Option<Op>, u32),
    find: impl FnOnce() -> Arc<QosClass>,
) -> Arc<QosClass> {
    let session = cx.via.map_or(0, |via| via.session.0);
    let place = place(&cx.who, session, (op, project));
    let is_same = |entry: &Entry| {
        entry.of == of
            && Arc::ptr_eq(&entry.who, &cx.who)
            && (entry.session, entry.op, entry.urgency) == (session, op, cx.class)
            && entry.project == project
    };
    let known = CACHE.with_borrow(|cache| {
        let entry = cache.get(place)?.as_ref().filter(|entry| is_same(entry))?;
        Some(entry.class.clone())
    });
    if let Some(class) = known {
        return class;
    }
    let class = find();
    let (who, urgency) = (cx.who.clone(), cx.class);
    let entry = Entry { of, who, session, op, project, urgency, class: class.clone() };
    CACHE.with_borrow_mut(|cache| {
        cache.resize(ENTRIES, None);
        cache[place] = Some(entry);
    });
    class
}

fn place(who: &Arc<Identity>, session: u64, (op, project): (Option<Op>, u32)) -> usize {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15; // 2^64 over the golden ratio
    let who = Arc::as_ptr(who) as u64;
    let op = op.map_or(0, |op| op as u64 + 1);
    let mixed = (who ^ session.rotate_left(17) ^ op << 48 ^ u64::from(project).rotate_left(33))
        .wrapping_mul(ODD);
    (mixed >> 58) as usize % ENTRIES
}
