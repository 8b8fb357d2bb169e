//! The cost of daemons that have nothing to do.

use std::fs;
use std::time::Duration;

/// Context switches, voluntary and not, of all threads of `pids`, since they began.
pub fn switches(pids: &[i32]) -> u64 {
    let tasks = pids.iter().filter_map(|pid| fs::read_dir(format!("/proc/{pid}/task")).ok());
    let statuses = tasks.flat_map(|tasks| tasks.flatten());
    statuses
        .filter_map(|task| fs::read_to_string(task.path().join("status")).ok())
        .map(|status| {
            number(&status, "voluntary_ctxt_switches")
                + number(&status, "nonvoluntary_ctxt_switches")
        })
        .sum()
}

/// Wake-ups of all threads of `pids` while `time` goes by.
pub fn wakeups(pids: &[i32], time: Duration) -> u64 {
    let before = switches(pids);
    std::thread::sleep(time);
    switches(pids).saturating_sub(before)
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

    #[test]
    fn only_the_key_itself_counts() {
        let status = "nonvoluntary_ctxt_switches:\t5\nvoluntary_ctxt_switches:\t7\n";
        assert_eq!(number(status, "voluntary_ctxt_switches"), 7);
    }
}
