//! The content of the path table, and what each change does to it and to its log.

use dray_core::{Attr, FileId, FileType, IdMap, Timestamp};

use super::{PathEntryAt, has_one_name};
use crate::posix::cred;
use crate::posix::path_log::{LogIdentity, NameEvent, PathLog};

/// Names of one inode that are remembered. An inode may have more hard links. Each of them is
/// resolved by the remembered ones.
const PLACES_MAX: usize = 8;

/// Entries that are examined at most for one that was not used. If all of them were used, the last
/// of them is dropped.
const LOOKS_MAX: usize = 64;

#[derive(Default)]
pub(in crate::posix) struct PathTableState {
    pub(super) by_id: IdMap<FileId, PathEntry>,
    pub(super) by_place: IdMap<PathEntryAt, FileId>,
    pub(super) by_ino: IdMap<u64, FileId>,
    /// All ids, each at its own index, and the free indices.
    pub(super) slots: Vec<Option<FileId>>,
    free: Vec<usize>,
    /// The index that is examined next when room is needed.
    hand: usize,
    pub(super) next_generation: u64,
    /// The log of the table; none where there is none, or no longer.
    pub(in crate::posix) log: Option<(LogIdentity, PathLog)>,
    /// The log is being rewritten.
    pub(in crate::posix) rewriting: bool,
    /// Most entries that a rewrite has handled at once.
    #[cfg(test)]
    pub(in crate::posix) handled_max: usize,
}

/// An inode as it was last seen.
#[derive(Clone)]
pub(crate) struct PathEntry {
    pub(crate) places: Vec<PathEntryAt>,
    /// The inode number, which can become another than that in the id.
    pub(super) ino: u64,
    pub(super) kind: FileType,
    pub(super) btime: Timestamp,
    pub(super) used: bool,
    pub(super) slot: usize,
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

/// The consequence of a log that cannot be written.
pub(in crate::posix) const STALE_LATER: &str =
    "files that are open will be stale after a restart of the server";

impl PathTableState {
    /// Repeats a recorded change. A file that had the name before loses it.
    pub(super) fn replay(&mut self, event: NameEvent, place: PathEntryAt, entries_max: usize) {
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
    pub(super) fn begin(&self, identity: &LogIdentity) -> dray_core::Result<PathLog> {
        let places = self.by_place.iter().filter_map(|(place, id)| {
            let known = self.by_id.get(id)?;
            Some((known.entered(*id), place))
        });
        Ok(cred::as_server(|| identity.begin(places))??)
    }

    /// The records of the next `max` entries from `from` on, and where these end; none at the end
    /// of the table. Later changes of passed entries are recorded as usual.
    pub(in crate::posix) fn noted_from(
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

    pub(super) fn note(&mut self, event: NameEvent, place: &PathEntryAt) {
        if let Some((_, log)) = &mut self.log {
            log.note(event, place);
        }
    }

    pub(super) fn note_entered(&mut self, id: FileId, place: &PathEntryAt) {
        if let Some(event) = self.by_id.get(&id).map(|known| known.entered(id)) {
            self.note(event, place);
        }
    }

    /// Writes the pending records. Answers whether the log has become long.
    pub(super) fn commit(&mut self) -> bool {
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

    pub(super) fn add(
        &mut self,
        attr: &Attr,
        signed: Option<FileId>,
        place: Option<PathEntryAt>,
    ) -> FileId {
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
    pub(super) fn meet(&mut self, id: FileId, attr: &Attr, place: Option<PathEntryAt>) {
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

    pub(super) fn enter(&mut self, id: FileId, place: PathEntryAt) {
        let Some(known) = self.by_id.get_mut(&id) else { return };
        if known.places.len() < PLACES_MAX && !known.places.contains(&place) {
            known.places.push(place.clone());
            self.note_entered(id, &place);
            self.by_place.insert(place, id);
        }
    }

    /// Forgets a place, and the inode if that was its last place.
    pub(super) fn leave(&mut self, place: &PathEntryAt) {
        let Some(id) = self.by_place.remove(place) else { return };
        self.note(NameEvent::Left, place);
        let Some(known) = self.by_id.get_mut(&id) else { return };
        known.places.retain(|other| other != place);
        if known.places.is_empty() {
            self.drop_entry(id);
        }
    }

    pub(super) fn drop_entry(&mut self, id: FileId) {
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

    pub(super) fn make_room(&mut self, entries_max: usize) {
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
