//! The granted locks of one file.

use std::collections::BTreeMap;

use dray_core::{HolderId, Lock, LockFamily, LockKind, LockOwner, LockRange};

use super::Owner;
use super::ranges::{ConflictQuery, NumberedLock, Ranges};

/// The key of a lock: owner, family, first byte. Locks of one owner and family never touch, since
/// touching ones are joined or cut.
type Own = (Owner, LockFamily, u64);

/// All locks held on a file.
#[derive(Default)]
pub(super) struct GrantedLocks {
    own: BTreeMap<Own, NumberedLock>,
    places: Ranges,
    next_number: u64,
    /// The numbers of locks that are gone, or cover less than they did.
    gone: Vec<u64>,
}

impl GrantedLocks {
    pub(super) fn len(&self) -> usize {
        self.own.len()
    }

    /// Each lock with its owner, in no order that means anything.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Owner, Lock)> + '_ {
        self.own.iter().map(|((owner, ..), held)| (*owner, held.lock))
    }

    /// Whether `owner` has any lock on this file.
    pub(super) fn has(&self, owner: Owner) -> bool {
        let first = (owner, LockFamily::Posix, 0);
        self.own.range(first..).next().is_some_and(|(key, _)| key.0 == owner)
    }

    /// The kind of the flock that `owner` has.
    pub(super) fn flock_of(&self, owner: Owner) -> Option<LockKind> {
        let all = (owner, LockFamily::Flock, 0)..=(owner, LockFamily::Flock, u64::MAX);
        self.own.range(all).next().map(|(_, held)| held.lock.kind)
    }

    /// The numbers of locks that may no longer be in the way of what they were in the way of.
    pub(super) fn take_gone(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.gone)
    }

    /// Gives `owner` the lock, in place of what it had in this range, and joins it with
    /// what it has beside it. With `Unlock` it gives the range back.
    pub(super) fn set(&mut self, owner: Owner, lock: Lock) {
        let mut wanted = lock;
        let mut number = None;
        for old in self.touching(owner, &lock) {
            if old.lock.kind == lock.kind {
                self.remove(&old);
                wanted.range = LockRange {
                    start: old.lock.range.start.min(wanted.range.start),
                    end: old.lock.range.end.max(wanted.range.end),
                };
                // What grows is in the way of the same as before, and of more.
                if let Some(other) = number.replace(old.number) {
                    self.gone.push(other);
                }
            } else if old.lock.range.overlaps(lock.range) {
                self.remove(&old);
                self.gone.push(old.number);
                self.keep_outside(owner, old.lock, lock.range);
            }
        }
        if lock.kind != LockKind::Unlock {
            self.insert(owner, wanted, number);
        }
    }

    /// The locks of `owner` that overlap `lock` or lie beside it.
    fn touching(&self, owner: Owner, lock: &Lock) -> Vec<NumberedLock> {
        let (first, last) = (lock.range.start.saturating_sub(1), lock.range.end.saturating_add(1));
        let at = |start: u64| (owner, lock.family, start);
        let before = self.own.range(at(0)..at(first)).next_back();
        let before = before.filter(|(_, before)| before.lock.range.end >= first);
        let within = self.own.range(at(first)..=at(last));
        before.into_iter().chain(within).map(|(_, held)| *held).collect()
    }

    /// Gives back what of `old`, which is no longer there, lies outside of `range`.
    fn keep_outside(&mut self, owner: Owner, old: Lock, range: LockRange) {
        let part = |start, end| Lock { range: LockRange { start, end }, ..old };
        if old.range.start < range.start {
            self.insert(owner, part(old.range.start, range.start - 1), None);
        }
        if old.range.end > range.end {
            self.insert(owner, part(range.end + 1, old.range.end), None);
        }
    }

    /// Under its number, or a new one.
    fn insert(&mut self, owner: Owner, lock: Lock, number: Option<u64>) {
        let number = number.unwrap_or(self.next_number);
        self.next_number = self.next_number.max(number + 1);
        let placed = NumberedLock { number, owner, lock };
        self.own.insert((owner, lock.family, lock.range.start), placed);
        self.places.insert(placed);
    }

    fn remove(&mut self, held: &NumberedLock) {
        self.own.remove(&(held.owner, held.lock.family, held.lock.range.start));
        self.places.remove(held);
    }

    /// How many locks more there are once `owner` has been given `lock`.
    pub(super) fn growth(&self, owner: Owner, lock: &Lock) -> isize {
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
        let old: isize = self.touching(owner, lock).into_iter().map(|old| of_old(old.lock)).sum();
        old + isize::from(lock.kind != LockKind::Unlock)
    }

    /// Gives back all locks of a family that `owner` has.
    pub(super) fn release(&mut self, family: LockFamily, owner: Owner) {
        self.remove_all((owner, family, 0), (owner, family, u64::MAX));
    }

    /// Gives back all locks of `holder`: how many, and of which owners.
    pub(super) fn release_holder(&mut self, holder: HolderId) -> (usize, Vec<Owner>) {
        let [first, last] = [LockOwner::MIN, LockOwner::MAX].map(|owner| Owner { holder, owner });
        let gone =
            self.remove_all((first, LockFamily::Posix, 0), (last, LockFamily::Flock, u64::MAX));
        let count = gone.len();
        let mut owners: Vec<Owner> = gone.into_iter().map(|held| held.owner).collect();
        owners.dedup();
        (count, owners)
    }

    fn remove_all(&mut self, first: Own, last: Own) -> Vec<NumberedLock> {
        let gone: Vec<NumberedLock> = self.own.range(first..=last).map(|(_, held)| *held).collect();
        gone.iter().for_each(|held| self.remove(held));
        self.gone.extend(gone.iter().map(|held| held.number));
        gone
    }

    /// The number of a lock that anybody else has in the way of `lock`.
    pub(super) fn bar(&self, owner: Owner, lock: &Lock) -> Option<u64> {
        self.places.any_against((lock.family, lock.kind), &ConflictQuery::any(owner, lock))
    }

    /// The other owners with locks in the way of `lock`, once for each lock.
    pub(super) fn holders_against(
        &self,
        owner: Owner,
        lock: &Lock,
    ) -> impl Iterator<Item = Owner> + '_ {
        let all =
            self.places.all_against((lock.family, lock.kind), ConflictQuery::any(owner, lock));
        all.map(|held| held.owner)
    }

    /// Of the locks in the way of `lock` that which begins first.
    pub(super) fn first_against(&self, owner: Owner, lock: &Lock) -> Option<Lock> {
        self.places.first_against((lock.family, lock.kind), ConflictQuery::any(owner, lock))
    }

    #[cfg(test)]
    pub(super) fn looks(&self) -> usize {
        self.places.looks.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LockKind::{Exclusive, Shared, Unlock};
    use dray_core::Pid;

    fn owner(number: u64) -> Owner {
        Owner { holder: HolderId(number % 2), owner: LockOwner::own(number) }
    }

    fn lock(kind: LockKind, start: u64, end: u64) -> Lock {
        let range = LockRange { start, end };
        Lock { family: LockFamily::Posix, kind, range, owner: LockOwner::own(1), pid: Pid(1) }
    }

    fn ranges(locks: &GrantedLocks) -> Vec<(LockKind, u64, u64)> {
        let lock = |lock: Lock| (lock.kind, lock.range.start, lock.range.end);
        let mut ranges: Vec<_> = locks.iter().map(|(_, held)| lock(held)).collect();
        ranges.sort_by_key(|(_, start, _)| *start);
        ranges
    }

    #[test]
    fn ranges_are_split_joined_and_changed() {
        let mut locks = GrantedLocks::default();
        let mut set = |kind, start, end| {
            locks.set(owner(1), lock(kind, start, end));
            ranges(&locks)
        };
        set(Exclusive, 0, 99);
        assert_eq!(set(Unlock, 40, 59), [(Exclusive, 0, 39), (Exclusive, 60, 99)]);
        let three = [(Exclusive, 0, 29), (Shared, 30, 69), (Exclusive, 70, 99)];
        assert_eq!(set(Shared, 30, 69), three);
        assert_eq!(set(Exclusive, 30, 69), [(Exclusive, 0, 99)]);
        assert_eq!(set(Exclusive, 100, u64::MAX), [(Exclusive, 0, u64::MAX)]);
        assert_eq!(set(Unlock, 0, u64::MAX), []);
        assert_eq!(locks.places.len(), 0);
    }

    const BYTES: usize = 24;
    const OWNERS: usize = 4;
    /// What each byte is locked with, by family and owner.
    type Model = [[[LockKind; BYTES]; OWNERS]; 2];

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
        let mut locks = GrantedLocks::default();
        let mut model: Model = [[[Unlock; BYTES]; OWNERS]; 2];
        let mut random = 12345u64;
        for _ in 0..20_000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let pick = |shift: u32, below: u64| (random >> shift) % below;
            let (one, two) = (pick(20, BYTES as u64), pick(30, BYTES as u64));
            let family = pick(46, 2) as usize;
            let asks = pick(48, OWNERS as u64) as usize;
            let asked = Lock {
                family: [LockFamily::Posix, LockFamily::Flock][family],
                ..lock(
                    [Shared, Exclusive, Unlock][pick(40, 3) as usize],
                    one.min(two),
                    one.max(two),
                )
            };
            let who = owner(asks as u64);
            let bytes = &mut model[family];
            let barred = model_bars(bytes, asks, &asked);
            assert_eq!(locks.bar(who, &asked).is_some(), barred.is_some());
            let conflict = locks.first_against(who, &asked);
            assert_eq!(conflict.map(|held| held.range.start.max(asked.range.start)), barred);
            if barred.is_some() {
                continue;
            }
            let before: Vec<NumberedLock> = locks.own.values().copied().collect();
            locks.set(who, asked);
            // The watchers of a lock that covers less now are examined.
            let gone = locks.take_gone();
            for old in before {
                let covers = |new: &NumberedLock| {
                    new.number == old.number
                        && new.owner == old.owner
                        && new.lock.kind == old.lock.kind
                        && new.lock.range.start <= old.lock.range.start
                        && new.lock.range.end >= old.lock.range.end
                };
                assert!(gone.contains(&old.number) || locks.own.values().any(covers));
            }
            bytes[asks][one.min(two) as usize..=one.max(two) as usize].fill(asked.kind);
            let runs = bytes[asks].chunk_by(|one, two| one == two);
            let held =
                locks.iter().filter(|(owner, held)| (*owner, held.family) == (who, asked.family));
            let runs = runs.filter(|run| run[0] != Unlock).count();
            assert_eq!(held.count(), runs, "neighbours of one kind are one lock");
            assert_eq!(locks.own.len(), locks.places.len());
        }
    }

    #[test]
    fn what_a_node_has_goes_with_it_and_nothing_else() {
        let mut locks = GrantedLocks::default();
        for number in 0..6 {
            locks.set(owner(number), lock(Shared, 3, 5));
            let all = Lock { family: LockFamily::Flock, ..lock(Shared, 0, u64::MAX) };
            locks.set(owner(number), all);
        }
        assert_eq!(locks.release_holder(HolderId(1)), (6, vec![owner(1), owner(3), owner(5)]));
        assert!((0..6).all(|number| locks.has(owner(number)) == (number % 2 == 0)));
        locks.release(LockFamily::Flock, owner(2));
        assert_eq!((locks.flock_of(owner(2)), locks.flock_of(owner(4))), (None, Some(Shared)));
        assert_eq!((locks.len(), locks.places.len(), locks.take_gone().len()), (5, 5, 7));
    }

    /// Each lock looked at all the others of the file.
    // proves: P57
    #[test]
    fn many_locks_of_a_file_are_not_looked_at_for_one_more() {
        const MANY: u64 = 10_000;
        const LOOKS_MAX: usize = 120;
        let mut locks = GrantedLocks::default();
        let mut so_far = 0;
        let mut few = |locks: &GrantedLocks| {
            let looks = locks.looks() - std::mem::replace(&mut so_far, locks.looks());
            assert!(looks <= LOOKS_MAX, "{looks}");
        };
        for number in 0..MANY {
            let (kind, len) =
                if number % 2 == 0 { (Shared, 3) } else { (Exclusive, 1 + number % 7) };
            let lock = lock(kind, 20 * number, 20 * number + len);
            assert!(locks.bar(owner(number % 50), &lock).is_none());
            locks.set(owner(number % 50), lock);
            few(&locks);
        }
        for number in (0..MANY).rev() {
            let range = LockRange { start: 20 * number, end: 20 * number + 9 };
            let wanted = Lock { range, ..lock(Exclusive, 0, 0) };
            let barrier = locks.first_against(owner(99), &wanted).unwrap();
            assert_eq!(barrier.range.start, range.start);
            locks.set(owner(number % 50), Lock { kind: Unlock, ..wanted });
            few(&locks);
        }
        assert_eq!((locks.len(), locks.places.len()), (0, 0));
    }
}
