//! `dray umount`.

use crate::args::UmountArgs;
use crate::error::{Doing, Failure};
use crate::{mount::mount_table, paths};

/// Unmounts.
pub fn run(args: &UmountArgs) -> Result<(), Failure> {
    let shown = args.mountpoint.display();
    let at = paths::absolute(&args.mountpoint).doing(|| format!("cannot unmount {shown}"))?;
    let at = match mount_table::find(&at) {
        Some(entry) => entry.at,
        None => find_behind_link(&at).ok_or_else(|| not_mounted(&shown.to_string()))?,
    };
    dray_fuse::unmount(&at, args.lazy).map_err(|error| {
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

/// A symbolic link that leads to a mount; only asked where no mount has that very name.
fn find_behind_link(at: &std::path::Path) -> Option<std::path::PathBuf> {
    let target = std::fs::canonicalize(at).ok()?;
    mount_table::find(&target).map(|entry| entry.at)
}

fn not_mounted(shown: &str) -> Failure {
    let mounts = mount_table::list();
    if mounts.is_empty() {
        return Failure::new(format!("{shown} is not a mount of dray; there is none here"));
    }
    let names: Vec<String> = mounts.iter().map(|entry| entry.at.display().to_string()).collect();
    Failure::new(format!("{shown} is not a mount of dray; those are: {}", names.join(", ")))
}
