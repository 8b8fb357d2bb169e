//! The table of operations: what both ends need to know of a call before they carry it out.
//!
//! Each operation has a row, and no arm is a wildcard: the compiler asks for the row of a new
//! operation. The facts that hold whatever the arguments are form [`OpRow`]. The arguments decide
//! [`CallRow`]. The rest of the crate asks the table, and does not match on operations.

use dray_core::{Allocate, FileId, Op, OpenHow, SetAttr, Write};

use crate::wire::rows::{
    CallRow, Changes, Extent, FileRef, Intent, NameLease, OpRow, Opening, Operand, SessionChange,
    SlotUse, Trace,
};
use crate::wire::{Call, FEATURE_TICKETS, FEATURE_WRITE_LEASES};

impl OpRow {
    /// The row of an operation.
    pub const fn of(op: Op) -> OpRow {
        let row = OpRow {
            takes_data: false,
            may_be_one_way: false,
            may_be_split: false,
            ignores_groups: false,
            can_be_cancelled: false,
            restores_kept_writes: false,
            trace: Trace::None,
            noted_as: op,
            leases_name: NameLease::None,
            leases_changed: false,
        };
        match op {
            Op::Lookup | Op::LookupOpen => OpRow { leases_name: NameLease::WithAbsence, ..row },
            Op::Parent
            | Op::Getattr
            | Op::Readlink
            | Op::Access
            | Op::Statfs
            | Op::Getxattr
            | Op::Listxattr
            | Op::Readdir
            | Op::Seek
            | Op::TestLock
            | Op::GetFlags
            | Op::GetXflags
            | Op::SyncAll
            | Op::Recover
            | Op::Declare
            // What it adds to the table of paths is no change of a file.
            | Op::Learn
            | Op::Hold
            | Op::Release
            | Op::Reopen
            // A file without a name is found by nobody else, and goes with the server.
            | Op::Tmpfile => row,
            Op::Read => OpRow { may_be_split: true, ..row },
            Op::Redo => OpRow { takes_data: true, ..row },
            Op::Lock => OpRow { ignores_groups: true, can_be_cancelled: true, ..row },
            Op::Sync => OpRow { restores_kept_writes: true, ..row },
            Op::Flush => OpRow { ignores_groups: true, ..row },
            Op::Close => OpRow { ignores_groups: true, may_be_one_way: true, ..row },
            Op::Open | Op::Allocate | Op::SetFlags | Op::SetXflags => {
                OpRow { trace: Trace::Repeatable, ..row }
            }
            Op::Setattr => OpRow { trace: Trace::Repeatable, leases_changed: true, ..row },
            Op::OpenNamed => OpRow { trace: Trace::Repeatable, noted_as: Op::Open, ..row },
            Op::Make => OpRow { trace: Trace::Made, leases_name: NameLease::Found, ..row },
            Op::Create => OpRow { trace: Trace::Created, leases_name: NameLease::Found, ..row },
            Op::Link => OpRow { trace: Trace::Linked, leases_name: NameLease::Found, ..row },
            Op::Remove => OpRow { trace: Trace::Removed, ..row },
            Op::Rename => OpRow { trace: Trace::Renamed, ..row },
            Op::Setxattr => OpRow { trace: Trace::XattrSet, ..row },
            Op::Removexattr => OpRow { trace: Trace::XattrRemoved, ..row },
            Op::Write => OpRow { takes_data: true, trace: Trace::Written, ..row },
            // Earlier versions know its intent, that of a write to a place.
            Op::WriteBack => {
                let writes = OpRow { takes_data: true, trace: Trace::Written, ..row };
                OpRow { noted_as: Op::Write, restores_kept_writes: true, ..writes }
            }
            Op::CopyRange => OpRow { trace: Trace::Copied, ..row },
            Op::Put => OpRow { takes_data: true, trace: Trace::Put, ..row },
        }
    }
}

/// Feature: `lookup_open` is understood. A file opened in that way may not have been used yet. A
/// call that would change the outcome of opening the file waits at the server meanwhile (ADR 0018).
pub const FEATURE_LOOKUP_OPEN: u64 = 8;
/// Feature: `get_xflags` and `set_xflags` are understood.
const FEATURE_XFLAGS: u64 = 128;
/// Feature: `open_named` is understood.
pub const FEATURE_OPEN_NAMED: u64 = 256;
/// Feature: `learn` is understood.
const FEATURE_LEARN: u64 = 512;
/// Feature: `hold` and `release` are understood.
const FEATURE_HOLDS: u64 = 4096;

/// The feature without which a server does not have the operation; 0: every server has it.
pub const fn feature_of(op: Op) -> u64 {
    match op {
        Op::Lookup
        | Op::Parent
        | Op::Getattr
        | Op::Setattr
        | Op::Readlink
        | Op::Make
        | Op::Remove
        | Op::Rename
        | Op::Link
        | Op::Open
        | Op::Create
        | Op::Tmpfile
        | Op::Access
        | Op::Statfs
        | Op::Getxattr
        | Op::Setxattr
        | Op::Listxattr
        | Op::Removexattr
        | Op::Read
        | Op::Write
        | Op::Readdir
        | Op::Flush
        | Op::Sync
        | Op::Allocate
        | Op::Seek
        | Op::CopyRange
        | Op::Lock
        | Op::TestLock
        | Op::GetFlags
        | Op::SetFlags
        | Op::Close
        | Op::Put
        | Op::SyncAll
        | Op::Recover
        | Op::Redo => 0,
        Op::Reopen | Op::Declare => FEATURE_TICKETS,
        Op::LookupOpen => FEATURE_LOOKUP_OPEN,
        Op::GetXflags | Op::SetXflags => FEATURE_XFLAGS,
        Op::OpenNamed => FEATURE_OPEN_NAMED,
        Op::Learn => FEATURE_LEARN,
        Op::Hold | Op::Release => FEATURE_HOLDS,
        Op::WriteBack => FEATURE_WRITE_LEASES,
    }
}

/// The features without which a server lacks some operation.
pub(super) const fn features_of_operations() -> u64 {
    let (mut features, mut at) = (0, 0);
    while at < Op::ALL.len() {
        features |= feature_of(Op::ALL[at]);
        at += 1;
    }
    features
}

impl<'a> Call<'a> {
    /// The row of a call.
    pub fn row(&self) -> CallRow<'a> {
        match *self {
            Call::Lookup { dir, name } => asks(Operand::Name(dir, name)),
            // Other callers may hold the file, and nothing of it is changed.
            Call::Learn { dir, name, .. } => asks(Operand::Name(dir, name)),
            Call::Hold { id, name, .. } => {
                let held = name.map_or(Operand::Id(id), |name| Operand::Name(id, name));
                CallRow { changes: Changes::Leases, ..asks(held) }
            }
            Call::Release { .. } => NOTHING,
            Call::Parent { dir: id }
            | Call::Readlink { id }
            | Call::Access { id, .. }
            | Call::Getxattr { id, .. }
            | Call::Listxattr { id } => asks(Operand::Id(id)),
            Call::Getattr { id, handle } => asks(handle.map_or(Operand::Id(id), Operand::Handle)),
            Call::Read { handle, .. }
            | Call::Readdir { handle, .. }
            | Call::Sync { handle, .. }
            | Call::Seek { handle, .. }
            | Call::TestLock { handle, .. }
            | Call::GetFlags { handle }
            | Call::GetXflags { handle } => asks(Operand::Handle(handle)),
            Call::Statfs {} | Call::SyncAll {} => NOTHING,
            Call::Recover { .. } | Call::Declare { .. } => CallRow { is_recovery: true, ..NOTHING },
            Call::Redo { handle, .. } => {
                let row = CallRow { changes: Changes::Redone, is_recovery: true, ..NOTHING };
                row.about(Operand::Handle(handle))
            }
            Call::Open { id, how, handle, again: false } => {
                opens(id, how, handle).about(Operand::Id(id))
            }
            Call::OpenNamed { dir, name, id, how, handle } => {
                opens(id, how, handle).about(Operand::Name(dir, name))
            }
            Call::Open { id, how, handle, again: true } => CallRow {
                slot: SlotUse::Allowed,
                intent: Intent::Repeat(FileRef::Id(id), Extent::All),
                sets: true,
                ..reopens(id, how, handle)
            },
            Call::Reopen { id, how, handle, .. } => reopens(id, how, handle),
            Call::LookupOpen { dir, name, how, handle } => CallRow {
                session: SessionChange::Opens(Opening { handle, file: None, how }),
                ..asks(Operand::Name(dir, name))
            },
            // Of a file that is not known there is nothing to close, which is no error.
            Call::Close { handle } => CallRow {
                session: SessionChange::Closes(handle),
                is_recovery: true, // the last for what is opened again
                ..NOTHING
            },
            Call::Flush { handle, .. } => CallRow {
                session: SessionChange::Locks { handle, waits_for: None },
                ..asks(Operand::Handle(handle))
            },
            Call::Lock { handle, lock, wait, .. } => CallRow {
                session: SessionChange::Locks { handle, waits_for: wait.then_some(lock) },
                is_recovery: true,
                ..asks(Operand::Handle(handle))
            },
            Call::Setattr { id, handle, set } => sets_attributes(id, handle, set),
            Call::Setxattr { id, name, .. } => CallRow {
                takes_rights: rights_by_label(id, name),
                sets: true,
                ..changes_xattr(id, Intent::SetXattr { id, name })
            },
            Call::Removexattr { id, name } => CallRow {
                takes_rights: rights_by_label(id, name),
                ..changes_xattr(id, Intent::RemoveXattr { id, name })
            },
            Call::SetFlags { handle, .. } | Call::SetXflags { handle, .. } => {
                let file = FileRef::Handle(handle);
                let intent = Intent::Repeat(file, Extent::All);
                let row = change(Changes::Attributes(file), intent);
                CallRow { takes_rights: Some(file), ..row }.about(Operand::Handle(handle))
            }
            Call::Make { dir, name, kind, mode, .. } => {
                let intent = Intent::Make { dir, name, file_type: file_type_made(kind, mode) };
                change(Changes::Names, intent).about(Operand::Name(dir, name))
            }
            Call::Create { dir, name, how, handle } => {
                let cuts = how.open.truncates();
                let changes = if cuts { Changes::DataOfReply } else { Changes::Names };
                CallRow {
                    session: SessionChange::Opens(Opening { handle, file: None, how: how.open }),
                    sets: !how.exclusive,
                    ..change(changes, Intent::Create { dir, name, how })
                }
                .about(Operand::Name(dir, name))
            }
            Call::Tmpfile { dir, how, handle } => {
                let opening = Opening { handle, file: None, how: how.open };
                let row = change(Changes::Names, Intent::None).about(Operand::Id(dir));
                CallRow { session: SessionChange::Opens(opening), ..row }
            }
            Call::Put { dir, name, .. } => {
                let row = change(Changes::DataOfReply, Intent::Put { dir, name });
                row.about(Operand::Name(dir, name))
            }
            Call::Remove { dir, name, .. } => {
                let row = change(Changes::Names, Intent::Remove { dir, name });
                row.about(Operand::Name(dir, name))
            }
            Call::Rename { from, from_name, to, to_name, how } => {
                let intent = Intent::Rename { from: (from, from_name), to: (to, to_name), how };
                change(Changes::Names, intent)
                    .about(Operand::Name(from, from_name))
                    .and_about(Operand::Name(to, to_name))
            }
            Call::Link { id, dir, name } => {
                let changes = Changes::Attributes(FileRef::Id(id)); // the number of its names
                change(changes, Intent::Link { id, dir, name })
                    .about(Operand::Id(id))
                    .and_about(Operand::Name(dir, name))
            }
            Call::Write { handle, how } => writes(handle, how).about(Operand::Handle(handle)),
            // Whether it may be made depends on all of the file.
            Call::WriteBack { handle, .. } => {
                let file = FileRef::Handle(handle);
                let intent = Intent::Repeat(file, Extent::All);
                change(Changes::Data(file, Extent::All), intent).about(Operand::Handle(handle))
            }
            Call::Allocate { handle, what } => {
                allocates(handle, what).about(Operand::Handle(handle))
            }
            Call::CopyRange { handle, at, to, to_at, len_bytes } => {
                let len_bytes = copied_bytes(len_bytes);
                let changed = Extent::Bytes { at: to_at, len_bytes };
                let intent = Intent::Copy { from: (handle, at), to: (to, to_at), len_bytes };
                change(Changes::Data(FileRef::Handle(to), changed), intent)
                    .about(Operand::Handle(handle))
                    .and_about(Operand::Handle(to))
            }
        }
    }
}

/// Bytes that one call copies at most; its client asks again for the rest. A call that reads the
/// bytes behind them does not wait for it.
const COPY_MAX_BYTES: u64 = 64 << 20;

/// How many of the bytes that a copy is asked for are copied by one call.
pub(crate) fn copied_bytes(len_bytes: u64) -> u64 {
    len_bytes.min(COPY_MAX_BYTES)
}

/// The row of a call that names nothing and changes nothing.
const NOTHING: CallRow<'static> = CallRow {
    slot: SlotUse::Refused,
    operands: [None, None],
    session: SessionChange::None,
    changes: Changes::Nothing,
    intent: Intent::None,
    is_recovery: false,
    takes_rights: None,
    sets: false,
    takes_pages: false,
};

impl<'a> CallRow<'a> {
    fn about(self, operand: Operand<'a>) -> CallRow<'a> {
        CallRow { operands: [Some(operand), None], ..self }
    }

    fn and_about(self, operand: Operand<'a>) -> CallRow<'a> {
        CallRow { operands: [self.operands[0], Some(operand)], ..self }
    }
}

/// A call that changes nothing.
fn asks(operand: Operand<'_>) -> CallRow<'_> {
    CallRow { operands: [Some(operand), None], ..NOTHING }
}

/// A change in a slot.
fn change(changes: Changes, intent: Intent<'_>) -> CallRow<'_> {
    CallRow { slot: SlotUse::Needed, changes, intent, ..NOTHING }
}

/// An opening. It needs a slot if it cuts the file.
fn opens<'a>(id: FileId, how: OpenHow, handle: u64) -> CallRow<'a> {
    let file = FileRef::Id(id);
    let (slot, changes) = match how.truncates() {
        true => (SlotUse::Needed, Changes::Data(file, Extent::All)),
        false => (SlotUse::Allowed, Changes::Nothing),
    };
    let session = SessionChange::Opens(Opening { handle, file: Some(id), how });
    let intent = Intent::Repeat(file, Extent::All);
    CallRow { slot, changes, session, intent, sets: true, ..NOTHING }
}

/// An opening of what was open before the server lost its state. It cuts nothing.
fn reopens<'a>(id: FileId, how: OpenHow, handle: u64) -> CallRow<'a> {
    let session = SessionChange::Reopens(Opening { handle, file: Some(id), how });
    CallRow { session, is_recovery: true, ..asks(Operand::Id(id)) }
}

fn sets_attributes<'a>(id: FileId, handle: Option<u64>, set: SetAttr) -> CallRow<'a> {
    let file = FileRef::Id(id);
    let changes = match set.size {
        Some(size) => Changes::Data(file, Extent::From(size)),
        None => Changes::Attributes(file),
    };
    let rights = set.mode.is_some() || set.uid.is_some() || set.gid.is_some();
    let row = CallRow {
        takes_rights: rights.then_some(file),
        sets: true,
        ..change(changes, Intent::Repeat(file, Extent::All))
    };
    row.about(match handle {
        Some(handle) => Operand::HandleOf(handle, id),
        None => Operand::Id(id),
    })
}

fn changes_xattr<'a>(id: FileId, intent: Intent<'a>) -> CallRow<'a> {
    change(Changes::Attributes(FileRef::Id(id)), intent).about(Operand::Id(id))
}

/// Lists of rights, labels and capabilities are all but the attributes of users.
fn rights_by_label(id: FileId, name: &[u8]) -> Option<FileRef> {
    (!name.starts_with(b"user.")).then_some(FileRef::Id(id))
}

fn writes<'a>(handle: u64, how: Write) -> CallRow<'a> {
    let file = FileRef::Handle(handle);
    if how.append {
        return change(Changes::Data(file, Extent::All), Intent::Append { handle });
    }
    let written = Extent::Payload(how.at);
    CallRow {
        sets: true,
        takes_pages: !how.sync,
        ..change(Changes::Data(file, written), Intent::Repeat(file, written))
    }
}

fn allocates<'a>(handle: u64, what: Allocate) -> CallRow<'a> {
    let file = FileRef::Handle(handle);
    let moves = what.flags & (libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_INSERT_RANGE) != 0;
    let changed = match moves {
        true => Extent::All,
        false => Extent::Bytes { at: what.at, len_bytes: what.len_bytes },
    };
    let row = change(Changes::Data(file, changed), Intent::Repeat(file, Extent::All));
    CallRow { sets: !moves, ..row }
}

/// `S_IFMT` bits of what [`Call::Make`] makes.
fn file_type_made(kind: u8, mode: u32) -> u32 {
    match kind {
        0 => libc::S_IFDIR,
        1 if mode & libc::S_IFMT == 0 => libc::S_IFREG,
        1 => mode & libc::S_IFMT,
        _ => libc::S_IFLNK,
    }
}
