//! Identities on file systems without handles that last (FUSE, plain overlay, NFS and what
//! is not known): a table of where each inode was last seen.
//!
//! An id is an inode number and a number of our own, made when the inode is first seen. It
//! is resolved by walking to its place, and what is found there must have the same inode
//! number, type and time of birth. Renames made through the server move the entry. A log of the
//! table outlives the server's process, and so do the ids. One that was moved behind the server's
//! back, or that the bounded table has dropped, answers `ESTALE`; the client looks the name up
//! again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{Attr, FileId, FileType, IdMap, Name, NameBuf, Timestamp};

use dray_rt::CpuSet;

use super::cred;
use super::path_log::{Event, PathLog, Whose};
use super::path_rewrite;

/// Names of one inode that are remembered; more hard links are served, each found by the
/// ones remembered.
const PLACES_MAX: usize = 8;

/// A name in a directory.
pub(crate) type Place = (FileId, NameBuf);

/// Entries that one is looked for among that was not used: with room for none and all of them used,
/// the last of these goes.
const LOOKS_MAX: usize = 64;

/// The table.
pub(crate) struct PathTable {
    shared: Arc<Shared>,
    entries_max: usize,
}

/// What a rewrite of the log shares with the table.
pub(super) struct Shared {
    state: Mutex<State>,
    /// Of the thread that opened the export: one that serves may be kept on one of them.
    pub(super) cpus: Option<CpuSet>,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Default)]
pub(super) struct State {
    by_id: IdMap<FileId, Known>,
    by_place: IdMap<Place, FileId>,
    by_ino: IdMap<u64, FileId>,
    /// All ids, each at a place that it keeps, and the places that are free.
    slots: Vec<Option<FileId>>,
    free: Vec<usize>,
    /// Which one is looked at next when room is needed.
    hand: usize,
    next_generation: u64,
    /// Where it is noted; none where it is not, or no longer.
    pub(super) log: Option<(Whose, PathLog)>,
    /// The log is being written anew.
    pub(super) rewriting: bool,
    /// Most entries that a rewrite has handled at once.
    #[cfg(test)]
    pub(super) handled_max: usize,
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
    slot: usize,
}

impl Known {
    /// One without a place, not used as long as it was only seen once.
    fn new(ino: u64, kind: FileType, btime: Timestamp) -> Known {
        Known { places: Vec::with_capacity(1), ino, kind, btime, used: false, slot: 0 }
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
        let shared = Shared { state: Mutex::default(), cpus: CpuSet::allowed().ok() };
        let shared = Arc::new(shared);
        shared.lock().next_generation = u64::from(boot.max(1)) << 32;
        PathTable { shared, entries_max }
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
        self.shared.lock()
    }

    /// To be called once a change is complete.
    fn commit(&self, mut state: MutexGuard<'_, State>) {
        let is_long = state.commit();
        drop(state);
        if is_long {
            path_rewrite::start(&self.shared);
        }
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
        self.commit(state);
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
        self.commit(state);
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
        self.commit(state);
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
        self.commit(state);
    }

    /// `name` in `dir` was removed.
    pub(crate) fn removed(&self, dir: FileId, name: &Name) {
        let mut state = self.lock();
        state.leave(&(dir, name.to_owned()));
        self.commit(state);
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
        self.commit(state);
    }

    /// Inodes remembered.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.lock().by_id.len()
    }

    #[cfg(test)]
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// What is known, in an order of its own.
    #[cfg(test)]
    pub(super) fn content(&self) -> Vec<(Place, FileId, u64, Timestamp)> {
        let state = self.lock();
        let about = |(place, id): (&Place, &FileId)| {
            let known = &state.by_id[id];
            assert!(known.places.contains(place) && state.slots[known.slot] == Some(*id));
            (place.clone(), *id, known.ino, known.btime)
        };
        let mut content: Vec<_> = state.by_place.iter().map(about).collect();
        content.sort_by_key(|(place, id, ..)| (place.0, place.1.as_bytes().to_vec(), *id));
        content
    }
}

/// What it means that the log cannot be written.
pub(super) const STALE_LATER: &str =
    "files that are open will be stale after a restart of the server";

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

    /// Begins the log with what is known. Nobody waits for it yet.
    fn begin(&self, whose: &Whose) -> dray_core::Result<PathLog> {
        let places = self.by_place.iter().filter_map(|(place, id)| {
            let known = self.by_id.get(id)?;
            Some((known.entered(*id), place))
        });
        Ok(cred::as_server(|| whose.begin(places))??)
    }

    /// What is known of the next `max` entries from `from` on, and where they end; none at the end
    /// of all. What comes to an entry that was passed is noted, as every change is.
    pub(super) fn noted_from(
        &mut self,
        from: usize,
        max: usize,
    ) -> Option<(Vec<(Event, Place)>, usize)> {
        let to = self.slots.len().min(from + max);
        let ids = self.slots.get(from..to).filter(|ids| !ids.is_empty())?;
        #[cfg(test)]
        {
            self.handled_max = self.handled_max.max(ids.len());
        }
        let known = ids.iter().flatten().filter_map(|id| Some((id, self.by_id.get(id)?)));
        let noted = known.flat_map(|(id, known)| {
            known.places.iter().map(|place| (known.entered(*id), place.clone()))
        });
        Some((noted.collect(), to))
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

    /// Writes what was noted; whether the log has become long.
    fn commit(&mut self) -> bool {
        let Some((whose, log)) = &mut self.log else { return false };
        if let Err(error) = log.commit() {
            log::error!("{}: {error}; {STALE_LATER}", whose.path.display());
            // One that is behind would say of names what is long over.
            let _ = cred::as_root(|| std::fs::remove_file(&whose.path));
            self.log = None;
            return false;
        }
        let begins = !self.rewriting && log.is_long(self.by_place.len());
        self.rewriting |= begins;
        begins
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

    fn insert(&mut self, id: FileId, mut known: Known) {
        known.slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot] = Some(id);
                slot
            }
            None => {
                self.slots.push(Some(id));
                self.slots.len() - 1
            }
        };
        self.by_ino.insert(known.ino, id);
        self.by_id.insert(id, known);
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
        self.slots[known.slot] = None;
        self.free.push(known.slot);
        for place in known.places {
            self.by_place.remove(&place);
            self.note(Event::Left, &place);
        }
        if self.by_ino.get(&known.ino) == Some(&id) {
            self.by_ino.remove(&known.ino);
        }
    }

    fn make_room(&mut self, entries_max: usize) {
        let mut looks = 0;
        while self.by_id.len() >= entries_max {
            self.hand = (self.hand + 1) % self.slots.len().max(1);
            let Some(id) = self.slots.get(self.hand).copied().flatten() else { continue };
            looks += 1;
            match self.by_id.get_mut(&id) {
                Some(known) if known.used && looks < LOOKS_MAX => known.used = false,
                _ => self.drop_entry(id),
            }
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
        let before = table.content();
        let next = PathTable::noted(100, 8, whose.clone());
        assert_eq!(next.content(), before);
        assert_eq!(seen(&next, "copied", &Attr { btime, ..file(600, 2) }), copied);
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
        assert!(table.lock().slots.len() <= 51);
    }
}
