//! Requests under way: for interrupts, and for status queries.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{Cancel, Pid, Uid};
use dray_rt::{Instant, now};

use crate::proto::Head;
use crate::proto::abi::{OP_COUNT, UNIQUE_RESEND, op, op_name};

/// Interrupts remembered because they came before their request.
const EARLY_MAX: usize = 256;
/// Flags of ended requests that each worker keeps for later ones.
const CANCELS_MAX: usize = 16;
/// How long they are remembered.
const EARLY_TIME: Duration = Duration::from_secs(10);

/// One request under way, as shown to people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InFlight {
    /// Name of the kernel's operation.
    pub op: &'static str,
    /// The kernel's number of the request.
    pub unique: u64,
    /// The node it is about, or the directory for operations on a name in one.
    pub node: u64,
    /// Where that node was last seen, from the root of the mount on; none if not known.
    pub path: Option<Vec<u8>>,
    /// Caller.
    pub uid: Uid,
    /// Caller's thread.
    pub pid: Pid,
    /// Time since it was taken up.
    pub age: Duration,
}

/// A request under way.
struct Flight {
    head: Head,
    since: Instant,
    cancel: Arc<Cancel>,
    /// Any interrupt ends it.
    interruptible: bool,
    /// A task looks whether the request's caller is about to be killed.
    watched: bool,
}

/// What an interrupt means for the request that it names.
pub(crate) enum InterruptOutcome {
    /// The request has been cancelled, or is not known, which has been noted.
    Done,
    /// The request goes on unless its caller is about to be killed: a task has to look from time to
    /// time until the request ends.
    Watch { unique: u64, pid: Pid },
}

/// What may happen to a caller unheard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LookFor {
    /// A signal while its request waited for an entry of a ring. A caller that waits for the
    /// kernel's FUSE sleeps lightly before a signal and deeply after it.
    Signal,
    /// The caller's end, of which closing its files is a part.
    EndOfClose,
    /// The caller's end. Nothing reports it if the request began without a caller that waits for
    /// it. The same holds if the first signal came while the request waited for an entry.
    End,
}

/// A request whose caller is looked after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WatchedCaller {
    pub(crate) unique: u64,
    pub(crate) pid: Pid,
    pub(crate) age: Duration,
    pub(crate) look_for: LookFor,
}

/// The requests under way on all workers. One part for each worker, so that they do
/// not get in each other's way.
pub(crate) struct Flights {
    parts: Vec<Mutex<Part>>,
    early: Mutex<VecDeque<(u64, Instant)>>,
    early_count: AtomicUsize,
    counts: Vec<Counts>,
}

/// What one worker has done so far.
struct Counts {
    ops: [AtomicU64; OP_COUNT],
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

#[derive(Default)]
struct Part {
    slots: Vec<Option<Flight>>,
    free: Vec<usize>,
    /// Of requests that have ended, for the next ones.
    cancels: Vec<Arc<Cancel>>,
}

/// Names a request under way until it ends.
#[derive(Clone, Copy)]
pub(crate) struct FlightId {
    part: usize,
    slot: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Counts {
    fn new() -> Counts {
        let zero = || AtomicU64::new(0);
        let ops = std::array::from_fn(|_| zero());
        Counts { ops, read_bytes: zero(), written_bytes: zero() }
    }
}

impl Flights {
    pub(crate) fn new(workers: usize) -> Flights {
        Flights {
            parts: (0..workers).map(|_| Mutex::default()).collect(),
            early: Mutex::default(),
            early_count: AtomicUsize::new(0),
            counts: (0..workers).map(|_| Counts::new()).collect(),
        }
    }

    /// A request was taken up by worker `part`; `interruptible` if any signal ends it. Answers
    /// also what an interrupt means for it that another worker received before.
    pub(crate) fn begin(
        &self,
        part: usize,
        head: Head,
        interruptible: bool,
    ) -> (FlightId, Arc<Cancel>, InterruptOutcome) {
        if let Some(count) = self.counts[part].ops.get(head.opcode as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        let since = now();
        let mut requests = lock(&self.parts[part]);
        let cancel = requests.cancels.pop().unwrap_or_default();
        let flight = Flight { head, since, cancel: cancel.clone(), interruptible, watched: false };
        let slot = requests.free.pop().unwrap_or(requests.slots.len());
        if slot == requests.slots.len() {
            requests.slots.push(None);
        }
        requests.slots[slot] = Some(flight);
        drop(requests);
        let interrupted = match self.take_early(head.unique) {
            true => self.find_and_interrupt(head.unique),
            false => None,
        };
        (FlightId { part, slot }, cancel, interrupted.unwrap_or(InterruptOutcome::Done))
    }

    /// The request has been answered.
    pub(crate) fn end(&self, ticket: FlightId) {
        let mut part = lock(&self.parts[ticket.part]);
        let ended = part.slots[ticket.slot].take();
        part.free.push(ticket.slot);
        if let Some(Flight { mut cancel, .. }) = ended
            && part.cancels.len() < CANCELS_MAX
            && let Some(unused) = Arc::get_mut(&mut cancel)
        {
            unused.reset();
            part.cancels.push(cancel);
        }
    }

    /// Worker `part` has answered a read with so many bytes.
    pub(crate) fn has_read(&self, part: usize, bytes: usize) {
        self.counts[part].read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Worker `part` has written so many bytes.
    pub(crate) fn has_written(&self, part: usize, bytes: usize) {
        self.counts[part].written_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes read and written so far.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let sum = |of: fn(&Counts) -> &AtomicU64| {
            self.counts.iter().map(|counts| of(counts).load(Ordering::Relaxed)).sum()
        };
        (sum(|counts| &counts.read_bytes), sum(|counts| &counts.written_bytes))
    }

    /// The kernel says that the caller of `unique` was signalled.
    pub(crate) fn interrupt(&self, unique: u64) -> InterruptOutcome {
        if let Some(result) = self.find_and_interrupt(unique) {
            return result;
        }
        {
            let mut early = lock(&self.early);
            if early.len() >= EARLY_MAX {
                early.pop_front();
            }
            early.push_back((unique & !UNIQUE_RESEND, now()));
            self.early_count.store(early.len(), Ordering::SeqCst);
        }
        // The request may have been taken up between the search and the note.
        self.find_and_interrupt(unique).unwrap_or(InterruptOutcome::Done)
    }

    fn find_and_interrupt(&self, unique: u64) -> Option<InterruptOutcome> {
        self.with(unique, |flight| {
            if flight.interruptible {
                flight.cancel.set();
                return InterruptOutcome::Done;
            }
            match std::mem::replace(&mut flight.watched, true) {
                true => InterruptOutcome::Done,
                false => InterruptOutcome::Watch { unique, pid: flight.head.pid },
            }
        })
    }

    fn with<T>(&self, unique: u64, act: impl FnOnce(&mut Flight) -> T) -> Option<T> {
        let same = |flight: &Flight| (flight.head.unique ^ unique) & !UNIQUE_RESEND == 0;
        for part in &self.parts {
            let mut part = lock(part);
            if let Some(flight) = part.slots.iter_mut().flatten().find(|flight| same(flight)) {
                return Some(act(flight));
            }
        }
        None
    }

    /// Whether `unique` is still under way.
    pub(crate) fn under_way(&self, unique: u64) -> bool {
        self.with(unique, |_| ()).is_some()
    }

    /// Cancels `unique`, if it is still under way.
    pub(crate) fn cancel(&self, unique: u64) {
        self.with(unique, |flight| flight.cancel.set());
    }

    /// Whether anything is under way.
    pub(crate) fn any(&self) -> bool {
        self.parts.iter().any(|part| lock(part).slots.iter().any(Option::is_some))
    }

    /// Requests that have been under way for `age_min` at least and whose callers may have been
    /// killed unheard. Where the kernel says that a file is closed for good nobody waits.
    pub(crate) fn waiting(&self, age_min: Duration) -> Vec<WatchedCaller> {
        let mut list = Vec::new();
        for part in &self.parts {
            let part = lock(part);
            list.extend(part.slots.iter().flatten().filter_map(|flight| {
                let look_for = match flight.head.opcode {
                    _ if flight.interruptible => LookFor::Signal,
                    op::FLUSH => LookFor::EndOfClose,
                    op::RELEASE | op::RELEASEDIR => return None,
                    _ => LookFor::End,
                };
                let Head { unique, pid, .. } = flight.head;
                let waiting = WatchedCaller { unique, pid, age: flight.since.elapsed(), look_for };
                Some(waiting).filter(|waiting| waiting.age >= age_min)
            }));
        }
        list
    }

    fn take_early(&self, unique: u64) -> bool {
        if self.early_count.load(Ordering::SeqCst) == 0 {
            return false;
        }
        let mut early = lock(&self.early);
        while early.front().is_some_and(|(_, at)| at.elapsed() >= EARLY_TIME) {
            early.pop_front(); // the oldest first
        }
        let wanted = unique & !UNIQUE_RESEND;
        let found = early.iter().position(|(early, _)| *early == wanted);
        if let Some(index) = found {
            early.remove(index);
        }
        self.early_count.store(early.len(), Ordering::SeqCst);
        found.is_some()
    }

    /// Everything under way now, oldest first, without paths.
    pub(crate) fn list(&self) -> Vec<InFlight> {
        let mut list = Vec::new();
        for part in &self.parts {
            list.extend(lock(part).slots.iter().flatten().map(|flight| InFlight {
                op: op_name(flight.head.opcode),
                unique: flight.head.unique & !UNIQUE_RESEND,
                node: flight.head.node,
                path: None,
                uid: flight.head.uid,
                pid: flight.head.pid,
                age: flight.since.elapsed(),
            }));
        }
        list.sort_by_key(|flight| std::cmp::Reverse(flight.age));
        list
    }

    /// The callers of what is under way. Not of those who close files, as exec(2) does, which keeps
    /// everybody from looking at them meanwhile.
    pub(crate) fn callers(&self) -> BTreeSet<Pid> {
        let mut callers = BTreeSet::new();
        for part in &self.parts {
            let part = lock(part);
            let heads = part.slots.iter().flatten().map(|flight| &flight.head);
            callers.extend(heads.filter(|head| head.opcode != op::FLUSH).map(|head| head.pid));
        }
        callers.remove(&Pid(0)); // the kernel itself
        callers
    }

    /// Requests taken up so far, by worker.
    pub(crate) fn taken(&self) -> Vec<u64> {
        let sum = |counts: &Counts| counts.ops.iter().map(|op| op.load(Ordering::Relaxed)).sum();
        self.counts.iter().map(sum).collect()
    }

    /// Requests taken up so far, by operation; operations without any are left out.
    pub(crate) fn counts(&self) -> Vec<(&'static str, u64)> {
        let sum = |code: usize| {
            self.counts.iter().map(|counts| counts.ops[code].load(Ordering::Relaxed)).sum::<u64>()
        };
        (0..OP_COUNT)
            .map(|code| (op_name(code as u32), sum(code)))
            .filter(|(_, count)| *count > 0)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_core::Gid;

    fn head(unique: u64) -> Head {
        Head {
            len: 88,
            opcode: op::SETLKW,
            unique,
            node: 5,
            uid: Uid(1),
            gid: Gid(1),
            pid: Pid(77),
            extension_bytes: 0,
        }
    }

    #[test]
    fn an_interrupt_reaches_a_waiting_lock() {
        let flights = Flights::new(2);
        let (ticket, cancel, _) = flights.begin(1, head(10), true);
        assert_eq!(flights.list()[0].op, "setlkw");
        assert!(matches!(flights.interrupt(10), InterruptOutcome::Done));
        assert!(cancel.is_set());
        flights.end(ticket);
        assert!(flights.list().is_empty() && !flights.under_way(10));
    }

    #[test]
    fn an_interrupt_that_overtakes_its_request_is_kept_for_it() {
        let flights = Flights::new(1);
        flights.interrupt(10 | UNIQUE_RESEND);
        let (_, other, _) = flights.begin(0, head(12), true);
        let (_, cancel, _) = flights.begin(0, head(10), true);
        assert!(cancel.is_set() && !other.is_set());
    }

    /// No task looked whether the request's caller was being killed: the kernel does not say it
    /// again.
    #[test]
    fn a_request_that_was_overtaken_is_watched() {
        let flights = Flights::new(1);
        flights.interrupt(10);
        let (_, other, watch) = flights.begin(0, head(12), false);
        assert!(matches!(watch, InterruptOutcome::Done));
        let (_, cancel, watch) = flights.begin(0, head(10 | UNIQUE_RESEND), false);
        assert!(matches!(watch, InterruptOutcome::Watch { pid: Pid(77), .. }));
        assert!(!cancel.is_set() && !other.is_set(), "a harmless signal disturbs nobody");
        assert!(matches!(flights.interrupt(10), InterruptOutcome::Done), "watched once");
    }

    #[test]
    fn an_interrupted_request_leaves_nothing_to_the_next_one() {
        let flights = Flights::new(1);
        let (ticket, cancel, _) = flights.begin(0, head(10), true);
        flights.interrupt(10);
        let held = cancel.clone();
        drop(cancel);
        flights.end(ticket); // somebody still looks at its flag: it is not for the next one
        let (ticket, second, _) = flights.begin(0, head(12), true);
        assert!(held.is_set() && !second.is_set() && !Arc::ptr_eq(&held, &second));
        flights.interrupt(12);
        let memory = Arc::as_ptr(&second);
        drop(second);
        flights.end(ticket);
        let (_, third, _) = flights.begin(0, head(14), true);
        assert!(std::ptr::eq(memory, Arc::as_ptr(&third)) && !third.is_set());
    }

    #[test]
    fn early_interrupts_do_not_pile_up() {
        let flights = Flights::new(1);
        for unique in 0..2 * EARLY_MAX as u64 {
            flights.interrupt(unique);
        }
        assert_eq!(lock(&flights.early).len(), EARLY_MAX);
    }

    // proves: P67
    #[test]
    fn callers_are_looked_after_unless_nobody_waits() {
        let flights = Flights::new(2);
        assert!(!flights.any() && flights.waiting(Duration::ZERO).is_empty());
        let of = |opcode, unique| Head { opcode, ..head(unique) };
        flights.begin(1, of(op::SETLKW, 10), true);
        flights.begin(0, of(op::FLUSH, 12), false);
        flights.begin(0, of(op::RELEASE, 14), false);
        let (ticket, ..) = flights.begin(1, of(op::WRITE, 16), false);
        let mut found: Vec<_> = flights.waiting(Duration::ZERO).into_iter().collect();
        found.sort_by_key(|one| one.unique);
        let found: Vec<_> = found.into_iter().map(|one| (one.unique, one.look_for)).collect();
        let expected = [(10, LookFor::Signal), (12, LookFor::EndOfClose), (16, LookFor::End)];
        assert_eq!(found, expected);
        assert!(flights.waiting(Duration::from_secs(60)).is_empty(), "they have just begun");
        flights.end(ticket);
        assert!(flights.any() && flights.waiting(Duration::ZERO).len() == 2);
    }

    #[test]
    fn other_requests_are_watched_once() {
        let flights = Flights::new(1);
        let (_, cancel, _) = flights.begin(0, head(10), false);
        assert!(matches!(
            flights.interrupt(10),
            InterruptOutcome::Watch { unique: 10, pid: Pid(77) }
        ));
        assert!(matches!(flights.interrupt(10), InterruptOutcome::Done));
        assert!(!cancel.is_set());
        flights.cancel(10);
        assert!(cancel.is_set());
    }
}
