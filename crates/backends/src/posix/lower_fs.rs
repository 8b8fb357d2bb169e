//! The file system below an export: its kind, its mount, and the guarantees that it does not give.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

pub(super) const EXT: i64 = 0xEF53;
pub(super) const XFS: i64 = 0x5846_5342;
pub(super) const BTRFS: i64 = 0x9123_683E;
pub(super) const TMPFS: i64 = 0x0102_1994;
const OVERLAY: i64 = 0x794c_7630;
const FUSE: i64 = 0x6573_5546;
const ZFS: i64 = 0x2FC1_2FC1;

/// A mounted file system below an export.
pub(crate) struct LowerFs {
    /// Magic number, of `statfs`.
    pub(crate) magic: i64,
    /// Type of the file system for people, such as `ext4` or `fuse.sshfs`.
    pub(crate) kind: String,
    /// Options that the file system was mounted with, such as `rw,user_id=0`.
    options: String,
    /// For a moment after a write, files may have a former size ([`super::written_ends`]).
    pub(super) sizes_lag: bool,
}

impl LowerFs {
    /// The file system of an open directory, which is mounted so.
    pub(crate) fn of(mounted: Option<&MountLine>, magic: i64) -> LowerFs {
        let known = |mounted: &MountLine| (mounted.kind.clone(), mounted.options.clone());
        let (kind, options) = mounted.map_or_else(|| (kind_of(magic).into(), "".into()), known);
        let sizes_lag = magic == FUSE && mounted.is_some_and(MountLine::is_moosefs);
        LowerFs { magic, kind, options, sizes_lag }
    }

    /// Whether calls are expected to return soon, because the file system is on this machine's
    /// disks or in its memory. Unknown file systems are not expected to.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.magic, EXT | XFS | BTRFS | TMPFS | OVERLAY | ZFS)
    }

    /// Whether all of it is in memory, so that reading never waits.
    pub(crate) fn is_memory(&self) -> bool {
        self.magic == TMPFS
    }

    /// Whether a program serves it.
    pub(crate) fn is_fuse(&self) -> bool {
        self.magic == FUSE
    }

    /// Whether it copies a file before the first change.
    pub(crate) fn is_overlay(&self) -> bool {
        self.magic == OVERLAY
    }

    /// What the administrator has to know of it, each a sentence without its end.
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

/// A line of the kernel's table of mounts (proc_pid_mountinfo(5)), as it is written there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MountLine {
    /// Where it is mounted; bytes that would break the line are escaped.
    pub(crate) at: String,
    /// Type of the file system, such as `ext4` or `fuse.sshfs`.
    pub(crate) kind: String,
    /// The mounted source: a device, `host:/dir`, or a word.
    pub(crate) source: String,
    /// The options of the file system, such as `rw,user_id=0`.
    pub(crate) options: String,
}

impl MountLine {
    /// The mount with this number; none if it is not in this process's tree, or /proc does not say.
    pub(crate) fn find(mount: u64) -> Option<MountLine> {
        let table = std::fs::read("/proc/thread-self/mountinfo").ok()?;
        find(&String::from_utf8_lossy(&table), mount)
    }

    /// Where it is, as a path.
    pub(crate) fn place(&self) -> PathBuf {
        let mut plain = Vec::new();
        let mut rest = self.at.as_bytes();
        while let Some((&first, behind)) = rest.split_first() {
            let digits = behind.get(..3).filter(|_| first == b'\\');
            let code = digits.and_then(|digits| std::str::from_utf8(digits).ok());
            match code.and_then(|code| u8::from_str_radix(code, 8).ok()) {
                Some(code) => {
                    plain.push(code);
                    rest = &behind[3..];
                }
                None => {
                    plain.push(first);
                    rest = behind;
                }
            }
        }
        PathBuf::from(OsString::from_vec(plain))
    }

    /// Whether it is MooseFS, or of its family. Its source is `mfs#HOST:PORT`, of which the kernel writes `#` as octal.
    fn is_moosefs(&self) -> bool {
        self.kind == "fuse.mfs"
            || ["mfs#", "mfs\\043"].iter().any(|head| self.source.starts_with(head))
    }

    /// The value of an option.
    pub(crate) fn option(&self, name: &str) -> Option<&str> {
        let mut pairs = self.options.split(',').filter_map(|option| option.split_once('='));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
    }
}

/// The kernel's number of the mount that `fd` is on, of whatever kind it is; none where /proc does not
/// say.
pub(crate) fn mount_of(fd: BorrowedFd<'_>) -> Option<u64> {
    // Of the thread: its mounts may be its own.
    let about = format!("/proc/thread-self/fdinfo/{}", fd.as_raw_fd());
    let about = std::fs::read_to_string(about).ok()?;
    about.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()
}

fn find(table: &str, mount: u64) -> Option<MountLine> {
    let number = mount.to_string();
    let line = table.lines().find(|line| line.split(' ').next() == Some(&*number))?;
    let (front, behind) = line.split_once(" - ")?;
    let mut words = behind.split(' ').map(str::to_owned);
    let at = front.split(' ').nth(4)?.to_owned();
    let (kind, source) = (words.next()?, words.next().unwrap_or_default());
    Some(MountLine { at, kind, source, options: words.next().unwrap_or_default() })
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
    use std::path::Path;

    const TABLE: &str = "\
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw,resuid=65534
36 21 0:33 / /mnt rw,nosuid - fuse.sshfs host:/dir rw,user_id=0,group_id=0,allow_other
37 21 0:34 / /b\\040c rw master:1 - fuse.mfs mfs#x:9421 rw,default_permissions
38 21 7:1 / /image ro - squashfs /dev/loop1 ro,errors=continue
";

    #[test]
    fn a_mount_is_found_by_its_number() {
        let found = |id| find(TABLE, id).map(|mounted| mounted.kind);
        assert_eq!(found(21).as_deref(), Some("ext4"));
        assert_eq!(found(37).as_deref(), Some("fuse.mfs"));
        assert_eq!(found(3), None);
        let mounted = find(TABLE, 36).unwrap();
        assert_eq!(mounted.options, "rw,user_id=0,group_id=0,allow_other");
        assert_eq!((&*mounted.at, &*mounted.source), ("/mnt", "host:/dir"));
        assert_eq!(find(TABLE, 37).unwrap().place(), Path::new("/b c"));
        assert_eq!((mounted.option("user_id"), mounted.option("user")), (Some("0"), None));
    }

    #[test]
    fn broken_guarantees_are_reported() {
        let below = |magic, id| {
            let MountLine { kind, options, .. } = find(TABLE, id).unwrap();
            LowerFs { magic, kind, options, sizes_lag: false }
        };
        assert!(below(EXT, 21).caveats(true).is_empty());
        let said = below(FUSE, 36).caveats(false);
        assert!(said[0].contains("handles") && said[1].contains("default_permissions"), "{said:?}");
        assert_eq!(below(FUSE, 37).caveats(false).len(), 1);
        assert!(below(0x7371_7368, 38).caveats(false).is_empty(), "nothing is deleted there");
    }

    #[test]
    fn sizes_of_moosefs_lag() {
        let lag = |line: &MountLine| LowerFs::of(Some(line), FUSE).sizes_lag;
        assert!(lag(&find(TABLE, 37).unwrap()) && !lag(&find(TABLE, 36).unwrap()));
        let plain = |source: &str| MountLine {
            kind: "fuse".into(),
            source: source.into(),
            ..find(TABLE, 36).unwrap()
        };
        assert!(lag(&plain("mfs\\043io:9421")) && !lag(&plain("mfsmount")));
    }

    #[test]
    fn the_file_system_of_a_directory_is_known() {
        let dir = std::fs::File::open("/proc").unwrap();
        let mounted = mount_of(std::os::fd::AsFd::as_fd(&dir)).and_then(MountLine::find);
        let below = LowerFs::of(mounted.as_ref(), 0x9fa0);
        assert_eq!(below.kind, "proc");
        assert!(!below.is_local());
    }
}
