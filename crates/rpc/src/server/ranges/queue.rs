//! A queue for ranges of a file, first come, first served. A caller that wants another range, or
//! may share the range in use, goes on beside those that wait.
//!
//! Thousands may wait for one file, the directory that everybody makes files in. A release wakes
//! the requests that can be granted, nearly always one. Its cost does not depend on the other
//! requests.

use std::collections::VecDeque;
use std::task::Waker;

use super::Span;

/// When somebody came to the queues of a file. Later ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Arrival(pub(super) u64);

/// How a range is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RangeAccess {
    /// Beside others who share it.
    Shared,
    /// By nobody else.
    Exclusive,
}

/// The range of a file that a call wants, and the kind of use.
#[derive(Clone, Copy, Debug)]
pub(super) struct RangeRequest {
    pub(super) span: Span,
    pub(super) access: RangeAccess,
}

impl RangeRequest {
    pub(super) fn exclusive(span: Span) -> RangeRequest {
        RangeRequest { span, access: RangeAccess::Exclusive }
    }

    pub(super) fn shared(span: Span) -> RangeRequest {
        RangeRequest { span, access: RangeAccess::Shared }
    }

    fn is_exclusive(self) -> bool {
        self.access == RangeAccess::Exclusive
    }

    /// Whether both cannot have what they want at once.
    fn excludes(self, other: RangeRequest) -> bool {
        (self.is_exclusive() || other.is_exclusive()) && self.span.meets(other.span)
    }
}

/// The grants for ranges of one file, and the calls that wait for them, in the order of their
/// arrival.
pub(super) struct RangeQueue<T> {
    entries: VecDeque<Entry<T>>,
    /// Entries that exclude all others. Where there are none nobody waits.
    exclusive: usize,
}

struct Entry<T> {
    arrival: Arrival,
    want: RangeRequest,
    stage: Stage<T>,
}

enum Stage<T> {
    /// The request waits behind the requests before it that exclude it.
    Waits(Waker),
    /// The caller has its range, and this is known of it.
    Has(T),
}

impl<T> Default for RangeQueue<T> {
    fn default() -> RangeQueue<T> {
        RangeQueue { entries: VecDeque::new(), exclusive: 0 }
    }
}

impl<T> RangeQueue<T> {
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Entries that there is memory for.
    pub(super) fn capacity(&self) -> usize {
        self.entries.capacity()
    }

    /// Whether anybody has some of `span` for himself, or waits for it.
    pub(super) fn any_excludes(&self, span: Span) -> bool {
        let mut entries = self.entries.iter();
        self.exclusive > 0
            && entries.any(|entry| entry.want.is_exclusive() && entry.want.span.meets(span))
    }

    /// Whether anybody has a part for himself, or waits for one.
    pub(super) fn any_exclusive(&self) -> bool {
        self.exclusive > 0
    }

    /// The knowledge of the holders of some of `span`.
    pub(super) fn having(&self, span: Span) -> impl Iterator<Item = &T> {
        self.entries.iter().filter_map(move |entry| match &entry.stage {
            Stage::Has(known) if entry.want.span.meets(span) => Some(known),
            Stage::Has(_) | Stage::Waits(_) => None,
        })
    }

    /// Comes behind all others; `arrival` is later than theirs. Answers whether it has what it
    /// wants: else it is to be asked for by [`RangeQueue::poll`].
    pub(super) fn enter(
        &mut self,
        arrival: Arrival,
        want: RangeRequest,
        known: impl FnOnce() -> T,
    ) -> bool {
        let barred = self.is_barred(self.entries.len(), want);
        let stage = match barred {
            true => Stage::Waits(Waker::noop().clone()),
            false => Stage::Has(known()),
        };
        self.push(Entry { arrival, want, stage });
        !barred
    }

    /// Takes a range without a check for conflicts; the caller has made sure that there are none.
    pub(super) fn have(&mut self, arrival: Arrival, want: RangeRequest, known: T) {
        self.push(Entry { arrival, want, stage: Stage::Has(known) });
    }

    fn push(&mut self, entry: Entry<T>) {
        self.exclusive += usize::from(entry.want.is_exclusive());
        self.entries.push_back(entry);
    }

    /// Entries are in the order of their arrival.
    fn position(&self, arrival: Arrival) -> Option<usize> {
        self.entries.binary_search_by_key(&arrival, |entry| entry.arrival).ok()
    }

    /// Whether somebody among the first `before` excludes this.
    fn is_barred(&self, before: usize, want: RangeRequest) -> bool {
        if !want.is_exclusive() && self.exclusive == 0 {
            return false; // nearly always
        }
        self.entries.iter().take(before).any(|other| other.want.excludes(want))
    }

    /// Grants a waiting request, if no request before it is in its way. Otherwise `waker` is woken
    /// when that is so.
    pub(super) fn poll(
        &mut self,
        arrival: Arrival,
        waker: &Waker,
        known: impl FnOnce() -> T,
    ) -> bool {
        let at = self.position(arrival).expect("it is taken out by its own end alone");
        let barred = self.is_barred(at, self.entries[at].want);
        self.entries[at].stage = match barred {
            true => Stage::Waits(waker.clone()),
            false => Stage::Has(known()),
        };
        !barred
    }

    /// Takes one out. Adds to `wakers` those that can go on by that.
    pub(super) fn remove(&mut self, arrival: Arrival, wakers: &mut Vec<Waker>) {
        let at = self.position(arrival).expect("it is taken out once");
        let Some(gone) = self.entries.remove(at) else { return };
        self.exclusive -= usize::from(gone.want.is_exclusive());
        if at < self.entries.len() {
            self.wake_behind(at, gone.want, wakers);
        }
    }

    /// The requests from `first` on that waited for `gone` alone.
    fn wake_behind(&self, first: usize, gone: RangeRequest, wakers: &mut Vec<Waker>) {
        let exclusive = |entry: &&Entry<T>| entry.want.is_exclusive();
        let mut exclusive_before = self.entries.iter().take(first).filter(exclusive).count();
        for (at, entry) in self.entries.iter().enumerate().skip(first) {
            let want = entry.want;
            if let Stage::Waits(waker) = &entry.stage
                && want.excludes(gone)
                && (exclusive_before == 0 && !want.is_exclusive() || !self.is_barred(at, want))
            {
                wakers.push(waker.clone());
            }
            if want.is_exclusive() && want.span.covers(gone.span) {
                break; // all that come behind it, and want some of that, wait for it
            }
            exclusive_before += usize::from(want.is_exclusive());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Woken>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn woken() -> (Arc<Woken>, Waker) {
        let woken = Arc::new(Woken(AtomicUsize::new(0)));
        (woken.clone(), Waker::from(woken))
    }

    fn remove(queue: &mut RangeQueue<()>, arrival: u64) -> usize {
        let mut wakers = Vec::new();
        queue.remove(Arrival(arrival), &mut wakers);
        let count = wakers.len();
        wakers.into_iter().for_each(Waker::wake);
        count
    }

    fn enter(queue: &mut RangeQueue<()>, arrival: u64, want: RangeRequest) -> bool {
        queue.enter(Arrival(arrival), want, || ())
    }

    // proves: P17
    #[test]
    fn only_overlapping_writes_exclude() {
        let mut queue = RangeQueue::default();
        let (shared, exclusive) = (RangeRequest::shared, RangeRequest::exclusive);
        assert!(enter(&mut queue, 0, shared(Span::bytes(0, 100))));
        assert!(enter(&mut queue, 1, shared(Span::bytes(50, 100))));
        assert!(!enter(&mut queue, 2, exclusive(Span::bytes(99, 1))));
        assert!(enter(&mut queue, 3, exclusive(Span::bytes(150, 1))));
        assert_eq!(remove(&mut queue, 0), 0, "one of two who share it has gone");
        assert_eq!(remove(&mut queue, 1), 1);
        assert!(queue.poll(Arrival(2), Waker::noop(), || ()));
        assert!(!enter(&mut queue, 4, shared(Span::ALL)));
        assert_eq!(remove(&mut queue, 2), 0, "it waits for another one, too");
        assert_eq!(remove(&mut queue, 3), 1);
        assert!(queue.poll(Arrival(4), Waker::noop(), || ()));
        assert_eq!(remove(&mut queue, 4), 0);
        assert!(queue.is_empty() && !queue.any_exclusive());
    }

    #[test]
    fn a_later_request_does_not_overtake_a_waiting_one() {
        let mut queue = RangeQueue::default();
        let read = RangeRequest::shared(Span::bytes(0, 10));
        assert!(enter(&mut queue, 0, read));
        assert!(!enter(&mut queue, 1, RangeRequest::exclusive(Span::bytes(0, 10))));
        assert!(!enter(&mut queue, 2, read), "a writer waits before it");
        assert!(queue.any_excludes(Span::bytes(9, 5)) && !queue.any_excludes(Span::bytes(10, 5)));
        assert_eq!(remove(&mut queue, 0), 1);
        // A request that was given up blocks no other.
        assert_eq!(remove(&mut queue, 1), 1);
        assert!(queue.poll(Arrival(2), Waker::noop(), || ()));
    }

    /// Each end woke all, each of whom looked through all: one operation of a thousand clients
    /// in one directory cost as much as a thousand.
    // proves: P129
    #[test]
    fn a_release_wakes_the_next_request_and_no_other() {
        const WAITING: u64 = 200;
        let (mut queue, (woken, waker)) = (RangeQueue::default(), woken());
        for arrival in 0..WAITING {
            let has = enter(&mut queue, arrival, RangeRequest::exclusive(Span::ALL));
            assert_eq!(has, arrival == 0);
            assert!(has || !queue.poll(Arrival(arrival), &waker, || ()));
        }
        for arrival in 0..WAITING {
            remove(&mut queue, arrival);
            let left = WAITING - 1 - arrival;
            assert_eq!(woken.0.swap(0, Ordering::SeqCst), left.min(1) as usize);
            assert!(left == 0 || queue.poll(Arrival(arrival + 1), &waker, || ()));
        }
        assert!(queue.is_empty());
    }

    #[test]
    fn the_end_of_a_write_wakes_all_readers_of_its_range() {
        const READING: u64 = 200;
        let (mut queue, (woken, waker)) = (RangeQueue::default(), woken());
        assert!(enter(&mut queue, 0, RangeRequest::exclusive(Span::ALL)));
        for arrival in 1..=READING {
            assert!(!enter(&mut queue, arrival, RangeRequest::shared(Span::bytes(arrival, 10))));
            assert!(!queue.poll(Arrival(arrival), &waker, || ()));
        }
        remove(&mut queue, 0);
        assert_eq!(woken.0.load(Ordering::SeqCst), READING as usize);
    }

    /// Against the plainest model: of all that wait, those that nobody before them excludes.
    // proves: P129
    #[test]
    fn any_sequence_wakes_exactly_the_requests_that_can_be_granted() {
        let mut random = 12345u64;
        let mut pick = move |below: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) % below
        };
        for round in 0..400 {
            let mut queue = RangeQueue::default();
            // Arrival, what is wanted, waker's counter, whether it has it.
            let mut model: Vec<(u64, RangeRequest, Arc<Woken>, bool)> = Vec::new();
            for arrival in 0..40 {
                let span = Span::bytes(pick(12), 1 + pick(12));
                let shares = round % 2 == 0 && pick(2) == 0;
                let want =
                    if shares { RangeRequest::shared(span) } else { RangeRequest::exclusive(span) };
                let (woken, waker) = woken();
                let has = enter(&mut queue, arrival, want);
                assert_eq!(has, has || queue.poll(Arrival(arrival), &waker, || ()));
                assert_eq!(has, !model.iter().any(|(_, other, ..)| other.excludes(want)));
                model.push((arrival, want, woken, has));
                if pick(3) == 0 {
                    continue;
                }
                let (gone, ..) = model.remove(pick(model.len() as u64) as usize);
                remove(&mut queue, gone);
                for at in 0..model.len() {
                    let (arrival, want, woken, has) = model[at].clone();
                    let free = !model[..at].iter().any(|(_, other, ..)| other.excludes(want));
                    assert_eq!(woken.0.swap(0, Ordering::SeqCst), usize::from(free && !has));
                    if free && !has {
                        assert!(queue.poll(Arrival(arrival), Waker::noop(), || ()));
                        model[at].3 = true;
                    }
                }
            }
        }
    }
}
