//! Asks the observers that admit the calls of clients to an export. A call is asked for once its
//! replay slot knows it, so that a repeated call is not asked for twice. It is asked for before it
//! waits for a range of a file, a directory or a stamp. So nobody waits for it meanwhile.

use dray_core::{
    CallAdmission, CallDetail, Context, FileId, Grant, GrantedAdmit, MakeKind, Name, ObservedCall,
    Op, OpenHow, Result,
};

use crate::server::reply::Reply;
use crate::server::session::ServerSession;
use crate::wire::{Call, LockPurpose};

/// How a put opens the file that it makes or replaces.
const PUT_OPEN: OpenHow = OpenHow::new(libc::O_WRONLY | libc::O_TRUNC);

/// What an admitted call holds of its export's admission. It is given back when this is dropped.
pub(super) struct Grants<'a> {
    admission: &'a dyn CallAdmission,
    grants: [Grant; 2],
}

impl Drop for Grants<'_> {
    fn drop(&mut self) {
        let held = self.grants.into_iter().filter(|grant| *grant != Grant::NONE);
        held.for_each(|grant| self.admission.ended(grant));
    }
}

/// Whether calls of this session are asked for now.
pub(super) fn is_on(session: &ServerSession) -> bool {
    session.export.admission.as_deref().is_some_and(CallAdmission::is_on)
}

/// The answer to a call that asks to be admitted.
pub(super) enum AtOnce<'a> {
    /// The call may go on.
    Now(Option<Grants<'a>>),
    /// Some of its parts wait, from the one with this number on.
    Later(Grants<'a>, usize),
}

/// Asks for `call` as far as that takes no wait. `data_bytes`: what it brings along.
pub(super) fn ask_at_once<'a>(
    session: &'a ServerSession,
    cx: &Context,
    call: &Call<'_>,
    data_bytes: usize,
) -> AtOnce<'a> {
    let Some(admission) = session.export.admission.as_deref().filter(|one| one.is_on()) else {
        return AtOnce::Now(None);
    };
    let mut grants = Grants { admission, grants: [Grant::NONE; 2] };
    for (index, part) in parts(session, call, data_bytes as u64).into_iter().enumerate() {
        let Some(part) = part else { continue };
        match admission.admit_at_once(cx, &part) {
            Some(grant) => grants.grants[index] = grant,
            None => return AtOnce::Later(grants, index),
        }
    }
    AtOnce::Now(Some(grants))
}

/// Waits until the parts of `call` from number `first` on may go on. Errors: those of the observer
/// that refuses one.
pub(super) async fn ask<'a>(
    session: &'a ServerSession,
    cx: &Context,
    (call, data_bytes): (&Call<'_>, usize),
    (mut grants, first): (Grants<'a>, usize),
) -> Result<Grants<'a>> {
    let parts = parts(session, call, data_bytes as u64);
    for (index, part) in parts.into_iter().enumerate().skip(first) {
        let Some(part) = part else { continue };
        grants.grants[index] = admit(grants.admission, cx, &part).await?;
    }
    Ok(grants)
}

/// The same for the opening of a file that its client has asked to have looked up and opened. The
/// lookup holds what the call holds.
pub(super) async fn ask_for_open(
    session: &ServerSession,
    cx: &Context,
    id: FileId,
    how: OpenHow,
) -> Result<()> {
    let Some(admission) = session.export.admission.as_deref().filter(|one| one.is_on()) else {
        return Ok(());
    };
    let grant = admit(admission, cx, &opening(Op::Open, id, None, how)).await?;
    drop(Grants { admission, grants: [grant, Grant::NONE] });
    Ok(())
}

/// Tells the observers of a change that a server before this one has made, and of its answer.
pub(super) fn settled(session: &ServerSession, cx: &Context, call: &Call<'_>, answer: &Reply) {
    let Some(admission) = &session.export.admission else { return };
    let error = answer.error();
    for part in parts(session, call, 0).into_iter().flatten() {
        admission.settled(cx, &part, answer.file(), error.as_ref());
    }
}

async fn admit(
    admission: &dyn CallAdmission,
    cx: &Context,
    call: &ObservedCall<'_>,
) -> Result<Grant> {
    let begun = dray_rt::now();
    let admitted = match admission.admit(cx, call) {
        GrantedAdmit::Now(grant) => return Ok(grant),
        GrantedAdmit::After(wait) => wait.await,
        GrantedAdmit::Refuse(error) => Err(error),
    };
    admitted.map_err(|error| {
        let error = error.during(call.op);
        admission.refused(cx, call, &error, begun.elapsed());
        error
    })
}

/// The operations of a call that are asked for. A call that names no open file of its client's is
/// not asked for: it fails by itself.
fn parts<'a>(
    session: &ServerSession,
    call: &'a Call<'a>,
    data_bytes: u64,
) -> [Option<ObservedCall<'a>>; 2] {
    let (op, root) = (call.op(), session.export.fs.info().root);
    let of = |handle: u64| {
        let file = session.file(handle)?;
        Some(ObservedCall::new(op, file.id()))
    };
    let sized = |handle, bytes| Some(ObservedCall { bytes, ..of(handle)? });
    let one = match *call {
        Call::Lookup { dir, name } => Some(named(op, dir, name)),
        Call::Make { dir, name, kind, .. } => {
            let detail = CallDetail::Make(match kind {
                0 => MakeKind::Directory,
                1 => MakeKind::Node,
                _ => MakeKind::Symlink,
            });
            Some(named(op, dir, name).with(detail))
        }
        Call::Remove { dir, name, kind } => {
            Some(named(op, dir, name).with(CallDetail::Remove(kind)))
        }
        // The opening is asked for once the file is known.
        Call::LookupOpen { dir, name, .. } => Some(named(Op::Lookup, dir, name)),
        Call::Rename { from, from_name, to, to_name, .. } => {
            let to = Name::new(to_name).ok().map(|name| (to, name));
            Some(ObservedCall { to, ..named(op, from, from_name) })
        }
        Call::Link { id, dir, name } => {
            let to = Name::new(name).ok().map(|name| (dir, name));
            Some(ObservedCall { to, ..ObservedCall::new(op, id) })
        }
        Call::Parent { dir: id }
        | Call::Learn { id, .. }
        | Call::Hold { id, .. }
        | Call::Getattr { id, .. }
        | Call::Readlink { id }
        | Call::Access { id, .. }
        | Call::Listxattr { id } => Some(ObservedCall::new(op, id)),
        Call::Setattr { id, ref set, .. } => {
            Some(ObservedCall::new(op, id).with(CallDetail::Set(set)))
        }
        Call::Getxattr { id, name, .. } | Call::Removexattr { id, name } => {
            Some(ObservedCall::new(op, id).with(CallDetail::Xattr(name)))
        }
        Call::Setxattr { id, name, value, .. } => {
            let call = ObservedCall { bytes: value.len() as u64, ..ObservedCall::new(op, id) };
            Some(call.with(CallDetail::Xattr(name)))
        }
        Call::Open { again: true, .. } => None, // a recovery
        Call::Open { id, how, .. } => Some(opening(op, id, None, how)),
        Call::OpenNamed { id, how, .. } => Some(opening(op, id, None, how)),
        Call::Create { dir, name, how, .. } => Some(opening(op, dir, Some(name), how.open)),
        Call::Tmpfile { dir, how, .. } => Some(opening(op, dir, None, how.open)),
        Call::Put { dir, name, .. } => {
            let create = opening(Op::Create, dir, Some(name), PUT_OPEN);
            let write = ObservedCall { op: Op::Write, bytes: data_bytes, ..create };
            return [Some(create), Some(write)];
        }
        Call::Statfs {} | Call::SyncAll {} | Call::Release { .. } => {
            Some(ObservedCall::new(op, root))
        }
        Call::Read { handle, len_bytes, .. } => sized(handle, len_bytes.into()),
        Call::Readdir { handle, max_bytes, .. } => sized(handle, max_bytes.into()),
        Call::Write { handle, .. } => sized(handle, data_bytes),
        Call::WriteBack { handle, .. } => {
            sized(handle, data_bytes).map(|write| ObservedCall { op: Op::Write, ..write })
        }
        Call::CopyRange { handle, len_bytes, .. } => sized(handle, len_bytes),
        Call::Flush { handle, .. }
        | Call::Sync { handle, .. }
        | Call::Allocate { handle, .. }
        | Call::Seek { handle, .. }
        | Call::TestLock { handle, .. }
        | Call::GetFlags { handle }
        | Call::SetFlags { handle, .. }
        | Call::GetXflags { handle }
        | Call::SetXflags { handle, .. }
        | Call::Close { handle } => of(handle),
        Call::Lock { purpose: LockPurpose::Reclaim, .. } => None, // a recovery
        Call::Lock { purpose, .. } if purpose.gives_back() => None, // the program was answered before
        Call::Lock { handle, .. } => of(handle),
        Call::Recover { .. } | Call::Redo { .. } | Call::Reopen { .. } | Call::Declare { .. } => {
            None
        }
    };
    [one, None]
}

fn named<'a>(op: Op, dir: FileId, name: &'a [u8]) -> ObservedCall<'a> {
    ObservedCall { name: Name::new(name).ok(), ..ObservedCall::new(op, dir) }
}

fn opening<'a>(op: Op, id: FileId, name: Option<&'a [u8]>, how: OpenHow) -> ObservedCall<'a> {
    let name = name.and_then(|name| Name::new(name).ok());
    ObservedCall { name, open: Some(how), ..ObservedCall::new(op, id) }
}
