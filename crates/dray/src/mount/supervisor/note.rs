//! The note by which `dray upgrade` finds a supervisor. It is a file named after the mount point. The
//! supervisor locks it while it runs, and writes into it which daemon serves.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::control_location::Supervisors;
use crate::control;
use crate::error::{ErrorContext, Failure};
use crate::mount::mount_table::MountEntry;
use crate::paths;
use crate::run_file::{self, RunFile};

/// How often one looks whether a supervisor has ended.
const PAUSE: Duration = Duration::from_millis(5);

/// The file of a live supervisor.
pub struct NoteFile {
    file: File,
    /// The name goes with the supervisor.
    name: RunFile,
    /// Daemons that have served.
    daemons: u64,
}

/// What the file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SupervisorReport {
    /// Process of the supervisor.
    pub supervisor: u32,
    /// Daemons that have served, this one included.
    pub daemons: u64,
    /// Process of the daemon.
    pub daemon: u32,
    /// What it runs is not what the mount was to be upgraded to last, if it ever was.
    pub former_program: bool,
    /// Upgrades that were asked for before it was started; none: the supervisor is of a version that
    /// does not say so.
    pub heeded: Option<u64>,
}

impl SupervisorReport {
    /// Whether it says what has become of an upgrade that was asked for when the note said `before`.
    /// A daemon that was started earlier may become ready behind that.
    pub fn answers_since(&self, before: &SupervisorReport) -> bool {
        match (self.heeded, before.heeded) {
            (Some(now), Some(then)) => now > then,
            _ => self.daemons > before.daemons,
        }
    }
}

const EXTENSION: &str = "supervisor";

fn path_for(dir: &Path, name: &str) -> PathBuf {
    dir.join("mounts").join(format!("{name}.{EXTENSION}"))
}

impl NoteFile {
    /// For the mount that is called so. A supervisor that still has one there is about to end, or
    /// its mount is no longer in the tree. Errors: those of open(2), mkdir(2) and rename(2).
    pub fn open(name: &str) -> Result<NoteFile, Failure> {
        let dir = paths::run_dir();
        let path = path_for(&dir, name);
        paths::make_run_dir()?;
        paths::make_private(&dir.join("mounts"))?;
        remove_left_behind(&dir.join("mounts")); // before there is a lock of ours: see there
        let aside = run_file::aside(&path);
        let what = || format!("cannot use {}", path.display());
        let mut options = OpenOptions::new();
        options.create(true).truncate(true).read(true).write(true).mode(0o600);
        let file = options.open(&aside).doing(what)?;
        lock(&file, libc::F_SETLK).doing(what)?;
        let name = RunFile::take(&aside, path.clone()).doing(what)?;
        Ok(NoteFile { file, name, daemons: 0 })
    }

    /// Whether the file is still there: another process may have removed it.
    pub fn is_there(&self) -> bool {
        self.name.is_there()
    }

    /// Notes that another daemon serves, started behind so many requests to upgrade. Its program
    /// may be a former one.
    pub fn tell(&mut self, pid: u32, former_program: bool, heeded: u64) {
        self.daemons += 1;
        // Of a fixed length, so that a reader never sees the end of an older line.
        let former = u8::from(former_program);
        let line = format!("{:20} {pid:10} {former} {heeded:20}\n", self.daemons);
        if let Err(error) = self.file.write_all_at(line.as_bytes(), 0) {
            log::warn!("cannot write {}: {error}", self.name.path().display());
        }
    }
}

/// Removes the notes of supervisors and the control sockets of daemons that were killed. To be called
/// by a process that has no note: closing a file gives up the locks that a process has on it
/// (fcntl(2)).
fn remove_left_behind(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_left = || open(&path, paths::effective_uid()).is_some_and(|note| !is_held(&note));
        match path.extension().and_then(OsStr::to_str) {
            Some(EXTENSION) if is_left() => run_file::remove_if(&path, |_| is_left()),
            Some(control::EXTENSION) => control::remove_dead(&path),
            _ => {}
        }
    }
}

/// The note of a live supervisor.
pub struct SupervisorNote {
    path: PathBuf,
    user: u32,
}

/// The note of the supervisor of this mount; none if there is no such supervisor.
pub fn find_note(mount: &MountEntry) -> Option<SupervisorNote> {
    let user = mount.user;
    let places = Supervisors::look().whereabouts_of(mount).into_iter();
    let mut paths = places.map(|place| path_for(&place.dir, &place.name));
    let path = paths.find(|path| open(path, user).is_some_and(|note| is_held(&note)))?;
    Some(SupervisorNote { path, user })
}

impl SupervisorNote {
    /// What it says; none if the supervisor has ended, or no daemon has served so far.
    pub fn read(&self) -> Option<SupervisorReport> {
        let file = open(&self.path, self.user)?;
        let supervisor = holder(&lock(&file, libc::F_GETLK).ok()?)?;
        let text = io::read_to_string(&file).ok()?;
        let mut words = text.split_ascii_whitespace();
        Some(SupervisorReport {
            supervisor,
            daemons: words.next()?.parse().ok()?,
            daemon: words.next()?.parse().ok()?,
            former_program: words.next()? == "1",
            heeded: words.next().and_then(|word| word.parse().ok()),
        })
    }

    /// To wait for its supervisor's end, whatever mount is there later; none if it has ended.
    pub fn watch(&self) -> Option<SupervisorWatch> {
        open(&self.path, self.user).map(SupervisorWatch)
    }
}

/// A note of this user. Other files at that path are refused.
fn open(path: &Path, user: u32) -> Option<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path).ok()?;
    let meta = file.metadata().ok()?;
    (meta.is_file() && meta.uid() == user).then_some(file)
}

/// A supervisor whose end a command waits for.
pub struct SupervisorWatch(File);

impl SupervisorWatch {
    /// Waits until it has ended, up to `patience`. Whether it has.
    pub fn ends_within(&self, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        loop {
            match is_held(&self.0) {
                true if Instant::now() < end => std::thread::sleep(PAUSE),
                held => return !held,
            }
        }
    }
}

/// Whether a process has the lock, also one that has no number here. One that cannot be asked for
/// is not.
fn is_held(file: &File) -> bool {
    let lock = lock(file, libc::F_GETLK);
    lock.is_ok_and(|lock| lock.l_type != libc::F_UNLCK as libc::c_short)
}

/// A lock on the whole file, which ends with the process. Answers what fcntl(2) makes of it.
fn lock(file: &File, command: i32) -> io::Result<libc::flock> {
    // SAFETY: an all-zero flock is a valid one.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as _;
    // SAFETY: the kernel reads and writes the struct, which outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &mut lock) } {
        0 => Ok(lock),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The process that has the lock. None if nobody has it, or one that has no number here, in another
/// container. That shows as 0, which to kill(2) is the caller's own group.
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
