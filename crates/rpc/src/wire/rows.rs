//! The rows of the table of operations ([`operations`](super::operations)), for an operation and
//! for a call.

use dray_core::{CreateHow, FileId, Lock, Op, OpenHow, RenameHow};

/// The facts that hold for every call of an operation. They are known before the arguments are
/// decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpRow {
    /// Data may come with it.
    pub takes_data: bool,
    /// The call may be sent with [`CallHead::ONE_WAY`](crate::wire::CallHead::ONE_WAY).
    pub may_be_one_way: bool,
    /// The call may be one part of a split read ([`CallHead::SPLIT_READ`](crate::wire::CallHead::SPLIT_READ)).
    pub may_be_split: bool,
    /// The caller's groups decide nothing, so that a caller with too many of them may make it.
    pub ignores_groups: bool,
    /// The caller may give it up while it waits. It may wait for as long as another client likes.
    pub can_be_cancelled: bool,
    /// Clients write with it what they have kept under write leases, or sync that. The call shows a file to nobody.
    pub restores_kept_writes: bool,
    /// How the next server finds out whether it was made, if the server dies before the reply.
    pub trace: Trace,
    /// The intent is noted as that of this operation, which earlier versions know, too.
    pub noted_as: Op,
    /// Whether the name that the call says may be leased with the answer.
    pub leases_name: NameLease,
    /// The answer to the change may lease the attributes of the file that it names.
    pub leases_changed: bool,
}

/// What an answer says of the name that its call said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameLease {
    /// Nothing that could be leased.
    None,
    /// The file that the name stands for.
    Found,
    /// The same; or, by `ENOENT`, that there is none.
    WithAbsence,
}

/// The leases of others that a call breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Breaks<'a> {
    /// Names in directories. The attributes of the directories change with them.
    pub names: [Option<(FileId, &'a [u8])>; 2],
    /// A file whose attributes change.
    pub attributes: Option<FileRef>,
    /// A file whose rights change. If it is a directory, they decide about all names there.
    pub rights: Option<FileRef>,
}

/// The evidence by which a change shows that it was made.
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

/// The facts that hold for one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallRow<'a> {
    /// Whether it comes in a replay slot.
    pub slot: SlotUse,
    /// The files that it names. The server must know the open ones.
    pub operands: [Option<Operand<'a>>; 2],
    /// The change that the call makes to its session.
    pub session: SessionChange,
    /// The change that the call makes to the file system.
    pub changes: Changes,
    /// The intent that is noted before the change is made.
    pub intent: Intent<'a>,
    /// The call belongs to a recovery: it does not wait for the end of one.
    pub is_recovery: bool,
    /// The file whose openings the call may change: who may open it, and for what. The call changes
    /// its mode, owner, list of rights, labels, or flags such as `FS_IMMUTABLE_FL`.
    pub takes_rights: Option<FileRef>,
    /// The call sets something, so that to make it again comes to the same, even in a later
    /// session.
    pub sets: bool,
    /// The call's data may go to the file from pages of the kernel.
    pub takes_pages: bool,
}

impl<'a> CallRow<'a> {
    /// The leases of others that the call breaks. It may break those of further files that its names
    /// lead to, which are not known before.
    pub fn breaks(&self) -> Breaks<'a> {
        let attributes = match self.changes {
            Changes::Attributes(file) | Changes::Data(file, _) => Some(file),
            Changes::Leases => match self.operands[0] {
                Some(Operand::Id(id)) => Some(FileRef::Id(id)),
                Some(Operand::Name(..) | Operand::Handle(_) | Operand::HandleOf(..)) | None => None,
            },
            // Nothing is leased before a change is made again.
            Changes::Nothing | Changes::Names | Changes::DataOfReply | Changes::Redone => None,
        };
        let held = match self.operands[0] {
            Some(Operand::Name(dir, name)) if self.changes == Changes::Leases => Some((dir, name)),
            _ => None,
        };
        let names = match self.intent {
            Intent::Make { dir, name, .. }
            | Intent::Create { dir, name, .. }
            | Intent::Link { dir, name, .. }
            | Intent::Remove { dir, name }
            | Intent::Put { dir, name } => [Some((dir, name)), None],
            Intent::Rename { from, to, .. } => [Some(from), Some(to)],
            Intent::None
            | Intent::Repeat(..)
            | Intent::Append { .. }
            | Intent::Copy { .. }
            | Intent::SetXattr { .. }
            | Intent::RemoveXattr { .. } => [held, None],
        };
        Breaks { names, attributes, rights: self.takes_rights }
    }
}

/// Whether a call comes in a replay slot.
///
/// A change in a slot has a grant of what it changes (`server::ranges`), and its intent is noted. A
/// change in no slot would pass both by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotUse {
    /// The call always has a slot: it changes files or names.
    Needed,
    /// The call may have a slot, if its client wants so: it opens a file.
    Allowed,
    /// The call never has a slot: it changes nothing, or it changes something with an order of its
    /// own. Such are the locks and open files of its session, and after a loss of power what has a
    /// stamp.
    Refused,
}

/// A file that a call names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand<'a> {
    /// The file is named by its id.
    Id(FileId),
    /// The file is named by a name in a directory.
    Name(FileId, &'a [u8]),
    /// The file is named by the client's number of an open file.
    Handle(u64),
    /// The file is named by such a number and by its id, which must be of the same file.
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
    /// The file is named by its id.
    Id(FileId),
    /// The file is named by the client's number of an open file.
    Handle(u64),
}

/// The change that a call makes to its session: open files, and locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionChange {
    /// Nothing.
    None,
    /// The call opens a file.
    Opens(Opening),
    /// The call opens again a file that was open before the server lost its state.
    Reopens(Opening),
    /// The call closes the file of this number.
    Closes(u64),
    /// The call takes locks by this open file, or gives them back.
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
    /// The file's id. None: the reply names it.
    pub file: Option<FileId>,
    /// The access that the file is opened for.
    pub how: OpenHow,
}

/// The change that a call makes to the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changes {
    /// Nothing.
    Nothing,
    /// Names. A new file is open nowhere.
    Names,
    /// What is leased of the operand: another server is about to change it.
    Leases,
    /// Attributes of a file.
    Attributes(FileRef),
    /// Data of a file.
    Data(FileRef, Extent),
    /// Data of a file that the reply names.
    DataOfReply,
    /// A change from before a loss of power, made again under the stamp of that time.
    Redone,
}

impl Changes {
    /// Whether the server gives it a new stamp.
    pub fn is_stamped(self) -> bool {
        match self {
            Changes::Nothing | Changes::Leases | Changes::Redone => false,
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
            | Changes::Leases
            | Changes::Attributes(_)
            | Changes::DataOfReply
            | Changes::Redone => None,
        }
    }
}

/// Which bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All bytes of the file, with size and attributes.
    All,
    /// The bytes from this offset on.
    From(u64),
    /// So many from an offset on.
    Bytes {
        /// Offset, bytes.
        at: u64,
        /// Number of bytes.
        len_bytes: u64,
    },
    /// As many bytes as data come with the call, from this offset on.
    Payload(u64),
}

/// The content of the intent of a change. The server notes it before the change is made.
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
