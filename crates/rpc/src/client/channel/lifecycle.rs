//! The lifecycle of a channel: connections begin and end, and at last the channel ends.

use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

use dray_core::{Errno, Error};
use dray_fabric::Connection;
use dray_rt::ExecutorHandle;

use super::pending::UnwantedFile;
use super::resend::CloseBatch;
use super::{Channel, ConnectionEpoch, Phase, State};
use crate::client::link::ServerEnd;

/// Why a channel is over.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ChannelEnd {
    /// By us.
    Shut,
    /// By the server.
    ByServer(ServerEnd),
}

impl ChannelEnd {
    fn errno(self) -> Errno {
        match self {
            ChannelEnd::Shut => Errno::ENOTCONN,
            ChannelEnd::ByServer(_) => Errno::ESHUTDOWN,
        }
    }
}

impl Channel {
    /// A connection is up: identities are unknown to it, and calls without an answer are sent again
    /// in the order of their sending. If the server has given up the session in which they were
    /// sent, the outcome of changes is unknown, and they fail. The `epoch` is that of the server.
    /// With `one_way`, the server takes closes without an answer.
    pub(crate) fn up(
        self: &Arc<Channel>,
        connection: Arc<dyn Connection>,
        (session, epoch): (u64, ConnectionEpoch),
        (calls_max, slots): (u32, u32),
        one_way: bool,
    ) {
        let mut state = self.lock();
        if state.ended.is_some() {
            return connection.close(); // while it was being made
        }
        state.session = session;
        state.one_way_allowed = one_way;
        let power_lost =
            std::mem::replace(&mut state.epoch, epoch).power_epoch != epoch.power_epoch;
        state.connection = Some(connection);
        state.home = Some(ExecutorHandle::current());
        state.down_since = None;
        state.hear();
        state.tags.grant(calls_max, slots);
        state.identities.forget_all();
        state.stats.connections += 1;
        let unwanted = state.drop_lost(slots, power_lost);
        let memory = self.closing.memory();
        state.slots_asked_in().for_each(|slot| memory.keep_slot(slot));
        state.send_again(0, CloseBatch::AFew);
        state.wake_callers(); // callers that have given up say so again
        state.tags.wake_all();
        drop(state);
        unwanted.into_iter().for_each(|one| self.close_unwanted(one));
        self.send_rest_in_time();
        self.start_closers();
    }

    /// The connection is gone. True if it was ended because the server said nothing.
    pub(crate) fn down(&self) -> bool {
        let mut state = self.lock();
        state.connection = None;
        state.watcher.take().into_iter().for_each(Waker::wake);
        let silent = state.silent_since.is_some();
        let since = state.away_since();
        state.down_since.get_or_insert(since);
        state.wake_callers(); // callers that have given up need not wait for the server
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
        self.end(ChannelEnd::Shut);
    }

    /// The same because the server has ended the session for good.
    pub(crate) fn end_by_server(&self, why: ServerEnd) {
        self.end(ChannelEnd::ByServer(why));
    }

    fn end(&self, why: ChannelEnd) {
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
            Some(ChannelEnd::Shut) => {
                return Some(Error::retry(Errno::ENOTCONN).because("the mount is being ended"));
            }
            Some(ChannelEnd::ByServer(why)) => {
                let error = Error::new(Errno::ESHUTDOWN);
                return Some(error.because(match why {
                    ServerEnd::Evicted => "the mount was evicted: unmount, and mount again",
                    ServerEnd::Redefined => {
                        "the definition of the projection has changed: unmount, and mount again"
                    }
                }));
            }
            None => {}
        }
        let down = self.down_since?.elapsed();
        (timeout.is_some_and(|timeout| down >= timeout)).then(|| {
            Error::retry(Errno::EHOSTDOWN)
                .because("the server has been away for longer than the mount's timeout")
        })
    }

    /// Fails the calls that may not be sent again, and frees the tags of those that nobody
    /// waits for. Answers the files that these may have opened.
    fn drop_lost(&mut self, slots: u32, power_lost: bool) -> Vec<UnwantedFile> {
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
}

#[cfg(test)]
mod tests {
    use dray_core::{Context, Op};
    use dray_rt::{DriverKind, Executor, spawn_join};

    use super::*;
    use crate::client::channel::stalled_peer::StalledPeer;
    use crate::client::channel::{CallFailure, OutgoingCall};
    use crate::client::holdings::closes::CloseMemory;
    use crate::client::memory::SessionMemory;
    use crate::wire::Call;

    /// Calls that waited on one connection went out while another one reclaimed the locks of a
    /// session that the server had forgotten. A caller that had lost its lock wrote.
    // proves: P74
    #[test]
    fn what_waited_for_one_session_is_not_sent_in_the_next() {
        Executor::new(DriverKind::Simulated { seed: 3 }).unwrap().block_on(async {
            for (next, sent) in [(1, vec![Op::Read]), (2, vec![])] {
                let closing = Arc::new(CloseMemory::new(Arc::new(SessionMemory::heap())));
                let channel = Channel::new(None, closing, Default::default(), 1);
                let (cx, wire) = (Context::system(), Arc::new(StalledPeer::default()));
                let asks = channel.clone();
                let reader = spawn_join(async move {
                    let call = Call::Read { handle: 5, at: 0, len_bytes: 1 };
                    let mut ask = OutgoingCall { looked_at: true, ..OutgoingCall::of(&cx, &call) };
                    let outcome = asks.call(&mut ask, |_| Ok(())).await;
                    assert!(matches!(outcome, Err((CallFailure::UnknownHandle, _))));
                });
                dray_rt::yield_now().await;
                channel.up(wire.clone(), (next, ConnectionEpoch::default()), (8, 8), true);
                assert_eq!(wire.sent(), sent);
                if next == 2 {
                    reader.await.unwrap();
                }
            }
        });
    }
}
