//! Leases: what a session may believe until the server recalls it (ADR 0049).

use std::fmt;
use std::ops::BitOr;
use std::sync::Arc;

use crate::{Attr, Context, FileId, Fut, Name, NameBuf, Result};

/// Kinds of leases on one file, as a set.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LeaseKinds(u8);

impl LeaseKinds {
    /// No kind.
    pub const NONE: LeaseKinds = LeaseKinds(0);
    /// What getattr answers.
    pub const ATTRIBUTES: LeaseKinds = LeaseKinds(1);
    /// Of a directory: each name in it, also that a name is absent.
    pub const NAMES: LeaseKinds = LeaseKinds(2);
    /// The right to keep what is written to a file, for a while: data, size and times of change. One session has
    /// it (ADR 0053).
    pub const WRITE: LeaseKinds = LeaseKinds(4);
    /// The right to decide on the fcntl locks of a file. One session has it (ADR 0064).
    pub const LOCKS: LeaseKinds = LeaseKinds(8);
    /// Every kind that a change of a file can break.
    pub const ALL: LeaseKinds = LeaseKinds(7);

    /// A number for the set.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Back from [`LeaseKinds::bits`]; none if the number has bits that are no kind.
    pub const fn from_bits(bits: u8) -> Option<LeaseKinds> {
        if bits & !(LeaseKinds::ALL.0 | LeaseKinds::LOCKS.0) == 0 {
            Some(LeaseKinds(bits))
        } else {
            None
        }
    }

    /// Whether all of `kinds` are in this set.
    pub const fn contains(self, kinds: LeaseKinds) -> bool {
        self.0 & kinds.0 == kinds.0
    }

    /// Whether no kind is in it.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The kinds that are in both sets.
    pub const fn common(self, other: LeaseKinds) -> LeaseKinds {
        LeaseKinds(self.0 & other.0)
    }

    /// The kinds of this set that are not in `kinds`.
    pub const fn without(self, kinds: LeaseKinds) -> LeaseKinds {
        LeaseKinds(self.0 & !kinds.0)
    }
}

impl BitOr for LeaseKinds {
    type Output = LeaseKinds;
    fn bitor(self, other: LeaseKinds) -> LeaseKinds {
        LeaseKinds(self.0 | other.0)
    }
}

impl fmt::Debug for LeaseKinds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = [
            (LeaseKinds::ATTRIBUTES, "attributes"),
            (LeaseKinds::NAMES, "names"),
            (LeaseKinds::WRITE, "write"),
            (LeaseKinds::LOCKS, "locks"),
        ];
        let shown = kinds.into_iter().filter(|(kind, _)| self.contains(*kind));
        f.debug_set().entries(shown.map(|(_, name)| name)).finish()
    }
}

/// Leases on one file that a recall breaks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RecallItem {
    /// The file, or the directory.
    pub id: FileId,
    /// The kinds that are broken.
    pub kinds: LeaseKinds,
    /// If [`LeaseKinds::NAMES`] are broken: the one name that changes. The lease on the other names
    /// of the directory stays. None: each name in the directory is to be forgotten.
    pub name: Option<NameBuf>,
}

/// What is not to be believed any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recall {
    /// These leases. The server waits until they are given up.
    Items(Vec<RecallItem>),
    /// Every lease of the session: the server has dropped them all, or is another one. Nobody waits.
    All,
}

/// To be dropped when all that a recall breaks is forgotten. Then the server hears of it.
#[must_use = "the recall is acknowledged as soon as this is dropped"]
pub struct RecallDone(Option<Box<dyn FnOnce() + Send>>);

impl RecallDone {
    /// Calls `acknowledge` once it is dropped, on whatever thread that is.
    pub fn new(acknowledge: impl FnOnce() + Send + 'static) -> RecallDone {
        RecallDone(Some(Box::new(acknowledge)))
    }

    /// Never acknowledges: the server waits until the leases of this session have ended.
    pub fn forget(mut self) {
        self.0 = None;
    }

    /// For a recall that nobody waits for.
    pub const fn unawaited() -> RecallDone {
        RecallDone(None)
    }
}

impl Drop for RecallDone {
    fn drop(&mut self) {
        if let Some(acknowledge) = self.0.take() {
            acknowledge();
        }
    }
}

impl fmt::Debug for RecallDone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecallDone").field("awaited", &self.0.is_some()).finish()
    }
}

/// Gets what is not to be believed any more. It must not wait, nor call the session. The
/// session has forgotten it by then.
pub type HearRecalls = Arc<dyn Fn(Recall, RecallDone) + Send + Sync>;

/// The number of a hold of one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HoldNumber(pub u64);

/// A session with a server that leases what another server of the same file system is about to change (ADR 0056).
pub trait HoldLeases: Send + Sync + 'static {
    /// Has the server recall what it has leased of a name in the directory `id`. Without a name it recalls what it has
    /// leased of the attributes of the file `id`. It leases nothing of that until the hold is released, or has lasted for its longest
    /// time. Errors: that it is not held, or not known to be.
    fn hold<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: Option<&'a Name>,
    ) -> Fut<'a, Result<HoldNumber>>;

    /// The attributes of a file that may be answered without the server; none if the server is to be asked.
    fn leased(&self, id: FileId) -> Option<Attr>;

    /// Ends a hold. Answers whether it has lasted until now.
    fn release<'a>(&'a self, cx: &'a Context, hold: HoldNumber) -> Fut<'a, Result<bool>>;
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn kinds_are_a_set_and_each_set_has_its_number() {
        let both = LeaseKinds::ATTRIBUTES | LeaseKinds::NAMES;
        assert!(both.contains(LeaseKinds::NAMES) && both | LeaseKinds::WRITE == LeaseKinds::ALL);
        assert!(!LeaseKinds::NAMES.contains(both) && LeaseKinds::NONE.is_empty());
        assert_eq!(both.without(LeaseKinds::NAMES), LeaseKinds::ATTRIBUTES);
        for bits in 0..=15 {
            assert_eq!(LeaseKinds::from_bits(bits).map(LeaseKinds::bits), Some(bits));
        }
        assert_eq!(LeaseKinds::from_bits(16), None);
    }

    #[test]
    fn a_recall_is_acknowledged_once_when_it_is_dropped() {
        let count = Arc::new(AtomicU32::new(0));
        let counts = count.clone();
        let done = RecallDone::new(move || {
            counts.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.load(Ordering::Relaxed), 0);
        drop((done, RecallDone::unawaited()));
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }
}
