//! Identities on file systems without handles that last (FUSE, plain overlay, NFS and what
//! is not known): a table of where each inode was last seen.
//!
//! An id is an inode number and a number of our own, made when the inode is first seen. It
//! is resolved by walking to its place, and what is found there must have the same inode
//! number, type and time of birth. Renames made through the server move the entry. A log of the
//! table outlives the server's process, and so do the ids. One that was moved behind the server's
//! back, or that the bounded table has dropped, answers `ESTALE`; the client looks the name up
//! again.

use std::collections::VecDeque;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::{Attr, FileId, FileType, IdMap, Name, NameBuf, Timestamp};

use super::cred;
use super::path_log::{Event, PathLog, Whose};

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
    /// Where it is noted; none where it is not, or no longer.
    log: Option<(Whose, PathLog)>,
}

/// An inode as it was last seen.
#[derive(Clone)]
pub(crate) struct Known {
    pub(crate) places: Vec<Place>,
    /// Its number, which can become another than that in its id.
    ino: u64,
    kind: FileType,
    btime: Timestamp,
    used: bool,
}

impl Known {
    /// One without a place, not used as long as it was only seen once.
    fn new(ino: u64, kind: FileType, btime: Timestamp) -> Known {
        Known { places: Vec::with_capacity(1), ino, kind, btime, used: false }
    }

    fn entered(&self, id: FileId) -> Event {
        Event::Entered { id, ino: self.ino, kind: self.kind, btime: self.btime }
    }

    /// Whether `attr` can be of this inode.
    pub(crate) fn is(&self, attr: &Attr) -> bool {
        let none = Timestamp::default();
        attr.ino == self.ino
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
            log: None,
        };
        PathTable { state: Mutex::new(state), entries_max }
    }

    /// As it was when an earlier process noted it last, and noted from now on. Where that cannot be
    /// read or written it begins anew, or ends with this process, and says so.
    pub(crate) fn noted(entries_max: usize, boot: u32, whose: Whose) -> PathTable {
        let table = PathTable::new(entries_max, boot);
        let mut state = table.lock();
        let shown = whose.path.display();
        let read = whose.read(|event, place| state.replay(event, place, entries_max));
        if let Err(error) = read {
            log::error!("{shown}: {error}; files that are open are stale");
        }
        match state.begin(&whose) {
            Ok(log) => state.log = Some((whose, log)),
            Err(error) => log::error!("{shown}: {error}; {STALE_LATER}"),
        }
        drop(state);
        table
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The id of an inode known by other names, if what was found at a place not known yet can be
    /// that one. Whether it is, takes a look at both.
    pub(crate) fn other_link(&self, (dir, name): (FileId, &Name), attr: &Attr) -> Option<FileId> {
        if attr.nlink < 2 || attr.file_type() == FileType::Directory {
            return None;
        }
        let state = self.lock();
        let id = *state.by_ino.get(&attr.ino)?;
        let there = state.by_place.get(&(dir, name.to_owned()));
        (there != Some(&id) && state.by_id.get(&id)?.is(attr)).then_some(id)
    }

    /// The id of what was found at `name` in `dir`; `other_link` is the id by which it is known
    /// for sure.
    pub(crate) fn seen(
        &self,
        dir: FileId,
        name: &Name,
        attr: &Attr,
        other_link: Option<FileId>,
    ) -> FileId {
        let place = (dir, name.to_owned());
        let mut state = self.lock();
        if let Some(id) = state.by_place.get(&place).copied() {
            match state.by_id.get_mut(&id) {
                Some(known) if known.is(attr) => {
                    known.used = true;
                    return id;
                }
                _ => state.leave(&place),
            }
        }
        let is_there = |id: &FileId| state.by_id.get(id).is_some_and(|known| known.is(attr));
        let id = match other_link.filter(is_there) {
            Some(id) => {
                state.enter(id, place);
                id
            }
            None => {
                state.make_room(self.entries_max);
                state.add(attr, Some(place))
            }
        };
        state.commit();
        id
    }

    /// What is known to be at a place: its id, and whether it looks like this.
    pub(crate) fn known_there(
        &self,
        dir: FileId,
        name: &Name,
        attr: &Attr,
    ) -> Option<(FileId, bool)> {
        let mut state = self.lock();
        let id = state.by_place.get(&(dir, name.to_owned())).copied()?;
        let known = state.by_id.get_mut(&id)?;
        known.used = true;
        Some((id, known.is(attr)))
    }

    /// The id of a file that has no name yet.
    pub(crate) fn unnamed(&self, attr: &Attr) -> FileId {
        let mut state = self.lock();
        state.make_room(self.entries_max);
        let id = state.add(attr, None);
        state.commit();
        id
    }

    /// The id last seen at a place.
    pub(crate) fn at(&self, dir: FileId, name: &Name) -> Option<FileId> {
        self.lock().by_place.get(&(dir, name.to_owned())).copied()
    }

    /// A change has just been made to the inode with this id, after which it looks like this.
    pub(crate) fn changed(&self, id: FileId, attr: &Attr) {
        let mut state = self.lock();
        let Some(known) = state.by_id.get_mut(&id) else { return };
        if (known.ino, known.btime) == (attr.ino, attr.btime) {
            return;
        }
        let former = std::mem::replace(&mut known.ino, attr.ino);
        known.btime = attr.btime;
        let places = known.places.clone();
        if state.by_ino.get(&former) == Some(&id) {
            state.by_ino.remove(&former);
        }
        state.by_ino.insert(attr.ino, id);
        for place in &places {
            state.note_entered(id, place);
        }
        state.commit();
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
        state.commit();
    }

    /// `name` in `dir` was removed.
    pub(crate) fn removed(&self, dir: FileId, name: &Name) {
        let mut state = self.lock();
        state.leave(&(dir, name.to_owned()));
        state.commit();
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
        for (id, _, new) in &moves {
            if let Some(id) = *id {
                state.by_place.insert(new.clone(), id);
                state.note_entered(id, new);
            }
        }
        for (_, old, _) in &moves {
            if !state.by_place.contains_key(old) {
                state.note(Event::Left, old);
            }
        }
        state.commit();
    }

    /// Inodes remembered.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.lock().by_id.len()
    }
}

/// What it means that the log cannot be written.
const STALE_LATER: &str = "files that are open will be stale after a restart of the server";

impl State {
    /// Does once more what was noted. Whatever had the name has it no more.
    fn replay(&mut self, event: Event, place: Place, entries_max: usize) {
        let Event::Entered { id, ino, kind, btime } = event else { return self.leave(&place) };
        if self.by_place.get(&place) != Some(&id) {
            self.leave(&place);
        }
        match self.by_id.get_mut(&id) {
            Some(known) => (known.ino, known.btime) = (ino, btime),
            None => {
                self.make_room(entries_max);
                self.insert(id, Known::new(ino, kind, btime));
            }
        }
        self.by_ino.insert(ino, id);
        self.enter(id, place);
    }

    /// Writes the log anew, as the server.
    fn begin(&self, whose: &Whose) -> io::Result<PathLog> {
        let places = self.by_place.iter().filter_map(|(place, id)| {
            let known = self.by_id.get(id)?;
            Some((known.entered(*id), place))
        });
        cred::as_root(|| whose.begin(places)).map_err(io::Error::other)?
    }

    fn note(&mut self, event: Event, place: &Place) {
        if let Some((_, log)) = &mut self.log {
            log.note(event, place);
        }
    }

    fn note_entered(&mut self, id: FileId, place: &Place) {
        if let Some(event) = self.by_id.get(&id).map(|known| known.entered(id)) {
            self.note(event, place);
        }
    }

    /// To be called once a change is complete.
    fn commit(&mut self) {
        let Some((whose, mut log)) = self.log.take() else { return };
        let mut result = log.commit();
        if result.is_ok() && log.is_long(self.by_place.len()) {
            result = self.begin(&whose).map(|anew| log = anew);
        }
        match result {
            Ok(()) => self.log = Some((whose, log)),
            Err(error) => {
                log::error!("{}: {error}; {STALE_LATER}", whose.path.display());
                // One that is behind would say of names what is long over.
                let _ = cred::as_root(|| std::fs::remove_file(&whose.path));
            }
        }
    }

    fn add(&mut self, attr: &Attr, place: Option<Place>) -> FileId {
        self.next_generation += 1;
        let id = FileId { ino: attr.ino, generation: self.next_generation };
        self.insert(id, Known::new(attr.ino, attr.file_type(), attr.btime));
        if let Some(place) = place {
            self.enter(id, place);
        }
        id
    }

    fn insert(&mut self, id: FileId, known: Known) {
        self.by_ino.insert(known.ino, id);
        self.by_id.insert(id, known);
        self.order.push_back(id);
    }

    fn enter(&mut self, id: FileId, place: Place) {
        let Some(known) = self.by_id.get_mut(&id) else { return };
        if known.places.len() < PLACES_MAX && !known.places.contains(&place) {
            known.places.push(place.clone());
            self.note_entered(id, &place);
            self.by_place.insert(place, id);
        }
    }

    /// Forgets a place, and the inode with its last one.
    fn leave(&mut self, place: &Place) {
        let Some(id) = self.by_place.remove(place) else { return };
        self.note(Event::Left, place);
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
            self.note(Event::Left, &place);
        }
        if self.by_ino.get(&known.ino) == Some(&id) {
            self.by_ino.remove(&known.ino);
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

    /// As [`PathTable::seen`], and names of what looks the same are of one file.
    fn seen(table: &PathTable, at: &str, attr: &Attr) -> FileId {
        let known = table.other_link((ROOT, name(at)), attr);
        table.seen(ROOT, name(at), attr, known)
    }

    fn name(name: &str) -> &Name {
        Name::new(name.as_bytes()).unwrap()
    }

    fn file(ino: u64, nlink: u32) -> Attr {
        Attr { ino, mode: libc::S_IFREG, nlink, ..Attr::default() }
    }

    #[test]
    fn an_id_follows_renames() {
        let table = PathTable::new(100, 7);
        let id = seen(&table, "a", &file(10, 1));
        assert_eq!(seen(&table, "a", &file(10, 1)), id);
        table.renamed((ROOT, name("a")), (ROOT, name("b")), false);
        assert_eq!(table.at(ROOT, name("a")), None);
        assert_eq!(table.find(id).unwrap().places, [(ROOT, name("b").to_owned())]);
        let other = seen(&table, "c", &file(11, 1));
        table.renamed((ROOT, name("b")), (ROOT, name("c")), true);
        assert_eq!((table.at(ROOT, name("b")), table.at(ROOT, name("c"))), (Some(other), Some(id)));
        table.renamed((ROOT, name("b")), (ROOT, name("c")), false);
        assert!(table.find(id).is_none());
        assert_eq!(table.at(ROOT, name("c")), Some(other));
    }

    #[test]
    fn hard_links_are_one_file_and_reused_numbers_are_not() {
        let table = PathTable::new(100, 7);
        let id = seen(&table, "a", &file(10, 1));
        assert_eq!(seen(&table, "b", &file(10, 2)), id);
        table.removed(ROOT, name("a"));
        assert!(table.find(id).is_some());
        table.removed(ROOT, name("b"));
        assert!(table.find(id).is_none());
        assert_ne!(seen(&table, "a", &file(10, 1)), id);
    }

    #[test]
    fn another_file_under_a_known_name_is_another_id() {
        let table = PathTable::new(100, 7);
        let id = seen(&table, "a", &file(10, 1));
        assert_ne!(seen(&table, "a", &file(11, 1)), id);
        assert!(table.find(id).is_none());
    }

    fn whose() -> Whose {
        let name = format!("dray-paths-{:x}", dray_rt::random_u64());
        let path = std::env::temp_dir().join(name);
        Whose { path, uuid: dray_core::FsUuid(1), root_ino: 1, magic: 2 }
    }

    /// What is known, in an order of its own.
    fn content(table: &PathTable) -> Vec<(Place, FileId, u64, Timestamp)> {
        let state = table.lock();
        let about = |(place, id): (&Place, &FileId)| {
            let known = &state.by_id[id];
            assert!(known.places.contains(place));
            (place.clone(), *id, known.ino, known.btime)
        };
        let mut content: Vec<_> = state.by_place.iter().map(about).collect();
        content.sort_by_key(|(place, id, ..)| (place.0, place.1.as_bytes().to_vec(), *id));
        content
    }

    #[test]
    fn a_noted_table_is_there_in_the_next_life() {
        let whose = whose();
        let table = PathTable::noted(100, 7, whose.clone());
        for number in 0..40 {
            seen(&table, &format!("f{number}"), &file(100 + number, 1));
        }
        seen(&table, "link", &file(103, 2));
        let unnamed = table.unnamed(&file(99, 0));
        table.linked(unnamed, ROOT, name("named"));
        table.removed(ROOT, name("f0"));
        table.renamed((ROOT, name("f1")), (ROOT, name("g")), false);
        table.renamed((ROOT, name("f2")), (ROOT, name("f4")), false);
        table.renamed((ROOT, name("f5")), (ROOT, name("f6")), true);
        table.renamed((ROOT, name("f7")), (ROOT, name("not known")), true);
        seen(&table, "f8", &file(500, 1)); // another file
        let copied = table.at(ROOT, name("f9")).unwrap();
        let btime = Timestamp { sec: 5, nsec: 6 };
        table.changed(copied, &Attr { btime, ..file(600, 1) });
        assert!(seen(&table, "f9", &Attr { btime, ..file(600, 1) }) == copied);
        let before = content(&table);
        let next = PathTable::noted(100, 8, whose.clone());
        assert_eq!(content(&next), before);
        assert_eq!(seen(&next, "copied", &Attr { btime, ..file(600, 2) }), copied);
        // The log is begun anew when it is long.
        for _ in 0..40_000 {
            next.renamed((ROOT, name("f9")), (ROOT, name("h9")), false);
            next.renamed((ROOT, name("h9")), (ROOT, name("f9")), false);
        }
        let bytes = std::fs::metadata(&whose.path).unwrap().len();
        assert!(bytes < 70_000 * 80, "{bytes}");
        assert_eq!(content(&PathTable::noted(100, 9, whose.clone())), content(&next));
        std::fs::remove_file(&whose.path).unwrap();
    }

    #[test]
    fn the_table_is_bounded_and_keeps_what_is_used() {
        let table = PathTable::new(50, 7);
        let kept = seen(&table, "kept", &file(5, 1));
        for ino in 10..1000 {
            seen(&table, &ino.to_string(), &file(ino, 1));
            assert!(table.find(kept).is_some());
        }
        assert!(table.len() <= 50);
        assert!(table.lock().order.len() <= 200);
    }
}
