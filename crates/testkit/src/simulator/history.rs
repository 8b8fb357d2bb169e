//! Whether what several clients saw of one value could have happened in some order.

use std::collections::HashSet;
use std::hash::Hash;

/// What was done to the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It was found to be this.
    Read(u64),
    /// It was set to this.
    Write(u64),
}

/// One operation, between two ticks of a clock that never shows the same twice.
#[derive(Clone, Copy, Debug)]
pub struct Event<K = Kind> {
    /// When it was asked for.
    pub from: u64,
    /// When it was answered; `u64::MAX` if it never was.
    pub to: u64,
    /// What it was.
    pub kind: K,
    /// It need not have happened: nobody was told that it did.
    pub optional: bool,
}

/// Most events that one history may have.
pub const EVENTS_MAX: usize = 128;

/// Whether there is an order of the events, each at one moment between its two ticks, in
/// which every read finds what was written last. The value is 0 at first.
pub fn linearizable(events: &[Event]) -> bool {
    linearizable_from(0, events, |value, kind| match kind {
        Kind::Read(found) => (found == value).then_some(*value),
        Kind::Write(new) => Some(*new),
    })
}

/// The same for any kind of state, which is `first` at first: `apply` answers the state
/// after an event, or none if it could not have happened (Wing and Gong 1993, with the
/// states seen before remembered as by Lowe 2017).
pub fn linearizable_from<S: Clone + Eq + Hash, K>(
    first: S,
    events: &[Event<K>],
    apply: impl Fn(&S, &K) -> Option<S>,
) -> bool {
    assert!(events.len() <= EVENTS_MAX, "a history is too long to be looked at");
    let mut seen = HashSet::new();
    let mut next = vec![(0u128, first)];
    while let Some((done, state)) = next.pop() {
        if !seen.insert((done, state.clone())) {
            continue;
        }
        let open = |index: &usize| done & 1 << index == 0;
        let left = || (0..events.len()).filter(open);
        let Some(deadline) =
            left().filter(|&at| !events[at].optional).map(|at| events[at].to).min()
        else {
            return true;
        };
        for at in left() {
            let event = &events[at];
            if event.from > deadline {
                continue;
            }
            next.extend(apply(&state, &event.kind).map(|state| (done | 1 << at, state)));
        }
    }
    false
}

/// Whether no read finds what an answered write had replaced: one that was asked for after
/// the write of what is found, and answered before the read; or that another read had found
/// replaced. Weaker than [`linearizable`]: a write that was not answered may be seen, be
/// undone, and be made again.
pub fn nothing_replaced_is_found(events: &[Event]) -> bool {
    let writes = || {
        events.iter().filter_map(|event| match event.kind {
            Kind::Write(value) => Some((value, event)),
            Kind::Read(_) => None,
        })
    };
    let reads = || {
        events.iter().filter_map(|event| match event.kind {
            Kind::Read(found) => Some((found, event)),
            Kind::Write(_) => None,
        })
    };
    // When the write of a value was answered for good.
    let made =
        |value| writes().filter(|(other, _)| *other == value).map(|(_, write)| write.to).max();
    reads().all(|(found, read)| {
        let made_at = made(found).unwrap_or(0);
        let replaced = writes().any(|(_, write)| made_at < write.from && write.to < read.from);
        let turned = reads().any(|(other, before)| {
            let both = made_at < before.from && made(other).unwrap_or(0) < before.from;
            other != found && both && before.to < read.from
        });
        !replaced && !turned
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(from: u64, to: u64, kind: Kind) -> Event {
        Event { from, to, kind, optional: false }
    }

    #[test]
    fn overlapping_events_may_happen_in_either_order_others_not() {
        let write = event(1, 6, Kind::Write(7));
        assert!(linearizable(&[write, event(2, 3, Kind::Read(0)), event(4, 5, Kind::Read(7))]));
        assert!(!linearizable(&[write, event(2, 3, Kind::Read(7)), event(4, 5, Kind::Read(0))]));
        assert!(!linearizable(&[write, event(7, 8, Kind::Read(0))]));
    }

    #[test]
    fn what_was_never_answered_may_have_happened_or_not() {
        let lost = Event { optional: true, ..event(1, u64::MAX, Kind::Write(7)) };
        assert!(linearizable(&[lost, event(7, 8, Kind::Read(0))]));
        assert!(linearizable(&[lost, event(7, 8, Kind::Read(7))]));
        assert!(!linearizable(&[lost, event(7, 8, Kind::Read(7)), event(9, 10, Kind::Read(0))]));
    }

    #[test]
    fn what_was_replaced_is_not_found_again() {
        let write = |from, value| event(from, from + 1, Kind::Write(value));
        let read = |from, value| event(from, from + 1, Kind::Read(value));
        assert!(nothing_replaced_is_found(&[write(1, 7), read(3, 7), write(5, 8), read(7, 8)]));
        assert!(!nothing_replaced_is_found(&[write(1, 7), write(3, 8), read(5, 7)]));
        let (one, other) = (event(1, 4, Kind::Write(7)), event(2, 3, Kind::Write(8)));
        assert!(nothing_replaced_is_found(&[one, other, read(5, 7), read(7, 7)]));
        assert!(!nothing_replaced_is_found(&[one, other, read(5, 7), read(7, 8)]));
    }
}
