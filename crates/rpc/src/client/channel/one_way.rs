//! Messages that are not answered: notifications, and closes, which are kept until they are known
//! to be done.
//!
//! No caller waits for a close. It goes out with the next message, or alone if there is none for a
//! moment. So it does not wake the server for nothing (docs/adr/0016-small-operations.md).

use std::sync::{Arc, Weak};
use std::time::Duration;

use dray_core::{CallersJob, Context, FileId, Pid, RequestId};
use dray_rt::sleep;

use super::identities::CallerAtNode;
use super::tags::TagClass;
use super::{Channel, OutgoingCall, Phase, State};
use crate::client::holdings::closes::PendingClose;
use crate::client::link::SessionState;
use crate::wire::{Call, CallHead, NO_SLOT, NotifyHead, RecallMessage, Wire, put_jobs};

/// How long a close waits for a message to go out with. Longer than the kernel's tick (1 to
/// 4 ms): a thread that goes on waiting for events need not program the clock for it.
const HELD_BACK_MAX: Duration = Duration::from_millis(5);

impl Channel {
    /// Closes an open file without waiting for it. False if that cannot be kept until it
    /// is known to be done: then it must be called.
    pub(crate) fn close(self: &Arc<Channel>, handle: u64) -> bool {
        let mut state = self.lock();
        // Before the first connection the features are unknown: closes noted by then go out as that
        // server takes them.
        let allowed = state.one_way_allowed || state.stats.connections == 0;
        if state.ended.is_some() || !allowed {
            return false;
        }
        let Some(close) = self.closing.note(handle) else { return false };
        state.stats.one_way += 1;
        state.close(close);
        // Before the first connection there is nobody to wait for it: that sends it.
        let home = state.home.clone().filter(|_| !state.closer);
        state.closer |= home.is_some();
        drop(state);
        if let Some(home) = home {
            home.spawn(send_held_back(Arc::downgrade(self)));
        }
        true
    }

    /// Sends the closes that wait for a message to go out with.
    pub(crate) fn send_closes(&self) {
        let mut state = self.lock();
        if state.held_back.is_empty() {
            return;
        }
        state.send_held_back();
        let connection = state.connection.clone();
        drop(state);
        if let Some(connection) = connection {
            connection.flush();
        }
    }

    /// Closes, once there is a connection, what a process before us had open. False if too many
    /// closes are noted already.
    pub(crate) fn close_noted(&self, handle: u64) -> bool {
        let close = self.closing.note(handle);
        let noted = close.is_some();
        close.into_iter().for_each(|close| self.lock().close(close));
        noted
    }

    /// Closes what the process before us had closed, perhaps in vain.
    pub(crate) fn inherit(&self) {
        let mut state = self.lock();
        self.closing.inherited().into_iter().for_each(|close| state.close(close));
        state.send_held_back();
    }

    /// Notifies the server of something that needs no answer, if there is a connection.
    pub(crate) fn notify(&self, what: u8, tag: u32) {
        let mut state = self.lock();
        state.send_held_back();
        let connection = state.connection.clone();
        drop(state);
        if let Some(connection) = connection {
            let mut message = Vec::new();
            NotifyHead { what, flags: 0, tag }.put_message(&mut message);
            let _ = connection.send(&message, None); // a broken connection shows by itself
            connection.flush();
        }
    }

    /// Answers a question of the server for batch jobs.
    pub(crate) fn tell_jobs(&self, question: u32, jobs: &[CallersJob]) {
        let connection = self.lock().connection.clone();
        if let Some(connection) = connection {
            let mut message = Vec::new();
            let head = NotifyHead { what: NotifyHead::JOBS, flags: 0, tag: question };
            head.put_message(&mut message);
            put_jobs(jobs, &mut message);
            let _ = connection.notify(&message); // who asked waits for a moment only
            connection.flush();
        }
    }

    /// Notifies the server that all that a recall names is forgotten. False without a connection to
    /// the epoch of the server that has sent the recall.
    pub(crate) fn acknowledge_recall(&self, number: u64, session_state: SessionState) -> bool {
        let state = self.lock();
        if state.epoch.session_state != session_state {
            return false;
        }
        let Some(connection) = state.connection.clone() else { return false };
        drop(state);
        let mut message = Vec::new();
        RecallMessage::put_answer(number, &mut message);
        let sent = connection.send(&message, None).is_ok();
        connection.flush();
        sent
    }

    /// The epoch of the server that its connection leads to.
    pub(crate) fn session_state(&self) -> SessionState {
        self.lock().epoch.session_state
    }

    /// Notifies the server that programs store into a shared mapping of this file. It is advice:
    /// without a connection it is lost.
    pub(crate) fn tell_mapped(&self, file: FileId) {
        let connection = self.lock().connection.clone();
        if let Some(connection) = connection {
            let mut message = Vec::new();
            NotifyHead { what: NotifyHead::MAPPED, flags: 0, tag: 0 }.put_message(&mut message);
            file.put(&mut message);
            let _ = connection.notify(&message);
            connection.flush();
        }
    }

    /// Notifies the server that the open files in this range are released.
    pub(crate) fn notify_released(&self, (from, to): (u64, u64)) {
        let connection = self.lock().connection.clone();
        if let Some(connection) = connection {
            let mut message = Vec::new();
            NotifyHead { what: NotifyHead::RELEASED, flags: 0, tag: 0 }.put_message(&mut message);
            (from, to).put(&mut message);
            let _ = connection.send(&message, None); // said again to the next connection
            connection.flush();
        }
    }

    /// Notifies the server that no change is under way in these replay slots.
    pub(crate) fn notify_idle(&self, slots: &[u32]) {
        let connection = self.lock().connection.clone();
        if let Some(connection) = connection.filter(|_| !slots.is_empty()) {
            let mut message = Vec::new();
            let head = NotifyHead { what: NotifyHead::IDLE, flags: 0, tag: slots.len() as u32 };
            head.put_message(&mut message);
            slots.iter().for_each(|slot| slot.put(&mut message));
            let _ = connection.send(&message, None); // said again to the next connection
        }
    }
}

/// Sends closes that found no message to go with; ends when there are none.
async fn send_held_back(channel: Weak<Channel>) {
    loop {
        sleep(HELD_BACK_MAX).await;
        let Some(channel) = channel.upgrade() else { return };
        let mut state = channel.lock();
        if state.held_back.is_empty() {
            state.closer = false;
            return;
        }
        state.send_held_back();
    }
}

impl State {
    pub(super) fn close(&mut self, close: PendingClose) {
        self.sent += 1;
        self.closes.sent(self.sent, close);
        self.held_back.push(close); // as many at most as are noted
    }

    /// Sends the closes that wait. Called before every call: its answer settles closes that were
    /// sent before it.
    pub(super) fn send_held_back(&mut self) {
        if self.held_back.is_empty() || self.rest_from.is_some() {
            return;
        }
        let mut held_back = std::mem::take(&mut self.held_back);
        held_back.drain(..).for_each(|close| self.send_close(close));
        self.held_back = held_back;
    }

    /// Sends or resends a close; without a connection it waits for the next one.
    pub(super) fn send_close(&mut self, PendingClose { handle, .. }: PendingClose) {
        let Some(connection) = self.connection.clone() else { return };
        if !self.one_way_allowed {
            // The server has given way to one of an earlier version. Without a tag it waits for the
            // next connection.
            self.close_with_answer(handle);
            return;
        }
        let (call, identity) =
            (Call::Close { handle }, self.identities.index(&CallerAtNode::itself()));
        if let Some(definition) = self.identities.define(identity) {
            let _ = connection.send(&definition, None); // a failure shows at the next message
        }
        let head = CallHead {
            op: call.op(),
            flags: CallHead::ONE_WAY,
            tag: 0,
            slot: NO_SLOT,
            sequence: 0,
            identity,
            pid: Pid(0),
            umask: 0,
            request: RequestId(0),
        };
        let mut message = std::mem::take(&mut self.one_way);
        message.clear();
        head.put_message(&mut message);
        call.put(&mut message);
        let _ = connection.send(&message, None); // a broken connection shows by itself
        self.one_way = message;
    }

    /// Sends a close again that had been sent as `number`, so that an answer settles it; without a
    /// free tag as it was. Answers whether it will be answered.
    pub(super) fn send_close_again(&mut self, (number, close): (u64, PendingClose)) -> bool {
        let tag = self.close_with_answer(close.handle);
        match tag {
            // The answer settles what was sent before it.
            Some(tag) => self.calls[tag as usize].number = number,
            None => self.send_close(close),
        }
        tag.is_some()
    }

    /// Sends a one-way close again as a call; the answer settles it. None without a free tag.
    fn close_with_answer(&mut self, handle: u64) -> Option<u32> {
        let tag = self.take_tag(TagClass::Needed, &mut None)?;
        let (cx, call) = (Context::system(), Call::Close { handle });
        self.ask(tag, &mut OutgoingCall::of(&cx, &call), self.session);
        let pending = &mut self.calls[tag as usize];
        pending.phase = Phase::Abandoned;
        pending.closes = handle;
        self.closes.called(handle);
        Some(tag)
    }
}

#[cfg(test)]
mod tests {
    use dray_core::{Context, Op};
    use dray_rt::{DriverKind, Executor, spawn};

    use super::*;
    use crate::client::channel::ConnectionEpoch;
    use crate::client::channel::OutgoingCall;
    use crate::client::channel::stalled_peer::StalledPeer;
    use crate::client::holdings::closes::CloseMemory;
    use crate::client::memory::SessionMemory;

    fn connected() -> (Arc<Channel>, Arc<StalledPeer>) {
        let closing = Arc::new(CloseMemory::new(Arc::new(SessionMemory::heap())));
        let (channel, wire) =
            (Channel::new(None, closing, Default::default(), 0), Arc::new(StalledPeer::default()));
        channel.up(wire.clone(), (1, ConnectionEpoch::default()), (8, 8), true);
        (channel, wire)
    }

    fn ask_for_statfs(channel: &Arc<Channel>) {
        let channel = channel.clone();
        spawn(async move {
            let (cx, call) = (Context::system(), Call::Statfs {});
            let _ = channel.call(&mut OutgoingCall::of(&cx, &call), |_| Ok(())).await;
        });
    }

    fn simulate(test: impl Future<Output = ()>) {
        Executor::new(DriverKind::Simulated { seed: 7 }).unwrap().block_on(test);
    }

    #[test]
    fn a_close_goes_out_before_the_next_call() {
        simulate(async {
            let (channel, wire) = connected();
            assert!(channel.close(5) && channel.close(6));
            assert_eq!(wire.sent(), []);
            ask_for_statfs(&channel);
            dray_rt::yield_now().await;
            assert_eq!(wire.sent(), [Op::Close, Op::Close, Op::Statfs]);
            sleep(2 * HELD_BACK_MAX).await;
            assert_eq!(wire.sent().len(), 3, "each once");
        });
    }

    #[test]
    fn a_close_that_nothing_follows_goes_out_alone() {
        simulate(async {
            let (channel, wire) = connected();
            for handle in 1..4 {
                assert!(channel.close(handle));
                sleep(HELD_BACK_MAX * 2).await;
                assert_eq!(wire.sent().len() as u64, handle);
            }
        });
    }

    #[test]
    fn closes_go_out_when_they_must() {
        simulate(async {
            let (channel, wire) = connected();
            channel.send_closes();
            assert!(channel.close(5));
            channel.send_closes();
            assert_eq!(wire.sent(), [Op::Close]);
            sleep(2 * HELD_BACK_MAX).await;
            assert_eq!(wire.sent().len(), 1, "once");
        });
    }

    #[test]
    fn a_new_connection_and_a_farewell_take_it_along() {
        simulate(async {
            let (channel, wire) = connected();
            assert!(channel.close(5));
            channel.notify(NotifyHead::GOODBYE, 0);
            assert_eq!(wire.sent(), [Op::Close]);
            assert!(channel.close(6));
            let next = Arc::new(StalledPeer::default());
            channel.up(next.clone(), (1, ConnectionEpoch::default()), (8, 8), true);
            sleep(2 * HELD_BACK_MAX).await;
            assert_eq!((wire.sent().len(), next.sent()), (1, vec![Op::Close, Op::Close]));
        });
    }

    /// A successor that had not met the server waited for it to close what its predecessor had
    /// open. With a limit, the successor then left those files open for good, with their locks.
    // proves: P71
    #[test]
    fn a_close_before_the_first_connection_goes_out_with_it() {
        simulate(async {
            for one_way in [true, false] {
                let closing = Arc::new(CloseMemory::new(Arc::new(SessionMemory::heap())));
                let channel = Channel::new(None, closing, Default::default(), 1);
                assert!(channel.close(5));
                let wire = Arc::new(StalledPeer::default());
                channel.up(wire.clone(), (1, ConnectionEpoch::default()), (8, 8), one_way);
                assert_eq!(wire.sent(), [Op::Close]);
                assert_eq!(channel.close(6), one_way, "by then it is known");
            }
        });
    }

    /// The last user of a file may be a thread without an executor.
    #[test]
    fn a_close_from_a_foreign_thread_goes_out() {
        let mut executor = Executor::new(DriverKind::Epoll).unwrap();
        executor.block_on(async {
            let (channel, wire) = connected();
            let other = channel.clone();
            assert!(std::thread::spawn(move || other.close(5)).join().unwrap());
            while wire.sent().is_empty() {
                sleep(HELD_BACK_MAX).await;
            }
            assert_eq!(wire.sent(), [Op::Close]);
        });
    }
}
