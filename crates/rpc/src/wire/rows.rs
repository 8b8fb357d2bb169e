//! What the table of operations ([`operations`](super::operations)) says of an operation and of a call.

use dray_core::{CreateHow, FileId, Lock, Op, OpenHow, RenameHow};

/// What holds for every call of an operation. It is known before the arguments are decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpRow {
    /// Data may come with it.
    pub takes_data: bool,
    /// It may be sent with [`CallHead::ONE_WAY`](crate::wire::CallHead::ONE_WAY).
    pub may_be_one_way: bool,
    /// It may be one part of a split read ([`CallHead::HALF`](crate::wire::CallHead::HALF)).
    pub may_be_split: bool,
    /// The caller's groups decide nothing, so that a caller with too many of them may make it.
    pub ignores_groups: bool,
    /// The caller may give it up while it waits.
    pub can_be_cancelled: bool,
    /// How the next server finds out whether it was made, if the server dies before the reply.
    pub trace: Trace,
    /// Its intent is noted as that of this operation, which earlier versions know, too.
    pub noted_as: Op,
}

/// By what a change shows that it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trace {
    /// No intent is noted.
    None,
    /// None is needed: to make the change again is the same.
    Repeatable,
    /// Something is under a name where nothing was.
    Made,
    /// The same; or what was there is cut.
    Created,
    /// A name stands for the linked file.
    Linked,
    /// A name is gone.
    Removed,
    /// A file has the other name.
    Renamed,
    /// A file is longer, if the write was an append.
    Written,
    /// None: a copy is made again with what was there before.
    Copied,
    /// A file is there, whose data are put once more.
    Put,
    /// An extended attribute is there that was not.
    XattrSet,
    /// An extended attribute is gone.
    XattrRemoved,
}

/// What holds for one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallRow<'a> {
    /// Whether it comes in a replay slot.
    pub slot: SlotUse,
    /// The files that it names. The server must know the open ones.
    pub operands: [Option<Operand<'a>>; 2],
    /// What it changes of its session.
    pub session: SessionChange,
    /// What it changes of the file system.
    pub changes: Changes,
    /// What is noted before it is made.
    pub intent: Intent<'a>,
    /// It belongs to a recovery: it does not wait for the end of one.
    pub is_recovery: bool,
    /// The file of which it may change who may open it, and for what: its mode, owner, list of rights,
    /// labels, or flags such as `FS_IMMUTABLE_FL`.
    pub takes_rights: Option<FileRef>,
    /// It sets something, so that to make it again comes to the same, even in a later session.
    pub sets: bool,
    /// Its data may go to the file from pages of the kernel.
    pub takes_pages: bool,
}

/// Whether a call comes in a replay slot.
///
/// A change in a slot has a grant of what it changes (`server::ranges`), and its intent is noted. A
/// change in no slot would pass both by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotUse {
    /// Always: it changes files or names.
    Needed,
    /// If its client wants so: it opens a file.
    Allowed,
    /// Never: it changes nothing, or what has an order of its own. Such are the locks and open files of
    /// its session, and after a loss of power what has a stamp.
    Refused,
}

/// A file that a call names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand<'a> {
    /// By its id.
    Id(FileId),
    /// By a name in a directory.
    Name(FileId, &'a [u8]),
    /// By the client's number of an open file.
    Handle(u64),
    /// By that and by its id, which must be of the same file.
    HandleOf(u64, FileId),
}

impl Operand<'_> {
    /// The client's number of the open file, if it is one.
    pub fn handle(self) -> Option<u64> {
        match self {
            Operand::Handle(handle) | Operand::HandleOf(handle, _) => Some(handle),
            Operand::Id(_) | Operand::Name(..) => None,
        }
    }
}

/// A file that a call changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileRef {
    /// By its id.
    Id(FileId),
    /// By the client's number of an open file.
    Handle(u64),
}

/// What a call changes of its session: open files, and locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionChange {
    /// Nothing.
    None,
    /// It opens a file.
    Opens(Opening),
    /// It opens again what was open before the server lost its state.
    Reopens(Opening),
    /// It closes the file of this number.
    Closes(u64),
    /// It takes locks by this open file, or gives them back.
    Locks {
        /// The open file.
        handle: u64,
        /// The lock, if the call waits for it.
        waits_for: Option<Lock>,
    },
}

/// A file that a call opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The client's number for it.
    pub handle: u64,
    /// Its id. None: the reply names it.
    pub file: Option<FileId>,
    /// What it is opened for.
    pub how: OpenHow,
}

/// What a call changes of the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changes {
    /// Nothing.
    Nothing,
    /// Names. What is new nobody has open.
    Names,
    /// Attributes of a file.
    Attributes(FileRef),
    /// Data of a file.
    Data(FileRef, Extent),
    /// Data of a file that the reply names.
    DataOfReply,
    /// What was changed before a loss of power, under the stamp of that time.
    Redone,
}

impl Changes {
    /// Whether the server gives it a new stamp.
    pub fn is_stamped(self) -> bool {
        match self {
            Changes::Nothing | Changes::Redone => false,
            Changes::Names | Changes::Attributes(_) | Changes::Data(..) | Changes::DataOfReply => {
                true
            }
        }
    }

    /// Where the data of the call go, bytes, if the call says that.
    pub fn written_at(self) -> Option<u64> {
        match self {
            Changes::Data(_, Extent::Payload(at)) => Some(at),
            Changes::Data(_, Extent::All | Extent::From(_) | Extent::Bytes { .. })
            | Changes::Nothing
            | Changes::Names
            | Changes::Attributes(_)
            | Changes::DataOfReply
            | Changes::Redone => None,
        }
    }
}

/// Which bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All of them, with size and attributes.
    All,
    /// Those from this offset on.
    From(u64),
    /// So many from an offset on.
    Bytes {
        /// Offset, bytes.
        at: u64,
        /// Number of bytes.
        len_bytes: u64,
    },
    /// As many as data come with the call, from this offset on.
    Payload(u64),
}

/// What the intent of a change holds. The server notes it before the change is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The fields are those of the call.
pub enum Intent<'a> {
    /// Nothing is noted.
    None,
    /// To make it again is the same, as long as nobody changes this in between.
    Repeat(FileRef, Extent),
    /// A file without data is made. `file_type`: `S_IFMT` bits.
    Make { dir: FileId, name: &'a [u8], file_type: u32 },
    /// A file is made or opened.
    Create { dir: FileId, name: &'a [u8], how: CreateHow },
    /// A file gets a name.
    Link { id: FileId, dir: FileId, name: &'a [u8] },
    /// A name is removed.
    Remove { dir: FileId, name: &'a [u8] },
    /// A file is made or replaced.
    Put { dir: FileId, name: &'a [u8] },
    /// A file gets another name.
    Rename { from: (FileId, &'a [u8]), to: (FileId, &'a [u8]), how: RenameHow },
    /// Data go to the end of an open file.
    Append { handle: u64 },
    /// Data of an open file are copied. `from`, `to`: the open files and the offsets in them.
    Copy { from: (u64, u64), to: (u64, u64), len_bytes: u64 },
    /// An extended attribute is set.
    SetXattr { id: FileId, name: &'a [u8] },
    /// An extended attribute is removed.
    RemoveXattr { id: FileId, name: &'a [u8] },
}
