//! `-o remount` changes the flags of an existing mount, and reports options that need another mount.

use std::io::ErrorKind;
use std::path::Path;

use dray_client::Target;

use crate::args::MountArgs;
use crate::error::{ErrorContext, Failure};
use crate::mount::mount_table::{self, MountEntry};
use crate::mount::options::MountPlan;
use crate::mount::supervisor::Supervisors;

/// Changes the flags of a mount that is there. What else `-o` says, such as the rest of a line
/// of fstab, has to be as it is.
pub fn remount(args: &MountArgs, mut plan: MountPlan) -> Result<(), Failure> {
    let path = &args.mountpoint;
    let what = || format!("cannot remount {}", path.display());
    let entry = mount_table::follow(path)
        .doing(what)?
        .mounted_there()
        .ok_or_else(|| Failure::new(format!("{}: it is not a mount of dray", what())))?;
    // Whatever it is that is to be changed, it is not that mount.
    if entry.source.parse().is_ok_and(|mounted: Target| mounted != args.target.target) {
        return Err(Failure::new(format!(
            "{}: it is a mount of {}, not of {}; name that, or look at `findmnt -t fuse.dray`",
            what(),
            entry.source,
            args.target.text
        )));
    }
    check_rest(path, &entry, &args.options)?;
    if args.fake {
        return Ok(());
    }
    // mount(8) says all flags that are to hold; people say those that they want changed.
    if !args.helper {
        let mut lists = vec![mount_table::flags_at(&entry.at)];
        lists.extend(args.options.iter().cloned());
        plan = MountPlan::parse(&lists)?;
    }
    dray_fuse::remount(&entry.at, plan.flags()).map_err(|error| {
        let advice = match error.kind() {
            ErrorKind::PermissionDenied => "; root alone may: unmount it and mount it anew",
            _ => "",
        };
        Failure::new(format!("{}: {error}{advice}", what()))
    })
}

/// Checks that `wanted` asks for nothing but flags that the mount has not. The mount's processes
/// took the rest up when they began.
fn check_rest(path: &Path, entry: &MountEntry, wanted: &[String]) -> Result<(), Failure> {
    let Some(mounted) = Supervisors::look().options_of(entry) else {
        log::warn!(
            "{}: its supervisor has ended, or is in another container: only ro, rw, suid, dev \
             and exec are compared",
            path.display()
        );
        return Ok(());
    };
    match difference(&mounted, wanted)? {
        Some(Difference { key, is, wanted }) => Err(Failure::new(format!(
            "cannot remount {0}: it has {key}={is}, and {key}={wanted} takes another mount: `dray \
             umount {0}`, then mount it with that; a remount changes ro, rw, suid, dev and exec alone",
            path.display()
        ))),
        None => Ok(()),
    }
}

/// An option that a mount has otherwise.
#[derive(Debug, PartialEq, Eq)]
struct Difference {
    key: &'static str,
    is: String,
    wanted: String,
}

/// What `wanted` has otherwise than `mounted`. What it does not name may be anything.
fn difference(mounted: &[String], wanted: &[String]) -> Result<Option<Difference>, Failure> {
    let all: Vec<String> = mounted.iter().chain(wanted).cloned().collect();
    let lasting = |lists: &[String]| {
        // The user who remounts need not be able to read the key.
        MountPlan::parse_each(lists, &mut |_| Ok(None)).map(|plan| plan.lasting())
    };
    let (is, wanted) = (lasting(mounted)?, lasting(&all)?);
    let mut pairs = is.into_iter().zip(wanted).map(|((key, is), (_, wanted))| match key {
        "leases" => (key, settled(is), wanted),
        _ => (key, is, wanted),
    });
    let other =
        pairs.find(|(key, is, wanted)| is != wanted && (*key, &**wanted) != ("leases", "auto"));
    Ok(other.map(|(key, is, wanted)| Difference { key, is, wanted }))
}

/// Whether a mount that is there has leases. Its options say so, or it has none.
fn settled(leases: String) -> String {
    if leases == "auto" { "no".to_owned() } else { leases }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn between(mounted: &str, wanted: &str) -> Option<(&'static str, String, String)> {
        let found = difference(&[mounted.to_owned()], &[wanted.to_owned()]).unwrap();
        found.map(|one| (one.key, one.is, one.wanted))
    }

    /// The remount succeeded, and nothing was changed.
    #[test]
    fn every_option_that_a_remount_cannot_change_is_reported() {
        for (mounted, wanted, key, is) in [
            ("", "remount,consistency=close-to-open", "consistency", "strict"),
            ("timeout=5", "timeout=6", "timeout", "5"),
            ("timeout=5", "timeout=never", "timeout", "5"),
            ("", "timeout=1", "timeout", "never"),
            ("", "attr_timeout=3", "attr_timeout", "1"),
            ("", "transport=classic", "transport", "auto"),
            ("", "replay=0", "replay", "67108864"),
            ("auth=psk:/nowhere/a", "auth=psk:/nowhere/b", "auth", "psk:/nowhere/a"),
            ("auth=psk:/nowhere/a", "auth=none", "auth", "psk:/nowhere/a"),
            ("", "workers=2", "workers", "0"),
            ("", "metrics=127.0.0.1:9", "metrics", "none"),
            ("noallow_other", "allow_other", "allow_other", "no"),
            ("", "noshared_mmap", "shared_mmap", "yes"),
            ("leases=yes", "leases=no", "leases", "yes"),
            ("leases=no", "leases=yes", "leases", "no"),
            ("", "leases=yes", "leases", "no"),
            ("leases=yes", "consistency=immutable", "consistency", "strict"),
        ] {
            let difference =
                between(mounted, wanted).unwrap_or_else(|| panic!("{mounted}: {wanted}"));
            assert_eq!((difference.0, difference.1.as_str()), (key, is), "{mounted}: {wanted}");
        }
        for (mounted, wanted) in [
            ("timeout=60,ro", "remount,rw,timeout=60.0"),
            ("consistency=immutable", "remount,ro,nosuid,noexec"),
            ("replay=64M", "replay=64M,retry=5,_netdev,x-systemd.automount"),
            ("", "auth=none,consistency=strict,transport=auto"),
            ("auth=psk:/nowhere/a", "auth=psk:/nowhere/a,user_id=0,remount"),
            ("leases=yes", "remount,ro"),
            ("leases=yes", "leases=auto,ro"),
            ("", "leases=no"),
        ] {
            assert_eq!(between(mounted, wanted), None, "{mounted}: {wanted}");
        }
    }
}
