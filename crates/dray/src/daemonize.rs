//! Leaving the terminal, once it is known that all is well.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::error::{Doing, Failure};
use crate::{logger, output};

/// How the one in the background tells the one in the foreground how it went.
pub struct Waiting(Option<File>);

/// Goes on in a child process; the parent waits until [`Waiting::ready`], or until the
/// child has said what is wrong and ended, and passes its exit code on. To be called
/// before any thread is started.
pub fn fork() -> Result<Waiting, Failure> {
    let what = || "cannot go into the background".to_owned();
    let (mut read, write) = pipe().doing(what)?;
    // SAFETY: there is no other thread yet, so the child has everything that it needs.
    match unsafe { libc::fork() } {
        -1 => Err(Failure::new(format!("{}: {}", what(), io::Error::last_os_error()))),
        0 => {
            drop(read);
            // SAFETY: takes no memory. Whoever ends the parent means the child, too.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) };
            Ok(Waiting(Some(write)))
        }
        child => {
            drop(write);
            std::process::exit(i32::from(wait_for(&mut read, child)))
        }
    }
}

/// From here on the child of [`fork`] goes on when its parent ends.
pub fn outlive_parent() {
    // SAFETY: takes no memory; 0 is no signal.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, 0) };
}

/// The child of [`fork`] leaves its parent's session. Not before it has mounted: an automount
/// point lets those of the process group mount that was started for it, and nobody else
/// (autofs, "oz mode"; systemd keeps mount(8) in its own group for that).
pub fn leave_session() {
    // SAFETY: takes no memory. It fails for a leader of a group only, which a child is not.
    unsafe { libc::setsid() };
}

/// 0 once the child is ready, else the exit code that it ended with.
fn wait_for(read: &mut File, child: libc::pid_t) -> u8 {
    if read.read_exact(&mut [0]).is_ok() {
        return 0;
    }
    let mut status = 0;
    // SAFETY: the kernel writes to `status`, which outlives the call.
    unsafe { libc::waitpid(child, &mut status, 0) };
    if libc::WIFEXITED(status) {
        return u8::try_from(libc::WEXITSTATUS(status)).unwrap_or(1).max(1);
    }
    output::complain("the process in the background was killed before it was ready");
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

impl Waiting {
    /// Nobody waits: we stay in the foreground.
    pub fn nobody() -> Waiting {
        Waiting(None)
    }

    /// The other end of the descriptor waits.
    pub fn over(parent: OwnedFd) -> Waiting {
        Waiting(Some(parent.into()))
    }

    /// For a program that this process is about to turn into, and that will tell.
    pub fn into_fd(self) -> Option<OwnedFd> {
        self.0.map(OwnedFd::from)
    }

    /// All is well: lets the parent go, and leaves the terminal to it.
    pub fn ready(mut self) -> Result<(), Failure> {
        let Some(mut parent) = self.0.take() else { return Ok(()) };
        leave_terminal()?;
        let _ = parent.write_all(&[0]); // it may have been killed, which is no reason to end
        Ok(())
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
