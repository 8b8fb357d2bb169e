//! Counts what threads have allocated: for tests of what is left behind in memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static LIVE_BYTES: Cell<isize> = const { Cell::new(0) };
}

/// Bytes that this thread has allocated and not freed, where the program's global allocator is
/// [`LiveBytesAllocator`]. A simulation is one thread, so that this is exact whatever the test's own threads
/// do meanwhile.
pub fn live_bytes() -> isize {
    LIVE_BYTES.get()
}

/// The system's allocator, which counts for [`live_bytes`].
pub struct LiveBytesAllocator;

fn count(bytes: isize) {
    let _ = LIVE_BYTES.try_with(|live| live.set(live.get() + bytes)); // a thread's end is nobody's
}

// SAFETY: everything is handed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for LiveBytesAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are the same.
        unsafe { System.dealloc(memory, layout) }
    }
}
