//! Advisory locks.

use dray_core::{Context, Errno, Lock, LockFamily, LockKind, LockOwner, LockRange, Result};

use crate::front::{Worker, invalid};
use crate::options::Consistency;
use crate::proto::{LockArgs, reply};
use crate::transport::Answer;
use crate::worker::outdated::drop_now;

impl Worker {
    pub(crate) async fn test_lock(&self, cx: &Context, args: LockArgs) -> Result<Answer> {
        let lock = wanted(&args)?;
        let found = self.file(cx, args.fh).await?.test_lock(cx, lock).await?;
        Ok(Answer::Small(reply::lock(found.as_ref())))
    }

    pub(crate) async fn lock(
        &self,
        cx: &Context,
        node: u64,
        args: LockArgs,
        wait: bool,
    ) -> Result<Answer> {
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
        let note = || self.shared.lock_owners.add(&self.shared.nodes, node, lock.owner);
        if ends_with_close {
            note(); // before it is had: a close that comes meanwhile must release it
        }
        file.lock(cx, lock, wait).await?;
        if ends_with_close {
            note(); // a close that came meanwhile may have forgotten it
        }
        if lock.kind != LockKind::Unlock
            && self.shared.options.consistency == Consistency::CloseToOpen
        {
            // Whoever had it before may have changed what is cached here.
            drop_now(&self.shared, cx, node).await;
        }
        Ok(Answer::Empty)
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
    Ok(Lock { family, kind, range, owner: LockOwner(args.owner), pid: args.pid })
}
