//! Owned data buffers.
//!
//! The memory of a buffer belongs to a [`Memory`] owner. The owner is the heap, a slot of a
//! registered pool, or the payload of a FUSE ring entry. Every buffer over that memory keeps the
//! owner alive. A dropped future cannot stop a NIC, so the code that starts a transfer holds a
//! buffer until the transfer is complete. An owner learns from its drop that its memory is free. An
//! owner that keeps one reference for itself learns it from being the only holder.

use std::cell::UnsafeCell;
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::ops::{Deref, Range};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Whatever keeps a buffer's memory valid and in place until it is dropped.
pub trait Memory: Send + Sync + 'static {
    /// Where the content lies, if that is not the memory.
    fn pages(&self) -> Option<&dyn Pages> {
        None
    }

    /// The region that the memory is a part of, if it has been registered.
    fn region(&self) -> Option<RegionId> {
        None
    }
}

/// A piece of memory that is registered with a network card or with another process, so that its
/// data are moved without a copy. The code that registers it chooses a number that is unique in
/// this process, and maps that number to the card's key. Sockets know no regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u32);

/// An owner of memory, and what is kept as long.
struct KeptWith<T> {
    memory: Arc<dyn Memory>,
    _beside: T,
}

impl<T: Send + Sync + 'static> Memory for KeptWith<T> {
    fn pages(&self) -> Option<&dyn Pages> {
        self.memory.pages()
    }

    fn region(&self) -> Option<RegionId> {
        self.memory.region()
    }
}

/// Takes bytes out of a pipe. It gets the pipe's end and the most bytes to take, and answers how
/// many it took.
pub type Take<'a> = &'a mut dyn FnMut(BorrowedFd<'_>, usize) -> io::Result<usize>;

/// Content of a buffer that lies in pages of the kernel. The kernel can move it on without a copy
/// of ours. A reader of the buffer causes a copy into its memory.
pub trait Pages: Send + Sync {
    /// Has `to` take what lies behind the first `at` bytes, which have been taken before. None
    /// where the content is in the memory. Errors: those of `to`.
    fn take(&self, at: usize, to: Take<'_>) -> Option<io::Result<usize>>;

    /// Copies the content into the memory, if it is not there. Nothing may have been taken.
    fn fetch(&self);
}

static COPIED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Bytes that [`BufMut::put`] copied since the process began, all threads together: the
/// copies of file data that our own code makes. On the hot path there should be none.
pub fn copied_bytes() -> u64 {
    COPIED_BYTES.load(Ordering::Relaxed)
}

struct Heap(#[allow(dead_code)] Box<[MaybeUninit<u8>]>); // held for its memory alone

impl Memory for Heap {}

/// Bytes up to this number are kept beside their count of users.
const SHORT_BYTES: usize = 128;

/// The memory of a short buffer, which is one allocation. Nearly all messages are short.
#[repr(align(8))]
struct Short(UnsafeCell<[MaybeUninit<u8>; SHORT_BYTES]>);

impl Memory for Short {}

// SAFETY: the bytes are touched through the one buffer being filled, or read by all.
unsafe impl Sync for Short {}

/// A unique buffer being filled. Only the filled part can be read or leave.
pub struct BufMut {
    start: NonNull<u8>,
    room_bytes: usize,
    filled_bytes: usize,
    owner: Arc<dyn Memory>,
}

// SAFETY: BufMut has exclusive access to its range, and the owner is Send and Sync.
unsafe impl Send for BufMut {}
// SAFETY: shared references give read access only.
unsafe impl Sync for BufMut {}

impl BufMut {
    /// An empty buffer of `capacity_bytes` on the heap.
    pub fn heap(capacity_bytes: usize) -> BufMut {
        if capacity_bytes <= SHORT_BYTES {
            let memory = Arc::new(Short(UnsafeCell::new([const { MaybeUninit::uninit() }; _])));
            let start = NonNull::from(&memory.0).cast();
            return BufMut { start, room_bytes: capacity_bytes, filled_bytes: 0, owner: memory };
        }
        let mut memory: Box<[MaybeUninit<u8>]> = Box::new_uninit_slice(capacity_bytes);
        let start = NonNull::from(&mut *memory).cast();
        BufMut { start, room_bytes: capacity_bytes, filled_bytes: 0, owner: Arc::new(Heap(memory)) }
    }

    /// An empty buffer over memory that `owner` keeps.
    ///
    /// # Safety
    ///
    /// `start..start + capacity_bytes` stays valid while `owner` lives. No other code reads or
    /// writes it while this buffer, or one made from it, lives.
    pub unsafe fn over(
        start: NonNull<u8>,
        capacity_bytes: usize,
        owner: Arc<dyn Memory>,
    ) -> BufMut {
        BufMut { start, room_bytes: capacity_bytes, filled_bytes: 0, owner }
    }

    /// The same memory filled with `bytes` that lie in pages: `make` is given the memory's
    /// beginning and its owner, and returns the owner of both. Asserts that there is room.
    ///
    /// # Safety
    /// [`Pages::fetch`] of the new owner initialises that many bytes from the beginning on. It
    /// writes to the memory when it is called for the first time, and never again.
    pub unsafe fn filled_with_pages(
        self,
        bytes: usize,
        make: impl FnOnce(NonNull<u8>, Arc<dyn Memory>) -> Arc<dyn Memory>,
    ) -> BufMut {
        assert!(bytes <= self.room_bytes && self.filled_bytes == 0);
        let owner = make(self.start, self.owner);
        BufMut { start: self.start, room_bytes: self.room_bytes, filled_bytes: bytes, owner }
    }

    /// The registered region that its memory is a part of, if there is one.
    pub fn region(&self) -> Option<RegionId> {
        self.owner.region()
    }

    /// Bytes that it can hold in all.
    pub fn capacity(&self) -> usize {
        self.room_bytes
    }

    /// Bytes filled so far.
    pub fn len(&self) -> usize {
        self.filled_bytes
    }

    /// Whether nothing has been filled in.
    pub fn is_empty(&self) -> bool {
        self.filled_bytes == 0
    }

    /// Bytes that can still be filled.
    pub fn room(&self) -> usize {
        self.room_bytes - self.filled_bytes
    }

    /// The filled part.
    pub fn filled(&self) -> &[u8] {
        fetch(&*self.owner);
        // SAFETY: the first `filled_bytes` are initialised, and we are their only user.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.filled_bytes) }
    }

    /// The part not filled yet; tell [`BufMut::advance`] how much of it was.
    pub fn spare(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: within the buffer's range, of which we are the only user.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.start.as_ptr().add(self.filled_bytes).cast(),
                self.room_bytes - self.filled_bytes,
            )
        }
    }

    /// Counts the next `bytes` of the spare part as filled.
    ///
    /// # Safety
    /// They have been initialised. (That they are within the room is asserted.)
    pub unsafe fn advance(&mut self, bytes: usize) {
        assert!(bytes <= self.room(), "a buffer of {} bytes overfilled", self.room_bytes);
        self.filled_bytes += bytes;
    }

    /// Appends as much of `bytes` as there is room for; answers how much that was.
    pub fn put(&mut self, bytes: &[u8]) -> usize {
        let count = bytes.len().min(self.room());
        // SAFETY: count bytes fit behind the filled part; source and target do not
        // overlap, since nobody else can refer to our memory.
        unsafe {
            let target = self.start.as_ptr().add(self.filled_bytes);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, count);
        }
        self.filled_bytes += count;
        COPIED_BYTES.fetch_add(count as u64, Ordering::Relaxed);
        count
    }

    /// Appends up to `bytes` zeros.
    pub fn put_zeros(&mut self, bytes: usize) -> usize {
        let count = bytes.min(self.room());
        // SAFETY: count bytes fit behind the filled part.
        unsafe { self.start.as_ptr().add(self.filled_bytes).write_bytes(0, count) };
        self.filled_bytes += count;
        count
    }

    /// Forgets what was filled in.
    pub fn clear(&mut self) {
        self.filled_bytes = 0;
    }

    /// Forgets what was filled in beyond `bytes`.
    pub fn truncate(&mut self, bytes: usize) {
        self.filled_bytes = self.filled_bytes.min(bytes);
    }

    /// Splits a buffer: keeps `at` bytes, returns the rest, which is empty, so that several
    /// transfers can fill one buffer side by side. Asserts `len <= at <= capacity`.
    pub fn split_off(&mut self, at: usize) -> BufMut {
        let empty_behind = self.filled_bytes <= at && at <= self.room_bytes;
        assert!(empty_behind, "a buffer is split where nothing is filled");
        let rest = BufMut {
            // SAFETY: `at` is within the buffer.
            start: unsafe { self.start.add(at) },
            room_bytes: self.room_bytes - at,
            filled_bytes: 0,
            owner: self.owner.clone(),
        };
        self.room_bytes = at;
        rest
    }

    /// Whether `rest` is what [`BufMut::split_off`] returned of this one.
    pub fn is_followed_by(&self, rest: &BufMut) -> bool {
        let end = self.start.as_ptr().wrapping_add(self.room_bytes);
        end == rest.start.as_ptr() && Arc::ptr_eq(&self.owner, &rest.owner)
    }

    /// Undoes [`BufMut::split_off`]: `rest` is what that returned, asserted. Bytes that are filled
    /// behind a gap are forgotten.
    pub fn rejoin(&mut self, rest: BufMut) {
        assert!(self.is_followed_by(&rest), "not the other part of this buffer");
        if self.filled_bytes == self.room_bytes {
            self.filled_bytes += rest.filled_bytes;
        }
        self.room_bytes += rest.room_bytes;
    }

    /// Undoes [`BufMut::split_off`] at the end of what is filled, once that end of `room_bytes` has been
    /// read into. A connection that broke can have taken the end with it. Then `rest` is another
    /// buffer, and both parts are copied into a new one.
    pub fn with_rest(mut self, rest: BufMut, room_bytes: usize) -> BufMut {
        if self.is_followed_by(&rest) {
            self.rejoin(rest);
            return self;
        }
        let mut all = BufMut::heap(self.len() + room_bytes);
        all.put(self.filled());
        all.put(rest.filled());
        all
    }

    /// Ends the filling: the filled part, to be shared.
    pub fn freeze(self) -> Buf {
        Buf { start: self.start, len_bytes: self.filled_bytes, owner: self.owner }
    }
}

impl fmt::Debug for BufMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufMut({} of {} bytes)", self.filled_bytes, self.room_bytes)
    }
}

/// Has the content in the memory.
fn fetch(owner: &dyn Memory) {
    if let Some(pages) = owner.pages() {
        pages.fetch();
    }
}

/// A shared, immutable buffer: cheap to clone and to slice.
#[derive(Clone)]
pub struct Buf {
    start: NonNull<u8>,
    len_bytes: usize,
    owner: Arc<dyn Memory>,
}

// SAFETY: Buf gives read access only to memory that nobody writes any more.
unsafe impl Send for Buf {}
// SAFETY: as above.
unsafe impl Sync for Buf {}

impl Buf {
    /// A buffer over initialised memory that `owner` keeps.
    ///
    /// # Safety
    /// `start..start + len_bytes` is initialised, stays valid while `owner` lives, and is
    /// not written while this buffer or a clone of it lives.
    pub unsafe fn over(start: NonNull<u8>, len_bytes: usize, owner: Arc<dyn Memory>) -> Buf {
        Buf { start, len_bytes, owner }
    }

    /// The pages in which the buffer's content lies, if that is not its memory.
    pub fn pages(&self) -> Option<&dyn Pages> {
        self.owner.pages()
    }

    /// Copies content that lies elsewhere into its memory, where it stays.
    pub fn fetch(&self) {
        fetch(&*self.owner);
    }

    /// The registered region that its memory is a part of, if there is one.
    pub fn region(&self) -> Option<RegionId> {
        self.owner.region()
    }

    /// The same buffer, whose last user also drops `beside`. Its content stays where it is.
    pub fn kept_with(self, beside: impl Send + Sync + 'static) -> Buf {
        let owner = Arc::new(KeptWith { memory: self.owner, _beside: beside });
        Buf { start: self.start, len_bytes: self.len_bytes, owner }
    }

    /// Bytes in it. Its content stays where it is.
    pub fn len(&self) -> usize {
        self.len_bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// A part of it, over the same memory. Asserts that `range` is within. A part of what lies in
    /// pages is brought into memory; all of it stays where it is.
    pub fn slice(&self, range: Range<usize>) -> Buf {
        if range == (0..self.len_bytes) {
            return self.clone();
        }
        fetch(&*self.owner); // parts of pages are nobody's
        assert!(range.start <= range.end && range.end <= self.len_bytes);
        Buf {
            // SAFETY: the start is within the buffer.
            start: unsafe { self.start.add(range.start) },
            len_bytes: range.end - range.start,
            owner: self.owner.clone(),
        }
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        fetch(&*self.owner);
        // SAFETY: initialised, and not written while we live.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }
}

impl From<&[u8]> for Buf {
    fn from(bytes: &[u8]) -> Buf {
        let mut buf = BufMut::heap(bytes.len());
        buf.put(bytes);
        buf.freeze()
    }
}

impl From<Vec<u8>> for Buf {
    fn from(bytes: Vec<u8>) -> Buf {
        Buf::from(&bytes[..])
    }
}

impl Default for Buf {
    fn default() -> Buf {
        Buf::from(&[][..])
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_filled_in_leaves() {
        let mut buf = BufMut::heap(8);
        let copied_bytes_before = copied_bytes();
        assert_eq!(buf.put(b"abc"), 3);
        assert!(copied_bytes() >= copied_bytes_before + 3); // other tests copy too
        assert_eq!((buf.len(), buf.room()), (3, 5));
        assert_eq!(buf.put(b"0123456789"), 5);
        buf.truncate(4);
        assert_eq!(&*buf.freeze(), b"abc0");
    }

    #[test]
    fn parts_of_a_split_buffer_can_be_joined() {
        let mut left = BufMut::heap(8);
        let mut right = left.split_off(3);
        left.put(b"abc");
        right.put(b"de");
        left.rejoin(right);
        assert_eq!((left.filled(), left.capacity()), (&b"abcde"[..], 8));
        left.truncate(3);
        let mut right = left.split_off(3);
        right.put(b"fg");
        left.rejoin(right);
        assert_eq!((left.filled(), left.room()), (&b"abcfg"[..], 3), "behind what is filled");
        left.clear();
        let mut right = left.split_off(3);
        left.put(b"a");
        right.put(b"de");
        left.rejoin(right);
        assert_eq!(
            (left.filled(), left.room()),
            (&b"a"[..], 7),
            "what is behind a gap is forgotten"
        );
    }

    #[test]
    #[should_panic(expected = "not the other part")]
    fn unrelated_buffers_cannot_be_joined() {
        BufMut::heap(8).rejoin(BufMut::heap(8));
    }

    #[test]
    fn parts_of_a_split_buffer_are_separate() {
        let mut left = BufMut::heap(8);
        let mut right = left.split_off(3);
        assert_eq!((left.capacity(), right.capacity()), (3, 5));
        left.put(b"xxxxx");
        right.put(b"yyyyy");
        assert_eq!((&*left.freeze(), &*right.freeze()), (&b"xxx"[..], &b"yyyyy"[..]));
    }

    #[test]
    fn a_slice_outlives_what_it_was_cut_from() {
        let whole = Buf::from(&b"checkpoint"[..]);
        let part = whole.slice(5..10);
        drop(whole);
        assert_eq!(&*part, b"point");
    }

    #[test]
    fn a_buffer_and_its_parts_say_which_region_they_are_of() {
        struct Registered(Vec<u8>);
        impl Memory for Registered {
            fn region(&self) -> Option<RegionId> {
                Some(RegionId(7))
            }
        }
        let mut memory = vec![0; 16];
        let start = NonNull::new(memory.as_mut_ptr()).unwrap();
        let owner = Arc::new(Registered(memory));
        assert_eq!(owner.0.len(), 16);
        // SAFETY: the owner keeps the vector, which nobody touches or moves meanwhile.
        let mut left = unsafe { BufMut::over(start, 16, owner) };
        let right = left.split_off(8);
        left.put(b"abcd");
        assert_eq!((left.region(), right.region()), (Some(RegionId(7)), Some(RegionId(7))));
        let part = left.freeze().kept_with(()).slice(1..3);
        assert_eq!((&*part, part.region()), (&b"bc"[..], Some(RegionId(7))));
        assert_eq!(Buf::from(&b"heap"[..]).region(), None);
    }

    #[test]
    fn what_is_kept_with_a_buffer_goes_with_its_last_user() {
        let beside = Arc::new(());
        let whole = Buf::from(&b"checkpoint"[..]);
        let kept = whole.clone().kept_with(beside.clone());
        assert_eq!(whole.as_ptr(), kept.as_ptr(), "it was copied");
        let part = kept.slice(0..5);
        drop((whole, kept));
        assert_eq!(Arc::strong_count(&beside), 2);
        drop(part);
        assert_eq!(Arc::strong_count(&beside), 1);
    }

    #[test]
    fn the_owner_is_notified_when_the_last_buffer_goes() {
        struct Slot;
        impl Memory for Slot {}
        let owner: Arc<dyn Memory> = Arc::new(Slot);
        let mut memory = vec![0u8; 16];
        let start = NonNull::new(memory.as_mut_ptr()).unwrap();
        // SAFETY: `memory` outlives the buffers below and is not used meanwhile.
        let mut buf = unsafe { BufMut::over(start, 16, owner.clone()) };
        buf.put(b"abcd");
        let shared = buf.freeze();
        let other = shared.slice(0..2);
        assert_eq!(Arc::strong_count(&owner), 3);
        drop((shared, other));
        assert_eq!(Arc::strong_count(&owner), 1);
    }
}
