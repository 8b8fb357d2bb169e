//! The files that a call names, without carrying it out.

use std::sync::Arc;

use dray_core::{Errno, Error, FileId, OpenFile, Result};

use crate::server::ranges::Span;
use crate::server::reply::Reply;
use crate::server::session::ServerSession;
use crate::wire::{CallRow, Extent, FileRef, Intent, Operand};

/// The open files that a change in a slot names, found once. So a change changes the files for
/// which it has grants, whatever its client opens under their numbers meanwhile.
#[derive(Default)]
pub(in crate::server) struct Files([Option<(u64, Arc<dyn OpenFile>)>; 2]);

impl Files {
    /// The files of a call. Errors: `EBADF`, one of them has been closed, or is another by now than
    /// the call says besides.
    pub(in crate::server) fn of(session: &ServerSession, row: &CallRow<'_>) -> Result<Files> {
        let mut files = Files::default();
        for (place, operand) in files.0.iter_mut().zip(row.operands.into_iter().flatten()) {
            let Some(handle) = operand.handle() else { continue };
            let file = session.file(handle).filter(|file| means(operand, file.id()));
            *place = Some((handle, file.ok_or_else(|| Error::new(Errno::EBADF))?));
        }
        Ok(files)
    }

    /// The one of this number.
    pub(in crate::server) fn get(&self, handle: u64) -> Option<&Arc<dyn OpenFile>> {
        let mut all = self.0.iter().flatten();
        all.find(|(number, _)| *number == handle).map(|(_, file)| file)
    }

    /// The id of a file that the call changes. Errors: `EBADF`, it is none of these.
    pub(in crate::server) fn id(&self, file: FileRef) -> Result<FileId> {
        match file {
            FileRef::Id(id) => Ok(id),
            FileRef::Handle(handle) => {
                let file = self.get(handle).ok_or_else(|| Error::new(Errno::EBADF))?;
                Ok(file.id())
            }
        }
    }

    /// The files of a change that a death of the server may cut short. They are the files of which
    /// the change needs a grant. Errors: as [`Files::id`].
    pub(in crate::server) fn repeated(&self, intent: Intent<'_>) -> Result<[Option<FileId>; 2]> {
        let handle = |handle| self.id(FileRef::Handle(handle));
        Ok(match intent {
            Intent::Repeat(file, _) => [Some(self.id(file)?), None],
            Intent::SetXattr { id, .. } | Intent::RemoveXattr { id, .. } => [Some(id), None],
            Intent::Create { dir, .. } => [Some(dir), None],
            Intent::Append { handle: file } => [Some(handle(file)?), None],
            Intent::Copy { from, to, .. } => [Some(handle(from.0)?), Some(handle(to.0)?)],
            // A put is about the file that was found for it. The others are not cut short.
            Intent::Put { .. }
            | Intent::None
            | Intent::Make { .. }
            | Intent::Link { .. }
            | Intent::Remove { .. }
            | Intent::Rename { .. } => [None, None],
        })
    }
}

/// Whether a file is the one that is meant, as far as the call says.
fn means(operand: Operand<'_>, id: FileId) -> bool {
    match operand {
        Operand::HandleOf(_, wanted) => wanted == id,
        Operand::Handle(_) | Operand::Id(_) | Operand::Name(..) => true,
    }
}

/// The bytes that an extent stands for, where so many come with the call.
pub(in crate::server) fn span(extent: Extent, data_bytes: usize) -> Span {
    match extent {
        Extent::All => Span::ALL,
        Extent::From(at) => Span::from(at),
        Extent::Bytes { at, len_bytes } => Span::bytes(at, len_bytes),
        Extent::Payload(at) => Span::bytes(at, data_bytes as u64),
    }
}

/// Why a call cannot be carried out with the open files that it names.
pub(in crate::server) enum HandleFault {
    /// The session has no such file.
    Unknown,
    /// Number and id are of two files.
    TwoFiles,
}

impl HandleFault {
    pub(in crate::server) fn reply(&self) -> Reply {
        match self {
            HandleFault::Unknown => Reply::unknown_handle(),
            HandleFault::TwoFiles => Reply::malformed("one call about two files"),
        }
    }
}

/// Whether the session has the open files that a call names. A call that names a file besides by
/// its id, for which it has its grant, must mean the same file.
pub(in crate::server) fn check_handles(
    session: &ServerSession,
    row: &CallRow<'_>,
) -> std::result::Result<(), HandleFault> {
    for operand in row.operands.into_iter().flatten() {
        let Some(handle) = operand.handle() else { continue };
        let known = match operand {
            Operand::HandleOf(..) => match session.file(handle) {
                Some(file) if !means(operand, file.id()) => return Err(HandleFault::TwoFiles),
                file => file.is_some(),
            },
            Operand::Handle(_) | Operand::Id(_) | Operand::Name(..) => session.has_file(handle),
        };
        if !known {
            return Err(HandleFault::Unknown);
        }
    }
    Ok(())
}

/// A file that a call under way names, for people.
#[derive(Clone, Debug)]
pub(in crate::server) enum ShownOperand {
    Id(FileId),
    Name(FileId, Box<[u8]>),
    Handle(u64),
}

impl ShownOperand {
    pub(in crate::server) fn of(operand: Operand<'_>) -> ShownOperand {
        match operand {
            Operand::Id(id) => ShownOperand::Id(id),
            Operand::Name(dir, name) => ShownOperand::Name(dir, name.into()),
            Operand::Handle(handle) | Operand::HandleOf(handle, _) => ShownOperand::Handle(handle),
        }
    }

    /// The file, or the directory and the name in it. None: it has been closed meanwhile.
    pub(in crate::server) fn subject(
        &self,
        session: &ServerSession,
    ) -> Option<(FileId, Option<Vec<u8>>)> {
        match self {
            ShownOperand::Id(id) => Some((*id, None)),
            ShownOperand::Name(dir, name) => Some((*dir, Some(name.to_vec()))),
            ShownOperand::Handle(handle) => session.file(*handle).map(|file| (file.id(), None)),
        }
    }
}
