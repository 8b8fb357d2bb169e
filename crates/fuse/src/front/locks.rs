//! Advisory locks.

use std::sync::Arc;
use std::time::Duration;

use dray_core::{
    Context, Errno, Lock, LockFamily, LockKind, LockOwner, LockRange, OpenFile, PageValidity,
    Result,
};
use dray_rt::sleep;

use crate::front::{Worker, invalid};
use crate::proto::{LockArgs, reply};
use crate::transport::KernelAnswer;
use crate::worker::caller::{Fcntl, LeadsTo, descriptor_of, fcntl_of};
use crate::worker::invalidator::drop_now;

/// Between two tries of a lock that waits in a circle, at first and in the end.
const PAUSE: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

impl Worker {
    pub(crate) async fn test_lock(&self, cx: &Context, args: LockArgs) -> Result<KernelAnswer> {
        let lock = wanted(&args)?;
        let found = self.file(cx, args.fh).await?.test_lock(cx, lock).await?;
        Ok(KernelAnswer::Small(reply::lock(found.as_ref())))
    }

    pub(crate) async fn lock(
        &self,
        cx: &Context,
        node: u64,
        args: LockArgs,
        wait: bool,
    ) -> Result<KernelAnswer> {
        let mut lock = wanted(&args)?;
        if lock.family == LockFamily::Flock {
            lock.owner = self.shared.handles.flock_owner(args.fh, args.owner);
        }
        let wait = wait && lock.kind != LockKind::Unlock;
        if wait {
            cx.check()?; // signalled before it arrived
        }
        let file = self.file(cx, args.fh).await?;
        let ends_with_close = lock.family == LockFamily::Posix && lock.kind != LockKind::Unlock;
        let owners = &self.shared.lock_owners;
        let note = || owners.add(&self.shared.nodes, node, lock.owner);
        let asking = ends_with_close.then(|| {
            note(); // before it is had: a close that comes meanwhile must release it
            owners.asks(node, lock.owner, self.shared.stale_retries.inherits())
        });
        self.obtain(cx, &file, lock, wait).await?;
        if let Some(asking) = asking {
            note(); // a close that came meanwhile may have forgotten it
            if asking.may_be_closed() && is_closed(cx, &file).await {
                // The kernel is about to find that, says EBADF, and takes the close that was to have
                // given back all locks (fcntl_setlk in fs/locks.c, fuse_setlk).
                let none = Lock { kind: LockKind::Unlock, range: LockRange::ALL, ..lock };
                file.lock(cx, none, false).await?;
            }
        }
        let said = || file.at_open().map(|seen| seen.attr.validity);
        if lock.kind != LockKind::Unlock
            && self.shared.mode.pages(said()) == PageValidity::UntilChanged
        {
            // The former holder may have changed what is cached here.
            drop_now(&self.shared, cx, node).await;
        }
        Ok(KernelAnswer::Empty)
    }

    /// Linux looks for no circles of locks of open file descriptions. The kernel does not tell us whose
    /// lock it is; the caller's system call does.
    async fn obtain(
        &self,
        cx: &Context,
        file: &Arc<dyn OpenFile>,
        lock: Lock,
        wait: bool,
    ) -> Result<()> {
        let mut pause = PAUSE;
        loop {
            match file.lock(cx, lock, wait).await {
                Err(error) if error.errno() == Errno::EDEADLK => {
                    let call = fcntl_of(cx.pid).await;
                    if call.is_none_or(|call| call.command != libc::F_OFD_SETLKW) {
                        return Err(error);
                    }
                }
                result => return result,
            }
            cx.check()?;
            sleep(pause).await;
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }
}

/// Whether the descriptor that the caller asks with for a lock has been closed since.
async fn is_closed(cx: &Context, file: &Arc<dyn OpenFile>) -> bool {
    let Some(Fcntl { descriptor, .. }) = fcntl_of(cx.pid).await else { return false };
    match descriptor_of(cx.pid, descriptor) {
        LeadsTo::Nothing => true,
        // Where it leads to this file once more, closing that gives the lock back.
        LeadsTo::Inode(ino) => file.getattr(cx).await.is_ok_and(|attr| attr.ino != ino),
        LeadsTo::Unseen => false,
    }
}

fn wanted(args: &LockArgs) -> Result<Lock> {
    let kind = match args.kind as i32 {
        libc::F_RDLCK => LockKind::Shared,
        libc::F_WRLCK => LockKind::Exclusive,
        libc::F_UNLCK => LockKind::Unlock,
        _ => return Err(invalid("a kind of lock that does not exist")),
    };
    if args.start > args.end {
        return Err(Errno::EINVAL.into());
    }
    let (family, range) = match args.flock {
        true => (LockFamily::Flock, LockRange::ALL),
        false => {
            // The kernel's "to the end" is the largest signed offset.
            let end = if args.end >= i64::MAX as u64 { u64::MAX } else { args.end };
            (LockFamily::Posix, LockRange { start: args.start, end })
        }
    };
    Ok(Lock { family, kind, range, owner: LockOwner::own(args.owner), pid: args.pid })
}
