//! Whether what several clients saw of one value could have happened in some order.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;

/// What was done to the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterOp {
    /// A read found this value.
    Read(u64),
    /// A write set this value.
    Write(u64),
}

/// One operation, between two ticks of a clock that never shows the same twice.
#[derive(Clone, Copy, Debug)]
pub struct HistoryEvent<K = RegisterOp> {
    /// When it was asked for.
    pub from: u64,
    /// When it was answered; `u64::MAX` if it never was.
    pub to: u64,
    /// What it was.
    pub kind: K,
    /// The operation need not have happened: nobody got an answer.
    pub optional: bool,
}

/// Most events that one history may have.
pub const EVENTS_MAX: usize = 128;

/// Ways that are looked at before a history is left undecided: some 300 bytes each. Where many
/// events may have happened or not there can be any number.
const WAYS_MAX: usize = 1 << 20;

/// How what is said of a history begins that was left undecided.
pub(super) const UNDECIDED: &str = "undecided, there are too many orders to look through";

/// What is wrong with a history of which this was found.
pub(super) fn judge(explained: Option<bool>, events: &impl Debug) -> Result<(), String> {
    match explained {
        Some(true) => Ok(()),
        Some(false) => Err(format!("no order of these explains them: {events:#x?}")),
        None => Err(format!("{UNDECIDED}: {events:#x?}")),
    }
}

/// Whether there is an order of the events, each at one moment between its two ticks, in
/// which every read finds what was written last. The value is 0 at first. None: as with
/// [`linearizable_from`].
pub fn linearizable(events: &[HistoryEvent]) -> Option<bool> {
    linearizable_from(0, events, |value, kind| match kind {
        RegisterOp::Read(found) => (found == value).then_some(*value),
        RegisterOp::Write(new) => Some(*new),
    })
}

/// The same for any kind of state, which is `first` at first: `apply` answers the state after an
/// event, or none if it could not have happened. The method is that of Wing and Gong 1993 (with the
/// states seen before remembered as by Lowe 2017). None if there are too many orders to find out.
pub fn linearizable_from<S: Clone + Eq + Hash, K>(
    first: S,
    events: &[HistoryEvent<K>],
    apply: impl Fn(&S, &K) -> Option<S>,
) -> Option<bool> {
    search(first, events, apply, WAYS_MAX)
}

/// None after so many ways.
fn search<S: Clone + Eq + Hash, K>(
    first: S,
    events: &[HistoryEvent<K>],
    apply: impl Fn(&S, &K) -> Option<S>,
    ways_max: usize,
) -> Option<bool> {
    assert!(events.len() <= EVENTS_MAX, "a history is too long to be looked at");
    let bits = |optional| {
        let marked = events.iter().enumerate().filter(move |(_, event)| event.optional == optional);
        marked.fold(0u128, |bits, (at, _)| bits | 1 << at)
    };
    let (required, optional) = (bits(false), bits(true));
    // Of two ways to one state the one that took less of what need not have happened has all the
    // choices of the other.
    let mut seen: HashMap<(u128, S), Vec<u128>> = HashMap::new();
    let (mut looked_at, mut next) = (0, vec![(0u128, first)]);
    while let Some((done, state)) = next.pop() {
        let ways = seen.entry((done & required, state.clone())).or_default();
        if ways.iter().any(|way| way & done == *way) {
            continue;
        }
        ways.push(done & optional);
        looked_at += 1;
        if looked_at > ways_max {
            return None;
        }
        let mut left: Vec<usize> = (0..events.len()).filter(|at| done & 1 << at == 0).collect();
        let required = left.iter().filter(|at| !events[**at].optional);
        let Some(deadline) = required.map(|at| events[*at].to).min() else { return Some(true) };
        // What was answered first is tried first, and what need not have happened last.
        left.sort_unstable_by_key(|at| Reverse((events[*at].optional, events[*at].to)));
        for at in left {
            let event = &events[at];
            if event.from > deadline {
                continue;
            }
            next.extend(apply(&state, &event.kind).map(|state| (done | 1 << at, state)));
        }
    }
    Some(false)
}

/// Whether no read finds what an answered write had replaced. Such a write is one that was asked
/// for after the write of what is found, and answered before the read. So is one that another read
/// had found replaced. Weaker than [`linearizable`]: a write that was not answered may be seen, be
/// undone, and be made again.
pub fn nothing_replaced_is_found(events: &[HistoryEvent]) -> bool {
    let writes = || {
        events.iter().filter_map(|event| match event.kind {
            RegisterOp::Write(value) => Some((value, event)),
            RegisterOp::Read(_) => None,
        })
    };
    let reads = || {
        events.iter().filter_map(|event| match event.kind {
            RegisterOp::Read(found) => Some((found, event)),
            RegisterOp::Write(_) => None,
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

    fn event(from: u64, to: u64, kind: RegisterOp) -> HistoryEvent {
        HistoryEvent { from, to, kind, optional: false }
    }

    #[test]
    fn overlapping_events_may_happen_in_either_order_others_not() {
        let write = event(1, 6, RegisterOp::Write(7));
        assert_eq!(
            linearizable(&[
                write,
                event(2, 3, RegisterOp::Read(0)),
                event(4, 5, RegisterOp::Read(7))
            ]),
            Some(true)
        );
        assert_eq!(
            linearizable(&[
                write,
                event(2, 3, RegisterOp::Read(7)),
                event(4, 5, RegisterOp::Read(0))
            ]),
            Some(false)
        );
        assert_eq!(linearizable(&[write, event(7, 8, RegisterOp::Read(0))]), Some(false));
    }

    #[test]
    fn what_was_never_answered_may_have_happened_or_not() {
        let lost = HistoryEvent { optional: true, ..event(1, u64::MAX, RegisterOp::Write(7)) };
        assert_eq!(linearizable(&[lost, event(7, 8, RegisterOp::Read(0))]), Some(true));
        assert_eq!(linearizable(&[lost, event(7, 8, RegisterOp::Read(7))]), Some(true));
        assert_eq!(
            linearizable(&[
                lost,
                event(7, 8, RegisterOp::Read(7)),
                event(9, 10, RegisterOp::Read(0))
            ]),
            Some(false)
        );
    }

    /// Each order is tried, and nothing is remembered.
    fn explained(done: u8, words: &[u64], events: &[HistoryEvent<Word>]) -> bool {
        let left = || (0..events.len()).filter(|at| done & 1 << at == 0);
        let deadline = left().filter(|at| !events[*at].optional).map(|at| events[at].to).min();
        let Some(deadline) = deadline else { return true };
        left().filter(|at| events[*at].from <= deadline).any(|at| {
            let next = happen(words, &events[at].kind);
            next.is_some_and(|words| explained(done | 1 << at, &words, events))
        })
    }

    #[derive(Clone, Debug)]
    enum Word {
        Append(u64),
        Set(u64),
        Read(Vec<u64>),
    }

    fn happen(words: &[u64], word: &Word) -> Option<Vec<u64>> {
        match word {
            Word::Append(word) => Some([words, &[*word]].concat()),
            Word::Set(word) => Some(vec![*word]),
            Word::Read(found) => (*found == words).then(|| words.to_vec()),
        }
    }

    #[test]
    fn what_is_remembered_hides_no_order() {
        let mut seed = 1u64;
        let mut below = |limit: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % limit
        };
        let mut explicable = 0;
        for round in 0..3000 {
            let events: Vec<_> = (0..6)
                .map(|_| {
                    let kind = match below(3) {
                        0 => Word::Append(below(2)),
                        1 => Word::Set(below(2)),
                        _ => Word::Read((0..below(4)).map(|_| below(2)).collect()),
                    };
                    let optional = !matches!(kind, Word::Read(_)) && below(2) == 0;
                    let from = below(12);
                    let to = if optional { u64::MAX } else { from + below(8) };
                    HistoryEvent { from, to, kind, optional }
                })
                .collect();
            let expected = explained(0, &[], &events);
            explicable += usize::from(expected);
            let found = search(vec![], &events, |words, word| happen(words, word), WAYS_MAX);
            assert_eq!(found, Some(expected), "{round}: {events:?}");
        }
        assert!((300..2700).contains(&explicable), "{explicable} of 3000 prove little");
    }

    #[test]
    fn what_takes_too_long_is_left_undecided() {
        let lost =
            |word| HistoryEvent { from: 1, to: u64::MAX, kind: Word::Append(word), optional: true };
        let mut events: Vec<_> = (0..20).map(lost).collect();
        events.push(HistoryEvent { from: 2, to: 3, kind: Word::Read(vec![99]), optional: false });
        assert_eq!(search(vec![], &events, |words, word| happen(words, word), 1000), None);
    }

    #[test]
    fn what_was_replaced_is_not_found_again() {
        let write = |from, value| event(from, from + 1, RegisterOp::Write(value));
        let read = |from, value| event(from, from + 1, RegisterOp::Read(value));
        assert!(nothing_replaced_is_found(&[write(1, 7), read(3, 7), write(5, 8), read(7, 8)]));
        assert!(!nothing_replaced_is_found(&[write(1, 7), write(3, 8), read(5, 7)]));
        let (one, other) = (event(1, 4, RegisterOp::Write(7)), event(2, 3, RegisterOp::Write(8)));
        assert!(nothing_replaced_is_found(&[one, other, read(5, 7), read(7, 7)]));
        assert!(!nothing_replaced_is_found(&[one, other, read(5, 7), read(7, 8)]));
    }
}
