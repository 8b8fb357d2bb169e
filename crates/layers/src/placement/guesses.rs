//! Where files were at home when they were looked up last, by their names. A lookup may open the file that it finds
//! ahead of its use (ADR 0018). That helps at the file's home only, and the home follows from what the lookup finds.

use std::sync::atomic::{AtomicU32, Ordering};

use super::last_lookups::NameKey;
use super::slices::SliceIndex;

/// Names that are remembered. One that falls together with another takes its place.
const GUESSES: usize = 4096;

/// A part of each name's hash in the upper half, and its slice, counted from 1, in the lower half.
pub(super) struct HomeGuesses(Box<[AtomicU32]>);

impl Default for HomeGuesses {
    fn default() -> HomeGuesses {
        HomeGuesses((0..GUESSES).map(|_| AtomicU32::new(0)).collect())
    }
}

impl HomeGuesses {
    fn place(&self, NameKey(hash): NameKey) -> (&AtomicU32, u32) {
        (&self.0[hash as usize % GUESSES], (hash >> 32) as u32 & 0xffff_0000)
    }

    /// The slice that had the file of this name. A guess: another name may have the same hash.
    pub(super) fn of(&self, key: NameKey) -> Option<SliceIndex> {
        let (place, tag) = self.place(key);
        let known = place.load(Ordering::Relaxed);
        let slice = (known & 0xffff).checked_sub(1)?;
        (known & 0xffff_0000 == tag).then_some(SliceIndex(slice as u16))
    }

    pub(super) fn note(&self, key: NameKey, SliceIndex(slice): SliceIndex) {
        let (place, tag) = self.place(key);
        place.store(tag | (u32::from(slice) + 1) & 0xffff, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use dray_core::{FileId, Name};

    use super::*;

    #[test]
    fn a_name_is_known_until_another_one_takes_its_place() {
        let guesses = HomeGuesses::default();
        let dir = FileId { ino: 7, generation: 1 };
        let names: Vec<String> = (0..GUESSES / 8).map(|number| format!("file{number}")).collect();
        let slice = |number: usize| SliceIndex(number as u16 % 240);
        for (number, name) in names.iter().enumerate() {
            let key = NameKey::of(dir, Name::new(name.as_bytes()).unwrap());
            assert_eq!(guesses.of(key), None);
            guesses.note(key, slice(number));
        }
        let known = |(number, name): (usize, &String)| {
            guesses.of(NameKey::of(dir, Name::new(name.as_bytes()).unwrap())) == Some(slice(number))
        };
        let known = names.iter().enumerate().filter(|one| known(*one)).count();
        assert!(known > names.len() * 8 / 10, "{known} of {}", names.len());
    }
}
