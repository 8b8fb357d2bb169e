//! `dray umount`.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::args::UmountArgs;
use crate::error::{ErrorContext, Failure};
use crate::mount::mount_table;
use crate::mount::supervisor;
use crate::{output, paths};

/// How long unmounting waits for the daemon to sync what it has, to take leave of the server and to
/// end. The next stop of the server finds no client, and no grace period follows. A server that
/// does not answer holds nobody up longer.
const FAREWELL_MAX: Duration = Duration::from_secs(5);

/// How long a mount that is in use is tried again. Our own process that sets the queues of a ring
/// going uses it for a moment. So do programs that look at each new mount.
const BUSY_MAX: Duration = Duration::from_secs(1);
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// Unmounts.
pub fn run(args: &UmountArgs) -> Result<(), Failure> {
    let shown = args.mountpoint.display();
    let followed = mount_table::follow(&args.mountpoint);
    let entry = followed.doing(|| format!("cannot unmount {shown}"))?.mounted_there();
    let entry = entry.ok_or_else(|| not_mounted(&args.mountpoint))?;
    if !paths::is_root() && entry.user != paths::effective_uid() {
        return Err(Failure::new(format!(
            "cannot unmount {shown}: only root and user {}, who mounted it, can unmount it",
            entry.user
        )));
    }
    let supervisor = supervisor::find_note(&entry).and_then(|note| note.watch());
    let (at, connection) = (entry.at, entry.connection);
    unmount(&at, args.lazy, &shown.to_string())?;
    // The mount goes on where it can also be reached at another place.
    let goes_on = || !mount_table::places_of(connection).is_empty();
    if let Some(supervisor) = supervisor.filter(|_| !args.lazy && !goes_on())
        && !supervisor.ends_within(FAREWELL_MAX)
    {
        log::warn!(
            "{shown} is unmounted, and its processes still run: they are ending the session at the \
             server, or another mount namespace (a container) has the mount, too"
        );
    }
    Ok(())
}

fn unmount(at: &Path, lazy: bool, shown: &str) -> Result<(), Failure> {
    let begin = Instant::now();
    let mut result = dray_fuse::unmount(at, lazy);
    while result.as_ref().is_err_and(is_busy) && begin.elapsed() < BUSY_MAX {
        std::thread::sleep(BUSY_PAUSE);
        result = dray_fuse::unmount(at, lazy);
    }
    result.map_err(|error| {
        if is_busy(&error) {
            return Failure::new(format!(
                "{shown} is in use: end the programs that have files open or their working \
                 directory there (`fuser -vm {shown}` names them); unmount what is mounted within \
                 it (`findmnt -R {shown}`); or take it out of the tree now with `dray umount --lazy \
                 {shown}`"
            ));
        }
        Failure::new(format!("cannot unmount {shown}: {error}"))
    })
}

fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EBUSY) || error.to_string().to_lowercase().contains("busy")
}

fn not_mounted(path: &Path) -> Failure {
    let (shown, mounts) = (path.display(), mount_table::list());
    if mounts.is_empty() {
        return Failure::new(format!("{shown} is not a mount of dray; there is none here"));
    }
    let at = mount_table::follow(path).map_or_else(|_| path.to_owned(), |followed| followed.path);
    if mounts.iter().any(|mount| mount.at == at) {
        return Failure::new(format!(
            "{shown} is a mount of dray with something else mounted over it: `umount {shown}` first"
        ));
    }
    let names: Vec<String> =
        mounts.iter().map(|entry| output::plain(&entry.at.to_string_lossy())).collect();
    Failure::new(format!("{shown} is not a mount of dray; those are: {}", names.join(", ")))
}
