//! A channel: the calls under way on one connection, and on the connections that follow it.

mod call;
mod deferred_close;
mod identities;
mod lifecycle;
mod one_way;
mod pending;
mod receiver;
mod resend;
#[cfg(test)]
pub(crate) mod stalled_peer;
mod tags;
mod unresponsive;
mod waiting;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::time::Duration;

use dray_core::NodeId;
use dray_fabric::Connection;
use dray_rt::{ExecutorHandle, Instant};

pub(crate) use self::call::{CallAnswer, CallFailure, OutgoingCall, ReplyInfo, error_of, value_of};
use self::deferred_close::DeferredCloses;
use self::identities::IdentityNumbers;
use self::lifecycle::ChannelEnd;
use self::pending::{PendingCall, Phase};
pub(crate) use self::receiver::ReplyReceiver;
use self::tags::Tags;
pub(crate) use self::waiting::LockWait;
use crate::client::holdings::closes::{CloseMemory, PendingClose, UnsettledCloses};
use crate::client::leases::LeasedAnswers;
use crate::client::link::SessionState;
use crate::client::open_ahead::RightsChanges;

/// Which server a connection leads to, and since when.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConnectionEpoch {
    /// The epoch of the server's machine.
    pub(crate) power_epoch: u64,
    /// The epoch of the server's process, and our session there.
    pub(crate) session_state: SessionState,
}

/// Where changes are noted while they are on their way.
#[derive(Clone, Default)]
pub(crate) struct ChangeNotes {
    /// Changes of rights.
    pub(crate) rights: Arc<RightsChanges>,
    /// Changes of what may be leased.
    pub(crate) leases: LeasedAnswers,
}

/// Sends calls and hands out their answers.
pub(crate) struct Channel {
    timeout: Option<Duration>,
    closing: Arc<CloseMemory>,
    notes: ChangeNotes,
    /// The calls of this channel are part of a replay.
    replays: bool,
    me: Weak<Channel>,
    state: Mutex<State>,
}

struct State {
    connection: Option<Arc<dyn Connection>>,
    /// The connection epoch that the connection leads to.
    epoch: ConnectionEpoch,
    /// No connection since then; calls fail once this is longer ago than the timeout.
    down_since: Option<Instant>,
    /// Answers and connections so far. While it stays the same, the server says nothing.
    heard: u64,
    /// The time that counts as the beginning of the server's absence when this connection ends.
    silent_since: Option<Instant>,
    ended: Option<ChannelEnd>,
    calls: Vec<PendingCall>,
    tags: Tags,
    /// The session that the connection belongs to.
    session: u64,
    /// The node of this client.
    node: NodeId,
    identities: IdentityNumbers,
    closes: UnsettledCloses,
    /// The server takes closes without an answer.
    one_way_allowed: bool,
    /// The closes that wait for a message to go out with.
    held_back: Vec<PendingClose>,
    /// Messages from this number on wait until closes that were sent again are answered.
    rest_from: Option<u64>,
    /// The other closes, which must be called.
    deferred: DeferredCloses,
    /// A task sees to it that they do not wait for long.
    closer: bool,
    /// Where that task runs: with the connection, whichever thread closes.
    home: Option<ExecutorHandle>,
    /// Number of the message sent last.
    sent: u64,
    /// Where closes are encoded.
    one_way: Vec<u8>,
    stats: ChannelStats,
    /// Wakes who watches for silence when there is a call to be answered, or the connection is gone.
    watcher: Option<Waker>,
    /// Wakes the link's task when the channel is shut.
    link: Option<Waker>,
    /// Wakers of callers that wait for abandoned lock calls to end.
    unsettled: Vec<Waker>,
}

/// Counters of one channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelStats {
    /// Connected now.
    pub up: bool,
    /// Connections made.
    pub connections: u64,
    /// Calls sent; each is one round trip.
    pub calls: u64,
    /// Closes sent that no answer was waited for.
    pub one_way: u64,
    /// Calls sent again after a reconnection.
    pub resent: u64,
    /// Calls under way now.
    pub in_flight: u64,
}

impl Channel {
    pub(crate) fn new(
        timeout: Option<Duration>,
        closing: Arc<CloseMemory>,
        notes: ChangeNotes,
        session: u64,
    ) -> Arc<Channel> {
        let channel = Channel::with(timeout, closing, notes, false);
        channel.lock().session = session;
        channel
    }

    /// A channel whose calls do not wait for the end of a replay: they are part of it.
    pub(crate) fn for_replay(closing: Arc<CloseMemory>, leases: LeasedAnswers) -> Arc<Channel> {
        // This channel sends answered changes again, before anything else is asked.
        let notes = ChangeNotes { leases, ..ChangeNotes::default() };
        Channel::with(None, closing, notes, true)
    }

    /// Whether it ends with the replay that it was made for.
    pub(crate) fn is_for_replay(&self) -> bool {
        self.replays
    }

    fn with(
        timeout: Option<Duration>,
        closing: Arc<CloseMemory>,
        notes: ChangeNotes,
        replays: bool,
    ) -> Arc<Channel> {
        let node = closing.memory().drawn_node();
        Arc::new_cyclic(|me| Channel {
            me: me.clone(),
            timeout,
            closing,
            notes,
            replays,
            state: Mutex::new(State {
                connection: None,
                epoch: ConnectionEpoch::default(),
                down_since: Some(dray_rt::now()),
                heard: 0,
                silent_since: None,
                ended: None,
                calls: Vec::new(),
                tags: Tags::new(),
                session: 0,
                node,
                identities: IdentityNumbers::default(),
                closes: UnsettledCloses::default(),
                one_way_allowed: false,
                held_back: Vec::new(),
                rest_from: None,
                deferred: DeferredCloses::default(),
                closer: false,
                home: None,
                sent: 0,
                one_way: Vec::new(),
                stats: ChannelStats::default(),
                watcher: None,
                link: None,
                unsettled: Vec::new(),
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is connected, and no call is under way on it.
    pub(crate) fn rests(&self) -> bool {
        let state = self.lock();
        state.connection.is_some() && state.tags.are_all_free()
    }

    pub(crate) fn stats(&self) -> ChannelStats {
        let state = self.lock();
        let in_flight = state.calls.iter().filter(|call| call.phase == Phase::Asked).count();
        ChannelStats { up: state.connection.is_some(), in_flight: in_flight as u64, ..state.stats }
    }
}
