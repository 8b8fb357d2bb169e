//! The identity of an exported directory and of its file system. The identity stays the same when the
//! file system is mounted anew, with other options, at another place, or from a renamed device.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use super::handle::HandleCodec;
use super::lower_fs::MountLine;
use super::sys::{self, InodeStat, KernelHandle};

/// Identifies a file system, and an exported directory on it. It can be recorded, and compared
/// later with the directory at the same path ([`Root::difference`](super::Root::difference)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FsIdentity {
    /// The type of the file system, such as `ext4` or `fuse.sshfs`.
    pub kind: String,
    /// The uuid of the file system, hexadecimal without hyphens; none where it is unknown.
    pub uuid: Option<String>,
    /// The mounted source, as in the kernel's table of mounts; of an overlay its upper layer, of a
    /// loop device its file. It distinguishes file systems without uuid, such as those over a
    /// network.
    pub source: String,
    /// Where the file system is mounted, as that table has it.
    pub at: String,
    /// The kernel's handle of the directory, hexadecimal behind its type; none where handles do not
    /// last.
    pub directory: Option<String>,
    /// The file system is in memory, and ends with its mount. After each start of the machine it is
    /// another one, as intended.
    pub in_memory: bool,
}

/// How a directory differs from the recorded one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Difference {
    /// Another file system.
    FileSystem,
    /// Another directory of the same file system, which still has the recorded one.
    Directory,
}

impl FsIdentity {
    pub(super) fn of(
        dir: BorrowedFd<'_>,
        magic: i64,
        (stat, mounted): (&InodeStat, Option<&MountLine>),
        kind: &str,
    ) -> FsIdentity {
        let uuid =
            sys::uuid_of(dir, magic).map(|uuid| hex(&uuid)).or_else(|| uuid_by_udev(stat.dev));
        let handle = sys::handle_of(dir).ok().map(|(handle, _)| handle);
        let lasts = |handle: &KernelHandle| HandleCodec::detect(magic, handle, 0).is_some();
        FsIdentity {
            kind: kind.to_owned(),
            uuid,
            source: mounted.map_or_else(String::new, |mounted| source_of(mounted, stat.dev)),
            at: mounted.map_or_else(String::new, |mounted| mounted.at.clone()),
            directory: handle.filter(lasts).map(|handle| handle_to_text(&handle)),
            in_memory: magic == super::lower_fs::TMPFS,
        }
    }

    /// Whether both are one file system. After a start of the machine, file systems in memory are
    /// compared by their places alone.
    pub(super) fn is_same_file_system(&self, other: &FsIdentity, same_boot: bool) -> bool {
        let family = |kind: &str| kind.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned();
        let like = family(&self.kind) == family(&other.kind); // ext3 and ext4, nfs and nfs4
        match (&self.uuid, &other.uuid) {
            _ if self.in_memory && other.in_memory && !same_boot => self.at == other.at,
            (Some(one), Some(other)) => one == other,
            _ => like && self.source == other.source,
        }
    }
}

impl fmt::Display for FsIdentity {
    /// For people: type and uuid, or type and source.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.uuid {
            Some(uuid) if uuid.len() == 32 && uuid.is_ascii() => {
                let (a, rest) = uuid.split_at(8);
                let (b, c, d, e) = (&rest[..4], &rest[4..8], &rest[8..12], &rest[12..]);
                write!(out, "{} {a}-{b}-{c}-{d}-{e}", self.kind)
            }
            Some(uuid) => write!(out, "{} {uuid}", self.kind),
            None => write!(out, "{} {}", self.kind, self.source),
        }
    }
}

/// The source of the file system, beside its uuid.
fn source_of(mounted: &MountLine, dev: u64) -> String {
    let layer = || mounted.option("upperdir").or(mounted.option("lowerdir"));
    let layer = if mounted.kind == "overlay" { layer() } else { None };
    // Numbers of loop devices change.
    let (major, minor) = (libc::major(dev), libc::minor(dev));
    let file = format!("/sys/dev/block/{major}:{minor}/loop/backing_file");
    let file = std::fs::read_to_string(file).ok().map(|path| path.trim_end().to_owned());
    layer.map(str::to_owned).or(file).unwrap_or_else(|| mounted.source.clone())
}

/// The uuid that udev has found on a block device, for file systems of which the kernel knows none.
fn uuid_by_udev(dev: u64) -> Option<String> {
    if libc::major(dev) == 0 {
        return None; // no block device
    }
    let entries = std::fs::read_dir("/dev/disk/by-uuid").ok()?.flatten();
    let is_it = |path| std::fs::metadata(path).is_ok_and(|device| device.rdev() == dev);
    let name = entries.into_iter().find(|entry| is_it(entry.path()))?.file_name();
    Some(name.to_str()?.replace('-', "").to_lowercase())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn handle_to_text(handle: &KernelHandle) -> String {
    format!("{:x}:{}", handle.kind(), hex(handle.bytes()))
}

/// None for a text that is no handle.
fn handle_of_text(text: &str) -> Option<KernelHandle> {
    let (kind, digits) = text.split_once(':')?;
    let byte = |at: usize| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..digits.len()).step_by(2).map(byte).collect();
    KernelHandle::new(i32::from_str_radix(kind, 16).ok()?, &[&bytes?])
}

/// Whether the directory `there` differs from the recorded one, although that is still on the same
/// file system. `magic`: the file system's number.
pub(super) fn is_beside(noted: &FsIdentity, there: BorrowedFd<'_>, magic: i64) -> bool {
    let Some(noted) = noted.directory.as_deref().and_then(handle_of_text) else { return false };
    let Ok((own, _)) = sys::handle_of(there) else { return false };
    let Some(codec) = HandleCodec::detect(magic, &own, 0) else { return false };
    if codec.encode(&noted) == codec.encode(&own) {
        return false;
    }
    let open = || sys::open_by_handle(there, &noted);
    let former = super::cred::as_root(open).ok().and_then(Result::ok);
    former.is_some_and(|fd| sys::stat(fd.as_fd()).is_ok_and(|stat| stat.attr.nlink > 0))
}

/// Whether `noted` is on another subvolume than `there`. To clients that is another file system.
pub(super) fn is_of_other_subvolume(noted: &FsIdentity, there: BorrowedFd<'_>, magic: i64) -> bool {
    let Some(noted) = noted.directory.as_deref().and_then(handle_of_text) else { return false };
    let own = sys::handle_of(there).ok().and_then(|(own, _)| HandleCodec::detect(magic, &own, 0));
    own.is_some_and(|codec| codec.encode(&noted).is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(kind: &str, uuid: Option<&str>, source: &str) -> FsIdentity {
        FsIdentity {
            kind: kind.into(),
            uuid: uuid.map(str::to_owned),
            source: source.into(),
            at: "/srv".into(),
            directory: None,
            in_memory: kind == "tmpfs",
        }
    }

    #[test]
    fn a_file_system_is_known_by_its_uuid_or_else_by_what_is_mounted() {
        let disk = identity("ext4", Some("aa"), "/dev/sda1");
        for (other, same) in [
            (identity("ext4", Some("aa"), "/dev/sdb1"), true), // the device has another number
            (identity("ext3", Some("aa"), "/dev/sda1"), true),
            (identity("ext4", Some("bb"), "/dev/sda1"), false),
            (identity("fuse.sshfs", None, "host:/dir"), false),
        ] {
            assert_eq!(disk.is_same_file_system(&other, true), same, "{other}");
            assert_eq!(other.is_same_file_system(&disk, true), same, "{other}");
        }
        let share = identity("nfs4", None, "host:/dir");
        assert!(share.is_same_file_system(&identity("nfs", None, "host:/dir"), true));
        assert!(!share.is_same_file_system(&identity("nfs4", None, "host:/other"), true));
        assert!(!share.is_same_file_system(&identity("cifs", None, "host:/dir"), true));
    }

    #[test]
    fn what_is_in_memory_is_another_one_after_each_start_of_the_machine() {
        let (one, next) =
            (identity("tmpfs", Some("aa"), "tmpfs"), identity("tmpfs", Some("bb"), "tmpfs"));
        assert!(!one.is_same_file_system(&next, true), "it was unmounted, and its files are gone");
        assert!(one.is_same_file_system(&next, false));
        let elsewhere = FsIdentity { at: "/run".into(), ..next };
        assert!(!one.is_same_file_system(&elsewhere, false));
    }

    #[test]
    fn handles_are_noted_as_text() {
        let handle = KernelHandle::new(0x81, &[&[1, 2, 255]]).unwrap();
        assert_eq!(handle_to_text(&handle), "81:0102ff");
        let again = handle_of_text("81:0102ff").unwrap();
        assert_eq!((again.kind(), again.bytes()), (0x81, &[1, 2, 255][..]));
        for text in ["", "81", "81:1", "x:01", "81:0g"] {
            assert!(handle_of_text(text).is_none(), "{text}");
        }
    }

    #[test]
    fn people_see_what_blkid_shows() {
        let uuid = "0123456789abcdef0123456789abcdef";
        let shown = identity("ext4", Some(uuid), "/dev/sda1").to_string();
        assert_eq!(shown, "ext4 01234567-89ab-cdef-0123-456789abcdef");
        assert_eq!(identity("nfs4", None, "host:/dir").to_string(), "nfs4 host:/dir");
    }
}
