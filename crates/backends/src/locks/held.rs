//! The locks that are held in an export, so that those that concern a range of a file are found
//! among any number of others.

use std::collections::BTreeMap;
use std::iter::successors;
use std::ops::RangeBounds;

use dray_core::{FileId, Lock, LockFamily, LockKind, LockOwner, LockRange, NodeId};

use super::Owner;

/// A lock by whose it is: owner, file, family, first byte. Those of one owner, file and family
/// lie apart, since they are joined or cut where they would not.
type Own = (Owner, FileId, LockFamily, u64);

/// A lock by where it is. Of those of one class none is longer than the class says, so that
/// what reaches into a range begins not far in front of it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    file: FileId,
    family: LockFamily,
    kind: LockKind,
    class: u32,
    start: u64,
    owner: Owner,
}

/// All locks held.
#[derive(Default)]
pub(super) struct HeldLocks {
    own: BTreeMap<Own, Lock>,
    /// The last byte of each.
    places: BTreeMap<Place, u64>,
}

/// The class of a range: how many bits its length takes, less one byte.
fn class_of(range: LockRange) -> u32 {
    u64::BITS - (range.end - range.start).leading_zeros()
}

/// How far the last byte of a lock of a class is from its first one, at most.
fn reach(class: u32) -> u64 {
    u64::MAX.checked_shr(u64::BITS - class).unwrap_or(0)
}

impl HeldLocks {
    pub(super) fn len(&self) -> usize {
        self.own.len()
    }

    /// Each lock with its file and owner, in no order that means anything.
    pub(super) fn iter(&self) -> impl Iterator<Item = (FileId, Owner, Lock)> + '_ {
        self.own.iter().map(|((owner, file, ..), lock)| (*file, *owner, *lock))
    }

    /// Whether `owner` has any lock on any file.
    pub(super) fn has_any(&self, owner: Owner) -> bool {
        let first = (owner, FileId { ino: 0, generation: 0 }, LockFamily::Posix, 0);
        self.own.range(first..).next().is_some_and(|(key, _)| key.0 == owner)
    }

    /// The kind of the flock that `owner` has on `file`.
    pub(super) fn flock_of(&self, owner: Owner, file: FileId) -> Option<LockKind> {
        let all = (owner, file, LockFamily::Flock, 0)..=(owner, file, LockFamily::Flock, u64::MAX);
        self.own.range(all).next().map(|(_, lock)| lock.kind)
    }

    /// Gives `owner` the lock, in place of what it had in this range, and joins it with
    /// what it has beside it. With `Unlock` it gives the range back.
    pub(super) fn set(&mut self, file: FileId, owner: Owner, lock: Lock) {
        let mut wanted = lock;
        for old in self.touching(file, owner, &lock) {
            if old.kind == lock.kind {
                self.remove((owner, file, old.family, old.range.start));
                wanted.range = LockRange {
                    start: old.range.start.min(wanted.range.start),
                    end: old.range.end.max(wanted.range.end),
                };
            } else if old.range.overlaps(lock.range) {
                self.remove((owner, file, old.family, old.range.start));
                self.keep_outside(file, owner, old, lock.range);
            }
        }
        if lock.kind != LockKind::Unlock {
            self.insert(file, owner, wanted);
        }
    }

    /// The locks of `owner` that overlap `lock` or lie beside it.
    fn touching(&self, file: FileId, owner: Owner, lock: &Lock) -> Vec<Lock> {
        let (first, last) = (lock.range.start.saturating_sub(1), lock.range.end.saturating_add(1));
        let at = |start: u64| (owner, file, lock.family, start);
        let before = self.own.range(at(0)..at(first)).next_back();
        let before = before.filter(|(_, before)| before.range.end >= first);
        let within = self.own.range(at(first)..=at(last));
        before.into_iter().chain(within).map(|(_, lock)| *lock).collect()
    }

    /// Gives back what of `old`, which is no longer there, lies outside of `range`.
    fn keep_outside(&mut self, file: FileId, owner: Owner, old: Lock, range: LockRange) {
        let part = |start, end| Lock { range: LockRange { start, end }, ..old };
        if old.range.start < range.start {
            self.insert(file, owner, part(old.range.start, range.start - 1));
        }
        if old.range.end > range.end {
            self.insert(file, owner, part(range.end + 1, old.range.end));
        }
    }

    fn insert(&mut self, file: FileId, owner: Owner, lock: Lock) {
        self.own.insert((owner, file, lock.family, lock.range.start), lock);
        self.places.insert(Place::of(file, owner, &lock), lock.range.end);
    }

    fn remove(&mut self, key: Own) {
        if let Some(lock) = self.own.remove(&key) {
            self.places.remove(&Place::of(key.1, key.0, &lock));
        }
    }

    /// How many locks more there are once `owner` has been given `lock`.
    pub(super) fn growth(&self, file: FileId, owner: Owner, lock: &Lock) -> isize {
        let range = lock.range;
        let of_old = |old: Lock| match old.kind == lock.kind {
            true => -1,
            false if old.range.overlaps(range) => {
                let left = old.range.start < range.start;
                let right = old.range.end > range.end;
                isize::from(left) + isize::from(right) - 1
            }
            false => 0,
        };
        let old: isize = self.touching(file, owner, lock).into_iter().map(of_old).sum();
        old + isize::from(lock.kind != LockKind::Unlock)
    }

    /// Gives back all locks of a family that `owner` has on `file`.
    pub(super) fn release(&mut self, file: FileId, family: LockFamily, owner: Owner) {
        self.remove_all((owner, file, family, 0)..=(owner, file, family, u64::MAX));
    }

    /// Gives back all locks of `node`; the files that they were on, each once for each lock.
    pub(super) fn release_node(&mut self, node: NodeId) -> Vec<FileId> {
        let [first, last] = [0, u64::MAX].map(|number| {
            let owner = Owner { node, owner: LockOwner(number) };
            let file = FileId { ino: number, generation: number };
            let family = if number == 0 { LockFamily::Posix } else { LockFamily::Flock };
            (owner, file, family, number)
        });
        self.remove_all(first..=last)
    }

    fn remove_all(&mut self, keys: impl RangeBounds<Own>) -> Vec<FileId> {
        let gone: Vec<Own> = self.own.range(keys).map(|(key, _)| *key).collect();
        gone.iter().for_each(|key| self.remove(*key));
        gone.iter().map(|key| key.1).collect()
    }

    /// Whether anybody else has a lock in the way of `lock`.
    pub(super) fn bars(&self, file: FileId, owner: Owner, lock: &Lock) -> bool {
        self.holders_against(file, owner, lock).next().is_some()
    }

    /// Who else has locks in the way of `lock`, each once for each.
    pub(super) fn holders_against(
        &self,
        file: FileId,
        owner: Owner,
        lock: &Lock,
    ) -> impl Iterator<Item = Owner> {
        let range = lock.range;
        self.classes_against(file, lock)
            .flat_map(move |class| self.overlapping(class, range))
            .map(|place| place.owner)
            .filter(move |other| *other != owner)
    }

    /// Of the locks in the way of `lock` that which begins first.
    pub(super) fn first_against(&self, file: FileId, owner: Owner, lock: &Lock) -> Option<Lock> {
        let of_class =
            |class| self.overlapping(class, lock.range).find(|place| place.owner != owner);
        let first = self.classes_against(file, lock).filter_map(of_class);
        let place = first.min_by_key(|place| place.start)?;
        self.own.get(&(place.owner, file, place.family, place.start)).copied()
    }

    /// The classes in which there are locks that `lock` does not go together with, each as its
    /// first place.
    fn classes_against(&self, file: FileId, lock: &Lock) -> impl Iterator<Item = Place> {
        let kinds: &[LockKind] = match lock.kind {
            LockKind::Shared => &[LockKind::Exclusive],
            LockKind::Exclusive => &[LockKind::Exclusive, LockKind::Shared],
            LockKind::Unlock => &[],
        };
        let family = lock.family;
        kinds.iter().flat_map(move |kind| {
            let first =
                Place { file, family, kind: *kind, class: 0, start: 0, owner: Owner::FIRST };
            let there = move |from: Place| {
                let next = self.places.range(from..).next().map(|(place, _)| *place)?;
                let same = (next.file, next.family, next.kind) == (file, family, *kind);
                same.then_some(Place { class: next.class, ..first })
            };
            successors(there(first), move |place| there(Place { class: place.class + 1, ..first }))
        })
    }

    /// The locks of the class of `place` that overlap `range`, in the order of their beginnings.
    fn overlapping(&self, place: Place, range: LockRange) -> impl Iterator<Item = &Place> {
        let there = self.candidates(place, range).filter(move |(_, end)| **end >= range.start);
        there.map(|(place, _)| place)
    }

    fn candidates(&self, place: Place, range: LockRange) -> impl Iterator<Item = (&Place, &u64)> {
        let start = range.start.saturating_sub(reach(place.class));
        let first = Place { start, ..place };
        self.places.range(first..=Place { start: range.end, owner: Owner::LAST, ..place })
    }
}

impl Place {
    fn of(file: FileId, owner: Owner, lock: &Lock) -> Place {
        let Lock { family, kind, range, .. } = *lock;
        Place { file, family, kind, class: class_of(range), start: range.start, owner }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LockKind::{Exclusive, Shared, Unlock};
    use dray_core::Pid;

    const FILE: FileId = FileId { ino: 7, generation: 1 };
    /// Also beside each other: neighbours must not be taken for the same.
    const FILES: [FileId; 2] = [FILE, FileId { ino: 7, generation: 2 }];

    fn owner(number: u64) -> Owner {
        Owner { node: NodeId(number % 2), owner: LockOwner(number) }
    }

    fn lock(kind: LockKind, start: u64, end: u64) -> Lock {
        let range = LockRange { start, end };
        Lock { family: LockFamily::Posix, kind, range, owner: LockOwner(1), pid: Pid(1) }
    }

    fn ranges(locks: &HeldLocks) -> Vec<(LockKind, u64, u64)> {
        let lock = |lock: Lock| (lock.kind, lock.range.start, lock.range.end);
        let mut ranges: Vec<_> = locks.iter().map(|(_, _, held)| lock(held)).collect();
        ranges.sort_by_key(|(_, start, _)| *start);
        ranges
    }

    #[test]
    fn ranges_are_split_joined_and_changed() {
        let mut locks = HeldLocks::default();
        let mut set = |kind, start, end| {
            locks.set(FILE, owner(1), lock(kind, start, end));
            ranges(&locks)
        };
        set(Exclusive, 0, 99);
        assert_eq!(set(Unlock, 40, 59), [(Exclusive, 0, 39), (Exclusive, 60, 99)]);
        let three = [(Exclusive, 0, 29), (Shared, 30, 69), (Exclusive, 70, 99)];
        assert_eq!(set(Shared, 30, 69), three);
        assert_eq!(set(Exclusive, 30, 69), [(Exclusive, 0, 99)]);
        assert_eq!(set(Exclusive, 100, u64::MAX), [(Exclusive, 0, u64::MAX)]);
        assert_eq!(set(Unlock, 0, u64::MAX), []);
        assert!(locks.places.is_empty());
    }

    #[test]
    fn a_class_reaches_as_far_as_the_longest_of_its_locks() {
        for (end, class) in [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (u64::MAX, 64)] {
            assert_eq!(class_of(LockRange { start: 0, end }), class);
            assert!(reach(class) >= end && (class == 0 || reach(class - 1) < end));
        }
    }

    const BYTES: usize = 24;
    const OWNERS: usize = 4;
    /// What each byte of each file is locked with, by family and owner.
    type Model = [[[[LockKind; BYTES]; OWNERS]; 2]; 2];

    /// The first byte of `lock` that another owner's lock forbids.
    fn model_bars(bytes: &[[LockKind; BYTES]; OWNERS], asks: usize, lock: &Lock) -> Option<u64> {
        let forbids = |held: LockKind| match lock.kind {
            Shared => held == Exclusive,
            Exclusive => held != Unlock,
            Unlock => false,
        };
        let others = || bytes.iter().enumerate().filter(|(owner, _)| *owner != asks);
        let barred = |byte: &u64| others().any(|(_, held)| forbids(held[*byte as usize]));
        (lock.range.start..=lock.range.end).find(barred)
    }

    /// Against the plainest model: an array of what each byte is locked with.
    #[test]
    fn any_sequence_leaves_what_the_model_has() {
        let mut locks = HeldLocks::default();
        let mut model: Model = [[[[Unlock; BYTES]; OWNERS]; 2]; 2];
        let mut random = 12345u64;
        for _ in 0..20_000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let pick = |shift: u32, below: u64| (random >> shift) % below;
            let (one, two) = (pick(20, BYTES as u64), pick(30, BYTES as u64));
            let (file, family) = (pick(44, 2) as usize, pick(46, 2) as usize);
            let asks = pick(48, OWNERS as u64) as usize;
            let asked = Lock {
                family: [LockFamily::Posix, LockFamily::Flock][family],
                ..lock(
                    [Shared, Exclusive, Unlock][pick(40, 3) as usize],
                    one.min(two),
                    one.max(two),
                )
            };
            let (id, who) = (FILES[file], owner(asks as u64));
            let bytes = &mut model[file][family];
            let barred = model_bars(bytes, asks, &asked);
            assert_eq!(locks.bars(id, who, &asked), barred.is_some());
            let told = locks.first_against(id, who, &asked);
            assert_eq!(told.map(|held| held.range.start.max(asked.range.start)), barred);
            if barred.is_some() {
                continue;
            }
            let (before, growth) = (locks.len() as isize, locks.growth(id, who, &asked));
            locks.set(id, who, asked);
            assert_eq!(locks.len() as isize - before, growth);
            bytes[asks][one.min(two) as usize..=one.max(two) as usize].fill(asked.kind);
            let runs = bytes[asks].chunk_by(|one, two| one == two);
            let held = locks.iter().filter(|(file, owner, held)| {
                (*file, *owner, held.family) == (id, who, asked.family)
            });
            let runs = runs.filter(|run| run[0] != Unlock).count();
            assert_eq!(held.count(), runs, "neighbours of one kind are one lock");
            assert_eq!(locks.own.len(), locks.places.len());
        }
    }

    #[test]
    fn what_a_node_has_goes_with_it_and_nothing_else() {
        let mut locks = HeldLocks::default();
        for number in 0..6 {
            locks.set(FILES[number as usize % 2], owner(number), lock(Shared, 3, 5));
            let all = Lock { family: LockFamily::Flock, ..lock(Shared, 0, u64::MAX) };
            locks.set(FILE, owner(number), all);
        }
        assert_eq!(locks.release_node(NodeId(1)).len(), 6);
        assert!((0..6).all(|number| locks.has_any(owner(number)) == (number % 2 == 0)));
        locks.release(FILE, LockFamily::Flock, owner(2));
        assert_eq!(
            (locks.flock_of(owner(2), FILE), locks.flock_of(owner(4), FILE)),
            (None, Some(Shared))
        );
        assert_eq!(locks.len(), 5);
    }

    /// Each lock looked at all the others of the file.
    #[test]
    fn many_locks_of_a_file_are_not_looked_at_for_one_more() {
        const MANY: u64 = 10_000;
        const LOOKED_AT_MAX: usize = 8;
        let mut locks = HeldLocks::default();
        for number in 0..MANY {
            let (kind, len) =
                if number % 2 == 0 { (Shared, 3) } else { (Exclusive, 1 + number % 7) };
            let lock = lock(kind, 20 * number, 20 * number + len);
            let all = |class| locks.candidates(class, lock.range);
            let looks = locks.classes_against(FILE, &lock).flat_map(all).count();
            assert!(looks <= LOOKED_AT_MAX, "{looks} at {number}");
            assert!(!locks.bars(FILE, owner(number % 50), &lock));
            locks.set(FILE, owner(number % 50), lock);
        }
        for number in (0..MANY).rev() {
            let range = LockRange { start: 20 * number, end: 20 * number + 9 };
            let wanted = Lock { range, ..lock(Exclusive, 0, 0) };
            let barrier = locks.first_against(FILE, owner(99), &wanted).unwrap();
            assert_eq!(barrier.range.start, range.start);
            locks.set(FILE, owner(number % 50), Lock { kind: Unlock, ..wanted });
        }
        assert_eq!((locks.len(), locks.places.len()), (0, 0));
    }
}
