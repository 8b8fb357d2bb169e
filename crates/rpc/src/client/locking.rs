//! Taking locks and giving them back.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use dray_core::{
    Context, Errno, Error, Fate, Lock, LockFamily, LockKind, LockOwner, LockRange, Result,
};
use dray_rt::sleep;

use crate::client::channel::LockWait;
use crate::client::file::RemoteFile;
use crate::client::holdings::locks::HeldLock;
use crate::wire::Call;

/// How soon a lock is asked for again that cannot be waited for at the server; doubled each
/// time up to the last.
const LOOK_FIRST: Duration = Duration::from_millis(20);
const LOOK_LAST: Duration = Duration::from_millis(500);

impl RemoteFile {
    /// In no slot: taking a lock that one has, or giving back one that one has not, changes
    /// nothing, and a waiting lock must not hold up the unlock behind it.
    pub(super) async fn take_lock(&self, cx: &Context, lock: Lock, wait: bool) -> Result<()> {
        let (handle, link) = (self.handle, &self.session.link);
        self.within_limit(link.held.clear(cx, self.id)).await?;
        link.held.admit(&lock)?;
        // What is given back is not claimed again, whether or not the answer comes:
        // somebody else may have it by then.
        link.held.given_up(self.id, lock);
        let held = HeldLock { handle, id: self.id, how: self.how, lock };
        let mut look = LOOK_FIRST;
        loop {
            let place = if wait { self.place_to_wait()? } else { None };
            let call = Call::Lock { handle, lock, wait: place.is_some(), reclaim: false };
            let asked = self.send::<()>(cx, &call, None, (None, None)).await;
            // Granted, perhaps, to nobody; or still had by whoever wanted to be rid of it.
            let in_doubt = |error: &Error| match lock.kind {
                LockKind::Unlock => true,
                _ => error.fate() == Fate::Unknown,
            };
            if asked.as_ref().is_err_and(in_doubt) {
                link.undo_lock(&self.session, handle, (self.id, lock));
            }
            let had = asked.as_ref().is_err_and(|error| error.errno() == Errno::EAGAIN);
            if had && wait && place.is_none() {
                pause(cx, look).await?;
                look = (look * 2).min(LOOK_LAST);
                continue;
            }
            // On another connection the server's next life may have been met before the
            // answer of the last one was read here.
            if link.held.granted(held, asked?.1.standing) {
                return Ok(());
            }
        }
    }

    /// Gives up the fcntl locks of `owner`, who has closed a descriptor of the file. They are
    /// gone whatever the server has heard of that: where it fails, it is made up for later.
    pub(super) async fn give_up_locks(&self, cx: &Context, owner: LockOwner) -> Result<()> {
        let link = &self.session.link;
        let clear = self.within_limit(link.held.clear(cx, self.id)).await;
        link.held.flushed(self.id, owner);
        let call = Call::Flush { handle: self.handle, owner };
        let asked = match clear {
            Ok(()) => self.ask::<()>(cx, call).await,
            Err(error) => Err(error),
        };
        if asked.is_err() {
            let (family, kind) = (LockFamily::Posix, LockKind::Unlock);
            let lock = Lock { family, kind, range: LockRange::ALL, owner, pid: cx.pid };
            link.undo_lock(&self.session, self.handle, (self.id, lock));
        }
        asked
    }

    /// For a wait at the server; none: so many locks are waited for that the lock has to be
    /// asked for again and again. Those who wait there get it first.
    fn place_to_wait(&self) -> Result<Option<LockWait>> {
        Ok(self.session.channel()?.begin_lock_wait())
    }
}

/// Errors: `EINTR` when the caller gives up.
async fn pause(cx: &Context, time: Duration) -> Result<()> {
    let mut over = pin!(sleep(time));
    poll_fn(|task| match cx.poll_cancelled(task) {
        Poll::Ready(error) => Poll::Ready(Err(error)),
        Poll::Pending => over.as_mut().poll(task).map(Ok),
    })
    .await
}
