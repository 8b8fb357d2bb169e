//! Keeps a channel connected: one connection after the other, as long as the mount lasts.

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use dray_core::Errno;
use dray_fabric::Connection;
use dray_rt::sync::oneshot;
use dray_rt::{random_u64, timeout};

use super::addresses::AddressIndex;
use super::handshake::{HandshakeOutcome, LinkSink};
use super::{Link, ServerEnd};
use crate::client::channel::Channel;
use crate::client::connect_error::ConnectError;
use crate::wire::Proof;

/// First wait before connecting anew; doubled each time up to the last. The wait is between half of
/// it and all of it, by chance. So the clients of a server that comes back do not come all at once.
const BACKOFF_FIRST: Duration = Duration::from_millis(20);
pub(super) const BACKOFF_LAST: Duration = Duration::from_millis(500);
/// The last wait where another server may take over, for as long after the loss of a connection.
const BACKOFF_LAST_OF_SEVERAL: Duration = Duration::from_millis(200);
const TAKEOVER_MAX: Duration = Duration::from_secs(20);
/// A server that ends a first connection before it has said anything has too many in their
/// handshake, as when all nodes mount at once. It is asked again for so long.
const CROWDED_MAX: Duration = Duration::from_secs(5);

/// How a connection that served ended.
struct ConnectionEnd {
    error: io::Error,
    useful: bool,
}

/// Why a connection never served.
struct ConnectFailure {
    error: ConnectError,
    /// The connection was ended before the server had said anything.
    refused: bool,
    tell: Option<oneshot::Sender<HandshakeOutcome>>,
}

impl ConnectFailure {
    /// Hands the failure to the task that waits for it, if any, and answers its text.
    fn report(self) -> String {
        let text = self.error.to_string();
        if let Some(tell) = self.tell {
            let _ = tell.send(Err(self.error)); // the receiver may be gone
        }
        text
    }
}

/// The time to wait, by chance, where it is `backoff` at most.
fn jittered(backoff: Duration) -> Duration {
    backoff.mul_f64(0.5 + random_u64() as f64 / u64::MAX as f64 / 2.0)
}

impl Link {
    /// Connects `channel` for the first time and keeps it connected if that went well. A drop of
    /// this future before its end gives the session up.
    pub(crate) async fn start(self: &Arc<Link>, channel: Arc<Channel>) -> HandshakeOutcome {
        let (tell, outcome) = oneshot::channel();
        let mut beginning = SessionStart(Some((self.clone(), channel.clone())));
        let _ = self.first.set(Arc::downgrade(&channel)); // a session is started once
        let link = self.clone();
        dray_rt::spawn(async move {
            // A process before us may have left connections on which things still arrive.
            let mut replaces = Proof::REPLACES_ALL;
            if link.connect_first(&channel, &mut replaces, tell).await {
                link.keep(channel, replaces).await;
            }
        });
        let given_up = |_| Err(ConnectError::Protocol("the connection was given up".into()));
        let outcome = outcome.await.unwrap_or_else(given_up);
        if outcome.is_ok() {
            beginning.0 = None;
        }
        outcome
    }

    /// The first connection, from its making to its end. False if there was none.
    async fn connect_first(
        self: &Arc<Link>,
        channel: &Arc<Channel>,
        replaces: &mut u64,
        tell: oneshot::Sender<HandshakeOutcome>,
    ) -> bool {
        let (begin, mut tell, mut backoff) = (dray_rt::now(), Some(tell), BACKOFF_FIRST);
        loop {
            let failed = match self.connect_in_turn(channel, replaces, tell.take()).await {
                Ok(_) => return true,
                Err(None) => return false,
                Err(Some(failed)) => failed,
            };
            let wait = jittered(backoff);
            if !failed.refused || begin.elapsed() + wait > CROWDED_MAX {
                failed.report();
                return false;
            }
            tell = failed.tell;
            let _ = timeout(wait, poll_fn(|task| channel.poll_shut(task))).await; // given up, or not
            if !self.is_wanted() {
                return false;
            }
            backoff = (backoff * 2).min(BACKOFF_LAST);
        }
    }

    /// Connects the first channel of a process that takes over, and keeps it connected also if
    /// that does not go well at first. Answers the receiver of the first try's outcome.
    pub(crate) fn take_over(
        self: &Arc<Link>,
        channel: Arc<Channel>,
    ) -> oneshot::Receiver<HandshakeOutcome> {
        let (tell, outcome) = oneshot::channel();
        let _ = self.first.set(Arc::downgrade(&channel)); // a session is started once
        let link = self.clone();
        dray_rt::spawn(async move {
            let mut replaces = Proof::REPLACES_ALL;
            let tried = link.connect_in_turn(&channel, &mut replaces, Some(tell)).await;
            if let Err(Some(failed)) = tried {
                failed.report(); // `keep` says it
            }
            link.keep(channel, replaces).await;
        });
        outcome
    }

    /// Connects a further channel and keeps it connected.
    pub(crate) fn connect_another(self: &Arc<Link>, channel: Arc<Channel>) {
        dray_rt::spawn(self.clone().keep(channel, 0));
    }

    async fn keep(self: Arc<Link>, channel: Arc<Channel>, replaces: u64) {
        self.keep_connected(&channel, replaces).await;
        self.log_reconnected(self.outage.ended(key_of(&channel)));
    }

    /// Logs that an outage is over, if it is, and how long it `lasted`.
    pub(super) fn log_reconnected(&self, lasted: Option<Duration>) {
        if let Some(lasted) = lasted.filter(|_| self.is_wanted()) {
            let target = self.addresses.target();
            log::warn!("connected to {target} again after {:.1} s", lasted.as_secs_f64());
        }
    }

    /// Logs why the server cannot be reached, unless that was logged before.
    fn log_connect_failure(&self, refused: bool, error: &str) {
        if !self.is_wanted() {
            return;
        }
        self.outage.failed_for(error);
        let is_news = if refused { self.outage.refused() } else { self.outage.failed() };
        if is_news {
            log::warn!("{error}; trying again until it works");
        }
    }

    async fn keep_connected(self: &Arc<Link>, channel: &Arc<Channel>, mut replaces: u64) {
        let (mut backoff, mut away_since) = (BACKOFF_FIRST, dray_rt::now());
        loop {
            if self.leaving.load(Ordering::Relaxed) {
                return channel.shut();
            }
            if let Some(why) = self.end_by_server() {
                return channel.end_by_server(why);
            }
            // From before the try on, so that no welcome is missed.
            let mut reached = pin!(self.reached.notified());
            reached.as_mut().enable();
            let tried = match self.waits_for_first(channel) {
                true => Err(None),
                false => self.connect_in_turn(channel, &mut replaces, None).await,
            };
            // A server that took this connection and dropped it takes and drops others, too:
            // without waiting there would be no end to it.
            let heeds_others = tried.is_err();
            match tried {
                // The channel was made for a recovery that is over.
                Ok(_) if channel.is_shut() => return,
                Ok(ConnectionEnd { error, useful }) => {
                    let target = self.addresses.target();
                    if self.is_wanted() && self.outage.lost(key_of(channel)) {
                        log::warn!("lost the connection to {target}: {error}; connecting anew");
                    }
                    // A connection that a server drops as soon as it has it is no better than none.
                    if useful {
                        (backoff, away_since) = (BACKOFF_FIRST, dray_rt::now());
                    }
                }
                Err(Some(failed)) => {
                    let refused = failed.error.is_lasting();
                    self.log_connect_failure(refused, &failed.report());
                }
                Err(None) => {}
            }
            channel.expire();
            let wait = jittered(backoff);
            let woken = poll_fn(|task| {
                let reached = heeds_others && reached.as_mut().poll(task).is_ready();
                if channel.poll_shut(task).is_ready() || reached {
                    Poll::Ready(())
                } else {
                    Poll::Pending
                }
            });
            let _ = timeout(wait, woken).await; // or nothing happened
            if channel.is_shut() {
                return;
            }
            channel.expire();
            backoff = (backoff * 2).min(self.backoff_last(away_since.elapsed()));
        }
    }

    /// The longest wait between two tries while the server is `away`.
    fn backoff_last(&self, away: Duration) -> Duration {
        let soon = self.addresses.are_several() && away < TAKEOVER_MAX;
        if soon { BACKOFF_LAST_OF_SEVERAL } else { BACKOFF_LAST }
    }

    /// Whether the first channel has to come first. It ends the connections of a process before us,
    /// so that nothing from them arrives behind what we say on others.
    fn waits_for_first(&self, channel: &Arc<Channel>) -> bool {
        let first = self.first.get().is_some_and(|first| first.as_ptr() == Arc::as_ptr(channel));
        !first && !*self.met.borrow()
    }

    /// As [`Link::connect_once`], at each server of the session until one serves it. A server that serves it
    /// not, or not yet, costs no wait before the other one is tried.
    async fn connect_in_turn(
        self: &Arc<Link>,
        channel: &Arc<Channel>,
        replaces: &mut u64,
        mut tell: Option<oneshot::Sender<HandshakeOutcome>>,
    ) -> Result<ConnectionEnd, Option<ConnectFailure>> {
        let mut refusal: Option<ConnectFailure> = None;
        for address in self.addresses.round() {
            let mut failed =
                match self.connect_once(channel, (address, replaces), tell.take()).await {
                    Err(Some(failed)) => failed,
                    outcome => return outcome,
                };
            tell = failed.tell.take();
            // A refusal says more than that the other server is away.
            let says_more = refusal.as_ref().is_none_or(|before| !before.error.is_lasting());
            if says_more {
                refusal = Some(failed);
            }
            if !self.is_wanted() || channel.is_shut() {
                break;
            }
        }
        Err(refusal.map(|failed| ConnectFailure { tell, ..failed }))
    }

    /// A connection from its making to its end. `Err`: why it never served; none where another
    /// connection was only sooner. Sends the outcome of the handshake to `tell`.
    async fn connect_once(
        self: &Arc<Link>,
        channel: &Arc<Channel>,
        (address, replaces): (AddressIndex, &mut u64),
        tell: Option<oneshot::Sender<HandshakeOutcome>>,
    ) -> Result<ConnectionEnd, Option<ConnectFailure>> {
        let connector = self.addresses.connector(address);
        let unreachable = |error| ConnectError::Unreachable { target: connector.target(), error };
        let made = timeout(self.addresses.connect_max(), connector.connect()).await;
        let timed_out = |_| Err(io::Error::from_raw_os_error(libc::ETIMEDOUT));
        let connection = match made.unwrap_or_else(timed_out) {
            Ok(connection) => connection,
            Err(error) => {
                let error = unreachable(error);
                return Err(Some(ConnectFailure { error, refused: false, tell }));
            }
        };
        let (link, serves, on) = (self.clone(), channel.clone(), connection.clone());
        let mut sink = LinkSink::new(link, serves, (on, address), *replaces, tell);
        let error = match sink.say_hello() {
            Ok(()) => {
                let watched = Arc::downgrade(&connection);
                let limit = self.addresses.handshake_max();
                dray_rt::spawn(watch_handshake(watched, sink.settled(), limit));
                connection.run(&mut sink).await
            }
            Err(error) => error,
        };
        let silent = channel.down();
        let error = if silent { has_said_nothing() } else { error };
        *replaces = sink.number;
        if sink.is_serving() {
            return Ok(ConnectionEnd { error, useful: sink.useful });
        }
        if sink.is_declined() {
            return Err(None);
        }
        let refused = sink.has_heard_nothing() && is_hanging_up(&error);
        let error = sink.failure.unwrap_or_else(|| unreachable(error));
        if let Some(why) = self.ended_by(&error) {
            self.note_end(why);
        }
        Err(Some(ConnectFailure { error, refused, tell: sink.tell }))
    }

    /// Whether the session has come to its end with this refusal, and why.
    fn ended_by(&self, error: &ConnectError) -> Option<ServerEnd> {
        match error {
            ConnectError::Refused { errno: Errno::ESHUTDOWN, .. } => Some(ServerEnd::Evicted),
            ConnectError::Refused { errno: Errno::EREMCHG, .. }
            | ConnectError::Definition { .. } => {
                // A client that knew no definition may begin the session again, by the one that it was
                // given.
                let placed = self.server().session != 0 || self.options.definition != 0;
                placed.then_some(ServerEnd::Redefined)
            }
            ConnectError::Refused { .. }
            | ConnectError::Unreachable { .. }
            | ConnectError::Protocol(_) => None,
        }
    }
}

/// A session that is being begun. It is given up when this is dropped.
struct SessionStart(Option<(Arc<Link>, Arc<Channel>)>);

impl Drop for SessionStart {
    fn drop(&mut self) {
        if let Some((link, channel)) = self.0.take() {
            link.leaving.store(true, Ordering::Relaxed);
            channel.shut();
        }
    }
}

/// Why we ended a connection that was not broken.
fn has_said_nothing() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "it did not answer in time")
}

/// Whether the other end ended the connection.
fn is_hanging_up(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Ends a connection on which no handshake comes to an end. It keeps none that has ended, and
/// leaves no timer behind that would wake a mount without work.
async fn watch_handshake(
    connection: Weak<dyn Connection>,
    settled: oneshot::Receiver<()>,
    limit: Duration,
) {
    if timeout(limit, settled).await.is_err()
        && let Some(connection) = connection.upgrade()
    {
        connection.close();
    }
}

/// Distinguishes the channels of a link.
pub(super) fn key_of(channel: &Arc<Channel>) -> usize {
    Arc::as_ptr(channel) as usize
}
