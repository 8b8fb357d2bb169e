//! Closes that were sent one way, without an answer.
//!
//! Whether the server has carried out such a close shows with the next answer on the same
//! connection ([`ReplyHead::SETTLED`](crate::wire::ReplyHead)). Until then the close is kept, also
//! for a later process of this mount, and sent again on each new connection. A number never stands
//! for a second open file, so a close that is repeated does nothing.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::client::memory::{CLOSES_MAX, SessionMemory};

/// The places in a session's memory that hold closes.
pub(crate) struct CloseMemory {
    memory: Arc<SessionMemory>,
    free: Mutex<Vec<u32>>,
}

/// A close that the server may not have carried out yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PendingClose {
    pub(crate) handle: u64,
    place: u32,
}

impl CloseMemory {
    pub(crate) fn new(memory: Arc<SessionMemory>) -> CloseMemory {
        let free = (0..CLOSES_MAX as u32).filter(|place| memory.close(*place) == 0).collect();
        CloseMemory { memory, free: Mutex::new(free) }
    }

    pub(crate) fn memory(&self) -> &SessionMemory {
        &self.memory
    }

    /// The closes that the process before us had sent and not heard of.
    pub(crate) fn inherited(&self) -> Vec<PendingClose> {
        let close = |place| PendingClose { handle: self.memory.close(place), place };
        (0..CLOSES_MAX as u32).map(close).filter(|close| close.handle != 0).collect()
    }

    fn free(&self) -> MutexGuard<'_, Vec<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that `handle` is about to be closed. None if too many are noted already.
    pub(crate) fn note(&self, handle: u64) -> Option<PendingClose> {
        let place = self.free().pop()?;
        self.memory.set_close(place, handle);
        Some(PendingClose { handle, place })
    }

    /// Notes the file that a call may open for a caller that gave up, until the answer comes. If
    /// this process ends before, the next process closes the file. None if most places are taken:
    /// closes need them.
    pub(crate) fn note_unwanted(&self, handle: u64) -> Option<PendingClose> {
        let has_room = self.free().len() > CLOSES_MAX / 2;
        if has_room { self.note(handle) } else { None }
    }

    pub(crate) fn forget(&self, close: PendingClose) {
        self.memory.set_close(close.place, 0);
        self.free().push(close.place);
    }
}

/// The closes sent on one channel, in the order of their sending among its calls.
#[derive(Default)]
pub(crate) struct UnsettledCloses {
    closes: VecDeque<SentClose>,
}

struct SentClose {
    number: u64,
    close: PendingClose,
    /// On the present connection it is a call: answers of others say nothing of it.
    called: bool,
}

impl UnsettledCloses {
    pub(crate) fn sent(&mut self, number: u64, close: PendingClose) {
        self.closes.push_back(SentClose { number, close, called: false });
    }

    /// The close of `handle` is sent as a call, which is answered by itself.
    pub(crate) fn called(&mut self, handle: u64) {
        let found = self.closes.iter_mut().find(|sent| sent.close.handle == handle);
        found.into_iter().for_each(|sent| sent.called = true);
    }

    /// Whether one that is sent as a call has no answer yet.
    pub(crate) fn any_called(&self) -> bool {
        self.closes.iter().any(|sent| sent.called)
    }

    /// A close that was called on a connection is answered on no other one.
    pub(crate) fn connection_ends(&mut self) {
        self.closes.iter_mut().for_each(|sent| sent.called = false);
    }

    /// A call sent as `number` was answered, and all before it that nobody waits for is settled.
    pub(crate) fn settle(&mut self, number: u64, closing: &CloseMemory) {
        let mut at = 0;
        while let Some(sent) = self.closes.get(at)
            && sent.number < number
        {
            if sent.called {
                at += 1;
            } else {
                self.forget(at, closing);
            }
        }
    }

    /// The close of `handle` was answered.
    pub(crate) fn settle_one(&mut self, handle: u64, closing: &CloseMemory) {
        if let Some(at) = self.closes.iter().position(|sent| sent.close.handle == handle) {
            self.forget(at, closing);
        }
    }

    fn forget(&mut self, at: usize, closing: &CloseMemory) {
        self.closes.remove(at).into_iter().for_each(|sent| closing.forget(sent.close));
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, PendingClose)> {
        self.closes.iter().map(|sent| (sent.number, sent.close))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_settled_is_left_to_a_successor() {
        let memory = Arc::new(SessionMemory::heap());
        let closing = CloseMemory::new(memory.clone());
        let mut unsettled = UnsettledCloses::default();
        for handle in 1..=CLOSES_MAX as u64 {
            unsettled.sent(handle, closing.note(handle).unwrap());
        }
        assert_eq!(closing.note(999), None, "there is a limit");
        unsettled.settle(3, &closing);
        assert_eq!(
            unsettled.iter().count(),
            CLOSES_MAX - 2,
            "the second was sent before the third"
        );
        let mut left: Vec<_> =
            CloseMemory::new(memory).inherited().iter().map(|close| close.handle).collect();
        left.sort_unstable();
        assert!(left.into_iter().eq(3..=CLOSES_MAX as u64));
        assert!(closing.note(999).is_some());
    }
}
