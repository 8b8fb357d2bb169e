//! A server whose part another one may take over, and whose connections do not break. Its process is stopped,
//! or its machine is without power.
//!
//! While calls wait and nothing comes, the server is asked whether it is there. A file system below that
//! hangs does not keep a server from answering. If it says nothing, the other server is asked whether that
//! serves the slice. Only then the connection ends. So a server that is only slow loses nobody.
//!
//! A mount that waits for nothing is not woken, but for one that has locks. Those are given to others after
//! the lease of its session.
//!
//! The next server of a slice waits for all clients that may have something to send again or to reclaim. So a mount
//! that waits for nothing has to find out as well, or it delays all others. The servers that are left tell their
//! clients that one is gone ([`SERVER_GONE`](crate::wire::NotifyHead::SERVER_GONE)), and one session that has moved says so to the others.
//! Then all sessions of the mount ask their servers once.

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use dray_core::BufMut;
use dray_fabric::{Connection, Sink};
use dray_rt::sync::watch;
use dray_rt::{now, random_bytes, sleep, timeout};

use super::Link;
use super::addresses::AddressIndex;
use crate::client::channel::Channel;
use crate::wire::Challenge;

/// A server that says nothing for so long while calls wait is asked whether it is there; later each time
/// that it is.
const PROBE_AFTER: Duration = Duration::from_secs(1);
const PROBE_AFTER_LAST: Duration = Duration::from_secs(3);
/// The same while no call waits, where locks are held: a third of the lease that servers give by default.
const PROBE_HOLDER_AFTER: Duration = Duration::from_secs(20);
/// A server that is there answers within this time.
const PRESENT_MAX: Duration = Duration::from_secs(1);
/// Between questions to the other server; longer each time.
const ASK_AGAIN: Duration = Duration::from_millis(500);
const ASK_AGAIN_LAST: Duration = Duration::from_secs(3);
/// The other server answers within this time.
const ANSWER_MAX: Duration = Duration::from_secs(1);

impl Link {
    /// Watches the server at `address` until its `connection` is gone, which this may end.
    pub(super) async fn watch(
        self: Arc<Link>,
        channel: Arc<Channel>,
        connection: Weak<dyn Connection>,
        address: AddressIndex,
    ) {
        let (mut pause, mut alarms) = (PROBE_AFTER, self.alarms.subscribe());
        while self.is_to_be_watched(&channel, &connection, &mut alarms).await {
            let heard = channel.heard();
            sleep(pause).await;
            if channel.heard() != heard {
                pause = PROBE_AFTER;
                continue;
            }
            channel.probe(&connection);
            sleep(PRESENT_MAX).await;
            pause = (pause * 2).min(PROBE_AFTER_LAST);
            if channel.heard() == heard {
                self.leave_if_taken_over(&channel, &connection, (address, heard)).await;
            }
        }
    }

    /// Waits until the server owes something, or an alarm says that it may be gone. False: the connection is gone.
    async fn is_to_be_watched(
        &self,
        channel: &Channel,
        connection: &Weak<dyn Connection>,
        alarms: &mut watch::Receiver<u64>,
    ) -> bool {
        let mut awaited = pin!(channel.is_awaited_on(connection));
        let mut alarmed = pin!(alarms.changed());
        let reason = poll_fn(|task| match awaited.as_mut().poll(task) {
            Poll::Pending => alarmed.as_mut().poll(task).map(|_| channel.is_on(connection)),
            is_on => is_on,
        });
        match self.held.is_empty() {
            true => reason.await,
            false => timeout(PROBE_HOLDER_AFTER, reason).await.unwrap_or(true),
        }
    }

    /// A server of the projection is gone, or has been succeeded: each session of the mount asks its own.
    pub(super) fn alarm_all(&self) {
        match &self.options.group {
            Some(group) => group.alarm_all(),
            None => self.alarm(),
        }
    }

    /// The server of this session may be gone without a sign.
    pub(crate) fn alarm(&self) {
        self.alarms.send_modify(|alarms| *alarms = alarms.wrapping_add(1));
    }

    /// The server at `address` is silent. Ends its connection once another server serves the session.
    async fn leave_if_taken_over(
        &self,
        channel: &Arc<Channel>,
        connection: &Weak<dyn Connection>,
        (address, heard): (AddressIndex, u64),
    ) {
        let (since, mut pause) = (now(), ASK_AGAIN);
        while channel.heard() == heard && channel.is_on(connection) {
            for other in self.addresses.round().filter(|other| *other != address) {
                if self.is_served_at(other).await {
                    self.addresses.prefer(other);
                    return channel.end_silent(connection, since);
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(ASK_AGAIN_LAST);
        }
    }

    /// Whether a server serves the export of this session: others refuse the first message. Nothing more is
    /// believed of one that has not proven itself.
    async fn is_served_at(&self, address: AddressIndex) -> bool {
        let asked = async {
            let connection = self.addresses.connector(address).connect().await?;
            let mut nonce = [0; 32];
            random_bytes(&mut nonce);
            connection.send(&self.hello(nonce).message(), None)?;
            let mut answer = FirstAnswer { serves: false };
            {
                let mut run = pin!(connection.run(&mut answer));
                run.as_mut().await;
            }
            connection.close();
            io::Result::Ok(answer.serves)
        };
        matches!(timeout(ANSWER_MAX, asked).await, Ok(Ok(true)))
    }
}

/// Hears one message.
struct FirstAnswer {
    serves: bool,
}

impl Sink for FirstAnswer {
    fn poll_place(
        &mut self,
        _: &mut TaskContext<'_>,
        _: &[u8],
        _: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(Err(io::ErrorKind::InvalidData.into()))
    }

    fn is_awaited(&self, _: &[u8]) -> bool {
        true
    }

    fn frame(&mut self, head: &[u8], _: Option<BufMut>) -> io::Result<()> {
        self.serves = Challenge::from_message(head).is_ok();
        Err(io::ErrorKind::ConnectionAborted.into()) // that was all
    }
}
