//! Names in a directory, in an order that survives changes.

use std::collections::BTreeMap;

use dray_core::{Name, NameBuf};

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DirSlot {
    /// The file's number.
    pub(super) ino: u64,
    /// Where it stands in listings.
    pub(super) position: u64,
}

/// A directory's names. A listing shows the newest first. A name made during a listing stands
/// before the reader, who therefore comes to an end even if every step makes another name.
/// Positions are never used again.
#[derive(Clone, Debug)]
pub(super) struct Directory {
    /// The directory that this one is in.
    pub(super) parent: u64,
    names: BTreeMap<NameBuf, DirSlot>,
    order: BTreeMap<u64, NameBuf>,
    next_position: u64,
}

impl Directory {
    /// An empty one.
    pub(super) fn new(parent: u64) -> Directory {
        let next_position = i64::MAX as u64; // cookies are shown to applications as off_t
        Directory { parent, names: BTreeMap::new(), order: BTreeMap::new(), next_position }
    }

    pub(super) fn get(&self, name: &Name) -> Option<u64> {
        self.names.get(name).map(|slot| slot.ino)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Gives `name` to `ino`. A name that was there keeps its place.
    pub(super) fn set(&mut self, name: &Name, ino: u64) -> DirSlot {
        if let Some(slot) = self.names.get_mut(name) {
            slot.ino = ino;
            return *slot;
        }
        let slot = DirSlot { ino, position: self.next_position };
        self.put(name, slot);
        slot
    }

    /// Puts a name where it stood on the other side of a disk.
    pub(super) fn put(&mut self, name: &Name, slot: DirSlot) {
        self.remove(name);
        self.next_position = self.next_position.min(slot.position.saturating_sub(1));
        self.order.insert(slot.position, name.to_owned());
        self.names.insert(name.to_owned(), slot);
    }

    pub(super) fn remove(&mut self, name: &Name) {
        if let Some(slot) = self.names.remove(name) {
            self.order.remove(&slot.position);
        }
    }

    /// Names behind `cookie` with their numbers and cookies.
    pub(super) fn behind(&self, cookie: u64) -> impl Iterator<Item = (&NameBuf, u64, u64)> {
        self.order.range(cookie.saturating_add(1)..).filter_map(|(&position, name)| {
            self.names.get(&**name).map(|slot| (name, slot.ino, position))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_that_renames_as_it_goes_ends() {
        let name = |number: u32| NameBuf::new(format!("n{number}").as_bytes()).unwrap();
        let mut directory = Directory::new(1);
        for number in 0..10 {
            directory.set(&name(number), number.into());
        }
        let (mut cookie, mut seen) = (0, 0);
        let first = |directory: &Directory, cookie| {
            directory.behind(cookie).next().map(|(name, ino, next)| (name.clone(), ino, next))
        };
        while let Some((found, ino, next)) = first(&directory, cookie) {
            directory.remove(&found);
            directory.set(&name(100 + seen), ino);
            (cookie, seen) = (next, seen + 1);
        }
        assert_eq!(seen, 10);
    }
}
