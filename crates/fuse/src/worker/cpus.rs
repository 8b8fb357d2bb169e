//! Which CPUs there are for this process, and staying on one.

use std::io;

use dray_rt::CpuSet;

/// CPUs that this process may run on (cpusets count), lowest first, at least one.
pub(crate) fn allowed() -> Vec<usize> {
    let cpus: Vec<usize> = CpuSet::allowed().iter().flat_map(CpuSet::iter).collect();
    if cpus.is_empty() { vec![0] } else { cpus }
}

/// Keeps this thread on `cpu`. Errors: those of sched_setaffinity(2).
pub(crate) fn pin_to(cpu: usize) -> io::Result<()> {
    CpuSet::only(cpu).pin()
}

/// The queues that worker `index` of `workers` serves. They are that of the CPU it is pinned to,
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
