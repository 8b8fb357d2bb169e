//! Leaves the terminal once the process in the background is ready.
//!
//! Until then a watching process waits. It cleans up if the process that mounts is killed.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::error::{ErrorContext, Failure};
use crate::{logger, output};

/// Words of the one that mounts: all is well; it is about to mount; it has mounted, and the kernel's
/// number of the connection follows.
const READY: u8 = 0;
const MOUNTING: u8 = b'a';
const MOUNTED: u8 = b'm';

/// How the one that mounts tells the one that waits how it goes: one in the foreground, or one that only
/// watches.
pub struct ReadinessPipe {
    pipe: Option<File>,
    /// The terminal is to be left when all is well.
    leaves: bool,
}

/// How far a mounting process came that ended before the mount was ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartProgress {
    /// Nothing is mounted.
    Nothing,
    /// The process may have mounted.
    Mounting,
    /// The process has mounted; the connection has this number.
    Mounted(u32),
}

/// Goes on in a child process. The parent waits until [`ReadinessPipe::ready`], or until the child
/// has said what is wrong and ended. Then the parent has `clean_up` take away what is left, and
/// passes the exit code on. To be called before any thread is started.
pub fn fork(clean_up: impl FnOnce(StartProgress)) -> Result<ReadinessPipe, Failure> {
    let what = || "cannot go into the background".to_owned();
    let (mut read, write) = pipe().doing(what)?;
    // SAFETY: there is no other thread yet, so the child has everything that it needs.
    match unsafe { libc::fork() } {
        -1 => Err(Failure::new(format!("{}: {}", what(), io::Error::last_os_error()))),
        0 => {
            drop(read);
            // SAFETY: takes no memory. A signal that ends the parent is meant for the child, too.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) };
            Ok(ReadinessPipe { pipe: Some(write), leaves: true })
        }
        child => {
            drop(write);
            std::process::exit(i32::from(wait_for(&mut read, child, clean_up)))
        }
    }
}

/// Goes on in this process. Another one, which nobody has to wait for, has `clean_up` take away
/// what is left if this one ends before [`ReadinessPipe::ready`]. To be called before any thread is
/// started.
pub fn watch(clean_up: impl FnOnce(StartProgress)) -> Result<ReadinessPipe, Failure> {
    let what = || "cannot watch over the mount".to_owned();
    let (mut read, write) = pipe().doing(what)?;
    // SAFETY: there is no other thread yet, so the children have everything that they need.
    match unsafe { libc::fork() } {
        -1 => Err(Failure::new(format!("{}: {}", what(), io::Error::last_os_error()))),
        0 => {
            drop(write);
            // The one that watches is nobody's child, so that no supervisor is notified of its end.
            // SAFETY: as above.
            if unsafe { libc::fork() } == 0 {
                leave_session(); // what ends the one that mounts must not end this one
                if let Err(reached) = listen(&mut read) {
                    clean_up(reached);
                }
            }
            std::process::exit(0)
        }
        child => {
            let mut status = 0;
            // SAFETY: the kernel writes to `status`, which outlives the call.
            unsafe { libc::waitpid(child, &mut status, 0) };
            Ok(ReadinessPipe { pipe: Some(write), leaves: false })
        }
    }
}

/// Hears the one that mounts until all is well, or it has ended: then how far it came.
fn listen(read: &mut File) -> Result<(), StartProgress> {
    let (mut word, mut number) = ([0; 1], [0; 4]);
    let mut reached = StartProgress::Nothing;
    while read.read_exact(&mut word).is_ok() {
        match word[0] {
            READY => return Ok(()),
            MOUNTING => reached = StartProgress::Mounting,
            MOUNTED if read.read_exact(&mut number).is_ok() => {
                reached = StartProgress::Mounted(u32::from_ne_bytes(number));
            }
            _ => {}
        }
    }
    Err(reached)
}

/// From here on the child of [`fork`] goes on when its parent ends.
pub fn outlive_parent() {
    // SAFETY: takes no memory; 0 is no signal.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, 0) };
}

/// A child of [`fork`] or [`watch`] leaves its parent's session. A child of [`fork`] does not
/// before it has mounted. An automount point lets those of the process group mount that was started
/// for it, and nobody else (autofs, "oz mode"). Systemd keeps mount(8) in its own group for that.
pub fn leave_session() {
    // SAFETY: takes no memory. It fails for a leader of a group only, which a child is not.
    unsafe { libc::setsid() };
}

/// 0 once the child is ready, else the exit code that it ended with.
fn wait_for(read: &mut File, child: libc::pid_t, clean_up: impl FnOnce(StartProgress)) -> u8 {
    let Err(reached) = listen(read) else { return 0 };
    let mut status = 0;
    // SAFETY: the kernel writes to `status`, which outlives the call.
    unsafe { libc::waitpid(child, &mut status, 0) };
    clean_up(reached);
    if libc::WIFEXITED(status) {
        return u8::try_from(libc::WEXITSTATUS(status)).unwrap_or(1).max(1);
    }
    let signal = libc::WTERMSIG(status);
    output::complain(format!(
        "signal {signal} ended the process in the background before it was ready: nothing is mounted"
    ));
    1
}

/// Logs to syslog from here on, and lets go of the terminal and the current directory.
pub fn leave_terminal() -> Result<(), Failure> {
    logger::to_syslog();
    let _ = std::env::set_current_dir("/"); // staying would only keep a directory busy
    let null = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/null")
        .doing(|| "cannot open /dev/null".into())?;
    for stdio in 0..3 {
        // SAFETY: both descriptors are open; what refers to the old ones goes on with
        // the new.
        unsafe { libc::dup2(null.as_raw_fd(), stdio) };
    }
    Ok(())
}

impl ReadinessPipe {
    /// The other end of the descriptor waits: in the `foreground` somebody who only watches. None: nobody.
    pub fn over(other: Option<OwnedFd>, foreground: bool) -> ReadinessPipe {
        ReadinessPipe { pipe: other.map(File::from), leaves: !foreground }
    }

    /// For a program that this process is about to become, and that will report.
    pub fn into_fd(self) -> Option<OwnedFd> {
        self.pipe.map(OwnedFd::from)
    }

    /// From here on something may be mounted.
    pub fn mounting(&self) {
        self.tell(&[MOUNTING]);
    }

    /// Reports that the mount is there.
    pub fn mounted(&self, connection: u32) {
        let [a, b, c, d] = connection.to_ne_bytes();
        self.tell(&[MOUNTED, a, b, c, d]);
    }

    /// All is well: lets the other one go, and leaves the terminal to it if it is the parent.
    pub fn ready(self) -> Result<(), Failure> {
        if self.leaves {
            leave_terminal()?;
        }
        self.tell(&[READY]);
        Ok(())
    }

    fn tell(&self, words: &[u8]) {
        if let Some(mut pipe) = self.pipe.as_ref() {
            let _ = pipe.write_all(words); // it may have been killed, which is no reason to end
        }
    }
}

fn pipe() -> io::Result<(File, File)> {
    let mut ends = [0; 2];
    // SAFETY: the kernel writes two descriptors to `ends`.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, owned by nobody else.
    let [read, write] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    Ok((File::from(read), File::from(write)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiting_process_knows_the_progress() {
        let said = |say: &dyn Fn(&ReadinessPipe)| {
            let (mut read, write) = pipe().unwrap();
            let waiting = ReadinessPipe { pipe: Some(write), leaves: false };
            say(&waiting);
            drop(waiting);
            listen(&mut read)
        };
        assert_eq!(said(&|_| {}), Err(StartProgress::Nothing));
        assert_eq!(said(&ReadinessPipe::mounting), Err(StartProgress::Mounting));
        let mounted = |waiting: &ReadinessPipe| {
            waiting.mounting();
            waiting.mounted(0x0102_0304);
        };
        assert_eq!(said(&mounted), Err(StartProgress::Mounted(0x0102_0304)));
        let cut = |waiting: &ReadinessPipe| {
            waiting.mounting();
            waiting.tell(&[MOUNTED, 1, 2]);
        };
        assert_eq!(said(&cut), Err(StartProgress::Mounting), "killed in the middle of a word");
        let ready = |waiting: &ReadinessPipe| {
            mounted(waiting);
            waiting.tell(&[READY]);
        };
        assert_eq!(said(&ready), Ok(()));
    }
}
