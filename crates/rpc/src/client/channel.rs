//! Calls under way on one connection, and on those that follow it.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

use dray_core::{Buf, BufMut, Context, Errno, Error, Identity, Pid, RequestId, Result};
use dray_fabric::{Connection, Sink};
use dray_rt::{Instant, Sleep, sleep, timeout};

use crate::client::closing::{Close, Closing, Unsettled};
use crate::client::file::RemoteFile;
use crate::wire::{
    Call, CallHead, Input, Kind, NO_SLOT, NotifyHead, ReplyHead, Stamp, Wire, peek_tag,
};

/// Identities that a connection remembers; the oldest is redefined for the next.
const IDENTITIES_MAX: usize = 256;

/// How long a server may take to say what came of a lock whose waiter gives up. One that
/// takes longer cannot hear of it: its file system hangs.
const GIVE_UP_MAX: Duration = Duration::from_secs(2);

/// Sends calls and hands out their answers.
pub(crate) struct Channel {
    timeout: Option<Duration>,
    closing: Arc<Closing>,
    /// Its calls are part of a recovery.
    recovery: bool,
    state: Mutex<State>,
}

struct State {
    connection: Option<Arc<dyn Connection>>,
    /// The life of the server's machine that it leads to.
    epoch: u64,
    /// No connection since then; calls fail once this is longer ago than the timeout.
    down_since: Option<Instant>,
    ended: Option<End>,
    calls: Vec<Pending>,
    free: Vec<u32>,
    calls_max: usize,
    /// The session that the connection belongs to.
    session: u64,
    waiting: Vec<Waker>,
    identities: Identities,
    closes: Unsettled,
    /// Number of the message sent last.
    sent: u64,
    /// Where closes are encoded.
    one_way: Vec<u8>,
    stats: ChannelStats,
    /// Wakes the link's task when the channel is shut.
    link: Option<Waker>,
}

/// Why a channel is over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// By us.
    Shut,
    /// By the server's administrator.
    Evicted,
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

/// A call under way; its vectors are kept for the next call with the same tag.
#[derive(Default)]
struct Pending {
    phase: Phase,
    message: Vec<u8>,
    identity: Option<Arc<Identity>>,
    data: Option<Buf>,
    into: Option<BufMut>,
    reply: Vec<u8>,
    /// The life of the server's machine that answered.
    epoch: u64,
    waker: Option<Waker>,
    /// Order of sending, kept over reconnections.
    number: u64,
    /// Its replay slot.
    slot: Option<u32>,
    /// The session that it was sent in; 0: it has not been sent.
    session: u64,
}

#[derive(Default, PartialEq, Eq, Clone, Copy, Debug)]
enum Phase {
    #[default]
    Free,
    /// Waits for its answer.
    Asked,
    Answered,
    /// Failed without an answer from the server.
    Failed(Errno),
    /// The server did not answer in time; about to be abandoned.
    TimedOut,
    /// The caller has gone; the tag is not used again before the answer or a new
    /// connection.
    Abandoned,
}

#[derive(Default)]
struct Identities {
    known: Vec<(Arc<Identity>, bool)>,
    next: usize,
}

/// An answer: what it says, and the buffer given for data.
pub(crate) struct Answer<T> {
    pub(crate) value: T,
    pub(crate) data: Option<BufMut>,
    pub(crate) made: Made,
}

/// When a change was made.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Made {
    /// Its stamp; 0 from a server that gives none.
    pub(crate) stamp: u64,
    /// Where a write went, where that is known.
    pub(crate) at: Option<u64>,
    /// In which life of the server's machine.
    pub(crate) epoch: u64,
}

/// What the server says of a call.
pub(crate) enum Failure {
    /// It failed.
    Error(Error),
    /// The server does not know the open file; the call was not applied.
    UnknownHandle,
}

/// Everything about one call but its result's type.
pub(crate) struct Ask<'a> {
    pub(crate) cx: &'a Context,
    pub(crate) call: &'a Call<'a>,
    /// Replay slot and sequence.
    pub(crate) slot: Option<(u32, u32)>,
    pub(crate) request: u64,
    pub(crate) data: Option<Buf>,
    pub(crate) into: Option<BufMut>,
    /// A second open file that the call names.
    pub(crate) to: Option<&'a RemoteFile>,
}

impl Channel {
    pub(crate) fn new(timeout: Option<Duration>, closing: Arc<Closing>) -> Arc<Channel> {
        Channel::with(timeout, closing, false)
    }

    /// A channel whose calls do not wait for the end of a recovery: they are part of it.
    pub(crate) fn for_recovery(closing: Arc<Closing>) -> Arc<Channel> {
        Channel::with(None, closing, true)
    }

    fn with(timeout: Option<Duration>, closing: Arc<Closing>, recovery: bool) -> Arc<Channel> {
        Arc::new(Channel {
            timeout,
            closing,
            recovery,
            state: Mutex::new(State {
                connection: None,
                epoch: 0,
                down_since: Some(dray_rt::now()),
                ended: None,
                calls: Vec::new(),
                free: Vec::new(),
                calls_max: 1,
                session: 0,
                waiting: Vec::new(),
                identities: Identities::default(),
                closes: Unsettled::default(),
                sent: 0,
                one_way: Vec::new(),
                stats: ChannelStats::default(),
                link: None,
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes an open file without waiting for it. False if that cannot be kept until it
    /// is known to be done: then it must be called.
    pub(crate) fn close(&self, handle: u64) -> bool {
        let mut state = self.lock();
        if state.ended.is_some() {
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

    /// Sends a call and waits for its answer; over reconnections, if need be. The
    /// buffer to read into comes back with a failure too.
    pub(crate) async fn call<T>(
        &self,
        ask: Ask<'_>,
        decode: impl FnOnce(&[u8]) -> std::result::Result<T, crate::wire::Malformed>,
    ) -> std::result::Result<Answer<T>, (Failure, Option<BufMut>)> {
        let cx = ask.cx;
        // A lock may be waited for as long as its holder likes.
        let waits = matches!(ask.call, Call::Lock { wait: true, .. });
        let tag = match self.begin(ask).await {
            Ok(tag) => tag,
            Err((error, into)) => return Err((Failure::Error(error), into)),
        };
        let mut guard = CallGuard { channel: self, tag, told: None, waits };
        match self.timeout.filter(|_| !waits) {
            None => poll_fn(|task| guard.poll(cx, task)).await,
            // A server that is there but does not answer counts as away, too.
            Some(limit) => {
                if timeout(limit, poll_fn(|task| guard.poll(cx, task))).await.is_err() {
                    self.give_up(tag);
                }
            }
        }
        std::mem::forget(guard); // the tag may be another call's as soon as this one is done
        self.finish(tag, decode)
    }

    async fn begin(&self, ask: Ask<'_>) -> std::result::Result<u32, (Error, Option<BufMut>)> {
        let mut ask = Some(ask);
        poll_fn(|task| {
            let mut state = self.lock();
            let context = ask.as_ref().expect("given until it is ready").cx;
            if let Some(error) = state.refusal(self.timeout) {
                let into = ask.take().and_then(|ask| ask.into);
                return Poll::Ready(Err((error, into)));
            }
            if let Some(tag) = state.take_tag() {
                let flags = if self.recovery { CallHead::RECOVERY } else { 0 };
                state.ask(tag, ask.take().expect("given until it is ready"), flags);
                return Poll::Ready(Ok(tag));
            }
            state.waiting.push(task.waker().clone());
            drop(state);
            if context.cancel.as_ref().is_some_and(|cancel| cancel.poll_set(task)) {
                let into = ask.take().and_then(|ask| ask.into);
                return Poll::Ready(Err((Error::retry(Errno::EINTR), into)));
            }
            Poll::Pending
        })
        .await
    }

    /// The server has not answered for too long.
    fn give_up(&self, tag: u32) {
        let mut state = self.lock();
        if let Some(pending) = state.calls.get_mut(tag as usize)
            && pending.phase == Phase::Asked
        {
            pending.phase = Phase::TimedOut;
        }
    }

    fn finish<T>(
        &self,
        tag: u32,
        decode: impl FnOnce(&[u8]) -> std::result::Result<T, crate::wire::Malformed>,
    ) -> std::result::Result<Answer<T>, (Failure, Option<BufMut>)> {
        let mut state = self.lock();
        let Some(pending) = state.calls.get_mut(tag as usize) else {
            return Err((Failure::Error(Error::unknown(Errno::EIO)), None));
        };
        let into = pending.into.take();
        let outcome = match pending.phase {
            Phase::Answered => read_reply(&pending.reply, pending.epoch, decode),
            Phase::Failed(errno) => Err(Failure::Error(Error::unknown(errno))),
            // Interrupted: the answer may still come, and finds nobody.
            phase => {
                let late = phase == Phase::TimedOut;
                pending.phase = Phase::Abandoned;
                pending.data = None;
                let errno = if late { Errno::EHOSTDOWN } else { Errno::EINTR };
                return Err((Failure::Error(Error::unknown(errno)), into));
            }
        };
        state.release(tag);
        match outcome {
            Ok((value, made)) => Ok(Answer { value, data: into, made }),
            Err(failure) => Err((failure, into)),
        }
    }

    /// A connection is up: identities are unknown to it, and calls without an answer are
    /// sent again in the order of their sending. If the server has given up the session in
    /// which they were sent, nobody knows what came of changes, and they fail. `epoch`: the
    /// life of the server's machine.
    pub(crate) fn up(
        &self,
        connection: Arc<dyn Connection>,
        (session, epoch): (u64, u64),
        (calls_max, slots): (u32, u32),
    ) {
        let mut state = self.lock();
        state.session = session;
        let power_lost = std::mem::replace(&mut state.epoch, epoch) != epoch;
        state.connection = Some(connection);
        state.down_since = None;
        state.calls_max = calls_max.max(1) as usize;
        state.identities.known.iter_mut().for_each(|(_, defined)| *defined = false);
        state.stats.connections += 1;
        let mut again: Vec<_> =
            state.closes.iter().map(|(number, close)| (number, Err(close))).collect();
        for tag in 0..state.calls.len() as u32 {
            match state.calls[tag as usize].phase {
                Phase::Asked if state.calls[tag as usize].is_lost(session, slots, power_lost) => {
                    state.fail(tag, Errno::EIO);
                }
                Phase::Asked => again.push((state.calls[tag as usize].number, Ok(tag))),
                Phase::Abandoned => state.release(tag),
                _ => {}
            }
        }
        again.sort_unstable_by_key(|(number, _)| *number);
        for (_, what) in again {
            match what {
                Ok(tag) => {
                    state.stats.resent += 1;
                    state.send(tag);
                }
                Err(close) => state.send_close(close),
            }
        }
        state.wake_callers(); // who has given up says so again
        state.wake_waiting();
    }

    /// The connection is gone.
    pub(crate) fn down(&self) {
        let mut state = self.lock();
        state.connection = None;
        state.down_since.get_or_insert_with(dray_rt::now);
        state.wake_callers(); // who has given up need not wait for the server's return
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
        if let Some(connection) = &state.connection {
            connection.close();
        }
        state.link.take().into_iter().for_each(Waker::wake);
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

    pub(crate) fn stats(&self) -> ChannelStats {
        let state = self.lock();
        let in_flight = state.calls.iter().filter(|call| call.phase == Phase::Asked).count();
        ChannelStats { up: state.connection.is_some(), in_flight: in_flight as u64, ..state.stats }
    }
}

fn read_reply<T>(
    message: &[u8],
    epoch: u64,
    decode: impl FnOnce(&[u8]) -> std::result::Result<T, crate::wire::Malformed>,
) -> std::result::Result<(T, Made), Failure> {
    let mut input = Input(message);
    let malformed = |_| Failure::Error(Error::unknown(Errno::EPROTO).because("malformed answer"));
    let head = ReplyHead::get_message(&mut input).map_err(malformed)?;
    if head.flags & ReplyHead::UNKNOWN_HANDLE != 0 {
        return Err(Failure::UnknownHandle);
    }
    if let Some(error) = head.error() {
        return Err(Failure::Error(error));
    }
    let mut made = Made { epoch, ..Made::default() };
    if head.flags & ReplyHead::STAMPED != 0 {
        let Stamp { number, at } = input.get().map_err(malformed)?;
        made = Made { stamp: number, at: (at != Stamp::NOWHERE).then_some(at), epoch };
    }
    decode(input.0).map(|value| (value, made)).map_err(malformed)
}

impl End {
    fn errno(self) -> Errno {
        match self {
            End::Shut => Errno::ENOTCONN,
            End::Evicted => Errno::ESHUTDOWN,
        }
    }
}

impl Pending {
    /// Whether it is a change that a session now lost may have carried out, or one in a
    /// slot that the new one has not. If the session went with the power of the server's
    /// machine, a change that only sets something is made again, as those are that were
    /// answered and not synced.
    fn is_lost(&self, session: u64, slots: u32, power_lost: bool) -> bool {
        let sent_before = self.session != 0 && self.session != session;
        let unknown = sent_before && !(power_lost && self.sets());
        self.slot.is_some_and(|slot| unknown || slot >= slots)
    }

    /// Whether making it again comes to the same.
    fn sets(&self) -> bool {
        let mut input = Input(&self.message);
        let Ok(head) = CallHead::get_message(&mut input) else { return false };
        match Call::get(head.op, &mut input) {
            Ok(Call::Write { how, .. }) => !how.append,
            Ok(Call::Create { how, .. }) => !how.exclusive,
            Ok(Call::Open { .. } | Call::Setattr { .. } | Call::Setxattr { .. }) => true,
            Ok(Call::Allocate { what: dray_core::Allocate { flags, .. }, .. }) => {
                flags & (libc::FALLOC_FL_COLLAPSE_RANGE | libc::FALLOC_FL_INSERT_RANGE) == 0
            }
            _ => false,
        }
    }
}

impl State {
    /// Why no call can be made now, if so.
    fn refusal(&self, timeout: Option<Duration>) -> Option<Error> {
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

    fn take_tag(&mut self) -> Option<u32> {
        if let Some(tag) = self.free.pop() {
            return Some(tag);
        }
        let tag = self.calls.len();
        if tag >= self.calls_max {
            return None;
        }
        self.calls.push(Pending::default());
        Some(tag as u32)
    }

    fn ask(&mut self, tag: u32, ask: Ask<'_>, flags: u16) {
        let (slot, sequence) = ask.slot.unwrap_or((NO_SLOT, 0));
        let identity = self.identities.index(&ask.cx.who);
        let head = CallHead {
            op: ask.call.op(),
            flags,
            tag,
            slot,
            sequence,
            identity,
            pid: ask.cx.pid,
            umask: ask.cx.umask,
            request: RequestId(ask.request),
        };
        self.stats.calls += 1;
        self.sent += 1;
        let pending = &mut self.calls[tag as usize];
        pending.message.clear();
        head.put_message(&mut pending.message);
        ask.call.put(&mut pending.message);
        pending.phase = Phase::Asked;
        pending.identity = Some(ask.cx.who.clone());
        pending.data = ask.data;
        pending.into = ask.into;
        pending.number = self.sent;
        pending.slot = ask.slot.map(|(slot, _)| slot);
        pending.session = 0;
        pending.waker = None;
        self.send(tag);
    }

    fn close(&mut self, close: Close) {
        self.sent += 1;
        self.closes.sent(self.sent, close);
        self.send_close(close);
    }

    /// Sends or resends a close; without a connection it waits for the next one.
    fn send_close(&mut self, Close { handle, .. }: Close) {
        let Some(connection) = self.connection.clone() else { return };
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

    /// Sends or resends a call; without a connection it waits for the next one.
    fn send(&mut self, tag: u32) {
        let Some(connection) = self.connection.clone() else { return };
        let session = self.session;
        let pending = &mut self.calls[tag as usize];
        pending.session = session;
        let mut sent = Ok(());
        if let Some(who) = &pending.identity {
            let index = self.identities.index(who);
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
            if let Some(who) = &pending.identity {
                self.identities.forget(who);
            }
            pending.phase = Phase::Failed(Errno::E2BIG);
            pending.data = None;
            pending.waker.take().into_iter().for_each(Waker::wake);
        }
    }

    fn release(&mut self, tag: u32) {
        let pending = &mut self.calls[tag as usize];
        pending.phase = Phase::Free;
        pending.data = None;
        pending.into = None;
        pending.waker = None;
        self.free.push(tag);
        if let Some(waker) = self.waiting.pop() {
            waker.wake();
        }
    }

    fn fail(&mut self, tag: u32, errno: Errno) {
        let pending = &mut self.calls[tag as usize];
        pending.phase = Phase::Failed(errno);
        pending.data = None;
        pending.waker.take().into_iter().for_each(Waker::wake);
    }

    fn fail_all(&mut self, errno: Errno) {
        for tag in 0..self.calls.len() as u32 {
            if self.calls[tag as usize].phase == Phase::Asked {
                self.fail(tag, errno);
            }
        }
        self.wake_waiting();
    }

    fn wake_callers(&mut self) {
        for pending in self.calls.iter().filter(|pending| pending.phase == Phase::Asked) {
            pending.waker.iter().for_each(Waker::wake_by_ref);
        }
    }

    fn wake_waiting(&mut self) {
        std::mem::take(&mut self.waiting).into_iter().for_each(Waker::wake);
    }
}

impl Identities {
    /// The number that stands for `who`.
    fn index(&mut self, who: &Arc<Identity>) -> u32 {
        let same = |known: &(Arc<Identity>, bool)| Arc::ptr_eq(&known.0, who) || known.0 == *who;
        if let Some(index) = self.known.iter().position(same) {
            return index as u32;
        }
        if self.known.len() < IDENTITIES_MAX {
            self.known.push((who.clone(), false));
            return self.known.len() as u32 - 1;
        }
        let index = self.next;
        self.next = (self.next + 1) % IDENTITIES_MAX;
        self.known[index] = (who.clone(), false);
        index as u32
    }

    /// The server has not heard of it.
    fn forget(&mut self, who: &Arc<Identity>) {
        let same = self.known.iter_mut().filter(|(known, _)| known == who);
        same.for_each(|(_, defined)| *defined = false);
    }

    /// The message that defines it, unless this connection has had it.
    fn define(&mut self, index: u32) -> Option<Vec<u8>> {
        let (who, defined) = self.known.get_mut(index as usize)?;
        if std::mem::replace(defined, true) {
            return None;
        }
        let mut message = Vec::new();
        Kind::Identity.put(&mut message);
        index.put(&mut message);
        who.put(&mut message);
        Some(message)
    }
}

/// Waits for an answer. If it is dropped before, the tag stays out of use until there is
/// one.
struct CallGuard<'a> {
    channel: &'a Channel,
    tag: u32,
    /// The connection, counted, over which the server was told that the caller gives up,
    /// and until when its answer is awaited.
    told: Option<(u64, Pin<Box<Sleep>>)>,
    /// It waits for a lock.
    waits: bool,
}

impl CallGuard<'_> {
    fn poll(&mut self, cx: &Context, task: &mut TaskContext<'_>) -> Poll<()> {
        let mut state = self.channel.lock();
        let connection = state.connection.clone();
        let number = state.stats.connections;
        let pending = &mut state.calls[self.tag as usize];
        if pending.phase != Phase::Asked {
            return Poll::Ready(());
        }
        match &mut pending.waker {
            Some(waker) => waker.clone_from(task.waker()),
            none => *none = Some(task.waker().clone()),
        }
        drop(state);
        if !cx.cancel.as_ref().is_some_and(|cancel| cancel.poll_set(task)) {
            return Poll::Pending;
        }
        // The caller gives up. What came of a lock is awaited all the same, since only
        // the server knows whether it was granted; other callers are being killed, and
        // need not know.
        let Some(connection) = connection.filter(|_| self.waits) else { return Poll::Ready(()) };
        if self.told.as_ref().is_none_or(|(told, _)| *told != number) {
            let mut message = Vec::new();
            NotifyHead { what: NotifyHead::CANCEL, flags: 0, tag: self.tag }
                .put_message(&mut message);
            let _ = connection.send(&message, None);
            self.told = Some((number, Box::pin(sleep(GIVE_UP_MAX))));
        }
        let late =
            self.told.as_mut().is_some_and(|(_, until)| until.as_mut().poll(task).is_ready());
        if late {
            // Its end is what such a server hears of first when it goes on, and it gives
            // up what was waited for on a connection that has ended. Everything else that
            // was asked for here is asked for again on the next one.
            connection.close();
        }
        if late { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.channel.lock();
        let pending = &mut state.calls[self.tag as usize];
        match pending.phase {
            Phase::Asked => {
                pending.phase = Phase::Abandoned;
                pending.waker = None;
                pending.data = None;
                pending.into = None;
            }
            Phase::Answered | Phase::Failed(_) => state.release(self.tag),
            Phase::Free | Phase::TimedOut | Phase::Abandoned => {}
        }
    }
}

/// Receives for a channel.
pub(crate) struct Receiver(pub(crate) Arc<Channel>);

impl Sink for Receiver {
    fn poll_place(
        &mut self,
        _: &mut TaskContext<'_>,
        head: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        let tag = match peek_tag(head) {
            Ok(tag) => tag,
            Err(malformed) => return Poll::Ready(Err(malformed.into())),
        };
        let mut state = self.0.lock();
        let pending = state.calls.get_mut(tag as usize);
        let into = pending.and_then(|pending| match pending.phase {
            Phase::Asked => pending.into.take(),
            _ => None,
        });
        match into {
            Some(into) if into.room() >= data_bytes => Poll::Ready(Ok(into)),
            // Nobody waits for it any more: it goes nowhere.
            None => Poll::Ready(Ok(BufMut::heap(data_bytes))),
            Some(_) => Poll::Ready(Err(io::Error::from_raw_os_error(libc::EMSGSIZE))),
        }
    }

    fn frame(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()> {
        match crate::wire::peek_kind(head)? {
            Kind::Reply => {}
            _ => return Err(crate::wire::Malformed("a server does not send that").into()),
        }
        let tag = peek_tag(head)?;
        let settled = ReplyHead::get_message(&mut Input(head))?.flags & ReplyHead::SETTLED != 0;
        let mut guard = self.0.lock();
        let state = &mut *guard;
        let epoch = state.epoch;
        let Some(pending) = state.calls.get_mut(tag as usize) else {
            return Err(crate::wire::Malformed("an answer to nothing").into());
        };
        if settled && matches!(pending.phase, Phase::Asked | Phase::Abandoned) {
            state.closes.settle(pending.number, &self.0.closing);
        }
        match pending.phase {
            Phase::Asked => {
                pending.reply.clear();
                pending.reply.extend_from_slice(head);
                if data.is_some() {
                    pending.into = data;
                }
                pending.phase = Phase::Answered;
                pending.epoch = epoch;
                let waker = pending.waker.take();
                drop(guard);
                waker.into_iter().for_each(Waker::wake);
                Ok(())
            }
            Phase::Abandoned => {
                state.release(tag);
                Ok(())
            }
            _ => Err(crate::wire::Malformed("a second answer").into()),
        }
    }
}

/// For callers that have no buffer to lose.
pub(crate) fn error_of((failure, _): (Failure, Option<BufMut>)) -> Error {
    match failure {
        Failure::Error(error) => error,
        Failure::UnknownHandle => Error::new(Errno::ESTALE).because("the server lost an open file"),
    }
}

/// Shorthand for results.
pub(crate) fn value_of<T>(
    result: std::result::Result<Answer<T>, (Failure, Option<BufMut>)>,
) -> Result<T> {
    result.map(|answer| answer.value).map_err(error_of)
}
