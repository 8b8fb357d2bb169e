//! The node table: the kernel's node numbers and the files that they stand for.
//!
//! A node number is a slot of the table plus one, and above that the epoch of the mount. Slot 0 is
//! the root, whose number is the kernel's. The records live in [`State`] and survive the process.
//! The way back from a file to its slot is an index on the heap, which a successor rebuilds.
//!
//! Handles that programs are given (name_to_handle_at(2)) are a node number and the generation of
//! its use. The kernel asks for the file behind one that it has forgotten, so a record stays for a
//! while after that ([`in_handles`]). Its slot is used again with another generation. Another mount
//! has another epoch and begins to count at another generation. So a handle is of its file or of
//! none.

use std::sync::{Mutex, MutexGuard, PoisonError};

use dray_core::{Errno, Error, FileId, FileType, IdMap, Name, RenameHow, Result};

use crate::state::moved::DirectoryPlaces;
use crate::state::places::{NameBinding, NameForOpen, Places};

use crate::proto::abi::ROOT_NODE;
use crate::proto::reply::NodeRef;
use crate::state::{NODES_MAX, State, header};

mod forgotten;
mod in_handles;

use forgotten::ForgottenNodes;

/// Offsets within a record.
const INO: usize = 0;
const GENERATION: usize = 8;
/// Lookups of the node that the kernel has not forgotten; 0: the slot is free.
const LOOKUPS: usize = 16;
/// Times the slot was reused, upper half; flags, lower half.
const REUSE: usize = 24;
/// fcntl locks were asked for: their owners may not be known after a restart.
const FLAG_LOCKED: u64 = 1;
/// Not the node of its file, but one beside it, which one caller got.
const FLAG_APART: u64 = 2;
/// The kernel has forgotten it, and it is still known: `LOOKUPS` is 0.
const FLAG_KEPT: u64 = 4;
/// The type of file that the kernel got last, as in a mode (`S_IFMT`), so far up; 0: a
/// predecessor did not note it.
const TYPE_SHIFT: u32 = 4;
const TYPE_BITS: u64 = (libc::S_IFMT as u64) >> 12 << TYPE_SHIFT;

pub(crate) struct Nodes {
    state: State,
    index: Mutex<Index>,
}

#[derive(Default)]
struct Index {
    slots: IdMap<FileId, u64>,
    free: Vec<u64>,
    places: Places,
    directories: DirectoryPlaces,
    kept: ForgottenNodes,
}

impl Nodes {
    /// The table of `state`, with whatever a predecessor left in it.
    pub(crate) fn new(state: State, root: FileId) -> Nodes {
        let nodes = Nodes { state, index: Mutex::default() };
        nodes.rebuild(root);
        nodes
    }

    fn rebuild(&self, root: FileId) {
        let mut index = self.lock();
        if self.used() == 0 {
            self.write(0, root, 1, 0);
            self.state.region.store(header::NODES_USED, 1);
        }
        for slot in 0..self.used() {
            let flags = self.get(slot, REUSE);
            match self.get(slot, LOOKUPS) {
                0 if flags & FLAG_KEPT != 0 => index.kept.add(slot),
                0 => index.free.push(slot),
                _ if flags & FLAG_APART != 0 => {}
                _ => {
                    // Perhaps its end was about to be noted.
                    self.set(slot, REUSE, flags & !FLAG_KEPT);
                    index.slots.insert(self.id_at(slot), slot);
                }
            }
        }
        let kept: Vec<u64> = index.kept.iter().collect();
        for slot in kept {
            index.slots.entry(self.id_at(slot)).or_insert(slot);
        }
        self.keep_within_bound(&mut index);
    }

    fn lock(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn used(&self) -> u64 {
        self.state.region.load(header::NODES_USED).min(NODES_MAX)
    }

    fn get(&self, slot: u64, field: usize) -> u64 {
        self.state.region.load(State::node_at(slot) + field)
    }

    fn set(&self, slot: u64, field: usize, value: u64) {
        self.state.region.store(State::node_at(slot) + field, value);
    }

    fn id_at(&self, slot: u64) -> FileId {
        FileId { ino: self.get(slot, INO), generation: self.get(slot, GENERATION) }
    }

    /// The count goes in last: a record without it does not exist.
    fn write(&self, slot: u64, id: FileId, lookups: u64, reuse: u64) {
        self.set(slot, INO, id.ino);
        self.set(slot, GENERATION, id.generation);
        self.set(slot, REUSE, reuse);
        self.set(slot, LOOKUPS, lookups);
    }

    fn epoch(&self) -> u64 {
        self.state.region.load(header::EPOCH)
    }

    fn number(&self, slot: u64) -> u64 {
        match slot {
            0 => ROOT_NODE,
            slot => self.epoch() >> 32 << 32 | (slot + ROOT_NODE),
        }
    }

    /// The slot of a number that was given out, known or forgotten; none for any other.
    fn slot_in(&self, node: u64) -> Option<u64> {
        let slot = (node & u64::from(u32::MAX)).checked_sub(ROOT_NODE)?;
        (slot < self.used() && node == self.number(slot)).then_some(slot)
    }

    fn slot_of(&self, node: u64) -> Result<u64> {
        match self.slot_in(node) {
            Some(slot) if self.get(slot, LOOKUPS) != 0 => Ok(slot),
            _ => Err(Error::new(Errno::ESTALE).because("the kernel names an unknown node")),
        }
    }

    /// The file behind a node number; `ESTALE` for a number that was never given out.
    pub(crate) fn id(&self, node: u64) -> Result<FileId> {
        self.slot_of(node).map(|slot| self.id_at(slot))
    }

    /// The node number of a file that the kernel knows.
    pub(crate) fn find(&self, id: FileId) -> Option<u64> {
        let slot = self.lock().slots.get(&id).copied()?;
        (self.get(slot, LOOKUPS) != 0).then(|| self.number(slot))
    }

    /// The node for `id`, found as `seen` says, which the kernel is about to get once
    /// more. `ENFILE` when the table is full.
    pub(crate) fn remember(&self, id: FileId, seen: Option<NameBinding<'_>>) -> Result<NodeRef> {
        self.remember_in(&mut self.lock(), id, seen)
    }

    fn remember_in(
        &self,
        index: &mut Index,
        id: FileId,
        seen: Option<NameBinding<'_>>,
    ) -> Result<NodeRef> {
        if let Some(&slot) = index.slots.get(&id) {
            self.count_lookup(index, slot);
            index.places.seen(slot, seen);
            return Ok(self.reference(slot));
        }
        self.add(index, id, seen)
    }

    /// Counts a lookup of a node that the kernel knows, or has forgotten.
    fn count_lookup(&self, index: &mut Index, slot: u64) {
        let lookups = self.get(slot, LOOKUPS);
        self.set(slot, LOOKUPS, lookups + 1);
        if lookups == 0 {
            // No process has the file open, nor locks on it.
            self.set(slot, REUSE, self.get(slot, REUSE) & !(FLAG_KEPT | FLAG_LOCKED));
            index.kept.take(slot);
        }
    }

    /// The same for a directory, found in the node `parent`. If the kernel has it at another place,
    /// `apart` says whether it is to get a node of its own for this one.
    pub(crate) fn remember_directory(
        &self,
        id: FileId,
        seen: NameBinding<'_>,
        parent: u64,
        apart: impl FnOnce() -> bool,
    ) -> Result<NodeRef> {
        let place = (parent, seen.name);
        let mut index = self.lock();
        let known = index.slots.get(&id).copied();
        let mut own = false;
        if known.is_some_and(|slot| index.directories.is_elsewhere(slot, place)) {
            drop(index); // it takes a while to find out
            own = apart();
            index = self.lock();
        }
        let node = match own {
            true => self.add(&mut index, id, Some(seen))?,
            false => self.remember_in(&mut index, id, Some(seen))?,
        };
        if let Some(slot) = self.slot_in(node.node) {
            index.directories.seen(slot, place);
        }
        Ok(node)
    }

    /// A node beside that of `id`, which nobody else will get. `ENFILE` when the table
    /// is full.
    pub(crate) fn remember_apart(&self, id: FileId) -> Result<NodeRef> {
        let mut index = self.lock();
        let slot = self.take_slot(&mut index, id, FLAG_APART)?;
        Ok(self.reference(slot))
    }

    /// The next lookup of the file makes another node. This one stays for those who have it.
    pub(crate) fn divert(&self, node: u64) {
        let mut index = self.lock();
        let Ok(slot) = self.slot_of(node) else { return };
        let id = self.id_at(slot);
        if slot != 0 && index.slots.get(&id) == Some(&slot) {
            self.set(slot, REUSE, self.get(slot, REUSE) | FLAG_APART);
            index.slots.remove(&id);
        }
    }

    /// The kernel has renamed something.
    pub(crate) fn renamed(&self, from: (u64, &Name), to: (u64, &Name), how: RenameHow) {
        let mut index = self.lock();
        index.directories.renamed(from, to, how);
        if let (Ok(from_dir), Ok(to_dir)) = (self.id(from.0), self.id(to.0)) {
            index.places.renamed((from_dir, from.1), (to_dir, to.1), how);
        }
    }

    /// The kernel has removed a name.
    pub(crate) fn removed(&self, place: (FileId, &Name)) {
        self.lock().places.removed(place);
    }

    /// The kernel gets names that it may believe and that others may change.
    pub(crate) fn track_bindings(&self) {
        self.lock().places.track_bindings();
    }

    /// The name by which the kernel has come to `node`. That of a file that a predecessor knew is not
    /// known.
    pub(crate) fn name_for_open(&self, node: u64) -> NameForOpen {
        self.slot_of(node)
            .map_or(NameForOpen::Unknown, |slot| self.lock().places.name_for_open(slot))
    }

    /// A node that the kernel does not know yet.
    fn add(&self, index: &mut Index, id: FileId, seen: Option<NameBinding<'_>>) -> Result<NodeRef> {
        let slot = self.take_slot(index, id, 0)?;
        index.slots.insert(id, slot);
        index.places.seen(slot, seen);
        Ok(self.reference(slot))
    }

    /// A free slot, for `id` from now on.
    fn take_slot(&self, index: &mut Index, id: FileId, flags: u64) -> Result<u64> {
        // What is kept gives way last to what the kernel must know.
        if index.free.is_empty() && self.used() >= NODES_MAX {
            self.let_go_one(index);
        }
        let slot = match index.free.pop() {
            Some(slot) => slot,
            None if self.used() < NODES_MAX => {
                let slot = self.used();
                self.state.region.store(header::NODES_USED, slot + 1);
                slot
            }
            None => return Err(Error::new(Errno::ENFILE).because("the node table is full")),
        };
        let last_use = match self.get(slot, REUSE) >> 32 {
            0 => self.epoch() & u64::from(u32::MAX), // it was never used
            last_use => last_use,
        };
        let reuse = (last_use + 1) << 32;
        self.write(slot, id, 1, reuse | flags);
        index.directories.forget(slot);
        index.places.forget(slot);
        Ok(slot)
    }

    /// Where `node` was last seen, from the root on, beginning with a slash. None if that is not
    /// known, as of files that a predecessor knew.
    pub(crate) fn path(&self, node: u64) -> Option<Vec<u8>> {
        let index = self.lock();
        let slot_of = |dir: FileId| index.slots.get(&dir).copied();
        index.places.path(self.slot_of(node).ok()?, slot_of)
    }

    fn reference(&self, slot: u64) -> NodeRef {
        NodeRef { node: self.number(slot), generation: self.get(slot, REUSE) >> 32 }
    }

    /// The kernel has forgotten `lookups` of its lookups of `node`; `gone` is called if these were
    /// the last, before the number can be another file's. A number that is not known, or a count
    /// beyond what there is, is the worst that happens after a daemon's death. It costs a record,
    /// not more.
    pub(crate) fn forget(&self, node: u64, lookups: u64, gone: impl FnOnce()) {
        let mut index = self.lock();
        let Ok(slot) = self.slot_of(node) else { return };
        if slot == 0 {
            return; // the root stays
        }
        let left = self.get(slot, LOOKUPS).saturating_sub(lookups);
        if left > 0 {
            return self.set(slot, LOOKUPS, left);
        }
        let id = self.id_at(slot);
        let is_its_node = index.slots.get(&id) == Some(&slot); // else it has another by now
        let keeps = is_its_node && self.has_handles();
        let flags = self.get(slot, REUSE);
        // In this order: a reader that finds one without the other can complete it.
        self.set(slot, REUSE, if keeps { flags | FLAG_KEPT } else { flags });
        self.set(slot, LOOKUPS, 0);
        index.directories.forget(slot);
        index.places.forget(slot);
        gone();
        match keeps {
            true => {
                index.kept.add(slot);
                self.keep_within_bound(&mut index);
            }
            false => {
                if is_its_node {
                    index.slots.remove(&id);
                }
                index.free.push(slot);
            }
        }
    }

    /// Notes that fcntl locks were asked for on `node`.
    pub(crate) fn mark_locked(&self, node: u64) {
        let _index = self.lock();
        if let Ok(slot) = self.slot_of(node) {
            self.set(slot, REUSE, self.get(slot, REUSE) | FLAG_LOCKED);
        }
    }

    /// Whether fcntl locks were ever asked for on `node`, by a predecessor too.
    pub(crate) fn was_locked(&self, node: u64) -> bool {
        self.slot_of(node).is_ok_and(|slot| self.get(slot, REUSE) & FLAG_LOCKED != 0)
    }

    /// Notes that the kernel gets a file of this type.
    pub(crate) fn note_type(&self, node: u64, kind: FileType) {
        if self.type_of(node) == Some(kind) {
            return; // mostly
        }
        let _index = self.lock();
        if let Ok(slot) = self.slot_of(node) {
            let others = self.get(slot, REUSE) & !TYPE_BITS;
            self.set(slot, REUSE, others | u64::from(kind.dirent_type()) << TYPE_SHIFT);
        }
    }

    /// What the kernel takes the node for, or took it for; none if that is not known.
    pub(crate) fn type_of(&self, node: u64) -> Option<FileType> {
        if node == ROOT_NODE {
            return Some(FileType::Directory);
        }
        let noted = self.get(self.slot_in(node)?, REUSE) & TYPE_BITS;
        FileType::from_mode((noted >> TYPE_SHIFT << 12) as u32)
    }

    /// Nodes that the kernel knows.
    pub(crate) fn count(&self) -> usize {
        let index = self.lock();
        index.slots.len().saturating_sub(index.kept.len())
    }
}

#[cfg(test)]
mod tests {
    use dray_core::Ttl;

    use super::*;

    const ROOT: FileId = FileId { ino: 2, generation: 0 };

    fn id(ino: u64) -> FileId {
        FileId { ino, generation: 1 }
    }

    fn binding(dir: FileId, name: &Name) -> NameBinding<'_> {
        NameBinding { dir, name, ttl: Ttl::ZERO }
    }

    #[test]
    fn a_node_lives_as_long_as_the_kernel_counts_it() {
        let nodes = Nodes::new(State::create().unwrap(), ROOT);
        assert_eq!(nodes.id(ROOT_NODE).unwrap(), ROOT);
        let first = nodes.remember(id(7), None).unwrap();
        assert_eq!(nodes.remember(id(7), None).unwrap(), first);
        nodes.forget(first.node, 1, || ());
        assert_eq!(nodes.id(first.node).unwrap(), id(7));
        nodes.forget(first.node, 1, || ());
        assert_eq!(nodes.id(first.node).unwrap_err().errno(), Errno::ESTALE);
    }

    #[test]
    fn a_file_that_is_diverted_gets_another_node_and_keeps_the_former_one() {
        let state = State::create().unwrap();
        let nodes = Nodes::new(state.clone(), ROOT);
        let former = nodes.remember(id(7), None).unwrap().node;
        nodes.divert(former);
        nodes.divert(ROOT_NODE);
        assert_eq!((nodes.find(id(7)), nodes.find(ROOT)), (None, Some(ROOT_NODE)));
        let next = nodes.remember(id(7), None).unwrap().node;
        assert_ne!(former, next);
        let successor = Nodes::new(state, ROOT);
        assert_eq!(successor.find(id(7)), Some(next));
        assert_eq!(successor.id(former).unwrap(), id(7));
        successor.forget(former, 1, || ());
        assert_eq!((successor.find(id(7)), successor.id(former).is_err()), (Some(next), true));
    }

    #[test]
    fn a_node_has_the_path_that_it_was_last_seen_at() {
        let nodes = Nodes::new(State::create().unwrap(), ROOT);
        let seen = |file, dir, name: &str| {
            let name = Name::new(name.as_bytes()).unwrap();
            nodes.remember(file, Some(binding(dir, name))).unwrap().node
        };
        let dir = seen(id(7), ROOT, "dir");
        let file = seen(id(8), id(7), "file");
        assert_eq!(nodes.path(ROOT_NODE).unwrap(), b"/");
        assert_eq!(nodes.path(file).unwrap(), b"/dir/file");
        seen(id(7), ROOT, "moved");
        assert_eq!(nodes.path(file).unwrap(), b"/moved/file");
        // A slot that is used again has nothing of its former file.
        nodes.forget(file, 1, || ());
        let next = nodes.remember(id(9), None).unwrap().node;
        assert_eq!((next, nodes.path(next)), (file, None));
        // Directories that seem to be in each other, as after renames of others.
        seen(id(7), id(7), "self");
        assert_eq!(nodes.path(dir), None);
    }

    #[test]
    fn a_directory_can_have_a_node_of_its_own_where_it_was_moved_to() {
        let nodes = Nodes::new(State::create().unwrap(), ROOT);
        let name = |name: &'static str| Name::new(name.as_bytes()).unwrap();
        let seen = |at: &'static str, apart: &dyn Fn() -> bool| {
            nodes.remember_directory(id(7), binding(ROOT, name(at)), ROOT_NODE, apart).unwrap()
        };
        let old = seen("a", &|| panic!("it is new"));
        let same = seen("a", &|| panic!("it is there"));
        assert_eq!(old, same);
        let new = seen("b", &|| true);
        assert_ne!(old.node, new.node);
        assert_eq!([old, new].map(|node| nodes.id(node.node).unwrap()), [id(7); 2]);
        assert_eq!(nodes.find(id(7)), Some(new.node));
        nodes.forget(old.node, 2, || ());
        assert_eq!(nodes.find(id(7)), Some(new.node));
        let moved = seen("c", &|| false);
        assert_eq!(moved, new);
        nodes.renamed((ROOT_NODE, name("c")), (ROOT_NODE, name("d")), RenameHow::Replace);
        seen("d", &|| panic!("we moved it"));
        // What is in it was seen in its old node, and comes to the new one with it.
        let below = |parent, apart| {
            let seen = binding(id(7), name("e"));
            nodes.remember_directory(id(8), seen, parent, || apart).unwrap().node
        };
        let child = below(70, false);
        assert_eq!(below(70, true), child);
        assert_ne!(below(71, true), child);
    }

    #[test]
    fn a_slot_used_again_has_another_generation() {
        let nodes = Nodes::new(State::create().unwrap(), ROOT);
        let first = nodes.remember(id(7), None).unwrap();
        nodes.forget(first.node, 1, || ());
        let second = nodes.remember(id(8), None).unwrap();
        assert_eq!(first.node, second.node);
        assert_ne!(first.generation, second.generation);
    }

    /// Numbers of a mount that an earlier version began are what they were.
    #[test]
    fn a_mount_without_an_epoch_goes_on_as_it_began() {
        let state = State::create().unwrap();
        state.region.store(header::EPOCH, 0);
        let nodes = Nodes::new(state, ROOT);
        let first = nodes.remember(id(7), None).unwrap();
        assert_eq!(first, NodeRef { node: 2, generation: 1 });
        nodes.forget(2, 1, || ());
        assert_eq!(nodes.remember(id(8), None).unwrap(), NodeRef { node: 2, generation: 2 });
    }

    /// What is noted elsewhere under the number was once forgotten a moment later, when it could be
    /// another file's. The owner of a lock was among it.
    #[test]
    fn a_number_is_not_reused_before_its_end_was_reported() {
        let nodes = Nodes::new(State::create().unwrap(), ROOT);
        let old = nodes.remember(id(7), None).unwrap().node;
        let (nodes, (sender, receiver)) = (&nodes, std::sync::mpsc::channel());
        std::thread::scope(|scope| {
            let next = scope.spawn(move || {
                receiver.recv().unwrap();
                nodes.remember(id(8), None).unwrap().node
            });
            nodes.forget(old, 1, || {
                sender.send(()).unwrap();
                std::thread::sleep(std::time::Duration::from_millis(20)); // to be found out
                assert!(!next.is_finished());
            });
            assert_eq!(next.join().unwrap(), old);
        });
    }

    #[test]
    fn a_successor_finds_what_was_there() {
        let state = State::create().unwrap();
        let node = Nodes::new(state.clone(), ROOT).remember(id(7), None).unwrap();
        let fd = state.fd().try_clone_to_owned().unwrap();
        drop(state);
        let nodes = Nodes::new(State::adopt(fd).unwrap(), ROOT);
        assert_eq!(nodes.id(node.node).unwrap(), id(7));
        assert_eq!(nodes.find(id(7)), Some(node.node));
        assert_eq!(nodes.remember(id(7), None).unwrap(), node);
    }

    #[test]
    fn it_is_known_what_the_kernel_takes_a_node_for() {
        let nodes = Nodes::new(State::create().unwrap(), ROOT);
        assert_eq!(nodes.type_of(ROOT_NODE), Some(FileType::Directory));
        let node = nodes.remember(id(7), None).unwrap().node;
        assert_eq!((nodes.type_of(node), nodes.type_of(99)), (None, None));
        for kind in [FileType::Socket, FileType::Regular, FileType::Symlink] {
            nodes.note_type(node, kind);
            assert_eq!(nodes.type_of(node), Some(kind));
        }
        nodes.mark_locked(node);
        assert!(nodes.type_of(node) == Some(FileType::Symlink) && nodes.was_locked(node));
        nodes.forget(node, 1, || ());
        let next = nodes.remember(id(8), None).unwrap().node;
        assert_eq!((next, nodes.type_of(next)), (node, None));
    }

    #[test]
    fn a_node_apart_is_nobody_else_s_after_a_death_either() {
        let state = State::create().unwrap();
        let nodes = Nodes::new(state.clone(), ROOT);
        let apart = nodes.remember_apart(id(7)).unwrap();
        assert_eq!(nodes.find(id(7)), None);
        let node = nodes.remember(id(7), None).unwrap();
        assert_ne!(apart.node, node.node);
        let again = nodes.remember_apart(id(7)).unwrap();
        assert_ne!(apart.node, again.node);
        drop(nodes);
        let nodes = Nodes::new(state, ROOT);
        assert_eq!(nodes.find(id(7)), Some(node.node));
        assert_eq!(nodes.id(apart.node).unwrap(), id(7));
        nodes.forget(again.node, 1, || ());
        assert_eq!(nodes.find(id(7)), Some(node.node));
    }

    #[test]
    fn numbers_never_given_out_are_stale() {
        let nodes = Nodes::new(State::create().unwrap(), ROOT);
        for node in [0, 2, u64::MAX] {
            assert_eq!(nodes.id(node).unwrap_err().errno(), Errno::ESTALE);
            nodes.forget(node, u64::MAX, || ());
        }
        nodes.forget(ROOT_NODE, 100, || ());
        assert!(nodes.id(ROOT_NODE).is_ok());
    }
}
