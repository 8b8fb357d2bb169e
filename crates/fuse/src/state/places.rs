//! Where files were last seen: for people who ask what is going on, and for openings under names that
//! the kernel believes.
//!
//! A name is noted when the kernel gets a file by it. Renames by other mounts are seen
//! at the next lookup, so that a place is what the kernel believes, not a promise.

use std::hash::BuildHasher;
use std::time::Duration;

use dray_core::{FileId, IdHash, IdMap, Name, NameBuf, RenameHow, Ttl};
use dray_rt::{Instant, now};

/// The root's slot.
const ROOT: u64 = 0;
/// Directories above a file that are followed. Those of renames elsewhere may seem to form a
/// circle.
const DEPTH_MAX: usize = 256;
/// The kernel counts how long it believes a name from when the thread that looked it up goes on,
/// which is later than our answer.
const LATE: Duration = Duration::from_secs(1);

/// A name that leads to a file, as the kernel gets it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NameBinding<'a> {
    pub(crate) dir: FileId,
    pub(crate) name: &'a Name,
    /// How long the kernel may believe it.
    pub(crate) ttl: Ttl,
}

/// The name by which the kernel has come to a file that it opens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NameForOpen {
    /// The kernel believes the name no longer than a call: it has just looked the name up.
    JustLookedUp,
    /// The file has this name alone.
    Only(FileId, NameBuf),
    /// The name is one of several, or is not known.
    Unknown,
}

/// Directory and name by slot of the node table. Names of slots that are used again use
/// their memory again.
#[derive(Default)]
pub(crate) struct Places {
    list: Vec<Place>,
    /// Where the kernel may believe names: slots by the hash of the place that they were last seen at.
    /// Where two fall together, one is missing: then its file is looked up once more.
    by_place: Option<IdMap<u64, u64>>,
}

#[derive(Clone, Default)]
struct Place {
    dir: Option<FileId>,
    name: Vec<u8>,
    /// This mount has taken the name away.
    taken: bool,
    /// How long the kernel may believe the name.
    ttl: Option<Ttl>,
    /// Until then the kernel may believe in other names of the file.
    others_until: Option<Instant>,
}

fn key(dir: FileId, name: &[u8]) -> u64 {
    IdHash::default().hash_one((dir, name))
}

impl Place {
    fn is(&self, dir: FileId, name: &[u8]) -> bool {
        self.dir == Some(dir) && self.name == name
    }
}

impl Places {
    /// The kernel may believe names, and others change them.
    pub(crate) fn track_bindings(&mut self) {
        self.by_place = Some(IdMap::default());
    }

    /// The file of `slot` was found by a name, if it was.
    pub(crate) fn seen(&mut self, slot: u64, seen: Option<NameBinding<'_>>) {
        let Some(NameBinding { dir, name, ttl }) = seen else { return };
        let name = name.as_bytes();
        let index = slot as usize;
        if self.list.len() <= index {
            self.list.resize(index + 1, Place::default());
        }
        let place = &mut self.list[index];
        if !place.is(dir, name) {
            if let Some(before) = place.ttl.filter(|before| *before > Ttl::ZERO) {
                let until = now() + before.duration() + LATE;
                place.others_until = place.others_until.max(Some(until));
            }
            self.set(slot, dir, name);
        }
        let place = &mut self.list[index];
        place.taken = false;
        place.ttl = self.by_place.is_some().then_some(ttl);
    }

    /// Notes a place, and nothing of the one before.
    fn set(&mut self, slot: u64, dir: FileId, name: &[u8]) {
        self.unlist(slot);
        let place = &mut self.list[slot as usize];
        place.dir = Some(dir);
        place.name.clear();
        place.name.extend_from_slice(name);
        if let Some(slots) = &mut self.by_place {
            slots.insert(key(dir, name), slot);
        }
    }

    /// Whatever was in `slot` is gone.
    pub(crate) fn forget(&mut self, slot: u64) {
        self.unlist(slot);
        if let Some(place) = self.list.get_mut(slot as usize) {
            *place = Place { name: std::mem::take(&mut place.name), ..Place::default() };
        }
    }

    /// What was seen at the place of `slot` is not to be found by it any more.
    fn unlist(&mut self, slot: u64) {
        let (Some(slots), Some(place)) = (&mut self.by_place, self.list.get(slot as usize)) else {
            return;
        };
        let Some(dir) = place.dir else { return };
        let key = key(dir, &place.name);
        if slots.get(&key) == Some(&slot) {
            slots.remove(&key);
        }
    }

    /// This mount has renamed something; the kernel knows.
    pub(crate) fn renamed(&mut self, from: (FileId, &Name), to: (FileId, &Name), how: RenameHow) {
        let (moved, other) = (self.removed(from), self.removed(to));
        let back = other.filter(|_| how == RenameHow::Exchange).map(|slot| (slot, from));
        for (slot, (dir, name)) in moved.map(|slot| (slot, to)).into_iter().chain(back) {
            self.set(slot, dir, name.as_bytes());
            self.list[slot as usize].taken = false;
        }
    }

    /// This mount has removed a name; the kernel knows. Answers the slot of what was seen there.
    pub(crate) fn removed(&mut self, (dir, name): (FileId, &Name)) -> Option<u64> {
        let name = name.as_bytes();
        let slot = self.by_place.as_mut()?.remove(&key(dir, name))?;
        let place = self.list.get_mut(slot as usize).filter(|place| place.is(dir, name))?;
        place.taken = true;
        Some(slot)
    }

    /// The name by which the kernel has come to `slot`.
    pub(crate) fn name_for_open(&self, slot: u64) -> NameForOpen {
        let known = self.list.get(slot as usize).filter(|place| {
            let others = place.others_until.is_some_and(|until| now() < until);
            !(place.taken || others)
        });
        let Some(Place { dir: Some(dir), name, ttl, .. }) = known else {
            return NameForOpen::Unknown;
        };
        match (ttl, Name::new(name)) {
            (Some(Ttl::ZERO), _) => NameForOpen::JustLookedUp,
            (_, Ok(name)) => NameForOpen::Only(*dir, name.to_owned()),
            (_, Err(_)) => NameForOpen::Unknown,
        }
    }

    /// The path of `slot`; `slot_of` knows the slots of directories.
    pub(crate) fn path(
        &self,
        slot: u64,
        slot_of: impl Fn(FileId) -> Option<u64>,
    ) -> Option<Vec<u8>> {
        if slot == ROOT {
            return Some(b"/".to_vec());
        }
        let mut names: Vec<&[u8]> = Vec::new();
        let mut slot = slot;
        while slot != ROOT {
            let place = self.list.get(slot as usize)?;
            names.push(&place.name);
            slot = slot_of(place.dir?)?;
            if names.len() > DEPTH_MAX {
                return None;
            }
        }
        let parts = names.iter().rev().flat_map(|name| [b"/".as_slice(), name]);
        Some(parts.flatten().copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: FileId = FileId { ino: 2, generation: 0 };
    const OTHER: FileId = FileId { ino: 3, generation: 0 };
    const VALIDITY: Duration = Duration::from_secs(5);

    fn at(dir: FileId, name: &str) -> (FileId, &Name) {
        (dir, Name::new(name.as_bytes()).unwrap())
    }

    /// Runs `test` on places of a kernel that believes names, with a clock that it can put forward.
    fn with_places(test: impl AsyncFnOnce(&mut Places)) {
        let mut executor =
            dray_rt::Executor::new(dray_rt::DriverKind::Simulated { seed: 1 }).unwrap();
        executor.block_on(async {
            let mut places = Places::default();
            places.track_bindings();
            test(&mut places).await;
        });
    }

    fn seen_for(places: &mut Places, slot: u64, (dir, name): (FileId, &Name), ttl: Duration) {
        places.seen(slot, Some(NameBinding { dir, name, ttl: Ttl::of(ttl) }));
    }

    fn seen(places: &mut Places, slot: u64, place: (FileId, &Name)) {
        seen_for(places, slot, place, VALIDITY);
    }

    fn name_of(places: &Places, slot: u64) -> Option<String> {
        match places.name_for_open(slot) {
            NameForOpen::Only(dir, name) => {
                Some(format!("{}/{}", dir.ino, String::from_utf8_lossy(name.as_bytes())))
            }
            NameForOpen::JustLookedUp | NameForOpen::Unknown => None,
        }
    }

    #[test]
    fn each_name_is_believed_as_long_as_its_own_answer_said() {
        with_places(async |places| {
            seen_for(places, 1, at(DIR, "a"), Duration::ZERO);
            assert_eq!(places.name_for_open(1), NameForOpen::JustLookedUp);
            // Of a name that was not believed nothing is left.
            seen_for(places, 1, at(DIR, "b"), VALIDITY * 10);
            assert_eq!(name_of(places, 1).unwrap(), "2/b");
            seen_for(places, 1, at(DIR, "c"), VALIDITY);
            assert_eq!(places.name_for_open(1), NameForOpen::Unknown);
            // A short one behind a long one does not end that.
            seen_for(places, 1, at(DIR, "d"), Duration::ZERO);
            dray_rt::sleep(VALIDITY + LATE).await;
            assert_eq!(places.name_for_open(1), NameForOpen::Unknown);
            dray_rt::sleep(VALIDITY * 9).await;
            assert_eq!(places.name_for_open(1), NameForOpen::JustLookedUp);
        });
    }

    #[test]
    fn of_several_names_each_may_be_meant_while_it_is_believed() {
        with_places(async |places| {
            assert_eq!(name_of(places, 1), None);
            seen(places, 1, at(DIR, "a"));
            seen(places, 1, at(DIR, "a"));
            assert_eq!(name_of(places, 1).unwrap(), "2/a");
            seen(places, 1, at(OTHER, "a"));
            assert_eq!(name_of(places, 1), None);
            dray_rt::sleep(VALIDITY).await;
            assert_eq!(name_of(places, 1), None, "the kernel counts from later on");
            dray_rt::sleep(LATE).await;
            assert_eq!(name_of(places, 1).unwrap(), "3/a");
            seen(places, 1, at(DIR, "b"));
            places.forget(1);
            seen(places, 1, at(DIR, "of another file"));
            assert_eq!(name_of(places, 1).unwrap(), "2/of another file");
        });
    }

    #[test]
    fn what_this_mount_renames_has_its_new_name_alone() {
        with_places(async |places| {
            for (slot, name) in [(1, "a"), (2, "b"), (3, "c")] {
                seen(places, slot, at(DIR, name));
            }
            places.renamed(at(DIR, "a"), at(OTHER, "d"), RenameHow::NoReplace);
            places.renamed(at(DIR, "b"), at(DIR, "c"), RenameHow::Exchange);
            let names = [1, 2, 3].map(|slot| name_of(places, slot).unwrap());
            assert_eq!(names, ["3/d", "2/c", "2/b"]);
            // What is replaced has no name that is known.
            places.renamed(at(DIR, "c"), at(DIR, "b"), RenameHow::Replace);
            assert_eq!(name_of(places, 2).unwrap(), "2/b");
            assert_eq!(name_of(places, 3), None);
            places.removed(at(DIR, "b"));
            assert_eq!(name_of(places, 2), None);
            // Another client has given the name to another file since; that file is moved, not the
            // first.
            seen(places, 4, at(OTHER, "d"));
            places.renamed(at(OTHER, "d"), at(DIR, "e"), RenameHow::Replace);
            assert_eq!(name_of(places, 1).unwrap(), "3/d");
            assert_eq!(name_of(places, 4).unwrap(), "2/e");
            places.renamed(at(DIR, "never seen"), at(DIR, "f"), RenameHow::Replace);
        });
    }

    #[test]
    fn a_slot_that_is_used_again_takes_no_name_from_others() {
        with_places(async |places| {
            seen(places, 1, at(DIR, "a"));
            seen(places, 2, at(DIR, "a"));
            places.forget(1);
            places.renamed(at(DIR, "a"), at(DIR, "b"), RenameHow::Replace);
            assert_eq!(name_of(places, 2).unwrap(), "2/b");
            assert!(places.by_place.as_ref().unwrap().len() == 1);
        });
    }
}
