//! The mapping: which server has a file, a name, a block. docs/PLACEMENT.md specifies it.

use std::ops::Range;
use std::sync::Arc;

use dray_core::fnv1a;
use dray_core::{FileId, Name, NodeId};

use super::definition::{Definition, HashKind, Layout};
use super::hash::{key_of, mix, score, server_key};

/// A server of the projection, by its position in the definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerIndex(pub u16);

/// Between the keys of the places of one file: the golden ratio in 64 bits.
const PLACE_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The mapping of one definition. Cheap to clone. No call allocates.
#[derive(Clone, Debug)]
pub struct Placement {
    /// A key for each server, in the order of the definition.
    servers: Arc<[u64]>,
    layout: Layout,
    width: usize,
    stripe_bytes: u64,
    data_hash: HashKind,
    meta_hash: HashKind,
    spread_creates: bool,
    atomic: bool,
    failover: bool,
}

impl Placement {
    /// Of a definition.
    pub fn new(definition: &Definition) -> Placement {
        Placement {
            servers: definition.servers.iter().map(|server| server_key(server)).collect(),
            layout: definition.layout,
            width: definition.width,
            stripe_bytes: definition.stripe_bytes,
            data_hash: definition.data_hash,
            meta_hash: definition.meta_hash,
            spread_creates: definition.spread_creates,
            atomic: definition.atomic,
            failover: definition.failover && definition.servers.len() > 1,
        }
    }

    /// Whether the share of a dead server goes to others.
    pub fn fails_over(&self) -> bool {
        self.failover
    }

    /// How many servers there are.
    pub fn servers_count(&self) -> usize {
        self.servers.len()
    }

    /// Servers that the blocks of one file are at.
    pub fn width(&self) -> usize {
        if self.splits() { self.width } else { 1 }
    }

    /// Size of a block, bytes.
    pub fn stripe_bytes(&self) -> u64 {
        self.stripe_bytes
    }

    /// The server of a file's attributes and locks, and of its content where that is not striped.
    pub fn home(&self, id: FileId) -> ServerIndex {
        self.data_server(self.data_key(id), 0)
    }

    /// The server of the listing of `dir`, and of the names in it.
    pub fn directory(&self, dir: FileId) -> ServerIndex {
        self.name_server(self.directory_key(dir))
    }

    /// The server of the name `name` in `dir`.
    pub fn name(&self, dir: FileId, name: &Name) -> ServerIndex {
        self.name_server(self.name_key(dir, name))
    }

    /// The server that a client uses under [`Layout::LoadBalance`].
    pub fn of_client(&self, node: NodeId) -> ServerIndex {
        self.ranked(HashKind::Rendezvous, mix(node.0), 0)
    }

    /// The server of one block of a file.
    pub fn block(&self, id: FileId, block: u64) -> ServerIndex {
        self.data_server(self.data_key(id), self.place_of(block))
    }

    /// The key of a file's content.
    pub(super) fn data_key(&self, id: FileId) -> u64 {
        key_of(self.data_hash, id.ino)
    }

    /// The key of a directory's listing.
    pub(super) fn directory_key(&self, dir: FileId) -> u64 {
        key_of(self.meta_hash, dir.ino)
    }

    /// The key of a name.
    pub(super) fn name_key(&self, dir: FileId, name: &Name) -> u64 {
        let key = self.directory_key(dir);
        if self.spread_creates { key.wrapping_add(fnv1a(name.as_bytes())) } else { key }
    }

    /// The server in this place for a key of content.
    pub(super) fn data_server(&self, key: u64, place: usize) -> ServerIndex {
        self.ranked(self.data_hash, key, place)
    }

    /// The server for a key of names.
    pub(super) fn name_server(&self, key: u64) -> ServerIndex {
        self.ranked(self.meta_hash, key, 0)
    }

    /// The place of a block among the servers of its file.
    pub(super) fn place_of(&self, block: u64) -> usize {
        if self.splits() { (block % self.width as u64) as usize } else { 0 }
    }

    /// How many servers have a block of a striped file of this size. Blocks of less than that number are
    /// each at another one.
    pub(super) fn blocks_apart(&self, size_bytes: u64) -> u64 {
        size_bytes.div_ceil(self.stripe_bytes).clamp(1, self.width as u64)
    }

    /// Whether `len_bytes` at `at` of a file are in several blocks of a file whose blocks are at several
    /// servers.
    pub(super) fn is_split(&self, at: u64, len_bytes: u64) -> bool {
        let last = at.saturating_add(len_bytes.saturating_sub(1));
        self.splits() && at / self.stripe_bytes != last / self.stripe_bytes
    }

    /// The parts of `len_bytes` at `at` of a file, each at one server, in their order.
    pub fn pieces(
        &self,
        id: FileId,
        at: u64,
        len_bytes: u64,
    ) -> impl Iterator<Item = (ServerIndex, Range<u64>)> {
        self.ranges(at, len_bytes).map(move |(block, range)| (self.block(id, block), range))
    }

    /// The same with the block of each in place of its server.
    pub(super) fn ranges(
        &self,
        at: u64,
        len_bytes: u64,
    ) -> impl Iterator<Item = (u64, Range<u64>)> {
        let end = at.saturating_add(len_bytes);
        let mut next = at;
        std::iter::from_fn(move || {
            let begin = next;
            if begin >= end {
                return None;
            }
            let block = begin / self.stripe_bytes;
            let whole = (block + 1).saturating_mul(self.stripe_bytes);
            next = if self.splits() { whole.min(end) } else { end };
            Some((block, begin..next))
        })
    }

    /// Whether blocks of one file are at several servers.
    pub(super) fn splits(&self) -> bool {
        self.layout.is_striped() && !self.atomic && self.width > 1
    }

    /// The server that is in the given place, from 0 on, when all servers are ordered by how much they are
    /// wanted for `key`.
    fn ranked(&self, kind: HashKind, key: u64, place: usize) -> ServerIndex {
        let count = self.servers.len();
        if kind == HashKind::Modulo {
            let start = (key % count as u64) as usize;
            return ServerIndex(((start + place) % count) as u16);
        }
        // Of equal scores the first in the definition comes first, so that the order is total.
        let rank = |index: usize| (score(self.servers[index], key), count - index);
        let mut bound = None;
        let mut found = 0;
        for _ in 0..=place {
            let below = |index: &usize| bound.is_none_or(|bound| rank(*index) < bound);
            found = (0..count).filter(below).max_by_key(|index| rank(*index)).unwrap_or(0);
            bound = Some(rank(found));
        }
        ServerIndex(found as u16)
    }

    /// The same file's home while some servers are `away`. The share of a server that is away, and nothing
    /// else, is spread over the others. None if all are away.
    pub fn home_without(
        &self,
        id: FileId,
        away: impl Fn(ServerIndex) -> bool,
    ) -> Option<ServerIndex> {
        let home = self.home(id);
        if !away(home) {
            return Some(home);
        }
        self.successor(self.data_key(id), away)
    }

    /// The server that serves a key when its own one is `away`. None if all are.
    pub(super) fn successor(
        &self,
        key: u64,
        away: impl Fn(ServerIndex) -> bool,
    ) -> Option<ServerIndex> {
        let key = mix(key.wrapping_add(PLACE_STEP));
        let others = (0..self.servers.len() as u16).map(ServerIndex).filter(|one| !away(*one));
        others.max_by_key(|one| score(self.servers[usize::from(one.0)], key))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::placement) fn definition(servers: usize) -> Definition {
        Definition {
            name: "x".into(),
            layout: Layout::ClusterStripe,
            servers: (1..=servers).map(|number| format!("tcp://io{number}:7440")).collect(),
            path: "/x".into(),
            width: servers,
            stripe_bytes: 1 << 20,
            data_hash: HashKind::Rendezvous,
            meta_hash: HashKind::Rendezvous,
            spread_creates: false,
            atomic: false,
            failover: false,
            leases: false,
            export: toml::Table::new(),
            cluster: None,
        }
    }

    pub(in crate::placement) fn id(ino: u64) -> FileId {
        FileId { ino, generation: 7 }
    }

    const KINDS: [HashKind; 4] =
        [HashKind::Rendezvous, HashKind::Jenkins, HashKind::Fnv1a, HashKind::Modulo];

    /// Pearson's statistic against equal shares; with `k - 1` degrees of freedom it is below
    /// `k - 1 + 5 sqrt(2 (k - 1))` but once in a million.
    pub(in crate::placement) fn must_be_even(counts: &[u64], what: &str) {
        let expected = counts.iter().sum::<u64>() as f64 / counts.len() as f64;
        let chi: f64 =
            counts.iter().map(|count| (*count as f64 - expected).powi(2) / expected).sum();
        let degrees = counts.len() as f64 - 1.0;
        let bound = degrees + 5.0 * (2.0 * degrees).sqrt();
        assert!(chi < bound, "{what}: chi-square {chi} over {bound}: {counts:?}");
    }

    #[test]
    fn a_million_consecutive_numbers_spread_evenly() {
        for kind in KINDS {
            for servers in [2, 3, 16] {
                let placement =
                    Placement::new(&Definition { data_hash: kind, ..definition(servers) });
                let (mut homes, mut second) = (vec![0; servers], vec![0; servers]);
                for ino in 0..1_000_000 {
                    homes[usize::from(placement.home(id(ino)).0)] += 1;
                    if ino % 10 == 0 {
                        second[usize::from(placement.block(id(ino), 1).0)] += 1;
                    }
                }
                must_be_even(&homes, &format!("{kind} over {servers}"));
                if kind != HashKind::Modulo {
                    must_be_even(&second, &format!("{kind} over {servers}, second block"));
                }
            }
        }
    }

    /// The vectors are in the specification, so that it cannot say something else.
    #[test]
    fn the_specification_has_the_vectors_of_this_mapping() {
        const DOCUMENT: &str =
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/PLACEMENT.md"));
        let mut rows = 0;
        for line in DOCUMENT.lines() {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let ["", hash, ino, home, blocks, away, ""] = cells[..] else { continue };
            let Ok(ino) = ino.parse() else { continue };
            let hash = hash.trim_matches('`');
            let (_, data_hash) = *HashKind::NAMES.iter().find(|(name, _)| *name == hash).unwrap();
            let placement = Placement::new(&Definition { data_hash, ..definition(3) });
            let at = placement.home(id(ino));
            let found: Vec<String> =
                (0..4).map(|block| placement.block(id(ino), block).0.to_string()).collect();
            let moved = placement.home_without(id(ino), |one| one == at).unwrap();
            let found = (at.0.to_string(), found.join(" "), moved.0.to_string());
            assert_eq!(found, (home.into(), blocks.into(), away.into()), "{hash} of {ino}");
            rows += 1;
        }
        assert_eq!(rows, 16, "rows of the table");
    }

    #[test]
    fn blocks_of_a_file_are_at_different_servers() {
        for kind in KINDS {
            for width in 1..=5 {
                let placement =
                    Placement::new(&Definition { data_hash: kind, width, ..definition(5) });
                for ino in 0..1000 {
                    let mut first: Vec<_> =
                        (0..width as u64).map(|block| placement.block(id(ino), block)).collect();
                    assert_eq!(first[0], placement.home(id(ino)));
                    let again = placement.block(id(ino), width as u64 + 1);
                    assert_eq!(again, first[1 % width]);
                    first.sort();
                    first.dedup();
                    assert_eq!(first.len(), width);
                }
            }
        }
    }

    #[test]
    fn a_server_that_goes_or_comes_moves_its_own_share_alone() {
        for kind in [HashKind::Rendezvous, HashKind::Jenkins, HashKind::Fnv1a] {
            let five = definition(5);
            let five = Definition { data_hash: kind, ..five };
            let servers: Vec<String> = five.servers.iter().rev().skip(1).cloned().collect();
            let four = Definition { servers, width: 4, ..five.clone() };
            let (with, without) = (Placement::new(&five), Placement::new(&four));
            let gone = ServerIndex(4);
            let mut moved = vec![0; 4];
            for ino in 0..100_000 {
                let before = with.home(id(ino));
                let away = with.home_without(id(ino), |one| one == gone).unwrap();
                // The list is reversed there.
                let after = without.home(id(ino));
                if before == gone {
                    moved[usize::from(away.0)] += 1;
                } else {
                    assert_eq!((away, after.0), (before, 3 - before.0));
                }
            }
            must_be_even(&moved, &format!("what {kind} moved"));
        }
        assert_eq!(Placement::new(&definition(2)).home_without(id(1), |_| true), None);
    }

    #[test]
    fn pieces_cover_what_was_asked_for_once() {
        let striped = definition(3);
        let atomic = Definition { atomic: true, ..striped.clone() };
        let whole = Definition { layout: Layout::Cluster, ..striped.clone() };
        for (definition, splits) in [(striped, true), (atomic, false), (whole, false)] {
            let placement = Placement::new(&definition);
            for (at, len) in [(0, 0), (0, 1), (5, 1 << 20), ((1 << 20) - 1, 2), (7, 5 << 20)] {
                let pieces: Vec<_> = placement.pieces(id(9), at, len).collect();
                let mut next = at;
                for (server, range) in &pieces {
                    assert_eq!(range.start, next);
                    next = range.end;
                    assert!(range.end > range.start);
                    assert_eq!(*server, placement.block(id(9), range.start >> 20));
                    assert!(!splits || range.start >> 20 == (range.end - 1) >> 20);
                }
                assert_eq!(next, at + len);
                assert!(splits || pieces.len() <= 1);
            }
            let last = placement.pieces(id(9), u64::MAX - 3, 99).last().unwrap();
            assert_eq!(last.1.end, u64::MAX);
        }
    }

    #[test]
    fn names_are_at_their_directorys_server_unless_they_are_spread() {
        let name = |text: &'static str| Name::new(text.as_bytes()).unwrap();
        let plain = Placement::new(&definition(4));
        let spread = Placement::new(&Definition { spread_creates: true, ..definition(4) });
        assert_eq!(plain.name(id(5), name("a")), plain.directory(id(5)));
        let servers: std::collections::BTreeSet<_> =
            ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"]
                .map(|text| spread.name(id(5), name(text)))
                .into();
        assert_eq!(servers.len(), 4);
    }
}
