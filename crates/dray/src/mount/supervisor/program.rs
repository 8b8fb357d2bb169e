//! Chooses the program of the next daemon. It is the one that the mount began with, the one
//! installed now, or the one that served after the last upgrade.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use super::launch::OWN_PROGRAM;
use super::restarts::Death;

/// The programs of a mount.
pub struct Programs {
    /// The file that has the name by which this program was called: upgrades execute it.
    given: PathBuf,
    /// The file `given` is to be executed next.
    wanted: bool,
    /// The file `given` is executed, and has not served so far.
    tried: bool,
    /// The program that came up at the last upgrade, whatever has become of its file. None: the
    /// program that this process runs, even if its file has been replaced.
    upgraded: Option<File>,
    /// The program that serves is not what was wanted last.
    former: bool,
    /// Upgrades that were asked for.
    asked: u64,
    /// The upgrades that had been asked for when the program that is executed was started.
    heeded: u64,
}

impl Programs {
    /// Of a mount that begins; `given` is what upgrades execute.
    pub fn new(given: PathBuf) -> Programs {
        let (wanted, tried) = (false, false);
        Programs { given, wanted, tried, upgraded: None, former: true, asked: 0, heeded: 0 }
    }

    /// What to execute now, a path that is good in this process and in a child that it forks.
    pub fn next(&mut self) -> PathBuf {
        self.tried = std::mem::take(&mut self.wanted);
        self.heeded = self.asked;
        match &self.upgraded {
            _ if self.tried => self.given.clone(),
            Some(file) => format!("/proc/self/fd/{}", file.as_raw_fd()).into(),
            None => OWN_PROGRAM.into(),
        }
    }

    /// What is installed is to be executed next.
    pub fn upgrade(&mut self) {
        self.wanted = true;
        self.asked += 1;
    }

    /// Upgrades asked for before what is executed was started: it is their outcome, or will be.
    pub fn heeded(&self) -> u64 {
        self.heeded
    }

    /// Whether what serves is not what was asked for with the last upgrade.
    pub fn is_former(&self) -> bool {
        self.former
    }

    /// Whether what is executed is what an upgrade asked for, and has not served so far.
    pub fn is_tried(&self) -> bool {
        self.tried
    }

    /// Process `daemon`, which executes it, serves.
    pub fn serves(&mut self, daemon: u32) {
        if !self.tried {
            return;
        }
        self.former = false;
        // To be executed later, though its name may be another's by then.
        let mut options = OpenOptions::new();
        match options.read(true).custom_flags(libc::O_PATH).open(format!("/proc/{daemon}/exe")) {
            Ok(file) => (self.upgraded, self.tried) = (Some(file), false),
            Err(error) => log::warn!("cannot keep {}: {error}", self.given.display()),
        }
    }

    /// Notes that the daemon died. Answers whether another program is to be executed from now on. A
    /// program that is tried and does not serve, or crashes, gives way to the one before it. A
    /// program that somebody kills has done nothing wrong.
    pub fn died(&mut self, death: Death) -> bool {
        let gives_way = std::mem::take(&mut self.tried)
            || (death == Death::Failed && self.upgraded.take().is_some());
        self.former |= gives_way;
        gives_way
    }
}
