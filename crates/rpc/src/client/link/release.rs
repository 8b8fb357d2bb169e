//! The release of open files and locks at the server when their user is gone. These are open files,
//! and locks that a caller asked for and did not wait for.

use std::sync::Arc;

use dray_core::{Context, Errno, Error, FileId, Lock};
use dray_rt::sleep;

use super::Link;
use super::connecting::BACKOFF_LAST;
use crate::client::channel::{Channel, OutgoingCall, value_of};
use crate::client::open_ahead::{LOOK_TIME, Surplus};
use crate::client::session::ClientSession;
use crate::wire::{Call, Input, LockPurpose};

impl Link {
    /// A caller abandoned a lock or unlock call on `channel`; the server may have received the call
    /// or not. As soon as the server is reachable, a call sets the owner's lock to the state that
    /// is known here. That goes out on the same channel, after the caller's call is over: on
    /// another channel an unlock could overtake the lock.
    pub(crate) fn undo_lock(
        self: &Arc<Link>,
        channel: Arc<Channel>,
        handle: u64,
        (id, lock): (FileId, Lock),
    ) {
        self.held.undo(handle, id);
        let link = self.clone();
        self.home.spawn(async move {
            loop {
                channel.locks_settled(handle).await;
                match link.hold_only_known(&channel, handle, (id, lock)).await {
                    Err(error) if error.errno() == Errno::EHOSTDOWN => sleep(BACKOFF_LAST).await,
                    _ => break, // also where the server lost everything
                }
            }
            link.held.undone(handle, id);
        });
    }

    async fn hold_only_known(
        &self,
        channel: &Channel,
        handle: u64,
        (id, lock): (FileId, Lock),
    ) -> Result<(), Error> {
        let cx = Context::system().on_behalf_of(lock.owner.node);
        // A reclaim at a new server that is under way comes first.
        let _ = self.held.check(&cx, handle).await;
        // So does a lease that is given back: it says locks that were held when that began.
        let _ = self.held.lock_lease_back(&cx, id).await;
        for lock in self.held.known(id, lock) {
            let call = Call::Lock { handle, lock, wait: false, purpose: LockPurpose::Program };
            let mut ask = OutgoingCall { patient: true, ..OutgoingCall::of(&cx, &call) };
            value_of::<()>(channel.call(&mut ask, |bytes| Input::whole(bytes)).await)?;
        }
        Ok(())
    }

    /// Closes what lookups of a process before this one opened and no caller used.
    pub(crate) fn close_inherited(self: &Arc<Link>, channel: &Arc<Channel>) {
        self.give_back_inherited_lock_leases(channel);
        for surplus in self.open_ahead.inherited() {
            // The process before us died between taking and forgetting it.
            let used = self.files.aliases.has_inherited(surplus.handle);
            if used || channel.close_noted(surplus.handle) {
                self.open_ahead.forget(surplus);
            }
        }
    }

    /// Closes a file that a lookup opened and no caller wants.
    pub(crate) fn close_surplus(self: &Arc<Link>, session: &Arc<ClientSession>, surplus: Surplus) {
        self.close_later(session, surplus.handle);
        self.open_ahead.forget(surplus);
    }

    /// Closes such files when they can no longer be used, as long as there are any.
    pub(crate) fn watch_ahead(&self, session: &Arc<ClientSession>) {
        let session = Arc::downgrade(session);
        self.home.spawn(async move {
            loop {
                sleep(LOOK_TIME).await;
                let Some(session) = session.upgrade() else { return };
                let Some(late) = session.link.open_ahead.give_up_late() else { return };
                late.into_iter().for_each(|one| session.link.close_surplus(&session, one));
            }
        });
    }

    /// Closes a file that has no user any more, as soon as the server can be asked.
    pub(crate) fn close_later(&self, session: &Arc<ClientSession>, handle: u64) {
        let Ok(channel) = session.channel() else { return };
        if !self.held.concerns(handle) && self.files.forget(handle) {
            if !channel.close(handle) {
                channel.close_later(handle);
            }
            return;
        }
        let link = session.link.clone();
        self.home.spawn(async move {
            let _ = link.let_lock_lease_go(channel.clone(), handle).await; // nobody gives up
            link.prepare_close(handle).await;
            channel.close_later(handle);
        });
    }

    /// Waits until a file that has to do with locks can be closed. A reopening of the file for its
    /// locks comes first. So does a release of locks through the file. A lock that could not be
    /// reclaimed is ignored.
    pub(crate) async fn prepare_close(&self, handle: u64) {
        let cx = Context::system();
        let _ = self.held.check(&cx, handle).await;
        self.held.cleared(handle).await;
        self.held.closed(handle);
        self.files.closing(handle).await;
    }
}
