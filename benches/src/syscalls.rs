//! System calls of running processes, counted from outside by perf. Where perf is not allowed or
//! not there, strace counts them (slower, but it counts the same).

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// perf and strace need a moment to attach to every thread.
const ATTACH_TIME: Duration = Duration::from_millis(400);

/// A count under way.
pub struct SyscallCounter {
    child: Child,
    output: PathBuf,
    tool: Tool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Tool {
    Perf,
    Strace,
}

impl SyscallCounter {
    /// Begins to count the system calls of all threads of `pids`. None if neither tool works.
    pub fn start(pids: &[i32]) -> Option<SyscallCounter> {
        if pids.is_empty() {
            return None;
        }
        [Tool::Perf, Tool::Strace].into_iter().find_map(|tool| SyscallCounter::with(tool, pids))
    }

    fn with(tool: Tool, pids: &[i32]) -> Option<SyscallCounter> {
        let output = std::env::temp_dir().join(format!(
            "dray-bench-syscalls-{}-{}",
            std::process::id(),
            pids[0]
        ));
        let list: Vec<String> = pids.iter().map(i32::to_string).collect();
        let mut command = match tool {
            Tool::Perf => {
                let mut perf = Command::new("perf");
                perf.args(["stat", "-x,", "-e", "raw_syscalls:sys_enter", "-p", &list.join(",")]);
                perf.arg("-o").arg(&output);
                perf
            }
            Tool::Strace => {
                let mut strace = Command::new("strace");
                strace.args(["-f", "-qq", "-o"]).arg(&output);
                for pid in &list {
                    strace.args(["-p", pid]);
                }
                strace
            }
        };
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().ok()?;
        std::thread::sleep(ATTACH_TIME);
        match child.try_wait() {
            Ok(None) => Some(SyscallCounter { child, output, tool }),
            _ => None, // it gave up by itself
        }
    }

    /// Ends the count; answers it.
    pub fn stop(mut self) -> Option<u64> {
        // SAFETY: no pointers; the child is ours and not waited for yet.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGINT) };
        self.child.wait().ok()?;
        let text = fs::read(&self.output).ok()?;
        let _ = fs::remove_file(&self.output); // only litter if it stays
        let text = String::from_utf8_lossy(&text);
        match self.tool {
            Tool::Perf => text
                .lines()
                .find(|line| line.contains("raw_syscalls:sys_enter"))
                // Of processes that slept all the time it says `<not counted>`.
                .and_then(|line| line.split(',').next())
                .map(|count| count.parse().unwrap_or(0)),
            // Calls that were under way appear twice: the second half has no number here.
            Tool::Strace => {
                Some(text.lines().filter(|line| !line.contains("resumed>")).count() as u64)
            }
        }
    }
}
