//! The locks of a session. The module says which owners end with a close, and whether a later
//! server epoch has to wait for its client to reclaim them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dray_core::{Context, FileId, Lock, LockFamily, LockOwner, OpenFile, OpenHow, Reservation};

use super::{ServerSession, State};
use crate::server::as_server;
use crate::server::refusals::no_room_for_an_owner;

/// Files on whose locks one session decides: as many as a client asks for.
const LOCK_LEASES_MAX: usize = 64;

/// Owners of fcntl locks, by the open file through which they were taken, and the way back.
#[derive(Default)]
pub(super) struct Owners {
    /// The lock owners, each with its place among those of the export.
    by_handle: BTreeMap<(u64, LockOwner), (FileId, Reservation)>,
    by_owner: BTreeSet<(LockOwner, FileId, u64)>,
}

impl Owners {
    fn insert(&mut self, (handle, file): (u64, FileId), owner: LockOwner, place: Reservation) {
        self.by_handle.insert((handle, owner), (file, place));
        self.by_owner.insert((owner, file, handle));
    }

    fn remove(&mut self, handle: u64, owner: LockOwner) {
        if let Some((file, _)) = self.by_handle.remove(&(handle, owner)) {
            self.by_owner.remove(&(owner, file, handle));
        }
    }

    /// The owners with locks through `handle`.
    fn of(&self, handle: u64) -> Vec<LockOwner> {
        let all = (handle, LockOwner::MIN)..=(handle, LockOwner::MAX);
        self.by_handle.range(all).map(|(&(_, owner), _)| owner).collect()
    }

    /// Whether `owner` has locks of `file` through any open file.
    fn has(&self, owner: LockOwner, file: FileId) -> bool {
        self.by_owner.range((owner, file, 0)..=(owner, file, u64::MAX)).next().is_some()
    }
}

/// Notes that the session has locks: how many were made, and how many of them a successor has.
#[derive(Default)]
pub(super) struct LockNotes {
    made: AtomicU64,
    settled: AtomicU64,
}

impl ServerSession {
    /// A lock is about to be had through this open file. The journal notes it, so that a
    /// later server waits for this client. `reclaims`: it had it before. Errors: `ENOLCK`.
    pub(crate) fn note_lock(
        &self,
        (handle, file): (u64, FileId),
        lock: &Lock,
        reclaims: bool,
    ) -> dray_core::Result<()> {
        let mut state = self.state();
        let none = state.owners.by_handle.is_empty() && state.flocks.is_empty();
        match lock.family {
            LockFamily::Posix if state.owners.by_handle.contains_key(&(handle, lock.owner)) => {}
            LockFamily::Posix => {
                let place = self.export.lock_owners.take(self.taker(reclaims));
                let place = place.map_err(no_room_for_an_owner).inspect_err(|error| {
                    self.export.refused_locks.of(self, error);
                })?;
                state.owners.insert((handle, file), lock.owner, place);
            }
            LockFamily::Flock => _ = state.flocks.insert(handle),
        }
        if none {
            self.slots.set_locks(true);
            self.lock_notes.made.fetch_add(1, Ordering::SeqCst); // behind it, and in the lock
        }
        Ok(())
    }

    /// Waits until a successor of this server would know that the session has locks. False: this server
    /// has been succeeded.
    pub(crate) async fn lock_note_settled(&self) -> bool {
        let LockNotes { made, settled } = &self.lock_notes;
        let last = made.load(Ordering::SeqCst);
        if settled.load(Ordering::SeqCst) >= last {
            return true;
        }
        if let Some(arrives) = self.slots.settled()
            && !arrives.await
        {
            return false;
        }
        settled.fetch_max(last, Ordering::SeqCst);
        true
    }

    /// `owner` no longer has an fcntl lock through this open file.
    pub(crate) fn forget_owner(&self, handle: u64, owner: LockOwner) {
        let mut state = self.state();
        state.owners.remove(handle, owner);
        self.settle_locks(&state);
    }

    /// The client is about to decide on the fcntl locks of a file. It may have some from then on, so a later server waits
    /// for it. False: it has as many such leases as it may.
    pub(crate) fn note_lock_lease(&self, file: FileId) -> bool {
        let mut state = self.state();
        if state.lock_leases.len() >= LOCK_LEASES_MAX && !state.lock_leases.contains(&file) {
            return false;
        }
        state.lock_leases.insert(file);
        if !self.slots.had_locks() {
            self.slots.set_locks(true);
            self.lock_notes.made.fetch_add(1, Ordering::SeqCst); // behind it, and in the lock
        }
        true
    }

    /// The client does so no longer: this server knows its locks of the file.
    pub(crate) fn forget_lock_lease(&self, file: FileId) {
        let mut state = self.state();
        if state.lock_leases.remove(&file) {
            self.settle_locks(&state);
        }
    }

    /// Forgets the fcntl locks of a file that were taken by this server. Its client says which of them it has.
    pub(crate) async fn forget_fcntl_locks(&self, cx: &Context, id: FileId) {
        let owners: Vec<_> = {
            let state = self.state();
            let all = state.owners.by_handle.iter().filter(|(_, (file, _))| *file == id);
            all.map(|(owner, _)| *owner).collect()
        };
        for (handle, owner) in owners {
            if let Some(file) = self.file(handle) {
                let _ = file.flush(cx, owner).await; // an error shows at the close as well
            }
            self.state().owners.remove(handle, owner);
        }
    }

    /// The session closes an open file: the lease on its locks ends with the last one.
    fn close_lock_lease(&self, handle: u64, id: FileId) {
        let Some(table) = self.export.lease_table.as_ref() else { return };
        let Some(who) = self.lease_holder() else { return };
        let other = || {
            let files = self.files();
            let other = |(other, opened): (&u64, &super::Opened)| {
                (*other != handle && opened.file.id() == id).then_some(*other)
            };
            files.iter().find_map(other)
        };
        if table.locks.closed(who, (id, handle), other) {
            self.forget_lock_lease(id);
        }
    }

    /// The client may have held locks in an earlier server epoch. The journal says so until the
    /// client has reclaimed them. If this epoch ends before, the next one waits for the client,
    /// too.
    pub(crate) fn expect_reclaim(&self) {
        self.state().reclaim_pending = true;
        self.slots.set_locks(true);
    }

    /// The client has reclaimed all its locks: the journal notes the locks of this epoch again.
    pub(crate) fn finish_reclaim(&self) {
        let mut state = self.state();
        state.reclaim_pending = false;
        self.settle_locks(&state);
    }

    /// When the last lock ends, the journal's note of locks ends.
    fn settle_locks(&self, state: &State) {
        if state.reclaim_pending {
            return;
        }
        let none = state.owners.by_handle.is_empty() && state.flocks.is_empty();
        if none && state.lock_leases.is_empty() && self.slots.had_locks() {
            self.slots.set_locks(false);
        }
    }

    /// Ends the fcntl locks of a session that is suspended, and has no change under way any more: another
    /// server has them from now on. Answers those of its files that have no name, opened once more: with
    /// the session's own open files its flocks end.
    pub(crate) async fn give_back_locks(&self) -> Vec<Arc<dyn OpenFile>> {
        let files: Vec<_> =
            self.files().iter().map(|(handle, opened)| (*handle, opened.file.clone())).collect();
        let cx = Context { holder: self.holder(), ..as_server::of_nobody() };
        let mut nameless = Vec::new();
        for (handle, file) in files {
            let owners = self.state().owners.of(handle);
            for owner in owners {
                let _ = file.flush(&cx, owner).await; // nobody waits for it
            }
            if file.getattr(&cx).await.is_ok_and(|attr| attr.nlink == 0) {
                let opened = as_server::open(&*self.export.fs, &cx, file.id(), OpenHow::READ).await;
                nameless.extend(opened);
            }
        }
        nameless
    }

    /// Closes an open file and ends the fcntl locks of the open file description that were taken
    /// through it. Locks of processes have ended with their flush. The kernel's name for such an
    /// owner is an address, which the next open file may have before the close of this one comes.
    /// Locks of that next file stay.
    pub(crate) async fn close_file(
        &self,
        cx: &Context,
        handle: u64,
        file: &dyn OpenFile,
    ) -> dray_core::Result<()> {
        let ended: Vec<LockOwner> = {
            let mut state = self.state();
            let owners = state.owners.of(handle);
            owners.iter().for_each(|owner| state.owners.remove(handle, *owner));
            owners.into_iter().filter(|owner| !state.owners.has(*owner, file.id())).collect()
        };
        for owner in ended {
            let _ = file.flush(cx, owner).await; // an error shows at the close as well
        }
        let id = file.id();
        let closed = file.close(cx).await;
        self.close_lock_lease(handle, id);
        let mut state = self.state();
        state.flocks.remove(&handle);
        self.settle_locks(&state);
        closed
    }
}
