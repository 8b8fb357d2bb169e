//! Reestablishes locks, open files and pending answers at a server that has lost its state.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Poll;

use dray_core::{Context, Errno, OpenHow, Result};
use dray_rt::sleep;

use super::connecting::BACKOFF_LAST;
use super::{Link, OWN_NUMBER};
use crate::client::channel::{Channel, OutgoingCall, value_of};
use crate::client::holdings::locks::HeldLock;
use crate::client::holdings::tickets::{ReopenRequest, reopen};
use crate::wire::{Call, LockPurpose, NotifyHead};

/// Files that are opened again at once.
const REOPENED_AT_ONCE: usize = 16;
/// Reestablishments under way at most. A reestablishment ends when another epoch of the server has
/// been met, but not before its calls are answered. So no close overtakes an opening. With a server
/// that never answers there would be any number of them.
const REESTABLISH_MAX: u32 = 4;

/// The state that is to be reestablished at a server that lost its own.
pub(super) struct Reestablish {
    /// The channel for it.
    pub(super) channel: Arc<Channel>,
    /// Locks to reclaim.
    pub(super) locks: Vec<HeldLock>,
    pub(super) instance: u64,
}

#[derive(Default)]
pub(super) struct ReestablishQueue {
    under_way: u32,
    /// Begins when one of them ends, if it is not too late by then.
    next: Option<Reestablish>,
}

impl Link {
    fn reestablishing(&self) -> MutexGuard<'_, ReestablishQueue> {
        self.reestablishing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to reestablish at a server that has just been met, once there is room for it.
    pub(super) fn begin_reestablish(self: &Arc<Link>, back: Reestablish) {
        let known = self.server(); // while it is held no other epoch is met
        let newest = known.instance == back.instance;
        let mut reestablishing = self.reestablishing();
        drop(known);
        let too_late = if !newest {
            Some(back)
        } else if reestablishing.under_way < REESTABLISH_MAX {
            reestablishing.under_way += 1;
            return dray_rt::spawn(self.clone().reestablish_queued(back));
        } else {
            reestablishing.next.replace(back)
        };
        drop(reestablishing);
        too_late.into_iter().for_each(|_| self.held.settled());
    }

    async fn reestablish_queued(self: Arc<Link>, first: Reestablish) {
        let mut next = Some(first);
        while let Some(back) = next {
            self.reestablish(back).await;
            next = self.next_reestablish();
        }
    }

    fn next_reestablish(&self) -> Option<Reestablish> {
        let mut reestablishing = self.reestablishing();
        let next = reestablishing.next.take();
        reestablishing.under_way -= u32::from(next.is_none());
        next
    }

    /// Reestablishes the locks, open files and answers of the server before at a server that lost
    /// its state.
    async fn reestablish(self: &Arc<Link>, back: Reestablish) {
        let Reestablish { channel, locks, instance } = back;
        let answered = self.slots.await_answers(&channel);
        let done = self.reclaim(&channel, locks, instance).await;
        self.held.settled();
        if done && self.server().instance == instance {
            self.reclaimed.store(instance, Ordering::SeqCst);
            self.memory.set_reclaimed(instance); // first: the server takes no reclaim after it
            channel.notify(NotifyHead::RECLAIM_COMPLETE, 0);
        }
        // Before any answer is waited for: the server answers nothing else before that.
        let link = self.clone();
        let settled = dray_rt::spawn_join(async move { link.kept.settle_each().await });
        self.within_epoch(instance, async { _ = settled.await }).await;
        if self.server().instance == instance {
            self.written_back.store(instance, Ordering::SeqCst);
            channel.notify(NotifyHead::WRITTEN_BACK, 0);
        }
        self.within_epoch(instance, self.files.completed()).await;
        let mut before = self.files.handles();
        self.open_all(&channel, before.clone(), instance).await;
        self.within_epoch(instance, answered).await;
        // Some answers were those of the server before, and named files that it had opened.
        before.sort_unstable();
        let mut since = self.files.handles();
        since.retain(|handle| before.binary_search(handle).is_err());
        self.open_all(&channel, since, instance).await;
        if self.server().instance == instance {
            self.returned.store(instance, Ordering::SeqCst);
            self.memory.set_reestablished(instance);
            channel.notify(NotifyHead::RECOVERY_COMPLETE, 0);
        }
    }

    /// Waits for `what`, but not longer than this epoch of the server is known to last.
    async fn within_epoch(&self, instance: u64, what: impl Future<Output = ()>) {
        let mut what = pin!(what);
        while self.server().instance == instance {
            let mut met = pin!(self.reached.notified());
            met.as_mut().enable(); // from before the second look on
            let done = poll_fn(|task| {
                if self.server().instance != instance || what.as_mut().poll(task).is_ready() {
                    return Poll::Ready(true);
                }
                met.as_mut().poll(task).map(|()| false)
            });
            if done.await {
                return;
            }
        }
    }

    /// The channel on which to reestablish at a server that `met` has found. The channel of a
    /// replay ends with the replay, and then its calls fail: that must not cost a lock.
    pub(super) fn lasting(&self, met: &Arc<Channel>) -> Arc<Channel> {
        let first = self.first.get().filter(|_| met.is_for_replay()).and_then(Weak::upgrade);
        first.unwrap_or_else(|| met.clone())
    }

    /// Repeats what a server was notified of before, perhaps on a connection that broke.
    pub(super) fn repeat_notices(&self, channel: &Channel, instance: u64) {
        let notices = [
            (&self.reclaimed, NotifyHead::RECLAIM_COMPLETE),
            (&self.written_back, NotifyHead::WRITTEN_BACK),
            (&self.returned, NotifyHead::RECOVERY_COMPLETE),
        ];
        for (of, what) in notices {
            if of.load(Ordering::SeqCst) == instance {
                channel.notify(what, 0);
            }
        }
        if self.released.load(Ordering::SeqCst) {
            channel.notify_released((OWN_NUMBER, self.first_handle));
        }
    }

    /// Reclaims locks one after the other. False if that server, too, has gone meanwhile.
    async fn reclaim(&self, channel: &Channel, locks: Vec<HeldLock>, instance: u64) -> bool {
        // Where that server dies too, the reestablishment begins anew. The next server must not be
        // notified that all locks are reclaimed when only the rest has been.
        for held in locks {
            if !self.reclaim_one(channel, &held, instance).await {
                return false;
            }
        }
        true
    }

    async fn reclaim_one(&self, channel: &Channel, held: &HeldLock, instance: u64) -> bool {
        let HeldLock { handle, id, how, lock } = *held;
        let cx = Context::system().on_behalf_of(lock.owner.node);
        let how = OpenHow::new(how.flags & !libc::O_TRUNC);
        let ticket = self.files.ticket(handle);
        for step in 0..2 {
            if self.server().instance != instance {
                return false;
            }
            if !self.held.holds(held) {
                break; // closed or given back meanwhile
            }
            let outcome = loop {
                let outcome = match step {
                    0 => reopen(channel, &cx, ReopenRequest { id, how, handle, ticket })
                        .await
                        .map(|ticket| self.files.renew(handle, ticket)),
                    _ => {
                        let call =
                            Call::Lock { handle, lock, wait: false, purpose: LockPurpose::Reclaim };
                        value_of(channel.call(&mut OutgoingCall::of(&cx, &call), |_| Ok(())).await)
                    }
                };
                if self.server().instance != instance {
                    return false; // whatever the answer says, it is not that server's
                }
                if !self.is_late(&outcome) {
                    break outcome;
                }
                sleep(BACKOFF_LAST).await;
            };
            if let Err(error) = outcome {
                log::error!("{}: lost a lock on file {id}: {error}", self.addresses.target());
                self.held.lost(held);
                break;
            }
        }
        true
    }

    /// Whether the question has to be asked again, because no answer has come in time. The mount's
    /// limit is for callers that wait for what they had. It does not decide what becomes of that.
    fn is_late<T>(&self, outcome: &Result<T>) -> bool {
        let late = outcome.as_ref().is_err_and(|error| error.errno() == Errno::EHOSTDOWN);
        late && self.is_wanted()
    }

    /// Opens these again, some at once.
    async fn open_all(self: &Arc<Link>, channel: &Arc<Channel>, handles: Vec<u64>, instance: u64) {
        let left = Arc::new(Mutex::new(handles));
        let open = |_| {
            let (link, channel, left) = (self.clone(), channel.clone(), left.clone());
            dray_rt::spawn_join(async move {
                loop {
                    let next = left.lock().unwrap_or_else(PoisonError::into_inner).pop();
                    let Some(handle) = next.filter(|_| link.server().instance == instance) else {
                        return;
                    };
                    link.open_again(&channel, handle, instance).await;
                }
            })
        };
        for task in (0..REOPENED_AT_ONCE).map(open).collect::<Vec<_>>() {
            let _ = task.await; // ended with the executor: the files are not needed
        }
    }

    async fn open_again(&self, channel: &Channel, handle: u64, instance: u64) {
        let Some(file) = self.files.open_again(handle) else { return };
        let (cx, id, how) = (Context::system(), file.id, file.how);
        let ticket = self.files.ticket(handle);
        let outcome = loop {
            let outcome = reopen(channel, &cx, ReopenRequest { id, how, handle, ticket }).await;
            if self.server().instance != instance || !self.is_late(&outcome) {
                break outcome;
            }
            sleep(BACKOFF_LAST).await;
        };
        match outcome {
            Ok(ticket) => self.files.renew(handle, ticket),
            // A call that uses the file gets the error.
            Err(error) => {
                log::error!("{}: cannot open file {id} again: {error}", self.addresses.target());
            }
        }
    }
}
