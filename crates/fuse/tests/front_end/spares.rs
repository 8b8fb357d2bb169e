//! Queues of a ring that stand still, and what they leave to others, through a real mount.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::pushing::{PUSH_TIME, push};
use crate::common::{TestMount, mounted_with_spares};
use dray_fuse::{Consistency, Transport};

/// Longest wait for anything here.
const LONG: Duration = Duration::from_secs(60);

/// The CPUs that this thread may run on.
fn cpus() -> Vec<usize> {
    // SAFETY: an all-zero set is an empty one, which the kernel fills; indices are within it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set);
        (0..libc::CPU_SETSIZE as usize).filter(|cpu| libc::CPU_ISSET(*cpu, &set)).collect()
    }
}

/// Starts a thread that runs on `cpu` alone, whose requests are so all in one queue.
fn on_cpu(cpu: usize, work: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    std::thread::spawn(move || {
        // SAFETY: an all-zero set is an empty one; the CPU is one that we may run on.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(cpu, &mut set);
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
        }
        work();
    })
}

/// Reads wait as long as there is this; they end where the test fails, too.
struct Stalled<'a>(&'a TestMount);

impl Stalled<'_> {
    fn new(mount: &TestMount) -> Stalled<'_> {
        mount.locks.stalled.store(true, Ordering::SeqCst);
        Stalled(mount)
    }
}

impl Drop for Stalled<'_> {
    fn drop(&mut self) {
        self.0.locks.stalled.store(false, Ordering::SeqCst);
    }
}

/// Starts as many reads from `cpu`, and waits until they are under way.
fn stall(mount: &TestMount, cpu: usize, files: Vec<File>) -> Vec<JoinHandle<()>> {
    let reads = || mount.reporter.stats().in_flight.iter().filter(|one| one.op == "read").count();
    let (begin, wanted) = (Instant::now(), reads() + files.len());
    let read = |file: File| on_cpu(cpu, move || _ = file.read_at(&mut [0], 0));
    let mut threads: Vec<_> = files.into_iter().map(read).collect();
    while reads() < wanted {
        assert!(begin.elapsed() < LONG, "{} of {wanted} reads get an entry", reads());
        let at = mount.at.clone();
        threads.push(on_cpu(cpu, move || push(&at)));
        std::thread::sleep(PUSH_TIME);
    }
    threads
}

/// A queue doubled its entries each time, up to all that there were. In another one those of a
/// process that had been killed were closed in none, and it could not end.
// proves: P68
#[test]
fn a_queue_that_stands_still_leaves_spare_entries_to_another() {
    let [first, second, ..] = cpus()[..] else {
        eprintln!("skipped: all requests are in one queue where there is one CPU");
        return;
    };
    // Half of them are for queues that stand still.
    let mounted = mounted_with_spares(Transport::Uring, Consistency::Strict, 2 * 6);
    let Some(mount) = mounted else { return };
    fs::write(mount.path("file"), b"data").unwrap();
    let open = |count| (0..count).map(|_| File::open(mount.path("file")).unwrap()).collect();
    let (many, few) = (open(5), open(3));
    let stalled = Stalled::new(&mount);
    // Two entries, and twice two for those that found none; twice as many as it had would be all.
    let mut threads = stall(&mount, first, many);
    threads.extend(stall(&mount, second, few));
    drop(stalled);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
