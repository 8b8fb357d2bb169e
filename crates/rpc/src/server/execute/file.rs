//! Carries out a call on an open file.

use std::sync::atomic::Ordering;

use dray_core::{
    Buf, Context, DirPage, Errno, Error, Lock, LockKind, LockRange, Op, OpenFile, Pid, Result,
    Write,
};

use dray_fabric::Charge;

use crate::server::execute::{absent_xattrs, lock_leases};
use crate::server::leases::{LeaseGrants, SaidAbove};
use crate::server::ranges::Span;
use crate::server::reply::Reply;
use crate::server::sabotage::Sabotage;
use crate::server::service::Inner;
use crate::server::session::ServerSession;
use crate::wire::{
    AbsentXattrs, Change, LockPurpose, Malformed, PAGE_MAX_BYTES, Stamp, get_extents, put_page,
};

pub(super) async fn read(
    server: &Inner,
    session: &ServerSession,
    cx: &Context,
    (handle, at, len_bytes): (u64, u64, u32),
) -> Result<Buf> {
    let file = || session.file(handle).ok_or_else(|| Error::new(Errno::EBADF));
    let len_bytes = (len_bytes as usize).min(dray_core::IO_MAX_BYTES);
    let span = Span::bytes(at, len_bytes as u64);
    let ranges = &session.export.ranges;
    if ranges.has_cut() {
        // as good as never
        ranges.whole(file()?.id(), span).await;
    }
    let mut into = session.buffers.wait(len_bytes).await;
    if server.options.broken().is(Sabotage::ReadBuffers) && at == 0 {
        std::mem::forget(session.buffers.wait(1).await);
    }
    drop(into.split_off(len_bytes));
    // Not before the waits: it may have been closed meanwhile.
    let file = file()?;
    let unordered = server.options.broken().is(Sabotage::RangeLocks);
    let reading = if unordered { None } else { Some(ranges.read(file.id(), span).await) };
    let read = file.read(cx, at, into).await.map_err(|(error, _)| error)?;
    drop(reading);
    session.read_bytes.fetch_add(read.len() as u64, Ordering::Relaxed);
    Ok(read.freeze())
}

pub(super) async fn write(
    server: &Inner,
    session: &ServerSession,
    cx: &Context,
    file: &dyn OpenFile,
    (how, data): (Write, Buf),
) -> Result<Reply> {
    if server.options.broken().drops_change(Op::Write) {
        return Ok(Reply::success(data.len() as u32));
    }
    let written = file.write(cx, how, data).await?;
    session.written_bytes.fetch_add(written as u64, Ordering::Relaxed);
    Ok(Reply::success(written as u32))
}

/// Writes all pieces, or none behind the first that fails.
pub(super) async fn write_back(
    session: &ServerSession,
    cx: &Context,
    file: &dyn OpenFile,
    (kill_set_id, extents, data): (bool, &[u8], Buf),
) -> Result<Reply> {
    let extents = get_extents(extents, data.len())
        .map_err(|Malformed(what)| Error::new(Errno::EPROTO).because(what))?;
    let mut begin = 0;
    for (mut at, len_bytes) in extents {
        let end = begin + len_bytes as usize;
        while begin < end {
            let how = Write { kill_set_id, ..Write::at(at) };
            let written = file.write(cx, how, data.slice(begin..end)).await?;
            if written == 0 {
                return Err(Error::new(Errno::EIO).because("nothing of a write was written"));
            }
            session.written_bytes.fetch_add(written as u64, Ordering::Relaxed);
            (begin, at) = (begin + written, at + written as u64);
        }
    }
    Ok(Reply::success(file.getattr(cx).await?))
}

pub(super) async fn readdir(
    session: &ServerSession,
    cx: &Context,
    handle: u64,
    (cookie, max_bytes, plus, absences): (u64, u32, bool, bool),
) -> Result<Reply> {
    // The page must fit its frame with every record's fixed part.
    let max_bytes = (max_bytes as usize).min(PAGE_MAX_BYTES / 2);
    let charge = session.buffers.charge(PAGE_COPIES * max_bytes.max(PAGE_MIN_BYTES)).await;
    // Looked for behind the wait: it may have been closed meanwhile.
    let file = session.file(handle).ok_or_else(|| Error::new(Errno::EBADF))?;
    let holder = session.lease_holder().filter(|_| plus && !session.export.recovery.running());
    let leases = session.export.lease_table.as_ref().zip(holder);
    let since = leases.map(|(table, holder)| table.since(holder));
    let keeps = session.export.lease_table.as_ref().filter(|table| plus && table.leases_writes());
    let shown = keeps.map(|table| (table, table.shows()));
    let mut entries = file.readdir(cx, cookie, max_bytes, plus).await?;
    if let Some((table, shown)) = shown {
        table.hide_written(session.lease_holder(), shown, &mut entries);
    }
    let mut absent = Vec::new();
    if let Some(((table, holder), since)) = leases.zip(since) {
        if absences {
            // In a box, so that other calls are no larger.
            let looked = absent_xattrs::of_page(&*session.export.fs, cx, &entries);
            absent = Box::pin(looked).await;
        }
        // Behind that: the lease on its attributes covers what is said of a file.
        LeaseGrants::new(table, holder, since, None).page(file.id(), &mut entries);
    } else if session.export.upper_leases.is_some() {
        SaidAbove::drop_of_page(&mut entries);
    }
    page((&entries, &absent), max_bytes, charge)
}

/// The memory that a page takes while it is made: its entries, as many bytes as a message, and room
/// to grow.
const PAGE_COPIES: usize = 3;
/// The least that a page is counted for until it is there: a long name may be all of it.
const PAGE_MIN_BYTES: usize = 4096;

fn page(
    (page, absent): (&DirPage, &[AbsentXattrs]),
    max_bytes: usize,
    mut charge: Charge,
) -> Result<Reply> {
    let mut bytes = Vec::with_capacity(max_bytes);
    put_page(page, absent, PAGE_MAX_BYTES, &mut bytes);
    if bytes.len() > PAGE_MAX_BYTES {
        return Err(Error::new(Errno::EIO).because("a directory page larger than asked for"));
    }
    bytes.shrink_to_fit();
    charge.resize(bytes.len()); // less, mostly; else it counts for what it was made in
    Ok(Reply::with_data(charge.over(bytes)))
}

/// Syncs a file. Its stamp says what is on media: everything that was over before.
pub(super) async fn sync(
    server: &Inner,
    session: &ServerSession,
    cx: &Context,
    (handle, data_only): (u64, bool),
) -> Result<Reply> {
    let file = session.file(handle).ok_or_else(|| Error::new(Errno::EBADF))?;
    let settled = session.export.ranges.settled_in(file.id()).await;
    let upto = session.export.replayed.awaited().bound_in(file.id(), settled);
    if !server.options.broken().drops_change(Op::Sync) {
        file.sync(cx, data_only).await?;
    }
    let ticket = session.export.tickets.on_media(Some(file.id()), upto);
    let mut reply = Reply::success(()).with_ticket(Some(ticket));
    if session.stamps() {
        reply.stamp(Stamp { number: upto, at: Stamp::NOWHERE });
    }
    Ok(reply)
}

pub(super) async fn redo(
    server: &Inner,
    session: &ServerSession,
    cx: &Context,
    file: &dyn OpenFile,
    (stamp, change, data): (u64, Change, Buf),
) -> Result<Reply> {
    let _active = session.export.recovery.enter(session.id)?;
    let broken = server.options.broken();
    if broken.is(Sabotage::Replay) {
        return Ok(Reply::success(()));
    }
    let in_order = !broken.is(Sabotage::ReplayOrder);
    let stamp = if in_order { stamp } else { session.export.ranges.stamps.next() };
    let export = &session.export;
    let bytes = data.len() as u64;
    let change = (stamp, change, data);
    export.replayed.redo(cx, session.id, &export.ranges, file, change).await?;
    session.changed(stamp);
    session.export.recovery.tally.redone(bytes);
    Ok(Reply::success(()))
}

pub(super) async fn note_and_lock(
    server: &Inner,
    session: &ServerSession,
    cx: &Context,
    handle: u64,
    (lock, wait, purpose): (Lock, bool, LockPurpose),
) -> Result<Reply> {
    let reclaim = purpose == LockPurpose::Reclaim;
    let file = session.file(handle).ok_or_else(|| Error::new(Errno::EBADF))?;
    if lock.range.start > lock.range.end {
        return Err(Error::new(Errno::EINVAL).because("a lock that ends before it begins"));
    }
    let lock = Lock { owner: lock.owner.of_node(cx.origin.node), ..lock };
    let leased = lock_leases::begin(session, cx, (&*file, &lock), wait).await?;
    // Before: a session that ends meanwhile has to know.
    if lock.kind != LockKind::Unlock {
        session.note_lock((handle, file.id()), &lock, reclaim)?;
    }
    let cx = &Context { reclaims: reclaim, ..cx.clone() };
    let mut reply = lock_file(server, session, cx, &*file, (lock, wait, reclaim)).await?;
    if lock.kind == LockKind::Unlock {
        return Ok(reply);
    }
    if let Some(call) = leased.as_ref().filter(|_| purpose == LockPurpose::AskForLease) {
        lock_leases::give(session, cx, (call, handle), (&*file, lock), &mut reply).await;
    }
    session.note_lock((handle, file.id()), &lock, reclaim)?; // a close may have come in between
    // A successor that does not have the note would give the lock to another client.
    let is_noted = session.lock_note_settled().await;
    if !is_noted || session.is_ended() {
        // The session's files may have been closed before: nobody else would give the lock back.
        file.lock(cx, Lock { kind: LockKind::Unlock, ..lock }, false).await?;
        return Err(cx.cancelled());
    }
    Ok(reply)
}

async fn lock_file(
    server: &Inner,
    session: &ServerSession,
    cx: &Context,
    file: &dyn OpenFile,
    (lock, wait, reclaim): (Lock, bool, bool),
) -> Result<Reply> {
    let takes = lock.kind != LockKind::Unlock;
    if takes && server.options.broken().is(Sabotage::Locks) {
        return Ok(Reply::success(()));
    }
    if takes && !reclaim {
        // A client may still reclaim a lock from the last server epoch.
        session.export.grace.wait(cx).await?;
    } else if reclaim && !session.export.grace.allows(session.id) {
        let error = Error::new(Errno::ENOLCK);
        return Err(
            error.because("too late to reclaim a lock: another client may have held it since")
        );
    }
    if reclaim && server.options.broken().is(Sabotage::Reclaim) {
        return Ok(Reply::success(()));
    }
    if wait && let Some(cancel) = &cx.cancel {
        session.wait_begins(cx.origin, cancel.clone());
    }
    let result = file.lock(cx, lock, wait).await;
    session.wait_ends(cx.origin);
    if let Err(error) = &result
        && error.errno() == Errno::ENOLCK
    {
        session.export.refused_locks.of(session, error);
    }
    Ok(Reply::success(result?))
}

/// A lock is known to be free only when no client can reclaim locks of the last server epoch any
/// more.
pub(super) async fn test_lock(
    session: &ServerSession,
    cx: &Context,
    file: &dyn OpenFile,
    lock: Lock,
) -> Result<Option<Lock>> {
    let lock = Lock { owner: lock.owner.of_node(cx.origin.node), ..lock };
    let any = Lock { kind: LockKind::Exclusive, range: LockRange::ALL, ..lock };
    let _call = match lock_leases::begin(session, cx, (file, &any), false).await {
        // Who does not answer may have any lock.
        Err(error) if error.errno() == Errno::EAGAIN => {
            return Ok(Some(Lock { pid: Pid(0), ..any }));
        }
        begun => begun?,
    };
    let found = file.test_lock(cx, lock).await?;
    if found.is_some() {
        return Ok(found);
    }
    session.export.grace.wait(cx).await?;
    file.test_lock(cx, lock).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::{Pin, pin};
    use std::sync::Arc;

    use dray_backends::memory::{MemoryFs, MemoryOptions};
    use dray_core::{
        Cancel, CreateHow, FileSystem, LockFamily, LockOwner, LockRange, Name, NodeId, OpenHow,
        Pid, RequestId,
    };
    use dray_fabric::Peer;

    use crate::server::export::Export;
    use crate::server::journal::MemoryJournal;
    use crate::server::options::ServerOptions;
    use crate::server::service::Server;
    use crate::wire::Ticket;

    const HANDLE: u64 = 5;
    const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o644, exclusive: false };

    fn of(owner: u64) -> Lock {
        Lock {
            family: LockFamily::Posix,
            kind: LockKind::Exclusive,
            range: LockRange::ALL,
            owner: LockOwner::own(owner),
            pid: Pid(1),
        }
    }

    /// A server, and what is below it.
    struct Served {
        server: Server,
        fs: MemoryFs,
    }

    impl Served {
        fn new() -> Served {
            let fs = MemoryFs::new(MemoryOptions::default());
            let export = Export::new("data", Arc::new(fs.clone()), Vec::new());
            let journal = Arc::new(MemoryJournal::default());
            Served { server: Server::new(ServerOptions::default(), vec![export], journal), fs }
        }

        /// A session of one and the same client, which has the same file open.
        async fn session(&self) -> Arc<ServerSession> {
            let (cx, name) = (Context::system(), Name::new(b"f").unwrap());
            let (_, file) = self.fs.create(&cx, self.fs.info().root, name, NEW).await.unwrap();
            let export = self.server.inner.exports.get("data").unwrap();
            let client = (NodeId(1), ("host", Peer::Local));
            let session = self.server.inner.new_session(client.0, client.1, export).await.unwrap();
            let place = session.place_for_file(false).unwrap();
            assert!(session.keep_file(HANDLE, file, (Ticket::READ, place)).is_ok());
            session
        }

        async fn lock(&self, session: &ServerSession, owner: u64) -> Result<Reply> {
            let (who, request) = (dray_core::Identity::system(), RequestId(owner));
            let cx = Context {
                cancel: Some(Arc::new(Cancel::default())),
                holder: session.holder(),
                ..Context::new(session.node, request, who, Pid(1))
            };
            note_and_lock(
                &self.server.inner,
                session,
                &cx,
                HANDLE,
                (of(owner), true, LockPurpose::Program),
            )
            .await
        }
    }

    fn simulated(test: impl Future<Output = ()>) {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(test);
    }

    fn is_pending(waiting: Pin<&mut impl Future>) -> bool {
        waiting.poll(&mut std::task::Context::from_waker(std::task::Waker::noop())).is_pending()
    }

    /// Two processes of one mount, which is evicted. A lock that the first gives back is given to
    /// the second, after the second's file has been closed. The second had it for ever.
    // proves: P75
    #[test]
    fn a_lock_that_is_given_at_the_end_of_a_session_ends_with_it() {
        simulated(async {
            let served = Served::new();
            let session = served.session().await;
            served.lock(&session, 2).await.unwrap();
            let mut waiting = pin!(served.lock(&session, 1));
            assert!(is_pending(waiting.as_mut()));
            session.cut_off();
            session.end().await;
            assert!(waiting.await.is_err());
            assert!(served.fs.locks().is_empty());
        });
    }

    /// A client that was away for too long comes back while its locks are being given back. It had
    /// them again at once, and then lost them without notice.
    #[test]
    fn what_a_session_gives_back_is_not_what_the_next_one_of_its_client_has() {
        simulated(async {
            let served = Served::new();
            let (last, next) = (served.session().await, served.session().await);
            served.lock(&last, 2).await.unwrap();
            let mut waiting = pin!(served.lock(&next, 2));
            assert!(is_pending(waiting.as_mut()));
            last.cut_off();
            last.end().await;
            waiting.await.unwrap();
            assert_eq!(served.fs.locks().len(), 1);
        });
    }
}
