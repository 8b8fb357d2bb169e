//! The path table: file ids on file systems without lasting handles (FUSE, plain overlay, NFS and
//! unknown ones). The table records where each inode was last seen.
//!
//! An id is an inode number and a number of our own, made when the inode is first seen. The id is
//! resolved by a walk to the recorded place. The inode there must have the same number, type and time
//! of birth. Renames through the server move the entry.
//!
//! Where several servers share the file system, the second number is a signature instead, and ids are learned
//! from names (learned.rs).
//!
//! A log of the table outlives the server's process, and so do the ids. An id answers `ESTALE` when
//! its file was moved without the server, or when the bounded table has dropped it. The client then
//! looks the name up again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{Attr, FileId, FileType, IdMap, Name, NameBuf, Timestamp};

use dray_rt::CpuSet;

use super::cred;
use super::learned::signature;
use super::path_log::{LogIdentity, NameEvent, PathLog};
use super::path_rewrite;

/// Names of one inode that are remembered. An inode may have more hard links. Each of them is
/// resolved by the remembered ones.
const PLACES_MAX: usize = 8;

/// Whether an inode with these attributes can have no second name.
fn has_one_name(attr: &Attr) -> bool {
    attr.nlink < 2 || attr.file_type() == FileType::Directory
}

/// A name in a directory.
pub(crate) type PathEntryAt = (FileId, NameBuf);

/// Entries that are examined at most for one that was not used. If all of them were used, the last
/// of them is dropped.
const LOOKS_MAX: usize = 64;

/// What ids have beside the inode number.
#[derive(Clone, Copy)]
pub(crate) enum Numbering {
    /// A number of this table's, which `boot` makes differ from those of an earlier table.
    Counted {
        /// By chance.
        boot: u32,
    },
    /// A signature by this key, so that servers with the same key give the same ids.
    Signed(u128),
}

/// The table.
pub(crate) struct PathTable {
    shared: Arc<SharedPathTable>,
    numbering: Numbering,
    entries_max: usize,
}

/// What a rewrite of the log shares with the table.
pub(super) struct SharedPathTable {
    state: Mutex<PathTableState>,
    /// The CPUs of the thread that opened the export. A serving thread may be pinned to one of
    /// them.
    pub(super) cpus: Option<CpuSet>,
}

impl SharedPathTable {
    pub(super) fn lock(&self) -> MutexGuard<'_, PathTableState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Default)]
pub(super) struct PathTableState {
    by_id: IdMap<FileId, PathEntry>,
    by_place: IdMap<PathEntryAt, FileId>,
    by_ino: IdMap<u64, FileId>,
    /// All ids, each at its own index, and the free indices.
    slots: Vec<Option<FileId>>,
    free: Vec<usize>,
    /// The index that is examined next when room is needed.
    hand: usize,
    next_generation: u64,
    /// The log of the table; none where there is none, or no longer.
    pub(super) log: Option<(LogIdentity, PathLog)>,
    /// The log is being rewritten.
    pub(super) rewriting: bool,
    /// Most entries that a rewrite has handled at once.
    #[cfg(test)]
    pub(super) handled_max: usize,
}

/// An inode as it was last seen.
#[derive(Clone)]
pub(crate) struct PathEntry {
    pub(crate) places: Vec<PathEntryAt>,
    /// The inode number, which can become another than that in the id.
    ino: u64,
    kind: FileType,
    btime: Timestamp,
    used: bool,
    slot: usize,
}

impl PathEntry {
    /// An entry without a place. It counts as not used until it is seen again.
    fn new(ino: u64, kind: FileType, btime: Timestamp) -> PathEntry {
        PathEntry { places: Vec::with_capacity(1), ino, kind, btime, used: false, slot: 0 }
    }

    fn entered(&self, id: FileId) -> NameEvent {
        NameEvent::Entered { id, ino: self.ino, kind: self.kind, btime: self.btime }
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
    /// An empty table.
    pub(crate) fn new(entries_max: usize, numbering: Numbering) -> PathTable {
        let shared = SharedPathTable { state: Mutex::default(), cpus: CpuSet::allowed().ok() };
        let shared = Arc::new(shared);
        if let Numbering::Counted { boot } = numbering {
            shared.lock().next_generation = u64::from(boot.max(1)) << 32;
        }
        PathTable { shared, numbering, entries_max }
    }

    /// The table as an earlier process recorded it; from now on changes are recorded. If the log
    /// cannot be read, the table begins anew. If it cannot be written, the table ends with this
    /// process. Both are logged.
    pub(crate) fn noted(
        entries_max: usize,
        numbering: Numbering,
        identity: LogIdentity,
    ) -> PathTable {
        let table = PathTable::new(entries_max, numbering);
        let mut state = table.lock();
        let shown = identity.path.display();
        let read = identity.read(|event, place| state.replay(event, place, entries_max));
        if let Err(error) = read {
            log::error!(
                "{shown}: cannot be read: {error}; files that are open at clients are stale"
            );
        }
        match state.begin(&identity) {
            Ok(log) => state.log = Some((identity, log)),
            Err(error) => log::error!("{shown}: cannot be written: {error}; {STALE_LATER}"),
        }
        drop(state);
        table
    }

    /// Whether ids can be learned from names.
    pub(crate) fn learns(&self) -> bool {
        matches!(self.numbering, Numbering::Signed(_))
    }

    /// The id of what has these attributes, where attributes alone decide on it.
    pub(crate) fn signed(&self, attr: &Attr) -> Option<FileId> {
        let Numbering::Signed(key) = self.numbering else { return None };
        Some(FileId { ino: attr.ino, generation: signature(key, attr) })
    }

    /// `id`, which has the attributes `attr`, is at a place, and not where it was unless it has more names.
    pub(crate) fn learned(&self, id: FileId, (dir, name): (FileId, &Name), attr: &Attr) {
        let place = (dir, name.to_owned());
        let mut state = self.lock();
        if state.by_place.get(&place) != Some(&id) {
            state.leave(&place);
        }
        state.make_room(self.entries_max);
        state.meet(id, attr, Some(place));
        self.commit(state);
    }

    fn lock(&self) -> MutexGuard<'_, PathTableState> {
        self.shared.lock()
    }

    /// To be called once a change is complete.
    fn commit(&self, mut state: MutexGuard<'_, PathTableState>) {
        let is_long = state.commit();
        drop(state);
        if is_long {
            path_rewrite::start(&self.shared);
        }
    }

    /// The id of an inode that is known by other names, if the file at an unknown place can be the
    /// same. The caller has to compare both to be sure.
    pub(crate) fn other_link(&self, (dir, name): (FileId, &Name), attr: &Attr) -> Option<FileId> {
        if has_one_name(attr) {
            return None;
        }
        let state = self.lock();
        let id = *state.by_ino.get(&attr.ino)?;
        let there = state.by_place.get(&(dir, name.to_owned()));
        (there != Some(&id) && state.by_id.get(&id)?.is(attr)).then_some(id)
    }

    /// The id of the file at `name` in `dir`. `other_link` is the id that the caller has verified.
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
                state.add(attr, self.signed(attr), Some(place))
            }
        };
        self.commit(state);
        id
    }

    /// The id that is known at a place, and whether `attr` can be of that inode.
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
        let id = state.add(attr, self.signed(attr), None);
        self.commit(state);
        id
    }

    /// The id last seen at a place.
    pub(crate) fn at(&self, dir: FileId, name: &Name) -> Option<FileId> {
        self.lock().by_place.get(&(dir, name.to_owned())).copied()
    }

    /// The inode with this id has just been changed, and has the attributes `attr` now.
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
    pub(crate) fn find(&self, id: FileId) -> Option<PathEntry> {
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

    /// A name was moved. The file that had the new name is gone, or has the old name if the two
    /// were exchanged.
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
                state.note(NameEvent::Left, old);
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
    pub(super) fn shared(&self) -> &Arc<SharedPathTable> {
        &self.shared
    }

    /// The entries, in an order that is always the same.
    #[cfg(test)]
    pub(super) fn content(&self) -> Vec<(PathEntryAt, FileId, u64, Timestamp)> {
        let state = self.lock();
        let about = |(place, id): (&PathEntryAt, &FileId)| {
            let known = &state.by_id[id];
            assert!(known.places.contains(place) && state.slots[known.slot] == Some(*id));
            (place.clone(), *id, known.ino, known.btime)
        };
        let mut content: Vec<_> = state.by_place.iter().map(about).collect();
        content.sort_by_key(|(place, id, ..)| (place.0, place.1.as_bytes().to_vec(), *id));
        content
    }
}

/// The consequence of a log that cannot be written.
pub(super) const STALE_LATER: &str =
    "files that are open will be stale after a restart of the server";

impl PathTableState {
    /// Repeats a recorded change. A file that had the name before loses it.
    fn replay(&mut self, event: NameEvent, place: PathEntryAt, entries_max: usize) {
        let NameEvent::Entered { id, ino, kind, btime } = event else { return self.leave(&place) };
        if self.by_place.get(&place) != Some(&id) {
            self.leave(&place);
        }
        match self.by_id.get_mut(&id) {
            Some(known) => (known.ino, known.btime) = (ino, btime),
            None => {
                self.make_room(entries_max);
                self.insert(id, PathEntry::new(ino, kind, btime));
            }
        }
        self.by_ino.insert(ino, id);
        self.enter(id, place);
    }

    /// Begins the log with the known entries. No call waits for it yet.
    fn begin(&self, identity: &LogIdentity) -> dray_core::Result<PathLog> {
        let places = self.by_place.iter().filter_map(|(place, id)| {
            let known = self.by_id.get(id)?;
            Some((known.entered(*id), place))
        });
        Ok(cred::as_server(|| identity.begin(places))??)
    }

    /// The records of the next `max` entries from `from` on, and where these end; none at the end
    /// of the table. Later changes of passed entries are recorded as usual.
    pub(super) fn noted_from(
        &mut self,
        from: usize,
        max: usize,
    ) -> Option<(Vec<(NameEvent, PathEntryAt)>, usize)> {
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

    fn note(&mut self, event: NameEvent, place: &PathEntryAt) {
        if let Some((_, log)) = &mut self.log {
            log.note(event, place);
        }
    }

    fn note_entered(&mut self, id: FileId, place: &PathEntryAt) {
        if let Some(event) = self.by_id.get(&id).map(|known| known.entered(id)) {
            self.note(event, place);
        }
    }

    /// Writes the pending records. Answers whether the log has become long.
    fn commit(&mut self) -> bool {
        let Some((identity, log)) = &mut self.log else { return false };
        if let Err(error) = log.commit() {
            log::error!("{}: {error}; {STALE_LATER}", identity.path.display());
            // An old log would be wrong about names.
            let _ = cred::as_root(|| std::fs::remove_file(&identity.path));
            self.log = None;
            return false;
        }
        let begins = !self.rewriting && log.is_long(self.by_place.len());
        self.rewriting |= begins;
        begins
    }

    fn add(&mut self, attr: &Attr, signed: Option<FileId>, place: Option<PathEntryAt>) -> FileId {
        if let Some(id) = signed {
            self.meet(id, attr, place);
            return id;
        }
        self.next_generation += 1;
        let id = FileId { ino: attr.ino, generation: self.next_generation };
        self.insert(id, PathEntry::new(attr.ino, attr.file_type(), attr.btime));
        if let Some(place) = place {
            self.enter(id, place);
        }
        id
    }

    /// Notes what a signed id is and where. The number of a file that is gone may be another file's by now.
    fn meet(&mut self, id: FileId, attr: &Attr, place: Option<PathEntryAt>) {
        if self.by_id.get(&id).is_some_and(|known| !known.is(attr)) {
            self.drop_entry(id);
        }
        if !self.by_id.contains_key(&id) {
            self.insert(id, PathEntry::new(attr.ino, attr.file_type(), attr.btime));
        }
        let Some(place) = place else { return };
        // Other servers move names, so that old places must not stand in the way of new ones.
        let Some(known) = self.by_id.get_mut(&id) else { return };
        let keeps = if has_one_name(attr) { 0 } else { PLACES_MAX - 1 };
        let others = known.places.iter().filter(|other| **other != place);
        let left: Vec<PathEntryAt> = others.skip(keeps).cloned().collect();
        known.places.retain(|other| *other != place && !left.contains(other));
        known.places.insert(0, place.clone());
        for old in left {
            self.by_place.remove(&old);
            self.note(NameEvent::Left, &old);
        }
        self.note_entered(id, &place);
        self.by_place.insert(place, id);
    }

    fn insert(&mut self, id: FileId, mut known: PathEntry) {
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

    fn enter(&mut self, id: FileId, place: PathEntryAt) {
        let Some(known) = self.by_id.get_mut(&id) else { return };
        if known.places.len() < PLACES_MAX && !known.places.contains(&place) {
            known.places.push(place.clone());
            self.note_entered(id, &place);
            self.by_place.insert(place, id);
        }
    }

    /// Forgets a place, and the inode if that was its last place.
    fn leave(&mut self, place: &PathEntryAt) {
        let Some(id) = self.by_place.remove(place) else { return };
        self.note(NameEvent::Left, place);
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
            self.note(NameEvent::Left, &place);
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

    const NUMBERING: Numbering = Numbering::Counted { boot: 7 };
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

    // proves: P40
    #[test]
    fn an_id_follows_renames() {
        let table = PathTable::new(100, NUMBERING);
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
        let table = PathTable::new(100, NUMBERING);
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
        let table = PathTable::new(100, NUMBERING);
        let id = seen(&table, "a", &file(10, 1));
        assert_ne!(seen(&table, "a", &file(11, 1)), id);
        assert!(table.find(id).is_none());
    }

    fn identity() -> LogIdentity {
        let name = format!("dray-paths-{:x}", dray_rt::random_u64());
        let path = std::env::temp_dir().join(name);
        LogIdentity { path, uuid: dray_core::FsUuid(1), root_ino: 1, magic: 2 }
    }

    // proves: P40
    #[test]
    fn a_noted_table_is_there_after_a_restart() {
        let identity = identity();
        let table = PathTable::noted(100, NUMBERING, identity.clone());
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
        let next = PathTable::noted(100, NUMBERING, identity.clone());
        assert_eq!(next.content(), before);
        assert_eq!(seen(&next, "copied", &Attr { btime, ..file(600, 2) }), copied);
        std::fs::remove_file(&identity.path).unwrap();
    }

    #[test]
    fn the_table_is_bounded_and_keeps_what_is_used() {
        let table = PathTable::new(50, NUMBERING);
        let kept = seen(&table, "kept", &file(5, 1));
        for ino in 10..1000 {
            seen(&table, &ino.to_string(), &file(ino, 1));
            assert!(table.find(kept).is_some());
        }
        assert!(table.len() <= 50);
        assert!(table.lock().slots.len() <= 51);
    }
}
