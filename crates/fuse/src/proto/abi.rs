//! Numbers of the kernel's FUSE interface, version 7: operation codes, flags, sizes.
//!
//! Layouts are not declared as structs. Requests are read and answers are written field by field at
//! their offsets, so that alignment and length are checked where a field is used.

/// Major version of the interface that is spoken.
pub const MAJOR: u32 = 7;
/// Newest minor version whose layouts are known here.
pub const MINOR: u32 = 45;
/// Minor version below which a kernel is refused (5.x kernels have more).
pub const MINOR_OLDEST: u32 = 31;
/// The root's node id.
pub const ROOT_NODE: u64 = 1;
/// Bytes of a request's header.
pub const IN_HEADER_BYTES: usize = 40;
/// Bytes of an answer's header.
pub const OUT_HEADER_BYTES: usize = 16;
/// Set in the unique number of a request that the kernel sends again after a resend.
pub const UNIQUE_RESEND: u64 = 1 << 63;

macro_rules! opcodes {
    ($($name:ident = $number:literal $text:literal $args:literal),* $(,)?) => {
        /// Operation codes.
        #[allow(missing_docs)] // The names are the kernel's.
        pub mod op { $(pub const $name: u32 = $number;)* }

        /// The name of an operation code, for people.
        pub fn op_name(opcode: u32) -> &'static str {
            match opcode { $($number => $text,)* _ => "unknown" }
        }

        /// Bytes of the fixed arguments of an operation, in front of names and data;
        /// none for an operation that is not known.
        pub fn op_args_bytes(opcode: u32) -> Option<usize> {
            match opcode { $($number => Some($args),)* _ => None }
        }
    };
}

opcodes! {
    LOOKUP = 1 "lookup" 0, FORGET = 2 "forget" 8, GETATTR = 3 "getattr" 16,
    SETATTR = 4 "setattr" 88, READLINK = 5 "readlink" 0, SYMLINK = 6 "symlink" 0,
    MKNOD = 8 "mknod" 16, MKDIR = 9 "mkdir" 8, UNLINK = 10 "unlink" 0, RMDIR = 11 "rmdir" 0,
    RENAME = 12 "rename" 8, LINK = 13 "link" 8, OPEN = 14 "open" 8, READ = 15 "read" 40,
    WRITE = 16 "write" 40, STATFS = 17 "statfs" 0, RELEASE = 18 "release" 24,
    FSYNC = 20 "fsync" 16, SETXATTR = 21 "setxattr" 8, GETXATTR = 22 "getxattr" 8,
    LISTXATTR = 23 "listxattr" 8, REMOVEXATTR = 24 "removexattr" 0, FLUSH = 25 "flush" 24,
    INIT = 26 "init" 64, OPENDIR = 27 "opendir" 8, READDIR = 28 "readdir" 40,
    RELEASEDIR = 29 "releasedir" 24, FSYNCDIR = 30 "fsyncdir" 16, GETLK = 31 "getlk" 48,
    SETLK = 32 "setlk" 48, SETLKW = 33 "setlkw" 48, ACCESS = 34 "access" 8,
    CREATE = 35 "create" 16, INTERRUPT = 36 "interrupt" 8, BMAP = 37 "bmap" 16,
    DESTROY = 38 "destroy" 0, IOCTL = 39 "ioctl" 32, POLL = 40 "poll" 24,
    NOTIFY_REPLY = 41 "notify_reply" 40, BATCH_FORGET = 42 "batch_forget" 8,
    FALLOCATE = 43 "fallocate" 32, READDIRPLUS = 44 "readdirplus" 40,
    RENAME2 = 45 "rename2" 16, LSEEK = 46 "lseek" 24,
    COPY_FILE_RANGE = 47 "copy_file_range" 56, SYNCFS = 50 "syncfs" 8,
    TMPFILE = 51 "tmpfile" 16, STATX = 52 "statx" 24,
    COPY_FILE_RANGE_64 = 53 "copy_file_range_64" 56,
}

/// Operation codes are below this: the length of a table with one row an operation.
pub const OP_COUNT: usize = 64;

/// Flags of the INIT exchange, both words together.
#[allow(missing_docs)] // The names are the kernel's.
pub mod init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const POSIX_LOCKS: u64 = 1 << 1;
    pub const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const DONT_MASK: u64 = 1 << 6;
    pub const FLOCK_LOCKS: u64 = 1 << 10;
    pub const HAS_IOCTL_DIR: u64 = 1 << 11;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const CREATE_SUPP_GROUP: u64 = 1 << 34;
    pub const HAS_EXPIRE_ONLY: u64 = 1 << 35;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const PASSTHROUGH: u64 = 1 << 37;
    pub const NO_EXPORT_SUPPORT: u64 = 1 << 38;
    pub const HAS_RESEND: u64 = 1 << 39;
    pub const OVER_IO_URING: u64 = 1 << 41;
    pub const REQUEST_TIMEOUT: u64 = 1 << 42;

    /// Every flag that is known here, with its name, for people.
    pub const NAMES: &[(u64, &str)] = &[
        (ASYNC_READ, "async_read"),
        (POSIX_LOCKS, "posix_locks"),
        (ATOMIC_O_TRUNC, "atomic_o_trunc"),
        (EXPORT_SUPPORT, "export_support"),
        (BIG_WRITES, "big_writes"),
        (DONT_MASK, "dont_mask"),
        (FLOCK_LOCKS, "flock_locks"),
        (HAS_IOCTL_DIR, "has_ioctl_dir"),
        (AUTO_INVAL_DATA, "auto_inval_data"),
        (DO_READDIRPLUS, "do_readdirplus"),
        (READDIRPLUS_AUTO, "readdirplus_auto"),
        (ASYNC_DIO, "async_dio"),
        (PARALLEL_DIROPS, "parallel_dirops"),
        (POSIX_ACL, "posix_acl"),
        (MAX_PAGES, "max_pages"),
        (CACHE_SYMLINKS, "cache_symlinks"),
        (HANDLE_KILLPRIV_V2, "handle_killpriv_v2"),
        (INIT_EXT, "init_ext"),
        (CREATE_SUPP_GROUP, "create_supp_group"),
        (HAS_EXPIRE_ONLY, "has_expire_only"),
        (DIRECT_IO_ALLOW_MMAP, "direct_io_allow_mmap"),
        (PASSTHROUGH, "passthrough"),
        (NO_EXPORT_SUPPORT, "no_export_support"),
        (HAS_RESEND, "has_resend"),
        (OVER_IO_URING, "over_io_uring"),
        (REQUEST_TIMEOUT, "request_timeout"),
    ];
}

/// What an answer to an open tells the kernel about the file.
#[allow(missing_docs)]
pub mod fopen {
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const KEEP_CACHE: u32 = 1 << 1;
    pub const CACHE_DIR: u32 = 1 << 3;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
    pub const PASSTHROUGH: u32 = 1 << 7;
}

/// Which attributes a SETATTR changes.
#[allow(missing_docs)]
pub mod fattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const LOCKOWNER: u32 = 1 << 9;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// GETATTR and STATX: the file handle field is valid.
pub const GETATTR_FH: u32 = 1 << 0;
/// OPEN and CREATE: clear set-id bits when truncating.
pub const OPEN_KILL_SUIDGID: u32 = 1 << 0;
/// WRITE: comes from the page cache; the file handle is a guess.
pub const WRITE_CACHE: u32 = 1 << 0;
/// WRITE: clear set-id bits.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// FSYNC: data only.
pub const FSYNC_FDATASYNC: u32 = 1 << 0;
/// GETLK, SETLK and SETLKW: this is flock(2).
pub const LK_FLOCK: u32 = 1 << 0;
/// Type of the request extension that carries supplementary groups.
pub const EXT_GROUPS: u32 = 32;

/// Codes of notifications.
#[allow(missing_docs)]
pub mod notify {
    pub const INVAL_INODE: i32 = 2;
    pub const INVAL_ENTRY: i32 = 3;
    /// Flag of `INVAL_ENTRY`.
    pub const EXPIRE_ONLY: u32 = 1;
    pub const RESEND: i32 = 7;
}

/// `ioctl(2)` on a descriptor of /dev/fuse: attach it to the connection of another one.
pub const DEV_IOC_CLONE: libc::c_ulong = 0x8004_e500;
/// The same: take a file that the kernel may read in the place of one of the mount. Answers its number.
pub const DEV_IOC_BACKING_OPEN: libc::c_ulong = 0x4010_e501;
/// The same: give such a number back.
pub const DEV_IOC_BACKING_CLOSE: libc::c_ulong = 0x4004_e502;
