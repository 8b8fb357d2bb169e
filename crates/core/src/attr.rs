//! Attributes of files and of file systems.

use std::time::Duration;

use crate::{FileId, Gid, Ttl, Uid, Validity};

/// A point in time, as files carry it: seconds since 1970 and nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp {
    /// Seconds since the epoch, negative before it.
    pub sec: i64,
    /// Nanoseconds, 0..1_000_000_000.
    pub nsec: u32,
}

impl Timestamp {
    /// Nanoseconds since the epoch.
    fn nanos(self) -> i128 {
        i128::from(self.sec) * 1_000_000_000 + i128::from(self.nsec)
    }
}

impl From<Duration> for Timestamp {
    /// Of a time since the epoch.
    fn from(since: Duration) -> Timestamp {
        let sec = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
        Timestamp { sec, nsec: since.subsec_nanos() }
    }
}

/// The kind of a file; the `S_IFMT` part of a mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names say it; see inode(7).
pub enum FileType {
    Regular,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

impl FileType {
    /// From the `S_IFMT` bits of a mode; none for a pattern that names no type.
    pub fn from_mode(mode: u32) -> Option<FileType> {
        Some(match mode & libc::S_IFMT {
            libc::S_IFREG => FileType::Regular,
            libc::S_IFDIR => FileType::Directory,
            libc::S_IFLNK => FileType::Symlink,
            libc::S_IFIFO => FileType::Fifo,
            libc::S_IFSOCK => FileType::Socket,
            libc::S_IFCHR => FileType::CharDevice,
            libc::S_IFBLK => FileType::BlockDevice,
            _ => return None,
        })
    }

    /// The `S_IFMT` bits.
    pub fn mode_bits(self) -> u32 {
        match self {
            FileType::Regular => libc::S_IFREG,
            FileType::Directory => libc::S_IFDIR,
            FileType::Symlink => libc::S_IFLNK,
            FileType::Fifo => libc::S_IFIFO,
            FileType::Socket => libc::S_IFSOCK,
            FileType::CharDevice => libc::S_IFCHR,
            FileType::BlockDevice => libc::S_IFBLK,
        }
    }

    /// The `d_type` of directory entries: the type bits shifted down by 12.
    pub fn dirent_type(self) -> u8 {
        (self.mode_bits() >> 12) as u8
    }
}

/// Attributes of a file, as statx(2) gives them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attr {
    /// Inode number to show to applications.
    pub ino: u64,
    /// Type and permission bits.
    pub mode: u32,
    /// Hard links; 0 for a file deleted while open.
    pub nlink: u32,
    /// Owner.
    pub uid: Uid,
    /// Owning group.
    pub gid: Gid,
    /// Device number of a device file, in the kernel's 32-bit encoding (12:20).
    pub rdev: u32,
    /// Preferred I/O size, bytes.
    pub block_bytes: u32,
    /// Size, bytes.
    pub size: u64,
    /// Space taken, in units of 512 bytes.
    pub blocks: u64,
    /// Last read.
    pub atime: Timestamp,
    /// Last change of the content.
    pub mtime: Timestamp,
    /// Last change of the attributes.
    pub ctime: Timestamp,
    /// Creation, where the file system keeps it; else zero.
    pub btime: Timestamp,
    /// `STATX_ATTR_*` bits that hold.
    pub attributes: u64,
    /// `STATX_ATTR_*` bits that the file system can tell.
    pub attributes_mask: u64,
    /// How long these attributes may be believed, and what came with them.
    pub validity: Validity,
}

impl Attr {
    /// The file's type; a mode with no type counts as a regular file.
    pub fn file_type(&self) -> FileType {
        FileType::from_mode(self.mode).unwrap_or(FileType::Regular)
    }

    /// The same, under a name that may be believed for so long.
    pub fn of_name(self, name: Option<Ttl>) -> Attr {
        Attr { validity: Validity { name, ..self.validity }, ..self }
    }

    /// The longest time between two changes that can leave a file with the same times. For file
    /// systems with parts of seconds it is some ticks of the slowest clock (100 Hz), late ones
    /// included. For file systems without parts of seconds it covers the coarsest times, which are
    /// FAT's, 2 s.
    pub fn grain(&self) -> Duration {
        match self.ctime.nsec {
            0 => Duration::from_secs(3),
            _ => Duration::from_millis(100),
        }
    }

    /// Whether the file was made since that clock showed `clock`. Where the file system keeps no
    /// time of birth, the time of the last change of content stands for it.
    pub fn is_born_since(&self, clock: Timestamp) -> bool {
        let born = if self.btime == Timestamp::default() { self.mtime } else { self.btime };
        born.nanos() + self.grain().as_nanos() as i128 >= clock.nanos()
    }

    /// Whether the clock of these times has advanced since, so that any further change of content
    /// gives the file other times. Each change gives it a new ctime, whatever programs set. The
    /// same holds where the clock has been set back since. `clock` was read before these
    /// attributes.
    pub fn is_past(&self, clock: Timestamp) -> bool {
        clock.nanos().abs_diff(self.ctime.nanos()) >= self.grain().as_nanos()
    }
}

/// The result of a lookup: an id and attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Identity.
    pub id: FileId,
    /// Attributes at the time of the answer.
    pub attr: Attr,
}

/// A new time for [`SetAttr`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeSet {
    /// The server's clock at the time of the change (`UTIME_NOW`).
    Now,
    /// This time.
    At(Timestamp),
}

/// Attributes to change; what is `None` stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits including set-id and sticky.
    pub mode: Option<u32>,
    /// New owner.
    pub uid: Option<Uid>,
    /// New group.
    pub gid: Option<Gid>,
    /// New size, bytes.
    pub size: Option<u64>,
    /// New access time.
    pub atime: Option<TimeSet>,
    /// New modification time.
    pub mtime: Option<TimeSet>,
    /// Clear set-id bits as a write by an unprivileged user does
    /// (`FATTR_KILL_SUIDGID` of FUSE).
    pub kill_set_id: bool,
}

/// Space and inodes of a file system, as statfs(2) gives them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statfs {
    /// Unit of the block counts, bytes.
    pub block_bytes: u32,
    /// Fragment size, bytes.
    pub fragment_bytes: u32,
    /// Blocks in all.
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Free blocks for ordinary users.
    pub blocks_available: u64,
    /// Inodes in all.
    pub files: u64,
    /// Free inodes.
    pub files_free: u64,
    /// Longest name, bytes.
    pub name_max_bytes: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_past_once_no_change_can_have_the_same() {
        let time = |sec, nsec| Timestamp { sec, nsec };
        let at = |mtime, ctime| Attr { mtime, ctime, ..Attr::default() };
        let fine = at(time(8, 0), time(8, 950_000_000));
        assert!(!fine.is_past(time(9, 49_999_999)) && fine.is_past(time(9, 50_000_000)));
        let coarse = at(time(8, 5), time(8, 0));
        assert!(!coarse.is_past(time(10, 999_999_999)) && coarse.is_past(time(11, 0)));
        // A finer clock than the one that is read; a clock set back; mtimes that programs make up.
        assert!(!fine.is_past(time(8, 940_000_000)) && fine.is_past(time(7, 0)));
        let future = at(time(i64::MAX, 1), time(8, 1));
        assert!(!future.is_past(time(8, 2)) && future.is_past(time(9, 0)));
        assert!(at(time(0, 0), time(i64::MAX, 0)).is_past(time(i64::MIN, 0)));
    }
}
