//! What a whole site leaves behind in memory once it has ended: nothing. Clients, servers, the
//! network and the simulation itself are counted, over runs in which connections break and
//! processes die at any step.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use dray_testkit::simulator::{
    WorkKind, run, run_cut_short, run_interleaved, run_leaving, run_of, run_power_losses,
};

thread_local! {
    /// Bytes that this thread has allocated and not freed. A simulation is one thread, so that
    /// this is exact whatever the test's own threads do meanwhile.
    static LIVE_BYTES: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

fn count(bytes: isize) {
    let _ = LIVE_BYTES.try_with(|live| live.set(live.get() + bytes)); // a thread's end is nobody's
}

// SAFETY: everything is handed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
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

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs of each kind.
const SEEDS: u64 = 8;
/// What buffers that the thread keeps for its next call may grow in all runs together. A
/// session of a run in ten that leaves something behind is more.
const GROWN_MAX_BYTES: isize = 640;

/// One run of each kind.
fn run_all(seed: u64) {
    let must = |failure| panic!("{failure}");
    run(seed, None).map(drop).unwrap_or_else(must);
    run_of(WorkKind::Counter, seed, None).map(drop).unwrap_or_else(must);
    run_cut_short(WorkKind::Words, seed, None).map(drop).unwrap_or_else(must);
    run_interleaved(seed).map(drop).unwrap_or_else(must);
    run_power_losses(seed, None).map(drop).unwrap_or_else(must);
    run_leaving(seed, None).unwrap_or_else(must);
}

#[test]
fn a_simulation_leaves_nothing_behind() {
    (0..2).for_each(run_all); // what a thread keeps is there now
    let before = LIVE_BYTES.get();
    (0..SEEDS).for_each(run_all);
    let grown_bytes = LIVE_BYTES.get() - before;
    assert!(grown_bytes < GROWN_MAX_BYTES, "{SEEDS} seeds left {grown_bytes} bytes behind");
}
