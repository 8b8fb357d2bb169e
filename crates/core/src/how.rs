//! Arguments of operations that are more than one number.

use crate::{Attr, FileId, FsUuid};

/// How to open an existing file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenHow {
    /// Flags of open(2) as Linux on x86-64 numbers them, [`OpenHow::EXECUTE`] and
    /// [`OpenHow::CREATOR`]. Creation flags
    /// (`O_CREAT`, `O_EXCL`, `O_TMPFILE`) are not among them: see [`CreateHow`].
    pub flags: i32,
    /// Clear set-id bits on `O_TRUNC` (`FUSE_OPEN_KILL_SUIDGID`).
    pub kill_set_id: bool,
    /// The caller wants [`AtOpen`] with the answer. A local file system need not give it, since
    /// asking later is cheap there.
    pub with_attr: bool,
}

/// As every 64-bit program has it, whatever the C library calls it.
const O_LARGEFILE: i32 = 0o100_000;

/// The state of a file just after its opening, for a kernel that keeps attributes once learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtOpen {
    /// The file's attributes.
    pub attr: Attr,
    /// The file is known to have no extended attribute `security.capability`, for which Linux looks
    /// at the first write (file_remove_privs, fs/inode.c).
    pub no_capability: bool,
    /// Whether a later change of the content gives the file other times ([`Attr::is_past`]); none
    /// where that is not known.
    pub times_past: Option<bool>,
}

impl OpenHow {
    /// The flag with which Linux opens what execve(2) is to run (`__FMODE_EXEC`,
    /// include/linux/fs.h). No application can give it.
    pub const EXECUTE: i32 = 0x20;
    /// The caller has just created the file, at another server of the projection. The owner of the
    /// file may open it so whatever its mode is. That gives the owner nothing new, since the owner
    /// can change the mode. The kernel's NFS server does the same (`NFSD_MAY_OWNER_OVERRIDE`,
    /// fs/nfsd/vfs.h). No application can give this flag. With `O_TRUNC` it has no effect.
    pub const CREATOR: i32 = 1 << 27;
    /// Read only.
    pub const READ: OpenHow = OpenHow::new(libc::O_RDONLY);
    /// Read and write.
    pub const READ_WRITE: OpenHow = OpenHow::new(libc::O_RDWR);
    /// A directory, to be listed.
    pub const DIRECTORY: OpenHow = OpenHow::new(libc::O_RDONLY | libc::O_DIRECTORY);

    /// With these flags of open(2).
    pub const fn new(flags: i32) -> OpenHow {
        OpenHow { flags, kill_set_id: false, with_attr: false }
    }

    /// Whether reading was asked for.
    pub fn reads(self) -> bool {
        matches!(self.flags & libc::O_ACCMODE, libc::O_RDONLY | libc::O_RDWR)
    }

    /// Whether writing was asked for.
    pub fn writes(self) -> bool {
        matches!(self.flags & libc::O_ACCMODE, libc::O_WRONLY | libc::O_RDWR)
    }

    /// Whether writes go to the end of the file, wherever it is by then.
    pub fn appends(self) -> bool {
        self.flags & libc::O_APPEND != 0
    }

    /// Whether the content is cut to nothing.
    pub fn truncates(self) -> bool {
        self.flags & libc::O_TRUNC != 0
    }

    /// The same without `O_TRUNC`.
    pub fn without_truncation(self) -> OpenHow {
        OpenHow { flags: self.flags & !libc::O_TRUNC, kill_set_id: false, ..self }
    }

    /// The same open of a file that the caller has just created ([`OpenHow::CREATOR`]).
    pub fn of_created(self) -> OpenHow {
        let OpenHow { flags, .. } = self.without_truncation();
        OpenHow { flags: flags | OpenHow::CREATOR, ..self.without_truncation() }
    }

    /// Whether the owner of the file may open it so whatever its mode is.
    pub fn is_by_creator(self) -> bool {
        self.flags & OpenHow::CREATOR != 0 && !self.truncates() && !self.executes()
    }

    /// Whether this open of a regular file changes nothing, and reveals only whether the caller may
    /// open it. Such an open can be made for a caller that may not want it after all.
    pub fn is_harmless(self) -> bool {
        const KNOWN: i32 = libc::O_ACCMODE
            | libc::O_APPEND
            | libc::O_SYNC
            | libc::O_DIRECT
            | libc::O_NOFOLLOW
            | libc::O_NOATIME
            | O_LARGEFILE;
        self.flags & !KNOWN == 0 && (self.reads() || self.writes()) && !self.kill_set_id
    }

    /// Whether it is opened to be executed, which takes the right to execute it instead of the
    /// right to read it. With a flag that asks for anything beyond reading it is an opening like
    /// any other: execve(2) gives none.
    pub fn executes(self) -> bool {
        const PASSIVE: i32 =
            libc::O_CLOEXEC | libc::O_DIRECT | libc::O_NOFOLLOW | libc::O_NONBLOCK | O_LARGEFILE;
        self.flags & !PASSIVE == OpenHow::EXECUTE
    }

    /// Whether only a directory will do.
    pub fn directory(self) -> bool {
        self.flags & libc::O_DIRECTORY != 0
    }
}

/// How to make and open a regular file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateHow {
    /// How to open it once it is there.
    pub open: OpenHow,
    /// Permission bits, before the caller's umask or a default ACL.
    pub mode: u32,
    /// Fail with `EEXIST` if the name is taken (`O_EXCL`).
    pub exclusive: bool,
}

/// The kind of entry to make under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Make<'a> {
    /// A directory.
    Directory {
        /// Permission bits, before umask.
        mode: u32,
    },
    /// A regular file, FIFO, socket or device without opening it (mknod(2)).
    Node {
        /// Type and permission bits, before umask.
        mode: u32,
        /// Device number in the kernel's 32-bit encoding; 0 unless a device.
        rdev: u32,
    },
    /// A symbolic link.
    Symlink {
        /// The text of the link: any bytes but NUL, not empty, under `PATH_MAX`.
        target: &'a [u8],
    },
}

/// Which removal was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoveKind {
    /// unlink(2): anything but a directory.
    File,
    /// rmdir(2): an empty directory.
    Directory,
}

/// The flags of renameat2(2) that are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameHow {
    /// Replace what has the new name.
    Replace,
    /// Fail with `EEXIST` if the new name is taken (`RENAME_NOREPLACE`).
    NoReplace,
    /// Both names exist and change places (`RENAME_EXCHANGE`).
    Exchange,
}

/// The rights that access(2) asks about: bits `R_OK`, `W_OK`, `X_OK`; 0 for existence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access(pub u32);

/// Whether an extended attribute may, must or must not exist already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XattrSet {
    /// Either.
    Any,
    /// The attribute must not exist: else `EEXIST` (`XATTR_CREATE`).
    Create,
    /// The attribute must exist: else `ENODATA` (`XATTR_REPLACE`).
    Replace,
}

/// Where a write goes, and with which promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Write {
    /// Offset in bytes; ignored when `append` is set.
    pub at: u64,
    /// Place the data at the end of the file, atomically with respect to all clients.
    pub append: bool,
    /// `O_SYNC` or `O_DSYNC` holds: on media before the answer.
    pub sync: bool,
    /// Clear set-id bits, as a write by an unprivileged user does.
    pub kill_set_id: bool,
}

impl Write {
    /// An ordinary write at `at`.
    pub fn at(at: u64) -> Write {
        Write { at, ..Write::default() }
    }
}

/// The action of fallocate(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocate {
    /// Flags of fallocate(2): `FALLOC_FL_KEEP_SIZE`, `PUNCH_HOLE`, `ZERO_RANGE`,
    /// `COLLAPSE_RANGE`, `INSERT_RANGE`.
    pub flags: i32,
    /// First byte.
    pub at: u64,
    /// Number of bytes, not 0.
    pub len_bytes: u64,
}

/// The thing that lseek(2) looks for behind an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seek {
    /// The next byte that is in no hole (`SEEK_DATA`).
    Data,
    /// The next hole (`SEEK_HOLE`).
    Hole,
}

/// The properties of a file system, as it gives them when it is attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FsInfo {
    /// Identity, which makes its [`FileId`]s unique.
    pub uuid: FsUuid,
    /// The root directory.
    pub root: FileId,
    /// The kind of the file system below, for people: `ext4`, `tmpfs`, `memory`.
    pub kind: String,
    /// Changes are refused with `EROFS`.
    pub read_only: bool,
}

impl FsInfo {
    /// The generation of a root by which clients know, before they have met a server, that ids are
    /// learned from names. A call by an id that a server has not met fails with an
    /// [unmet](crate::Error::is_unmet) `ESTALE`, and
    /// [`FileSystem::learn`](crate::FileSystem::learn) helps.
    pub const LEARNING_ROOT: u64 = 0x006c_6561_726e_6564;

    /// Whether ids are learned from names.
    pub fn learns_ids(&self) -> bool {
        self.root.generation == FsInfo::LEARNING_ROOT
    }
}

/// Flags of an inode and what belongs to them: `struct fsxattr` (linux/fs.h), ioctl_xfs_fsgetxattr(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Xflags {
    /// The `FS_XFLAG_*` bits.
    pub flags: u32,
    /// Extents are to be this long, in bytes; 0: as long as the file system likes.
    pub extent_bytes: u32,
    /// Number of extents. It can be read, not set.
    pub extents: u32,
    /// The project whose quota counts the file.
    pub project: u32,
    /// As `extent_bytes`, for what is copied on write.
    pub cow_extent_bytes: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The right to execute is not enough for anything but reading.
    #[test]
    fn who_wants_more_than_to_execute_is_an_opener_like_any_other() {
        let with = |flags: i32| OpenHow::new(OpenHow::EXECUTE | flags).executes();
        assert!(with(0) && with(O_LARGEFILE | libc::O_NOFOLLOW) && !OpenHow::READ.executes());
        let more = [libc::O_WRONLY, libc::O_RDWR, libc::O_ACCMODE, libc::O_TRUNC, libc::O_APPEND];
        let others = [libc::O_NOATIME, libc::O_CREAT, libc::O_DIRECTORY, libc::O_TMPFILE, 0x40];
        for flag in more.into_iter().chain(others) {
            assert!(!with(flag), "{flag:#o}");
        }
    }
}
