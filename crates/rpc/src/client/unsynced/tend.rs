//! Asks for syncs while something may not be on media, so that what is kept stays little
//! and old data are not kept for ever.

use std::sync::{Arc, Weak};
use std::time::Duration;

use dray_core::{Context, Errno, Error, Fate, Op, Result};
use dray_rt::{random_u64, timeout};

use crate::client::channel::{Answer, Ask, error_of};
use crate::client::link::Link;
use crate::client::session::Session;
use crate::client::unsynced::{Changed, Expect, Pace, SYNC_AFTER, Wake, Writer};
use crate::wire::{Call, Input};

/// When everything has been on media for so long, nobody looks after it any more and memory is
/// given back.
const CALM: Duration = Duration::from_secs(1);

impl Session {
    /// Notes a change of a file.
    pub(crate) fn changed(self: &Arc<Session>, new: Changed<'_>, writer: Option<&Writer>) {
        if self.link.unsynced.changed(new, writer) {
            self.tend();
        }
    }

    /// Notes a change of a name.
    pub(crate) fn named(
        self: &Arc<Session>,
        (dir, name): (dray_core::FileId, &[u8]),
        made: crate::client::channel::Made,
        expect: Expect,
    ) {
        if self.link.unsynced.named(dir, name, made, expect) {
            self.tend();
        }
    }

    /// Starts the task that asks for syncs.
    pub(crate) fn tend(self: &Arc<Session>) {
        self.link.spawn_home(tend(Arc::downgrade(self)));
    }

    /// Brings everything to media. Errors: those of the server's file system.
    pub(crate) async fn sync_all(self: &Arc<Session>, cx: &Context) -> Result<()> {
        if !self.link.known().stamps {
            return Err(Error::new(Errno::ENOTSUP).during(Op::SyncAll));
        }
        // With a number, so that the server knows it again should its answer be lost.
        let request = self.link.own_handle();
        let call = Call::SyncAll {};
        let ask = Ask { request, ..Ask::of(cx, &call) };
        let answer = self.channel()?.call(ask, |bytes| Input::whole::<()>(bytes)).await;
        let answer = answer.map_err(|failure| error_of(failure).during(Op::SyncAll));
        let failed = answer.as_ref().is_err_and(|error| error.fate() == Fate::Final);
        if failed && self.link.is_wanted() && self.link.unsynced.doubt() {
            self.tend();
        }
        let Answer { made, .. } = answer?;
        self.link.unsynced.stable(made.stamp, made.ticket, true);
        Ok(())
    }
}

async fn tend(session: Weak<Session>) {
    let (mut pace, mut not_for_data) = (Pace::default(), Duration::ZERO);
    loop {
        let wake = {
            let Some(session) = session.upgrade() else { return };
            let link = session.link.clone();
            drop(session); // a mount that ends does not wait for us
            match wait(&link, not_for_data).await {
                // Whoever syncs what he writes will write again soon, and urgently perhaps.
                Wake::Clean => match timeout(CALM, link.unsynced.wake(true, false)).await {
                    Ok(wake) => wake,
                    Err(_) => Wake::Clean,
                },
                wake => wake,
            }
        };
        let Some(session) = session.upgrade() else { return };
        let unsynced = &session.link.unsynced;
        match wake {
            Wake::Clean if unsynced.tender_ends() => return,
            Wake::Clean => continue,       // what is here now is new
            Wake::Time => unsynced.trim(), // what a burst needed
            Wake::Urgent => {}
        }
        if !session.link.known().stamps {
            // A server of an earlier version: what it has on media is not to be known.
            return unsynced.tender_gone();
        }
        let begin = dray_rt::now();
        unsynced.sync_begins();
        if let Err(error) = session.sync_all(&Context::system()).await {
            log::warn!("{}: cannot sync: {error}", session.link.connector.target());
            if unsynced.is_doubtful() {
                session.look_at_each().await;
            }
            dray_rt::sleep(SYNC_AFTER).await;
        }
        let pause;
        (pause, not_for_data) = pace.after(begin.elapsed(), unsynced.is_all_kept());
        let link = Arc::downgrade(&session.link);
        drop(session);
        rest(&link, pause).await;
    }
}

/// Asks for no sync until so long after the last one, whoever had asked for that: those whose room
/// runs out at the same time would have the server's disks sync for each of them in turn, without
/// an end. What others have had synced makes room here, too.
async fn rest(link: &Weak<Link>, pause: Duration) {
    let mut rest = pause;
    while !rest.is_zero() {
        dray_rt::sleep(rest).await;
        let Some(link) = link.upgrade() else { return };
        rest = link.unsynced.is_young_for(pause);
    }
}

/// Waits until it is time for a sync, or for none. One client's sync is everybody's: as long as
/// others ask for them, nobody else has to, and of thousands that write one asks at a time.
async fn wait(link: &Link, not_for_data: Duration) -> Wake {
    let sync_after = sync_after();
    if let Ok(wake) = timeout(not_for_data, link.unsynced.wake(false, true)).await {
        return wake;
    }
    let mut rest = sync_after.saturating_sub(not_for_data);
    loop {
        match timeout(rest, link.unsynced.wake(true, true)).await {
            Ok(wake) => return wake,
            Err(_) => rest = link.unsynced.is_young_for(sync_after),
        }
        if rest.is_zero() {
            return Wake::Time;
        }
    }
}

/// Up to [`SYNC_AFTER`], by chance, so that those who were told of the same sync do not all ask for
/// the next one at once.
fn sync_after() -> Duration {
    SYNC_AFTER.mul_f64(1.0 - random_u64() as f64 / u64::MAX as f64 / 4.0)
}
