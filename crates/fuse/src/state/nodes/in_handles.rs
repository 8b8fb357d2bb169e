//! Nodes behind handles that the kernel has given out, for programs and for its NFS server: also those
//! that it has forgotten since.

use dray_core::{Errno, Error, FileId, Result};

use super::{FLAG_APART, FLAG_KEPT, Index, LOOKUPS, Nodes, REUSE};
use crate::proto::abi::init;
use crate::proto::reply::NodeRef;
use crate::state::header;

/// What a handle says, besides the node number: which use of it is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InHandle {
    pub(crate) id: FileId,
    generation: u64,
}

impl Nodes {
    /// What stands behind a node number in a handle, known to the kernel or forgotten. `ESTALE` if
    /// that is not known any more.
    pub(crate) fn in_handle(&self, node: u64) -> Result<InHandle> {
        let index = self.lock();
        let slot = self.slot_in(node).filter(|slot| self.is_known_to_kernel(&index, *slot));
        let slot =
            slot.ok_or_else(|| Error::new(Errno::ESTALE).because("a handle that is over"))?;
        Ok(InHandle { id: self.id_at(slot), generation: self.get(slot, REUSE) >> 32 })
    }

    /// The kernel is about to get `node`, as [`Nodes::in_handle`] has described it. `ESTALE`
    /// if that is not so any more.
    pub(crate) fn remember_handle(&self, node: u64, known: InHandle) -> Result<NodeRef> {
        let mut index = self.lock();
        let slot = self.slot_in(node).filter(|slot| {
            let now = (self.id_at(*slot), self.get(*slot, REUSE) >> 32);
            now == (known.id, known.generation) && self.is_known_to_kernel(&index, *slot)
        });
        let slot =
            slot.ok_or_else(|| Error::new(Errno::ESTALE).because("a handle that is over"))?;
        self.count_lookup(&mut index, slot);
        Ok(self.reference(slot))
    }

    /// Whether it is for everybody, and known to the kernel, or kept as the one node of its file.
    fn is_known_to_kernel(&self, index: &Index, slot: u64) -> bool {
        let flags = self.get(slot, REUSE);
        let kept = flags & FLAG_KEPT != 0 && index.slots.get(&self.id_at(slot)) == Some(&slot);
        flags & FLAG_APART == 0 && (self.get(slot, LOOKUPS) != 0 || kept)
    }

    /// Whether the kernel gives handles out and asks for what is behind them.
    pub(super) fn has_handles(&self) -> bool {
        self.state.region.load(header::INIT_FLAGS) & init::EXPORT_SUPPORT != 0
    }

    pub(super) fn keep_within_bound(&self, index: &mut Index) {
        while index.kept.is_full() && self.let_go_one(index) {}
    }

    /// Handles of the one that was forgotten longest ago end. False if none is kept.
    pub(super) fn let_go_one(&self, index: &mut Index) -> bool {
        let Some(slot) = index.kept.oldest() else { return false };
        let id = self.id_at(slot);
        if index.slots.get(&id) == Some(&slot) {
            index.slots.remove(&id);
        }
        self.set(slot, REUSE, self.get(slot, REUSE) & !FLAG_KEPT);
        index.free.push(slot);
        true
    }
}

#[cfg(test)]
mod tests {
    use dray_core::FileType;

    use super::super::forgotten::KEPT_MAX;
    use super::*;
    use crate::proto::abi::ROOT_NODE;
    use crate::state::State;

    const ROOT: FileId = FileId { ino: 2, generation: 0 };

    fn id(ino: u64) -> FileId {
        FileId { ino, generation: 1 }
    }

    /// With a kernel that has handles.
    fn with_handles(state: &State) -> Nodes {
        state.region.store(header::INIT_FLAGS, init::EXPORT_SUPPORT);
        Nodes::new(state.clone(), ROOT)
    }

    #[test]
    fn what_the_kernel_forgot_is_found_by_its_handle_also_by_a_successor() {
        let state = State::create().unwrap();
        let nodes = with_handles(&state);
        let first = nodes.remember(id(7), None).unwrap();
        nodes.note_type(first.node, FileType::Fifo);
        nodes.forget(first.node, 1, || ());
        assert_eq!((nodes.count(), nodes.find(id(7))), (1, None));
        assert_eq!(nodes.id(first.node).unwrap_err().errno(), Errno::ESTALE);
        let nodes = Nodes::new(state.clone(), ROOT);
        let known = nodes.in_handle(first.node).unwrap();
        assert_eq!((known.id, nodes.type_of(first.node)), (id(7), Some(FileType::Fifo)));
        assert_eq!(nodes.remember_handle(first.node, known).unwrap(), first);
        assert_eq!((nodes.count(), nodes.find(id(7))), (2, Some(first.node)));
        // By its name it has the same number, too, and another file does not get it.
        nodes.forget(first.node, 1, || ());
        let other = nodes.remember(id(8), None).unwrap();
        assert_ne!(other.node, first.node);
        assert_eq!(nodes.remember(id(7), None).unwrap(), first);
        let root = nodes.remember(ROOT, None).unwrap();
        assert_eq!(root, NodeRef { node: ROOT_NODE, generation: 0 });
    }

    // proves: P39
    #[test]
    fn of_too_many_handles_the_oldest_end_and_lead_to_nothing_else() {
        let state = State::create().unwrap();
        let nodes = with_handles(&state);
        let files: Vec<NodeRef> = (0..2 * KEPT_MAX as u64)
            .map(|ino| nodes.remember(id(100 + ino), None).unwrap())
            .collect();
        let known: Vec<InHandle> =
            files.iter().map(|file| nodes.in_handle(file.node).unwrap()).collect();
        files.iter().for_each(|file| nodes.forget(file.node, 1, || ()));
        assert!(files[KEPT_MAX..].iter().all(|file| nodes.in_handle(file.node).is_ok()));
        for (file, known) in files.iter().zip(&known).take(KEPT_MAX) {
            assert!(nodes.in_handle(file.node).is_err());
            assert!(nodes.remember_handle(file.node, *known).is_err());
        }
        // The handles' numbers are used again, with other generations, by which the kernel tells
        // them.
        for ino in 0..KEPT_MAX as u64 {
            let new = nodes.remember(id(500 + ino), None).unwrap();
            let at = files.iter().position(|file| file.node == new.node).unwrap();
            assert_ne!(new.generation, files[at].generation);
            assert!(nodes.remember_handle(new.node, known[at]).is_err());
        }
    }

    #[test]
    fn a_handle_of_another_mount_or_of_one_caller_alone_leads_to_nothing() {
        let [here, there] = [(), ()].map(|()| with_handles(&State::create().unwrap()));
        let [one, other] = [&here, &there].map(|nodes| nodes.remember(id(7), None).unwrap());
        assert!(one.node != other.node && one.generation != other.generation);
        assert!(here.in_handle(other.node).is_err() && there.in_handle(one.node).is_err());
        let apart = here.remember_apart(id(9)).unwrap();
        assert!(here.in_handle(apart.node).is_err());
        here.forget(apart.node, 1, || ());
        assert!(here.in_handle(apart.node).is_err());
        for made_up in [0, 2, u64::MAX, one.node + 1, one.node + 2, one.node | 1 << 63] {
            assert!(here.in_handle(made_up).is_err(), "{made_up:x}");
        }
    }
}
