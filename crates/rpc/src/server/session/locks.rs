//! What a session knows of its locks: whose end with a close, and whether a later life of the
//! server has to wait for its client to claim them.

use dray_core::{Context, Errno, Error, Lock, LockFamily, LockOwner, OpenFile};

use super::{Session, State};

/// Owners of fcntl locks that one mount may have.
const OWNERS_MAX: usize = 1 << 20;

impl Session {
    /// A lock is about to be had through this open file. The journal notes it, so that a
    /// later server waits for this client. Errors: `ENOLCK`.
    pub(crate) fn note_lock(&self, handle: u64, lock: &Lock) -> dray_core::Result<()> {
        let mut state = self.state();
        if state.owners.len() >= OWNERS_MAX && !state.owners.contains(&(handle, lock.owner)) {
            return Err(Error::new(Errno::ENOLCK).because("the client has as many as it may"));
        }
        if state.owners.is_empty() && state.flocks.is_empty() {
            self.slots.set_locks(true);
        }
        match lock.family {
            LockFamily::Posix => state.owners.insert((handle, lock.owner)),
            LockFamily::Flock => state.flocks.insert(handle),
        };
        Ok(())
    }

    /// `owner` no longer has an fcntl lock through this open file.
    pub(crate) fn forget_owner(&self, handle: u64, owner: LockOwner) {
        let mut state = self.state();
        state.owners.remove(&(handle, owner));
        self.settle_locks(&state);
    }

    /// The client may have had locks in an earlier life of the server. The journal says so
    /// until it has claimed them: should this life end before, the next one waits for it.
    pub(crate) fn awaits_claims(&self) {
        self.state().claims = true;
        self.slots.set_locks(true);
    }

    /// The client has claimed all locks that it had: what the journal says is right again.
    pub(crate) fn locks_claimed(&self) {
        let mut state = self.state();
        state.claims = false;
        self.settle_locks(&state);
    }

    /// With the last lock ends what the journal says of it.
    fn settle_locks(&self, state: &State) {
        if state.claims {
            return;
        }
        if state.owners.is_empty() && state.flocks.is_empty() && self.slots.had_locks() {
            self.slots.set_locks(false);
        }
    }

    /// Closes an open file and ends the fcntl locks that were taken through it.
    pub(crate) async fn close_file(
        &self,
        cx: &Context,
        handle: u64,
        file: &dyn OpenFile,
    ) -> dray_core::Result<()> {
        let owners: Vec<_> = {
            let state = self.state();
            let all = (handle, LockOwner(0))..=(handle, LockOwner(u64::MAX));
            state.owners.range(all).copied().collect()
        };
        for (_, owner) in &owners {
            let _ = file.flush(cx, *owner).await; // an error shows at the close as well
        }
        let closed = file.close(cx).await;
        let mut state = self.state();
        owners.iter().for_each(|owner| _ = state.owners.remove(owner));
        state.flocks.remove(&handle);
        self.settle_locks(&state);
        closed
    }
}
