//! What has just lost a name, for those who had looked it up.
//!
//! A client's kernel asks twice for one system call by path: for the name, and then by what it
//! found for what it is to do. Between the two others may give the name to another file. On one
//! machine the call goes on with what it has found. So here, for a moment: whoever looked a file up
//! finds it by its id, and nobody else does.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{Context, FileId, NodeId, Pid};
use dray_rt::Instant;

use super::nodes::Node;

/// How long before its removal a file may have been looked up, and how long after that it is kept:
/// time for an answer and the next call, over a network and on a busy machine.
const MOMENT: Duration = Duration::from_millis(250);

/// Files kept at once; then the oldest go.
const DEPARTED_MAX: usize = 256;

/// Who is remembered to have looked a file up; where there are more within a moment, everybody is
/// taken to have done so.
const LOOKERS_MAX: usize = 4;

/// A thread of a client, which makes one system call at a time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Asker {
    node: NodeId,
    pid: Pid,
}

impl Asker {
    pub(crate) fn of(cx: &Context) -> Asker {
        Asker { node: cx.origin.node, pid: cx.pid }
    }

    /// A number that hardly anybody else has.
    pub(crate) fn mixed(self) -> u64 {
        (self.node.0 ^ u64::from(self.pid.0) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// Whether it can be told from others: in some containers threads have no numbers.
    fn is_known(self) -> bool {
        self.pid != Pid(0)
    }
}

/// Who has looked a file up within the last moment, and whether it was still there.
#[derive(Default)]
pub(crate) struct Lookers {
    last: [Option<(Asker, Instant)>; LOOKERS_MAX],
    /// When there was somebody for whom there was no place.
    crowd: Option<Instant>,
    gone: bool,
}

fn is_recent(at: Instant, now: Instant) -> bool {
    now - at <= MOMENT
}

impl Lookers {
    /// Notes that `asker` has looked it up. False if it had lost the name before, so that it has to
    /// be looked up again.
    pub(crate) fn add(&mut self, asker: Asker, now: Instant) -> bool {
        if self.gone {
            return false;
        }
        let own = |place: &Option<(Asker, Instant)>| place.is_some_and(|(by, _)| by == asker);
        let free =
            |place: &Option<(Asker, Instant)>| place.is_none_or(|(_, at)| !is_recent(at, now));
        let at = self.last.iter().position(own).or_else(|| self.last.iter().position(free));
        match at.and_then(|at| self.last.get_mut(at)) {
            Some(place) if asker.is_known() => *place = Some((asker, now)),
            _ => self.crowd = Some(now),
        }
        true
    }

    /// What was known by another descriptor of the file.
    pub(crate) fn take_over(&mut self, former: &Lookers) {
        if !former.gone {
            (self.last, self.crowd) = (former.last, former.crowd);
        }
    }

    fn was_crowded(&self, now: Instant) -> bool {
        self.crowd.is_some_and(|at| is_recent(at, now))
    }

    /// Whether `asker` may go on with it.
    pub(crate) fn has(&self, asker: Asker, now: Instant) -> bool {
        // Twice: it may have been kept for a moment since.
        let mut last = self.last.iter().flatten();
        last.any(|(by, at)| *by == asker && now - *at <= 2 * MOMENT)
            || self.crowd.is_some_and(|at| now - at <= 2 * MOMENT)
    }

    /// `asker` has taken its name away. Whether others may be about to use it.
    fn leave(&mut self, asker: Asker, now: Instant) -> bool {
        self.gone = true;
        let mut last = self.last.iter().flatten();
        last.any(|(by, at)| *by != asker && is_recent(*at, now)) || self.was_crowded(now)
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone
    }
}

/// Those that have gone, the oldest first, each with the time until which it is kept.
#[derive(Default)]
pub(crate) struct Departed {
    kept: Mutex<VecDeque<(Instant, Arc<Node>)>>,
    /// As many, for who only wants to know whether there are any.
    len: AtomicUsize,
    /// Somebody sees to their end.
    is_tended: AtomicBool,
}

impl Departed {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(Instant, Arc<Node>)>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `asker` has taken a name of `node` away: it is kept for a moment, if somebody else has
    /// looked it up a moment ago.
    pub(crate) fn add(&self, node: &Arc<Node>, asker: Asker) {
        let now = dray_rt::now();
        if !node.lookers().leave(asker, now) {
            return;
        }
        let mut kept = self.lock();
        kept.push_back((now + MOMENT, node.clone()));
        let _closed_after_the_lock =
            if kept.len() > DEPARTED_MAX { kept.pop_front() } else { None };
        self.len.store(kept.len(), Ordering::Relaxed);
        drop(kept);
    }

    /// The one with this id, if it was looked up by `asker`.
    pub(crate) fn find(&self, id: FileId, asker: Asker) -> Option<Arc<Node>> {
        if self.len.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let now = dray_rt::now();
        // Of one that lost several names there are several descriptors, each with its own askers.
        let there = |(until, node): &(Instant, Arc<Node>)| {
            (*until > now && node.id == id).then(|| node.clone())
        };
        let nodes: Vec<_> = self.lock().iter().rev().filter_map(there).collect();
        nodes.into_iter().find(|node| node.lookers().has(asker, now))
    }

    /// Whether the caller has to see to their end from now on.
    pub(crate) fn is_to_be_tended(&self) -> bool {
        self.len.load(Ordering::Relaxed) > 0 && !self.is_tended.swap(true, Ordering::AcqRel)
    }

    /// Whoever saw to their end does so no more.
    pub(crate) fn is_left(&self) {
        self.is_tended.store(false, Ordering::Release);
    }

    /// When the next one is to go.
    pub(crate) fn next_end(&self) -> Option<Instant> {
        self.lock().front().map(|(until, _)| *until)
    }

    /// Lets those go whose moment is over.
    pub(crate) fn trim(&self) {
        let now = dray_rt::now();
        let mut kept = self.lock();
        let over = kept.iter().take_while(|(until, _)| *until <= now).count();
        let gone: Vec<_> = kept.drain(..over).collect();
        self.len.store(kept.len(), Ordering::Relaxed);
        drop(kept);
        drop(gone); // which may take a while
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asker(pid: u32) -> Asker {
        Asker { node: NodeId(1), pid: Pid(pid) }
    }

    #[test]
    fn it_is_for_those_who_looked_a_moment_ago() {
        let mut lookers = Lookers::default();
        let start = dray_rt::now();
        assert!(lookers.add(asker(1), start) && lookers.add(asker(2), start));
        assert!(!lookers.leave(asker(2), start + 2 * MOMENT), "too long ago");
        assert!(!lookers.add(asker(3), start), "it has gone");
        let mut lookers = Lookers::default();
        lookers.add(asker(1), start);
        assert!(!lookers.leave(asker(1), start), "nobody else");
        assert!(lookers.leave(asker(2), start + MOMENT));
        let later = start + 2 * MOMENT;
        assert!(lookers.has(asker(1), later) && !lookers.has(asker(2), later));
        assert!(!lookers.has(asker(1), later + MOMENT));
    }

    #[test]
    fn a_crowd_is_everybody_and_so_is_who_has_no_number() {
        let start = dray_rt::now();
        let mut lookers = Lookers::default();
        for pid in 1..=LOOKERS_MAX as u32 {
            lookers.add(asker(pid), start);
            lookers.add(asker(pid), start);
        }
        assert!(!lookers.has(asker(99), start));
        lookers.add(asker(98), start);
        assert!(lookers.has(asker(99), start));
        let mut lookers = Lookers::default();
        lookers.add(asker(0), start);
        assert!(lookers.leave(asker(0), start) && lookers.has(asker(0), start));
    }

    #[test]
    fn there_are_so_many_and_no_more() {
        let departed = Departed::default();
        for ino in 0..1000 {
            let node = Arc::new(super::super::nodes::tests::node(ino));
            node.lookers().add(asker(1), dray_rt::now());
            departed.add(&node, asker(2));
        }
        assert_eq!(departed.lock().len(), DEPARTED_MAX);
        assert_eq!(departed.len.load(Ordering::Relaxed), DEPARTED_MAX);
    }
}
