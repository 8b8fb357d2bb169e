//! Directories that others have moved, as a rename(2) finds them.
//!
//! A directory has one place in the kernel's tree of names. When a lookup finds it at another one,
//! the kernel moves it there. It cannot within rename(2), for that holds the locks that moving
//! takes (`__d_unalias` in fs/dcache.c), and the call would fail with ESTALE, again and again. A
//! second try makes the same lookup. So such a lookup is answered with a node of its own for the
//! directory, which has no place yet. The old node is another name for it until the kernel looks at
//! its old place and drops it.

use dray_core::{IdMap, Name, Pid, RenameHow};

use crate::worker::caller::{CallingSyscall, call_of};

/// Where the kernel has each directory that it knows, by slot of the node table, and the way
/// back.
#[derive(Default)]
pub(crate) struct DirectoryPlaces {
    places: IdMap<u64, Place>,
    slots: IdMap<Place, u64>,
}

/// The kernel's number of the directory that it is in, and its name. The number tells an old node
/// of that directory from the one at its new place.
type Place = (u64, Box<[u8]>);

fn place_of((dir, name): (u64, &Name)) -> Place {
    (dir, name.as_bytes().into())
}

impl DirectoryPlaces {
    /// Whether the kernel has the directory of `slot`, and not at `place`.
    pub(crate) fn is_elsewhere(&self, slot: u64, (dir, name): (u64, &Name)) -> bool {
        self.places
            .get(&slot)
            .is_some_and(|(at, called)| (*at, &**called) != (dir, name.as_bytes()))
    }

    /// The kernel learns that it is at `place`.
    pub(crate) fn seen(&mut self, slot: u64, place: (u64, &Name)) {
        if self.places.contains_key(&slot) && !self.is_elsewhere(slot, place) {
            return;
        }
        self.put(slot, place_of(place));
    }

    fn put(&mut self, slot: u64, place: Place) {
        self.forget(slot);
        if let Some(before) = self.slots.insert(place.clone(), slot) {
            self.places.remove(&before); // whatever has become of it, it is not there
        }
        self.places.insert(slot, place);
    }

    /// The kernel has renamed what was at `from`, as far as that is a directory.
    pub(crate) fn renamed(&mut self, from: (u64, &Name), to: (u64, &Name), how: RenameHow) {
        let (from, to) = (place_of(from), place_of(to));
        let moved = self.slots.get(&from).copied();
        let other = self.slots.get(&to).copied();
        [moved, other].into_iter().flatten().for_each(|slot| self.forget(slot));
        if let Some(moved) = moved {
            self.put(moved, to);
        }
        if let (RenameHow::Exchange, Some(other)) = (how, other) {
            self.put(other, from);
        }
    }

    /// The kernel does not know it any more.
    pub(crate) fn forget(&mut self, slot: u64) {
        if let Some(place) = self.places.remove(&slot)
            && self.slots.get(&place) == Some(&slot)
        {
            self.slots.remove(&place);
        }
    }
}

/// Whether the thread `pid` is in rename(2) or its like. Only a process that may trace it can see that, which
/// is root; others have the ESTALE.
pub(crate) fn renames(pid: Pid) -> bool {
    let calls = [
        #[cfg(target_arch = "x86_64")]
        libc::SYS_rename,
        libc::SYS_renameat,
        libc::SYS_renameat2,
    ];
    matches!(call_of(pid), CallingSyscall::Waits(call) if calls.contains(&call.number))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: u64 = 1;
    const DIR: u64 = 3;

    fn at(dir: u64, name: &str) -> (u64, &Name) {
        (dir, Name::new(name.as_bytes()).unwrap())
    }

    // proves: P32
    #[test]
    fn a_directory_is_elsewhere_when_others_moved_it_only() {
        let mut all = DirectoryPlaces::default();
        assert!(!all.is_elsewhere(7, at(ROOT, "a")), "nothing is known of it");
        all.seen(7, at(ROOT, "a"));
        assert!(!all.is_elsewhere(7, at(ROOT, "a")));
        assert!(all.is_elsewhere(7, at(DIR, "a")) && all.is_elsewhere(7, at(ROOT, "b")));
        all.renamed(at(ROOT, "a"), at(DIR, "b"), RenameHow::Replace);
        assert!(!all.is_elsewhere(7, at(DIR, "b")) && all.is_elsewhere(7, at(ROOT, "a")));
        all.seen(8, at(ROOT, "c"));
        all.renamed(at(ROOT, "c"), at(DIR, "b"), RenameHow::Exchange);
        assert!(!all.is_elsewhere(7, at(ROOT, "c")) && !all.is_elsewhere(8, at(DIR, "b")));
        all.renamed(at(ROOT, "file"), at(ROOT, "c"), RenameHow::Replace);
        assert!(!all.is_elsewhere(7, at(DIR, "x")), "it was replaced: nothing is known of it");
        all.seen(9, at(DIR, "b"));
        all.forget(8);
        assert!(!all.is_elsewhere(9, at(DIR, "b")) && all.is_elsewhere(9, at(DIR, "d")));
        all.forget(9);
        assert!(all.places.is_empty() && all.slots.is_empty());
    }

    #[test]
    fn who_reads_a_file_does_not_rename() {
        assert!(!renames(Pid(std::process::id())));
        assert!(!renames(Pid(0)));
    }
}
