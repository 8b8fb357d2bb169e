use dray_core::{
    Lock, LockFamily, LockKind, LockOwner, LockRange, OpenHow, Origin, Pid, RequestId,
};

use super::slots::{IN_USE, LOST, taking};
use super::*;
use crate::client::holdings::locks::HeldLock;
use crate::wire::Ticket;

fn of_own(request: u64) -> Origin {
    Origin { node: NodeId::OWN, request: RequestId(request) }
}

/// A process that died in between left the new request with the number of the last one. Its
/// successor asked for that again, and took its answer for the new one's.
// proves: P94
#[test]
fn a_request_never_has_the_number_of_the_one_before_it() {
    for stored in 0..=3 {
        let memory = SessionMemory::heap();
        memory.set_slots(1);
        memory.take_slot(0, 5, of_own(100));
        memory.free_slot(0);
        for (index, word) in taking(0, 6, 102).into_iter().take(stored) {
            memory.set(index, word);
        }
        let slot = memory.slot(0);
        let expected = [(100, 5), (0, 5), (0, 6), (102, 6)][stored];
        assert_eq!((slot.origin.request.0, slot.sequence), expected);
        assert_eq!(slot.in_use, stored >= 2);
    }
}

#[test]
fn a_successor_finds_what_was_noted() {
    let memory = SessionMemory::create_memfd().unwrap();
    assert_eq!(memory.session(), None);
    let node = memory.node();
    assert_eq!(memory.export(), None);
    let info = FsInfo {
        uuid: FsUuid(5 << 64 | 6),
        root: FileId { ino: 7, generation: 8 },
        kind: String::new(),
        read_only: true,
    };
    memory.set_export(&info);
    memory.set_session(9, &[3; 16], 4);
    memory.set_slots(4);
    memory.take_slot(2, 7, of_own(100));
    memory.take_slot(3, 1, of_own(102));
    memory.free_slot(3);
    // Neighbours do not touch each other.
    memory.take_slot(SLOTS_MAX as u32 - 1, 5, of_own(104));
    (0..CLOSES_MAX as u32).for_each(|place| memory.set_close(place, 200));
    memory.remove_lock(0);
    let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
    drop(memory);
    let next = SessionMemory::from_fd(fd).unwrap();
    assert_eq!(next.node(), node);
    assert_eq!(next.export(), Some(info));
    assert_eq!(next.session(), Some((9, [3; 16], 4)));
    assert_eq!(next.reestablished(), (NO_INSTANCE, NO_INSTANCE));
    next.set_reestablished(4);
    next.set_session(9, &[3; 16], 5);
    assert_eq!(next.reestablished(), (4, 4));
    next.set_session(10, &[3; 16], 5);
    assert_eq!(next.reestablished(), (NO_INSTANCE, NO_INSTANCE));
    let slots = next.slots();
    assert_eq!(slots.len(), 4);
    let used = |number, sequence, request| SlotState {
        number,
        sequence,
        in_use: true,
        lost: false,
        origin: of_own(request),
    };
    assert_eq!(slots[2], used(2, 7, 100));
    assert_eq!(slots[3], SlotState { in_use: false, ..used(3, 1, 102) });
    let last = SLOTS_MAX as u32 - 1;
    assert_eq!(next.slot(last), used(last, 5, 104));
    assert!((0..CLOSES_MAX as u32).all(|place| next.close(place) == 200));
    assert!(next.locks().is_empty());
}

// proves: P137
#[test]
fn memory_of_another_layout_is_refused_by_name() {
    use std::os::unix::fs::FileExt;
    let refused = |first: &[u8; 8], bytes: Option<u64>| {
        let memory = SessionMemory::create_memfd().unwrap();
        let file = std::fs::File::from(memory.fd().unwrap().try_clone_to_owned().unwrap());
        file.write_all_at(first, 0).unwrap();
        bytes.into_iter().for_each(|bytes| file.set_len(bytes).unwrap());
        drop(memory);
        SessionMemory::from_fd(file.into()).err().map(|error| error.to_string())
    };
    assert_eq!(refused(b"drayse\0\x02", None), None);
    let said = refused(b"drayse\0\x63", None).unwrap();
    assert!(said.ends_with("its layout is version 99, this dray knows 2"), "{said}");
    assert!(refused(b"another\x02", None).unwrap().ends_with("it is something else"));
    let said = refused(b"drayse\0\x02", Some(4096)).unwrap();
    assert!(said.contains("it has 4096 bytes of"), "{said}");
}

/// A layout that changes is another version, or is longer than it was.
// proves: P137
#[test]
fn everything_stands_where_it_stood() {
    let begins = [FIRST_SLOT, FIRST_CLOSE, FIRST_LOCK, TICKETS_END, FIRST_TICKET];
    assert_eq!(begins, [8, 2048, 2112, 12_352, 12_353]);
    let begins = [FIRST_OPEN_AHEAD, ALIASES_END, FIRST_ALIAS, EXPORT, WORDS];
    assert_eq!(begins, [3_158_081, 3_158_145, 3_158_146, 5_255_298, 5_256_328]);
    assert_eq!([RECLAIMED, REOPENED], [5_256_326, 5_256_327]);
    let memory = SessionMemory::create_memfd().unwrap();
    memory.set(NODE, 4);
    memory.set_session(9, &std::array::from_fn(|index| index as u8), 6);
    memory.set_slots(5);
    memory.set_boot(7);
    memory.take_slot(1, 2, of_own(3));
    memory.lose_slot(1);
    memory.put_ticket(0, 5, Ticket([7; 16]));
    memory.put_alias(0, 6, 7);
    let words = [MAGIC, 9, 0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908, 4, 5, 6, 7];
    assert_eq!(std::array::from_fn(|index| memory.get(index)), words);
    let slot = [0, 0, 2 << 32 | LOST | IN_USE, 3, 0, 0];
    assert_eq!(std::array::from_fn(|index| memory.get(FIRST_SLOT + index)), slot);
    let ticket = [1, 5, 0x0707_0707_0707_0707, 0x0707_0707_0707_0707];
    assert_eq!(std::array::from_fn(|index| memory.get(TICKETS_END + index)), ticket);
    let alias = [1, 6, 7];
    assert_eq!(std::array::from_fn(|index| memory.get(ALIASES_END + index)), alias);
    let id = FileId { ino: 2, generation: 3 };
    let lock = Lock {
        family: LockFamily::Flock,
        kind: LockKind::Exclusive,
        range: LockRange { start: 5, end: 6 },
        owner: LockOwner { node: NodeId(9), number: 7 },
        pid: Pid(8),
    };
    memory.put_lock(0, &HeldLock { handle: 1, id, how: OpenHow::new(4), lock });
    let words = [0x102, 1, 2, 3, 4, 5, 6, 7, 8, 9];
    assert_eq!(std::array::from_fn(|index| memory.get(FIRST_LOCK + index)), words);
}

#[test]
fn memory_of_an_earlier_release_is_made_longer() {
    let memory = SessionMemory::create_memfd().unwrap();
    memory.set_session(9, &[3; 16], 4);
    let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
    drop(memory);
    // SAFETY: no memory is passed, and nothing is mapped any more.
    assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), OLD_BYTES as libc::off_t) }, 0);
    let next = SessionMemory::from_fd(fd).unwrap();
    assert_eq!(next.session(), Some((9, [3; 16], 4)));
    assert_eq!(next.reestablished(), (4, 4));
    let last = next.tickets_max() - 1;
    next.put_ticket(last, 5, Ticket([7; 16]));
    assert_eq!(next.ticket(last), Some((5, Ticket([7; 16]))));
    assert_eq!(next.export(), None);
    assert_eq!((next.ticket(0), next.tickets_end()), (None, last + 1));
}
