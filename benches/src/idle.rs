//! The cost of daemons that have nothing to do.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// Context switches, voluntary and not, of all threads of `pids`, since they began.
pub fn switches(pids: &[i32]) -> u64 {
    switches_of_threads(pids).into_values().sum()
}

/// The same of each thread, by its directory in `/proc`.
fn switches_of_threads(pids: &[i32]) -> HashMap<PathBuf, u64> {
    let tasks = pids.iter().filter_map(|pid| fs::read_dir(format!("/proc/{pid}/task")).ok());
    let statuses = tasks.flat_map(|tasks| tasks.flatten()).filter_map(|task| {
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        let count = number(&status, "voluntary_ctxt_switches")
            + number(&status, "nonvoluntary_ctxt_switches");
        Some((task.path(), count))
    });
    statuses.collect()
}

/// Wake-ups of all threads of `pids` while `time` goes by.
pub fn wakeups(pids: &[i32], time: Duration) -> u64 {
    let [woken] = wakeups_of([pids], time);
    woken
}

/// The same of several groups of processes. A thread that has ended meanwhile does not count: what it counted
/// before is gone with it.
pub fn wakeups_of<const N: usize>(groups: [&[i32]; N], time: Duration) -> [u64; N] {
    let before = groups.map(switches_of_threads);
    std::thread::sleep(time);
    let mut woken = [0; N];
    for (index, (group, before)) in groups.into_iter().zip(before).enumerate() {
        let more = |(thread, count): (&PathBuf, &u64)| {
            count.saturating_sub(before.get(thread).copied().unwrap_or(0))
        };
        woken[index] = switches_of_threads(group).iter().map(more).sum();
    }
    woken
}

/// Resident memory of `pids` together, KiB. Pages that they share count in each.
pub fn resident_kib(pids: &[i32]) -> u64 {
    let statuses =
        pids.iter().filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/status")).ok());
    statuses.map(|status| number(&status, "VmRSS")).sum()
}

/// The number behind `key:` at the beginning of a line.
fn number(status: &str, key: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::process::{Command, Stdio};

    use super::*;

    /// Looked at from outside, as the benchmark does. Threads of the process that counts come and
    /// go with its other tests, and take their counts with them.
    #[test]
    fn a_process_that_sleeps_and_wakes_is_seen() {
        let mut echo = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("cat is part of every system");
        let (mut to, mut from) = (echo.stdin.take().unwrap(), echo.stdout.take().unwrap());
        let pids = [echo.id() as i32];
        let mut answer = [0];
        let mut wake = || {
            to.write_all(b"x").unwrap();
            from.read_exact(&mut answer).unwrap();
        };
        wake();
        let before = switches(&pids);
        (0..100).for_each(|_| wake());
        let seen = switches(&pids) - before;
        let resident = resident_kib(&pids);
        drop((to, from));
        echo.wait().unwrap();
        assert!(seen > 0, "it waited for 100 bytes, one by one");
        assert!(resident > 0);
    }

    /// Else the counts of threads that ended would be taken off those of the others.
    #[test]
    fn a_thread_that_ends_takes_nothing_off_the_wake_ups_of_others() {
        let (end, ends) = std::sync::mpsc::channel();
        let sleeper = std::thread::spawn(move || {
            (0..50).for_each(|_| std::thread::sleep(Duration::from_micros(100)));
            end.send(()).unwrap();
            std::thread::sleep(Duration::from_millis(50));
        });
        ends.recv().unwrap();
        let own = [std::process::id() as i32];
        let [seen, none] = wakeups_of([&own[..], &[]], Duration::from_millis(200));
        sleeper.join().unwrap();
        assert!((1..1 << 40).contains(&seen) && none == 0, "{seen}, {none}");
    }

    #[test]
    fn only_the_key_itself_counts() {
        let status = "nonvoluntary_ctxt_switches:\t5\nvoluntary_ctxt_switches:\t7\n";
        assert_eq!(number(status, "voluntary_ctxt_switches"), 7);
    }
}
