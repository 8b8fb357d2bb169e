//! Advisory locks.

use std::sync::atomic::Ordering;
use std::time::Duration;

use dray_core::{Context, Errno, Lock, LockFamily, LockKind, LockOwner, LockRange, Pid, Result};
use dray_rt::{sleep, spawn};

use crate::front::{Worker, invalid};
use crate::proto::abi::init::OVER_IO_URING;
use crate::proto::{LockArgs, reply};
use crate::transport::Answer;
use crate::worker::flight::LookFor;
use crate::worker::identity::{is_ending, sleeps_deeply};

/// How often callers of waiting lock requests and closes are looked after.
const SEARCH_TIME: Duration = Duration::from_secs(1);

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
        let lock = wanted(&args)?;
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
        if wait {
            self.search_lost_interrupts();
        }
        file.lock(cx, lock, wait).await?;
        if ends_with_close {
            note(); // a close that came meanwhile may have forgotten it
        }
        Ok(Answer::Empty)
    }

    /// A signal that comes while a request waits for a ring entry is never told, not even
    /// when the request has arrived. The caller shows it all the same: it sleeps lightly
    /// before a signal and deeply after it.
    fn search_lost_interrupts(&self) {
        if self.shared.session.has(OVER_IO_URING) {
            self.look_after_callers();
        }
    }

    /// Looks after callers as long as lock requests wait, and closes for their locks. A process
    /// that ends closes its files: no signal reaches it any more, and if the server is away
    /// nobody could get rid of it.
    pub(crate) fn look_after_callers(&self) {
        let shared = self.shared.clone();
        if shared.searching.swap(true, Ordering::SeqCst) {
            return;
        }
        spawn(async move {
            loop {
                sleep(SEARCH_TIME).await;
                let waiting = shared.flights.looked_after();
                if waiting.is_empty() {
                    shared.searching.store(false, Ordering::SeqCst);
                    // One that began between the look and the store starts no search.
                    if shared.flights.looked_after().is_empty()
                        || shared.searching.swap(true, Ordering::SeqCst)
                    {
                        return;
                    }
                    continue;
                }
                for (unique, pid, what) in waiting {
                    let over = match what {
                        LookFor::Signal => sleeps_deeply(pid),
                        LookFor::End => is_ending(pid),
                    };
                    if pid != Pid(0) && over {
                        shared.flights.cancel(unique);
                    }
                }
            }
        });
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
