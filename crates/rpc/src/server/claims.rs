//! A queue for ranges of a file: who came first goes first, and who wants something else goes
//! on beside them.
//!
//! Thousands may wait for one file, the directory that everybody makes files in. An end wakes
//! those whose turn it is by that, nearly always one, and costs the same whoever else waits.

use std::collections::VecDeque;
use std::task::Waker;

use crate::wire::{Input, Malformed, Wire};

/// What of a file or directory is claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// First byte.
    start: u64,
    /// The byte after the last.
    end: u64,
}

impl Span {
    /// Everything: attributes, size, names.
    pub(crate) const ALL: Span = Span { start: 0, end: u64::MAX };

    /// `len` bytes from `at` on.
    pub(crate) fn bytes(at: u64, len: u64) -> Span {
        Span { start: at, end: at.saturating_add(len.max(1)) }
    }

    /// All bytes from `at` on.
    pub(crate) fn from(at: u64) -> Span {
        Span { start: at, end: u64::MAX }
    }

    pub(crate) fn meets(self, other: Span) -> bool {
        self.start < other.end && other.start < self.end
    }

    fn covers(self, other: Span) -> bool {
        self.start <= other.start && other.end <= self.end
    }
}

impl<'a> Wire<'a> for Span {
    fn put(&self, out: &mut Vec<u8>) {
        (self.start, self.end).put(out);
    }
    fn get(input: &mut Input<'a>) -> Result<Span, Malformed> {
        let (start, end) = input.get()?;
        Ok(Span { start, end })
    }
}

/// The claims on one file in the order of their arrival. Nearly always there is one.
pub(crate) struct Claims<T> {
    first: Option<Claim<T>>,
    more: VecDeque<Claim<T>>,
}

struct Claim<T> {
    ticket: u64,
    span: Span,
    stage: Stage<T>,
}

enum Stage<T> {
    /// Behind those before it that want some of the same.
    Waits(Waker),
    /// What is known of it since its turn has come.
    Has(T),
}

impl<T> Default for Claims<T> {
    fn default() -> Claims<T> {
        Claims { first: None, more: VecDeque::new() }
    }
}

impl<T> Claims<T> {
    fn iter(&self) -> impl Iterator<Item = &Claim<T>> {
        self.first.iter().chain(&self.more)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// Whether anybody has some of this, or waits for it.
    pub(crate) fn any_meets(&self, span: Span) -> bool {
        self.iter().any(|claim| claim.span.meets(span))
    }

    /// What is known of those that have had their turn and want some of `span`.
    pub(crate) fn having(&self, span: Span) -> impl Iterator<Item = &T> {
        self.iter().filter_map(move |claim| match &claim.stage {
            Stage::Has(known) if claim.span.meets(span) => Some(known),
            _ => None,
        })
    }

    /// A claim behind all others; `ticket` is greater than theirs.
    pub(crate) fn wait(&mut self, ticket: u64, span: Span) {
        self.push(Claim { ticket, span, stage: Stage::Waits(Waker::noop().clone()) });
    }

    /// A claim that nobody is in the way of.
    pub(crate) fn have(&mut self, ticket: u64, span: Span, known: T) {
        self.push(Claim { ticket, span, stage: Stage::Has(known) });
    }

    fn push(&mut self, claim: Claim<T>) {
        match &mut self.first {
            none @ None => *none = Some(claim),
            Some(_) => self.more.push_back(claim),
        }
    }

    fn find(&mut self, ticket: u64) -> Option<&mut Claim<T>> {
        match &mut self.first {
            Some(first) if first.ticket == ticket => self.first.as_mut(),
            _ => {
                let at = self.more.binary_search_by_key(&ticket, |claim| claim.ticket).ok()?;
                self.more.get_mut(at)
            }
        }
    }

    /// Whether a claim has to wait: somebody before it wants some of the same.
    fn is_barred(&self, ticket: u64, span: Span) -> bool {
        let mut before = self.iter().take_while(|other| other.ticket != ticket);
        before.any(|other| other.span.meets(span))
    }

    /// Gives a claim its turn, if it is its turn; else `waker` is woken then.
    pub(crate) fn try_turn(
        &mut self,
        ticket: u64,
        span: Span,
        waker: &Waker,
        known: impl FnOnce() -> T,
    ) -> bool {
        let barred = self.is_barred(ticket, span);
        if let Some(claim) = self.find(ticket) {
            claim.stage = if barred { Stage::Waits(waker.clone()) } else { Stage::Has(known()) };
        }
        !barred
    }

    /// Takes a claim out. Answers whom to wake: those whose turn it is by that.
    pub(crate) fn remove(&mut self, ticket: u64) -> Vec<Waker> {
        let gone = match &self.first {
            Some(first) if first.ticket == ticket => {
                let next = self.more.pop_front();
                std::mem::replace(&mut self.first, next)
            }
            _ => {
                let at = self.more.binary_search_by_key(&ticket, |claim| claim.ticket).ok();
                at.and_then(|at| self.more.remove(at))
            }
        };
        gone.map_or_else(Vec::new, |gone| self.next_at(gone.span))
    }

    /// Those that wait for some of `span`, and for nobody.
    fn next_at(&self, span: Span) -> Vec<Waker> {
        let mut wakers = Vec::new();
        for claim in self.iter().filter(|claim| claim.span.meets(span)) {
            if let Stage::Waits(waker) = &claim.stage
                && !self.is_barred(claim.ticket, claim.span)
            {
                wakers.push(waker.clone());
            }
            if claim.span.covers(span) {
                break; // all that come behind it, and want some of that, wait for it
            }
        }
        wakers
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

    /// Each end woke all, each of whom looked through all: one operation of a thousand clients
    /// in one directory cost as much as a thousand.
    #[test]
    fn an_end_wakes_whose_turn_it_is_and_nobody_else() {
        const WAITING: u64 = 200;
        let (mut claims, woken) = (Claims::default(), Arc::new(Woken(AtomicUsize::new(0))));
        let waker = Waker::from(woken.clone());
        for ticket in 0..WAITING {
            claims.wait(ticket, Span::ALL);
            assert_eq!(claims.try_turn(ticket, Span::ALL, &waker, || ()), ticket == 0);
        }
        for ticket in 0..WAITING {
            claims.remove(ticket).into_iter().for_each(Waker::wake);
            let left = WAITING - 1 - ticket;
            assert_eq!(woken.0.swap(0, Ordering::SeqCst), left.min(1) as usize);
            let next = ticket + 1;
            assert!(left == 0 || claims.try_turn(next, Span::ALL, &waker, || ()));
        }
        assert!(claims.is_empty());
    }

    /// Against the plainest model: of all that wait, those that nobody before them bars.
    #[test]
    fn any_sequence_wakes_all_whose_turn_it_is() {
        let mut random = 12345u64;
        let mut pick = move |below: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) % below
        };
        for _ in 0..200 {
            let mut claims = Claims::default();
            // Ticket, range, waker's counter, whether it has its turn.
            let mut model: Vec<(u64, Span, Arc<Woken>, bool)> = Vec::new();
            for ticket in 0..40 {
                let span = Span::bytes(pick(12), 1 + pick(12));
                let woken = Arc::new(Woken(AtomicUsize::new(0)));
                claims.wait(ticket, span);
                let has = claims.try_turn(ticket, span, &Waker::from(woken.clone()), || ());
                assert_eq!(has, !model.iter().any(|(_, other, ..)| other.meets(span)));
                model.push((ticket, span, woken, has));
                if pick(3) == 0 {
                    continue;
                }
                let (gone, ..) = model.remove(pick(model.len() as u64) as usize);
                claims.remove(gone).into_iter().for_each(Waker::wake);
                for at in 0..model.len() {
                    let (ticket, span, woken, has) = model[at].clone();
                    let free = !model[..at].iter().any(|(_, other, ..)| other.meets(span));
                    let newly = free && !has;
                    assert_eq!(woken.0.swap(0, Ordering::SeqCst), usize::from(newly));
                    if newly {
                        assert!(claims.try_turn(ticket, span, Waker::noop(), || ()));
                        model[at].3 = true;
                    }
                }
            }
        }
    }
}
