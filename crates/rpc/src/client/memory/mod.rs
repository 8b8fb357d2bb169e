//! The state that a session needs to outlive the client's process. It is some words of memory that
//! somebody else may keep (a memfd held by a supervisor).
//!
//! ```text
//! word 0     magic and version           word 4  the client's node
//! word 1     session, 0 before the first word 5  slots
//! word 2, 3  its secret                  word 6  instance of the server
//!                                        word 7  boot of its machine, folded to one word
//! word 8+2n  slot n: sequence << 32 | of a session that is over << 1 | in use
//! word 9+2n  the request that it is, or was last, in use for
//! behind the slots: handles that were closed and that the server may have open; 0: none
//! behind those, ten words each: locks held; the first word is 0, or kind and family
//! behind those: places for tickets that were ever used; behind it, three words each: tickets
//! of open files; the first word is 0, or the number of the open file
//! behind those: numbers of files that a lookup may have opened, and nobody used so far; 0: none
//! behind those: places for names that were ever used; behind it, two words each: the request
//! by which an open file is known, or 0, and its number where that is another
//! behind those: 0, or 1 and whether the export is read only; its root, two words; its identity,
//! two words
//! behind those: how many processes have had it; the boot of the client's machine, two words
//! behind those, a word for each slot: the node of its request, 0: the client's own
//! behind those: the instance of the server where all locks are reclaimed, and the one where all
//! open files are reopened; 0: memory of an earlier release
//! ```
//! Each word is stored in one piece, a slot's request last and a lock's first word last. So a
//! successor finds the truth, whatever instruction the process died at. Memory of an earlier
//! release ends before the tickets, and is made longer.

mod file;
mod held;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use dray_core::{FileId, FsInfo, FsUuid, NodeId, Origin, RequestId};
use dray_rt::random_u64;

use crate::wire::CallHead;

/// "dray ses" and the version of the layout, 2: 1 had neither closes nor locks.
const MAGIC: u64 = u64::from_le_bytes(*b"drayse\0\x02");
/// Bits of the version in the first word, the upper ones.
const VERSION_BITS: u32 = 8;
const SESSION: usize = 1;
const SECRET: usize = 2;
const NODE: usize = 4;
const SLOTS: usize = 5;
const INSTANCE: usize = 6;
const BOOT: usize = 7;
const FIRST_SLOT: usize = 8;
/// Slots that there is room for; a server that grants more sees this many used.
pub(crate) const SLOTS_MAX: usize = 1020;
const FIRST_CLOSE: usize = FIRST_SLOT + 2 * SLOTS_MAX;
/// One-way closes that can be kept.
pub(crate) const CLOSES_MAX: usize = CallHead::ONE_WAY_MAX;
const FIRST_LOCK: usize = FIRST_CLOSE + CLOSES_MAX;
const LOCK_WORDS: usize = 10;
/// Locks that there is room for; a successor does not know of further ones.
pub(crate) const LOCKS_MAX: usize = 1024;
const TICKETS_END: usize = FIRST_LOCK + LOCK_WORDS * LOCKS_MAX;
const FIRST_TICKET: usize = TICKETS_END + 1;
const TICKET_WORDS: usize = 3;
/// Tickets that there is room for: as many open files as a server gives one session. Pages
/// that no ticket was in are never touched.
const TICKETS_MAX: usize = 1 << 20;
const FIRST_OPEN_AHEAD: usize = FIRST_TICKET + TICKET_WORDS * TICKETS_MAX;
/// Files that lookups may have opened at once.
pub(crate) const OPEN_AHEAD_MAX: usize = 64;
const ALIASES_END: usize = FIRST_OPEN_AHEAD + OPEN_AHEAD_MAX;
const FIRST_ALIAS: usize = ALIASES_END + 1;
const ALIASES_MAX: usize = TICKETS_MAX;
const EXPORT: usize = FIRST_ALIAS + 2 * ALIASES_MAX;
const EXPORT_KNOWN: u64 = 1;
const EXPORT_READ_ONLY: u64 = 2;
const PROCESSES: usize = EXPORT + 5;
const OWN_BOOT: usize = PROCESSES + 1;
const FIRST_NODE: usize = OWN_BOOT + 2;
const RECLAIMED: usize = FIRST_NODE + SLOTS_MAX;
const REOPENED: usize = RECLAIMED + 1;
const WORDS: usize = REOPENED + 1;
/// No instance of a server has this number: they are drawn at random.
const NO_INSTANCE: u64 = u64::MAX;
const BYTES: usize = WORDS * 8;
/// From the memory of one session to the next in one file: whole pages, of 64 KiB at most.
const STRIDE_BYTES: usize = BYTES.next_multiple_of(64 << 10);
/// The size of the memory of an earlier release.
const OLD_BYTES: usize = TICKETS_END * 8;
/// Memory that nobody takes over has no tickets.
const HEAP_WORDS: usize = FIRST_TICKET;

/// Memory of one session.
pub struct SessionMemory {
    start: NonNull<AtomicU64>,
    /// The memfd or file that it lies in; none: on the heap, and ours alone.
    fd: Option<OwnedFd>,
}

// SAFETY: the memory is only used as atomics.
unsafe impl Send for SessionMemory {}
// SAFETY: as above.
unsafe impl Sync for SessionMemory {}

fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// The stores that taking a slot makes, in this order. The slot's last request has got its answer,
/// and the new request is not to be taken for the last one.
fn taking(number: u32, sequence: u32, request: u64) -> [(usize, u64); 3] {
    let at = FIRST_SLOT + 2 * number as usize;
    [(at + 1, 0), (at, u64::from(sequence) << 32 | IN_USE), (at + 1, request)]
}

/// Bits of a slot's first word.
const IN_USE: u64 = 1;
const LOST: u64 = 2;

/// A slot as the process before us left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotState {
    pub(crate) number: u32,
    pub(crate) sequence: u32,
    pub(crate) in_use: bool,
    /// The server has given up the session in which it was used last: the outcome of its request is
    /// unknown, unless that has been answered.
    pub(crate) lost: bool,
    /// Where its request began; of the client itself the node is [`NodeId::OWN`].
    pub(crate) origin: Origin,
}

impl SessionMemory {
    /// Memory that ends with the process.
    pub fn heap() -> SessionMemory {
        let words: Box<[AtomicU64]> = (0..HEAP_WORDS).map(|_| AtomicU64::new(0)).collect();
        let start = NonNull::from(Box::leak(words)).cast(); // freed in `drop`
        SessionMemory { start, fd: None }
    }

    /// Memory that lasts as long as somebody holds [`SessionMemory::fd`]. Errors: those of
    /// memfd_create(2) and mmap(2).
    pub fn create_memfd() -> io::Result<SessionMemory> {
        // SAFETY: the name is a C string; no other memory is passed.
        let fd = unsafe { libc::memfd_create(c"dray-session".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, owned by nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        SessionMemory::lengthen(&fd, 0)?;
        SessionMemory::map(fd, 0)
    }

    fn lengthen(fd: &OwnedFd, index: usize) -> io::Result<()> {
        let len_bytes = (index * STRIDE_BYTES + BYTES) as libc::off_t;
        // SAFETY: no memory is passed.
        match unsafe { libc::ftruncate(fd.as_raw_fd(), len_bytes) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The memory of a process before us. Errors: it is none of this version (`InvalidData`, with
    /// words that say so); those of fstat(2), ftruncate(2) and mmap(2).
    pub fn from_fd(fd: OwnedFd) -> io::Result<SessionMemory> {
        SessionMemory::from_fd_at(fd, 0)
    }

    /// The memory of the session with this index among several sessions of one client, which lie in
    /// one file. Only pages that are written to take memory. Errors: as [`SessionMemory::from_fd`].
    pub fn from_fd_at(fd: OwnedFd, index: usize) -> io::Result<SessionMemory> {
        // SAFETY: an all-zero stat is valid, and the kernel writes to it during the call.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        if unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) } != 0 {
            return Err(io::Error::last_os_error());
        }
        if stat.st_size < OLD_BYTES as libc::off_t {
            return Err(refused(format!("it has {} bytes of {OLD_BYTES}", stat.st_size)));
        }
        if stat.st_size < (index * STRIDE_BYTES + BYTES) as libc::off_t {
            SessionMemory::lengthen(&fd, index)?;
        }
        let memory = SessionMemory::map(fd, index)?;
        match memory.word(0).load(Ordering::Acquire) {
            0 => Ok(memory), // it died before its first welcome
            MAGIC => {
                if memory.get(REOPENED) == 0 {
                    memory.set_reestablished(memory.get(INSTANCE)); // as an earlier release believed
                }
                Ok(memory)
            }
            other if other << VERSION_BITS == MAGIC << VERSION_BITS => {
                let [version, known] = [other, MAGIC].map(|word| word >> (64 - VERSION_BITS));
                Err(refused(format!("its layout is version {version}, this dray knows {known}")))
            }
            _ => Err(refused("it is something else".into())),
        }
    }

    fn map(fd: OwnedFd, index: usize) -> io::Result<SessionMemory> {
        // SAFETY: a fresh mapping of a file of at least this size that nobody cuts.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                (index * STRIDE_BYTES) as libc::off_t,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(SessionMemory { start, fd: Some(fd) })
    }

    /// The descriptor that a supervisor has to hold; none for memory on the heap.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(std::os::fd::AsFd::as_fd)
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < if self.fd.is_some() { WORDS } else { HEAP_WORDS });
        // SAFETY: within the memory, which lives as long as we do.
        unsafe { self.start.add(index).as_ref() }
    }

    fn get(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::Acquire)
    }

    fn set(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Release);
    }

    /// The client's node, drawn at random by the first process that asks.
    pub fn node(&self) -> NodeId {
        if self.get(NODE) == 0 {
            self.set(NODE, random_u64() | 1); // 0 is nobody
        }
        NodeId(self.get(NODE))
    }

    /// Whether its node is known, be it drawn or said.
    pub fn has_node(&self) -> bool {
        self.get(NODE) != 0
    }

    /// The client's node is `node`: that of another session of this client, whose requests and
    /// locks are known by the same numbers. To be said before the session begins.
    ///
    /// # Panics
    /// If it has another node already.
    pub fn set_node(&self, node: NodeId) {
        let known = self.get(NODE);
        assert!(known == 0 || known == node.0, "a session keeps its node");
        self.set(NODE, node.0);
    }

    /// The same once it has been drawn, before that [`NodeId::OWN`].
    pub(crate) fn drawn_node(&self) -> NodeId {
        NodeId(self.get(NODE))
    }

    /// Session, secret and server instance; none before the first welcome.
    pub(crate) fn session(&self) -> Option<(u64, [u8; 16], u64)> {
        let session = self.get(SESSION);
        let mut secret = [0; 16];
        secret[..8].copy_from_slice(&self.get(SECRET).to_le_bytes());
        secret[8..].copy_from_slice(&self.get(SECRET + 1).to_le_bytes());
        (session != 0).then(|| (session, secret, self.get(INSTANCE)))
    }

    /// Notes what a welcome says. The locks and files of another session are not reestablished in
    /// this one.
    pub(crate) fn set_session(&self, session: u64, secret: &[u8; 16], instance: u64) {
        if self.get(SESSION) != session {
            self.set_reestablished(NO_INSTANCE);
        }
        let half = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| secret[at + index]));
        self.set(SECRET, half(0));
        self.set(SECRET + 1, half(8));
        self.set(INSTANCE, instance);
        self.set(SESSION, session);
        self.set(0, MAGIC);
    }

    /// The instance of the server where all locks were reclaimed, and the one where all open files
    /// were reopened. A process that dies in the middle of that leaves the rest to its successor.
    pub(crate) fn reestablished(&self) -> (u64, u64) {
        match self.fd {
            Some(_) => (self.get(RECLAIMED), self.get(REOPENED)),
            None => (NO_INSTANCE, NO_INSTANCE),
        }
    }

    pub(crate) fn set_reclaimed(&self, instance: u64) {
        if self.fd.is_some() {
            self.set(RECLAIMED, instance);
        }
    }

    pub(crate) fn set_reestablished(&self, instance: u64) {
        self.set_reclaimed(instance);
        if self.fd.is_some() {
            self.set(REOPENED, instance);
        }
    }

    /// The start of the server's machine after which nothing has to be replayed any more; 0 for
    /// none.
    pub(crate) fn boot(&self) -> u64 {
        self.get(BOOT)
    }

    pub(crate) fn set_boot(&self, boot: u64) {
        self.set(BOOT, boot);
    }

    /// The export's properties, without those of the file system below. None before the first
    /// welcome, and in memory of an earlier release.
    pub(crate) fn export(&self) -> Option<FsInfo> {
        self.fd.as_ref()?;
        let words: [u64; 5] = std::array::from_fn(|index| self.get(EXPORT + index));
        let [state, ino, generation, low, high] = words;
        (state & EXPORT_KNOWN != 0).then(|| FsInfo {
            uuid: FsUuid(u128::from(high) << 64 | u128::from(low)),
            root: FileId { ino, generation },
            kind: String::new(),
            read_only: state & EXPORT_READ_ONLY != 0,
        })
    }

    /// Notes it for a successor, which is nothing to memory that nobody takes over.
    pub(crate) fn set_export(&self, info: &FsInfo) {
        if self.fd.is_none() {
            return;
        }
        let uuid = info.uuid.0;
        let words = [info.root.ino, info.root.generation, uuid as u64, (uuid >> 64) as u64];
        words.iter().enumerate().for_each(|(index, word)| self.set(EXPORT + 1 + index, *word));
        let read_only = if info.read_only { EXPORT_READ_ONLY } else { 0 };
        self.set(EXPORT, EXPORT_KNOWN | read_only);
    }

    /// The slots of the process before us; none if there was none.
    pub(crate) fn slots(&self) -> Vec<SlotState> {
        let count = (self.get(SLOTS) as usize).min(SLOTS_MAX);
        (0..count as u32).map(|number| self.slot(number)).collect()
    }

    fn slot(&self, number: u32) -> SlotState {
        let at = FIRST_SLOT + 2 * number as usize;
        let state = self.get(at);
        SlotState {
            number,
            sequence: (state >> 32) as u32,
            in_use: state & IN_USE != 0,
            lost: state & LOST != 0,
            origin: Origin { node: self.node_of(number), request: RequestId(self.get(at + 1)) },
        }
    }

    /// The node of a slot's request. Memory that nobody takes over has none.
    fn node_of(&self, number: u32) -> NodeId {
        if self.fd.is_some() { NodeId(self.get(FIRST_NODE + number as usize)) } else { NodeId::OWN }
    }

    /// Counts one more process that has it. Answers how many there were before.
    pub(crate) fn begin_process(&self) -> u64 {
        match self.fd {
            Some(_) => self.word(PROCESSES).fetch_add(1, Ordering::AcqRel),
            None => 0,
        }
    }

    pub(crate) fn set_slots(&self, count: u32) {
        self.set(SLOTS, u64::from(count));
    }

    /// Notes that a slot is in use, before anything is sent in it.
    pub(crate) fn take_slot(&self, number: u32, sequence: u32, origin: Origin) {
        let request = origin.request.0;
        if self.node_of(number) != origin.node && self.fd.is_some() {
            self.set(FIRST_SLOT + 2 * number as usize + 1, 0); // it is of neither in between
            self.set(FIRST_NODE + number as usize, origin.node.0);
        }
        taking(number, sequence, request).iter().for_each(|(index, word)| self.set(*index, *word));
    }

    /// The handle in one of the places for closes, 0 if it is free.
    pub(crate) fn close(&self, place: u32) -> u64 {
        self.get(FIRST_CLOSE + place as usize)
    }

    pub(crate) fn set_close(&self, place: u32, handle: u64) {
        self.set(FIRST_CLOSE + place as usize, handle);
    }

    /// The slot's change has been answered, or nobody waits for it.
    pub(crate) fn free_slot(&self, number: u32) {
        self.slot_word(number).fetch_and(!IN_USE, Ordering::AcqRel);
    }

    /// The session in which it was used is over.
    pub(crate) fn lose_slot(&self, number: u32) {
        self.slot_word(number).fetch_or(LOST, Ordering::AcqRel);
    }

    /// The slot's change is made in the session that there is now.
    pub(crate) fn keep_slot(&self, number: u32) {
        self.slot_word(number).fetch_and(!LOST, Ordering::AcqRel);
    }

    fn slot_word(&self, number: u32) -> &AtomicU64 {
        self.word(FIRST_SLOT + 2 * number as usize)
    }
}

impl Drop for SessionMemory {
    fn drop(&mut self) {
        match self.fd {
            // SAFETY: mapped by us with this length; nobody can refer to it any more.
            Some(_) => unsafe {
                libc::munmap(self.start.as_ptr().cast(), BYTES);
            },
            // SAFETY: leaked from a box of this length in `heap`.
            None => unsafe {
                let words = std::ptr::slice_from_raw_parts_mut(self.start.as_ptr(), HEAP_WORDS);
                drop(Box::from_raw(words));
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_own(request: u64) -> Origin {
        Origin { node: NodeId::OWN, request: RequestId(request) }
    }
    use crate::client::holdings::locks::HeldLock;
    use crate::wire::Ticket;
    use dray_core::{Lock, LockFamily, LockKind, LockOwner, LockRange, OpenHow, Pid};

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
}
