//! The calls that are sent again on a new connection: all without an answer, in the order in which
//! they were first sent.
//!
//! A network may break each connection as soon as much is sent on it. If every connection began
//! with many one-way closes, nothing would ever come through, neither they nor what is behind them.
//! Therefore a few closes go first, as calls. The calls and closes behind them wait until they are
//! answered, or for a moment.

use std::sync::{Arc, Weak};
use std::time::Duration;

use dray_rt::sleep;

use super::pending::UnwantedFile;
use super::{Channel, Phase, State};
use crate::client::holdings::closes::PendingClose;

/// Closes that are sent again as calls before others wait for them.
const FEW: usize = 8;
/// How long these wait for a server that has answered none of them.
const WAIT_MAX: Duration = Duration::from_millis(100);

/// How many closes go out now.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseBatch {
    AFew,
    All,
}

/// A call or close that has no answer.
#[derive(Clone, Copy)]
enum Unanswered {
    Call(u32),
    Close(PendingClose),
}

impl State {
    /// Sends again what has no answer and was first sent as number `from` or behind that. The
    /// number of the first one that it leaves is noted in `rest_from`.
    pub(super) fn send_again(&mut self, from: u64, closes: CloseBatch) {
        self.rest_from = None;
        self.held_back.clear(); // they are among these
        if from == 0 {
            self.closes.connection_ends();
        }
        // Of few tags the most are left to others.
        let few = FEW.min(self.tags.max().div_ceil(4));
        let mut called = 0;
        for (number, what) in self.unanswered(from) {
            match what {
                Unanswered::Call(tag) => self.send_call_again(tag),
                Unanswered::Close(close) if closes == CloseBatch::All => self.send_close(close),
                Unanswered::Close(close) if called < few => {
                    called += usize::from(self.send_close_again((number, close)));
                }
                Unanswered::Close(_) => {
                    self.rest_from = Some(number);
                    return;
                }
            }
        }
    }

    /// From this number on, in the order of sending.
    fn unanswered(&self, from: u64) -> Vec<(u64, Unanswered)> {
        let calls = self.calls.iter().enumerate();
        let calls = calls.filter(|(_, pending)| pending.phase == Phase::Asked);
        let calls = calls.map(|(tag, pending)| (pending.number, Unanswered::Call(tag as u32)));
        let closes = self.closes.iter().map(|(number, close)| (number, Unanswered::Close(close)));
        let mut all: Vec<_> = closes.chain(calls).filter(|(number, _)| *number >= from).collect();
        all.sort_unstable_by_key(|(number, _)| *number);
        all
    }

    fn send_call_again(&mut self, tag: u32) {
        let pending = &mut self.calls[tag as usize];
        if pending.session != 0 {
            pending.resent = true;
            self.stats.resent += 1;
        }
        self.send(tag);
    }

    /// Whether what was first sent as `number` waits for closes to be answered.
    pub(super) fn waits_for_closes(&self, number: u64) -> bool {
        self.rest_from.is_some_and(|from| number >= from)
    }

    /// Sends what waits. Answers what calls may have opened for callers who went while they waited.
    fn send_rest(&mut self, closes: CloseBatch) -> Vec<UnwantedFile> {
        let Some(from) = self.rest_from else { return Vec::new() };
        let mut unwanted = Vec::new();
        for tag in 0..self.calls.len() as u32 {
            let pending = &mut self.calls[tag as usize];
            // Nobody will answer an abandoned call.
            if pending.phase == Phase::Abandoned && pending.number >= from {
                unwanted.push(pending.take_unwanted());
                self.release(tag);
            }
        }
        self.send_again(from, closes);
        unwanted
    }

    /// A close that other calls wait for was answered.
    pub(super) fn close_was_answered(&mut self) -> Vec<UnwantedFile> {
        if self.closes.any_called() { Vec::new() } else { self.send_rest(CloseBatch::AFew) }
    }
}

impl Channel {
    /// Sees to it that nothing waits for long.
    pub(super) fn send_rest_in_time(self: &Arc<Channel>) {
        let state = self.lock();
        let home = state.home.clone().filter(|_| state.rest_from.is_some());
        let connection = state.stats.connections;
        drop(state);
        if let Some(home) = home {
            home.spawn(send_rest(Arc::downgrade(self), connection));
        }
    }
}

/// Ends with the rest, or with the connection of this number.
async fn send_rest(channel: Weak<Channel>, connection: u64) {
    let mut seen = None;
    loop {
        sleep(WAIT_MAX).await;
        let Some(channel) = channel.upgrade() else { return };
        let mut state = channel.lock();
        if state.stats.connections != connection || state.rest_from.is_none() {
            return;
        }
        let waited = std::mem::replace(&mut seen, state.rest_from) == state.rest_from;
        let unwanted = if waited { state.send_rest(CloseBatch::All) } else { Vec::new() };
        drop(state);
        unwanted.into_iter().for_each(|one| channel.close_unwanted(one));
    }
}

#[cfg(test)]
mod tests {
    use dray_core::{Cancel, Context, Op};
    use dray_fabric::Sink;
    use dray_rt::{DriverKind, Executor, spawn};

    use super::*;
    use crate::client::channel::stalled_peer::StalledPeer;
    use crate::client::channel::{ConnectionEpoch, OutgoingCall, ReplyReceiver};
    use crate::client::holdings::closes::CloseMemory;
    use crate::client::memory::{CLOSES_MAX, SessionMemory};
    use crate::wire::{Call, ReplyHead};

    /// Noted closes of the handles from 1 to `closes`, and no connection yet.
    fn with_closes(closes: usize) -> Arc<Channel> {
        let closing = Arc::new(CloseMemory::new(Arc::new(SessionMemory::heap())));
        let channel = Channel::new(None, closing, Default::default(), 1);
        (1..=closes as u64).for_each(|handle| assert!(channel.close(handle)));
        channel
    }

    fn connect(channel: &Arc<Channel>) -> Arc<StalledPeer> {
        let wire = Arc::new(StalledPeer::default());
        channel.up(wire.clone(), (1, ConnectionEpoch::default()), (128, 64), true);
        wire
    }

    fn answer(channel: &Arc<Channel>, tag: u32, settles: bool) {
        let mut answer = Vec::new();
        ReplyHead { settled: settles, ..ReplyHead::success(tag) }.put_message(&mut answer);
        ReplyReceiver(channel.clone()).frame(&answer, None).unwrap();
    }

    fn unsettled(channel: &Channel) -> Vec<u64> {
        channel.lock().closes.iter().map(|(_, close)| close.handle).collect()
    }

    fn simulate(test: impl Future<Output = ()>) {
        Executor::new(DriverKind::Simulated { seed: 3 }).unwrap().block_on(test);
    }

    async fn ask_for_statfs(channel: &Arc<Channel>, cancel: Option<Arc<Cancel>>) {
        let channel = channel.clone();
        spawn(async move {
            let (cx, call) = (Context { cancel, ..Context::system() }, Call::Statfs {});
            let _ = channel.call(&mut OutgoingCall::of(&cx, &call), |_| Ok(())).await;
        });
        sleep(WAIT_MAX / 100).await;
    }

    /// Where every connection breaks before all closes have come through, none of them was ever
    /// settled, and what was behind them was never answered.
    // proves: P71
    #[test]
    fn each_connection_settles_some_of_the_closes_however_soon_it_breaks() {
        simulate(async {
            let channel = with_closes(CLOSES_MAX);
            for settled in 0..CLOSES_MAX {
                let wire = connect(&channel);
                assert_eq!(wire.sent(), vec![Op::Close; FEW.min(CLOSES_MAX - settled)]);
                let settles = settled % 2 == 0; // all that were sent before it: none
                answer(&channel, wire.tags()[0], settles);
                channel.down();
            }
            assert_eq!(unsettled(&channel), []);
        });
    }

    /// So it was where a connection broke under the weight of all that was sent again at once.
    #[test]
    fn what_is_behind_many_closes_is_sent_as_these_are_answered_and_in_order() {
        simulate(async {
            let channel = with_closes(2 * FEW);
            ask_for_statfs(&channel, None).await;
            let wire = connect(&channel);
            assert!(channel.close(100));
            ask_for_statfs(&channel, None).await;
            assert_eq!(wire.sent(), [Op::Close; FEW]);
            wire.tags().iter().for_each(|tag| answer(&channel, *tag, false));
            assert_eq!(wire.sent()[FEW..], [[Op::Close; FEW].as_slice(), &[Op::Statfs]].concat());
            wire.tags()[FEW..2 * FEW].iter().for_each(|tag| answer(&channel, *tag, false));
            let rest = [Op::Statfs, Op::Close, Op::Statfs];
            assert_eq!(wire.sent()[2 * FEW..], rest);
            sleep(2 * WAIT_MAX).await;
            assert_eq!(wire.sent().len(), 2 * FEW + rest.len(), "once");
            assert_eq!(unsettled(&channel), [100]);
            answer(&channel, wire.tags()[2 * FEW + 1], false);
            assert_eq!(unsettled(&channel), []);
        });
    }

    #[test]
    fn a_server_that_answers_no_close_hears_of_the_rest_all_the_same() {
        simulate(async {
            let channel = with_closes(CLOSES_MAX);
            ask_for_statfs(&channel, None).await;
            let wire = connect(&channel);
            assert_eq!(wire.sent().len(), FEW);
            sleep(3 * WAIT_MAX).await;
            assert_eq!(wire.sent().len(), CLOSES_MAX + 1);
            assert_eq!(wire.tags().len(), FEW + 1);
            assert_eq!(channel.stats().resent, 0, "it was sent once");
        });
    }

    /// A call that was not sent gets no answer: its tag would have been out of use.
    #[test]
    fn a_call_given_up_behind_closes_is_not_sent() {
        simulate(async {
            let channel = with_closes(FEW + 1);
            let cancel = Arc::new(Cancel::default());
            ask_for_statfs(&channel, Some(cancel.clone())).await;
            let wire = connect(&channel);
            cancel.set();
            sleep(WAIT_MAX / 100).await;
            wire.tags().into_iter().for_each(|tag| answer(&channel, tag, false));
            assert_eq!(wire.sent(), [Op::Close; FEW + 1]);
            answer(&channel, wire.tags()[FEW], false);
            assert!(channel.rests());
        });
    }

    /// A close that is called is carried out beside others; a connection that breaks gives it up.
    /// Such a close passed for settled with the first answer to anything, and the file stayed open.
    #[test]
    fn a_close_that_is_called_is_settled_by_its_own_answer_alone() {
        simulate(async {
            let channel = with_closes(3);
            let wire = connect(&channel);
            answer(&channel, wire.tags()[2], true);
            assert_eq!(unsettled(&channel), [1, 2]);
        });
    }
}
