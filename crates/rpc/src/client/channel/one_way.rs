//! What is sent and not answered: closes, which are kept until they are known to be done,
//! and notices.

use dray_core::{Context, Identity, Pid, RequestId};

use super::{Ask, Channel, Phase, State};
use crate::client::closing::Close;
use crate::wire::{Call, CallHead, NO_SLOT, NotifyHead, Wire};

impl Channel {
    /// Closes an open file without waiting for it. False if that cannot be kept until it
    /// is known to be done: then it must be called.
    pub(crate) fn close(&self, handle: u64) -> bool {
        let mut state = self.lock();
        if state.ended.is_some() || !state.one_way_allowed {
            return false;
        }
        let Some(close) = self.closing.note(handle) else { return false };
        state.stats.one_way += 1;
        state.close(close);
        true
    }

    /// Closes what the process before us had closed, perhaps in vain.
    pub(crate) fn inherit(&self) {
        let mut state = self.lock();
        self.closing.inherited().into_iter().for_each(|close| state.close(close));
    }

    /// Says something that needs no answer, if there is a connection.
    pub(crate) fn notify(&self, what: u8, tag: u32) {
        let connection = self.lock().connection.clone();
        if let Some(connection) = connection {
            let mut message = Vec::new();
            NotifyHead { what, flags: 0, tag }.put_message(&mut message);
            let _ = connection.send(&message, None); // a broken connection shows by itself
            connection.flush();
        }
    }

    /// Says which replay slots have nothing under way.
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

impl State {
    fn close(&mut self, close: Close) {
        self.sent += 1;
        self.closes.sent(self.sent, close);
        self.send_close(close);
    }

    /// Sends or resends a close; without a connection it waits for the next one.
    pub(super) fn send_close(&mut self, Close { handle, .. }: Close) {
        let Some(connection) = self.connection.clone() else { return };
        if !self.one_way_allowed {
            return self.close_with_answer(handle);
        }
        let (call, identity) = (Call::Close { handle }, self.identities.index(&Identity::system()));
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

    /// A close that was sent without waiting, now that its server has given way to one of an
    /// earlier version: as a call, whose answer settles it. Without a free tag it waits for
    /// the next connection.
    fn close_with_answer(&mut self, handle: u64) {
        let Some(tag) = self.take_tag(true) else { return };
        let (cx, call) = (Context::system(), Call::Close { handle });
        let (slot, data, into, to) = (None, None, None, None);
        self.ask(tag, Ask { cx: &cx, call: &call, slot, request: 0, data, into, to }, 0);
        let pending = &mut self.calls[tag as usize];
        pending.phase = Phase::Abandoned;
        pending.closes = handle;
    }
}
