//! What a server leases, and what it asks back.
//!
//! A lease says that an answer holds until the server asks it back, or the term ends (ADR 0049).

use std::fmt;
use std::ops::BitOr;

use crate::{FileId, NameBuf};

/// Parts of a file that are leased: a set.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LeaseKinds(u8);

impl LeaseKinds {
    /// No part.
    pub const NONE: LeaseKinds = LeaseKinds(0);
    /// What getattr answers, but the time of the last access.
    pub const ATTRIBUTES: LeaseKinds = LeaseKinds(1);
    /// Of a directory: which file each name in it stands for, also that a name is absent.
    pub const NAMES: LeaseKinds = LeaseKinds(2);

    /// The bits, as they travel.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The set of these bits. None: a bit stands for nothing.
    pub const fn from_bits(bits: u8) -> Option<LeaseKinds> {
        let known = LeaseKinds::ATTRIBUTES.0 | LeaseKinds::NAMES.0;
        if bits & !known == 0 { Some(LeaseKinds(bits)) } else { None }
    }

    /// Whether all of `parts` are in the set.
    pub const fn contains(self, parts: LeaseKinds) -> bool {
        self.0 & parts.0 == parts.0
    }

    /// The parts that are in both sets.
    pub const fn common(self, other: LeaseKinds) -> LeaseKinds {
        LeaseKinds(self.0 & other.0)
    }

    /// The set without `parts`.
    pub const fn without(self, parts: LeaseKinds) -> LeaseKinds {
        LeaseKinds(self.0 & !parts.0)
    }

    /// Whether there is no part in the set.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
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
        let parts = [(LeaseKinds::ATTRIBUTES, "attributes"), (LeaseKinds::NAMES, "names")];
        let shown = parts.into_iter().filter(|(part, _)| self.contains(*part));
        f.debug_set().entries(shown.map(|(_, name)| name)).finish()
    }
}

/// A lease, or a part of one, that a server asks back.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RecallItem {
    /// The file; the directory, of names.
    pub id: FileId,
    /// The parts that are asked back.
    pub kinds: LeaseKinds,
    /// The name that is asked back alone: the lease on the directory's other names stays. None: all
    /// names, if [`LeaseKinds::NAMES`] is among the parts.
    pub name: Option<NameBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_kinds_are_sets() {
        let [none, attributes, names] =
            [LeaseKinds::NONE, LeaseKinds::ATTRIBUTES, LeaseKinds::NAMES];
        let both = attributes | names;
        assert!(both.contains(names) && both.contains(none) && !names.contains(both));
        assert_eq!((both.without(names), both.common(names)), (attributes, names));
        assert!(none.is_empty() && LeaseKinds::default() == none && !names.is_empty());
        for kinds in [none, attributes, names, both] {
            assert_eq!(LeaseKinds::from_bits(kinds.bits()), Some(kinds));
        }
        assert_eq!(LeaseKinds::from_bits(4), None);
        assert_eq!(format!("{both:?}"), r#"{"attributes", "names"}"#);
    }
}
