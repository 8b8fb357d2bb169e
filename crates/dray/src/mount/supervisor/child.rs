//! The supervisor's children: a daemon, and the command that unmounts.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::launch::OWN_PROGRAM;
use super::mount_descriptors::{MountDescriptors, PARENT, pass_on, place_at};

/// Exit code of a daemon that has stopped for its successor.
pub const HANDED_OVER: i32 = 75;
/// In the environment of a daemon that an upgrade asked for: if it cannot serve, the former program
/// does. No word of its command line, where other versions would not know it.
pub const TRIED: &str = "DRAY_UPGRADE_TRIED";
/// In the environment of a daemon: the kernel's number of its connection, by which it finds the
/// mount wherever that is by then. No word of its command line, as above.
pub const CONNECTION: &str = "DRAY_MOUNT_CONNECTION";
/// A word of the supervisor: stop, without ending the mount.
pub const STOP: u8 = b's';
/// A word of a daemon: it is not stuck, but waits for the server.
pub const WAITING: u8 = b'w';
/// A word of a daemon that serves: the queues of its ring need a push.
pub const WAKE: u8 = b'k';
/// A word of a daemon that serves: the entries of its ring should come together, so that their
/// memory can be given back.
pub const RECLAIM: u8 = b'g';
/// Words of a daemon that serves.
const READY: u8 = b'r';
const READY_WITHOUT_RESEND: u8 = b'o';
const READY_ON_RING: u8 = b'u';

/// The word with which a daemon says that it serves: over a ring or not, and whether the
/// kernel can send requests again.
pub fn ready_word(ring: bool, resend: bool) -> u8 {
    match (ring, resend) {
        (true, _) => READY_ON_RING,
        (false, true) => READY,
        (false, false) => READY_WITHOUT_RESEND,
    }
}

/// How far a daemon is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The daemon does not serve so far.
    Starting,
    /// The daemon serves.
    Serving,
    /// The daemon serves. Requests that it has read end with it.
    ServingWithoutResend,
    /// The daemon serves a ring, whose queues need a push if they have been without a daemon.
    ServingRing,
}

/// A daemon.
pub struct Daemon {
    child: Child,
    /// None once it is closed at the other end.
    control: Option<UnixStream>,
    /// How far it is.
    pub stage: Stage,
    /// When it last said something, or was started.
    pub heard_at: Instant,
    /// The daemon asked for a push of its queues.
    pub wants_push: bool,
    /// The daemon asked for its entries to come together.
    pub wants_reclaim: bool,
    /// When it was asked to stop.
    pub stopping: Option<Instant>,
}

impl Daemon {
    /// Starts one of this connection, which may know that it is `tried`. Errors: those of
    /// socketpair(2), fork(2) and exec(2).
    pub fn start(
        program: &Path,
        words: &[OsString],
        connection: u32,
        tried: bool,
        held: &MountDescriptors,
    ) -> io::Result<Daemon> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let mut command = Command::new(program);
        command.arg0("dray").arg("mount-daemon").args(words).env_remove(TRIED);
        command.env(CONNECTION, connection.to_string());
        if tried {
            command.env(TRIED, "1");
        }
        let (numbers, theirs_fd) = (held.numbers(), theirs.as_raw_fd());
        // SAFETY: between fork and exec only system calls are made, on memory that was
        // allocated before. Nothing else is at these numbers, in this process neither.
        unsafe {
            command.pre_exec(move || {
                place_at(theirs_fd, PARENT)?;
                numbers.iter().try_for_each(|number| pass_on(*number))
            });
        }
        let child = command.spawn()?;
        let control = Some(ours);
        let stage = Stage::Starting;
        let (heard_at, stopping) = (Instant::now(), None);
        let (wants_push, wants_reclaim) = (false, false);
        Ok(Daemon { child, control, stage, heard_at, wants_push, wants_reclaim, stopping })
    }

    /// The process id of the daemon.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where it is heard.
    pub fn control(&self) -> Option<BorrowedFd<'_>> {
        self.control.as_ref().map(AsFd::as_fd)
    }

    /// Takes up what it said; true if that is that it now serves.
    pub fn hear(&mut self) -> bool {
        let mut words = [0; 64];
        let read = match self.control.as_mut().map(|control| control.read(&mut words)) {
            Some(Ok(read @ 1..)) => read,
            Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => return false,
            _ => {
                self.control = None; // it is about to end, which SIGCHLD tells
                return false;
            }
        };
        self.heard_at = Instant::now();
        let before = self.stage;
        for word in &words[..read] {
            match *word {
                READY => self.stage = Stage::Serving,
                READY_WITHOUT_RESEND => self.stage = Stage::ServingWithoutResend,
                READY_ON_RING => self.stage = Stage::ServingRing,
                WAKE => self.wants_push = true,
                RECLAIM => self.wants_reclaim = true,
                _ => {}
            }
        }
        before == Stage::Starting && self.stage != Stage::Starting
    }

    /// Asks it to leave the mount to a successor.
    pub fn stop(&mut self) {
        let stop_sent = self.control.as_mut().map(|control| control.write_all(&[STOP]));
        if self.stopping.is_none() {
            self.stopping = Some(Instant::now());
        }
        if !matches!(stop_sent, Some(Ok(()))) {
            self.kill();
        }
    }

    /// The daemon's exit status, once it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Ends it and waits for that.
    pub fn kill(&mut self) {
        let _ = self.child.kill(); // it may have ended
        let _ = self.child.wait();
    }
}

/// `dray umount`, in a process of its own: it may have to wait for the daemon.
pub struct UnmountCommand(Child);

impl UnmountCommand {
    /// Starts it. Errors: those of fork(2) and exec(2).
    pub fn start(at: &Path) -> io::Result<UnmountCommand> {
        let mut command = Command::new(OWN_PROGRAM);
        command.arg0("dray").arg("umount").arg(at).stdin(Stdio::null()).stderr(Stdio::piped());
        command.spawn().map(UnmountCommand)
    }

    /// Whether it has ended; logs what it complained about.
    pub fn is_over(&mut self) -> bool {
        let Ok(Some(status)) = self.0.try_wait() else { return false };
        if !status.success() {
            let mut said = String::new();
            if let Some(stderr) = &mut self.0.stderr {
                let _ = stderr.read_to_string(&mut said); // for the log only
            }
            log::error!("{}", said.trim().trim_start_matches("dray: "));
        }
        true
    }
}

/// A command that asks the mount, `dray wake-mount` or `dray gather-entries`, in processes of their
/// own. Each waits for answers of the mount. If its daemon dies, the answers do not come until
/// another one has been woken.
pub struct HelperCommand {
    command: &'static str,
    children: Vec<Child>,
    /// When to try again what could not be done.
    again_at: Option<Instant>,
    /// Tries in vain, one after the other.
    failed: u32,
}

/// A machine that is short of processes or threads is tried again for half a minute.
const WAKE_TRIES_MAX: u32 = 30;
const WAKE_PAUSE: Duration = Duration::from_secs(1);

impl HelperCommand {
    /// By this command, which takes the place of the mount.
    pub fn by(command: &'static str) -> HelperCommand {
        HelperCommand { command, children: Vec::new(), again_at: None, failed: 0 }
    }

    /// Starts another one; those before it are ended as far as they can be. Errors: those of
    /// fork(2) and exec(2).
    pub fn start(&mut self, at: &Path) -> io::Result<()> {
        self.reap();
        self.again_at = None;
        for child in &mut self.children {
            let _ = child.kill(); // what the mount has taken up ends with its answer
        }
        let mut command = Command::new(OWN_PROGRAM);
        command.arg0("dray").arg(self.command).arg(at);
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = quiet.spawn().inspect_err(|_| self.failed())?;
        self.children.push(child);
        Ok(())
    }

    /// Forgets those that have ended. One that could not ask on every CPU is followed by another.
    pub fn reap(&mut self) {
        let (mut done, mut failed) = (false, false);
        self.children.retain_mut(|child| match child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                done |= status.success();
                failed |= status.code().is_some_and(|code| code != 0);
                false
            }
            Err(_) => false,
        });
        if done {
            (self.again_at, self.failed) = (None, 0);
        } else if failed {
            self.failed();
        }
    }

    /// When another one is to be started, if so.
    pub fn again_at(&self) -> Option<Instant> {
        self.again_at
    }

    fn failed(&mut self) {
        self.failed += 1;
        self.again_at = (self.failed < WAKE_TRIES_MAX).then(|| Instant::now() + WAKE_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A supervisor outlives upgrades of its daemon, and upgrades back.
    // proves: P137
    #[test]
    fn processes_of_two_versions_understand_each_other() {
        let ready = [(true, true), (false, true), (false, false)]
            .map(|(ring, resend)| ready_word(ring, resend));
        let words = [STOP, WAITING, WAKE, RECLAIM];
        assert_eq!((ready, words, HANDED_OVER), (*b"uro", *b"swkg", 75));
    }
}
