//! Deferred closes: there was no place for them among the closes that are sent one way.
//!
//! A few at a time are sent as calls. Each answer settles the one-way closes before it, too, and
//! makes places for more. Such a call is not given up while the server may still answer it.
//! Repeated beside itself it would only delay everything else.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use dray_core::{Context, Fate};
use dray_rt::sleep;

use super::pending::UnwantedFile;
use super::{Channel, OutgoingCall, value_of};
use crate::wire::{Call, Input};

/// Calls under way at a time.
const CLOSERS_MAX: usize = 8;
/// After the server was away.
const CLOSE_AGAIN: Duration = Duration::from_millis(500);

/// The deferred closes of one channel. As many at most as a server has opened for us.
#[derive(Default)]
pub(super) struct DeferredCloses {
    handles: VecDeque<u64>,
    /// Tasks that make them.
    closers: usize,
}

impl Channel {
    /// Closes the file that a call may have opened for a caller that gave up.
    pub(super) fn close_unwanted(
        self: &Arc<Channel>,
        UnwantedFile { handle, noted }: UnwantedFile,
    ) {
        if handle == 0 {
            return;
        }
        let mut closed = self.close(handle);
        if let Some(noted) = noted {
            self.closing.forget(noted);
            closed = closed || self.close(handle); // in that place
        }
        if !closed {
            self.close_later(handle);
        }
    }

    /// Closes it once there is a place for it, or by a call: a mount that rests makes no other.
    /// Until then this process alone knows of it.
    pub(crate) fn close_later(self: &Arc<Channel>, handle: u64) {
        self.lock().deferred.handles.push_back(handle);
        self.start_closers();
    }

    /// Before the first connection there is nobody to ask: that starts them.
    pub(super) fn start_closers(self: &Arc<Channel>) {
        let mut state = self.lock();
        let Some(home) = state.home.clone() else { return };
        let more = state.deferred.handles.len().min(CLOSERS_MAX - state.deferred.closers);
        state.deferred.closers += more;
        drop(state);
        for _ in 0..more {
            home.spawn(close_queued(Arc::downgrade(self)));
        }
    }

    /// The next one; none for a closer that is needed no more.
    fn next_to_close(&self) -> Option<u64> {
        let mut state = self.lock();
        if state.ended.is_some() {
            state.deferred.handles.clear();
        }
        let next = state.deferred.handles.pop_front();
        state.deferred.closers -= usize::from(next.is_none());
        next
    }

    async fn close_in_any_way(self: &Arc<Channel>, handle: u64) {
        let (cx, call) = (Context::system(), Call::Close { handle });
        while !self.is_shut() && !self.close(handle) {
            let mut ask = OutgoingCall { patient: true, ..OutgoingCall::of(&cx, &call) };
            let closed = self.call(&mut ask, |bytes| Input::whole::<()>(bytes)).await;
            let is_open = value_of(closed).is_err_and(|error| error.fate() != Fate::Final);
            if !is_open {
                return;
            }
            sleep(CLOSE_AGAIN).await;
        }
    }
}

async fn close_queued(channel: Weak<Channel>) {
    while let Some(channel) = channel.upgrade()
        && let Some(handle) = channel.next_to_close()
    {
        channel.close_in_any_way(handle).await;
    }
}

#[cfg(test)]
mod tests {
    use dray_core::{FileId, Op, OpenHow};
    use dray_rt::{DriverKind, Executor};

    use super::*;
    use crate::client::channel::ConnectionEpoch;
    use crate::client::channel::stalled_peer::StalledPeer;
    use crate::client::holdings::closes::CloseMemory;
    use crate::client::memory::{CLOSES_MAX, SessionMemory};

    fn simulate(test: impl Future<Output = ()>) {
        Executor::new(DriverKind::Simulated { seed: 7 }).unwrap().block_on(test);
    }

    /// Closes for which there was no place left their files open as long as the mount. Later such
    /// files stayed open as long as nobody used the mount: no answer came to settle the closes that
    /// had all places.
    // proves: P72
    #[test]
    fn files_opened_without_a_caller_are_closed_however_many() {
        simulate(async {
            let closing = Arc::new(CloseMemory::new(Arc::new(SessionMemory::heap())));
            let channel = Channel::new(None, closing, Default::default(), 0);
            let wire = Arc::new(StalledPeer::default());
            channel.up(wire.clone(), (1, ConnectionEpoch::default()), (8, 8), true);
            (1..=CLOSES_MAX as u64).for_each(|handle| assert!(channel.close(handle)));
            assert!(!channel.close(99));
            channel.close_unwanted(UnwantedFile { handle: 100, noted: None });
            sleep(2 * CLOSE_AGAIN).await;
            assert_eq!(wire.sent(), [Op::Close; CLOSES_MAX + 1], "one of them by a call");
        });
    }

    /// Closes that failed because the server was away left their files open as long as the mount.
    /// That happened where there was no place, or where the server came back before the callers had
    /// heard of the failure.
    // proves: P70
    #[test]
    fn what_failed_and_may_have_been_opened_is_closed_however_much_there_is_to_close() {
        const LIMIT: Duration = Duration::from_secs(2);
        for (closes, back_first) in [(0, false), (0, true), (CLOSES_MAX, false)] {
            simulate(async {
                let closing = Arc::new(CloseMemory::new(Arc::new(SessionMemory::heap())));
                let channel = Channel::new(Some(LIMIT), closing, Default::default(), 0);
                channel.up(
                    Arc::new(StalledPeer::default()),
                    (1, ConnectionEpoch::default()),
                    (8, 8),
                    true,
                );
                let (asks, cx) = (channel.clone(), Context::system());
                let opening = dray_rt::spawn_join(async move {
                    let (id, how) = (FileId { ino: 1, generation: 1 }, OpenHow::READ);
                    let call = Call::Open { id, how, handle: 100, again: false };
                    asks.call(&mut OutgoingCall::of(&cx, &call), |_| Ok(())).await.is_ok()
                });
                dray_rt::yield_now().await;
                (1..=closes as u64).for_each(|handle| assert!(channel.close(handle)));
                channel.down();
                while !channel.expire() {
                    sleep(LIMIT / 4).await;
                }
                let wire = Arc::new(StalledPeer::default());
                let back =
                    || channel.up(wire.clone(), (1, ConnectionEpoch::default()), (8, 8), true);
                if back_first {
                    back();
                }
                assert!(!opening.await.unwrap());
                if !back_first {
                    back();
                }
                sleep(2 * CLOSE_AGAIN).await;
                assert_eq!(wire.sent(), vec![Op::Close; closes + 1], "{back_first}");
            });
        }
    }

    /// Closes without an answer were asked for again with every limit, each beside the one before
    /// it. In the end there was no tag for any other call.
    #[test]
    fn a_server_that_answers_nothing_is_asked_once_for_each_of_a_few() {
        const LIMIT: Duration = Duration::from_millis(300);
        simulate(async {
            let closing = Arc::new(CloseMemory::new(Arc::new(SessionMemory::heap())));
            let channel = Channel::new(Some(LIMIT), closing, Default::default(), 0);
            let wire = Arc::new(StalledPeer::default());
            channel.up(wire.clone(), (1, ConnectionEpoch::default()), (128, 64), true);
            for handle in 1..=(CLOSES_MAX + 2 * CLOSERS_MAX) as u64 {
                channel.close_unwanted(UnwantedFile { handle, noted: None });
            }
            sleep(20 * CLOSE_AGAIN).await;
            assert_eq!(wire.sent().len(), CLOSES_MAX + CLOSERS_MAX);
            channel.shut();
            sleep(2 * CLOSE_AGAIN).await;
            assert_eq!(channel.lock().deferred.closers, 0);
        });
    }

    /// Before the first connection, too: a process after one that died had no place for them.
    #[test]
    fn what_must_be_closed_before_the_first_connection_is_closed_with_it() {
        simulate(async {
            let closing = Arc::new(CloseMemory::new(Arc::new(SessionMemory::heap())));
            let channel = Channel::new(None, closing, Default::default(), 1);
            for handle in 1..=CLOSES_MAX as u64 + 1 {
                channel.close_unwanted(UnwantedFile { handle, noted: None });
            }
            let wire = Arc::new(StalledPeer::default());
            channel.up(wire.clone(), (1, ConnectionEpoch::default()), (128, 64), true);
            sleep(CLOSE_AGAIN).await;
            assert_eq!(wire.sent(), [Op::Close; CLOSES_MAX + 1]);
        });
    }
}
