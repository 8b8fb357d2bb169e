//! An allocator that counts, by the role of a thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Parts that a thread can play.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadRole {
    /// Nothing that is counted.
    Other,
    /// The client end.
    Client,
    /// The server end.
    Server,
}

static COUNTS: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
static BYTES: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];

thread_local! {
    static PART: Cell<usize> = const { Cell::new(0) };
}

/// Says which part the calling thread plays from now on.
pub fn play(part: ThreadRole) {
    PART.set(part as usize);
}

/// Allocations and reallocations so far by threads playing `part`, and their bytes.
pub fn counted(part: ThreadRole) -> (u64, u64) {
    let index = part as usize;
    (COUNTS[index].load(Ordering::Relaxed), BYTES[index].load(Ordering::Relaxed))
}

/// The system's allocator, counted. To be the `#[global_allocator]` of a program.
pub struct CountingAllocator;

fn count(bytes: usize) {
    // A thread that is ending has no part any more.
    let index = PART.try_with(Cell::get).unwrap_or(0);
    COUNTS[index].fetch_add(1, Ordering::Relaxed);
    BYTES[index].fetch_add(bytes as u64, Ordering::Relaxed);
}

// SAFETY: everything is handed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, new_bytes: usize) -> *mut u8 {
        count(new_bytes);
        // SAFETY: the caller's promises are the same.
        unsafe { System.realloc(memory, layout, new_bytes) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are the same.
        unsafe { System.dealloc(memory, layout) }
    }
}
