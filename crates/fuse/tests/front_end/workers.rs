//! Workers of a classic mount are independent of each other.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::common::{TestMount, mounted};
use dray_fuse::{Consistency, Transport};

/// Longest wait for anything here.
const LONG: Duration = Duration::from_secs(60);

/// A mount with a worker for each of two CPUs, and these; none, with the reason printed, where
/// that cannot be had.
fn mount_on_two() -> Option<(TestMount, [usize; 2])> {
    let Some(&[first, second]) = allowed().get(..2) else {
        eprintln!("skipped: needs two CPUs");
        return None;
    };
    stay_on(&[first, second]); // workers are made for the CPUs of the thread that mounts
    let mount = mounted(Transport::Classic, Consistency::Strict)?;
    assert_eq!(mount.reporter.stats().workers, 2);
    fs::write(mount.path("file"), b"data").unwrap();
    Some((mount, [first, second]))
}

/// CPUs that this thread may run on, lowest first.
fn allowed() -> Vec<usize> {
    // SAFETY: an all-zero set is an empty one; the kernel fills in at most its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set), 0);
        set
    };
    // SAFETY: the index is below the size of the set.
    (0..libc::CPU_SETSIZE as usize).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) }).collect()
}

/// Keeps this thread on these CPUs.
fn stay_on(cpus: &[usize]) {
    // SAFETY: an all-zero set is an empty one; the indices came from such a set.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        cpus.iter().for_each(|cpu| libc::CPU_SET(*cpu, &mut set));
        assert_eq!(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set), 0);
    }
}

/// A request that holds one worker up holds nobody else up, on whichever CPU the others call.
#[test]
fn others_are_served_while_a_worker_is_held_up() {
    let Some((mount, cpus)) = mount_on_two() else { return };
    let path = mount.path("file");
    std::thread::scope(|scope| {
        let closed = mount.locks.gate.lock().unwrap();
        scope.spawn(|| read_gate(&path));
        let begin = Instant::now();
        while mount.count("getxattr") == 0 {
            assert!(begin.elapsed() < LONG, "no worker took the request");
            std::thread::sleep(Duration::from_millis(1));
        }
        let (sender, receiver) = mpsc::channel();
        for cpu in cpus {
            let (path, sender) = (path.clone(), sender.clone());
            std::thread::spawn(move || {
                stay_on(&[cpu]);
                let served = (0..1_000).all(|_| fs::File::open(&path).is_ok());
                let _ = sender.send(served); // the test may have given up
            });
        }
        let served = [(); 2].map(|()| receiver.recv_timeout(LONG));
        drop(closed);
        assert_eq!(served, [Ok(true), Ok(true)]);
    });
}

/// The kernel woke the first worker for each request, from whichever CPU it came.
// proves: P353
#[test]
fn a_lone_program_is_served_on_its_own_cpu() {
    let Some((mount, [first, second])) = mount_on_two() else { return };
    let path = mount.path("file");
    for (worker, cpu) in [(1, second), (0, first), (1, second)] {
        stay_on(&[cpu]);
        let begin = Instant::now();
        while !serves_most(&mount, worker, &path) {
            assert!(begin.elapsed() < LONG, "another CPU's worker serves CPU {cpu}");
        }
    }
}

/// Whether this worker takes up nine in ten of many requests that are made one after the other.
fn serves_most(mount: &TestMount, worker: usize, path: &Path) -> bool {
    let taken = || mount.reporter.stats().taken;
    let before = taken();
    for _ in 0..500 {
        fs::metadata(path).unwrap();
    }
    let taken: Vec<u64> = taken().iter().zip(before).map(|(now, then)| now - then).collect();
    taken[worker] * 10 >= taken.iter().sum::<u64>() * 9
}

/// Holds the worker up that takes the request.
fn read_gate(path: &Path) {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: C strings that outlive the call, and no buffer.
    unsafe { libc::getxattr(path.as_ptr(), c"user.gate".as_ptr(), std::ptr::null_mut(), 0) };
}
