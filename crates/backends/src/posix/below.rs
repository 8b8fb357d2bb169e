//! What the file system below an export is, and what does not hold on it.

use std::os::fd::{AsRawFd, BorrowedFd};

pub(super) const EXT: i64 = 0xEF53;
pub(super) const XFS: i64 = 0x5846_5342;
pub(super) const BTRFS: i64 = 0x9123_683E;
pub(super) const TMPFS: i64 = 0x0102_1994;
const OVERLAY: i64 = 0x794c_7630;
const FUSE: i64 = 0x6573_5546;
const ZFS: i64 = 0x2FC1_2FC1;

/// A file system, as it is mounted.
pub(crate) struct Below {
    /// Of `statfs`.
    pub(crate) magic: i64,
    /// Its type for people, such as `ext4` or `fuse.sshfs`.
    pub(crate) kind: String,
    /// Options that it was mounted with, such as `rw,user_id=0`.
    options: String,
}

impl Below {
    /// That of an open directory.
    pub(crate) fn of(dir: BorrowedFd<'_>, magic: i64) -> Below {
        let (kind, options) = mounted(dir).unwrap_or_else(|| (kind_of(magic).into(), "".into()));
        Below { magic, kind, options }
    }

    /// Whether calls can be trusted to come back soon: the file system is on this machine's
    /// disks or in its memory. What is not known is not trusted.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.magic, EXT | XFS | BTRFS | TMPFS | OVERLAY | ZFS)
    }

    /// Whether all of it is in memory, so that reading never waits.
    pub(crate) fn is_memory(&self) -> bool {
        self.magic == TMPFS
    }

    /// Whether what is changed is copied first.
    pub(crate) fn is_overlay(&self) -> bool {
        self.magic == OVERLAY
    }

    /// What whoever runs a server has to know of it, each a sentence without its end.
    pub(crate) fn caveats(&self, lasting_handles: bool) -> Vec<String> {
        let kind = &self.kind;
        let mut caveats = Vec::new();
        let has = |option: &str| self.options.split(',').any(|one| one == option);
        if !lasting_handles && !has("ro") {
            caveats.push(format!(
                "{kind} has no handles of files that last: files that were deleted while open, and \
                 those that somebody moves beside dray, are stale after a restart of the server"
            ));
        }
        let checks = self.kind == "fuse.dray" || has("default_permissions");
        if self.magic == FUSE && !checks {
            caveats.push(format!(
                "{kind} is mounted without default_permissions: unless its program checks who may \
                 do what, everybody may do everything"
            ));
        }
        caveats
    }
}

/// Type and options of the mount that `dir` is on; none where /proc does not say.
fn mounted(dir: BorrowedFd<'_>) -> Option<(String, String)> {
    // Of the thread: its mounts may be its own.
    let about = format!("/proc/thread-self/fdinfo/{}", dir.as_raw_fd());
    let about = std::fs::read_to_string(about).ok()?;
    let id = about.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().to_owned();
    let table = std::fs::read("/proc/thread-self/mountinfo").ok()?;
    find(&String::from_utf8_lossy(&table), &id)
}

/// Type and options of a mount in a table as proc_pid_mountinfo(5) has it.
fn find(table: &str, id: &str) -> Option<(String, String)> {
    let line = table.lines().find(|line| line.split(' ').next() == Some(id))?;
    let (_, behind) = line.split_once(" - ")?;
    let mut words = behind.split(' ');
    let kind = words.next()?.to_owned();
    Some((kind, words.nth(1).unwrap_or_default().to_owned()))
}

/// The name of a file system by its `statfs` number.
fn kind_of(magic: i64) -> &'static str {
    match magic {
        EXT => "ext4",
        XFS => "xfs",
        BTRFS => "btrfs",
        TMPFS => "tmpfs",
        OVERLAY => "overlay",
        FUSE => "fuse",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw,resuid=65534
36 21 0:33 / /mnt rw,nosuid - fuse.sshfs host:/dir rw,user_id=0,group_id=0,allow_other
37 21 0:34 / /b\\040c rw master:1 - fuse.mfs mfs#x:9421 rw,default_permissions
38 21 7:1 / /image ro - squashfs /dev/loop1 ro,errors=continue
";

    #[test]
    fn a_mount_is_found_by_its_number() {
        let found = |id| find(TABLE, id).map(|(kind, _)| kind);
        assert_eq!(found("21").as_deref(), Some("ext4"));
        assert_eq!(found("37").as_deref(), Some("fuse.mfs"));
        assert_eq!(found("3"), None);
        assert_eq!(find(TABLE, "36").unwrap().1, "rw,user_id=0,group_id=0,allow_other");
    }

    #[test]
    fn what_does_not_hold_is_told() {
        let below = |magic, id| {
            let (kind, options) = find(TABLE, id).unwrap();
            Below { magic, kind, options }
        };
        assert!(below(EXT, "21").caveats(true).is_empty());
        let said = below(FUSE, "36").caveats(false);
        assert!(said[0].contains("handles") && said[1].contains("default_permissions"), "{said:?}");
        assert_eq!(below(FUSE, "37").caveats(false).len(), 1);
        assert!(below(0x7371_7368, "38").caveats(false).is_empty(), "nothing is deleted there");
    }

    #[test]
    fn the_file_system_of_a_directory_is_known() {
        let dir = std::fs::File::open("/proc").unwrap();
        let below = Below::of(std::os::fd::AsFd::as_fd(&dir), 0x9fa0);
        assert_eq!(below.kind, "proc");
        assert!(!below.is_local());
    }
}
