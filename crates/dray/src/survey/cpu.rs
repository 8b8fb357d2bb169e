//! CPU time of processes.

use std::time::Duration;

/// CPU time that this process and `others` have used so far.
pub fn used(others: &[u32]) -> Duration {
    let own = clock(libc::CLOCK_PROCESS_CPUTIME_ID);
    others.iter().filter_map(|pid| of_process(*pid)).fold(own, |sum, one| sum + one)
}

fn of_process(pid: u32) -> Option<Duration> {
    let mut id: libc::clockid_t = 0;
    // SAFETY: the id is written to `id`, which outlives the call.
    let result = unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &mut id) };
    (result == 0).then(|| clock(id))
}

fn clock(id: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is written to `time`, which outlives the call. A clock of a process
    // that has ended leaves zero.
    unsafe { libc::clock_gettime(id, &mut time) };
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.clamp(0, 999_999_999) as u32)
}
