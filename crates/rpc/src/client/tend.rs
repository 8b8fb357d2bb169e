//! Asks for syncs while something may not be on media, so that what is kept stays little
//! and old data are not kept for ever.

use std::sync::{Arc, Weak};
use std::time::Duration;

use dray_core::{Context, Errno, Error, Op, Result};

use crate::client::channel::{Answer, Ask, error_of};
use crate::client::session::Session;
use crate::client::unsynced::{Changed, Expect, Writer};
use crate::wire::{Call, Input};

/// After this time everything is synced: about when the server's kernel does so by itself
/// (dirty_expire_centisecs, 30 s).
const SYNC_AFTER: Duration = Duration::from_secs(30);
/// Between two syncs, however urgent they are.
const SYNC_PAUSE: Duration = Duration::from_millis(20);

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
        let request = self.link.request_of(cx);
        let call = Call::SyncAll {};
        let (slot, data, into, to) = (None, None, None, None);
        let ask = Ask { cx, call: &call, slot, request, data, into, to };
        let answer = self.channel()?.call(ask, |bytes| Input::whole::<()>(bytes)).await;
        let Answer { made, .. } =
            answer.map_err(|failure| error_of(failure).during(Op::SyncAll))?;
        self.link.unsynced.stable(made.stamp, true);
        Ok(())
    }
}

async fn tend(session: Weak<Session>) {
    loop {
        {
            let Some(session) = session.upgrade() else { return };
            let link = session.link.clone();
            drop(session); // a mount that ends does not wait for us
            let _ = dray_rt::timeout(SYNC_AFTER, link.unsynced.urgent()).await; // either will do
        }
        let Some(session) = session.upgrade() else { return };
        let unsynced = &session.link.unsynced;
        if unsynced.tender_ends() {
            return;
        }
        if !session.link.known().stamps {
            // A server of an earlier version: what it has on media is not to be known.
            return unsynced.tender_gone();
        }
        if let Err(error) = session.sync_all(&Context::system()).await {
            log::warn!("{}: cannot sync: {error}", session.link.connector.target());
            dray_rt::sleep(SYNC_AFTER).await;
        }
        if unsynced.tender_ends() {
            return;
        }
        drop(session);
        dray_rt::sleep(SYNC_PAUSE).await;
    }
}
