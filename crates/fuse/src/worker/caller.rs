//! What becomes of callers, as /proc shows it. FUSE tells of the first signal alone. It tells of
//! none to a caller that does not wait for its answer (aio(7), reading ahead), and of no end.

use std::io::ErrorKind;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use dray_core::{Pid, fnv1a};
use dray_rt::sleep;

use crate::worker::identity::field;

/// The process whose children are the threads of the kernel.
const KTHREADD: u32 = 2;

/// How often it is looked in which call a thread waits that has not begun to wait, and the time
/// between two looks.
const LOOKS_MAX: usize = 1000;
const LOOK_TIME: Duration = Duration::from_millis(1);

/// What is to be expected of a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outlook {
    /// The caller goes on, as far as this process can see.
    Alive,
    /// Nobody will look at what comes of the caller's request. The caller is being killed, or ends
    /// and has no memory any more, so that no further signal reaches it.
    Ends,
    /// The thread is no more. Its process may go on.
    Gone,
    /// The caller cannot be seen from here: it is in another container, or /proc hides it.
    Unseen,
}

/// Whether /proc numbers processes as our own namespace does, and so the kernel's requests.
pub(crate) fn sees_callers() -> bool {
    static SEES: OnceLock<bool> = OnceLock::new();
    *SEES.get_or_init(|| {
        let own = std::process::id().to_string();
        std::fs::read_link("/proc/self").is_ok_and(|link| link == Path::new(&own))
    })
}

/// What is to be expected of the thread `pid`; with the process that it is of, if that is seen.
pub(crate) fn outlook(pid: Pid) -> (Outlook, Option<Pid>) {
    match status_of(pid) {
        Ok(status) => (outlook_in(&status), process_in(&status)),
        Err(outlook) => (outlook, None),
    }
}

/// Not from `stat`, which cannot be read while the process closes files in exec(2).
fn status_of(pid: Pid) -> Result<String, Outlook> {
    if pid == Pid(0) {
        return Err(Outlook::Unseen);
    }
    std::fs::read_to_string(format!("/proc/{pid}/status")).map_err(|_| {
        // SAFETY: signal 0 is only a question.
        let known = unsafe { libc::syscall(libc::SYS_tkill, pid.0 as libc::pid_t, 0) } == 0
            || std::io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH);
        if known { Outlook::Unseen } else { Outlook::Gone }
    })
}

fn outlook_in(status: &str) -> Outlook {
    if matches!(state_in(status), Some('Z' | 'X')) {
        return Outlook::Gone; // the first thread of a process is shown until the last has ended
    }
    // A thread of the kernel has no memory either, and another parent.
    let ends = is_killed(status) || !of_kernel_in(status) && !status.contains("\nVmSize:");
    if ends { Outlook::Ends } else { Outlook::Alive }
}

fn of_kernel_in(status: &str) -> bool {
    field(status, "PPid:").and_then(|mut ids| ids.next()) == Some(KTHREADD)
}

/// Whether the thread `pid` is the kernel's own, such as one of its NFS server.
pub(crate) fn is_of_kernel(pid: Pid) -> bool {
    status_of(pid).is_ok_and(|status| of_kernel_in(&status))
}

/// As proc(5) has it.
fn state_in(status: &str) -> Option<char> {
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    state.and_then(|state| state.trim_start().chars().next())
}

fn process_in(status: &str) -> Option<Pid> {
    field(status, "Tgid:")?.next().map(Pid)
}

/// Whether SIGKILL waits, which any other fatal signal has become by the time that it waits.
fn is_killed(status: &str) -> bool {
    let kill = 1u64 << (libc::SIGKILL - 1);
    ["SigPnd:", "ShdPnd:"].iter().any(|name| {
        let mask = status.lines().find_map(|line| line.strip_prefix(name));
        mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
            .is_some_and(|mask| mask & kill != 0)
    })
}

/// The CPU on which the thread `pid` has run last; none if that is not seen. Reads `stat`: not for a caller that may be
/// within exec(2), see [`outlook`].
pub(crate) fn last_cpu(pid: Pid) -> Option<usize> {
    if pid == Pid(0) || !sees_callers() {
        return None;
    }
    // That of the thread alone: the one of a process counts all of its threads.
    cpu_in(&std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/stat")).ok()?)
}

/// Field 39 of proc(5). The name in parentheses, the second one, may hold anything.
fn cpu_in(stat: &str) -> Option<usize> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(36)?.parse().ok()
}

/// Whether no thread of `process` goes on.
pub(crate) fn process_ends(process: Pid) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else {
        return status_of(process) == Err(Outlook::Gone);
    };
    let ends = |thread: std::fs::DirEntry| {
        let status = std::fs::read_to_string(thread.path().join("status"));
        status.map_or(true, |status| outlook_in(&status) != Outlook::Alive)
    };
    threads.flatten().all(ends)
}

/// Whether the thread `pid` sleeps deeply: one that waits for the kernel's FUSE does so
/// once it has been signalled, and lightly before.
pub(crate) fn sleeps_deeply(pid: Pid) -> bool {
    status_of(pid).is_ok_and(|status| state_in(&status) == Some('D'))
}

/// What a thread is seen doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallingSyscall {
    Waits(SystemCall),
    /// The thread runs, or is about to.
    Runs,
    /// The call is not to be seen: the thread's end has come, or we may not trace it (ptrace(2)).
    Unseen,
}

/// A system call that a thread waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SystemCall {
    /// Negative: none, it waits for something else.
    pub(crate) number: i64,
    /// Of the call with its arguments and where it was made: other calls of the thread have another
    /// one. The same in every process.
    pub(crate) print: NonZeroU32,
    /// The first two.
    pub(crate) arguments: [u64; 2],
}

impl SystemCall {
    /// From a line of /proc/PID/syscall (proc(5)).
    fn in_line(line: &str) -> Option<SystemCall> {
        let mut words = line.split_ascii_whitespace();
        let number = words.next()?.parse().ok()?;
        let mut argument = || {
            let digits = words.next().and_then(|word| word.strip_prefix("0x"));
            digits.and_then(|digits| u64::from_str_radix(digits, 16).ok()).unwrap_or_default()
        };
        let arguments = [argument(), argument()];
        let hash = fnv1a(line.as_bytes());
        let print = (hash >> 32) as u32 ^ hash as u32;
        let print = NonZeroU32::new(print).unwrap_or(NonZeroU32::MIN);
        Some(SystemCall { number, print, arguments })
    }
}

/// Which system call the thread `pid` is in.
pub(crate) fn call_of(pid: Pid) -> CallingSyscall {
    let Ok(line) = std::fs::read_to_string(format!("/proc/{pid}/syscall")) else {
        return CallingSyscall::Unseen;
    };
    match SystemCall::in_line(&line) {
        Some(call) => CallingSyscall::Waits(call),
        None if line.trim_end() == "running" => CallingSyscall::Runs,
        None => CallingSyscall::Unseen,
    }
}

/// In which call the thread `pid` waits for an answer of ours, which it may be about to do only. None
/// where that is not to be seen.
pub(crate) async fn call_that_waits(pid: Pid) -> Option<SystemCall> {
    for _ in 0..LOOKS_MAX {
        match call_of(pid) {
            CallingSyscall::Waits(call) => return Some(call),
            CallingSyscall::Unseen => return None,
            CallingSyscall::Runs => sleep(LOOK_TIME).await,
        }
    }
    None
}

/// fcntl(2), as a thread waits in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fcntl {
    pub(crate) descriptor: u32,
    pub(crate) command: i32,
}

/// The fcntl(2) call that the thread `pid` waits in; none where the call is not to be seen.
pub(crate) async fn fcntl_of(pid: Pid) -> Option<Fcntl> {
    let call = call_that_waits(pid).await.filter(|call| call.number == libc::SYS_fcntl)?;
    // Ints: what else is in the registers is chance.
    let [descriptor, command] = call.arguments.map(|argument| argument as u32);
    Some(Fcntl { descriptor, command: command as i32 })
}

/// What a descriptor of a thread leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeadsTo {
    Inode(u64),
    /// The descriptor has been closed.
    Nothing,
    /// The file is not to be seen (before Linux 5.14 /proc does not tell).
    Unseen,
}

/// Without a look at the file itself, which may be one of ours.
pub(crate) fn descriptor_of(pid: Pid, descriptor: u32) -> LeadsTo {
    match std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")) {
        Ok(about) => {
            let ino = about.lines().find_map(|line| line.strip_prefix("ino:"));
            let ino = ino.and_then(|ino| ino.trim().parse().ok());
            ino.map_or(LeadsTo::Unseen, LeadsTo::Inode)
        }
        // Of a thread that is there.
        Err(error) if error.kind() == ErrorKind::NotFound => match call_of(pid) {
            CallingSyscall::Waits(_) => LeadsTo::Nothing,
            _ => LeadsTo::Unseen,
        },
        Err(_) => LeadsTo::Unseen,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_is_behind_a_name_that_looks_like_more_of_them() {
        let fields: Vec<String> = (4..53).map(|field| field.to_string()).collect();
        let stat = format!("7 (a) S 1) S {}\n", fields.join(" "));
        assert_eq!((cpu_in(&stat), cpu_in("7 (a) S 1"), cpu_in("")), (Some(39), None, None));
        let own = Pid(std::process::id());
        assert!(!sees_callers() || last_cpu(own).is_some());
        assert_eq!(last_cpu(Pid(0)), None);
    }

    #[test]
    fn who_ends_has_no_memory_or_is_being_killed() {
        let alive =
            "Name:\tx\nState:\tD (disk sleep)\nTgid:\t9\nPPid:\t1\nVmSize:\t7 kB\nSigPnd:\t00\nShdPnd:\t00\n".to_owned();
        let gone = alive.replace("VmSize:\t7 kB\n", "");
        assert_eq!((outlook_in(&alive), process_in(&alive)), (Outlook::Alive, Some(Pid(9))));
        assert_eq!(outlook_in(&gone), Outlook::Ends);
        assert_eq!(outlook_in(&alive.replace("ShdPnd:\t00", "ShdPnd:\t100")), Outlook::Ends);
        assert_eq!(outlook_in(&gone.replace("D (disk sleep)", "Z (zombie)")), Outlook::Gone);
        let of_kernel = gone.replace("PPid:\t1", "PPid:\t2");
        assert_eq!(outlook_in(&of_kernel), Outlook::Alive);
        assert!(of_kernel_in(&of_kernel) && !of_kernel_in(&alive));
    }

    #[test]
    fn an_absent_process_is_distinguished_from_an_invisible_one() {
        assert!(sees_callers());
        let own = Pid(std::process::id());
        assert_eq!(outlook(own), (Outlook::Alive, Some(own)));
        assert!(!process_ends(own) && !sleeps_deeply(own));
        let none = Pid(0x7fff_fff0);
        assert_eq!(outlook(none), (Outlook::Gone, None));
        assert!(process_ends(none) && !sleeps_deeply(none));
        assert_eq!(outlook(Pid(0)), (Outlook::Unseen, None));
    }

    // proves: P20
    #[test]
    fn it_shows_in_which_call_one_waits() {
        // SAFETY: it only tells a number.
        let own = Pid(unsafe { libc::gettid() } as u32);
        let in_call = |pid, number| matches!(call_of(pid), CallingSyscall::Waits(call) if call.number == number);
        assert!(in_call(own, libc::SYS_read), "it is reading this");
        assert_eq!(call_of(Pid(0x7fff_fff0)), CallingSyscall::Unseen);
        let parked = std::thread::scope(|scope| {
            let (sender, receiver) = std::sync::mpsc::channel();
            let other = scope.spawn(move || {
                // SAFETY: as above.
                sender.send(Pid(unsafe { libc::gettid() } as u32)).unwrap();
                std::thread::park();
            });
            let pid = receiver.recv().unwrap();
            let parked = (0..30_000).any(|_| {
                std::thread::sleep(std::time::Duration::from_millis(1));
                in_call(pid, libc::SYS_futex)
            });
            other.thread().unpark();
            parked
        });
        assert!(parked);
    }

    #[test]
    fn it_shows_what_a_descriptor_leads_to() {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::MetadataExt;
        // SAFETY: it only tells a number.
        let own = Pid(unsafe { libc::gettid() } as u32);
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let ino = file.metadata().unwrap().ino();
        assert_eq!(descriptor_of(own, file.as_raw_fd() as u32), LeadsTo::Inode(ino));
        assert_eq!(descriptor_of(own, 1_000_000), LeadsTo::Nothing);
        assert_eq!(descriptor_of(Pid(0x7fff_fff0), 0), LeadsTo::Unseen);
    }

    #[test]
    fn a_call_is_identified_by_its_arguments_and_its_place() {
        let line = "257 0xffffff9c 0x7f10 0x80000 0x0 0x0 0x0 0x7ffc10 0x7f20\n";
        let call = SystemCall::in_line(line).unwrap();
        assert_eq!((call.number, SystemCall::in_line(line)), (257, Some(call)));
        assert_eq!(call.arguments, [0xffff_ff9c, 0x7f10]);
        for (was, is) in [("0x7f10", "0x7f11"), ("0x80000", "0x800c0"), ("0x7ffc10", "0x7ffc18")] {
            let other = SystemCall::in_line(&line.replace(was, is)).unwrap();
            assert!(other.number == 257 && other.print != call.print, "{is}");
        }
        assert_eq!(SystemCall::in_line("running\n"), None);
        assert_eq!(SystemCall::in_line(""), None);
    }
}
