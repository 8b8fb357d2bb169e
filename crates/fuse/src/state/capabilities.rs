//! Files that are known to have no `security.capability`, where attributes are believed for a
//! while. The kernel looks for it before it writes into its pages, again whenever it has learned
//! new attributes. It does not remember that there is none.
//!
//! A wrong answer does no harm to a write: the server's kernel removes the attribute with it
//! (`FUSE_HANDLE_KILLPRIV_V2`). To a program that is started it gives less, never more.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::IdMap;

use dray_rt::{Instant, now};

/// What the kernel looks for.
pub(crate) const NAME: &[u8] = b"security.capability";

/// Files remembered; beyond it all are forgotten, which costs round trips only.
const FILES_MAX: usize = 1 << 20;

#[derive(Default)]
pub(crate) struct Capabilities {
    state: Mutex<Absent>,
}

#[derive(Default)]
struct Absent {
    /// Until when it is believed, by node.
    until: IdMap<u64, Instant>,
    /// Times that this mount has begun or ended to set one.
    changes: u64,
}

/// When a question was asked whose answer is to be believed.
#[derive(Clone, Copy)]
pub(crate) struct XattrQuery {
    at: Instant,
    changes: u64,
}

impl Capabilities {
    fn lock(&self) -> MutexGuard<'_, Absent> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before the server is asked.
    pub(crate) fn asked(&self) -> XattrQuery {
        XattrQuery { at: now(), changes: self.lock().changes }
    }

    /// The answer: `node` has none, to be `believed` for that long since it was asked. Not at all if one
    /// was set meanwhile.
    pub(crate) fn note_absent(&self, node: u64, asked: XattrQuery, believed: Duration) {
        let mut state = self.lock();
        if state.changes != asked.changes {
            return;
        }
        if state.until.len() >= FILES_MAX {
            state.until.clear();
        }
        state.until.insert(node, asked.at + believed);
    }

    /// Whether it is believed that `node` has none.
    pub(crate) fn absent(&self, node: u64) -> bool {
        self.lock().until.get(&node).is_some_and(|until| now() < *until)
    }

    /// A capability is about to be set on `node`, or has been.
    pub(crate) fn changes(&self, node: u64) {
        let mut state = self.lock();
        state.changes += 1;
        state.until.remove(&node);
    }

    /// The kernel has forgotten `node`.
    pub(crate) fn forget(&self, node: u64) {
        self.lock().until.remove(&node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absence_is_believed_for_a_while_and_not_over_a_change() {
        // Longer than anybody is held up.
        let (all, hour) = (Capabilities::default(), Duration::from_secs(3600));
        let asked = all.asked();
        all.note_absent(7, asked, hour);
        all.note_absent(9, asked, Duration::ZERO);
        assert!(all.absent(7) && !all.absent(8));
        assert!(!all.absent(9), "the answer was not to be believed");
        all.changes(7);
        assert!(!all.absent(7));
        all.note_absent(7, asked, hour);
        assert!(!all.absent(7), "the answer may be from before the change");
        all.note_absent(7, all.asked(), hour);
        assert!(all.absent(7));
        all.forget(7);
        assert!(!all.absent(7));
    }
}
