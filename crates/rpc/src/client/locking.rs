//! Locks through an open file: how they are taken, waited for and given back.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use dray_core::{
    Context, Errno, Error, Fate, Lock, LockFamily, LockKind, LockOwner, LockRange, NodeId, Result,
};
use dray_rt::sleep;

use crate::client::channel::LockWait;
use crate::client::file::RemoteFile;
use crate::client::holdings::lock_leases::{LockCallUnderWay, LockDecision};
use crate::client::holdings::locks::HeldLock;
use crate::wire::{Call, LockPurpose};

/// How soon a lock is asked for again that cannot be waited for at the server; doubled each
/// time up to the last.
const LOOK_FIRST: Duration = Duration::from_millis(20);
const LOOK_LAST: Duration = Duration::from_millis(500);

impl RemoteFile {
    /// In no slot: taking a held lock, or giving back a lock that is not held, changes nothing. A
    /// waiting lock must not hold up the unlock behind it.
    pub(super) async fn take_lock(&self, cx: &Context, lock: Lock, wait: bool) -> Result<()> {
        let (handle, link) = (self.handle, &self.session.link);
        let lock = Lock { owner: link.owner_of(cx, lock.owner), ..lock };
        let other = for_owner(cx, lock.owner);
        let cx = other.as_ref().unwrap_or(cx);
        self.within_limit(link.held.clear(cx, self.id)).await?;
        link.held.admit(&lock)?;
        let held = HeldLock { handle, id: self.id, how: self.how, lock };
        let Some(mut under_way) = self.decide_on_lock(cx, &held, wait).await? else {
            return Ok(());
        };
        // A lock that is released is not reclaimed, whether or not the answer comes: another client
        // may have it by then.
        link.held.given_up(self.id, lock);
        let mut look = LOOK_FIRST;
        loop {
            // Who asks for a lease keeps others of this mount from the locks of the file, and does not wait.
            let asks = under_way.asks();
            let place = if wait && !asks { self.place_to_wait()? } else { None };
            let purpose = if asks { LockPurpose::AskForLease } else { LockPurpose::Program };
            let call = Call::Lock { handle, lock, wait: place.is_some(), purpose };
            let asked = self.send::<()>(cx, &call, None, (None, None)).await;
            // A caller that is refused another kind of flock, or gives up waiting for it, has none
            // any more: the former one went first.
            let refused = |error: &Error| matches!(error.errno(), Errno::EAGAIN | Errno::EINTR);
            if lock.family == LockFamily::Flock && asked.as_ref().is_err_and(refused) {
                link.held.given_up(self.id, Lock { kind: LockKind::Unlock, ..lock });
            }
            // Granted, perhaps, to a caller that is gone; or still held, though it was given up.
            let in_doubt = |error: &Error| match lock.kind {
                LockKind::Unlock => true,
                _ => error.fate() == Fate::Unknown,
            };
            if asked.as_ref().is_err_and(in_doubt) {
                link.undo_lock(self.session.channel()?, handle, (self.id, lock));
            }
            let had = asked.as_ref().is_err_and(|error| error.errno() == Errno::EAGAIN);
            if had && wait && asks {
                under_way.asks_no_more();
                continue;
            }
            if had && wait && place.is_none() {
                pause(cx, look).await?;
                look = (look * 2).min(LOOK_LAST);
                continue;
            }
            // On another connection the server's next epoch may have been met before the
            // answer of the last one was read here.
            let made = asked?.1;
            if link.held.granted(held, made.session_state) {
                if made.write_lease.is_some() {
                    under_way.leased();
                }
                return Ok(());
            }
        }
    }

    /// Takes a lock under a lease. Where the server has to be asked, it has the lease back, and the call for that is
    /// answered. Errors: those of a lock.
    async fn decide_on_lock(
        &self,
        cx: &Context,
        held: &HeldLock,
        wait: bool,
    ) -> Result<Option<LockCallUnderWay>> {
        let link = &self.session.link;
        loop {
            self.within_limit(link.held.check(cx, self.handle)).await?;
            let how = (wait, link.leases.are_believed());
            match self.within_limit(link.held.decide(cx, held, how)).await? {
                LockDecision::GiveBack => {
                    link.give_back_lock_lease(self.session.channel()?, self.id);
                }
                LockDecision::Decided(outcome) => return outcome.map(|()| None),
                LockDecision::AsksServer(call) => return Ok(Some(call)),
            }
        }
    }

    /// The first lock that stands in the way of one.
    pub(super) async fn look_for_lock(&self, cx: &Context, lock: Lock) -> Result<Option<Lock>> {
        let link = &self.session.link;
        let lock_of_owner = Lock { owner: link.owner_of(cx, lock.owner), ..lock };
        let held =
            HeldLock { handle: self.handle, id: self.id, how: self.how, lock: lock_of_owner };
        self.within_limit(link.held.check(cx, self.handle)).await?;
        if link.held.is_free(&held, link.leases.are_believed()).is_some() {
            return Ok(None);
        }
        // What is decided here is not known there.
        link.give_back_lock_lease(self.session.channel()?, self.id);
        self.within_limit(link.held.lock_lease_back(cx, self.id)).await?;
        self.ask(cx, Call::TestLock { handle: self.handle, lock }).await
    }

    /// Releases the fcntl locks of `owner`, which has closed a descriptor of the file. They count
    /// as released at once: a failed call is repeated later.
    pub(super) async fn give_up_locks(&self, cx: &Context, owner: LockOwner) -> Result<()> {
        let link = &self.session.link;
        let owner = link.owner_of(cx, owner);
        let other = for_owner(cx, owner);
        let cx = other.as_ref().unwrap_or(cx);
        let clear = self.within_limit(link.held.clear(cx, self.id)).await;
        let decision = link.held.decide_on_close(cx, (self.id, owner));
        let clear = match (clear, self.within_limit(decision).await) {
            (Ok(()), Ok(None)) => return Ok(()),
            (Ok(()), Ok(Some(call))) => Ok(call),
            (Err(error), _) | (_, Err(error)) => Err(error),
        };
        link.held.flushed(self.id, owner);
        let call = Call::Flush { handle: self.handle, owner };
        let asked = match clear {
            Ok(_under_way) => self.ask::<()>(cx, call).await,
            Err(error) => Err(error),
        };
        if asked.is_err() {
            let (family, kind) = (LockFamily::Posix, LockKind::Unlock);
            let lock = Lock { family, kind, range: LockRange::ALL, owner, pid: cx.pid };
            link.undo_lock(self.session.channel()?, self.handle, (self.id, lock));
        }
        asked
    }

    /// For a wait at the server; none: so many locks are waited for that the lock has to be asked
    /// for again and again. The calls that wait there get the lock first.
    fn place_to_wait(&self) -> Result<Option<LockWait>> {
        Ok(self.session.channel()?.begin_lock_wait())
    }
}

/// The context of a call about locks of `owner`, if the owner is on another node than the caller. A
/// server that gives back what its client had does so for the nodes behind that client.
fn for_owner(cx: &Context, owner: LockOwner) -> Option<Context> {
    let elsewhere = owner.node != NodeId::OWN && owner.node != cx.origin.node;
    elsewhere.then(|| cx.clone().on_behalf_of(owner.node))
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

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use dray_core::{Cancel, FileId, Op, OpenHow, Pid};
    use dray_rt::{DriverKind, Executor, spawn_join, yield_now};

    use super::*;
    use crate::client::channel::ConnectionEpoch;
    use crate::client::channel::stalled_peer::StalledPeer;
    use crate::client::session::tests::session;

    /// The lock was undone on the connection of the thread that had made the first one. The server,
    /// where each has a thread of its own, could come to that before it came to the lock.
    // proves: P61
    #[test]
    fn what_is_given_up_on_one_connection_is_not_undone_on_another() {
        let simulation = || Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
        simulation().block_on(async {
            let (session, epoch) = (session(), ConnectionEpoch::default());
            let wires = [(); 3].map(|()| Arc::new(StalledPeer::default()));
            let [here, there, after] = &wires;
            let channel = session.link.new_channel();
            channel.up(here.clone(), (0, epoch), (8, 8), true);
            session.adopt(channel);
            let (give, take) = mpsc::channel();
            let (of_thread, wire) = (session.clone(), there.clone());
            let thread = std::thread::spawn(move || {
                simulation().block_on(async {
                    let channel = of_thread.link.new_channel();
                    channel.up(wire, (0, epoch), (8, 8), true);
                    of_thread.adopt(channel.clone());
                    let (id, how) = (FileId { ino: 1, generation: 1 }, OpenHow::READ_WRITE);
                    let file = RemoteFile::new(of_thread, id, 5, how, (None, None));
                    let cancel = Arc::new(Cancel::default());
                    let cx = Context { cancel: Some(cancel.clone()), ..Context::system() };
                    let (family, kind) = (LockFamily::Posix, LockKind::Exclusive);
                    let range = LockRange::ALL;
                    let lock = Lock { family, kind, range, owner: LockOwner::own(1), pid: Pid(1) };
                    let asking =
                        spawn_join(async move { file.take_lock(&cx, lock, false).await.is_err() });
                    yield_now().await;
                    cancel.set();
                    assert!(asking.await.unwrap());
                    give.send(channel).unwrap();
                });
            });
            let channel = take.recv().unwrap();
            thread.join().unwrap();
            sleep(Duration::from_secs(1)).await;
            assert_eq!(wires.each_ref().map(|wire| wire.sent().len()), [0, 1, 0]);
            // Another connection takes the place of that one: what came by it is over.
            channel.up(after.clone(), (0, epoch), (8, 8), true);
            sleep(Duration::from_secs(1)).await;
            assert_eq!((here.sent(), after.sent()), (vec![], vec![Op::Lock]));
        });
    }
}
