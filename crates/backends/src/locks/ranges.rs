//! A set of ranges of one file that are locked or waited for. A search finds the ranges that overlap
//! another one, and skips the others.
//!
//! The set is a treap (Aragon, Seidel: Randomized search trees, 1989) in the order of first bytes. Each
//! node has the largest last byte below it, and the two lowest numbers of different owners. A search
//! leaves out subtrees that end too early, came too late, or belong to the searching owner.

use std::collections::BinaryHeap;
use std::hash::{BuildHasher, RandomState};

use dray_core::{Lock, LockFamily, LockKind, LockRange};

use super::Owner;

/// A range with its number, which no other of the same set has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NumberedLock {
    pub(super) number: u64,
    pub(super) owner: Owner,
    pub(super) lock: Lock,
}

/// Where a node is. There is none at [`NOWHERE`].
type At = u32;
const NOWHERE: At = At::MAX;

struct Node {
    placed: NumberedLock,
    /// A hash of the number: above it are nodes of higher ones only.
    rank: u64,
    left: At,
    right: At,
    /// The largest last byte of this node and of those below it.
    end_max: u64,
    earliest: Earliest,
}

/// The least number among some ranges with its owner, and the least one of any other owner.
#[derive(Clone, Copy, Default)]
struct Earliest([Option<(u64, Owner)>; 2]);

/// What is looked for: ranges in the way of a lock of `owner` with numbers less than `before`.
#[derive(Clone, Copy)]
pub(super) struct ConflictQuery {
    pub(super) owner: Owner,
    pub(super) range: LockRange,
    pub(super) before: u64,
}

/// A set of ranges, each with family and kind of its lock.
pub(super) struct Ranges {
    nodes: Vec<Node>,
    unused: Vec<At>,
    /// A tree for each family and kind.
    roots: [At; 4],
    /// The secret of the ranks: no client can know which of two ranks is the higher. A rank changes
    /// the cost of a search, never what is granted.
    ranks: RandomState,
    /// Nodes that searches have looked at.
    #[cfg(test)]
    pub(super) looks: std::cell::Cell<usize>,
}

impl Default for Ranges {
    fn default() -> Ranges {
        Ranges {
            nodes: Vec::new(),
            unused: Vec::new(),
            roots: [NOWHERE; 4],
            ranks: RandomState::new(),
            #[cfg(test)]
            looks: Default::default(),
        }
    }
}

/// The tree of a family and kind.
fn tree(family: LockFamily, kind: LockKind) -> usize {
    2 * usize::from(family == LockFamily::Flock) + usize::from(kind == LockKind::Shared)
}

/// The kinds that a lock does not go together with.
fn against(kind: LockKind) -> &'static [LockKind] {
    match kind {
        LockKind::Shared => &[LockKind::Exclusive],
        LockKind::Exclusive => &[LockKind::Exclusive, LockKind::Shared],
        LockKind::Unlock => &[],
    }
}

impl Earliest {
    fn one(placed: &NumberedLock) -> Earliest {
        Earliest([Some((placed.number, placed.owner)), None])
    }

    fn and(self, other: Earliest) -> Earliest {
        let mut both = self;
        other.0.into_iter().flatten().for_each(|(number, owner)| both.add(number, owner));
        both
    }

    fn add(&mut self, number: u64, owner: Owner) {
        let [first, second] = self.0;
        self.0 = match (first, second) {
            (None, _) => [Some((number, owner)), None],
            (Some(one), _) if one.1 == owner => [Some((one.0.min(number), owner)), second],
            (Some(one), _) if number < one.0 => [Some((number, owner)), first],
            (Some(_), Some(two)) if two.0 <= number => [first, second],
            (Some(_), _) => [first, Some((number, owner))],
        };
    }

    fn has(&self, query: &ConflictQuery) -> bool {
        let wanted =
            |(number, owner): &(u64, Owner)| *number < query.before && *owner != query.owner;
        self.0.iter().flatten().any(wanted)
    }
}

impl ConflictQuery {
    /// Whatever is in the way of `lock`, of any number.
    pub(super) fn any(owner: Owner, lock: &Lock) -> ConflictQuery {
        ConflictQuery { owner, range: lock.range, before: u64::MAX }
    }

    fn matches(&self, placed: &NumberedLock) -> bool {
        placed.number < self.before
            && placed.owner != self.owner
            && placed.lock.range.overlaps(self.range)
    }
}

impl Ranges {
    pub(super) fn insert(&mut self, placed: NumberedLock) {
        let node = Node {
            placed,
            rank: self.ranks.hash_one(placed.number),
            left: NOWHERE,
            right: NOWHERE,
            end_max: placed.lock.range.end,
            earliest: Earliest::one(&placed),
        };
        let at = match self.unused.pop() {
            Some(at) => {
                self.nodes[at as usize] = node;
                at
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() as At - 1
            }
        };
        let tree = tree(placed.lock.family, placed.lock.kind);
        self.roots[tree] = self.inserted(self.roots[tree], at);
    }

    /// Takes out what was inserted like this.
    pub(super) fn remove(&mut self, placed: &NumberedLock) {
        let tree = tree(placed.lock.family, placed.lock.kind);
        self.roots[tree] = self.removed(self.roots[tree], key(placed));
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.nodes.len() - self.unused.len()
    }

    /// Of the ranges that conflict with a lock of this family and kind, the one with the highest
    /// rank. That is a random one of them, and the same one until it is removed.
    ///
    /// Nodes are examined from the highest rank down. A waiter that many ranges block watches the
    /// one found here. It has to look again a logarithmic number of times until all of them are
    /// gone, in whatever order they go.
    pub(super) fn any_against(
        &self,
        (family, kind): (LockFamily, LockKind),
        query: &ConflictQuery,
    ) -> Option<u64> {
        let mut heap = BinaryHeap::new();
        let see = |heap: &mut BinaryHeap<(u64, At)>, at: At| {
            if let Some(node) = self.worth(at, query) {
                heap.push((node.rank, at));
            }
        };
        against(kind).iter().for_each(|kind| see(&mut heap, self.roots[tree(family, *kind)]));
        while let Some((_, at)) = heap.pop() {
            let node = self.look(at);
            if query.matches(&node.placed) {
                return Some(node.placed.number);
            }
            see(&mut heap, node.left);
            if node.placed.lock.range.start <= query.range.end {
                see(&mut heap, node.right);
            }
        }
        None
    }

    /// Of what is in the way of a lock of this family and kind that which begins first.
    pub(super) fn first_against(
        &self,
        (family, kind): (LockFamily, LockKind),
        query: ConflictQuery,
    ) -> Option<Lock> {
        let first = |kind: &LockKind| self.walk(tree(family, *kind), query).next();
        let firsts = against(kind).iter().filter_map(first).map(|placed| placed.lock);
        firsts.min_by_key(|lock| lock.range.start)
    }

    /// What is in the way of a lock of this family and kind: for each kind in the order of first
    /// bytes.
    pub(super) fn all_against(
        &self,
        (family, kind): (LockFamily, LockKind),
        query: ConflictQuery,
    ) -> impl Iterator<Item = &NumberedLock> {
        against(kind).iter().flat_map(move |kind| self.walk(tree(family, *kind), query))
    }

    fn walk(&self, tree: usize, query: ConflictQuery) -> Walk<'_> {
        let mut walk = Walk { ranges: self, query, to_do: Vec::new() };
        walk.go_left(self.roots[tree]);
        walk
    }

    fn look(&self, at: At) -> &Node {
        #[cfg(test)]
        self.looks.set(self.looks.get() + 1);
        &self.nodes[at as usize]
    }

    /// The node there, if anything at or below it may be what is looked for.
    fn worth(&self, at: At, query: &ConflictQuery) -> Option<&Node> {
        let node = self.nodes.get(at as usize)?;
        (node.end_max >= query.range.start && node.earliest.has(query)).then_some(node)
    }

    /// Counts a node's children in again.
    fn sum_up(&mut self, at: At) {
        let node = &self.nodes[at as usize];
        let mut end_max = node.placed.lock.range.end;
        let mut earliest = Earliest::one(&node.placed);
        for child in [node.left, node.right] {
            if let Some(child) = self.nodes.get(child as usize) {
                end_max = end_max.max(child.end_max);
                earliest = earliest.and(child.earliest);
            }
        }
        let node = &mut self.nodes[at as usize];
        (node.end_max, node.earliest) = (end_max, earliest);
    }

    fn inserted(&mut self, top: At, new: At) -> At {
        let (rank, new_key) =
            (self.nodes[new as usize].rank, key(&self.nodes[new as usize].placed));
        let Some(node) = self.nodes.get(top as usize) else { return new };
        let top_key = key(&node.placed);
        if node.rank < rank {
            let (left, right) = self.split(top, new_key);
            let node = &mut self.nodes[new as usize];
            (node.left, node.right) = (left, right);
            self.sum_up(new);
            return new;
        }
        if new_key < top_key {
            self.nodes[top as usize].left = self.inserted(self.nodes[top as usize].left, new);
        } else {
            self.nodes[top as usize].right = self.inserted(self.nodes[top as usize].right, new);
        }
        self.sum_up(top);
        top
    }

    fn removed(&mut self, top: At, gone: Key) -> At {
        let Some(node) = self.nodes.get(top as usize) else { return NOWHERE };
        let (left, right) = (node.left, node.right);
        match gone.cmp(&key(&node.placed)) {
            std::cmp::Ordering::Equal => {
                self.unused.push(top);
                return self.merged(left, right);
            }
            std::cmp::Ordering::Less => self.nodes[top as usize].left = self.removed(left, gone),
            std::cmp::Ordering::Greater => {
                self.nodes[top as usize].right = self.removed(right, gone);
            }
        }
        self.sum_up(top);
        top
    }

    /// What lies before `middle`, and the rest.
    fn split(&mut self, top: At, middle: Key) -> (At, At) {
        let Some(node) = self.nodes.get(top as usize) else { return (NOWHERE, NOWHERE) };
        let parts = if key(&node.placed) < middle {
            let (left, right) = self.split(node.right, middle);
            self.nodes[top as usize].right = left;
            (top, right)
        } else {
            let (left, right) = self.split(node.left, middle);
            self.nodes[top as usize].left = right;
            (left, top)
        };
        self.sum_up(top);
        parts
    }

    /// One tree of two, of which the first lies before the second.
    fn merged(&mut self, left: At, right: At) -> At {
        let rank = |at: At| self.nodes.get(at as usize).map(|node| node.rank);
        match (rank(left), rank(right)) {
            (None, _) => right,
            (_, None) => left,
            (one, other) if one > other => {
                self.nodes[left as usize].right =
                    self.merged(self.nodes[left as usize].right, right);
                self.sum_up(left);
                left
            }
            _ => {
                self.nodes[right as usize].left =
                    self.merged(left, self.nodes[right as usize].left);
                self.sum_up(right);
                right
            }
        }
    }
}

/// First byte and number: the order of a tree.
type Key = (u64, u64);

fn key(placed: &NumberedLock) -> Key {
    (placed.lock.range.start, placed.number)
}

/// A walk over what matches a wish, in order.
struct Walk<'a> {
    ranges: &'a Ranges,
    query: ConflictQuery,
    /// Nodes that are still to be looked at, the next one last, each before what is right of it.
    to_do: Vec<At>,
}

impl Walk<'_> {
    fn go_left(&mut self, mut at: At) {
        while let Some(node) = self.ranges.worth(at, &self.query) {
            self.to_do.push(at);
            at = node.left;
        }
    }
}

impl<'a> Iterator for Walk<'a> {
    type Item = &'a NumberedLock;

    fn next(&mut self) -> Option<&'a NumberedLock> {
        while let Some(at) = self.to_do.pop() {
            let node = self.ranges.look(at);
            if node.placed.lock.range.start > self.query.range.end {
                self.to_do.clear();
                return None;
            }
            self.go_left(node.right);
            if self.query.matches(&node.placed) {
                return Some(&node.placed);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LockKind::{Exclusive, Shared};
    use dray_core::{HolderId, LockOwner, Pid};

    fn placed(number: u64, owner: u64, kind: LockKind, start: u64, end: u64) -> NumberedLock {
        let range = LockRange { start, end };
        let owner = Owner { holder: HolderId(owner), owner: LockOwner::own(1) };
        let (family, pid) = (LockFamily::Posix, Pid(1));
        NumberedLock { number, owner, lock: Lock { family, kind, range, owner: owner.owner, pid } }
    }

    /// Against a list that is looked through.
    #[test]
    fn searches_find_what_a_list_has() {
        let mut random = 99u64;
        let mut pick = |below: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) % below
        };
        let (mut ranges, mut list) = (Ranges::default(), Vec::<NumberedLock>::new());
        for number in 0..20_000 {
            if list.len() < 60 && pick(5) < 3 {
                let (one, two) = (pick(40), pick(40));
                let kind = [Shared, Exclusive][pick(2) as usize];
                list.push(placed(number, pick(4), kind, one.min(two), one.max(two)));
                ranges.insert(list[list.len() - 1]);
            } else if !list.is_empty() {
                let gone = list.swap_remove(pick(list.len() as u64) as usize);
                ranges.remove(&gone);
            }
            let (one, two) = (pick(40), pick(40));
            let asks = placed(
                0,
                pick(5),
                [Shared, Exclusive][pick(2) as usize],
                one.min(two),
                one.max(two),
            );
            let before = number - pick(100).min(number);
            let query = ConflictQuery { owner: asks.owner, range: asks.lock.range, before };
            let what = (LockFamily::Posix, asks.lock.kind);
            let bars = |other: &&NumberedLock| {
                other.owner != asks.owner && other.lock.conflicts(&asks.lock)
            };
            let mut expected: Vec<NumberedLock> =
                list.iter().filter(|other| other.number < before).filter(bars).copied().collect();
            let found = ranges.any_against(what, &query);
            assert_eq!(found.is_some(), !expected.is_empty());
            assert!(found.is_none_or(|found| expected.iter().any(|one| one.number == found)));
            let all: Vec<NumberedLock> = ranges.all_against(what, query).copied().collect();
            expected.sort_by_key(|one| (one.lock.kind == Shared, key(one)));
            assert_eq!(all, expected);
            assert_eq!(ranges.len(), list.len());
        }
    }

    /// Each lock looked at all the others of the file.
    #[test]
    fn one_more_among_many_looks_at_few() {
        const MANY: u64 = 10_000;
        const LOOKS_MAX: usize = 60;
        let mut ranges = Ranges::default();
        for number in 0..MANY {
            let (kind, len) =
                if number % 2 == 0 { (Shared, 3) } else { (Exclusive, 1 + number % 7) };
            let more = placed(number, number % 50, kind, 20 * number, 20 * number + len);
            let query =
                ConflictQuery { owner: more.owner, range: more.lock.range, before: u64::MAX };
            assert_eq!(ranges.any_against((LockFamily::Posix, Exclusive), &query), None);
            assert!(ranges.looks.take() <= LOOKS_MAX);
            ranges.insert(more);
            let asks = placed(0, 99, Exclusive, 20 * (number / 2), 20 * (number / 2) + 9);
            let query =
                ConflictQuery { owner: asks.owner, range: asks.lock.range, before: u64::MAX };
            let found = ranges.any_against((LockFamily::Posix, Exclusive), &query);
            assert_eq!(found, Some(number / 2));
            let looks = ranges.looks.take();
            assert!(looks <= 2 * LOOKS_MAX, "{looks} at {number}");
        }
    }
}
