//! `dray umount`.

use std::path::Path;
use std::time::Duration;

use crate::args::UmountArgs;
use crate::error::{Doing, Failure};
use crate::mount::mount_table;
use crate::mount::supervisor;
use crate::paths;

/// How long unmounting waits for the daemon to sync what it has, to take leave of the server and
/// to end: whoever stops the server next finds nobody there, and no grace period follows. A
/// server that does not answer holds nobody up longer.
const FAREWELL_MAX: Duration = Duration::from_secs(5);

/// Unmounts.
pub fn run(args: &UmountArgs) -> Result<(), Failure> {
    let shown = args.mountpoint.display();
    let followed = mount_table::follow(&args.mountpoint);
    let entry = followed.doing(|| format!("cannot unmount {shown}"))?.mounted_there();
    let entry = entry.ok_or_else(|| not_mounted(&shown.to_string()))?;
    if !paths::is_root() && entry.user != paths::effective_uid() {
        return Err(Failure::new(format!(
            "cannot unmount {shown}: user {} mounted it, who can unmount it, and root",
            entry.user
        )));
    }
    let (at, connection) = (entry.at, entry.connection);
    let supervisor =
        mount_table::places_of(connection).iter().find_map(|place| supervisor::watch(&place.at));
    unmount(&at, args.lazy, &shown.to_string())?;
    // It goes on where it can also be reached at another place.
    let goes_on = || !mount_table::places_of(connection).is_empty();
    if let Some(supervisor) = supervisor.filter(|_| !args.lazy && !goes_on())
        && !supervisor.ends_within(FAREWELL_MAX)
    {
        log::info!("{shown} is unmounted; its daemon still takes leave of the server");
    }
    Ok(())
}

fn unmount(at: &Path, lazy: bool, shown: &str) -> Result<(), Failure> {
    dray_fuse::unmount(at, lazy).map_err(|error| {
        let busy = error.raw_os_error() == Some(libc::EBUSY)
            || error.to_string().to_lowercase().contains("busy");
        if busy {
            return Failure::new(format!(
                "{shown} is in use: end the programs that have files open or their working \
                 directory there (`fuser -vm {shown}` names them), or take it out of the tree \
                 now with `dray umount --lazy {shown}`"
            ));
        }
        Failure::new(format!("cannot unmount {shown}: {error}"))
    })
}

fn not_mounted(shown: &str) -> Failure {
    let mounts = mount_table::list();
    if mounts.is_empty() {
        return Failure::new(format!("{shown} is not a mount of dray; there is none here"));
    }
    let names: Vec<String> = mounts.iter().map(|entry| entry.at.display().to_string()).collect();
    Failure::new(format!("{shown} is not a mount of dray; those are: {}", names.join(", ")))
}
