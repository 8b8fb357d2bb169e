//! Calls under way: how they are sent, and how they end.

use std::task::Waker;

use dray_core::{Buf, BufMut, Class, Errno, RequestId};
use dray_rt::Instant;

use super::identities::CallerAtNode;
use super::tags::TagClass;
use super::{ConnectionEpoch, OutgoingCall, State};
use crate::client::holdings::closes::PendingClose;
use crate::client::leases::OwnChange;
use crate::client::open_ahead::RightsChange;
use crate::wire::{CallHead, NO_SLOT, ReplyHead, SessionChange};

/// A call under way; its vectors are kept for the next call with the same tag.
#[derive(Default)]
pub(super) struct PendingCall {
    pub(super) phase: Phase,
    pub(super) message: Vec<u8>,
    pub(super) caller: Option<CallerAtNode>,
    pub(super) data: Option<Buf>,
    pub(super) into: Option<BufMut>,
    /// The task that receives into that buffer, which it has meanwhile.
    pub(super) receiver: Option<Waker>,
    /// The head of the answer, before its results; none if that was malformed.
    pub(super) reply_head: Option<ReplyHead>,
    /// The results of its answer, encoded.
    pub(super) results: Vec<u8>,
    /// The connection epoch that answered.
    pub(super) answerer: ConnectionEpoch,
    pub(super) waker: Option<Waker>,
    /// Order of sending, kept over reconnections.
    pub(super) number: u64,
    /// The call's replay slot.
    pub(super) slot: Option<u32>,
    /// The open file that its answer says is closed, if no caller waits for that; 0: none.
    pub(super) closes: u64,
    /// The file that it may have opened, to be closed if no caller takes its answer; 0: none.
    pub(super) opens: u64,
    /// The open file that the call locks or unlocks; 0: none.
    pub(super) locks: u64,
    /// The file that the call may have opened. The note for a later process is made once the caller
    /// has gone.
    pub(super) noted: Option<PendingClose>,
    /// The change of rights that the call makes, until its tag is free again.
    pub(super) changing: Option<RightsChange>,
    /// What the call changes of what may be leased, until it is answered.
    pub(super) change: Option<OwnChange>,
    /// That lasts until its caller has taken the answer, which leases what was made or changed.
    pub(super) leases_change: bool,
    /// When it was first sent, if the session has leases.
    pub(super) sent: Option<Instant>,
    /// The session that it was sent in; 0: it has not been sent.
    pub(super) session: u64,
    /// The only session in which it may be sent, if there is one.
    pub(super) only_in: Option<u64>,
    /// Making it again comes to the same.
    pub(super) sets: bool,
    /// The call was sent on more connections than one.
    pub(super) resent: bool,
    /// The class of its tag; none while the tag is free.
    pub(super) class: Option<TagClass>,
}

/// A file that a call may have opened for a caller that gave up.
pub(super) struct UnwantedFile {
    /// The file's number; 0: nothing.
    pub(super) handle: u64,
    pub(super) noted: Option<PendingClose>,
}

#[derive(Default, PartialEq, Eq, Clone, Copy, Debug)]
pub(super) enum Phase {
    #[default]
    Free,
    /// Waits for its answer.
    Asked,
    Answered,
    /// Failed without an answer from the server.
    Failed(Errno),
    /// The call was never sent in the session in which alone it could be.
    Unsent,
    /// The caller has gone; the tag is not used again before the answer or a new
    /// connection.
    Abandoned,
}

impl PendingCall {
    /// The file to close once the answer has come, or never will.
    pub(super) fn take_unwanted(&mut self) -> UnwantedFile {
        UnwantedFile { handle: self.opens, noted: self.noted.take() }
    }

    /// The caller gave up. The task that receives the answer releases the caller's memory.
    pub(super) fn abandon(&mut self) {
        self.phase = Phase::Abandoned;
        self.receiver.take().into_iter().for_each(Waker::wake);
    }

    /// Whether the call is a change that a lost session may have carried out, or is in a slot that
    /// the new session lacks. The session may have gone with the power of the server's machine.
    /// Then a change that only sets something is made again, as changes are that were answered and
    /// not synced.
    pub(super) fn is_lost(&self, session: u64, slots: u32, power_lost: bool) -> bool {
        let sent_before = self.session != 0 && self.session != session;
        let unknown = sent_before && !(power_lost && self.sets);
        self.slot.is_some_and(|slot| unknown || slot >= slots)
    }
}

impl State {
    /// A tag for a call, as [`Tags::take`].
    pub(super) fn take_tag(&mut self, class: TagClass, place: &mut Option<u64>) -> Option<u32> {
        let tag = self.tags.take(class, place)?;
        if tag as usize == self.calls.len() {
            self.calls.push(PendingCall::default());
        }
        self.calls[tag as usize].class = Some(class);
        Some(tag)
    }

    /// Sends a call that was begun in `session`. Takes its data and buffer out of `ask`.
    pub(super) fn ask(&mut self, tag: u32, ask: &mut OutgoingCall<'_>, session: u64) {
        let (slot, sequence) = ask.slot.unwrap_or((NO_SLOT, 0));
        let caller = CallerAtNode::of(ask.cx, self.node);
        let identity = self.identities.index(&caller);
        let urgency = match ask.cx.class {
            Class::Foreground => 0,
            Class::Background => CallHead::BACKGROUND,
        };
        let head = CallHead {
            op: ask.call.op(),
            flags: ask.flags | urgency,
            tag,
            slot,
            sequence,
            identity,
            pid: ask.cx.pid,
            umask: ask.cx.umask,
            request: RequestId(ask.request),
        };
        self.send_held_back();
        self.stats.calls += 1;
        self.sent += 1;
        let pending = &mut self.calls[tag as usize];
        pending.message.clear();
        head.put_message(&mut pending.message);
        ask.call.put(&mut pending.message);
        pending.phase = Phase::Asked;
        pending.caller = Some(caller);
        pending.data = ask.data.take();
        pending.into = ask.into.take();
        pending.receiver = None;
        pending.number = self.sent;
        pending.slot = ask.slot.map(|(slot, _)| slot);
        pending.sent = None;
        pending.session = 0;
        pending.only_in = ask.looked_at.then_some(session);
        pending.resent = false;
        pending.closes = 0;
        (pending.opens, pending.locks) = match ask.traits.session {
            SessionChange::Opens(opening) => (opening.handle, 0),
            SessionChange::Locks { handle, .. } => (0, handle),
            SessionChange::None | SessionChange::Reopens(_) | SessionChange::Closes(_) => (0, 0),
        };
        pending.sets = ask.traits.sets;
        pending.waker = None;
        self.send(tag);
    }

    /// Sends or resends a call; without a connection it waits for the next one, and for closes that
    /// go before it ([`super::resend`]).
    pub(super) fn send(&mut self, tag: u32) {
        let Some(connection) = self.connection.clone() else { return };
        self.watcher.take().into_iter().for_each(Waker::wake);
        if self.waits_for_closes(self.calls[tag as usize].number) {
            return;
        }
        let session = self.session;
        let pending = &mut self.calls[tag as usize];
        if pending.only_in.is_some_and(|only| only != session) {
            pending.phase = Phase::Unsent;
            pending.data = None;
            return pending.waker.take().into_iter().for_each(Waker::wake);
        }
        pending.session = session;
        let mut sent = Ok(());
        if let Some(caller) = &pending.caller {
            let index = self.identities.index(caller);
            pending.message[CallHead::IDENTITY_AT..CallHead::IDENTITY_AT + 4]
                .copy_from_slice(&index.to_le_bytes());
            if let Some(definition) = self.identities.define(index) {
                sent = connection.send(&definition, None);
            }
        }
        let sent = sent.and_then(|()| connection.send(&pending.message, pending.data.clone()));
        // A connection that broke is noticed by its reader, which sends everything again. But
        // what no message holds (an attribute, a caller's list of groups) never gets there.
        if sent.is_err_and(|error| error.raw_os_error() == Some(libc::EMSGSIZE)) {
            if let Some(caller) = &pending.caller {
                self.identities.forget(caller);
            }
            pending.phase = Phase::Failed(Errno::E2BIG);
            pending.data = None;
            pending.waker.take().into_iter().for_each(Waker::wake);
        }
    }

    /// A call that is sent again may get the answer to its first sending while the rest of it still
    /// waits to go out. Then its caller needs the memory.
    pub(super) fn let_go(&mut self, tag: u32) {
        let pending = &mut self.calls[tag as usize];
        let data = if pending.resent { pending.data.take() } else { None };
        if let Some((connection, data)) = self.connection.as_ref().zip(data) {
            connection.let_go(&data);
        }
    }

    /// The file that a call may have opened that has failed because the server is away, or was
    /// until just now. The answer comes no more.
    pub(super) fn opened_in_vain(&self, tag: u32) -> UnwantedFile {
        let pending = &self.calls[tag as usize];
        let failed = pending.phase == Phase::Failed(Errno::EHOSTDOWN);
        let sent = pending.session != 0;
        UnwantedFile { handle: if failed && sent { pending.opens } else { 0 }, noted: None }
    }

    pub(super) fn release(&mut self, tag: u32) {
        let pending = &mut self.calls[tag as usize];
        let is_answered = std::mem::take(&mut pending.phase) == Phase::Answered;
        pending.data = None;
        pending.into = None;
        pending.receiver = None;
        pending.waker = None;
        pending.changing = None;
        // It was sent, and no answer has come.
        let change = pending.change.take().filter(|_| pending.session != 0 && !is_answered);
        if let Some((change, home)) = change.zip(self.home.as_ref()) {
            home.spawn(change.lingers());
        }
        let pending = &mut self.calls[tag as usize];
        if std::mem::take(&mut pending.locks) != 0 {
            self.unsettled.drain(..).for_each(Waker::wake);
        }
        let pending = &mut self.calls[tag as usize];
        if let Some(class) = pending.class.take() {
            self.tags.give_back(tag, class);
        }
    }

    pub(super) fn fail(&mut self, tag: u32, errno: Errno) {
        let pending = &mut self.calls[tag as usize];
        pending.phase = Phase::Failed(errno);
        pending.data = None;
        pending.waker.take().into_iter().for_each(Waker::wake);
    }

    pub(super) fn fail_all(&mut self, errno: Errno) {
        for tag in 0..self.calls.len() as u32 {
            if self.calls[tag as usize].phase == Phase::Asked {
                self.fail(tag, errno);
            }
        }
        self.tags.wake_all();
    }

    pub(super) fn wake_callers(&mut self) {
        for pending in self.calls.iter().filter(|pending| pending.phase == Phase::Asked) {
            pending.waker.iter().for_each(Waker::wake_by_ref);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context as TaskContext, Poll};

    use dray_core::{Context, Memory, Origin, Write};
    use dray_fabric::Sink;
    use dray_rt::{DriverKind, Executor, spawn_join, yield_now};

    use super::*;
    use crate::client::channel::stalled_peer::StalledPeer;
    use crate::client::channel::{Channel, ReplyReceiver};
    use crate::client::holdings::closes::CloseMemory;
    use crate::client::memory::SessionMemory;
    use crate::wire::{Call, Input, Wire};

    /// Memory that is free once this is set.
    struct Lent(Arc<AtomicBool>);

    impl Memory for Lent {}

    impl Drop for Lent {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    /// The server had carried it out when the first connection broke, and answers on the second at
    /// once. The payload of a ring's entry was kept until that had sent what nobody waited for.
    #[test]
    fn an_answer_during_a_resend_holds_no_memory() {
        static DATA: [u8; 4] = *b"data";
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let closing = Arc::new(CloseMemory::new(Arc::new(SessionMemory::heap())));
            let channel = Channel::new(None, closing, Default::default(), 0);
            channel.up(
                Arc::new(StalledPeer::default()),
                (1, ConnectionEpoch::default()),
                (8, 8),
                true,
            );
            let free = Arc::new(AtomicBool::new(false));
            // SAFETY: the bytes are there for ever, and nobody writes them.
            let data =
                unsafe { Buf::over(NonNull::from(&DATA).cast(), 4, Arc::new(Lent(free.clone()))) };
            let caller = channel.clone();
            let writing = spawn_join(async move {
                let (cx, call) = (Context::system(), Call::Write { handle: 1, how: Write::at(0) });
                let mut ask = OutgoingCall {
                    slot: Some((0, 1)),
                    data: Some(data),
                    ..OutgoingCall::of(&cx, &call)
                };
                caller.call(&mut ask, |bytes| Input::whole::<u32>(bytes)).await.is_ok()
            });
            yield_now().await;
            let second = Arc::new(StalledPeer::default());
            channel.up(second.clone(), (1, ConnectionEpoch::default()), (8, 8), true);
            assert_eq!(second.held(), 1);
            let mut answer = Vec::new();
            ReplyHead::success(0).put_message(&mut answer);
            4u32.put(&mut answer);
            ReplyReceiver(channel.clone()).frame(&answer, None).unwrap();
            assert!(writing.await.unwrap());
            assert!(free.load(Ordering::SeqCst));
        });
    }

    /// The server had stopped in the middle of its answer. A killed process could not end, because
    /// the payload of its ring's entry was kept for the rest.
    #[test]
    fn answers_without_a_caller_hold_no_memory() {
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let closing = Arc::new(CloseMemory::new(Arc::new(SessionMemory::heap())));
            let channel = Channel::new(None, closing, Default::default(), 0);
            channel.up(
                Arc::new(StalledPeer::default()),
                (1, ConnectionEpoch::default()),
                (8, 8),
                true,
            );
            let free = Arc::new(AtomicBool::new(false));
            let memory = NonNull::from(vec![0u8; 4].leak()).cast();
            // SAFETY: the bytes are there for ever, and nobody else uses them.
            let into = unsafe { BufMut::over(memory, 4, Arc::new(Lent(free.clone()))) };
            let cancel = Arc::new(dray_core::Cancel::default());
            let (caller, of_caller) = (channel.clone(), cancel.clone());
            let reading = spawn_join(async move {
                let cx = Context { cancel: Some(of_caller), ..Context::system() };
                let call = Call::Read { handle: 1, at: 0, len_bytes: 4 };
                let mut ask = OutgoingCall { into: Some(into), ..OutgoingCall::of(&cx, &call) };
                caller.call(&mut ask, |bytes| Input::whole::<()>(bytes)).await.is_ok()
            });
            yield_now().await;
            let mut answer = Vec::new();
            ReplyHead::success(0).put_message(&mut answer);
            let (mut receiver, woken) =
                (ReplyReceiver(channel.clone()), Arc::new(Woken::default()));
            let waker = Waker::from(woken.clone());
            let placed = receiver.poll_place(&mut TaskContext::from_waker(&waker), &answer, 4);
            let Poll::Ready(Ok(landing)) = placed else { panic!("there is memory") };
            assert!(receiver.is_awaited(&answer) && !woken.0.load(Ordering::SeqCst));
            cancel.set();
            assert!(!reading.await.unwrap());
            assert!(woken.0.load(Ordering::SeqCst) && !receiver.is_awaited(&answer));
            drop(landing); // as the network does
            assert!(free.load(Ordering::SeqCst));
            receiver.frame(&answer, Some(BufMut::heap(4))).unwrap();
            assert_eq!(channel.stats().in_flight, 0);
        });
    }

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl std::task::Wake for Woken {
        fn wake(self: Arc<Woken>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    /// The session went with the power of the server's machine. A write is made again in the next
    /// one, and by a successor, too; the outcome of an append is unknown.
    // proves: P74
    #[test]
    fn what_is_made_again_in_the_next_session_is_of_that_session() {
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let memory = Arc::new(SessionMemory::heap());
            memory.set_slots(2);
            let channel = Channel::new(
                None,
                Arc::new(CloseMemory::new(memory.clone())),
                Default::default(),
                0,
            );
            channel.up(
                Arc::new(StalledPeer::default()),
                (1, ConnectionEpoch::default()),
                (8, 8),
                true,
            );
            let write = |slot: u32, append| {
                memory.take_slot(slot, 1, Origin { request: RequestId(100), ..Origin::default() });
                memory.lose_slot(slot);
                let caller = channel.clone();
                let how = Write { append, ..Write::at(0) };
                spawn_join(async move {
                    let (cx, call) = (Context::system(), Call::Write { handle: 1, how });
                    let mut ask =
                        OutgoingCall { slot: Some((slot, 1)), ..OutgoingCall::of(&cx, &call) };
                    caller.call(&mut ask, |bytes| Input::whole::<u32>(bytes)).await.is_ok()
                })
            };
            let (_write, append) = (write(0, false), write(1, true));
            while channel.stats().in_flight < 2 {
                yield_now().await;
            }
            let after = ConnectionEpoch { power_epoch: 1, ..ConnectionEpoch::default() };
            channel.up(Arc::new(StalledPeer::default()), (2, after), (8, 8), true);
            assert!(!append.await.unwrap());
            let lost: Vec<bool> = memory.slots().iter().map(|slot| slot.lost).collect();
            assert_eq!(lost, [false, true]);
        });
    }
}
