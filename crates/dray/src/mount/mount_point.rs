//! The mount point: checks that it can be one, and lets one mount at a time be made there.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::daemonize::StartProgress;
use crate::error::{ErrorContext, Failure};
use crate::flock::lock_within;
use crate::mount::mount_table;
use crate::output;

/// How long one waits for others that mount at the same place, who take milliseconds. A program
/// that has locked the directory for reasons of its own does not keep a mount away.
const LOCK_MAX: Duration = Duration::from_secs(10);

/// A mount whose last descriptor is closed says so within this time.
const DEAD_ANSWERS_MAX: Duration = Duration::from_secs(5);

/// The mount point, absolute; a directory that is not one of our mounts already.
pub(super) fn check(path: &Path) -> Result<PathBuf, Failure> {
    let shown = path.display();
    let what = || format!("cannot mount on {shown}");
    // Before it is looked at: its server may not answer.
    if mount_table::follow(path).doing(what)?.mounted_there().is_some() {
        return Err(taken(path));
    }
    let at = std::fs::canonicalize(path).map_err(|error| {
        let advice = match error.raw_os_error() {
            Some(libc::ENOENT) => "; make the directory first",
            Some(libc::ENOTCONN) => "; another mount there is dead: `umount -l` it first",
            _ => "",
        };
        Failure::new(format!("{}: {error}{advice}", what()))
    })?;
    if at == Path::new("/") {
        return Err(Failure::new(format!("{}: a mount there would not be visible", what())));
    }
    match dray_fuse::mode_at(&at).doing(what)? & libc::S_IFMT {
        libc::S_IFDIR => Ok(at),
        _ => Err(Failure::new(format!("{}: it is not a directory", what()))),
    }
}

fn taken(path: &Path) -> Failure {
    let shown = path.display();
    Failure::new(format!(
        "{shown} has a dray mount already: `dray umount {shown}` first, or choose another directory"
    ))
}

/// The right to mount at `at`, until it is dropped. Of several that find the place free at the same
/// moment only one may mount there. It is a lock on the directory itself, which is the same for
/// every user and whatever run directory they have. Errors: there is a mount of dray by now.
pub(super) fn lock_for_mounting(at: &Path) -> Result<Option<File>, Failure> {
    // Opening an automount point would ask for the very mount that is being made. The kernel
    // does not ask a process for it that has asked once.
    let held = if mount_table::is_automount(at) { None } else { lock(at) };
    match mount_table::find(at) {
        Some(_) => Err(taken(at)),
        None => Ok(held),
    }
}

/// Takes away a mount of `source` whose processes ended before it served, as far as they came. Whatever else
/// is at `at` stays.
pub(super) fn take_away(at: &Path, source: &str, reached: StartProgress) {
    let Some(entry) = mount_table::find(at).filter(|entry| entry.source == source) else { return };
    let is_ours = match reached {
        StartProgress::Nothing => false,
        StartProgress::Mounting => dray_fuse::is_aborted(at, DEAD_ANSWERS_MAX),
        StartProgress::Mounted(connection) => connection == entry.connection,
    };
    if is_ours && let Err(error) = dray_fuse::unmount(at, true) {
        let at = at.display();
        output::complain(format!("cannot unmount {at}, which no daemon serves: {error}"));
    }
}

/// None where it cannot be had: then it goes without.
fn lock(at: &Path) -> Option<File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW);
    let dir = options.open(at).ok()?;
    lock_within(&dir, LOCK_MAX).is_ok_and(|has_it| has_it).then_some(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_has_the_place() {
        let dir = tempfile::tempdir().unwrap();
        let first = lock_for_mounting(dir.path()).unwrap().unwrap();
        let at = dir.path().to_owned();
        let (sender, receiver) = std::sync::mpsc::channel();
        let other = std::thread::spawn(move || {
            let has_it = lock_for_mounting(&at).unwrap().is_some();
            sender.send(()).unwrap();
            has_it
        });
        assert!(receiver.recv_timeout(Duration::from_millis(50)).is_err());
        drop(first);
        assert!(other.join().unwrap());
        assert!(lock_for_mounting(Path::new("/nowhere/at/all")).unwrap().is_none());
    }
}
