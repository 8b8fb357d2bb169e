//! A slice is served by nobody while an administrator quiesces its projection.
//!
//! Its primary goes on as that. It syncs, stops to serve, and waits until no call is in the file system.
//! Clients come again until the slice is served, as they do while a server is restarted. The backup stays in
//! step meanwhile, and takes over if the primary dies, without serving anybody either.

use std::io;

use dray_rt::sleep;

use super::membership::{PageCacheId, Revision, SliceState};
use super::slice::{Deposed, LOOK_EVERY, Leading, SliceServer, race};

impl SliceServer {
    /// Which of an administrator's requests ([`Membership::quiesced`]) has been carried out. Of this slice
    /// no call is in the file system at this server, and none begins. What was written through a server
    /// that served the slice is on media.
    ///
    /// [`Membership::quiesced`]: super::Membership::quiesced
    pub fn quiet(&self) -> Option<Revision> {
        self.lock().quiet
    }

    /// A server that is not the primary, as it has `seen`, has only to wait for what was under way before.
    pub(super) fn note_quiet(&self, seen: &io::Result<Option<(SliceState, Revision)>>) {
        let membership = &self.slice.membership;
        let is_other = |state: &SliceState| state.primary != membership.me();
        let is_idle = match seen {
            Ok(Some((state, _))) => is_other(state) && !self.is_withdrawn_in_use(),
            Ok(None) => true,
            Err(_) => false,
        };
        self.lock().quiet = membership.quiesced().filter(|_| is_idle);
    }

    /// In place of opening the export: what is to be synced is known, and no client is let in.
    pub(super) fn hold(&self, leading: &Leading) {
        let export = (self.slice.export)();
        let mut fs = leading.fs.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *fs = Some(export.fs);
        self.lock().quiet = None;
    }

    /// Ends when this server has to begin to serve anew. `held`: it has not let anybody in.
    pub(super) async fn quiesce_when_asked(&self, leading: &Leading, held: bool) {
        let membership = &self.slice.membership;
        if !held {
            self.lock().quiet = None;
            while membership.quiesced().is_none() {
                sleep(LOOK_EVERY).await;
            }
        }
        let _ = race(self.resumed(), self.become_quiet(leading)).await;
    }

    /// Ends when the projection is not quiesced any more.
    async fn resumed(&self) {
        while self.slice.membership.quiesced().is_some() {
            sleep(LOOK_EVERY).await;
        }
    }

    async fn become_quiet(&self, leading: &Leading) -> Deposed {
        // So that little is left for the second sync, during which nobody is served.
        let _ = self.sync(leading).await; // the second one says why
        self.stop_serving(leading);
        self.calls_ended().await;
        while let Err(error) = self.sync(leading).await {
            self.not_quiet.say(|more| {
                let name = &self.slice.name;
                log::error!(
                    "slice {name}: not quiet: what was written cannot be synced: {error}{more}"
                );
            });
            sleep(LOOK_EVERY).await;
        }
        if let Err(deposed) =
            self.update(leading, |state| state.page_cache = PageCacheId::SYNCED).await
        {
            return deposed;
        }
        loop {
            self.lock().quiet = self.slice.membership.quiesced();
            sleep(LOOK_EVERY).await;
        }
    }
}
