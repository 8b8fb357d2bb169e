//! Ids, each its own type, so that one cannot be passed for another.

use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(/// User id of the caller, as the client node numbers users.
    Uid(u32));
number!(/// Group id of the caller.
    Gid(u32));
number!(/// Process (thread) id on the client node.
    Pid(u32));
number!(/// A client node: chosen at random by its mount, stable for the mount's life.
    NodeId(u64));
number!(/// One request of one node; the replay key together with [`NodeId`].
    RequestId(u64));
number!(/// A session of a client at one server, as `dray status` shows it.
    SessionId(u64));
number!(/// Where clients come from, as far as they share what is counted: those of one number count
    /// together. 0 stands for this process itself.
    Origin(u64));
number!(/// Who owns a lock within a node: the kernel's opaque lock owner.
    LockOwner(u64));

/// Identity of a file within one file system: stable over rename and restart,
/// never reused for another file as far as the file system below can promise it.
///
/// For a file system with own handles these are inode number and generation;
/// for layouts over own disks the two halves of a 128-bit id of ours.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId {
    /// Inode number (upper half of a 128-bit id).
    pub ino: u64,
    /// Generation of that number (lower half of a 128-bit id).
    pub generation: u64,
}

impl fmt::Debug for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.ino, self.generation)
    }
}

impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Identity of a file system: a random 128-bit number kept with the export.
/// A [`FileId`] means something only together with it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct FsUuid(pub u128);

impl fmt::Debug for FsUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = format!("{:032x}", self.0);
        write!(f, "{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    }
}

impl fmt::Display for FsUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
