//! Memory for one segment of what is kept, mapped on its own, so that giving it back gives it to
//! the system.
//!
//! A huge page is a fifth as dear as the small ones that it stands for: the system finds, clears
//! and counts one page instead of 512 (docs/adr/0019-kept-copies.md). But it may have to be put
//! together first, which can take longer than anything else here.

use std::ptr::NonNull;
use std::time::Duration;

use dray_core::IO_MAX_BYTES;

/// Bytes of a segment: a huge page of most processors. The largest write lies in two at most.
pub(super) const SEGMENT_BYTES: usize = 2 << 20;
const _: () = assert!(SEGMENT_BYTES >= IO_MAX_BYTES);
/// First use of a huge page takes 0.2 to 0.4 ms; of small pages less than 1.5 ms.
const HUGE_MAX: Duration = Duration::from_millis(2);
/// So many segments are of small pages after a huge page that took longer; twice as many after the
/// next that does, up to the second number.
const SMALL_NEXT: (u32, u32) = (8, 64);

/// Memory of a segment; the only reference to it.
pub(super) struct Segment(NonNull<u8>);

// SAFETY: a Segment is the only reference to its memory.
unsafe impl Send for Segment {}

impl Segment {
    /// A new one, at a multiple of its size; of a `huge` page if the system has one. None if
    /// there is no room.
    pub(super) fn map(huge: bool) -> Option<Segment> {
        let (read_write, private) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, wherever there is room.
        let mapped = unsafe {
            libc::mmap(std::ptr::null_mut(), 2 * SEGMENT_BYTES, read_write, private, -1, 0)
        };
        if mapped == libc::MAP_FAILED {
            return None;
        }
        let mapped = NonNull::new(mapped.cast::<u8>())?;
        let before_bytes = mapped.as_ptr().align_offset(SEGMENT_BYTES);
        // SAFETY: of the two segments' worth just mapped one stays, and what is in front of it
        // and behind it goes; it is ours alone, and the advice changes no content.
        unsafe {
            let start = mapped.add(before_bytes);
            unmap(mapped, before_bytes);
            unmap(start.add(SEGMENT_BYTES), SEGMENT_BYTES - before_bytes);
            if huge {
                // Refused where the kernel was built without them.
                libc::madvise(start.as_ptr().cast(), SEGMENT_BYTES, libc::MADV_HUGEPAGE);
            }
            Some(Segment(start))
        }
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.0
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this size, and nobody refers to it any more.
        unsafe { unmap(self.0, SEGMENT_BYTES) };
    }
}

/// # Safety
/// The range is mapped and nobody uses it, or it is empty.
unsafe fn unmap(start: NonNull<u8>, len_bytes: usize) {
    if len_bytes > 0 {
        // SAFETY: the caller's.
        unsafe { libc::munmap(start.as_ptr().cast(), len_bytes) };
    }
}

/// Which kind of page the next segment is made of.
#[derive(Default)]
pub(super) struct Choice {
    small_next: u32,
    /// How many there were to be after the last slow one; 0: the last was not slow.
    small_last: u32,
}

impl Choice {
    /// `first`: of all, so that who writes little does not take a whole huge page.
    pub(super) fn next_is_huge(&mut self, first: bool) -> bool {
        let slow = self.small_next > 0;
        self.small_next = self.small_next.saturating_sub(1);
        !first && !slow
    }

    /// The first use of a huge page took so long.
    pub(super) fn took(&mut self, time: Duration) {
        self.small_last = match time > HUGE_MAX {
            true => (2 * self.small_last).clamp(SMALL_NEXT.0, SMALL_NEXT.1),
            false => 0,
        };
        self.small_next = self.small_last;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_begins_at_a_multiple_of_its_size_and_all_of_it_can_be_used() {
        let all: Vec<Segment> = (0..5).map(|at| Segment::map(at % 2 == 0).expect("room")).collect();
        for (number, segment) in (1..).zip(&all) {
            assert_eq!(segment.start().as_ptr().align_offset(SEGMENT_BYTES), 0);
            // SAFETY: within the segment, which is ours.
            unsafe { segment.start().as_ptr().write_bytes(number, SEGMENT_BYTES) };
        }
        for (number, segment) in (1..).zip(&all) {
            // SAFETY: as above, and written.
            let bytes =
                unsafe { std::slice::from_raw_parts(segment.start().as_ptr(), SEGMENT_BYTES) };
            assert!(bytes.iter().all(|byte| *byte == number));
        }
    }

    #[test]
    fn who_writes_little_and_who_has_waited_long_gets_small_pages() {
        let mut choice = Choice::default();
        assert!(!choice.next_is_huge(true) && choice.next_is_huge(false));
        choice.took(HUGE_MAX);
        assert!(choice.next_is_huge(false));
        for small in [8, 16, 32, 64, 64] {
            choice.took(HUGE_MAX * 2);
            assert!((0..small).all(|_| !choice.next_is_huge(false)));
            assert!(choice.next_is_huge(false), "it tries again");
        }
        choice.took(HUGE_MAX / 2);
        assert!(choice.next_is_huge(false));
        choice.took(HUGE_MAX * 2);
        assert_eq!((0..99).position(|_| choice.next_is_huge(false)), Some(8), "from the beginning");
    }
}
