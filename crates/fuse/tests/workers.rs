//! Which worker of a classic mount serves whom.

mod common;

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use common::{TestMount, mounted};
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

/// Requests, of four thousand, that may go to another worker: when the host is held up.
const STRAYS_MAX: u64 = 12;

/// Opens and closes a file, which is four requests, a thousand times in a row until worker `host`
/// takes nearly all of them.
fn stream(mount: &TestMount, host: usize) {
    let begin = Instant::now();
    loop {
        let before = mount.reporter.stats().taken;
        for _ in 0..1_000 {
            drop(fs::File::open(mount.path("file")).unwrap());
        }
        let after = mount.reporter.stats().taken;
        let taken: Vec<u64> = after.iter().zip(before).map(|(after, old)| after - old).collect();
        if taken.iter().sum::<u64>() <= taken[host] + STRAYS_MAX {
            return;
        }
        assert!(begin.elapsed() < LONG, "{taken:?}");
    }
}

/// The one on whose CPU the caller is, also when that moves. While all wait for the device others
/// take 30 to 300 of four thousand.
#[test]
fn one_caller_is_served_by_one_worker() {
    let Some((mount, cpus)) = mount_on_two() else { return };
    for host in [0, 1, 0, 1] {
        stay_on(&[cpus[host]]);
        stream(&mount, host);
    }
}

/// By those who have left the device to it.
#[test]
fn others_are_served_while_a_host_is_held_up() {
    let Some((mount, cpus)) = mount_on_two() else { return };
    let path = mount.path("file");
    std::thread::scope(|scope| {
        let closed = mount.locks.gate.lock().unwrap();
        let (mount, caller_s) = (&mount, path.clone());
        scope.spawn(move || {
            stay_on(&[cpus[0]]);
            stream(mount, 0);
            read_gate(&caller_s);
        });
        let begin = Instant::now();
        while mount.count("getxattr") == 0 {
            assert!(begin.elapsed() < 2 * LONG, "the host never came to it");
            std::thread::sleep(Duration::from_millis(1));
        }
        let (tell, told) = mpsc::channel();
        std::thread::spawn(move || _ = tell.send(fs::metadata(path).is_ok()));
        let served = told.recv_timeout(LONG);
        drop(closed);
        assert_eq!(served, Ok(true));
    });
}

/// Holds the worker up that takes the request.
fn read_gate(path: &Path) {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: C strings that outlive the call, and no buffer.
    unsafe { libc::getxattr(path.as_ptr(), c"user.gate".as_ptr(), std::ptr::null_mut(), 0) };
}
