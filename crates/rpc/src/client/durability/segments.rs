//! Where the memory for kept data comes from: segments of one size, from one source.
//!
//! The source is a trait, so that a transport that needs registered memory can supply it. The
//! source in use maps each segment on its own: giving a segment back gives it to the system.
//!
//! A huge page costs a fifth of the small pages that it stands for. The system finds, clears and
//! counts one page instead of 512 (docs/adr/0019-kept-copies.md). But the system may have to put
//! a huge page together first, which can take longer than anything else here.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::IO_MAX_BYTES;

/// Bytes of a segment: a huge page of most processors. The largest write lies in two at most.
pub(crate) const SEGMENT_BYTES: usize = 2 << 20;
const _: () = assert!(SEGMENT_BYTES >= IO_MAX_BYTES);
/// First use of a huge page takes 0.2 to 0.4 ms; of small pages less than 1.5 ms.
const HUGE_MAX: Duration = Duration::from_millis(2);
/// So many segments are of small pages after a huge page that took longer. Each further slow huge
/// page doubles the number, up to the second number.
const SMALL_NEXT: (u32, u32) = (8, 64);

/// Supplies the memory for kept data. It is asked for a segment, not for each write.
pub(crate) trait SegmentSource: Send + Sync {
    /// A segment that nobody uses; none if there is no memory now. `is_first`: the caller uses no
    /// other segment.
    fn segment(&self, is_first: bool) -> Option<SuppliedSegment>;

    /// The first copy into a segment with [`SuppliedSegment::measured`] took so long.
    fn first_copy_took(&self, time: Duration);

    /// Others take so much of what the source has that it may have nothing soon.
    fn is_scarce(&self) -> bool;
}

/// A segment as its source gives it.
pub(crate) struct SuppliedSegment {
    pub(crate) memory: Box<dyn SegmentMemory>,
    /// The source wants to know how long the first copy into it takes.
    pub(crate) measured: bool,
}

/// Memory of one segment, which goes back to its source when this is dropped.
///
/// # Safety
/// Until the drop, [`SEGMENT_BYTES`] bytes from `start` on can be read and written, and nobody
/// else uses them.
pub(crate) unsafe trait SegmentMemory: Send {
    /// The first byte.
    fn start(&self) -> NonNull<u8>;
}

/// Maps private memory of this process.
#[derive(Default)]
pub(crate) struct MappedSegments {
    pages: Mutex<PageChoice>,
}

impl MappedSegments {
    fn pages(&self) -> MutexGuard<'_, PageChoice> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SegmentSource for MappedSegments {
    fn segment(&self, is_first: bool) -> Option<SuppliedSegment> {
        let huge = self.pages().next_is_huge(is_first);
        let memory = Box::new(MappedSegment::map(huge)?);
        Some(SuppliedSegment { memory, measured: huge })
    }

    fn first_copy_took(&self, time: Duration) {
        self.pages().took(time);
    }

    fn is_scarce(&self) -> bool {
        false
    }
}

/// How many segments several sources may have given at a time.
pub(crate) struct SegmentLimit {
    max: usize,
    used: AtomicUsize,
}

impl SegmentLimit {
    /// As many as one source gives that is to hold `limit_bytes`.
    pub(crate) fn of(limit_bytes: u64) -> SegmentLimit {
        SegmentLimit { max: segments_for(limit_bytes), used: AtomicUsize::new(0) }
    }

    fn take(self: &Arc<SegmentLimit>) -> Option<TakenSegment> {
        let one_more = |used: usize| (used < self.max).then_some(used + 1);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(TakenSegment(self.clone()))
    }
}

/// Segments for `limit_bytes` of data, and for what is unused between them.
pub(super) fn segments_for(limit_bytes: u64) -> usize {
    if limit_bytes == 0 { 0 } else { limit_bytes.div_ceil(SEGMENT_BYTES as u64) as usize + 1 }
}

/// One of a limit's segments, until the drop.
struct TakenSegment(Arc<SegmentLimit>);

impl Drop for TakenSegment {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Mapped segments, as long as a limit that others share has any.
pub(crate) struct LimitedSegments {
    mapped: MappedSegments,
    limit: Arc<SegmentLimit>,
}

impl LimitedSegments {
    pub(crate) fn new(limit: Arc<SegmentLimit>) -> LimitedSegments {
        LimitedSegments { mapped: MappedSegments::default(), limit }
    }
}

impl SegmentSource for LimitedSegments {
    fn segment(&self, is_first: bool) -> Option<SuppliedSegment> {
        let taken = self.limit.take()?;
        let SuppliedSegment { memory, measured } = self.mapped.segment(is_first)?;
        Some(SuppliedSegment {
            memory: Box::new(LimitedSegment { memory, _taken: taken }),
            measured,
        })
    }

    fn first_copy_took(&self, time: Duration) {
        self.mapped.first_copy_took(time);
    }

    fn is_scarce(&self) -> bool {
        self.limit.used.load(Ordering::Relaxed) > self.limit.max / 2
    }
}

/// A segment that counts.
struct LimitedSegment {
    memory: Box<dyn SegmentMemory>,
    _taken: TakenSegment,
}

// SAFETY: what holds for the memory holds for who owns it.
unsafe impl SegmentMemory for LimitedSegment {
    fn start(&self) -> NonNull<u8> {
        self.memory.start()
    }
}

/// A mapping of memory, to which this is the only reference.
struct MappedSegment(NonNull<u8>);

// SAFETY: a MappedSegment is the only reference to its memory.
unsafe impl Send for MappedSegment {}

// SAFETY: the mapping is readable, writable and private, and lasts until the drop.
unsafe impl SegmentMemory for MappedSegment {
    fn start(&self) -> NonNull<u8> {
        self.0
    }
}

impl MappedSegment {
    /// A new one, at a multiple of its size; of a `huge` page if the system has one. None if
    /// there is no room.
    fn map(huge: bool) -> Option<MappedSegment> {
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
        // SAFETY: of the two segments' worth just mapped one stays, and the memory in front of it
        // and behind it goes. The memory is ours alone, and the advice changes no content.
        unsafe {
            let start = mapped.add(before_bytes);
            unmap(mapped, before_bytes);
            unmap(start.add(SEGMENT_BYTES), SEGMENT_BYTES - before_bytes);
            if huge {
                // Refused where the kernel was built without them.
                libc::madvise(start.as_ptr().cast(), SEGMENT_BYTES, libc::MADV_HUGEPAGE);
            }
            Some(MappedSegment(start))
        }
    }
}

impl Drop for MappedSegment {
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
struct PageChoice {
    small_next: u32,
    /// How many there were to be after the last slow one; 0: the last was not slow.
    small_last: u32,
}

impl PageChoice {
    /// `is_first`: of all. A mount that writes little does not take a whole huge page.
    fn next_is_huge(&mut self, is_first: bool) -> bool {
        let slow = self.small_next > 0;
        self.small_next = self.small_next.saturating_sub(1);
        !is_first && !slow
    }

    /// The first use of a huge page took so long.
    fn took(&mut self, time: Duration) {
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
        let all: Vec<MappedSegment> =
            (0..5).map(|at| MappedSegment::map(at % 2 == 0).expect("room")).collect();
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
    fn little_data_and_slow_huge_pages_lead_to_small_pages() {
        let mut choice = PageChoice::default();
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
