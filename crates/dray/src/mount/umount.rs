//! `dray umount`.

use crate::args::UmountArgs;
use crate::error::{Doing, Failure};
use crate::mount::mount_table::{self, MountEntry};
use crate::paths;

/// Unmounts.
pub fn run(args: &UmountArgs) -> Result<(), Failure> {
    let shown = args.mountpoint.display();
    let at = paths::absolute(&args.mountpoint).doing(|| format!("cannot unmount {shown}"))?;
    let entry = mount_table::find(&at).or_else(|| find_behind_link(&at));
    let entry = entry.ok_or_else(|| not_mounted(&shown.to_string()))?;
    if !paths::is_root() && entry.user != paths::effective_uid() {
        return Err(Failure::new(format!(
            "cannot unmount {shown}: user {} mounted it, who can unmount it, and root",
            entry.user
        )));
    }
    let at = entry.at;
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
fn find_behind_link(at: &std::path::Path) -> Option<MountEntry> {
    mount_table::find(&std::fs::canonicalize(at).ok()?)
}

fn not_mounted(shown: &str) -> Failure {
    let mounts = mount_table::list();
    if mounts.is_empty() {
        return Failure::new(format!("{shown} is not a mount of dray; there is none here"));
    }
    let names: Vec<String> = mounts.iter().map(|entry| entry.at.display().to_string()).collect();
    Failure::new(format!("{shown} is not a mount of dray; those are: {}", names.join(", ")))
}
