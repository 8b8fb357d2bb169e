//! The memory of ring entries: a page of headers and a payload for each entry.
//!
//! This memory outlives the daemon: it lies behind the tables of [`State`], and a successor maps it
//! at the addresses that the kernel was given. So the requests that a daemon had when it died are
//! there for its successor. The journal in each page says how far they had come.
//!
//! ```text
//! page    0  the kernel's block of headers        512  journal
//!      1024  what an answer overwrote             3072  the two memory areas, for the kernel
//! ```

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use dray_core::IO_MAX_BYTES;

use crate::mount::pages::PAGES_MAX;
use crate::state::{State, header};

/// Bytes of an entry's header page.
pub(crate) const PAGE_BYTES: usize = 4096;
/// Bytes of a payload: the largest READ or WRITE.
pub(crate) const PAYLOAD_BYTES: usize = IO_MAX_BYTES;
/// Bytes of memory for the payload of an entry. The kernel wants room for all pages that a request
/// may have, of which the first and the last are not whole.
const ROOM_BYTES: usize = PAGES_MAX * PAGE_BYTES;
/// Bytes of the part of the page that the kernel uses.
pub(crate) const HEADERS_BYTES: usize = 288;
/// Words of the journal. The first is the queue's CPU plus one (0: never used). Then come the
/// request whose overwritten bytes are kept, and how many of them are payload. The last is the
/// request whose answer is complete.
const CPU_AT: usize = 512;
const KEPT_AT: usize = 520;
const KEPT_PAYLOAD_AT: usize = 528;
const ANSWERED_AT: usize = 536;
/// Where the overwritten bytes are kept: headers, then the beginning of the payload.
const KEEP_AT: usize = 1024;
/// Where in the page the kernel finds the addresses of the two memory areas.
const IOVEC_AT: usize = 3072;
/// Most bytes of a request's payload that an answer may overwrite. Requests with a larger
/// payload are answered with less: a WRITE, the value of an attribute.
pub(crate) const OVERWRITTEN_MAX: usize = IOVEC_AT - KEEP_AT - HEADERS_BYTES;
/// Where the memory is wanted: above programs and their heaps, below libraries and stacks, with
/// 39-bit addresses, too. So it is free in every successor.
const WANTED_ADDRESS: usize = 0x20_0000_0000;

/// Where the next area is wanted. A process has one area; only tests have many at a time. An area
/// that finds its address taken is moved to where others map memory, too. Its successor may then
/// not get that address again.
fn wanted_address() -> usize {
    #[cfg(test)]
    {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static AREAS: AtomicUsize = AtomicUsize::new(0);
        WANTED_ADDRESS + (AREAS.fetch_add(1, Ordering::Relaxed) << 32)
    }
    #[cfg(not(test))]
    WANTED_ADDRESS
}

pub(crate) struct Area {
    start: NonNull<u8>,
    slots: usize,
    /// Bytes of memory for the payload of a slot.
    room_bytes: usize,
    /// Slots that a predecessor had taken; they come first.
    adopted: usize,
    state: State,
}

// SAFETY: the mapping is valid on every thread; each slot is handed out once.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl Area {
    /// The area of `state`: a predecessor's, or a new one with room for `slots` entries. Memory is
    /// taken for those parts that are used. Errors: those of ftruncate(2) and mmap(2); `EADDRINUSE`
    /// if the addresses of a predecessor are taken in this process. `EINVAL` if what it says of
    /// itself cannot be.
    pub(crate) fn open(state: &State, slots: usize) -> io::Result<Area> {
        let region = &state.region;
        let (address, known) = (region.load(header::RING_ADDRESS), region.load(header::RING_SLOTS));
        if known != 0 {
            let room_bytes = match region.load(header::RING_ROOM) as usize {
                0 => PAYLOAD_BYTES,
                room_bytes => room_bytes,
            };
            if !(PAYLOAD_BYTES..=ROOM_BYTES).contains(&room_bytes)
                || known > slots_in(state, room_bytes)?
            {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            let mut area = Area::map(state, address as usize, known as usize, room_bytes)?;
            if area.start.as_ptr() as u64 != address {
                return Err(io::Error::from_raw_os_error(libc::EADDRINUSE));
            }
            area.adopted = region.load(header::RING_TAKEN).min(known) as usize;
            return Ok(area);
        }
        let len_bytes = State::ring_at() + slots * (PAGE_BYTES + ROOM_BYTES);
        // SAFETY: no memory is passed.
        if unsafe { libc::ftruncate(region.fd().as_raw_fd(), len_bytes as libc::off_t) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let area = Area::map(state, wanted_address(), slots, ROOM_BYTES)?;
        region.store(header::RING_ADDRESS, area.start.as_ptr() as u64);
        region.store(header::RING_ROOM, ROOM_BYTES as u64);
        region.store(header::RING_SLOTS, slots as u64);
        Ok(area)
    }

    /// Maps it at `address`, or elsewhere if that is taken.
    fn map(state: &State, address: usize, slots: usize, room_bytes: usize) -> io::Result<Area> {
        let len_bytes = slots * (PAGE_BYTES + room_bytes);
        let map = |address: usize, flags| {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | flags;
            let (fd, at) = (state.region.fd().as_raw_fd(), State::ring_at() as libc::off_t);
            // SAFETY: nothing that is mapped is replaced.
            unsafe { libc::mmap(address as *mut _, len_bytes, protection, flags, fd, at) }
        };
        let mut start = map(address, libc::MAP_FIXED_NOREPLACE);
        if start == libc::MAP_FAILED {
            start = map(0, 0);
        }
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the range is the mapping just made; it changes nothing but core dumps,
        // which would else take memory for all of it.
        unsafe { libc::madvise(start, len_bytes, libc::MADV_DONTDUMP) };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Area { start, slots, room_bytes, adopted: 0, state: state.clone() })
    }

    fn slot(&self, index: usize) -> AreaEntry {
        assert!(index < self.slots);
        // SAFETY: within the mapping: headers in front, payloads behind all of them, so that
        // those are aligned to pages and lie side by side.
        unsafe {
            AreaEntry {
                page: self.start.add(index * PAGE_BYTES),
                payload: self.start.add(self.slots * PAGE_BYTES + index * self.room_bytes),
            }
        }
    }

    /// A slot for one more entry of the queue of `cpu`; none when all are taken. They are
    /// never given back: the kernel has no command for it.
    pub(crate) fn take(&self, cpu: u16) -> Option<AreaEntry> {
        let taken = self.state.region.word(header::RING_TAKEN);
        let next = |taken| (taken < self.slots as u64).then_some(taken + 1);
        let index = taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).ok()?;
        let slot = self.slot(index as usize);
        slot.prepare(self.room_bytes, 0);
        slot.word(CPU_AT).store(u64::from(cpu) + 1, Ordering::Release);
        Some(slot)
    }

    /// The slots that a predecessor had used for the queue of `cpu`, and how many bytes of each
    /// one's payload have memory.
    pub(crate) fn adopted(&self, cpu: u16) -> impl Iterator<Item = (AreaEntry, usize)> {
        let slots = (0..self.adopted).map(|index| (index, self.slot(index)));
        slots.filter(move |(_, slot)| slot.cpu() == Some(cpu)).map(|(index, slot)| {
            let used_bytes = self.used_bytes(index);
            slot.prepare(self.room_bytes, used_bytes);
            (slot, used_bytes)
        })
    }

    /// Gives the memory of a payload back, but for its first page: what is there is lost. The
    /// slot holds a request, so that the kernel puts nothing into it meanwhile. Errors: those of
    /// madvise(2).
    pub(crate) fn give_back(&self, slot: &AreaEntry) -> io::Result<()> {
        let len_bytes = self.room_bytes - PAGE_BYTES;
        // SAFETY: whole pages within the mapping; those who use the slot own what is in them.
        let done = unsafe {
            let rest = slot.payload.add(PAGE_BYTES);
            libc::madvise(rest.as_ptr().cast(), len_bytes, libc::MADV_REMOVE)
        };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// How much of the payload of a slot has been used, so that there is memory for it.
    fn used_bytes(&self, index: usize) -> usize {
        let payloads = State::ring_at() + self.slots * PAGE_BYTES;
        let start = (payloads + index * self.room_bytes) as libc::off_t;
        let memory = self.state.region.fd().as_raw_fd();
        // SAFETY: numbers only. Nobody goes by the position of this descriptor.
        let end = unsafe { libc::lseek(memory, start, libc::SEEK_HOLE) };
        usize::try_from(end - start).map_or(0, |used| used.min(self.room_bytes))
    }
}

/// Slots that there is room for in the memory of `state`: access behind its end kills (SIGBUS).
fn slots_in(state: &State, room_bytes: usize) -> io::Result<u64> {
    let file = std::fs::File::from(state.region.fd().try_clone_to_owned()?);
    let ring_bytes = file.metadata()?.len().saturating_sub(State::ring_at() as u64);
    Ok(ring_bytes / (PAGE_BYTES + room_bytes) as u64)
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; every entry keeps the area alive.
        unsafe {
            let len_bytes = self.slots * (PAGE_BYTES + self.room_bytes);
            libc::munmap(self.start.as_ptr().cast(), len_bytes);
        }
    }
}

/// The memory of one entry. The accesses to it must not overlap with those of the kernel,
/// nor with each other: it belongs to the entry's task.
#[derive(Clone, Copy)]
pub(crate) struct AreaEntry {
    page: NonNull<u8>,
    pub(crate) payload: NonNull<u8>,
}

impl AreaEntry {
    /// Address of the two iovecs for the kernel.
    pub(crate) fn vectors(&self) -> u64 {
        // SAFETY: within the page.
        unsafe { self.page.add(IOVEC_AT).as_ptr() as u64 }
    }

    /// `used_bytes`: of the payload, by a predecessor.
    fn prepare(&self, room_bytes: usize, used_bytes: usize) {
        let vectors = [
            libc::iovec { iov_base: self.page.as_ptr().cast(), iov_len: HEADERS_BYTES },
            libc::iovec { iov_base: self.payload.as_ptr().cast(), iov_len: room_bytes },
        ];
        // SAFETY: within the page, and aligned; the range of madvise is mapped, and is not changed
        // by it. What the kernel writes to should be there, and mapped in this process. The kernel
        // gives up a request for which it has to see to that while the process is being killed.
        unsafe {
            self.page.add(IOVEC_AT).cast::<[libc::iovec; 2]>().write(vectors);
            let mapped_bytes = used_bytes.max(PAGE_BYTES);
            libc::madvise(self.payload.as_ptr().cast(), mapped_bytes, libc::MADV_POPULATE_WRITE);
        }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: within the page, aligned, and only ever used as an atomic.
        unsafe { self.page.add(at).cast::<AtomicU64>().as_ref() }
    }

    /// The CPU whose queue it is used for; none: it never was.
    fn cpu(&self) -> Option<u16> {
        let word = self.word(CPU_AT).load(Ordering::Acquire);
        u16::try_from(word.checked_sub(1)?).ok()
    }

    /// The kernel's block of headers.
    pub(crate) fn headers(&self) -> &[u8] {
        // SAFETY: the page is mapped, and the kernel does not write it while the entry is
        // ours.
        unsafe { std::slice::from_raw_parts(self.page.as_ptr(), HEADERS_BYTES) }
    }

    /// Writes into the block of headers.
    pub(crate) fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= HEADERS_BYTES);
        // SAFETY: within the block of headers, to which no reference is alive here.
        unsafe { copy(bytes.as_ptr(), self.page.as_ptr().add(at), bytes.len()) };
    }

    /// Writes into the payload as much as there is room for; answers how much.
    pub(crate) fn fill(&self, bytes: &[u8]) -> usize {
        let len = bytes.len().min(PAYLOAD_BYTES);
        // SAFETY: the payload is mapped, and nobody else uses it now.
        unsafe { copy(bytes.as_ptr(), self.payload.as_ptr(), len) };
        len
    }

    /// Keeps what an answer to `request` is about to overwrite: the headers and the first
    /// `payload_len` bytes of the payload, at most [`OVERWRITTEN_MAX`].
    pub(crate) fn keep(&self, request: u64, payload_len: usize) {
        assert!(payload_len <= OVERWRITTEN_MAX);
        // SAFETY: both are within the page and the payload, and do not overlap.
        unsafe {
            let kept = self.page.as_ptr().add(KEEP_AT);
            copy(self.page.as_ptr(), kept, HEADERS_BYTES);
            copy(self.payload.as_ptr(), kept.add(HEADERS_BYTES), payload_len);
        }
        self.word(KEPT_PAYLOAD_AT).store(payload_len as u64, Ordering::Release);
        self.word(KEPT_AT).store(request, Ordering::Release);
        // A kill leaves what was stored before the instruction that it came at, so only the
        // compiler could have the overwriting overtake this.
        compiler_fence(Ordering::SeqCst);
    }

    /// Marks the answer to `request` as complete.
    pub(crate) fn answered(&self, request: u64) {
        self.word(ANSWERED_AT).store(request, Ordering::Release);
    }

    /// Whether the answer to `request` lies here, complete.
    pub(crate) fn is_answered(&self, request: u64) -> bool {
        self.word(ANSWERED_AT).load(Ordering::Acquire) == request
    }

    /// Puts back what a predecessor's answer to `request` has overwritten, if it had begun.
    pub(crate) fn restore(&self, request: u64) {
        if self.word(KEPT_AT).load(Ordering::Acquire) != request {
            return;
        }
        let payload_len = self.word(KEPT_PAYLOAD_AT).load(Ordering::Acquire) as usize;
        // SAFETY: both are within the page and the payload, and do not overlap.
        unsafe {
            let kept = self.page.as_ptr().add(KEEP_AT);
            copy(kept, self.page.as_ptr(), HEADERS_BYTES);
            copy(kept.add(HEADERS_BYTES), self.payload.as_ptr(), payload_len.min(OVERWRITTEN_MAX));
        }
    }

    /// Has the first `len` bytes of the payload mapped for reading: they were written by
    /// another process.
    pub(crate) fn touch(&self, len: usize) {
        for at in (0..len.min(PAYLOAD_BYTES)).step_by(PAGE_BYTES) {
            // SAFETY: within the payload, which is mapped.
            unsafe { self.payload.as_ptr().add(at).read_volatile() };
        }
    }
}

/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller's.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(slot: &AreaEntry, len: usize) -> Vec<u8> {
        // SAFETY: within the payload.
        unsafe { std::slice::from_raw_parts(slot.payload.as_ptr(), len) }.to_vec()
    }

    // proves: P94
    #[test]
    fn a_successor_finds_requests_where_they_were() {
        let state = State::create().unwrap();
        let area = Area::open(&state, 3).unwrap();
        let start = area.start;
        let slot = area.take(1).unwrap();
        area.take(0).unwrap();
        slot.put(0, b"the head");
        slot.fill(b"a name");
        drop(area);
        let area = Area::open(&state, 7).unwrap();
        assert_eq!((area.start, area.slots), (start, 3));
        let (slot, used_bytes) = area.adopted(1).next().unwrap();
        assert_eq!(&slot.headers()[..8], b"the head");
        assert_eq!((bytes(&slot, 6), used_bytes), (b"a name".to_vec(), PAGE_BYTES));
        assert_eq!((area.adopted(0).count(), area.adopted(1).count()), (1, 1));
        assert!(area.take(0).is_some() && area.take(0).is_none());
    }

    /// Pages of memory from `at` on that this process has mapped.
    fn mapped_pages(at: *mut u8, pages: usize) -> usize {
        use std::os::unix::fs::FileExt;
        let map = std::fs::File::open("/proc/self/pagemap").unwrap();
        let is_mapped = |page: usize| {
            let mut word = [0; 8];
            map.read_exact_at(&mut word, ((at as usize / PAGE_BYTES + page) * 8) as u64).unwrap();
            u64::from_ne_bytes(word) >> 63 == 1
        };
        (0..pages).filter(|page| is_mapped(*page)).count()
    }

    /// Large WRITEs failed with EINTR where a successor was killed as the kernel copied them. They
    /// went to memory of a predecessor that it had not mapped so far.
    #[test]
    fn a_successor_has_mapped_what_was_used() {
        let state = State::create().unwrap();
        let area = Area::open(&state, 3).unwrap();
        let slots = [0; 3].map(|cpu| area.take(cpu).unwrap());
        slots[0].fill(&[7; 300_000]);
        slots[2].fill(&[7; PAYLOAD_BYTES]);
        drop(area);
        let area = Area::open(&state, 3).unwrap();
        let pages = ROOM_BYTES / PAGE_BYTES;
        let mapped = area.adopted(0).map(|(slot, _)| mapped_pages(slot.payload.as_ptr(), pages));
        assert_eq!(mapped.collect::<Vec<_>>(), [74, 1, PAYLOAD_BYTES / PAGE_BYTES]);
    }

    #[test]
    fn memory_is_given_back_but_for_the_first_page_of_that_payload() {
        let state = State::create().unwrap();
        let area = Area::open(&state, 3).unwrap();
        let slots = [0; 3].map(|cpu| area.take(cpu).unwrap());
        slots.iter().for_each(|slot| _ = slot.fill(&[7; PAYLOAD_BYTES]));
        area.give_back(&slots[1]).unwrap();
        let pages = ROOM_BYTES / PAGE_BYTES;
        let mapped = slots.map(|slot| mapped_pages(slot.payload.as_ptr(), pages));
        assert_eq!(mapped, [PAYLOAD_BYTES / PAGE_BYTES, 1, PAYLOAD_BYTES / PAGE_BYTES]);
        assert_eq!(
            [0, 1, 2].map(|index| area.used_bytes(index)),
            [PAYLOAD_BYTES, PAGE_BYTES, PAYLOAD_BYTES]
        );
        assert_eq!(
            bytes(&slots[1], PAYLOAD_BYTES),
            [&[7; 4096][..], &[0; PAYLOAD_BYTES - 4096]].concat()
        );
    }

    /// The memory of a predecessor whose entries had less room.
    #[test]
    fn a_successor_finds_requests_of_an_older_version_where_they_were() {
        let state = State::create().unwrap();
        drop(Area::open(&state, 3).unwrap());
        state.region.store(header::RING_ROOM, 0);
        let area = Area::open(&state, 3).unwrap();
        let payloads = [0, 1].map(|index| area.slot(index).payload.as_ptr() as usize);
        assert_eq!(payloads[1] - payloads[0], IO_MAX_BYTES);
        state.region.store(header::RING_ROOM, 2 * ROOM_BYTES as u64);
        assert!(Area::open(&state, 3).is_err());
    }

    /// A wrong number of slots was believed: the size of the mapping wrapped around, and slots lay
    /// outside of it.
    #[test]
    fn what_a_predecessor_says_of_itself_is_not_believed_blindly() {
        let state = State::create().unwrap();
        drop(Area::open(&state, 3).unwrap());
        state.region.store(header::RING_TAKEN, u64::MAX);
        assert_eq!(Area::open(&state, 3).unwrap().adopted, 3);
        for slots in [4, u64::MAX / PAGE_BYTES as u64, u64::MAX] {
            state.region.store(header::RING_SLOTS, slots);
            let refused = Area::open(&state, 3).err().and_then(|error| error.raw_os_error());
            assert_eq!(refused, Some(libc::EINVAL), "{slots}");
        }
    }

    // proves: P94
    #[test]
    fn what_a_half_written_answer_overwrote_comes_back() {
        let state = State::create().unwrap();
        let area = Area::open(&state, 1).unwrap();
        let slot = area.take(0).unwrap();
        slot.put(0, b"request");
        slot.fill(b"old name");
        slot.keep(8, 3);
        slot.put(0, b"answer!");
        slot.fill(b"ANS");
        slot.restore(6);
        assert_eq!(&slot.headers()[..7], b"answer!");
        slot.restore(8);
        assert_eq!(&slot.headers()[..7], b"request");
        assert_eq!(bytes(&slot, 8), b"old name");
        assert!(!slot.is_answered(8));
        slot.answered(8);
        assert!(slot.is_answered(8));
    }
}
