//! Slices: the parts of a projection, each of which a client has a session of its own with.
//!
//! Without failover a server's share is one slice, and has the server's number. With failover a server's share
//! is in as many slices as there are other servers. The keys of each go to another one of them when the
//! server dies. docs/PLACEMENT.md specifies it.

use std::ops::Range;

use dray_core::{FileId, Name};

use super::mapping::{Placement, ServerIndex};

/// A slice of the projection, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SliceIndex(pub u16);

/// Which slice has a file, a name, a block. Cheap to clone. No call allocates.
#[derive(Clone, Debug)]
pub struct Slices(Placement);

impl Slices {
    /// Of a placement.
    pub fn of(placement: Placement) -> Slices {
        Slices(placement)
    }

    /// The mapping to servers.
    pub fn placement(&self) -> &Placement {
        &self.0
    }

    /// How many slices there are.
    pub fn count(&self) -> usize {
        match (self.0.fails_over(), self.0.servers_count()) {
            (false, servers) => servers,
            (true, servers) => servers * (servers - 1),
        }
    }

    /// All of them, in their order.
    pub fn all(&self) -> impl Iterator<Item = SliceIndex> + use<> {
        (0..self.count() as u16).map(SliceIndex)
    }

    /// The server that serves a slice while it is there.
    pub fn home_of(&self, SliceIndex(slice): SliceIndex) -> ServerIndex {
        match self.0.fails_over() {
            false => ServerIndex(slice),
            true => ServerIndex(slice / self.others()),
        }
    }

    /// The server that serves a slice when its home has died. None without failover.
    pub fn successor_of(&self, slice: SliceIndex) -> Option<ServerIndex> {
        let ServerIndex(home) = self.home_of(slice);
        let other = self.0.fails_over().then(|| slice.0 % self.others())?;
        Some(ServerIndex(if other < home { other } else { other + 1 }))
    }

    /// The export of a slice of the projection `name`: `NAME/HOME.SUCCESSOR` with failover, else `NAME`.
    pub fn export_of(&self, slice: SliceIndex, name: &str) -> String {
        match (self.home_of(slice), self.successor_of(slice)) {
            (ServerIndex(home), Some(ServerIndex(next))) => format!("{name}/{home}.{next}"),
            (_, None) => name.to_owned(),
        }
    }

    /// The slice with these two servers. The second one counts with failover only.
    ///
    /// # Panics
    /// With failover, if both are the same.
    pub fn with(&self, ServerIndex(home): ServerIndex, successor: ServerIndex) -> SliceIndex {
        if !self.0.fails_over() {
            return SliceIndex(home);
        }
        let ServerIndex(next) = successor;
        assert_ne!(home, next, "a server is not its own successor");
        SliceIndex(home * self.others() + if next < home { next } else { next - 1 })
    }

    /// Servers beside any one.
    fn others(&self) -> u16 {
        self.0.servers_count() as u16 - 1
    }

    /// The slice of a key at its server `home`.
    fn slice(&self, home: ServerIndex, key: u64) -> SliceIndex {
        if !self.0.fails_over() {
            return SliceIndex(home.0);
        }
        let next = self.0.successor(key, |one| one == home);
        self.with(home, next.expect("there is another server"))
    }

    /// The slice of a file's attributes and locks, and of its content where that is not striped.
    pub fn home(&self, id: FileId) -> SliceIndex {
        let key = self.0.data_key(id);
        self.slice(self.0.data_server(key, 0), key)
    }

    /// The slice of the listing of `dir`, and of the names in it.
    pub fn directory(&self, dir: FileId) -> SliceIndex {
        let key = self.0.directory_key(dir);
        self.slice(self.0.name_server(key), key)
    }

    /// The slice of the name `name` in `dir`.
    pub fn name(&self, dir: FileId, name: &Name) -> SliceIndex {
        let key = self.0.name_key(dir, name);
        self.slice(self.0.name_server(key), key)
    }

    /// The slice of one block of a file.
    pub fn block(&self, id: FileId, block: u64) -> SliceIndex {
        let key = self.0.data_key(id);
        self.slice(self.0.data_server(key, self.0.place_of(block)), key)
    }

    /// The slices that have a block of a striped file of this size, the home first.
    pub(super) fn slices_of(
        &self,
        id: FileId,
        size_bytes: u64,
    ) -> impl Iterator<Item = SliceIndex> {
        (0..self.0.blocks_apart(size_bytes)).map(move |block| self.block(id, block))
    }

    /// The slice of the block that has the byte at `at`.
    pub(super) fn block_at(&self, id: FileId, at: u64) -> SliceIndex {
        self.block(id, at / self.0.stripe_bytes())
    }

    /// The parts of `len_bytes` at `at` of a file, each of one slice, in their order.
    pub(super) fn pieces(
        &self,
        id: FileId,
        at: u64,
        len_bytes: u64,
    ) -> impl Iterator<Item = (SliceIndex, Range<u64>)> {
        let pieces = self.0.ranges(at, len_bytes);
        pieces.map(move |(block, range)| (self.block(id, block), range))
    }
}

const _: () = assert!(super::parse::SERVERS_MAX <= u16::MAX as usize);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::definition::{Definition, HashKind};
    use crate::placement::mapping::tests::{definition, id, must_be_even};

    fn slices(servers: usize, data_hash: HashKind) -> Slices {
        let definition = Definition { failover: true, data_hash, ..definition(servers) };
        Slices::of(Placement::new(&definition))
    }

    #[test]
    fn slices_are_numbered_by_home_and_successor() {
        for servers in [2, 3, 16] {
            let slices = slices(servers, HashKind::Rendezvous);
            let mut pairs: Vec<_> = slices
                .all()
                .map(|slice| (slices.home_of(slice), slices.successor_of(slice).unwrap()))
                .collect();
            assert_eq!(pairs.len(), servers * (servers - 1));
            assert!(
                pairs
                    .iter()
                    .zip(slices.all())
                    .all(|((a, s), slice)| { a != s && slices.with(*a, *s) == slice })
            );
            assert!(pairs.is_sorted());
            pairs.dedup();
            assert_eq!(pairs.len(), slices.count());
        }
        let three = slices(3, HashKind::Rendezvous);
        let names: Vec<_> = three.all().map(|slice| three.export_of(slice, "x")).collect();
        assert_eq!(names, ["x/0.1", "x/0.2", "x/1.0", "x/1.2", "x/2.0", "x/2.1"]);
    }

    #[test]
    fn without_failover_a_slice_is_a_server() {
        let placement = Placement::new(&definition(3));
        let slices = Slices::of(placement.clone());
        assert_eq!(slices.count(), 3);
        for ino in 0..1000 {
            assert_eq!(slices.home(id(ino)).0, placement.home(id(ino)).0);
            assert_eq!(slices.directory(id(ino)).0, placement.directory(id(ino)).0);
            assert_eq!(slices.block(id(ino), ino).0, placement.block(id(ino), ino).0);
        }
        assert_eq!(slices.successor_of(SliceIndex(1)), None);
        assert_eq!(slices.export_of(SliceIndex(1), "x"), "x");
    }

    /// The slice says where a file goes, as the mapping has it, and each has as much as the others.
    #[test]
    fn a_files_slice_has_its_home_and_its_home_without_that() {
        for kind in HashKind::NAMES.map(|(_, kind)| kind) {
            let slices = slices(4, kind);
            let placement = slices.placement().clone();
            let mut counts = vec![0; slices.count()];
            for ino in 0..100_000 {
                let (slice, home) = (slices.home(id(ino)), placement.home(id(ino)));
                assert_eq!(slices.home_of(slice), home);
                let next = placement.home_without(id(ino), |one| one == home);
                assert_eq!(slices.successor_of(slice), next);
                counts[usize::from(slice.0)] += 1;
            }
            must_be_even(&counts, &format!("slices by {kind}"));
        }
    }

    #[test]
    fn names_and_blocks_have_the_slices_of_their_servers() {
        let slices = slices(4, HashKind::Rendezvous);
        let placement = slices.placement();
        let name = Name::new(b"n").unwrap();
        for ino in 0..1000 {
            assert_eq!(slices.home_of(slices.name(id(ino), name)), placement.name(id(ino), name));
            assert_eq!(slices.name(id(ino), name), slices.directory(id(ino)));
            assert_eq!(slices.block(id(ino), 0), slices.home(id(ino)));
            for block in 0..5 {
                let slice = slices.block(id(ino), block);
                assert_eq!(slices.home_of(slice), placement.block(id(ino), block));
            }
        }
    }

    /// The vectors are in the specification, so that it cannot say something else.
    #[test]
    fn the_specification_has_the_slices_of_this_mapping() {
        const DOCUMENT: &str =
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/PLACEMENT.md"));
        let slices = slices(3, HashKind::Rendezvous);
        let name = |slice| slices.export_of(slice, "x");
        let mut rows = 0;
        for line in DOCUMENT.lines() {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let ["", ino, home, number, names, blocks, ""] = cells[..] else { continue };
            let Ok(ino) = ino.parse() else { continue };
            let found: Vec<_> = (0..4).map(|block| name(slices.block(id(ino), block))).collect();
            let at = slices.home(id(ino));
            assert_eq!((name(at), at.0.to_string()), (home.into(), number.into()), "{ino}");
            assert_eq!(name(slices.directory(id(ino))), names, "names in {ino}");
            assert_eq!(found.join(" "), blocks, "blocks of {ino}");
            rows += 1;
        }
        assert_eq!(rows, 4, "rows of the table");
    }
}
