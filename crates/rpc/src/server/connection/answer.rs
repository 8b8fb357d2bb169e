//! Answers on their way to the client, and the end of their calls.

use std::sync::Weak;
use std::sync::atomic::Ordering;

use dray_core::{Errno, Error};

use super::call::CallInHand;
use crate::server::exactly_once::slots::Route;
use crate::server::reply::Reply;
use crate::wire::CallHead;

impl CallInHand {
    /// Sends the answer. The data of `reply` are taken out.
    pub(super) async fn answer(&self, route: &Route, reply: &mut Reply) {
        if let Some(table) = self.session.believes_from_above().filter(|_| !self.one_way()) {
            let is_wanted = || route.connection.strong_count() > 0;
            // In a box, so that other calls are no larger.
            Box::pin(table.contact_above(is_wanted)).await;
            if self.session.export.is_lost() {
                return self.over();
            }
        }
        self.send(route, reply);
    }

    fn send(&self, route: &Route, reply: &mut Reply) {
        if self.one_way() {
            // Given up with its connection: it is asked for again, by another one.
            if let Some(error) = reply.error().filter(|error| error.errno() != Errno::EINTR) {
                let host = &self.session.host;
                self.session
                    .failed_closes
                    .say(|more| log::warn!("{host}: closing a file failed: {error}{more}"));
            }
            return self.over();
        }
        // An answer on another connection than that of its call settles no closes there.
        let settled = Weak::ptr_eq(&route.connection, &self.route.connection)
            && self.shared.counter(true).load(Ordering::SeqCst) == 0;
        if !self.session.tickets() {
            reply.take_ticket();
        }
        // The connection has gone: the call is asked for again.
        let Some(connection) = route.connection.upgrade() else { return self.over() };
        let sent = reply.send(&*connection, route.tag, settled);
        // Whatever else went wrong ends the connection, and it is asked for again.
        if sent.is_err_and(|error| error.raw_os_error() == Some(libc::EMSGSIZE)) {
            let error = Error::new(Errno::EOVERFLOW).because("an answer longer than a message");
            let _ = Reply::failure(&error).send(&*connection, route.tag, settled); // as above
        }
        self.over();
    }

    fn one_way(&self) -> bool {
        self.head.flags & CallHead::ONE_WAY != 0
    }

    pub(super) fn over(&self) {
        self.shared.counter(self.one_way()).fetch_sub(1, Ordering::SeqCst);
        if self.cx.cancel.is_some() {
            self.shared.lock().cancels.remove(&self.head.tag);
        }
    }
}
