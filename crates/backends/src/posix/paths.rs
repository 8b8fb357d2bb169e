//! Identities on file systems without handles that last (FUSE, plain overlay, NFS and what
//! is not known): a table of where each inode was last seen.
//!
//! An id is an inode number and a number of our own, made when the inode is first seen. It
//! is resolved by walking to its place, and what is found there must have the same inode
//! number, type and time of birth. Renames made through the server move the entry. The
//! table is in memory: after a restart such ids answer `ESTALE`, as does one that was moved
//! behind the server's back, or that the bounded table has dropped; the client looks the
//! name up again.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::{Attr, FileId, FileType, IdMap, Name, NameBuf, Timestamp};

/// Names of one inode that are remembered; more hard links are served, each found by the
/// ones remembered.
const PLACES_MAX: usize = 8;

/// A name in a directory.
pub(crate) type Place = (FileId, NameBuf);

/// The table.
pub(crate) struct PathTable {
    state: Mutex<State>,
    entries_max: usize,
}

struct State {
    by_id: IdMap<FileId, Known>,
    by_place: IdMap<Place, FileId>,
    by_ino: IdMap<u64, FileId>,
    /// Order in which entries are looked at when room is needed.
    order: VecDeque<FileId>,
    next_generation: u64,
}

/// An inode as it was last seen.
#[derive(Clone)]
pub(crate) struct Known {
    pub(crate) places: Vec<Place>,
    kind: FileType,
    btime: Timestamp,
    used: bool,
}

impl Known {
    /// Whether `attr` can be of this inode.
    pub(crate) fn is(&self, ino: u64, attr: &Attr) -> bool {
        let none = Timestamp::default();
        attr.ino == ino
            && attr.file_type() == self.kind
            && (attr.btime == none || self.btime == none || attr.btime == self.btime)
    }
}

impl PathTable {
    /// An empty table. `boot` makes its ids differ from those of an earlier one.
    pub(crate) fn new(entries_max: usize, boot: u32) -> PathTable {
        let state = State {
            by_id: IdMap::default(),
            by_place: IdMap::default(),
            by_ino: IdMap::default(),
            order: VecDeque::new(),
            next_generation: u64::from(boot.max(1)) << 32,
        };
        PathTable { state: Mutex::new(state), entries_max }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The id of what was found at `name` in `dir`.
    pub(crate) fn seen(&self, dir: FileId, name: &Name, attr: &Attr) -> FileId {
        let place = (dir, name.to_owned());
        let mut state = self.lock();
        if let Some(id) = state.by_place.get(&place).copied() {
            match state.by_id.get_mut(&id) {
                Some(known) if known.is(id.ino, attr) => {
                    known.used = true;
                    return id;
                }
                _ => state.leave(&place),
            }
        }
        if let Some(id) = state.other_link(attr) {
            state.enter(id, place);
            return id;
        }
        state.make_room(self.entries_max);
        state.add(attr, Some(place))
    }

    /// The id of a file that has no name yet.
    pub(crate) fn unnamed(&self, attr: &Attr) -> FileId {
        let mut state = self.lock();
        state.make_room(self.entries_max);
        state.add(attr, None)
    }

    /// The id last seen at a place.
    pub(crate) fn at(&self, dir: FileId, name: &Name) -> Option<FileId> {
        self.lock().by_place.get(&(dir, name.to_owned())).copied()
    }

    /// Where an id was last seen.
    pub(crate) fn find(&self, id: FileId) -> Option<Known> {
        let mut state = self.lock();
        let known = state.by_id.get_mut(&id)?;
        known.used = true;
        Some(known.clone())
    }

    /// `id` got the further name `name` in `dir`.
    pub(crate) fn linked(&self, id: FileId, dir: FileId, name: &Name) {
        let place = (dir, name.to_owned());
        let mut state = self.lock();
        state.leave(&place);
        state.enter(id, place);
    }

    /// `name` in `dir` was removed.
    pub(crate) fn removed(&self, dir: FileId, name: &Name) {
        self.lock().leave(&(dir, name.to_owned()));
    }

    /// A name moved; what had the new one is gone, or has the old one if they `exchange`d.
    pub(crate) fn renamed(&self, from: (FileId, &Name), to: (FileId, &Name), exchange: bool) {
        let (from, to) = ((from.0, from.1.to_owned()), (to.0, to.1.to_owned()));
        let mut state = self.lock();
        let (moved, other) = (state.by_place.get(&from).copied(), state.by_place.get(&to).copied());
        if moved == other {
            return; // two names of one file: rename(2) does nothing
        }
        // Enter first: an entry without a place is dropped.
        let mut moves = vec![(moved, from.clone(), to.clone())];
        if exchange {
            moves.push((other, to, from));
        } else if other.is_some() {
            state.leave(&to);
        }
        for (id, old, new) in &moves {
            if let Some(known) = id.and_then(|id| state.by_id.get_mut(&id)) {
                known.places.retain(|place| place != old);
                known.places.push(new.clone());
            }
        }
        for (_, old, _) in &moves {
            state.by_place.remove(old);
        }
        for (id, _, new) in moves {
            if let Some(id) = id {
                state.by_place.insert(new, id);
            }
        }
    }

    /// Inodes remembered.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.lock().by_id.len()
    }
}

impl State {
    /// The id of an inode known by another of its names.
    fn other_link(&self, attr: &Attr) -> Option<FileId> {
        if attr.nlink < 2 || attr.file_type() == FileType::Directory {
            return None; // the number alone proves nothing: it may have been used again
        }
        let id = *self.by_ino.get(&attr.ino)?;
        self.by_id.get(&id)?.is(attr.ino, attr).then_some(id)
    }

    fn add(&mut self, attr: &Attr, place: Option<Place>) -> FileId {
        self.next_generation += 1;
        let id = FileId { ino: attr.ino, generation: self.next_generation };
        let known = Known {
            places: Vec::with_capacity(1),
            kind: attr.file_type(),
            btime: attr.btime,
            used: false, // as long as it was only seen once
        };
        self.by_id.insert(id, known);
        self.by_ino.insert(attr.ino, id);
        self.order.push_back(id);
        if let Some(place) = place {
            self.enter(id, place);
        }
        id
    }

    fn enter(&mut self, id: FileId, place: Place) {
        let Some(known) = self.by_id.get_mut(&id) else { return };
        if known.places.len() < PLACES_MAX && !known.places.contains(&place) {
            known.places.push(place.clone());
            self.by_place.insert(place, id);
        }
    }

    /// Forgets a place, and the inode with its last one.
    fn leave(&mut self, place: &Place) {
        let Some(id) = self.by_place.remove(place) else { return };
        let Some(known) = self.by_id.get_mut(&id) else { return };
        known.places.retain(|other| other != place);
        if known.places.is_empty() {
            self.drop_entry(id);
        }
    }

    fn drop_entry(&mut self, id: FileId) {
        let Some(known) = self.by_id.remove(&id) else { return };
        for place in known.places {
            self.by_place.remove(&place);
        }
        if self.by_ino.get(&id.ino) == Some(&id) {
            self.by_ino.remove(&id.ino);
        }
    }

    fn make_room(&mut self, entries_max: usize) {
        while self.by_id.len() >= entries_max {
            let Some(id) = self.order.pop_front() else { return };
            match self.by_id.get_mut(&id) {
                Some(known) if known.used => {
                    known.used = false;
                    self.order.push_back(id);
                }
                Some(_) => self.drop_entry(id),
                None => {}
            }
        }
        if self.order.len() > 2 * self.by_id.len() + 64 {
            let by_id = &self.by_id;
            self.order.retain(|id| by_id.contains_key(id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: FileId = FileId { ino: 1, generation: 1 };

    fn name(name: &str) -> &Name {
        Name::new(name.as_bytes()).unwrap()
    }

    fn file(ino: u64, nlink: u32) -> Attr {
        Attr { ino, mode: libc::S_IFREG, nlink, ..Attr::default() }
    }

    #[test]
    fn an_id_follows_renames() {
        let table = PathTable::new(100, 7);
        let id = table.seen(ROOT, name("a"), &file(10, 1));
        assert_eq!(table.seen(ROOT, name("a"), &file(10, 1)), id);
        table.renamed((ROOT, name("a")), (ROOT, name("b")), false);
        assert_eq!(table.at(ROOT, name("a")), None);
        assert_eq!(table.find(id).unwrap().places, [(ROOT, name("b").to_owned())]);
        let other = table.seen(ROOT, name("c"), &file(11, 1));
        table.renamed((ROOT, name("b")), (ROOT, name("c")), true);
        assert_eq!((table.at(ROOT, name("b")), table.at(ROOT, name("c"))), (Some(other), Some(id)));
        table.renamed((ROOT, name("b")), (ROOT, name("c")), false);
        assert!(table.find(id).is_none());
        assert_eq!(table.at(ROOT, name("c")), Some(other));
    }

    #[test]
    fn hard_links_are_one_file_and_reused_numbers_are_not() {
        let table = PathTable::new(100, 7);
        let id = table.seen(ROOT, name("a"), &file(10, 1));
        assert_eq!(table.seen(ROOT, name("b"), &file(10, 2)), id);
        table.removed(ROOT, name("a"));
        assert!(table.find(id).is_some());
        table.removed(ROOT, name("b"));
        assert!(table.find(id).is_none());
        assert_ne!(table.seen(ROOT, name("a"), &file(10, 1)), id);
    }

    #[test]
    fn another_file_under_a_known_name_is_another_id() {
        let table = PathTable::new(100, 7);
        let id = table.seen(ROOT, name("a"), &file(10, 1));
        assert_ne!(table.seen(ROOT, name("a"), &file(11, 1)), id);
        assert!(table.find(id).is_none());
    }

    #[test]
    fn the_table_is_bounded_and_keeps_what_is_used() {
        let table = PathTable::new(50, 7);
        let kept = table.seen(ROOT, name("kept"), &file(5, 1));
        for ino in 10..1000 {
            table.seen(ROOT, name(&ino.to_string()), &file(ino, 1));
            assert!(table.find(kept).is_some());
        }
        assert!(table.len() <= 50);
        assert!(table.lock().order.len() <= 200);
    }
}
