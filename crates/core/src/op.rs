//! The operations by name, for metrics, logs, errors and fault plans.

macro_rules! ops {
    ($($variant:ident $name:literal $writes:literal),* $(,)?) => {
        /// An operation of [`FileSystem`](crate::FileSystem) or [`OpenFile`](crate::OpenFile). Some
        /// operations are of the wire alone, such as `Redo`: a change that a client sends again
        /// after the server's machine has lost power.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        #[allow(missing_docs)] // The names are those of the trait's methods.
        pub enum Op { $($variant),* }

        impl Op {
            /// Every operation, in the order of its number.
            pub const ALL: &'static [Op] = &[$(Op::$variant),*];

            /// The name of the trait's method.
            pub fn name(self) -> &'static str {
                match self { $(Op::$variant => $name),* }
            }

            /// Whether it changes the file system, such that a second application differs from one.
            pub fn writes(self) -> bool {
                match self { $(Op::$variant => $writes),* }
            }
        }
    };
}

ops! {
    Lookup "lookup" false,
    Parent "parent" false,
    Getattr "getattr" false,
    Setattr "setattr" true,
    Readlink "readlink" false,
    Make "make" true,
    Remove "remove" true,
    Rename "rename" true,
    Link "link" true,
    Open "open" false,
    Create "create" true,
    Tmpfile "tmpfile" true,
    Access "access" false,
    Statfs "statfs" false,
    Getxattr "getxattr" false,
    Setxattr "setxattr" true,
    Listxattr "listxattr" false,
    Removexattr "removexattr" true,
    Read "read" false,
    Write "write" true,
    Readdir "readdir" false,
    Flush "flush" false,
    Sync "sync" false,
    Allocate "allocate" true,
    Seek "seek" false,
    CopyRange "copy_range" true,
    Lock "lock" true,
    TestLock "test_lock" false,
    GetFlags "get_flags" false,
    SetFlags "set_flags" true,
    Close "close" true,
    Put "put" true,
    SyncAll "sync_all" false,
    Recover "recover" false,
    Redo "redo" true,
    Reopen "reopen" false,
    Declare "declare" false,
    LookupOpen "lookup_open" false,
    GetXflags "get_xflags" false,
    SetXflags "set_xflags" true,
    OpenNamed "open_named" false,
    Learn "learn" false,
    Hold "hold" false,
    Release "release" false,
    WriteBack "write_back" true,
}

/// The facts about an operation that backends and layers ask for. The facts for the wire are in the table of
/// operations of the crate `rpc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpFacts {
    /// The operation moves data of a file.
    pub moves_data: bool,
    /// The operation makes a file with a mode that its caller says: the caller's umask takes bits away.
    pub masks_mode: bool,
}

impl Op {
    /// How many there are; the length of a table with one row an operation.
    pub const COUNT: usize = Op::ALL.len();

    /// The facts about the operation.
    pub const fn facts(self) -> OpFacts {
        let facts = OpFacts { moves_data: false, masks_mode: false };
        match self {
            Op::Read | Op::Write | Op::CopyRange | Op::Put | Op::WriteBack => {
                OpFacts { moves_data: true, ..facts }
            }
            Op::Make | Op::Create | Op::Tmpfile => OpFacts { masks_mode: true, ..facts },
            Op::Lookup
            | Op::Parent
            | Op::Getattr
            | Op::Setattr
            | Op::Readlink
            | Op::Remove
            | Op::Rename
            | Op::Link
            | Op::Open
            | Op::Access
            | Op::Statfs
            | Op::Getxattr
            | Op::Setxattr
            | Op::Listxattr
            | Op::Removexattr
            | Op::Readdir
            | Op::Flush
            | Op::Sync
            | Op::Allocate
            | Op::Seek
            | Op::Lock
            | Op::TestLock
            | Op::GetFlags
            | Op::SetFlags
            | Op::Close
            | Op::SyncAll
            | Op::Recover
            | Op::Redo
            | Op::Reopen
            | Op::Declare
            | Op::LookupOpen
            | Op::GetXflags
            | Op::SetXflags
            | Op::OpenNamed
            | Op::Learn
            | Op::Hold
            | Op::Release => facts,
        }
    }
}
