//! Names that were made, changed or removed and may not be on media: only noted.

use std::collections::BTreeMap;

use dray_core::FileId;

use super::Moment;

/// Names noted at most; of further ones only that there are some is known.
const NAMES_MAX: usize = 65_536;
/// Names up to this length are noted without memory of their own.
const SHORT_MAX_BYTES: usize = 30;

/// What was made of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expect {
    /// It is this file's.
    Is(FileId),
    /// It is somebody's.
    There,
    Gone,
    /// Looking cannot tell.
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

struct Named {
    at: Moment,
    expect: Expect,
}

/// The names of one mount.
#[derive(Default)]
pub(super) struct Names {
    all: BTreeMap<(FileId, NameBytes), Named>,
}

impl Names {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether it is time for a sync, lest there be too many.
    pub(super) fn crowded(&self) -> bool {
        self.all.len() > NAMES_MAX / 2
    }

    pub(super) fn expected(&self, dir: FileId, name: &[u8]) -> Option<Expect> {
        self.all.get(&(dir, NameBytes::new(name))).map(|named| named.expect)
    }

    /// Notes a change. Answers what had been expected before, and whether there was room.
    pub(super) fn note(
        &mut self,
        (dir, name): (FileId, &[u8]),
        at: Moment,
        expect: Expect,
    ) -> (Option<Expect>, bool) {
        let key = (dir, NameBytes::new(name));
        if let Some(named) = self.all.get_mut(&key) {
            let before = std::mem::replace(named, Named { at, expect });
            return (Some(before.expect), true);
        }
        let room = self.all.len() < NAMES_MAX;
        if room {
            self.all.insert(key, Named { at, expect });
        }
        (None, room)
    }

    pub(super) fn forget(&mut self, dir: FileId, name: &[u8]) {
        self.all.remove(&(dir, NameBytes::new(name)));
    }

    /// Everything in `dir` up to `stamp` is on media.
    pub(super) fn synced(&mut self, dir: FileId, stamp: u64) {
        // One range of a large map: most syncs are of files, which have no names in them.
        let first = (dir, NameBytes::new(b""));
        let of_dir = self.all.range(first..).take_while(|((of, _), _)| *of == dir);
        let old = of_dir.filter(|(_, named)| named.at.stamp <= stamp);
        let old: Vec<_> = old.map(|(key, _)| key.clone()).collect();
        old.iter().for_each(|key| _ = self.all.remove(key));
    }

    /// Everything up to `stamp` is on media.
    pub(super) fn stable(&mut self, stamp: u64) {
        self.all.retain(|_, named| named.at.stamp > stamp);
    }

    /// Those from before the life `epoch` of the server's machine.
    pub(super) fn before(&self, epoch: u64) -> Vec<(FileId, Vec<u8>, Expect)> {
        let old = self.all.iter().filter(|(_, named)| named.at.epoch < epoch);
        old.map(|((dir, name), named)| (*dir, name.get().to_vec(), named.expect)).collect()
    }

    /// Forgets those; answers how many they were.
    pub(super) fn lose_before(&mut self, epoch: u64) -> usize {
        let before = self.all.len();
        self.all.retain(|_, named| named.at.epoch >= epoch);
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
        let mut names = Names::default();
        let at = |stamp| Moment { stamp, epoch: 0 };
        for (number, name) in [&b"a"[..], &long, &long[..30], &long[..31]].into_iter().enumerate() {
            let stamp = number as u64 + 1;
            assert_eq!(names.note((dir(1), name), at(stamp), Expect::There), (None, true));
            assert_eq!(names.note((dir(2), name), at(stamp), Expect::Gone), (None, true));
        }
        let again = names.note((dir(1), &long), at(9), Expect::Gone);
        assert_eq!(again, (Some(Expect::There), true));
        assert_eq!(names.expected(dir(1), &long), Some(Expect::Gone));
        assert_eq!(names.expected(dir(1), &long[..32]), None);
        names.synced(dir(1), 4);
        assert_eq!((names.len(), names.expected(dir(1), b"a")), (5, None));
        assert_eq!(names.before(1).first().map(|(_, name, _)| name.len()), Some(255));
        names.stable(8);
        assert_eq!(names.lose_before(1), 1);
    }

    #[test]
    fn there_is_a_bound() {
        let dir = FileId { ino: 1, generation: 1 };
        let (mut names, at) = (Names::default(), Moment { stamp: 1, epoch: 0 });
        for number in 0..NAMES_MAX {
            assert!(names.note((dir, number.to_string().as_bytes()), at, Expect::There).1);
        }
        assert!(names.crowded());
        assert_eq!(names.note((dir, b"one more"), at, Expect::There), (None, false));
        assert_eq!(names.note((dir, b"7"), at, Expect::Gone), (Some(Expect::There), true));
    }
}
