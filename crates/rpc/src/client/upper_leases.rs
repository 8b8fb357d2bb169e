//! What is leased to a session of a server that leases it on to its own clients (ADR 0061).

use std::time::Duration;

use dray_core::{Attr, Context, FileSystem, Fut, HearRecalls, SessionControl, UpperLeases};

use crate::client::fs::RemoteFs;
use crate::wire::Call;

impl UpperLeases for RemoteFs {
    fn term(&self) -> Duration {
        self.session.link.leases.term()
    }

    fn rest(&self) -> Duration {
        self.session.link.leases.rest()
    }

    fn renew(&self) -> Fut<'_, ()> {
        Box::pin(async move {
            let (cx, id) = (Context::system(), self.info().root);
            // Any answer is a contact. Without one the session has ended.
            let _ = self.ask::<Attr>(&cx, Call::Getattr { id, handle: None }).await;
        })
    }

    fn pass_recalls_to(&self, hear: HearRecalls) {
        SessionControl::hear_recalls_by(self, hear);
    }
}
