//! Names by which this client has met files, for servers that have to learn ids from names.
//!
//! A forgotten place costs an application that uses paths nothing: its call fails with `ESTALE`,
//! and its kernel looks the path up again.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::{Entry, FileId, FileType, IdHash, Name, NameBuf};

use super::guesses::HomeGuesses;
use super::last_lookups::LastLookups;

/// Files that are remembered, in each of two generations: some 150 bytes each.
const FILES_MAX: usize = 65_536;

/// A name of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FilePlace {
    pub(super) dir: FileId,
    pub(super) name: NameBuf,
    pub(super) is_dir: bool,
}

impl FilePlace {
    pub(super) fn of((dir, name): (FileId, &Name), entry: &Entry) -> FilePlace {
        let is_dir = entry.attr.file_type() == FileType::Directory;
        FilePlace { dir, name: name.to_owned(), is_dir }
    }
}

/// What a client has met by names: the name that each file was last met by. All file systems of one client share it: one of them may be
/// asked for a file whose directory another one has looked up.
#[derive(Default)]
pub struct FilePlaces {
    known: Mutex<PlaceGenerations>,
    /// What its threads have just looked up.
    pub(super) lookups: LastLookups,
    /// Where the files of names were at home.
    pub(super) guesses: HomeGuesses,
}

/// What was met last, and what was met before that.
#[derive(Default)]
struct PlaceGenerations {
    new: HashMap<FileId, FilePlace, IdHash>,
    old: HashMap<FileId, FilePlace, IdHash>,
}

impl FilePlaces {
    fn lock(&self) -> MutexGuard<'_, PlaceGenerations> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `entry` was found, made or linked as `name` in `dir`.
    pub(super) fn met(&self, (dir, name): (FileId, &Name), entry: &Entry) {
        self.insert(entry.id, FilePlace::of((dir, name), entry));
    }

    pub(super) fn insert(&self, id: FileId, place: FilePlace) {
        let mut known = self.lock();
        if known.new.len() >= FILES_MAX {
            known.old = std::mem::take(&mut known.new);
        }
        known.new.insert(id, place);
    }

    /// The last known name of a file.
    pub(super) fn of(&self, id: FileId) -> Option<FilePlace> {
        let mut known = self.lock();
        if let Some(place) = known.new.get(&id) {
            return Some(place.clone());
        }
        // It is in use, so that the next generation keeps it. There is room: it leaves the old one.
        let place = known.old.remove(&id)?;
        known.new.insert(id, place.clone());
        Some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_is_bounded_and_what_is_used_stays() {
        let places = FilePlaces::default();
        let id = |ino: usize| FileId { ino: ino as u64, generation: 1 };
        let name = Name::new(b"f").unwrap().to_owned();
        let place = FilePlace { dir: id(1), name, is_dir: false };
        for ino in 0..3 * FILES_MAX {
            places.insert(id(ino), place.clone());
            assert!(places.of(id(0)).is_some() && places.of(id(ino)).is_some());
        }
        assert_eq!(places.of(id(1)), None);
        let known = places.lock();
        assert!(known.new.len() + known.old.len() <= 2 * FILES_MAX + 1);
    }
}
