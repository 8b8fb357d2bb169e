//! Which CPUs there are for this process, and staying on one.

use std::io;

/// CPUs that this process may run on (cpusets count), lowest first.
pub(crate) fn allowed() -> Vec<usize> {
    // SAFETY: an all-zero set is an empty one; the kernel fills in at most its size.
    let (set, result) = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let result = libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set);
        (set, result)
    };
    if result != 0 {
        return vec![0];
    }
    // SAFETY: the index is below the size of the set.
    (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
}

/// Keeps this thread on `cpu`. Errors: those of sched_setaffinity(2).
pub(crate) fn pin_to(cpu: usize) -> io::Result<()> {
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: an all-zero set is an empty one; the index is below its size.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The queues that worker `index` of `workers` serves: that of the CPU it is pinned to,
/// and its share of those that no worker is pinned to.
pub(crate) fn queues_of(index: usize, pinned: &[usize], possible: usize) -> Vec<u16> {
    let workers = pinned.len().max(1);
    (0..possible)
        .filter(|cpu| match pinned.iter().position(|other| other == cpu) {
            Some(owner) => owner == index,
            None => cpu % workers == index,
        })
        .filter_map(|cpu| u16::try_from(cpu).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_queue_has_one_worker() {
        for (pinned, possible) in [(vec![0, 1], 2), (vec![5], 8), (vec![2, 7, 9], 16)] {
            let mut all: Vec<u16> =
                (0..pinned.len()).flat_map(|index| queues_of(index, &pinned, possible)).collect();
            all.sort_unstable();
            assert_eq!(all, (0..possible as u16).collect::<Vec<_>>());
            assert!(queues_of(0, &pinned, possible).contains(&(pinned[0] as u16)));
        }
    }

    #[test]
    fn this_thread_runs_somewhere() {
        assert!(!allowed().is_empty());
        assert!(pin_to(usize::MAX).is_err());
    }
}
