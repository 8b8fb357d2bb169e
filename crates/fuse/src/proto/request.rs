//! What the kernel asks: the header of a request, its operation and arguments.

use dray_core::{Gid, Name, Pid, Timestamp, Uid};

use super::abi;
use super::wire::FieldReader;

/// The header of every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Bytes of the whole request.
    pub len: u32,
    /// Operation code.
    pub opcode: u32,
    /// Names the request within the connection.
    pub unique: u64,
    /// The node it is about.
    pub node: u64,
    /// Caller's file system user id.
    pub uid: Uid,
    /// Caller's file system group id.
    pub gid: Gid,
    /// Caller's thread; 0 for the kernel itself or where it cannot be seen from here.
    pub pid: Pid,
    /// Bytes of extensions at the end of the request.
    pub extension_bytes: usize,
}

impl Head {
    /// Decodes the first 40 bytes; none if there are fewer.
    pub fn decode(bytes: &[u8]) -> Option<Head> {
        let mut fields = FieldReader(bytes);
        Some(Head {
            len: fields.u32()?,
            opcode: fields.u32()?,
            unique: fields.u64()?,
            node: fields.u64()?,
            uid: Uid(fields.u32()?),
            gid: Gid(fields.u32()?),
            pid: Pid(fields.u32()?),
            extension_bytes: usize::from(fields.u16()?) * 8,
        })
    }
}

/// A lock as the kernel describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct LockArgs {
    pub fh: u64,
    pub owner: u64,
    pub start: u64,
    pub end: u64,
    /// `F_RDLCK`, `F_WRLCK` or `F_UNLCK`.
    pub kind: u32,
    pub pid: Pid,
    /// flock(2), not fcntl(2).
    pub flock: bool,
}

/// Arguments of SETATTR as they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct SetattrArgs {
    pub valid: u32,
    pub fh: u64,
    pub size: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub mode: u32,
    pub uid: Uid,
    pub gid: Gid,
}

/// Arguments of COPY_FILE_RANGE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct CopyArgs {
    pub fh_in: u64,
    pub at_in: u64,
    pub node_out: u64,
    pub fh_out: u64,
    pub at_out: u64,
    pub len_bytes: u64,
    pub flags: u64,
    /// The answer has room for 64 bits.
    pub wide: bool,
}

/// Operations on names in a directory, and on symbolic links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum NameOperation<'a> {
    Lookup { name: &'a Name },
    Readlink,
    Symlink { name: &'a Name, target: &'a [u8] },
    Mknod { name: &'a Name, mode: u32, rdev: u32, umask: u32 },
    Mkdir { name: &'a Name, mode: u32, umask: u32 },
    Unlink { name: &'a Name },
    Rmdir { name: &'a Name },
    Rename { name: &'a Name, to_dir: u64, to_name: &'a Name, flags: u32 },
    Link { node: u64, name: &'a Name },
}

/// Operations that open something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum OpenOperation<'a> {
    Open { flags: u32, open_flags: u32 },
    Create { name: &'a Name, flags: u32, mode: u32, umask: u32, open_flags: u32 },
    Tmpfile { flags: u32, mode: u32, umask: u32, open_flags: u32 },
    Opendir { flags: u32 },
}

/// Operations on attributes, and on what they allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum AttributeOperation {
    Getattr { fh: Option<u64> },
    Setattr(SetattrArgs),
    Statx { fh: Option<u64>, mask: u32 },
    Access { mask: u32 },
}

/// Operations on extended attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum XattrOperation<'a> {
    Setxattr { name: &'a [u8], value: &'a [u8], flags: u32 },
    Getxattr { name: &'a [u8], size: u32 },
    Listxattr { size: u32 },
    Removexattr { name: &'a [u8] },
}

/// Operations on open files beside reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum FileOperation {
    Fsync { fh: u64, fsync_flags: u32 },
    Fsyncdir { fh: u64, fsync_flags: u32 },
    Fallocate { fh: u64, at: u64, len_bytes: u64, mode: u32 },
    Lseek { fh: u64, at: u64, whence: u32 },
    CopyFileRange(CopyArgs),
}

/// What no call is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SessionOperation<'a> {
    Forget {
        lookups: u64,
    },
    BatchForget {
        count: u32,
        list: &'a [u8],
    },
    Interrupt {
        unique: u64,
    },
    Init,
    Destroy,
    /// Known to the kernel, not served.
    Other,
}

/// Arguments of WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct WriteArgs {
    pub fh: u64,
    pub at: u64,
    pub size: u32,
    pub write_flags: u32,
    pub flags: u32,
}

/// What is asked, with the arguments. Names and fields are those of the kernel. The groups are those of the
/// functions that serve them, each of which serves all of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Operation<'a> {
    Names(NameOperation<'a>),
    Opens(OpenOperation<'a>),
    Attributes(AttributeOperation),
    Xattrs(XattrOperation<'a>),
    Files(FileOperation),
    Session(SessionOperation<'a>),
    Write(WriteArgs),
    /// A lookup of `.`: of the node itself, of which the kernel has a handle.
    LookupSelf,
    /// A lookup of `..`: of the directory above one of which the kernel has a handle.
    LookupParent,
    Read {
        fh: u64,
        at: u64,
        size: u32,
    },
    Statfs,
    Release {
        fh: u64,
        release_flags: u32,
        owner: u64,
    },
    Flush {
        fh: u64,
        owner: u64,
    },
    Readdir {
        fh: u64,
        at: u64,
        size: u32,
        plus: bool,
    },
    Releasedir {
        fh: u64,
    },
    Getlk(LockArgs),
    Setlk {
        lock: LockArgs,
        wait: bool,
    },
    Ioctl {
        fh: u64,
        cmd: u32,
        data: &'a [u8],
        out_size: u32,
    },
}

/// A decoded request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// The caller, and the node that the request is about.
    pub head: Head,
    /// What is asked.
    pub op: Operation<'a>,
    /// A supplementary group of the caller that matters for a creation.
    pub group: Option<Gid>,
}

impl Request<'_> {
    /// Whether it is one for a lock that may have to be waited for, which any signal ends. Giving a
    /// lock back comes the same way, and waits for nobody.
    pub(crate) fn waits_for_a_lock(&self) -> bool {
        match self.op {
            Operation::Setlk { lock, wait } => wait && lock.kind != libc::F_UNLCK as u32,
            Operation::LookupSelf
            | Operation::LookupParent
            | Operation::Names(_)
            | Operation::Opens(_)
            | Operation::Attributes(_)
            | Operation::Xattrs(_)
            | Operation::Files(_)
            | Operation::Session(_)
            | Operation::Read { .. }
            | Operation::Write(_)
            | Operation::Flush { .. }
            | Operation::Release { .. }
            | Operation::Releasedir { .. }
            | Operation::Readdir { .. }
            | Operation::Getlk(_)
            | Operation::Statfs
            | Operation::Ioctl { .. } => false,
        }
    }
}

/// What the kernel offers in INIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InitArgs {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
    /// Bytes that the kernel would read ahead.
    pub readahead_bytes: u32,
    /// Flags, both words.
    pub flags: u64,
}

impl InitArgs {
    /// Decodes the arguments behind the header; none if they are cut short.
    pub fn decode(args: &[u8]) -> Option<InitArgs> {
        let mut fields = FieldReader(args);
        let (major, minor, readahead_bytes) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let low = u64::from(fields.u32()?);
        let extended = low & abi::init::INIT_EXT != 0;
        let high = if extended { u64::from(fields.u32()?) } else { 0 };
        Some(InitArgs { major, minor, readahead_bytes, flags: high << 32 | low })
    }
}
