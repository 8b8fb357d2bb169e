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
number!(/// A client node: chosen at random by its mount, stable as long as the mount exists.
    NodeId(u64));
number!(/// One request of one node; the replay key together with [`NodeId`].
    RequestId(u64));
number!(/// A session of a client at one server, as `dray status` shows it.
    SessionId(u64));
number!(/// Where clients come from, as far as they share what is counted: those of one number count
    /// together. 0 stands for this process itself.
    ClientAddress(u64));
number!(/// A client of this server, to whom what it has belongs (locks, open files): its session here.
    HolderId(u64));

/// The origin of a call, which is the same at each server that the call passes through.
///
/// Front ends set it. A server believes a client's origins within the session of that client only.
/// An origin names callers, and gives them no rights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Origin {
    /// The node whose process asks.
    pub node: NodeId,
    /// The number of the request there.
    pub request: RequestId,
}

/// The owner of a lock: an owner as its node's kernel numbers it, and that node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LockOwner {
    /// The node of the owner; [`NodeId::OWN`] until a server has filled it in.
    pub node: NodeId,
    /// The kernel's opaque number.
    pub number: u64,
}

impl NodeId {
    /// The node that asks, where nobody has said which one that is.
    pub const OWN: NodeId = NodeId(0);

    /// The node of a server that is a client of other servers. Those of all other clients are odd.
    pub const fn of_server(random: u64) -> NodeId {
        NodeId(random & !1 | 2)
    }

    /// Whether this is the node of a server ([`NodeId::of_server`]).
    pub const fn is_of_server(self) -> bool {
        self.0 & 1 == 0 && self.0 != 0
    }
}

impl LockOwner {
    /// Less than any other.
    pub const MIN: LockOwner = LockOwner { node: NodeId(0), number: 0 };
    /// More than any other.
    pub const MAX: LockOwner = LockOwner { node: NodeId(u64::MAX), number: u64::MAX };

    /// An owner of the node that asks.
    pub const fn own(number: u64) -> LockOwner {
        LockOwner { node: NodeId::OWN, number }
    }

    /// The same owner, of `node` if it was not said of which.
    pub fn of_node(self, node: NodeId) -> LockOwner {
        if self.node == NodeId::OWN { LockOwner { node, ..self } } else { self }
    }
}

/// Identity of a file within one file system, stable over rename and restart. An identity is never
/// reused for another file, as far as the file system below can promise it.
///
/// For a file system with own handles these are inode number and generation. For layouts over own
/// disks these are the upper and lower part of a 128-bit id of ours.
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
