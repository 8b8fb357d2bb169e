//! How leases on locks come back to the server (ADR 0064).

use std::sync::Arc;

use dray_core::{
    Context, Errno, FileId, Lock, LockFamily, LockKind, LockOwner, LockRange, Pid, Result,
};
use dray_rt::sleep;

use super::Link;
use super::connecting::BACKOFF_LAST;
use crate::client::channel::{Channel, OutgoingCall, value_of};
use crate::client::holdings::lock_leases::GivenBackLocks;
use crate::client::holdings::locks::HeldLock;
use crate::wire::{Call, Input, LockPurpose};

/// What a call says that is about all locks.
const NO_LOCK: Lock = Lock {
    family: LockFamily::Posix,
    kind: LockKind::Unlock,
    range: LockRange::ALL,
    owner: LockOwner::own(0),
    pid: Pid(0),
};

impl Link {
    /// Gives the lease on the locks of a file back, if the session has it. Calls about these locks wait for that.
    pub(crate) fn give_back_lock_lease(self: &Arc<Link>, channel: Arc<Channel>, id: FileId) {
        if let Some(back) = self.held.give_back_lock_lease(id) {
            let link = self.clone();
            self.home.spawn(async move { link.report_locks(&channel, id, back).await });
        }
    }

    /// Gives back what a process before this one may have had.
    pub(super) fn give_back_inherited_lock_leases(self: &Arc<Link>, channel: &Arc<Channel>) {
        for (id, back) in self.held.inherited_lock_leases() {
            let (link, channel) = (self.clone(), channel.clone());
            self.home.spawn(async move { link.report_locks(&channel, id, back).await });
        }
    }

    /// Waits until that has been done.
    pub(super) async fn inherited_lock_leases_back(&self) {
        for (id, _) in self.held.inherited_lock_leases() {
            let _ = self.held.lock_lease_back(&Context::system(), id).await; // nobody gives up
        }
    }

    /// Before an open file is closed: gives back the lease that was had through it.
    pub(crate) async fn let_lock_lease_go(
        self: &Arc<Link>,
        channel: Arc<Channel>,
        handle: u64,
    ) -> Result<()> {
        let Some(id) = self.held.lock_lease_through(handle) else { return Ok(()) };
        self.give_back_lock_lease(channel, id);
        self.held.lock_lease_back(&Context::system(), id).await
    }

    /// Reports all locks of a file whose lease is given back to the server. Another server, or session, reclaims them: it
    /// takes nothing of this.
    async fn report_locks(&self, channel: &Channel, id: FileId, back: GivenBackLocks) {
        let first = match back.locks.is_empty() {
            true => LockPurpose::GiveBackNone,
            false => LockPurpose::GiveBackLocks,
        };
        self.report_lock(channel, (id, &back), (back.handle, NO_LOCK, first), None).await;
        for (number, held) in back.locks.iter().enumerate() {
            let purpose = match number + 1 == back.locks.len() {
                true => LockPurpose::LastGivenBack,
                false => LockPurpose::GivenBack,
            };
            let call = (held.handle, held.lock, purpose);
            self.report_lock(channel, (id, &back), call, Some(held)).await;
        }
        self.held.lock_lease_ended(id, &back);
    }

    async fn report_lock(
        &self,
        channel: &Channel,
        (id, back): (FileId, &GivenBackLocks),
        (handle, lock, purpose): (u64, Lock, LockPurpose),
        held: Option<&HeldLock>,
    ) {
        let cx = Context::system().on_behalf_of(lock.owner.node);
        while self.held.gives_back_lock_lease(id, back) {
            let call = Call::Lock { handle, lock, wait: false, purpose };
            let mut ask = OutgoingCall { patient: true, ..OutgoingCall::of(&cx, &call) };
            match value_of::<()>(channel.call(&mut ask, |bytes| Input::whole(bytes)).await) {
                Err(error) if error.errno() == Errno::EHOSTDOWN => sleep(BACKOFF_LAST).await,
                Ok(()) => return,
                // Another server does not know the open file: the lock is reclaimed there.
                Err(_) if !self.held.gives_back_lock_lease(id, back) => return,
                Err(error) => {
                    if let Some(held) = held {
                        let target = self.addresses.target();
                        log::error!("{target}: lost a lock on file {id}: {error}");
                        self.held.lost(held);
                    }
                    return;
                }
            }
        }
    }
}
