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

mod state;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{Attr, FileId, FileType, Name, NameBuf};
use dray_rt::CpuSet;

use super::learned::signature;
use super::path_log::{LogIdentity, NameEvent};
use super::path_rewrite;
use state::PathTableState;

pub(crate) use state::PathEntry;
pub(super) use state::STALE_LATER;

/// Whether an inode with these attributes can have no second name.
fn has_one_name(attr: &Attr) -> bool {
    attr.nlink < 2 || attr.file_type() == FileType::Directory
}

/// A name in a directory.
pub(crate) type PathEntryAt = (FileId, NameBuf);

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
    pub(super) fn content(&self) -> Vec<(PathEntryAt, FileId, u64, dray_core::Timestamp)> {
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
