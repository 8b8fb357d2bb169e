//! Names that were made, changed or removed and may not be on media. They are only noted.

use std::collections::BTreeMap;

use dray_core::FileId;

use super::ChangeStamp;

/// Names noted at most; of further ones only that there are some is known.
const NAMES_MAX: usize = 65_536;
/// Names up to this length are noted without memory of their own.
const SHORT_MAX_BYTES: usize = 30;

/// The result of a lookup of a changed name, unless the change was undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpectedName {
    /// This file.
    File(FileId),
    /// Some file.
    AnyFile,
    /// No file.
    Absent,
    /// A lookup cannot tell.
    Unknown,
}

/// A name; short ones without an allocation.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum NameBytes {
    Short { len: u8, bytes: [u8; SHORT_MAX_BYTES] },
    Long(Box<[u8]>),
}

impl NameBytes {
    fn new(name: &[u8]) -> NameBytes {
        let mut bytes = [0; SHORT_MAX_BYTES];
        match bytes.get_mut(..name.len()) {
            Some(place) => {
                place.copy_from_slice(name);
                NameBytes::Short { len: name.len() as u8, bytes }
            }
            None => NameBytes::Long(name.into()),
        }
    }

    fn get(&self) -> &[u8] {
        match self {
            NameBytes::Short { len, bytes } => &bytes[..usize::from(*len)],
            NameBytes::Long(bytes) => bytes,
        }
    }
}

struct NameEntry {
    stamp: ChangeStamp,
    expected: ExpectedName,
}

/// The changed names of one mount, by directory and name.
#[derive(Default)]
pub(super) struct NameChanges {
    all: BTreeMap<(FileId, NameBytes), NameEntry>,
}

impl NameChanges {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether a sync is due, so that room is left.
    pub(super) fn crowded(&self) -> bool {
        self.all.len() > NAMES_MAX / 2
    }

    pub(super) fn expected(&self, dir: FileId, name: &[u8]) -> Option<ExpectedName> {
        self.all.get(&(dir, NameBytes::new(name))).map(|entry| entry.expected)
    }

    /// Notes a change. Answers what was expected before, and whether there was room.
    pub(super) fn note(
        &mut self,
        (dir, name): (FileId, &[u8]),
        stamp: ChangeStamp,
        expected: ExpectedName,
    ) -> (Option<ExpectedName>, bool) {
        let key = (dir, NameBytes::new(name));
        if let Some(entry) = self.all.get_mut(&key) {
            let before = std::mem::replace(entry, NameEntry { stamp, expected });
            return (Some(before.expected), true);
        }
        let room = self.all.len() < NAMES_MAX;
        if room {
            self.all.insert(key, NameEntry { stamp, expected });
        }
        (None, room)
    }

    pub(super) fn forget(&mut self, dir: FileId, name: &[u8]) {
        self.all.remove(&(dir, NameBytes::new(name)));
    }

    /// Everything in `dir` up to stamp `durable` is on media.
    pub(super) fn forget_in(&mut self, dir: FileId, durable: u64) {
        // This looks at one range of a large map: most syncs are of files, which have no names in
        // them.
        let first = (dir, NameBytes::new(b""));
        let of_dir = self.all.range(first..).take_while(|((of, _), _)| *of == dir);
        let old = of_dir.filter(|(_, entry)| entry.stamp.number <= durable);
        let old: Vec<_> = old.map(|(key, _)| key.clone()).collect();
        old.iter().for_each(|key| _ = self.all.remove(key));
    }

    /// Everything up to stamp `durable` is on media.
    pub(super) fn forget_all(&mut self, durable: u64) {
        self.all.retain(|_, entry| entry.stamp.number > durable);
    }

    /// The names that were changed before `power_epoch`.
    pub(super) fn before(&self, power_epoch: u64) -> Vec<(FileId, Vec<u8>, ExpectedName)> {
        let old = self.all.iter().filter(|(_, entry)| entry.stamp.is_before(power_epoch));
        old.map(|((dir, name), entry)| (*dir, name.get().to_vec(), entry.expected)).collect()
    }

    /// Forgets those. Answers how many they were.
    pub(super) fn lose_before(&mut self, power_epoch: u64) -> usize {
        let before = self.all.len();
        self.all.retain(|_, entry| !entry.stamp.is_before(power_epoch));
        before - self.all.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_short_and_long_are_found_and_a_directory_is_synced_alone() {
        let dir = |ino| FileId { ino, generation: 1 };
        let long = [b'x'; 255];
        let mut names = NameChanges::default();
        let at = |number| ChangeStamp { number, power_epoch: 0 };
        for (number, name) in [&b"a"[..], &long, &long[..30], &long[..31]].into_iter().enumerate() {
            let stamp = number as u64 + 1;
            assert_eq!(names.note((dir(1), name), at(stamp), ExpectedName::AnyFile), (None, true));
            assert_eq!(names.note((dir(2), name), at(stamp), ExpectedName::Absent), (None, true));
        }
        let again = names.note((dir(1), &long), at(9), ExpectedName::Absent);
        assert_eq!(again, (Some(ExpectedName::AnyFile), true));
        assert_eq!(names.expected(dir(1), &long), Some(ExpectedName::Absent));
        assert_eq!(names.expected(dir(1), &long[..32]), None);
        names.forget_in(dir(1), 4);
        assert_eq!((names.len(), names.expected(dir(1), b"a")), (5, None));
        assert_eq!(names.before(1).first().map(|(_, name, _)| name.len()), Some(255));
        names.forget_all(8);
        assert_eq!(names.lose_before(1), 1);
    }

    #[test]
    fn there_is_a_bound() {
        let dir = FileId { ino: 1, generation: 1 };
        let (mut names, at) = (NameChanges::default(), ChangeStamp { number: 1, power_epoch: 0 });
        for number in 0..NAMES_MAX {
            assert!(names.note((dir, number.to_string().as_bytes()), at, ExpectedName::AnyFile).1);
        }
        assert!(names.crowded());
        assert_eq!(names.note((dir, b"one more"), at, ExpectedName::AnyFile), (None, false));
        assert_eq!(
            names.note((dir, b"7"), at, ExpectedName::Absent),
            (Some(ExpectedName::AnyFile), true)
        );
    }
}
