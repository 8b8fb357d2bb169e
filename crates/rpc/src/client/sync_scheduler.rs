//! The sync scheduler: it asks for syncs while changes may not be on media, so that little is
//! kept, and nothing for long.

use std::sync::{Arc, Weak};
use std::time::Duration;

use dray_core::{Context, Errno, Error, Fate, Op, Result};
use dray_rt::{random_u64, timeout};

use crate::client::channel::{CallAnswer, OutgoingCall, error_of};
use crate::client::durability::{SYNC_AFTER, SyncPacing, SyncReason, SyncedFor};
use crate::client::link::Link;
use crate::client::session::ClientSession;
use crate::wire::{Call, Input};

/// When everything has been on media for so long, the scheduler ends and memory is given back.
const CALM: Duration = Duration::from_secs(1);

impl ClientSession {
    /// Has the scheduler started whenever the unsynced log needs it.
    pub(crate) fn schedule_syncs(self: &Arc<ClientSession>) {
        let session = Arc::downgrade(self);
        self.link.unsynced.schedule_syncs_by(Box::new(move || {
            if let Some(running) = session.upgrade() {
                running.link.spawn_home(run(session.clone()));
            }
        }));
    }

    /// Brings everything to media. Errors: those of the server's file system.
    pub(crate) async fn sync_all(self: &Arc<ClientSession>, cx: &Context) -> Result<()> {
        if !self.has_begun() {
            return Ok(()); // nothing was changed through it
        }
        if self.begins_with_use() {
            self.met_within(self.link.options.timeout).await?; // only then it is known what it can do
        }
        if !self.link.server().stamps {
            return Err(Error::new(Errno::ENOTSUP).during(Op::SyncAll));
        }
        // The call has a number, so that the server recognizes it if its answer is lost.
        let request = self.link.own_handle();
        let call = Call::SyncAll {};
        let mut ask = OutgoingCall { request, ..OutgoingCall::of(cx, &call) };
        let answer = self.channel()?.call(&mut ask, |bytes| Input::whole::<()>(bytes)).await;
        let answer = answer.map_err(|failure| error_of(failure).during(Op::SyncAll));
        let failed = answer.as_ref().is_err_and(|error| error.fate() == Fate::Final);
        if failed && self.link.is_wanted() {
            self.link.unsynced.sync_of_all_failed();
        }
        let CallAnswer { made, .. } = answer?;
        self.link.unsynced.durable_up_to(made.stamp, made.ticket, SyncedFor::ThisClient);
        Ok(())
    }
}

async fn run(session: Weak<ClientSession>) {
    if let Some(link) = session.upgrade().map(|session| session.link.clone()) {
        link.met().await; // only then it is known what the server can do
    }
    let (mut pacing, mut not_for_data) = (SyncPacing::default(), Duration::ZERO);
    loop {
        let reason = {
            let Some(session) = session.upgrade() else { return };
            let link = session.link.clone();
            drop(session); // a mount that ends does not wait for its scheduler
            match wait(&link, not_for_data).await {
                // A program that syncs what it writes will write again soon, and much perhaps.
                SyncReason::Clean => {
                    let sooner = timeout(CALM, link.unsynced.sync_reason(true, false)).await;
                    sooner.unwrap_or(SyncReason::Clean)
                }
                reason @ (SyncReason::Urgent | SyncReason::Age) => reason,
            }
        };
        let Some(session) = session.upgrade() else { return };
        let unsynced = &session.link.unsynced;
        match reason {
            SyncReason::Clean if unsynced.scheduler_may_end() => return,
            SyncReason::Clean => continue, // there are new changes
            SyncReason::Age => unsynced.trim(), // what a burst needed
            SyncReason::Urgent => {}
        }
        if !session.link.server().stamps {
            // A server of an earlier version does not say what it has on media.
            return unsynced.scheduler_gave_up();
        }
        let begin = dray_rt::now();
        unsynced.sync_begins();
        if let Err(error) = session.sync_all(&Context::system()).await {
            log::warn!("{}: cannot sync: {error}", session.link.addresses.target());
            if unsynced.has_failed_sync() {
                session.sync_each_file().await;
            }
            dray_rt::sleep(SYNC_AFTER).await;
        }
        let pause;
        (pause, not_for_data) = pacing.after(begin.elapsed(), unsynced.is_all_kept());
        let link = Arc::downgrade(&session.link);
        drop(session);
        rest(&link, pause).await;
    }
}

/// Waits until the last sync, of whichever client, is `pause` ago. Without the pause, clients that
/// run out of room at the same time would keep the server's disks in constant syncs, one for each
/// client. A sync for another client makes room here, too.
async fn rest(link: &Weak<Link>, pause: Duration) {
    let mut rest = pause;
    while !rest.is_zero() {
        dray_rt::sleep(rest).await;
        let Some(link) = link.upgrade() else { return };
        rest = link.unsynced.is_young_for(pause);
    }
}

/// Waits until it is time for a sync, or for none. A sync for one client is a sync for all. While
/// others ask for syncs this client need not, and of thousands that write one asks at a time.
async fn wait(link: &Link, not_for_data: Duration) -> SyncReason {
    let sync_after = sync_after();
    if let Ok(reason) = timeout(not_for_data, link.unsynced.sync_reason(false, true)).await {
        return reason;
    }
    let mut rest = sync_after.saturating_sub(not_for_data);
    loop {
        match timeout(rest, link.unsynced.sync_reason(true, true)).await {
            Ok(reason) => return reason,
            Err(_) => rest = link.unsynced.is_young_for(sync_after),
        }
        if rest.is_zero() {
            return SyncReason::Age;
        }
    }
}

/// Up to [`SYNC_AFTER`], at random, so that clients that were notified of the same sync do not all
/// ask for the next one at once.
fn sync_after() -> Duration {
    SYNC_AFTER.mul_f64(1.0 - random_u64() as f64 / u64::MAX as f64 / 4.0)
}
