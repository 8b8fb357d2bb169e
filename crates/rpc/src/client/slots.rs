//! Replay slots. Each holds the number of the last change that was sent in it. A slot is in use
//! from the sending of a change until its answer, so that the server needs to remember one answer a
//! slot.
//!
//! A process that takes over from one that died finds the slots that were in use. When the kernel
//! hands it the same request again, the request gets its old slot and number, and the server
//! recognises it. The same holds for slots that were given back: their answers had come, but
//! perhaps had not reached the kernel. The front end passes an answer on before it waits for
//! anything. So a slot is used again only when the thread that gave it back is in another tick of
//! its executor. A thread may lose its CPU in between for as long as the others need to use all
//! slots.

use std::collections::{BTreeSet, VecDeque};
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use dray_core::{Context, Errno, Error, NodeId, Origin, RequestId, Result, Uid};
use dray_rt::{Instant, Tick};

use crate::client::channel::Channel;
use crate::client::memory::{SLOTS_MAX, SessionMemory, SlotState};

/// A used slot is not used again before this many others were, as long as there are slots that were
/// never used. The number is so small that a quiet session touches few slots.
const RESTING_MIN: usize = 8;

/// One slot in so many is for users who have few.
const OF_OTHERS_PART: usize = 8;
/// One in so many is for them, and for changes without data.
const NOT_OF_DATA_PART: usize = 4;
/// Few are one slot in so many.
const FEW_PART: usize = 16;

/// What a slot is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotPurpose {
    /// A change of data. More slots are left for others than by other changes: a kernel makes those
    /// with a directory locked, and others wait for that.
    Data,
    /// Another change.
    Names,
}

/// The calls that the process before us had under way come again within this time, or never.
const ORPHANS_MAX: Duration = Duration::from_secs(5);

/// The slots of one session.
pub(crate) struct ClientSlots {
    memory: Arc<SessionMemory>,
    born: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Slots that were never used.
    fresh: Vec<u32>,
    /// Free slots, the longest free first.
    resting: VecDeque<FreeSlot>,
    /// The calls that the process before us had used free slots for last.
    answered: Vec<SlotState>,
    /// Free slots that are kept at least, as long as there are fresh ones.
    resting_min: usize,
    /// In use when the process before us died, and not asked for again so far.
    orphans: Vec<SlotState>,
    /// Requests that the process before us sent in a session that the server has given
    /// up: their outcome is unknown.
    unknown: Vec<Origin>,
    /// Slots that the server granted.
    count: u32,
    /// Slots in use.
    used: BTreeSet<u32>,
    /// The users of those in use, by number; none: nobody in particular.
    users: Vec<Option<Uid>>,
    /// Slots that were in use when the server came back, and where their end is notified.
    awaited: BTreeSet<u32>,
    notified: Option<Arc<Channel>>,
    waiting: Vec<Waker>,
}

/// A free slot, with the number that was used last in it.
struct FreeSlot {
    number: u32,
    sequence: u32,
    /// The tick in which the slot was given back; none: no executor's.
    tick: Option<Tick>,
}

impl FreeSlot {
    fn new(slot: &SlotState) -> FreeSlot {
        FreeSlot { number: slot.number, sequence: slot.sequence, tick: None }
    }

    /// Whether its answer has been passed on.
    fn is_rested(&self) -> bool {
        self.tick.is_none_or(|tick| tick.is_over())
    }
}

/// A slot in use, with the number of the change it is used for.
pub(crate) struct ReplaySlot {
    pub(crate) number: u32,
    pub(crate) sequence: u32,
    /// Since when it was wanted.
    pub(crate) wanted: Instant,
    home: Arc<ClientSlots>,
}

impl ClientSlots {
    /// The slots noted in `memory`, if a process before us did.
    pub(crate) fn new(memory: Arc<SessionMemory>) -> ClientSlots {
        let (lost, known): (Vec<_>, Vec<_>) =
            memory.slots().into_iter().partition(|slot| slot.lost);
        let (orphans, free): (Vec<_>, Vec<_>) = known.into_iter().partition(|slot| slot.in_use);
        let (fresh, mut answered): (Vec<_>, Vec<_>) =
            free.into_iter().partition(|slot| slot.sequence == 0);
        // The front end counts its requests, so this is the longest free first. All free slots stay
        // free as long as possible, since any may be asked for again.
        answered.sort_by_key(|slot| slot.origin.request);
        let state = State {
            fresh: fresh.iter().rev().map(|slot| slot.number).collect(),
            resting: answered.iter().chain(&lost).map(FreeSlot::new).collect(),
            resting_min: RESTING_MIN + answered.len() + lost.len(),
            answered,
            orphans,
            unknown: lost.iter().map(|slot| slot.origin).collect(),
            count: memory.slots().len() as u32,
            ..State::default()
        };
        ClientSlots { memory, born: dray_rt::now(), state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins with `count` slots, for the first session of a mount.
    pub(crate) fn grant(&self, count: u32) {
        let count = count.min(SLOTS_MAX as u32);
        self.memory.set_slots(count);
        let mut state = self.lock();
        state.count = count;
        state.fresh = (0..count).rev().collect();
        state.resting.clear();
        std::mem::take(&mut state.waiting).into_iter().for_each(Waker::wake);
    }

    /// A new session takes the place of one that the server has given up, with `count`
    /// slots. Slots in use that it has not end with their use. A process after us must not ask
    /// again in the new session what was asked in the old one.
    pub(crate) fn begin_anew(&self, count: u32) {
        let count = count.min(SLOTS_MAX as u32);
        let mut state = self.lock();
        let before = std::mem::take(&mut state.orphans);
        state.resting.extend(before.iter().map(FreeSlot::new));
        let answered = std::mem::take(&mut state.answered);
        state.unknown.extend(before.iter().chain(&answered).map(|slot| slot.origin));
        before.iter().for_each(|slot| self.memory.free_slot(slot.number));
        for slot in self.memory.slots().iter().filter(|slot| slot.sequence != 0) {
            self.memory.lose_slot(slot.number);
        }
        let old = state.count;
        // A slot of a session before the last may be in use still: it comes back by itself.
        let added: Vec<u32> = (old..count).filter(|number| !state.used.contains(number)).collect();
        state.fresh.extend(added.into_iter().rev());
        state.fresh.retain(|number| *number < count);
        state.resting.retain(|slot| slot.number < count);
        state.count = count;
        self.memory.set_slots(count);
        std::mem::take(&mut state.waiting).into_iter().for_each(Waker::wake);
    }

    /// Slots that have been used, and nothing is under way in them.
    pub(crate) fn idle(&self) -> Vec<u32> {
        let state = self.lock();
        let orphans = state.orphans.iter().filter(|_| self.born.elapsed() >= ORPHANS_MAX);
        let orphans = orphans.map(|slot| slot.number);
        state.resting.iter().map(|slot| slot.number).chain(orphans).collect()
    }

    /// Waits until every slot that is in use now has been given back. Each is reported to
    /// the server: whatever it keeps for its repetition, there is none any more.
    pub(crate) fn await_answers(
        self: &Arc<ClientSlots>,
        channel: &Arc<Channel>,
    ) -> impl Future<Output = ()> {
        let mut state = self.lock();
        state.awaited = state.used.clone();
        state.notified = Some(channel.clone());
        // Callers that have given up are not kept: server epochs may be short and many.
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
        // Those that were given back since the server was met. The server before may have answered, and
        // the next one may not know it.
        channel.notify_idle(&self.idle());
        let (slots, channel) = (self.clone(), channel.clone());
        async move {
            if !slots.lock().orphans.is_empty() {
                dray_rt::sleep(ORPHANS_MAX.saturating_sub(slots.born.elapsed())).await;
                channel.notify_idle(&slots.idle());
            }
            poll_fn(|task| {
                let mut state = slots.lock();
                if state.awaited.is_empty() {
                    return Poll::Ready(());
                }
                if !state.waiting.iter().any(|waiting| waiting.will_wake(task.waker())) {
                    state.waiting.push(task.waker().clone());
                }
                Poll::Pending
            })
            .await;
        }
    }

    /// Takes a slot for what began at `origin` (request 0: one that will not come again). Waits
    /// while all are in use but those that are for others. Errors: `EINTR` when cancelled.
    pub(crate) async fn take(
        self: &Arc<ClientSlots>,
        cx: &Context,
        (origin, purpose): (Origin, SlotPurpose),
    ) -> Result<ReplaySlot> {
        let wanted = dray_rt::now();
        poll_fn(|task| {
            let mut state = self.lock();
            if is_known(origin) && state.unknown.contains(&origin) {
                let lost = "the server gave up the session in which this was asked before";
                return Poll::Ready(Err(Error::unknown(Errno::EIO).because(lost)));
            }
            let leaves_enough = state.leaves_enough(cx, origin, purpose);
            if leaves_enough && let Some((number, sequence)) = state.find(origin) {
                state.use_for(number, cx);
                self.memory.take_slot(number, sequence, origin);
                return Poll::Ready(Ok(ReplaySlot {
                    number,
                    sequence,
                    wanted,
                    home: self.clone(),
                }));
            }
            // A tick of an executor ends soon, without a notification.
            match state.resting.is_empty() || !leaves_enough {
                true => state.waiting.push(task.waker().clone()),
                false => task.waker().wake_by_ref(),
            }
            drop(state);
            cx.poll_cancelled(task).map(Err)
        })
        .await
    }
}

/// Whether it can be asked for again.
fn is_known(origin: Origin) -> bool {
    origin.request != RequestId(0)
}

impl State {
    /// A request of another client for which a process before us had made several changes, as a put
    /// does. It is not known which slot was for which change. To make them all again does no harm.
    fn forget_steps_of(&mut self, origin: Origin) {
        let of_it = |slot: &&SlotState| slot.origin == origin;
        if self.orphans.iter().chain(&self.answered).filter(of_it).count() < 2 {
            return; // as good as always none
        }
        let gone = self.orphans.extract_if(.., |slot| slot.origin == origin);
        self.resting.extend(gone.map(|slot| FreeSlot::new(&slot)));
        self.answered.retain(|slot| slot.origin != origin);
    }

    fn use_for(&mut self, number: u32, cx: &Context) {
        self.used.insert(number);
        let place = number as usize;
        if self.users.len() <= place {
            self.users.resize(place + 1, None);
        }
        self.users[place] = (!cx.internal).then_some(cx.who.uid);
    }

    /// Whether the caller's user may take another slot. A server may hold up all changes of one
    /// user, so that some slots are for users who have few (ADR 0048). The steps of one request, and
    /// what was asked for before, wait for nobody.
    fn leaves_enough(&self, cx: &Context, origin: Origin, purpose: SlotPurpose) -> bool {
        let (count, used) = (self.count as usize, self.used.len());
        let part = match purpose {
            SlotPurpose::Data => NOT_OF_DATA_PART,
            SlotPurpose::Names => OF_OTHERS_PART,
        };
        if count.saturating_sub(used) > count / part || cx.internal || cx.steps.is_some() {
            return true; // nearly always
        }
        let is_ours = |number: &&u32| self.users.get(**number as usize) == Some(&Some(cx.who.uid));
        let is_same = |slot: &SlotState| is_known(origin) && slot.origin == origin;
        self.used.iter().filter(is_ours).count() < (count / FEW_PART).max(1)
            || self.orphans.iter().chain(&self.answered).any(is_same)
    }

    fn find(&mut self, origin: Origin) -> Option<(u32, u32)> {
        let same = |slot: &SlotState| is_known(origin) && slot.origin == origin;
        if origin.node != NodeId::OWN && is_known(origin) {
            self.forget_steps_of(origin);
        }
        if let Some(index) = self.orphans.iter().position(same) {
            let orphan = self.orphans.swap_remove(index);
            return Some((orphan.number, orphan.sequence));
        }
        if let Some(index) = self.answered.iter().position(same) {
            let SlotState { number, sequence, .. } = self.answered.swap_remove(index);
            let same = |slot: &FreeSlot| (slot.number, slot.sequence) == (number, sequence);
            let place = self.resting.iter().position(same);
            if let Some(place) = place {
                self.resting.remove(place);
                return Some((number, sequence));
            }
        }
        if self.resting.len() < self.resting_min
            && let Some(number) = self.fresh.pop()
        {
            return Some((number, 1));
        }
        let rested = self.resting.iter().position(FreeSlot::is_rested);
        if let Some(slot) = rested.and_then(|place| self.resting.remove(place)) {
            return Some((slot.number, slot.sequence.wrapping_add(1)));
        }
        if let Some(number) = self.fresh.pop() {
            return Some((number, 1));
        }
        if !self.resting.is_empty() {
            return None; // soon
        }
        // The orphan's request was answered before the process died, or it would have come again.
        let orphan = self.orphans.pop()?;
        Some((orphan.number, orphan.sequence.wrapping_add(1)))
    }
}

impl Drop for ReplaySlot {
    fn drop(&mut self) {
        self.home.memory.free_slot(self.number);
        let mut state = self.home.lock();
        state.used.remove(&self.number);
        if self.number < state.count {
            let (number, sequence) = (self.number, self.sequence);
            state.resting.push_back(FreeSlot { number, sequence, tick: Tick::here() });
        }
        let awaited = state.awaited.remove(&self.number);
        let notified = state.notified.clone().filter(|_| awaited);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        if let Some(channel) = notified {
            channel.notify_idle(&[self.number]);
        }
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_own(request: u64) -> Origin {
        Origin { node: NodeId::OWN, request: RequestId(request) }
    }
    use dray_rt::{DriverKind, Executor};

    /// The slots as a process that died left them: `count` slots, answered in this order.
    fn left(count: u32, requests: &[(u32, u64)]) -> Arc<ClientSlots> {
        let memory = SessionMemory::heap();
        memory.set_slots(count);
        for (number, request) in requests {
            memory.take_slot(*number, 5, of_own(*request));
            memory.free_slot(*number);
        }
        Arc::new(ClientSlots::new(Arc::new(memory)))
    }

    fn take(slots: &Arc<ClientSlots>, request: u64) -> ReplaySlot {
        let mut executor = Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
        executor
            .block_on(slots.take(&Context::system(), (of_own(request), SlotPurpose::Names)))
            .unwrap()
    }

    // proves: P94
    #[test]
    fn an_answer_that_was_not_passed_on_is_found_behind_other_requests() {
        let answered: Vec<(u32, u64)> = (0..12).map(|n| (n, 100 + u64::from(n) * 2)).collect();
        let slots = left(64, &answered);
        let new: Vec<ReplaySlot> = (0..30).map(|n| take(&slots, 200 + n)).collect();
        let again = take(&slots, 100);
        assert_eq!((again.number, again.sequence), (0, 5));
        drop(new);
    }

    /// The thread was not running when the answer had come and the kernel did not have it. Others
    /// used the slot again and again meanwhile, and then the process died.
    // proves: P94
    #[test]
    fn an_answer_that_is_still_being_passed_on_is_found_whatever_others_do_meanwhile() {
        let memory = SessionMemory::create_memfd().unwrap();
        let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
        memory.set_slots(16);
        let slots = Arc::new(ClientSlots::new(Arc::new(memory)));
        let (done, passing) = std::sync::mpsc::channel();
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let other = slots.clone();
        let thread = std::thread::spawn(move || {
            let mut executor = Executor::new(DriverKind::Epoll).unwrap();
            executor.block_on(async {
                let slot = other
                    .take(&Context::system(), (of_own(100), SlotPurpose::Names))
                    .await
                    .unwrap();
                let known = (slot.number, slot.sequence);
                drop(slot);
                done.send(known).unwrap();
                let _ = wait.recv(); // it has no CPU
            });
        });
        let known = passing.recv().unwrap();
        let all = |from: u64| (0..15).map(|n| take(&slots, from + n)).collect::<Vec<ReplaySlot>>();
        (0..20).for_each(|round| drop(all(1000 + round * 100)));
        let successor = Arc::new(ClientSlots::new(Arc::new(SessionMemory::from_fd(fd).unwrap())));
        let again = take(&successor, 100);
        assert_eq!((again.number, again.sequence), known);
        // The task that needs the last slot gets it when the thread goes on.
        let rest = all(9000);
        go_on.send(()).unwrap();
        assert_eq!(take(&slots, 9999).number, known.0);
        thread.join().unwrap();
        drop(rest);
    }

    /// The change may have been made or not: to make it in the next session could be twice.
    // proves: P74
    #[test]
    fn what_was_asked_in_a_session_that_is_over_is_not_asked_in_the_next() {
        let slots = left(4, &[(0, 100), (1, 102)]);
        slots.begin_anew(4);
        let mut executor = Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
        let error = executor
            .block_on(slots.take(&Context::system(), (of_own(100), SlotPurpose::Names)))
            .err()
            .expect("twice");
        assert_eq!((error.errno(), error.fate()), (Errno::EIO, dray_core::Fate::Unknown));
        take(&slots, 104);
    }

    /// The server had forgotten the mount, and the process died before the kernel had heard of the
    /// error. The next process asked again, in the new session, and a change was made twice.
    // proves: P74
    #[test]
    fn what_was_asked_in_a_session_that_is_over_is_known_to_a_successor() {
        let memory = SessionMemory::create_memfd().unwrap();
        let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
        let slots = Arc::new(ClientSlots::new(Arc::new(memory)));
        slots.grant(16);
        let under_way = take(&slots, 100);
        drop(take(&slots, 102)); // answered, and perhaps not passed on
        slots.begin_anew(16);
        let of_next = take(&slots, 104);
        let unknown = |request| {
            let memory = SessionMemory::from_fd(fd.try_clone().unwrap()).unwrap();
            let successor = Arc::new(ClientSlots::new(Arc::new(memory)));
            let mut executor = Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
            let taken = executor.block_on(
                successor.take(&Context::system(), (of_own(request), SlotPurpose::Names)),
            );
            taken.err().is_some_and(|error| error.errno() == Errno::EIO)
        };
        assert!(unknown(100) && unknown(102) && !unknown(104));
        drop((under_way, of_next));
        assert!(unknown(100) && !unknown(104), "the error may not have been passed on");
    }

    #[test]
    fn a_slot_in_use_over_two_sessions_is_not_given_out_twice() {
        let slots = left(2, &[]);
        let taken = [take(&slots, 100), take(&slots, 102)];
        slots.begin_anew(1);
        slots.begin_anew(2);
        drop(taken);
        let again = [take(&slots, 104), take(&slots, 106)];
        assert_ne!(again[0].number, again[1].number);
        assert!(slots.lock().find(of_own(108)).is_none());
    }

    #[test]
    fn without_fresh_slots_the_longest_free_is_used_first() {
        let slots = left(3, &[(0, 106), (1, 102), (2, 104)]);
        let order: Vec<u32> = (0..2).map(|n| take(&slots, 200 + n)).map(|s| s.number).collect();
        assert_eq!(order, [1, 2]);
        assert_eq!(take(&slots, 106).number, 0);
    }
}
