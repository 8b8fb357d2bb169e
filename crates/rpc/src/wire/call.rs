//! The arguments of every call.

use dray_core::{
    Access, Allocate, CreateHow, FileId, Lock, LockOwner, Op, OpenHow, RemoveKind, RenameHow, Seek,
    SetAttr, Write, XattrSet, Xflags,
};

use crate::wire::codec::{Input, Malformed, Wire};
use crate::wire::lock_purpose::LockPurpose;
use crate::wire::stamp::Change;
use crate::wire::ticket::Ticket;
use crate::wire::write_back::WriteBase;

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? }),* $(,)?) => {
        /// A call's arguments by operation. `handle` is the number that the client gave an
        /// open file; names are checked by the server.
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[allow(missing_docs)] // The fields are those of the traits' methods.
        pub enum Call<'a> { $($(#[$doc])* $name { $($field: $type),* }),* }

        impl<'a> Call<'a> {
            /// Appends the arguments.
            pub fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $(Call::$name { $($field),* } => { $($field.put(out);)* })*
                }
            }

            /// Decodes the arguments of `op`, which must be all that is left.
            pub fn get(op: Op, input: &mut Input<'a>) -> Result<Call<'a>, Malformed> {
                let call = match op {
                    $(Op::$name => Call::$name { $($field: input.get::<$type>()?),* },)*
                };
                if input.0.is_empty() { Ok(call) } else { Err(Malformed("bytes left over")) }
            }

            /// The operation of the call.
            pub fn op(&self) -> Op {
                match self { $(Call::$name { .. } => Op::$name),* }
            }
        }
    };
}

/// A name, target or value; checked where it is used.
type Bytes<'a> = &'a [u8];

calls! {
    Lookup { dir: FileId, name: Bytes<'a> },
    Parent { dir: FileId },
    Getattr { id: FileId, handle: Option<u64> },
    Setattr { id: FileId, handle: Option<u64>, set: SetAttr },
    Readlink { id: FileId },
    /// `kind`: 0 directory, 1 node, 2 symbolic link.
    Make { dir: FileId, name: Bytes<'a>, kind: u8, mode: u32, rdev: u32, target: Bytes<'a> },
    Remove { dir: FileId, name: Bytes<'a>, kind: RemoveKind },
    Rename {
        from: FileId,
        from_name: Bytes<'a>,
        to: FileId,
        to_name: Bytes<'a>,
        how: RenameHow,
    },
    Link { id: FileId, dir: FileId, name: Bytes<'a> },
    /// `again`: after the server lost its state. It changes nothing: the caller's rights
    /// decide, unless the file is still open. [`Call::Reopen`] is for the others.
    Open { id: FileId, how: OpenHow, handle: u64, again: bool },
    Create { dir: FileId, name: Bytes<'a>, how: CreateHow, handle: u64 },
    Tmpfile { dir: FileId, how: CreateHow, handle: u64 },
    Access { id: FileId, want: Access },
    Statfs {},
    Getxattr { id: FileId, name: Bytes<'a> },
    Setxattr { id: FileId, name: Bytes<'a>, value: Bytes<'a>, how: XattrSet },
    Listxattr { id: FileId },
    Removexattr { id: FileId, name: Bytes<'a> },
    Read { handle: u64, at: u64, len_bytes: u32 },
    Write { handle: u64, how: Write },
    Readdir { handle: u64, cookie: u64, max_bytes: u32, plus: bool },
    Flush { handle: u64, owner: LockOwner },
    Sync { handle: u64, data_only: bool },
    Allocate { handle: u64, what: Allocate },
    Seek { handle: u64, at: u64, what: Seek },
    CopyRange { handle: u64, at: u64, to: u64, to_at: u64, len_bytes: u64 },
    Lock { handle: u64, lock: Lock, wait: bool, purpose: LockPurpose },
    TestLock { handle: u64, lock: Lock },
    GetFlags { handle: u64 },
    SetFlags { handle: u64, flags: u32 },
    Close { handle: u64 },
    /// Makes or replaces a file with the data that come along: create, write and close in
    /// one.
    Put { dir: FileId, name: Bytes<'a>, mode: u32 },
    SyncAll {},
    /// The statement of what a client knows to be on media, after the server's machine has lost
    /// power. The server epoch that it is meant for is `instance`. The last stamp that the client
    /// has seen is `newest`. Everything up to `durable_stamp` is on media. Pairs of file and stamp,
    /// of files for which more is on media, are `durable_stamps`. The `step` is 0 if more of them
    /// follow. It is 1 if these are the last, and the answer comes when changes can be sent. It is
    /// 2 when all changes have been sent.
    Recover { instance: u64, newest: u64, durable_stamp: u64, durable_stamps: Bytes<'a>, step: u8 },
    /// A change that the client kept and the loss of power may have undone.
    Redo { handle: u64, stamp: u64, change: Change },
    /// Opens a file again after the server lost its state. `ticket`: out of the answer to its
    /// first opening. Rights were checked then, and are not again.
    Reopen { id: FileId, how: OpenHow, handle: u64, ticket: Ticket },
    /// As `Recover` of a client that has tickets for what it knows to be on media. Everything up to
    /// `durable_stamp` is on media. Files for which more is have
    /// [`FileDurableStamp`](crate::wire::FileDurableStamp)s in `durable_stamps`. With `last`, the
    /// answer comes when changes can be sent.
    Declare { instance: u64, durable_stamp: u64, ticket: Ticket, durable_stamps: Bytes<'a>, last: bool },
    /// Looks a name up, and opens the file if that is a regular one, the caller may, and
    /// nothing stands in the way ([`FEATURE_LOOKUP_OPEN`](crate::wire::FEATURE_LOOKUP_OPEN)).
    /// The answer says whether it is open; if not, it is no error.
    LookupOpen { dir: FileId, name: Bytes<'a>, how: OpenHow, handle: u64 },
    /// Of servers with `FEATURE_XFLAGS`, as the next.
    GetXflags { handle: u64 },
    SetXflags { handle: u64, set: Xflags },
    /// As `Open`, if `name` in `dir` is that file; `ESTALE` if not
    /// ([`FEATURE_OPEN_NAMED`](crate::wire::FEATURE_OPEN_NAMED)).
    OpenNamed { dir: FileId, name: Bytes<'a>, id: FileId, how: OpenHow, handle: u64 },
    /// Says that `name` in `dir` is the file `id`, which the server has not met
    /// (`FEATURE_LEARN`).
    Learn { dir: FileId, name: Bytes<'a>, id: FileId },
    /// Has nothing leased of a name in the directory `id`, or without a name of the file's attributes. Another
    /// server is about to change that. It lasts until [`Call::Release`], and [`HOLD_TIME`](crate::wire::HOLD_TIME)
    /// at most (`FEATURE_HOLDS`).
    Hold { number: u64, id: FileId, name: Option<Bytes<'a>> },
    /// Ends it. The answer is 1 if it has lasted until now.
    Release { number: u64 },
    /// Writes what was kept under the write lease `lease`; the data come along
    /// (`FEATURE_WRITE_LEASES`). `extents` says where they go, as
    /// [`put_extents`](crate::wire::put_extents) writes it. The answer is the attributes behind that. Without that
    /// lease nothing is written unless the file is still as `base` says. Else the answer is `EREMCHG`. With `ends` the
    /// lease is given back.
    WriteBack {
        handle: u64,
        lease: u64,
        base: WriteBase,
        kill_set_id: bool,
        ends: bool,
        extents: Bytes<'a>,
    },
}
