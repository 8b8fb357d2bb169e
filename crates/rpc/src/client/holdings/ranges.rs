//! The locks of a mount by owner and range, and which of them are noted for a later process.
//!
//! A program may take any number of locks. The work for one lock does not grow with their number.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dray_core::{FileId, Lock, LockFamily, LockKind, LockOwner, LockRange};

use crate::client::holdings::locks::HeldLock;
use crate::client::memory::{LOCKS_MAX, SessionMemory};

/// The ranges of all owners and files. The ranges of one owner do not overlap, and neighbours that
/// are alike are one.
pub(crate) struct LockRanges {
    memory: Arc<SessionMemory>,
    all: BTreeMap<Key, NotedLock>,
    by_handle: BTreeSet<(u64, Key)>,
    /// Places where none is noted.
    free: Vec<usize>,
    /// The locks for which there was no place.
    unnoted: BTreeSet<Key>,
    complained: bool,
}

/// The owner of a lock, and where the lock begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    id: FileId,
    flock: bool,
    owner: LockOwner,
    start: u64,
}

/// A lock, and where it is noted.
#[derive(Clone, Copy)]
struct NotedLock {
    held: HeldLock,
    place: Option<usize>,
}

impl Key {
    fn of(id: FileId, lock: &Lock) -> Key {
        let (flock, owner) = (lock.family == LockFamily::Flock, lock.owner);
        Key { id, flock, owner, start: lock.range.start }
    }

    /// Locks of the same owner that begin in this range.
    fn within(self, start: u64, end: u64) -> std::ops::RangeInclusive<Key> {
        Key { start, ..self }..=Key { start: end, ..self }
    }
}

impl LockRanges {
    /// With the locks noted in `memory`, if a process before us did. A lock that the process died
    /// at changing is there in both forms: the bytes of either form are held.
    pub(crate) fn new(memory: Arc<SessionMemory>) -> LockRanges {
        let left = memory.locks();
        let leases = memory.lock_leases();
        let mut free: Vec<usize> = (0..LOCKS_MAX).rev().collect();
        free.retain(|place| !left.iter().any(|(taken, _)| taken == place));
        free.retain(|place| !leases.iter().any(|(taken, ..)| taken == place));
        let (all, by_handle, unnoted) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        let mut ranges = LockRanges { memory, all, by_handle, free, unnoted, complained: false };
        for (place, held) in left {
            match ranges.changed_by(&held).is_empty() {
                true => ranges.insert(NotedLock { held, place: Some(place) }),
                false => {
                    ranges.take(held);
                    ranges.give_back(place);
                }
            }
        }
        ranges
    }

    /// An owner has this now, in place of what it had in that range.
    pub(crate) fn take(&mut self, new: HeldLock) {
        let (mut new, range) = (new, new.lock.range);
        let gone = self.changed_by(&new);
        let mut pieces = Vec::new();
        for NotedLock { held, .. } in &gone {
            let old = held.lock.range;
            if is_like(held, &new) {
                new.lock.range.start = new.lock.range.start.min(old.start);
                new.lock.range.end = new.lock.range.end.max(old.end);
            } else {
                let rest = without(old, range).into_iter().flatten();
                pieces.extend(
                    rest.map(|range| HeldLock { lock: Lock { range, ..held.lock }, ..*held }),
                );
            }
        }
        pieces.extend((new.lock.kind != LockKind::Unlock).then_some(new));
        self.replace(gone, pieces);
    }

    /// The locks of the owner of `lock` that have bytes of its range.
    pub(crate) fn overlapping(&self, id: FileId, lock: &Lock) -> Vec<HeldLock> {
        let touching = self.touching(id, lock).into_iter().map(|noted| noted.held);
        touching.filter(|held| held.lock.range.overlaps(lock.range)).collect()
    }

    /// The fcntl locks of a file.
    pub(crate) fn fcntl_of(&self, id: FileId) -> Vec<HeldLock> {
        let first = Key { id, flock: false, owner: LockOwner::MIN, start: 0 };
        let last = Key { id, flock: false, owner: LockOwner::MAX, start: u64::MAX };
        self.all.range(first..=last).map(|(_, noted)| noted.held).collect()
    }

    /// Takes a place for something else than a lock.
    pub(crate) fn take_place(&mut self) -> Option<usize> {
        self.free.pop()
    }

    /// A place that was taken so is free again.
    pub(crate) fn free_place(&mut self, place: usize) {
        self.give_back(place);
    }

    /// The locks that change when `new` is taken.
    fn changed_by(&self, new: &HeldLock) -> Vec<NotedLock> {
        let mut changed = self.touching(new.id, &new.lock);
        changed.retain(|NotedLock { held, .. }| {
            is_like(held, new) || held.lock.range.overlaps(new.lock.range)
        });
        changed
    }

    /// The locks of the owner of `lock` within its range and beside it.
    fn touching(&self, id: FileId, lock: &Lock) -> Vec<NotedLock> {
        let (key, LockRange { start, end }) = (Key::of(id, lock), lock.range);
        let before = start.checked_sub(1).and_then(|before| {
            let (_, last) = self.all.range(key.within(0, before)).next_back()?;
            (last.held.lock.range.end >= before).then_some(*last)
        });
        let rest = self.all.range(key.within(start, end.saturating_add(1)));
        before.into_iter().chain(rest.map(|(_, noted)| *noted)).collect()
    }

    /// The owner has no lock of this family on the file any more.
    pub(crate) fn remove_of(&mut self, id: FileId, family: LockFamily, owner: LockOwner) {
        let any = Key { id, flock: family == LockFamily::Flock, owner, start: 0 };
        let gone = self.all.range(any.within(0, u64::MAX)).map(|(_, noted)| *noted).collect();
        self.replace(gone, Vec::new());
    }

    /// The locks that were taken through an open file are gone.
    pub(crate) fn remove_through(&mut self, handle: u64) {
        let keys = self.through(handle).filter_map(|key| self.all.get(key));
        let gone = keys.copied().collect();
        self.replace(gone, Vec::new());
    }

    /// This lock is gone.
    pub(crate) fn remove(&mut self, held: &HeldLock) {
        let gone = self.all.get(&Key::of(held.id, &held.lock)).filter(|one| one.held == *held);
        let gone = gone.copied().into_iter().collect();
        self.replace(gone, Vec::new());
    }

    pub(crate) fn contains(&self, held: &HeldLock) -> bool {
        self.all.get(&Key::of(held.id, &held.lock)).is_some_and(|one| one.held == *held)
    }

    /// Whether any was taken through an open file.
    pub(crate) fn any_through(&self, handle: u64) -> bool {
        self.through(handle).next().is_some()
    }

    fn through(&self, handle: u64) -> impl Iterator<Item = &Key> {
        let from = self.by_handle.range((handle, Key::FIRST)..);
        from.take_while(move |(of, _)| *of == handle).map(|(_, key)| key)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = HeldLock> {
        self.all.values().map(|noted| noted.held)
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether there is a place for another one.
    pub(crate) fn has_place(&self) -> bool {
        !self.free.is_empty()
    }

    /// Notes new locks before it forgets released ones: a successor reclaims too much rather than
    /// too little.
    fn replace(&mut self, gone: Vec<NotedLock>, new: Vec<HeldLock>) {
        for NotedLock { held, .. } in &gone {
            let key = Key::of(held.id, &held.lock);
            self.all.remove(&key);
            self.by_handle.remove(&(held.handle, key));
            self.unnoted.remove(&key);
        }
        for held in new {
            let place = self.free.pop();
            place.into_iter().for_each(|place| self.memory.put_lock(place, &held));
            self.insert(NotedLock { held, place });
        }
        gone.iter().filter_map(|noted| noted.place).for_each(|place| self.give_back(place));
    }

    fn insert(&mut self, noted: NotedLock) {
        let key = Key::of(noted.held.id, &noted.held.lock);
        if noted.place.is_none() {
            self.unnoted.insert(key);
        }
        self.by_handle.insert((noted.held.handle, key));
        self.all.insert(key, noted);
    }

    /// A place is free again: for one that had none, if there is such a one.
    fn give_back(&mut self, place: usize) {
        let next = self.unnoted.pop_first();
        match next.and_then(|key| self.all.get_mut(&key)) {
            Some(noted) => {
                self.memory.put_lock(place, &noted.held);
                noted.place = Some(place);
            }
            None => {
                self.memory.remove_lock(place);
                self.free.push(place);
            }
        }
    }

    /// Says, once, if a successor will not know of all.
    pub(crate) fn complain(&mut self) {
        if !self.unnoted.is_empty() && !std::mem::replace(&mut self.complained, true) {
            log::warn!(
                "more than {LOCKS_MAX} locks are held: further ones cannot be reclaimed if this \
                 process and then the server's machine fail"
            );
        }
    }
}

impl Key {
    const FIRST: Key = Key {
        id: FileId { ino: 0, generation: 0 },
        flock: false,
        owner: LockOwner::own(0),
        start: 0,
    };
}

/// Whether both differ in their ranges only.
fn is_like(one: &HeldLock, other: &HeldLock) -> bool {
    let lock = Lock { range: other.lock.range, ..one.lock };
    HeldLock { lock, ..*one } == *other
}

/// The rest of `range` when `cut` is taken out: nothing, one piece or two.
pub(crate) fn without(range: LockRange, cut: LockRange) -> [Option<LockRange>; 2] {
    if !range.overlaps(cut) {
        return [Some(range), None];
    }
    let before =
        (range.start < cut.start).then(|| LockRange { start: range.start, end: cut.start - 1 });
    let behind = (range.end > cut.end).then(|| LockRange { start: cut.end + 1, end: range.end });
    [before, behind]
}

#[cfg(test)]
mod tests {
    use dray_core::{OpenHow, Pid};

    use super::*;

    const FILE: FileId = FileId { ino: 1, generation: 1 };

    fn held(handle: u64, kind: LockKind, start: u64, end: u64) -> HeldLock {
        let (family, range) = (LockFamily::Posix, LockRange { start, end });
        let lock = Lock { family, kind, range, owner: LockOwner::own(1), pid: Pid(1) };
        HeldLock { handle, id: FILE, how: OpenHow::READ_WRITE, lock }
    }

    fn shown(ranges: &LockRanges) -> Vec<(LockKind, u64, u64)> {
        let range = |held: HeldLock| (held.lock.kind, held.lock.range.start, held.lock.range.end);
        ranges.iter().map(range).collect()
    }

    /// Against the plainest model, an array of what each byte is locked with; and a successor finds
    /// the same.
    #[test]
    fn any_sequence_leaves_what_the_model_has() {
        use LockKind::{Exclusive, Shared, Unlock};
        let memory = Arc::new(SessionMemory::heap());
        let mut ranges = LockRanges::new(memory.clone());
        let mut model = [Unlock; 24];
        let mut random = 12345u64;
        for _ in 0..3000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let pick = |shift: u32, below: u64| (random >> shift) % below;
            let (one, two) = (pick(20, 24), pick(30, 24));
            let kind = [Shared, Exclusive, Unlock][pick(40, 3) as usize];
            let (start, end) = (one.min(two), one.max(two));
            ranges.take(held(1, kind, start, end));
            model[start as usize..=end as usize].fill(kind);
            let mut bytes = [Unlock; 24];
            for (kind, start, end) in shown(&ranges) {
                bytes[start as usize..=end as usize].fill(kind);
            }
            assert_eq!(bytes, model);
            let runs = model.chunk_by(|one, two| one == two).filter(|run| run[0] != Unlock);
            assert_eq!(ranges.len(), runs.count(), "neighbours that are alike are one lock");
            assert_eq!(shown(&LockRanges::new(memory.clone())), shown(&ranges));
        }
    }

    /// With more locks than can be noted for a successor, each further one took a million steps,
    /// and the whole mount waited.
    #[test]
    fn a_hundred_thousand_locks_are_had_and_given_back() {
        let memory = Arc::new(SessionMemory::heap());
        let mut ranges = LockRanges::new(memory.clone());
        for start in 0..100_000 {
            ranges.take(held(start % 7, LockKind::Shared, 2 * start, 2 * start));
        }
        assert!(ranges.len() == 100_000 && !ranges.has_place());
        assert_eq!(LockRanges::new(memory.clone()).len(), LOCKS_MAX);
        (0..6).for_each(|handle| ranges.remove_through(handle));
        assert!(!ranges.any_through(5) && ranges.any_through(6) && !ranges.has_place());
        (0..100_000).for_each(|start| ranges.take(held(6, LockKind::Unlock, 3 * start, 3 * start)));
        ranges.take(held(6, LockKind::Unlock, 1000, u64::MAX));
        assert_eq!(
            shown(&LockRanges::new(memory.clone())),
            shown(&ranges),
            "places are used again"
        );
        ranges.remove_of(FILE, LockFamily::Posix, LockOwner::own(1));
        assert_eq!((ranges.len(), ranges.free.len()), (0, LOCKS_MAX));
        assert_eq!(LockRanges::new(memory).len(), 0);
    }

    /// A process died between noting the new and forgetting the old.
    #[test]
    fn what_was_being_changed_is_held_in_either_form() {
        let memory = Arc::new(SessionMemory::heap());
        memory.put_lock(3, &held(1, LockKind::Exclusive, 0, 99));
        memory.put_lock(0, &held(1, LockKind::Exclusive, 0, 39));
        memory.put_lock(9, &held(1, LockKind::Exclusive, 60, 99));
        let ranges = LockRanges::new(memory.clone());
        assert_eq!(shown(&ranges), [(LockKind::Exclusive, 0, 99)]);
        assert_eq!((memory.locks().len(), ranges.free.len()), (1, LOCKS_MAX - 1));
    }
}
