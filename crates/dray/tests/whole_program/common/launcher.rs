//! Starts processes for a test that keeps files of a mount open.
//!
//! exec(2) closes inherited files before the new program runs, and closing a file of a mount can
//! wait for the mount's server. A test that started its server itself would wait for the server
//! that it is about to start. So would two tests in one process for each other's. Hence a shell is
//! started before anything is mounted, and everything is started by it.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Output, Stdio};

pub struct Launcher {
    shell: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// What was started and not waited for.
    running: Vec<Pid>,
}

/// A process started by the launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pid(pub i32);

impl Pid {
    pub fn signal(self, signal: i32) {
        // SAFETY: takes no memory. The shell does not wait for it yet, so the number is
        // still its own.
        unsafe { libc::kill(self.0, signal) };
    }

    /// Whether it has ended, though the shell does not wait for it yet.
    pub fn is_over(self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0)).unwrap_or_default();
        stat.rsplit(')').next().is_none_or(|rest| rest.is_empty() || rest.starts_with(" Z"))
    }

    /// The process that started this one; none, if this one is gone.
    fn parent(self) -> Option<i32> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0)).ok()?;
        stat.rsplit(") ").next()?.split(' ').nth(1)?.parse().ok()
    }

    /// The process and what it has started, and so on.
    fn family(self) -> Vec<Pid> {
        let path = format!("/proc/{}/task/{}/children", self.0, self.0);
        let children = std::fs::read_to_string(path).unwrap_or_default();
        let children = children.split_ascii_whitespace().filter_map(|pid| pid.parse().ok());
        let mut family = vec![self];
        family.extend(children.flat_map(|pid| Pid(pid).family()));
        family
    }

    /// What it is, and where in the kernel its threads are, for a test that waits for it in vain.
    pub fn whereabouts(self) -> String {
        let dir = format!("/proc/{}", self.0);
        let read = |path: &str| {
            String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).replace('\0', " ")
        };
        let mut text = format!("{} ({})", self.0, read(&format!("{dir}/cmdline")));
        for thread in std::fs::read_dir(format!("{dir}/task")).into_iter().flatten().flatten() {
            let thread = thread.path();
            for file in ["stat", "syscall", "stack"] {
                text.push_str(&format!(
                    "\n{file}: {}",
                    read(&format!("{}/{file}", thread.display()))
                ));
            }
        }
        text
    }
}

impl Launcher {
    pub fn new() -> Launcher {
        let mut shell = Command::new("sh")
            .args(["-c", "while read -r order; do eval \"$order\"; done"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let orders = shell.stdin.take().unwrap();
        let answers = BufReader::new(shell.stdout.take().unwrap());
        Launcher { shell, orders, answers, running: Vec::new() }
    }

    /// Starts a program; its output goes to a file, or nowhere. Its errors go to a file, or where
    /// the test's go.
    pub fn start(
        &mut self,
        command: &Command,
        output: Option<&Path>,
        errors: Option<&Path>,
    ) -> Pid {
        let nowhere = Path::new("/dev/null");
        let mut order = format!("{} <{}", words(command), quoted(nowhere.as_os_str()));
        order += &format!(" >{}", quoted(output.unwrap_or(nowhere).as_os_str()));
        if let Some(errors) = errors {
            order += &format!(" 2>{}", quoted(errors.as_os_str()));
        }
        order += " & echo $!";
        let pid = Pid(self.ask(&order));
        self.running.push(pid);
        pid
    }

    pub fn wait(&mut self, pid: Pid) -> ExitStatus {
        self.running.retain(|other| *other != pid);
        let code = self.ask(&format!("wait {}; echo $?", pid.0));
        // A shell says 128 and the signal's number for a process that a signal ended.
        ExitStatus::from_raw(if code > 128 { code - 128 } else { code << 8 })
    }

    /// Runs a program to its end, with `scratch` for what it prints.
    pub fn output(&mut self, command: &Command, scratch: &Path) -> Output {
        let (output, errors) = (scratch.join("stdout"), scratch.join("stderr"));
        let pid = self.start(command, Some(&output), Some(&errors));
        let status = self.wait(pid);
        let [stdout, stderr] = [output, errors].map(|path| std::fs::read(path).unwrap());
        Output { status, stdout, stderr }
    }

    /// Kills what was started and not waited for: where a test has failed, that is what it was about
    /// to end by itself.
    pub fn end_all(&mut self) {
        for pid in std::mem::take(&mut self.running) {
            // The number of one that has ended may be somebody else's by now.
            if pid.parent() == Some(self.shell.id() as i32) {
                pid.family().into_iter().for_each(|one| one.signal(libc::SIGKILL));
            }
        }
    }

    fn ask(&mut self, order: &str) -> i32 {
        assert!(!order.contains('\n'), "an order is one line");
        writeln!(self.orders, "{order}").unwrap();
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        answer.trim().parse().unwrap()
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.shell.kill(); // it waits for orders or for a process that is to be left
        let _ = self.shell.wait();
    }
}

/// The command as a shell reads it, with its changes of the environment.
fn words(command: &Command) -> String {
    let mut words = vec!["env".to_owned()];
    // env(1) takes what it removes before what it sets.
    let mut changes: Vec<_> = command.get_envs().collect();
    changes.sort_by_key(|(_, value)| value.is_some());
    for (name, value) in changes {
        let name = name.to_str().unwrap();
        match value {
            Some(value) => {
                words.push(quoted(OsStr::new(&format!("{name}={}", value.to_str().unwrap()))))
            }
            None => words.push(format!("-u {name}")),
        }
    }
    words.push(quoted(command.get_program()));
    words.extend(command.get_args().map(quoted));
    words.join(" ")
}

fn quoted(word: &OsStr) -> String {
    format!("'{}'", word.to_str().unwrap().replace('\'', r"'\''"))
}
