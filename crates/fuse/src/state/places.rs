//! Where files were last seen: for people who ask what is going on, and for openings under names that
//! the kernel believes.
//!
//! A name is noted when the kernel is told of a file by it. Renames by other mounts are seen
//! at the next lookup, so that a place is what the kernel believes, not a promise.

use std::hash::BuildHasher;
use std::time::Duration;

use dray_core::{FileId, IdHash, IdMap, Name, NameBuf, RenameHow};
use dray_rt::{Instant, now};

/// The root's slot.
const ROOT: u64 = 0;
/// Directories above a file that are followed. Those of renames elsewhere may seem to form a
/// circle.
const DEPTH_MAX: usize = 256;
/// The kernel counts how long it believes a name from when the thread that looked it up goes on,
/// which is later than our answer.
const LATE: Duration = Duration::from_secs(1);

/// Directory and name by slot of the node table. Names of slots that are used again use
/// their memory again.
#[derive(Default)]
pub(crate) struct Places {
    list: Vec<Place>,
    /// Where the kernel believes names.
    believed: Option<Believed>,
}

#[derive(Clone, Default)]
struct Place {
    dir: Option<FileId>,
    name: Vec<u8>,
    /// This mount has taken the name away.
    taken: bool,
    /// Until then the kernel may believe in other names of the file.
    others_until: Option<Instant>,
}

struct Believed {
    /// How long the kernel believes a name.
    validity: Duration,
    /// Slots by the hash of the place that they were last seen at. Where two fall together, one is
    /// missing: then its file is looked up once more.
    slots: IdMap<u64, u64>,
}

impl Believed {
    fn key(dir: FileId, name: &[u8]) -> u64 {
        IdHash::default().hash_one((dir, name))
    }
}

impl Place {
    fn is(&self, dir: FileId, name: &[u8]) -> bool {
        self.dir == Some(dir) && self.name == name
    }
}

impl Places {
    /// The kernel believes names for that long.
    pub(crate) fn believed_for(&mut self, validity: Duration) {
        self.believed = Some(Believed { validity, slots: IdMap::default() });
    }

    /// The file of `slot` was found as `place`, if it has one.
    pub(crate) fn seen(&mut self, slot: u64, place: Option<(FileId, &Name)>) {
        let Some((dir, name)) = place else { return };
        let name = name.as_bytes();
        let index = slot as usize;
        if self.list.len() <= index {
            self.list.resize(index + 1, Place::default());
        }
        let place = &mut self.list[index];
        if !place.is(dir, name) {
            if let (Some(Believed { validity, .. }), Some(_)) = (&self.believed, place.dir) {
                place.others_until = Some(now() + *validity + LATE);
            }
            self.set(slot, dir, name);
        }
        self.list[index].taken = false;
    }

    /// Notes a place, and nothing of the one before.
    fn set(&mut self, slot: u64, dir: FileId, name: &[u8]) {
        self.unlist(slot);
        let place = &mut self.list[slot as usize];
        place.dir = Some(dir);
        place.name.clear();
        place.name.extend_from_slice(name);
        if let Some(believed) = &mut self.believed {
            believed.slots.insert(Believed::key(dir, name), slot);
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
        let (Some(believed), Some(place)) = (&mut self.believed, self.list.get(slot as usize))
        else {
            return;
        };
        let Some(dir) = place.dir else { return };
        let key = Believed::key(dir, &place.name);
        if believed.slots.get(&key) == Some(&slot) {
            believed.slots.remove(&key);
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
        let slot = self.believed.as_mut()?.slots.remove(&Believed::key(dir, name))?;
        let place = self.list.get_mut(slot as usize).filter(|place| place.is(dir, name))?;
        place.taken = true;
        Some(slot)
    }

    /// The one name by which the kernel can have come to `slot`; none if there may be others, or
    /// it is not known.
    pub(crate) fn only_name(&self, slot: u64) -> Option<(FileId, NameBuf)> {
        let place = self.list.get(slot as usize)?;
        if place.taken || place.others_until.is_some_and(|until| now() < until) {
            return None;
        }
        Some((place.dir?, Name::new(&place.name).ok()?.to_owned()))
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
            places.believed_for(VALIDITY);
            test(&mut places).await;
        });
    }

    fn name_of(places: &Places, slot: u64) -> Option<String> {
        let (dir, name) = places.only_name(slot)?;
        Some(format!("{}/{}", dir.ino, String::from_utf8_lossy(name.as_bytes())))
    }

    #[test]
    fn of_several_names_each_may_be_meant_while_it_is_believed() {
        with_places(async |places| {
            assert_eq!(name_of(places, 1), None);
            places.seen(1, Some(at(DIR, "a")));
            places.seen(1, Some(at(DIR, "a")));
            assert_eq!(name_of(places, 1).unwrap(), "2/a");
            places.seen(1, Some(at(OTHER, "a")));
            assert_eq!(name_of(places, 1), None);
            dray_rt::sleep(VALIDITY).await;
            assert_eq!(name_of(places, 1), None, "the kernel counts from later on");
            dray_rt::sleep(LATE).await;
            assert_eq!(name_of(places, 1).unwrap(), "3/a");
            places.seen(1, Some(at(DIR, "b")));
            places.forget(1);
            places.seen(1, Some(at(DIR, "of another file")));
            assert_eq!(name_of(places, 1).unwrap(), "2/of another file");
        });
    }

    #[test]
    fn what_this_mount_renames_has_its_new_name_alone() {
        with_places(async |places| {
            for (slot, name) in [(1, "a"), (2, "b"), (3, "c")] {
                places.seen(slot, Some(at(DIR, name)));
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
            // Others have given the name to another file since; that is moved, not the first.
            places.seen(4, Some(at(OTHER, "d")));
            places.renamed(at(OTHER, "d"), at(DIR, "e"), RenameHow::Replace);
            assert_eq!(name_of(places, 1).unwrap(), "3/d");
            assert_eq!(name_of(places, 4).unwrap(), "2/e");
            places.renamed(at(DIR, "never seen"), at(DIR, "f"), RenameHow::Replace);
        });
    }

    #[test]
    fn a_slot_that_is_used_again_takes_no_name_from_others() {
        with_places(async |places| {
            places.seen(1, Some(at(DIR, "a")));
            places.seen(2, Some(at(DIR, "a")));
            places.forget(1);
            places.renamed(at(DIR, "a"), at(DIR, "b"), RenameHow::Replace);
            assert_eq!(name_of(places, 2).unwrap(), "2/b");
            assert!(places.believed.as_ref().unwrap().slots.len() == 1);
        });
    }
}
