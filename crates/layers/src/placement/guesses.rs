//! Where files were at home when they were looked up last, by their names. A lookup may open the file that it finds
//! ahead of its use (ADR 0018). That helps at the file's home only, and the home follows from what the lookup finds.

use std::sync::atomic::{AtomicU32, Ordering};

use super::last_lookups::NameKey;
use super::slices::SliceIndex;

/// Names that are remembered, of 4 bytes each.
const GUESSES_MAX: usize = 32_768;
/// Names whose hashes choose the same places. A further one takes the place of one of them.
const WAYS: usize = 4;

/// Of all workers of a mount. In each place the upper half is a part of the name's hash, and the lower half is its slice, counted from 1.
pub(super) struct HomeGuesses(Box<[[AtomicU32; WAYS]]>);

impl Default for HomeGuesses {
    fn default() -> HomeGuesses {
        let empty = || [const { AtomicU32::new(0) }; WAYS];
        HomeGuesses((0..GUESSES_MAX / WAYS).map(|_| empty()).collect())
    }
}

/// The part of a name's hash that stands in its place.
const TAG: u32 = 0xffff_0000;

impl HomeGuesses {
    fn places(&self, NameKey(hash): NameKey) -> (&[AtomicU32; WAYS], u32) {
        (&self.0[hash as usize % self.0.len()], (hash >> 32) as u32 & TAG)
    }

    /// The slice that had the file of this name. A guess: another name may have the same hash.
    pub(super) fn of(&self, key: NameKey) -> Option<SliceIndex> {
        let (places, tag) = self.places(key);
        let known = places.iter().map(|place| place.load(Ordering::Relaxed));
        let known = known.filter(|known| known & TAG == tag);
        known.filter_map(|known| (known & !TAG).checked_sub(1)).map(|s| SliceIndex(s as u16)).next()
    }

    pub(super) fn note(&self, key: NameKey, SliceIndex(slice): SliceIndex) {
        let (places, tag) = self.places(key);
        let known = places.each_ref().map(|place| place.load(Ordering::Relaxed));
        let own = known.iter().position(|known| *known != 0 && known & TAG == tag);
        let free = || known.iter().position(|known| *known == 0);
        // Any of them, but for each name always the same one.
        let place = own.or_else(free).unwrap_or((key.0 >> 32) as usize % WAYS);
        places[place].store(tag | (u32::from(slice) + 1) & !TAG, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use dray_core::{FileId, Name};

    use super::*;

    #[test]
    fn as_many_names_as_a_directory_may_have_are_known() {
        let guesses = HomeGuesses::default();
        let dir = FileId { ino: 7, generation: 1 };
        let keys = |count: usize| {
            let names = (0..count).map(|number| format!("file{number}"));
            names.map(|name| NameKey::of(dir, Name::new(name.as_bytes()).unwrap())).enumerate()
        };
        let slice = |number: usize| SliceIndex(number as u16 % 240);
        let wrong = |count: usize| {
            let is_wrong = |(number, key)| guesses.of(key) != Some(slice(number));
            keys(count).filter(|one| is_wrong(*one)).count()
        };
        for (number, key) in keys(8000) {
            assert_eq!(guesses.of(key).filter(|_| number < 100), None);
            guesses.note(key, slice(number));
        }
        assert!(wrong(8000) < 80, "{}", wrong(8000));
        keys(8000).for_each(|(_, key)| guesses.note(key, SliceIndex(5)));
        let moved = |(_, key)| guesses.of(key) == Some(SliceIndex(5));
        assert!(keys(8000).filter(|one| moved(*one)).count() > 7920);
        // Names beyond the limit take the places of others.
        for (number, key) in keys(2 * GUESSES_MAX) {
            guesses.note(key, slice(number));
            assert_eq!(guesses.of(key), Some(slice(number)));
        }
        assert!(wrong(2 * GUESSES_MAX) >= GUESSES_MAX);
    }
}
