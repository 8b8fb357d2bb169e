//! CPU time of processes and of the whole machine.

use std::time::Duration;

/// CPU time that all threads of process `pid` have used, ended ones too, in nanoseconds. It is the
/// kernel's clock of that process, so without the rounding of /proc/PID/stat. None if there is no
/// such process.
pub fn of_process(pid: i32) -> Option<Duration> {
    // Clock ids of other processes are made from the pid: see clock_getcpuclockid(3).
    let clock = (!pid << 3) | 2;
    read_clock(clock)
}

/// CPU time that this process has used.
pub fn of_this_process() -> Duration {
    read_clock(libc::CLOCK_PROCESS_CPUTIME_ID).unwrap_or_default()
}

/// CPU time of all of `pids` together. Those that are gone count nothing.
pub fn of_processes(pids: &[i32]) -> Duration {
    pids.iter().filter_map(|pid| of_process(*pid)).sum()
}

fn read_clock(clock: libc::clockid_t) -> Option<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is ours to be written.
    let result = unsafe { libc::clock_gettime(clock, &mut time) };
    (result == 0).then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

/// Time that all CPUs of the machine were busy since boot (user, nice, system, interrupts and soft
/// interrupts of /proc/stat; 10 ms grains). It is everybody's, kernel threads included.
pub fn of_machine() -> Duration {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    let ticks: Vec<u64> =
        line.split_whitespace().skip(1).map(|word| word.parse().unwrap_or(0)).collect();
    let busy: u64 = [0, 1, 2, 5, 6].iter().filter_map(|index| ticks.get(*index)).sum();
    // SAFETY: no pointers.
    let hertz = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1) as u64;
    Duration::from_millis(busy * 1000 / hertz)
}

/// CPU time of all kernel threads (children of kthreadd): what a daemon causes but does
/// not do itself, such as writeback. 10 ms grains.
pub fn of_kernel_threads() -> Duration {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Duration::ZERO };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let ticks: u64 = pids.filter_map(kernel_thread_ticks).sum();
    // SAFETY: no pointers.
    let hertz = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1) as u64;
    Duration::from_millis(ticks * 1000 / hertz)
}

fn kernel_thread_ticks(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything: fields are counted behind it.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let parent: i32 = fields.get(1)?.parse().ok()?;
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok());
    (parent == 2).then(|| ticks(11).unwrap_or(0) + ticks(12).unwrap_or(0))
}

/// Binds the calling thread to one CPU. Does nothing where that is not allowed.
pub fn pin(cpu: usize) {
    // SAFETY: cpu_set_t is plain data, and zero is a valid, empty set.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_of_a_process_is_that_of_its_pid() {
        let pid = std::process::id() as i32;
        let before = of_process(pid).unwrap();
        let mut sum = 0u64;
        while of_this_process() < before + Duration::from_millis(5) {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(of_process(pid).unwrap() >= before + Duration::from_millis(5));
        assert_eq!(of_process(1 << 23), None); // more than pids can be
    }

    #[test]
    fn the_machine_was_busy_since_boot() {
        assert!(of_machine() > Duration::ZERO);
    }
}
