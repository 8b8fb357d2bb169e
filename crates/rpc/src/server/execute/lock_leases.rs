//! Locks under the lease on a file's fcntl locks: when it is given, and how it comes back (ADR 0064).

use dray_core::{
    Context, Errno, Error, FileId, Lock, LockFamily, LockKind, LockRange, OpenFile, Result,
};

use crate::server::leases::LockCall;
use crate::server::reply::Reply;
use crate::server::session::ServerSession;
use crate::wire::LockPurpose;

/// The number that an answer gives with the lease: there is one of a file.
const LEASED: u64 = 0;

/// Begins a call about fcntl locks of a file. Waits until no other session decides on them. None: nobody ever does.
/// `patient`: the caller waits for the lock itself.
pub(super) async fn begin<'a>(
    session: &'a ServerSession,
    cx: &Context,
    (file, lock): (&dyn OpenFile, &Lock),
    patient: bool,
) -> Result<Option<LockCall<'a>>> {
    let Some(table) = session.export.lease_table.as_ref() else { return Ok(None) };
    // A lock that is given back is the caller's own, and the lease on it, too.
    if lock.family != LockFamily::Posix || lock.kind == LockKind::Unlock {
        return Ok(None);
    }
    let Some(call) = table.locks.begin(file.id()) else { return Ok(None) };
    // The end of the session ends the wait, too.
    if let Some(cancel) = &cx.cancel {
        session.wait_begins(cx.origin, cancel.clone());
    }
    let cleared = call.clear(cx, session.lease_holder(), patient).await;
    session.wait_ends(cx.origin);
    cleared.map(|()| Some(call))
}

/// Gives the lease with the answer to a lock, if nobody else uses locks of the file.
pub(super) async fn give(
    session: &ServerSession,
    cx: &Context,
    (call, handle): (&LockCall<'_>, u64),
    (file, lock): (&dyn OpenFile, Lock),
    reply: &mut Reply,
) {
    let Some(who) = session.lease_holder().filter(|_| session.keeps_locks()) else { return };
    let any = Lock { kind: LockKind::Exclusive, range: LockRange::ALL, ..lock };
    if !matches!(file.test_lock(cx, any).await, Ok(None)) {
        return; // another program of this client has one, say
    }
    // First: from then on the client may have locks of which a later server has to know.
    if !session.note_lock_lease(file.id()) {
        return;
    }
    match call.lease(who, handle) {
        true => reply.lease_writing(Some(LEASED)),
        false if who.has_lock_lease(file.id()) => {} // it did not take what it was given before
        false => session.forget_lock_lease(file.id()),
    }
    // A close of the file, or the end of the session, may have come in between.
    if !session.has_file(handle) || session.is_ended() {
        end(session, file.id());
    }
}

fn end(session: &ServerSession, file: FileId) {
    if let (Some(table), Some(who)) = (&session.export.lease_table, session.lease_holder())
        && table.locks.end(who, file)
    {
        session.forget_lock_lease(file);
    }
}

/// Carries out a part of giving a lease back. Where the session has none, that is over, or another server's: nothing
/// changes then. Errors: `EBADF`, `ENOLCK`.
pub(super) async fn give_back(
    session: &ServerSession,
    cx: &Context,
    handle: u64,
    (lock, purpose): (Lock, LockPurpose),
) -> Result<Reply> {
    let file = session.file(handle).ok_or_else(|| Error::new(Errno::EBADF))?;
    let table = session.export.lease_table.as_ref();
    let Some((table, who)) = table.zip(session.lease_holder()) else {
        return Ok(Reply::success(()));
    };
    if !table.locks.is_held_by(who, file.id()) {
        return Ok(Reply::success(()));
    }
    match purpose {
        LockPurpose::GiveBackLocks => {
            session.forget_fcntl_locks(cx, file.id()).await;
            table.locks.begin_taking_back(who, file.id());
        }
        LockPurpose::GiveBackNone => {
            session.forget_fcntl_locks(cx, file.id()).await;
            end(session, file.id());
        }
        LockPurpose::GivenBack => take_back(session, cx, (handle, &*file), lock).await?,
        LockPurpose::LastGivenBack => {
            let taken = take_back(session, cx, (handle, &*file), lock).await;
            end(session, file.id());
            taken?;
        }
        LockPurpose::Program | LockPurpose::Reclaim | LockPurpose::AskForLease => {}
    }
    Ok(Reply::success(()))
}

/// Takes a lock that the client has granted by itself.
async fn take_back(
    session: &ServerSession,
    cx: &Context,
    (handle, file): (u64, &dyn OpenFile),
    lock: Lock,
) -> Result<()> {
    let is_one = lock.family == LockFamily::Posix && lock.kind != LockKind::Unlock;
    if !is_one || lock.range.start > lock.range.end {
        return Err(Error::new(Errno::EINVAL).because("no lock that a lease covers"));
    }
    let lock = Lock { owner: lock.owner.of_node(cx.origin.node), ..lock };
    let (table, who) = (session.export.lease_table.as_ref(), session.lease_holder());
    if !table.zip(who).is_some_and(|(table, who)| table.locks.takes_back(who, file.id())) {
        return Err(Error::new(Errno::ENOLCK).because("more locks than a lease covers"));
    }
    session.note_lock((handle, file.id()), &lock, true)?;
    let cx = Context { reclaims: true, ..cx.clone() }; // its program has it already
    file.lock(&cx, lock, false).await
}
