//! What a supervisor leaves for `dray upgrade` to find: a file named after the mount point,
//! locked as long as the supervisor lives, with what serves at the moment.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Doing, Failure};
use crate::named::{self, Named};
use crate::paths;

/// How often one looks whether a supervisor has ended.
const PAUSE: Duration = Duration::from_millis(5);

/// The file of a live supervisor.
pub struct Note {
    file: File,
    /// The name goes with the supervisor.
    name: Named,
    /// Daemons that have served.
    daemons: u64,
}

/// What the file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// Process of the supervisor.
    pub supervisor: u32,
    /// Daemons that have served, this one included.
    pub daemons: u64,
    /// Process of the daemon.
    pub daemon: u32,
    /// What it runs is not what the mount was to be upgraded to last, if it ever was.
    pub former_program: bool,
}

fn path_for(at: &Path) -> PathBuf {
    paths::run_dir().join("mounts").join(format!("{}.supervisor", paths::short_name(at)))
}

impl Note {
    /// For the mount at `at`. A supervisor that still has one there is about to end, or its mount
    /// is no longer in the tree. Errors: those of open(2), mkdir(2) and rename(2).
    pub fn open(at: &Path) -> Result<Note, Failure> {
        let path = path_for(at);
        paths::make_private(&paths::run_dir())?;
        paths::make_private(&paths::run_dir().join("mounts"))?;
        let aside = named::aside(&path);
        let what = || format!("cannot use {}", path.display());
        let mut options = OpenOptions::new();
        options.create(true).truncate(true).read(true).write(true).mode(0o600);
        let file = options.open(&aside).doing(what)?;
        lock(&file, libc::F_SETLK).doing(what)?;
        let name = Named::take(&aside, path.clone()).doing(what)?;
        Ok(Note { file, name, daemons: 0 })
    }

    /// Another daemon serves.
    pub fn tell(&mut self, pid: u32, former_program: bool) {
        self.daemons += 1;
        // Of a fixed length, so that a reader never sees the end of an older line.
        let line = format!("{:20} {pid:10} {}\n", self.daemons, u8::from(former_program));
        if let Err(error) = self.file.write_all_at(line.as_bytes(), 0) {
            log::warn!("cannot write {}: {error}", self.name.path().display());
        }
    }
}

/// What the supervisor of the mount at `at` says; none if there is no such supervisor.
pub fn read_note(at: &Path) -> Option<Told> {
    let file = OpenOptions::new().read(true).write(true).open(path_for(at)).ok()?;
    let supervisor = lock(&file, libc::F_GETLK).ok()??;
    let text = io::read_to_string(&file).ok()?;
    let mut words = text.split_ascii_whitespace();
    Some(Told {
        supervisor,
        daemons: words.next()?.parse().ok()?,
        daemon: words.next()?.parse().ok()?,
        former_program: words.next()? == "1",
    })
}

/// A supervisor whose end somebody waits for.
pub struct Watched(File);

/// The supervisor of the mount at `at`, whatever mount is there later; none if there is none.
pub fn watch(at: &Path) -> Option<Watched> {
    let file = OpenOptions::new().read(true).write(true).open(path_for(at)).ok()?;
    Some(Watched(file))
}

impl Watched {
    /// Waits until it has ended, up to `patience`. Whether it has.
    pub fn ends_within(&self, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        loop {
            match lock(&self.0, libc::F_GETLK) {
                Ok(Some(_)) if Instant::now() < end => std::thread::sleep(PAUSE),
                Ok(Some(_)) => return false,
                Ok(None) | Err(_) => return true,
            }
        }
    }
}

/// A lock on the whole file, which ends with the process. Answers who has it, if asked.
fn lock(file: &File, command: i32) -> io::Result<Option<u32>> {
    // SAFETY: an all-zero flock is a valid one.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as _;
    // SAFETY: the kernel reads and writes the struct, which outlives the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), command, &mut lock) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(if command == libc::F_GETLK { holder(&lock) } else { None })
}

/// The process that has the lock. None if nobody has it, or one that has no number here, in
/// another container: that shows as 0, which to kill(2) is the caller's own group.
fn holder(lock: &libc::flock) -> Option<u32> {
    let held = lock.l_type != libc::F_UNLCK as libc::c_short;
    u32::try_from(lock.l_pid).ok().filter(|pid| held && *pid > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_supervisor_in_another_container_is_not_taken_for_our_own_group() {
        // SAFETY: an all-zero flock is a valid one.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = libc::F_WRLCK as _;
        for (pid, expected) in [(0, None), (-1, None), (7, Some(7))] {
            lock.l_pid = pid;
            assert_eq!(holder(&lock), expected);
        }
        lock.l_type = libc::F_UNLCK as _;
        assert_eq!(holder(&lock), None);
    }
}
