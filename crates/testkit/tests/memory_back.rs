//! What a whole site leaves behind in memory once it has ended: nothing. Clients, servers, the
//! network and the simulation itself are counted, over runs in which connections break and
//! processes die at any step.

use dray_testkit::heap::{LiveBytesAllocator, live_bytes};
use dray_testkit::simulator::{
    WorkloadKind, run, run_cut_short, run_interleaved, run_leaving, run_of, run_power_losses,
};

#[global_allocator]
static ALLOCATOR: LiveBytesAllocator = LiveBytesAllocator;

/// Runs of each kind.
const SEEDS: u64 = 8;
/// What buffers that the thread keeps for its next call may grow in all runs together. A
/// session of a run in ten that leaves something behind is more.
const GROWN_MAX_BYTES: isize = 640;

/// One run of each kind.
fn run_all(seed: u64) {
    let must = |failure| panic!("{failure}");
    run(seed, None).map(drop).unwrap_or_else(must);
    run_of(WorkloadKind::Counter, seed, None).map(drop).unwrap_or_else(must);
    run_cut_short(WorkloadKind::Words, seed, None).map(drop).unwrap_or_else(must);
    run_interleaved(seed).map(drop).unwrap_or_else(must);
    run_power_losses(seed, None).map(drop).unwrap_or_else(must);
    run_leaving(seed, None).unwrap_or_else(must);
}

// proves: P133
#[test]
fn a_simulation_leaves_nothing_behind() {
    (0..2).for_each(run_all); // what a thread keeps is there now
    let live = || live_bytes() - dray_rt::kept_task_bytes() as isize;
    let before = live();
    (0..SEEDS).for_each(run_all);
    let grown_bytes = live() - before;
    assert!(grown_bytes < GROWN_MAX_BYTES, "{SEEDS} seeds left {grown_bytes} bytes behind");
}
