//! Which CPUs there are for this process, and staying on one.

use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use dray_core::Pid;

/// Bytes of /proc/PID/stat that are looked at: its 52 numbers fit.
const STAT_MAX_BYTES: usize = 1200;

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

/// Finds out where callers run, on a thread of its own. The kernel shows nobody the stat of
/// a process in exec(2), and that process may be waiting for us to answer the closing of its
/// files: whoever serves requests must not look.
pub(crate) struct Lookout {
    asked: SyncSender<Pid>,
    seen: Arc<AtomicU64>,
}

/// Nothing has been seen since the last answer.
const NOT_SEEN: u64 = u64::MAX;

impl Lookout {
    /// Errors: those of making a thread.
    pub(crate) fn start() -> io::Result<Lookout> {
        let (asked, questions) = sync_channel(1);
        let seen = Arc::new(AtomicU64::new(NOT_SEEN));
        let shared = seen.clone();
        std::thread::Builder::new()
            .name("dray-lookout".into())
            .stack_size(64 << 10)
            .spawn(move || look(&questions, &shared))?;
        Ok(Lookout { asked, seen })
    }

    /// Asks where thread `pid` runs. A question while another one is being answered is dropped.
    pub(crate) fn ask(&self, pid: Pid) {
        let _ = self.asked.try_send(pid);
    }

    /// The last answer, once: a thread that was asked about, and the CPU it ran on.
    pub(crate) fn answer(&self) -> Option<(Pid, usize)> {
        if self.seen.load(Ordering::Relaxed) == NOT_SEEN {
            return None; // most often
        }
        let seen = self.seen.swap(NOT_SEEN, Ordering::Relaxed);
        (seen != NOT_SEEN).then_some((Pid((seen >> 32) as u32), seen as u32 as usize))
    }
}

/// Until nobody can ask any more.
fn look(questions: &Receiver<Pid>, seen: &AtomicU64) {
    while let Ok(pid) = questions.recv() {
        if let Some(cpu) = last_cpu_of(pid) {
            seen.store(u64::from(pid.0) << 32 | cpu as u64, Ordering::Relaxed);
        }
    }
}

/// The CPU that thread `pid` runs on, or ran on last; none if it is gone (proc(5), field
/// 39 of stat).
fn last_cpu_of(pid: Pid) -> Option<usize> {
    let mut stat = [0u8; STAT_MAX_BYTES];
    let mut file = File::open(format!("/proc/{}/stat", pid.0)).ok()?;
    let len = file.read(&mut stat).ok()?;
    cpu_in(&stat[..len])
}

fn cpu_in(stat: &[u8]) -> Option<usize> {
    // The name in parentheses may hold anything; field 3 is the first behind it.
    let behind_name = stat.iter().rposition(|&byte| byte == b')')? + 1;
    let text = std::str::from_utf8(&stat[behind_name..]).ok()?;
    text.split_ascii_whitespace().nth(39 - 3)?.parse().ok()
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

    #[test]
    fn where_a_thread_runs_is_found_whatever_it_is_called() {
        let own = last_cpu_of(Pid(std::process::id())).unwrap();
        assert!(own < libc::CPU_SETSIZE as usize);
        let fields: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
        let stat = format!("17 (a) 1 (b) S {}", fields.join(" "));
        assert_eq!(cpu_in(stat.as_bytes()), Some(39));
        assert_eq!(cpu_in(b"17 (cut short) S 1 2"), None);
        let lookout = Lookout::start().unwrap();
        let begin = std::time::Instant::now();
        lookout.ask(Pid(std::process::id()));
        while lookout.answer().is_none() {
            assert!(begin.elapsed().as_secs() < 60, "it never looked");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}
