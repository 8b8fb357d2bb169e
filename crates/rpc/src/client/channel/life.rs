//! A channel's connections as they come and go, and its end.

use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

use dray_core::{Errno, Error};
use dray_fabric::Connection;
use dray_rt::Handle;

use super::pending::Unwanted;
use super::{Channel, Life, Phase, State};

/// How many of the closes that are sent again on a new connection are to be answered, the first
/// ones. Where connections break before all of them have come through, some are settled by each.
const CLOSES_ANSWERED_MAX: usize = 8;

/// Why a channel is over.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// By us.
    Shut,
    /// By the server's administrator.
    Evicted,
}

impl End {
    fn errno(self) -> Errno {
        match self {
            End::Shut => Errno::ENOTCONN,
            End::Evicted => Errno::ESHUTDOWN,
        }
    }
}

impl Channel {
    /// A connection is up: identities are unknown to it, and calls without an answer are
    /// sent again in the order of their sending. If the server has given up the session in
    /// which they were sent, nobody knows what came of changes, and they fail. `life`: of
    /// the server; `one_way`: the server takes closes that nobody waits for.
    pub(crate) fn up(
        self: &Arc<Channel>,
        connection: Arc<dyn Connection>,
        (session, life): (u64, Life),
        (calls_max, slots): (u32, u32),
        one_way: bool,
    ) {
        let mut state = self.lock();
        if state.ended.is_some() {
            return connection.close(); // while it was being made
        }
        state.session = session;
        state.one_way_allowed = one_way;
        let power_lost = std::mem::replace(&mut state.life, life).epoch != life.epoch;
        state.connection = Some(connection);
        state.home = Some(Handle::current());
        state.down_since = None;
        state.hear();
        state.tags.grant(calls_max, slots);
        state.identities.forget_all();
        state.stats.connections += 1;
        let unwanted = state.drop_lost(slots, power_lost);
        let memory = self.closing.memory();
        state.slots_asked_in().for_each(|slot| memory.keep_slot(slot));
        state.send_again();
        state.wake_callers(); // who has given up says so again
        state.tags.wake_all();
        drop(state);
        unwanted.into_iter().for_each(|one| self.close_unwanted(one));
        self.start_closers();
    }

    /// The connection is gone. True if it was ended because the server said nothing.
    pub(crate) fn down(&self) -> bool {
        let mut state = self.lock();
        state.connection = None;
        let silent = state.silent_since.is_some();
        let since = state.away_since();
        state.down_since.get_or_insert(since);
        state.wake_callers(); // who has given up need not wait for the server's return
        silent
    }

    /// Fails what has waited for the server too long. Answers whether that was so.
    pub(crate) fn expire(&self) -> bool {
        let mut state = self.lock();
        let Some(error) = state.refusal(self.timeout) else { return false };
        state.fail_all(error.errno());
        true
    }

    /// Ends the channel: calls under way fail.
    pub(crate) fn shut(&self) {
        self.end(End::Shut);
    }

    /// The same because the server will not have us any more.
    pub(crate) fn evict(&self) {
        self.end(End::Evicted);
    }

    fn end(&self, why: End) {
        let mut state = self.lock();
        let why = *state.ended.get_or_insert(why);
        state.fail_all(why.errno());
        state.send_held_back();
        if let Some(connection) = &state.connection {
            connection.close();
        }
        state.link.take().into_iter().for_each(Waker::wake);
        state.unsettled.drain(..).for_each(Waker::wake);
    }

    /// Whether it was shut.
    pub(crate) fn is_shut(&self) -> bool {
        self.lock().ended.is_some()
    }

    /// Whether it was shut; `task` is woken when that happens.
    pub(crate) fn poll_shut(&self, task: &mut TaskContext<'_>) -> Poll<()> {
        let mut state = self.lock();
        state.link = Some(task.waker().clone());
        if state.ended.is_some() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl State {
    /// Why no call can be made now, if so.
    pub(super) fn refusal(&self, timeout: Option<Duration>) -> Option<Error> {
        match self.ended {
            Some(End::Shut) => {
                return Some(Error::retry(Errno::ENOTCONN).because("the mount is being ended"));
            }
            Some(End::Evicted) => {
                let error = Error::new(Errno::ESHUTDOWN);
                return Some(error.because("the mount was evicted: unmount, and mount again"));
            }
            None => {}
        }
        let down = self.down_since?.elapsed();
        (timeout.is_some_and(|timeout| down >= timeout)).then(|| {
            Error::retry(Errno::EHOSTDOWN)
                .because("the server has been away for longer than the mount's limit")
        })
    }

    /// Fails the calls that may not be sent again, and frees the tags of those that nobody
    /// waits for. Answers the files that these may have opened.
    fn drop_lost(&mut self, slots: u32, power_lost: bool) -> Vec<Unwanted> {
        let mut unwanted = Vec::new();
        for tag in 0..self.calls.len() as u32 {
            let pending = &mut self.calls[tag as usize];
            match pending.phase {
                Phase::Asked if pending.is_lost(self.session, slots, power_lost) => {
                    self.fail(tag, Errno::EIO);
                }
                Phase::Abandoned => {
                    unwanted.push(pending.take_unwanted());
                    self.release(tag);
                }
                _ => {}
            }
        }
        unwanted
    }

    /// The replay slots of what is sent again.
    fn slots_asked_in(&self) -> impl Iterator<Item = u32> {
        let asked = self.calls.iter().filter(|pending| pending.phase == Phase::Asked);
        asked.filter_map(|pending| pending.slot)
    }

    /// Sends again what has no answer, closes too, in the order of its first sending.
    fn send_again(&mut self) {
        self.held_back.clear(); // they are among these
        self.closes.connection_ends();
        let mut again: Vec<_> =
            self.closes.iter().map(|(number, close)| (number, Err(close))).collect();
        for (tag, pending) in self.calls.iter().enumerate() {
            if pending.phase == Phase::Asked {
                again.push((pending.number, Ok(tag as u32)));
            }
        }
        again.sort_unstable_by_key(|(number, _)| *number);
        // Of few tags the most are left to others.
        let mut answered = CLOSES_ANSWERED_MAX.min(self.tags.max().div_ceil(4));
        for (number, what) in again {
            match what {
                Ok(tag) => {
                    self.stats.resent += 1;
                    self.calls[tag as usize].resent = true;
                    self.send(tag);
                }
                Err(close) => {
                    self.send_close_again((number, close), answered > 0);
                    answered = answered.saturating_sub(1);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use dray_core::{Context, Op};
    use dray_fabric::Sink;
    use dray_rt::{DriverKind, Executor, spawn_join};

    use super::*;
    use crate::client::channel::deaf::Deaf;
    use crate::client::channel::{Ask, Failure, Receiver};
    use crate::client::holdings::closing::Closing;
    use crate::client::memory::{CLOSES_MAX, SessionMemory};
    use crate::wire::{Call, ReplyHead};

    /// What waited for the server on one connection went out while another one claimed the locks
    /// of a session that the server had forgotten: a write was made by who had lost its lock.
    #[test]
    fn what_waited_for_one_session_is_not_sent_in_the_next() {
        Executor::new(DriverKind::Simulated { seed: 3 }).unwrap().block_on(async {
            for (next, sent) in [(1, vec![Op::Read]), (2, vec![])] {
                let closing = Arc::new(Closing::new(Arc::new(SessionMemory::heap())));
                let channel = Channel::new(None, closing, Arc::default(), 1);
                let (cx, wire) = (Context::system(), Arc::new(Deaf::default()));
                let asks = channel.clone();
                let reader = spawn_join(async move {
                    let call = Call::Read { handle: 5, at: 0, len_bytes: 1 };
                    let ask = Ask { looked_at: true, ..Ask::of(&cx, &call) };
                    let outcome = asks.call(ask, |_| Ok(())).await;
                    assert!(matches!(outcome, Err((Failure::UnknownHandle, _))));
                });
                dray_rt::yield_now().await;
                channel.up(wire.clone(), (next, Life::default()), (8, 8), true);
                assert_eq!(wire.sent(), sent);
                if next == 2 {
                    reader.await.unwrap();
                }
            }
        });
    }

    /// Where every connection breaks before all closes have come through, none of them was ever
    /// settled, and what was behind them was never answered.
    #[test]
    fn each_connection_settles_some_of_the_closes_however_soon_it_breaks() {
        Executor::new(DriverKind::Simulated { seed: 3 }).unwrap().block_on(async {
            let closing = Arc::new(Closing::new(Arc::new(SessionMemory::heap())));
            let channel = Channel::new(None, closing, Arc::default(), 1);
            (1..=CLOSES_MAX as u64).for_each(|handle| assert!(channel.close(handle)));
            for settled in 0..CLOSES_MAX {
                let wire = Arc::new(Deaf::default());
                channel.up(wire.clone(), (1, Life::default()), (128, 64), true);
                assert_eq!(wire.sent(), vec![Op::Close; CLOSES_MAX - settled]);
                let (tag, mut answer) = (wire.tags()[0], Vec::new());
                ReplyHead::success(tag).put_message(&mut answer);
                let settles = settled % 2 == 0; // all that were sent before it: none
                ReplyHead::address(&mut answer, tag, settles);
                Receiver(channel.clone()).frame(&answer, None).unwrap();
                channel.down();
            }
            assert_eq!(channel.lock().closes.iter().count(), 0);
        });
    }

    /// What is called is carried out beside others; a connection that breaks gives it up. It
    /// passed for settled with the first answer to anything, and the file stayed open.
    #[test]
    fn a_close_that_is_called_is_settled_by_its_own_answer_alone() {
        Executor::new(DriverKind::Simulated { seed: 3 }).unwrap().block_on(async {
            let closing = Arc::new(Closing::new(Arc::new(SessionMemory::heap())));
            let channel = Channel::new(None, closing, Arc::default(), 1);
            (1..=3).for_each(|handle| assert!(channel.close(handle)));
            let wire = Arc::new(Deaf::default());
            channel.up(wire.clone(), (1, Life::default()), (128, 64), true);
            let mut answer = Vec::new();
            ReplyHead::success(0).put_message(&mut answer);
            ReplyHead::address(&mut answer, wire.tags()[2], true);
            Receiver(channel.clone()).frame(&answer, None).unwrap();
            let left: Vec<_> =
                channel.lock().closes.iter().map(|(_, close)| close.handle).collect();
            assert_eq!(left, [1, 2]);
        });
    }
}
